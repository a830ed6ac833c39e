"""The doctor: what it says of working platforms, and that it says no where a probe is silent, loud, late or wrong."""

from __future__ import annotations

import faulthandler
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from conftest import ChildRun
from multiassert import presence
from multiassert.backends import Mechanism
from multiassert.doctor import children, diagnosis, report
from multiassert.doctor.children import Tell
from multiassert.doctor.diagnosis import Diagnosis, Row
from multiassert.doctor.machine import set_up

# Each of these is done to a process before the doctor examines in it; its children are forked and inherit it.
BROKEN = """
import json, math, os, sys, torch
import multiassert
from multiassert.doctor import diagnosis, examinations
from multiassert.doctor.machine import NotHere

probe, amax, native = multiassert.maybe_detect_nan, torch.Tensor.amax, torch._assert_async

def waiting(tensor, *args):
    tensor.sum().item()
    probe(tensor, *args)

def left_out(platform, simulated, tell):
    raise NotHere("it takes too long for this test")

BROKEN = {
    "nothing": lambda: None,
    "silent": lambda: setattr(multiassert, "maybe_detect_nan", lambda *args: None),
    "loud": lambda: setattr(multiassert, "maybe_detect_nan", lambda tensor, *a: probe(tensor * math.nan, *a)),
    "other row": lambda: setattr(multiassert, "maybe_detect_nan", lambda tensor, *a: probe(tensor[1:], *a)),
    "waiting": lambda: setattr(multiassert, "maybe_detect_nan", waiting),
    "amax loses NaN": lambda: setattr(torch.Tensor, "amax", lambda tensor, *a: amax(tensor.nan_to_num(0.0), *a)),
    "silent assert": lambda: setattr(torch, "_assert_async", lambda *args: None),
    "dies": lambda: setattr(multiassert, "maybe_detect_nan", lambda *args: os.abort()),
}

examinations.native_compiled = examinations.native_captured = left_out
seen = {}
for name, mode, kernels, platform in json.loads(sys.argv[1]):
    BROKEN[name]()
    with multiassert.override(mode, kernels=kernels):
        (found,) = diagnosis.diagnose([(platform, platform != "cpu")], 100)
    seen[f"{name} {mode} {kernels} {platform}"] = {
        "fires": found.fires, "wrong": {row.question: row.seen for row in found.rows if row.good is False}
    }
    multiassert.maybe_detect_nan, torch.Tensor.amax, torch._assert_async = probe, amax, native
print(json.dumps(seen))
"""


IN_FORCE = "a NaN is reported in this mode"
KINDS = "deferred: every kind, row and value"

ASKED = [
    ("nothing", "raise", "torch", "npu"),
    ("silent", "raise", "torch", "npu"),
    ("loud", "raise", "torch", "npu"),
    ("other row", "warn", "torch", "npu"),
    ("waiting", "raise", "torch", "npu"),
    ("amax loses NaN", "raise", "torch", "npu"),
    ("amax loses NaN", "raise", "exact", "npu"),
    ("dies", "raise", "torch", "npu"),
    ("silent assert", "trap", "auto", "cpu"),
    ("silent assert", "auto", "auto", "cpu"),
]
# What must be told of which question.
TOLD = [
    ("silent raise torch npu", IN_FORCE, "nothing was reported"),
    ("silent raise torch npu", KINDS, "NaN: saw []"),
    ("silent raise torch npu", "deferred: captured graph", "rows after four replays: [[], [], [], []]"),
    ("loud raise torch npu", IN_FORCE, "a clean tensor was reported"),
    ("loud raise torch npu", KINDS, "NaN: a clean tensor was reported"),
    ("other row warn torch npu", IN_FORCE, "row 1"),
    ("other row warn torch npu", KINDS, "NaN: saw [('nan', (1,)"),
    ("waiting raise torch npu", "deferred: host waits", "10, counted by the simulated device"),
    ("amax loses NaN raise torch npu", IN_FORCE, "nothing was reported"),
    ("amax loses NaN raise torch npu", "deferred: reductions keep NaN", "amax of torch.float32, column 0 of 1000"),
    ("amax loses NaN raise torch npu", "deferred: reductions keep NaN", "Set MULTIASSERT_KERNELS=exact"),
    ("dies raise torch npu", IN_FORCE, "SIGABRT"),
    ("dies raise torch npu", "deferred: examined", "SIGABRT"),
    ("silent assert trap auto cpu", IN_FORCE, "nothing was reported"),
    ("silent assert trap auto cpu", "native: in a word", "compiled out (known as: raises)"),
    ("silent assert auto auto cpu", "native: in a word", "compiled out (known as: raises)"),
]


