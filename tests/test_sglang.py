"""SGLang's own call sites run through multiassert, with no change to SGLang 0.5.23.

Importing SGLang takes ten seconds, and has to come before a device is simulated, so the checks of each platform run in
one process: see tests/sglang_checks.py. SGLang is installed without its dependencies, which would bring another torch;
tests/sglang_objects.py says what else it takes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import multiassert
from conftest import ChildRun
from multiassert import backends, dispatch, predicates, settings, simulate, sites
from multiassert.backends import Mechanism
from multiassert.engines.sglang_asserts import direct_asserts
from multiassert.settings import Mode
from tests import sglang_checks, sglang_objects

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENTRY_POINT = "multiassert.engines.sglang:register"

needs_sglang = pytest.mark.skipif(
    bool(sglang_objects.missing()),
    reason=f"{sglang_objects.missing()}: pip install --no-deps sglang==0.5.23; {' '.join(sglang_objects.PACKAGES)}",
)
# One worker of pytest-xdist imports SGLang for all of them.
pytestmark = pytest.mark.xdist_group("sglang")

Results = dict[str, "str | None"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which SGLang finds multiassert, whether or not it was installed anew."""
    folder = tmp_path_factory.mktemp("site")
    found = folder / "found_by_sglang-0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: found-by-sglang\nVersion: 0\n")
    (found / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nmultiassert = {ENTRY_POINT}\n")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MULTIASSERT", "SGLANG"))}
    path = os.pathsep.join([str(ROOT), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**inherited, "PYTHONPATH": path}


@pytest.fixture(scope="module")
def results(environment: dict[str, str]) -> Callable[[str], Results]:
    """What came of the checks of a platform; they run when they are asked for first."""
    known: dict[str, Results] = {}

    def of(platform: str) -> Results:
        if platform not in known:
            known[platform] = json.loads(run_module("tests.sglang_checks", platform, environment=environment))
        return known[platform]

    return of


def run_module(*arguments: str, environment: dict[str, str]) -> str:
    """The last line that a module prints, which is run in a process of its own."""
    command = [sys.executable, "-m", *arguments]
    child = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr[-4000:]
    return child.stdout.splitlines()[-1]


@needs_sglang
@pytest.mark.parametrize("check", sglang_checks.ON_EVERY_PLATFORM)
def test_on_the_platform(check: str, platform: str, results: Callable[[str], Results]) -> None:
    simulator = simulate.installed()
    if platform == "generic":
        pytest.skip("the checks count what SGLang waits for on the devices of vendors, and this is of none")
    if platform != "cpu" and (simulator is None or simulator.name != platform):
        pytest.skip(f"{platform} is not simulated here")
    failure = results(platform)[check]
    assert failure is None, failure


@needs_sglang
@pytest.mark.parametrize("check", sglang_checks.ON_THE_CPU)
def test_on_the_cpu(check: str, results: Callable[[str], Results]) -> None:
    failure = results("cpu")[check]
    assert failure is None, failure


@needs_sglang
def test_spawned_processes_have_it_and_sglangs_list_of_plugins_can_leave_it_out(environment: dict[str, str]) -> None:
    here, spawned = json.loads(run_module("tests.sglang_spawned", environment=environment))
    assert here == ["RuntimeError"] * 4
    assert spawned == ["RuntimeError"] * 2 + ["AsyncAssertionError"] * 2


@needs_sglang
def test_without_plugins_it_is_installed_before_or_after_sglang(run_child: ChildRun) -> None:
    done = run_child(
        """
        import importlib, sys, types
        from multiassert.engines import sglang as adapter

        adapter.install()
        adapter.install()
        assert not any(name.partition(".")[0] == "sglang" for name in sys.modules), "it has imported SGLang"

        import torch, multiassert
        import sglang.srt.utils.async_probe as probes, sglang.srt.utils.invariants as invariants
        from multiassert.engines import sglang_probes

        def holds(ours):
            for name, function in sglang_probes.REPLACEMENTS[probes.__name__].items():
                there = probes._AsyncNanWarner.check if "." in name else getattr(probes, name)
                assert (there is function) is ours, name
            assert (invariants._signal is sglang_probes.signal) is ours

        holds(True)
        with probes.envs.SGLANG_ENABLE_ASYNC_ASSERT.override(True):
            try:
                probes.maybe_detect_oob(torch.tensor([0, -1]), 0, 4, "slots")
            except multiassert.AsyncAssertionError as error:
                assert (error.violations[0].rows, error.violations[0].site.function) == ((1,), "<module>"), error
            else:
                raise SystemExit("nothing was raised")

        importlib.reload(probes)
        holds(True)
        adapter.uninstall()
        holds(False)

        holder = sys.modules["holder"] = types.ModuleType("holder")
        holder.maybe_detect_oob = probes.maybe_detect_oob
        adapter.install()
        holds(True)
        assert holder.maybe_detect_oob is probes.maybe_detect_oob
        adapter.register()  # SGLang's plug-ins find nothing left to do
        from sglang.srt.plugins.hook_registry import HookRegistry
        assert not HookRegistry._hooks, HookRegistry._hooks
        """
    )
    assert done.returncode == 0, done.stderr


def test_nothing_of_sglang_is_imported_unasked(run_child: ChildRun) -> None:
    done = run_child(
        """
        import sys
        import multiassert.engines, multiassert.engines.sglang, multiassert.engines.sglang_asserts
        print([name for name in sys.modules if name.partition(".")[0] in ("sglang", "transformers", "triton")])
        """
    )
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_sglang_finds_multiassert_by_its_entry_point() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition('[project.entry-points."sglang.srt.plugins"]\n')[2].partition("\n[")[0]
    assert f'multiassert = "{ENTRY_POINT}"' in section.splitlines()


@needs_sglang
def test_direct_asserts_of_sglang_are_listed() -> None:
    found = direct_asserts()
    places = {re.sub(r".*/sglang/srt/", "", finding.path): finding for finding in found}
    assert "managers/overlap_utils.py" in places
    assert places["managers/overlap_utils.py"].source == "torch._assert_async((values >= 0).all())"
    assert places["managers/overlap_utils.py"].rule == "assert-without-message"
    assert not {"utils/async_probe.py", "utils/invariants.py"} & set(places)
    rules = {finding.rule for finding in found}
    assert rules == {"assert-without-message", "direct-assert"}


def test_direct_asserts_of_a_folder_are_listed(tmp_path: pathlib.Path) -> None:
    for name in ("srt/a.py", "srt/utils/async_probe.py", "test/b.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import torch\n\n\ntorch._assert_async(x, 'why')\n")
    (tmp_path / "srt" / "c.py").write_text("import torch\n")
    found = direct_asserts(tmp_path)
    assert [(finding.path, finding.line, finding.rule) for finding in found] == [
        (str(tmp_path / "srt" / "a.py"), 4, "direct-assert")
    ]


def test_direct_asserts_tell_where_sglang_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="sglang is not installed here"):
        direct_asserts()


