"""The benchmark for the day a GPU is at hand: that it runs, and can say that a probe is wrong. No time is looked at."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "scripts" / "gpu_bench.py"


def bench(
    written: pathlib.Path, *options: str, **variables: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), "--platform", "npu", "--simulate", "--quick", "--json", str(written)]
    path = os.pathsep.join([str(SCRIPT.parent.parent), os.environ.get("PYTHONPATH", "")])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MULTIASSERT")}
    run = subprocess.run(
        [*command, *options],
        env={**inherited, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return run, json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}


def test_on_a_simulated_device_it_checks_and_measures_and_says_that_times_mean_nothing(tmp_path: pathlib.Path) -> None:
    run, found = bench(tmp_path / "bench.json")
    assert run.returncode == 0, run.stdout + run.stderr
    assert (found["platform"], found["simulated"], found["times_mean_something"]) == ("npu", True, False)
    assert "mean nothing" in run.stdout
    assert run.stdout.rstrip().endswith("┘"), "the table comes last"
    assert {each["result"] for each in found["exactness"]} == {"exact"}
    checked = {each["check"].split()[0] for each in found["exactness"]}
    assert checked == {"nan", "inf", "range", "out", "page"}
    assert {row["way"] for row in found["rows"]} == {"eager", "replayed"}
    for row in found["rows"]:
        assert set(row["microseconds"]["ours"]) == {"median", "low", "high"}, row
        if row["way"] == "eager":
            assert set(row["ratios"]) == {"plain torch"}
        else:
            assert row["bandwidth_share"] is not None
            assert any("plain torch" in note and "capturing" in note for note in row["notes"]), "it waits on npu"


def test_without_time_it_still_checks_and_the_exit_code_tells_of_a_silent_probe(tmp_path: pathlib.Path) -> None:
    run, found = bench(tmp_path / "bench.json", "--budget", "0", MULTIASSERT_TEST_SILENT="1")
    assert run.returncode == 1, run.stdout + run.stderr
    assert {each["result"] for each in found["exactness"]} == {"wrong"}
    assert {tuple(row["notes"]) for row in found["rows"]} == {("out of time",)}
    assert "expected [('nan', (0,), 'any')]" in run.stdout