def test_what_is_broken_is_told_and_what_works_is_not(run_child: ChildRun) -> None:
    """One test, since all is asked in one process."""
    child = run_child(BROKEN.replace("sys.argv[1]", repr(json.dumps(ASKED))), timeout=600)
    assert child.returncode == 0, child.stderr
    seen: dict[str, dict[str, Any]] = json.loads(child.stdout.splitlines()[-1])
    assert seen["nothing raise torch npu"] == {"fires": True, "wrong": {}}
    untold = [(what, asked, words) for what, asked, words in TOLD if words not in seen[what]["wrong"].get(asked, "")]
    assert untold == []
    # Only what the mode rests on decides: the exact kernels compare each number, and auto on the CPU does without
    # torch._assert_async.
    assert {what for what, each in seen.items() if each["fires"]} == {
        "nothing raise torch npu",
        "amax loses NaN raise exact npu",
        "silent assert auto auto cpu",
    }


def run_doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MULTIASSERT", "SGLANG"))}
    return subprocess.run(
        [sys.executable, "-m", "multiassert", "doctor", *arguments],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )


def test_the_whole_of_it_on_three_platforms() -> None:
    run = run_doctor("--simulate", "npu,musa", "--json", MULTIASSERT="raise", MULTIASSERT_CPU="warn")
    assert run.returncode == 0, run.stdout + run.stderr
    told = json.loads(run.stdout)
    assert told["fires"]
    found = {platform["platform"]: platform for platform in told["platforms"]}
    assert list(found) == ["cpu", "npu", "musa"]
    assert [(each["mode"], each["source"]) for each in found.values()] == [
        ("warn", "MULTIASSERT_CPU"),
        ("raise", "MULTIASSERT"),
        ("raise", "MULTIASSERT"),
    ]
    assert [each["simulated"] for each in found.values()] == [False, True, True]
    assert found["npu"]["versions"]["operators of"].startswith("torch_npu")
    rows = {name: {row["question"]: row["seen"] for row in each["rows"]} for name, each in found.items()}
    assert [each["native: in a word"] for each in rows.values()] == [
        "raises (as is known)",
        "missing (as is known)",
        "waits (as is known)",
    ]
    assert rows["npu"]["native: host waits"].startswith("1, ")
    assert rows["npu"]["deferred: host waits"].startswith("none, ")
    assert "Inductor generates no code" in rows["npu"]["native: kept by Inductor"]
    assert all(not each["seen"].startswith("failed") for name in found for each in found[name]["rows"])
    assert "Deferred" not in run.stderr