# ---------------------------------------------------------------------------------------------------------------------
# What the core does for it, without SGLang.


def asked_for(tensor: torch.Tensor) -> None:
    """A probe of an engine, whose own switch is on."""
    error = dispatch.probe(predicates.nan, tensor, (), "logits", asked_for=True)
    if error is not None:
        raise error


def test_a_probe_that_an_engine_asks_for_is_auto_where_the_mode_is_off(device: torch.device) -> None:
    bad = torch.tensor([[0.0], [float("nan")]]).to(device)
    if backends.for_device_type(device.type).auto() is Mechanism.NATIVE:
        pytest.skip("auto is the device's own assert there, which a test does not survive")
    multiassert.maybe_detect_nan(bad, "ours, which is off")
    asked_for(bad[:1])
    assert multiassert.drain() == []
    with pytest.raises(multiassert.AsyncAssertionError) as caught:
        asked_for(bad)
        multiassert.drain()
    (violation,) = caught.value.violations
    assert (violation.message, violation.rows, violation.site.file) == ("logits", (1,), __file__)
    with multiassert.override("warn"):
        asked_for(bad)
        assert [found.rows for found in multiassert.drain()] == [(1,)]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Mode.AUTO),
        ({"MULTIASSERT": "off"}, Mode.AUTO),
        ({"MULTIASSERT": "raise"}, Mode.RAISE),
        ({"MULTIASSERT_NPU": "warn"}, Mode.WARN),
        ({"MULTIASSERT": "raise", "MULTIASSERT_NPU": "off"}, Mode.AUTO),
        ({"SGLANG_ENABLE_ASYNC_ASSERT": "1"}, Mode.AUTO),
        ({"SGLANG_INVARIANT_CHECK": "1"}, Mode.AUTO),
        ({"SGLANG_INVARIANT_CHECK": "2"}, Mode.AUTO),
    ],
)
def test_the_mode_of_what_an_engine_asks_for(environment: dict[str, str], expected: Mode) -> None:
    assert settings.read_environment(environment, []).where_asked_for("npu") is expected


@pytest.mark.parametrize(("level", "expected"), [("0", Mode.OFF), ("1", Mode.WARN), ("2", Mode.RAISE)])
def test_sglangs_level_is_a_number(level: str, expected: Mode) -> None:
    assert settings.read_environment({"SGLANG_INVARIANT_CHECK": level}, []).default is expected


def test_a_record_names_who_called_the_engines_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "_OUR_FILES", set(sites._OUR_FILES))
    source = "def probe(call, tensor):\n    return call(tensor)\n"
    engine: dict[str, Callable[..., None]] = {}
    exec(compile(source, "engine/probes.py", "exec"), engine)
    bad = torch.tensor([float("nan")])
    for left_out, expected in ((False, "engine/probes.py"), (True, __file__)):
        if left_out:
            sites.leave_out("engine/probes.py")
        with multiassert.override("auto"), pytest.raises(multiassert.AsyncAssertionError) as caught:
            engine["probe"](multiassert.maybe_detect_nan, bad)
        assert caught.value.violations[0].site.file == expected
