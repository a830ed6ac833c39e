"""The script for the day a GPU is at hand: that it runs, and that each of its checks can say no."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from conftest import ChildRun
from multiassert.simulate import compiled

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "scripts" / "gpu_check.py"

# What takes a real device, or a vendor's assert. Anything else must run on a simulated npu.
NOT_SIMULATED = {
    "memory of a NaN probe",
    "native: eager",
    "native: captured",
    "native: compiled",
    "compiled: one fused kernel",
    "compiled: CUDA graphs",
    "captured: make_graphed_callables",
    "ranks: all raise for one",
    *(() if compiled._compiler() else ("two devices",)),
}

# Every check that can run on a simulated npu, under each mutation of the probes, in one process.
MUTATED = """
import json, sys, torch
import gpu_check, multiassert

original = multiassert.maybe_detect_nan

def waiting(tensor, *args, **masks):
    tensor.sum().item()
    original(tensor, *args, **masks)

def loud(tensor, *args, **masks):
    original(torch.full_like(tensor, float("nan")), *args, **masks)

def last_row_only(tensor, *args, **masks):
    original(tensor[-1:], *args, **masks)

gpu_check.in_processes = lambda *calls: [("exit code 0", "")] * len(calls)  # what silent processes come to
results = {}
for name, mutation in {"silent": None, "waiting": waiting, "loud": loud, "other row": last_row_only}.items():
    if mutation is None:
        gpu_check.probes = lambda mode: multiassert.override("off")
    else:
        gpu_check.probes = multiassert.override
        multiassert.maybe_detect_nan = mutation
    slow = {None: (), waiting: ("compiled",)}.get(mutation, ("compiled", "pinned"))
    chosen = [each for each in gpu_check.CHECKS if not each.startswith(slow)]
    results[name] = {each: gpu_check.attempt(each, "npu", True)[0].__dict__ for each in chosen}
print(json.dumps(results))
"""


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    return module


def test_on_a_simulated_device_every_check_says_yes_or_why_it_is_not_here(tmp_path: pathlib.Path) -> None:
    written = tmp_path / "results.json"
    # The budget is for a GPU: a busy machine may take longer here.
    options = ["--platform", "npu", "--simulate", "--budget", "1000", "--json", str(written)]
    command = [sys.executable, str(SCRIPT), *options]
    path = os.pathsep.join([str(SCRIPT.parent.parent), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    checks = json.loads(written.read_text(encoding="utf-8"))["checks"]
    assert {each["check"] for each in checks if each["result"] == "not here"} == NOT_SIMULATED
    assert [each for each in checks if each["result"] not in ("yes", "not here") or not each["seen"]] == []
    assert run.stdout.rstrip().endswith("┘"), "the table comes last"
    assert all(each["check"].split()[0] in run.stdout for each in checks)


def test_each_check_says_no_where_the_probes_are_wrong(run_child: ChildRun) -> None:
    path = os.pathsep.join([str(SCRIPT.parent), str(SCRIPT.parent.parent), os.environ.get("PYTHONPATH", "")])
    child = run_child(MUTATED, PYTHONPATH=path)
    assert child.returncode == 0, child.stderr
    results: dict[str, dict[str, dict[str, Any]]] = json.loads(child.stdout.splitlines()[-1])

    def yes(mutation: str) -> set[str]:
        return {name for name, each in results[mutation].items() if each["result"] == "yes"}

    assert yes("silent") == {"versions"}
    silent = [each for each in results["silent"].values() if each["result"] == "no"]
    assert {each["check"] for each in silent} == set(results["silent"]) - NOT_SIMULATED - {"versions"}
    assert [each for each in silent if "expected" not in each["seen"]] == [], "they see it, and do not break on it"
    without_a_call = {"versions", "captured: not prewarmed"}  # of the probe that was changed, or of its result
    assert yes("loud") - without_a_call == set()
    assert {"no host wait", "no host wait: busy device", "pinned copies"}.isdisjoint(yes("waiting"))
    assert "side stream: two stay parallel" not in yes("waiting")
    assert {name for name in yes("waiting") if name.startswith("captured")} <= without_a_call
    assert yes("other row") - without_a_call == set()


def test_without_time_nothing_is_run_and_that_is_told(gpu_check: ModuleType) -> None:
    results = gpu_check.run_checks("cpu", False, list(gpu_check.CHECKS.values()), 0.0)
    assert {each.result for each in results} == {"out of time"}
    assert len(results) == len(gpu_check.CHECKS)


def test_without_a_device_the_exit_code_is_two(gpu_check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    if gpu_check.torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    assert gpu_check.main([]) == 2
    assert "--platform" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what_it_does", "seconds", "seen"),
    [("__import__('os')._exit(7)", 60.0, "process that ran it ended"), ("__import__('time').sleep(60)", 0.5, "no end")],
)
def test_a_check_that_dies_or_hangs_costs_only_its_worker(
    what_it_does: str, seconds: float, seen: str, gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In place of a check the worker evaluates its name, since only what is importable reaches another process.
    monkeypatch.setattr(gpu_check, "attempt", eval)
    monkeypatch.setattr(gpu_check, "_limit", lambda chosen: 0.5)
    worker = gpu_check.Worker({}, {})
    result, can_go_on = worker.run(gpu_check.Check(what_it_does, print, 1.0), seconds)
    worker.end(can_go_on)
    assert (result.result, can_go_on) == ("no", False)
    assert seen in result.seen