def test_smoke_tells_one_line_a_platform_and_what_is_on_but_not_here() -> None:
    on = run_doctor("--smoke", MULTIASSERT="auto", MULTIASSERT_XPU="raise")
    assert on.returncode == 0, on.stderr
    first, second = on.stdout.splitlines()
    assert first.startswith("multiassert doctor: cpu, mode auto by MULTIASSERT: fires")
    assert second.startswith("multiassert doctor: xpu is not here: on by MULTIASSERT_XPU, torch.xpu finds no device")


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--platform", "xpu"], {}, "--platform xpu: not here, torch.xpu finds no device"),
        (["--platform", "tpu"], {}, "--platform tpu is no platform. Good names: cpu, cuda"),
        (["--simulate", "cuda"], {}, "--simulate cuda: cannot be simulated. Good names: npu, musa, generic."),
        ([], {"MULTIASSERT_NPU": "rasie"}, "MULTIASSERT_NPU='rasie' is no mode of multiassert. Good values: off"),
        ([], {"MULTIASSERT_NPU": "trap"}, "mode trap is refused on npu"),
        ([], {"MULTIASSERT_KERNELS": "fast"}, "MULTIASSERT_KERNELS='fast' names no kernels. Good values: auto"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(arguments: list[str], environment: dict[str, str], words: str) -> None:
    run = run_doctor(*arguments, **environment)
    assert run.returncode == 2
    assert words in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_smoke_leaves_out_what_is_off_and_says_so() -> None:
    run = run_doctor("--smoke")
    assert run.returncode == 0
    assert run.stdout == "multiassert doctor: off, and not examined: cpu. MULTIASSERT=auto turns all platforms on.\n"
    run = run_doctor("--smoke", "--json")
    assert json.loads(run.stdout)["off, and left out"] == ["cpu"]


# ---------------------------------------------------------------------------------------------------------------------
# Its children.


def tells_and_aborts(tell: Tell) -> None:
    tell("early", 1)
    faulthandler.disable()  # pytest's, which would write on the screen
    os.abort()


def hangs_with_a_child(tell: Tell) -> None:
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    tell("grandchild", grandchild.pid)
    time.sleep(1000)


def fails(tell: Tell) -> None:
    print("some output", file=sys.stderr)
    raise ValueError("what went wrong")


def is_over(process: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(not pathlib.Path("/proc/self/stat").exists(), reason="processes are looked for in /proc")
def test_a_child_that_dies_hangs_or_fails_costs_nothing_but_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "start_method", lambda: "fork")
    aborted, hung, failed = children.run_all([tells_and_aborts, hangs_with_a_child, fails], seconds=5)
    assert (aborted.how, aborted.told) == ("SIGABRT", {"early": 1})
    assert hung.how == "no end within 5 s"
    deadline = time.monotonic() + 20
    while not is_over(hung.told["grandchild"]):
        assert time.monotonic() < deadline, "what a child had started outlived it"
        time.sleep(0.05)
    assert failed.how == "exit code 1"
    assert failed.last_words == "ValueError: what went wrong"
    assert not failed.well


def test_an_interrupt_ends_the_children(run_child: ChildRun, tmp_path: pathlib.Path) -> None:
    code = """
    import os, pathlib, signal, sys, threading, time
    from multiassert.doctor import children

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is born deaf to it
    children.start_method = lambda: "fork"
    told = pathlib.Path(os.environ["TOLD"])

    def hangs(tell):
        told.write_text(str(os.getpid()))
        time.sleep(1000)

    def interrupt():
        while not (told.exists() and told.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    try:
        children.run_all([hangs], 100)
    except KeyboardInterrupt:
        try:
            os.kill(int(told.read_text()), 0)
        except ProcessLookupError:
            print("it is gone")
    """
    run = run_child(code, TOLD=str(tmp_path / "told"))
    assert run.stdout.strip() == "it is gone", run.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_a_doctor_that_is_killed_leaves_no_child(signal_number: signal.Signals, tmp_path: pathlib.Path) -> None:
    told = tmp_path / "told"
    code = f"""
import os, pathlib, time
from multiassert import __main__, doctor
from multiassert.doctor import examinations

def hangs(tell):
    pathlib.Path({str(told)!r}).write_text(str(os.getpid()))
    time.sleep(1000)

doctor.examinations.presence_of_platforms = hangs
__main__.main(["doctor", "--json"])
"""
    doctor = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (told.exists() and told.read_text()):
        assert time.monotonic() < deadline, "the child never began"
        time.sleep(0.05)
    doctor.send_signal(signal_number)
    assert doctor.wait(60) == (2 if signal_number == signal.SIGTERM else -signal_number)
    while not is_over(int(told.read_text())):
        assert time.monotonic() < deadline, "the child outlived the doctor"
        time.sleep(0.05)


def test_no_core_is_dumped_and_no_cache_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "start_method", lambda: "fork")
    (ended,) = children.run_all([tells_its_limits], seconds=60)
    assert ended.told["core"] == [0, 0]
    assert not pathlib.Path(ended.told["cache"]).exists()


def tells_its_limits(tell: Tell) -> None:
    import resource

    pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).mkdir()
    tell("core", list(resource.getrlimit(resource.RLIMIT_CORE)))
    tell("cache", os.environ["TORCHINDUCTOR_CACHE_DIR"])


# ---------------------------------------------------------------------------------------------------------------------
# Judgements, and how they are shown.


def test_a_saturating_device_is_told() -> None:
    assert diagnosis._overflow({"60000 * 2": "inf", "sqrt(-1)": "nan"})[1]
    seen, good = diagnosis._overflow({"60000 * 2": "65504.0", "sqrt(-1)": "0.0"})
    assert not good
    assert "INF_NAN_MODE_ENABLE=1" in seen


RECORD = {"message": diagnosis.examinations.MESSAGE, "kind": "nan", "rows": [2], "value": "nan"}
CLEAN = {"silent when clean": True}
DEVICE_ERROR = {"raised": "AcceleratorError: device-side assert", "is device's": True, "records": []}


@pytest.mark.parametrize(
    ("mechanism", "how", "told", "good"),
    [
        (Mechanism.DEFERRED, "exit code 0", {**CLEAN, "records": [RECORD]}, True),
        (Mechanism.DEFERRED, "exit code 0", {**CLEAN, "records": []}, False),
        (Mechanism.DEFERRED, "exit code 0", {**CLEAN, "records": [{**RECORD, "rows": [1]}]}, False),
        (Mechanism.DEFERRED, "exit code 0", {**CLEAN, "records": [{**RECORD, "rows": []}]}, False),
        (Mechanism.DEFERRED, "exit code 0", {**CLEAN, "records": [{**RECORD, "value": "0.0"}]}, False),
        (Mechanism.DEFERRED, "exit code 0", {**CLEAN, "records": [RECORD, RECORD]}, False),
        (Mechanism.DEFERRED, "exit code 0", {"silent when clean": False, "records": [RECORD]}, False),
        (Mechanism.DEFERRED, "exit code 0", {**CLEAN, **DEVICE_ERROR}, False),
        (Mechanism.DEFERRED, "SIGABRT", CLEAN, False),
        (Mechanism.IMMEDIATE, "SIGKILL", CLEAN, False),
        (Mechanism.NATIVE, "exit code 0", {**CLEAN, **DEVICE_ERROR}, True),
        (
            Mechanism.NATIVE,
            "exit code 0",
            {**CLEAN, "raised": "KeyError: 1", "is device's": False, "records": []},
            False,
        ),
        (Mechanism.NATIVE, "exit code 0", {**CLEAN, "records": []}, False),
        (Mechanism.NATIVE, "SIGABRT", CLEAN, True),
        (Mechanism.NATIVE, "SIGABRT", {}, False),
        (Mechanism.NATIVE, "SIGKILL", CLEAN, False),
        (Mechanism.NATIVE, "no end within 5 s", CLEAN, False),
    ],
)
def test_only_what_the_mechanism_does_counts_as_a_report(
    mechanism: Mechanism, how: str, told: dict[str, Any], good: bool
) -> None:
    assert diagnosis._fires_in_mode(mechanism, children.Ended(how, told, "")).good is good


def test_a_dtype_that_the_device_cannot_reduce_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    amax = torch.Tensor.amax

    def without_doubles(tensor: torch.Tensor, *dimensions: int) -> torch.Tensor:
        if tensor.dtype is torch.float64:
            raise RuntimeError("Required aspect fp64 is not supported on the device")
        return amax(tensor, *dimensions)

    monkeypatch.setattr(torch.Tensor, "amax", without_doubles)
    found = diagnosis.examinations._reductions_that_lose_nan(set_up("cpu", False))
    assert found == {"asked": ["float32", "float16", "bfloat16"], "lost": []}


@pytest.mark.parametrize(
    ("outlasts_the_kernel", "waits", "asked"), [([False], 0, 1), ([True, False], 0, 2), ([True, True], 1, 2)]
)
def test_a_wait_is_only_told_when_it_is_seen_twice(outlasts_the_kernel: list[bool], waits: int, asked: int) -> None:
    answers, calls = iter(outlasts_the_kernel), []

    class Busy:
        simulator = None

        def finish(self) -> None: ...

        def start_long_work(self) -> Busy:
            return self

        def query(self) -> bool:
            return next(answers)

    seen = diagnosis.examinations._waits_in(Busy(), lambda: calls.append(1))  # type: ignore[arg-type]
    assert (seen["waits"], len(calls)) == (waits, asked)


def test_a_broken_vendor_package_hides_no_other_platform(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "torch_npu.py").write_text("import torch\ntorch.there_is_no_such_thing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "torch_npu cannot be imported: module 'torch' has no attribute" in presence.missing_of("npu")

    def broken() -> bool:
        raise ValueError("no driver")

    monkeypatch.setattr(torch.xpu, "is_available", broken)
    assert presence.missing_of("xpu") == "torch.xpu cannot be asked: no driver"


@pytest.mark.parametrize(
    ("told", "how", "output", "seen"),
    [
        ({"kernel": True, "waits": {"waits": 0}, "returned": True}, "SIGABRT", "", "aborts"),
        ({"kernel": True, "waits": {"waits": 0}, "returned": True}, "SIGABRT", "MESSAGE", "fires"),
        ({"kernel": True, "waits": {"waits": 0}, "returned": True, "raised": "E", "message": True}, "", "", "fires"),
        ({"kernel": True, "waits": {"not here": "no clock"}, "raised": "E", "message": True}, "", "", "waits"),
        ({"kernel": True, "waits": {"waits": 1}, "raised": "E", "message": True}, "", "", "waits"),
        ({"kernel": False, "waits": {"waits": 1}, "raised": "E", "message": True}, "", "", "missing"),
        ({"kernel": True, "waits": {"waits": 0}, "returned": True, "survived": True}, "", "", "compiled out"),
        ({"kernel": True, "waits": {"waits": 0}, "returned": True}, "no end within 60 s", "", "unknown"),
        ({"kernel": True, "waits": {"waits": 0}, "returned": True}, "SIGKILL", "", "unknown"),
    ],
)
def test_how_an_assert_ends_says_what_it_is(told: dict[str, Any], how: str, output: str, seen: str) -> None:
    output = output.replace("MESSAGE", f"Assertion `{diagnosis.examinations.MESSAGE}` failed")
    assert diagnosis._seen_native("musa", children.Ended(how, told, output)).value == seen


def a_diagnosis(fires: bool) -> Diagnosis:
    row = Row("a question", "an [answer] | with a bar", fires)
    return Diagnosis(
        "npu", True, {"torch": "2"}, "raise", "MULTIASSERT_NPU", "deferred", "Why [it] is so.", fires, (row,)
    )


@pytest.mark.parametrize("fires", [True, False])
def test_tables_show_all_of_it(fires: bool, capsys: pytest.CaptureFixture[str]) -> None:
    findings = report.Findings(
        [a_diagnosis(fires)], {"xpu": "no device"}, {"sglang": ["a.py:7: torch._assert_async(x)"]}
    )
    report.as_table(findings)
    table = capsys.readouterr().out
    assert all(words in table for words in ("simulated npu", "an [answer]", "MULTIASSERT_NPU", "Why [it]"))
    assert ("NO" in table) is not fires
    assert "xpu is not here: no device" in table
    assert "sglang calls torch._assert_async itself in 1 places" in table
    report.as_markdown(findings)
    lines = capsys.readouterr().out.splitlines()
    assert "  a.py:7: torch._assert_async(x)" in lines
    assert lines[0].count("|") == lines[2].count("|")
    assert "an [answer] \\| with a bar" in "\n".join(lines)


def test_a_signal_has_its_name() -> None:
    assert signal.Signals(6).name == "SIGABRT", "which the reports rely on"
