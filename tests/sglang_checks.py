"""What tests/test_sglang.py runs in a process of its own, since it takes SGLang, and a device simulated after it.

    python -m tests.sglang_checks npu       prints one JSON object: each check's name and what it raised, or null

SGLang loads multiassert as it does in production: its `load_plugins()` finds the entry point.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import json
import linecache
import logging
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast
from unittest import mock

import pytest
import torch

import multiassert
from multiassert import backends, delivery, simulate
from multiassert.engines import sglang as adapter
from tests import sglang_objects as objects
from tests.sglang_objects import PAGE, SLOTS, VOCABULARY, switches

NAMES = (
    "maybe_assert_async",
    "maybe_assert_sum",
    "maybe_detect_in_closed_range",
    "maybe_detect_inf",
    "maybe_detect_nan",
    "maybe_detect_oob",
    "maybe_detect_page_aligned",
    "maybe_warn_nan",
    "sanitize_nan_logits",
)
NAN, INF = float("nan"), float("inf")

Check = Callable[[], None]
ON_EVERY_PLATFORM: dict[str, Check] = {}
ON_THE_CPU: dict[str, Check] = {}
device = torch.device("cpu")


def on_every_platform(check: Check) -> Check:
    """Register a check that runs on the CPU and on simulated devices."""
    ON_EVERY_PLATFORM[check.__name__] = check
    return check


def on_the_cpu(check: Check) -> Check:
    """Register a check that is about no device."""
    ON_THE_CPU[check.__name__] = check
    return check


def module(name: str) -> Any:
    """A module of SGLang."""
    return sys.modules[f"sglang.srt.{name}"]


def probes() -> Any:
    """SGLang's probes, by SGLang's own name."""
    return module("utils.async_probe")


def tensor(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values on the device."""
    return torch.tensor(values, dtype=dtype).to(device)


def ids(*values: int) -> torch.Tensor:
    """Indices on the device."""
    return torch.tensor(values).to(device)


@contextlib.contextmanager
def no_wait() -> Iterator[None]:
    """A host wait raises inside; on the CPU there is none."""
    simulator = simulate.installed()
    with contextlib.nullcontext() if simulator is None else simulator.no_sync():
        yield


def let_time_pass() -> None:
    """The device does its work."""
    simulator = simulate.installed()
    if simulator is not None:
        simulator.run_all()


def seen(call: Callable[[], object], rows: Sequence[str] | None = None) -> Sequence[multiassert.Violation]:
    """The violations of a call in which the host never waits, whether it raises them itself or a later step does."""
    try:
        with no_wait():
            call()
            multiassert.step("tag", rows)
        let_time_pass()
        return multiassert.poll()
    except multiassert.AsyncAssertionError as error:
        return error.violations


def only(violations: Sequence[multiassert.Violation]) -> multiassert.Violation:
    """The one violation that there is."""
    assert len(violations) == 1, violations
    return violations[0]


def require_place(violation: multiassert.Violation, place: Any, text: str) -> None:
    """The record names the line in SGLang that has this text, in the call of a probe."""
    assert violation.site.file == place.__file__, violation.site
    lines = [linecache.getline(violation.site.file, violation.site.line + more) for more in range(4)]
    assert "maybe_" in lines[0] or "sanitize_" in lines[0] or "expect(" in lines[0], lines
    assert text in "".join(lines), lines


# ---------------------------------------------------------------------------------------------------------------------
# SGLang's own classes.


def move(target: int, source: int) -> Check:
    """Move two slots of a new pool, the second of them as given."""
    pool = objects.pool_on(device)
    targets, sources = ids(1, target), ids(2, source)
    return lambda: pool.move_kv_cache(targets, sources)


@on_every_platform
def a_move_to_slot_minus_1_is_named() -> None:
    with switches(ENABLE_ASYNC_ASSERT=True):
        violation = only(seen(move(-1, 3)))
    assert (violation.kind, violation.rows, violation.value, violation.bound) == ("low", (1,), -1, 0)
    assert violation.message == "move_kv_cache tgt_loc"
    assert violation.site.function == "move_kv_cache"
    require_place(violation, module("mem_cache.memory_pool"), "tgt_loc")


@on_every_platform
def a_move_from_slot_minus_1_is_named() -> None:
    with switches(ENABLE_ASYNC_ASSERT=True):
        violation = only(seen(move(3, -1)))
    assert (violation.kind, violation.rows, violation.value) == ("low", (1,), -1)
    require_place(violation, module("mem_cache.memory_pool"), "src_loc")


@on_every_platform
def a_move_past_the_pool_is_named_although_it_crashes_the_device() -> None:
    with switches(ENABLE_ASYNC_ASSERT=True):
        violation = only(seen(move(SLOTS + PAGE, 3)))
    assert (violation.kind, violation.rows, violation.value, violation.bound) == ("high", (1,), 20, 20)
    require_place(violation, module("mem_cache.memory_pool"), "tgt_loc")


@on_every_platform
def token_ids_outside_of_the_vocabulary_are_named() -> None:
    embedding = objects.embedding_on(device)
    with switches(ENABLE_ASYNC_ASSERT=True):
        for bad, kind in ((-1, "low"), (VOCABULARY, "high")):
            start_anew()
            violation = only(seen(functools.partial(embedding, ids(5, 6, bad))))
            assert (violation.kind, violation.rows, violation.value) == (kind, (2,), bad)
            assert violation.message == "VocabParallelEmbedding input id"
            require_place(violation, module("layers.vocab_parallel_embedding"), "VocabParallelEmbedding input id")


@on_every_platform
def clean_moves_and_token_ids_are_silent() -> None:
    embedding = objects.embedding_on(device)
    with switches(ENABLE_ASYNC_ASSERT=True):
        assert not seen(move(0, SLOTS + PAGE - 1))
        assert not seen(functools.partial(embedding, ids(0, 6, VOCABULARY - 1)))


@on_every_platform
def sglang_alone_waits_at_each_of_its_probes_and_we_at_none() -> None:
    simulator = simulate.installed()
    if simulator is None:
        return  # the CPU waits for nothing
    calls = {
        "move": move(1, 3),
        "embedding": functools.partial(objects.embedding_on(device), ids(5, 6)),
        "logits": functools.partial(call_of("sanitize_nan_logits"), tensor(1, 2), "logits"),
    }

    def waits() -> dict[str, int]:
        counts = {}
        for name, call in calls.items():
            with switches(ENABLE_ASYNC_ASSERT=True), simulator.record() as ledger:
                call()
                multiassert.step()
            counts[name] = len(ledger.waits)
        return counts

    with originals():
        assert waits() == {"move": 4, "embedding": 2, "logits": 1}
    assert waits() == {"move": 0, "embedding": 0, "logits": 0}


def call_of(name: str) -> Callable[..., object]:
    """A probe of SGLang by its name, as it is at the time of the call."""
    return lambda *arguments: getattr(probes(), name)(*arguments)


@contextlib.contextmanager
def originals() -> Iterator[None]:
    """SGLang alone."""
    adapter.uninstall()
    try:
        yield
    finally:
        hook()


@on_every_platform
def nan_logits_are_named_and_healed_in_place() -> None:
    logits = torch.tensor([[0.0, 1.0], [NAN, INF], [-INF, 2.0]]).to(device)
    pointer = logits.data_ptr()
    mode = "raise" if device.type == "cpu" else None  # auto on the CPU raises before it heals, as SGLang does
    with multiassert.override(mode), switches(ENABLE_ASYNC_ASSERT=True, SANITIZE_NAN_LOGITS=True):
        violation = only(seen(lambda: probes().sanitize_nan_logits(logits, "sampler"), rows=("a", "b", "c")))
    assert (violation.kind, violation.rows, violation.row_names, violation.message) == ("nan", (1,), ("b",), "sampler")
    assert violation.site.file == __file__
    assert violation.value != violation.value
    assert logits.data_ptr() == pointer
    assert torch.equal(logits.cpu(), torch.tensor([[0.0, 1.0], [-1e30, 1e30], [-1e30, 2.0]]))


@on_every_platform
def nan_logits_are_logged_and_healed_where_nothing_asserts() -> None:
    logits = tensor(NAN, 1)
    with switches(ENABLE_ASYNC_ASSERT=False, SANITIZE_NAN_LOGITS=True):
        for expected in (1, 0):
            with no_wait():
                probes().sanitize_nan_logits(logits, "sampler")
                multiassert.step()
            found = multiassert.drain()  # which would raise what is to be raised
            assert [(violation.kind, violation.rows) for violation in found] == [("nan", (0,))] * expected
    assert logits.tolist()[0] == pytest.approx(-1e30)


@on_every_platform
def healed_logits_of_float16_are_finite() -> None:
    logits = tensor(NAN, INF, dtype=torch.float16)
    with switches(ENABLE_ASYNC_ASSERT=False, SANITIZE_NAN_LOGITS=True):
        seen(lambda: probes().sanitize_nan_logits(logits, "sampler"))
    assert torch.isfinite(torch.softmax(logits.cpu(), 0)).all()


@on_every_platform
def the_switches_are_read_at_each_call() -> None:
    bad: list[tuple[str, tuple[Any, ...]]] = [
        ("maybe_detect_nan", (tensor(NAN),)),
        ("maybe_detect_inf", (tensor(INF),)),
        ("maybe_detect_in_closed_range", (tensor(2), 0.0, 1.0)),
        ("maybe_detect_oob", (ids(-1), 0, 4)),
        ("maybe_detect_page_aligned", (ids(3), 2)),
        ("maybe_assert_async", (ids(0) > 0,)),
        ("maybe_assert_sum", (ids(1, 2), 4)),
    ]
    for name, arguments in bad:
        call = functools.partial(call_of(name), *arguments, "x")
        for value in (False, True, False):
            with switches(ENABLE_ASYNC_ASSERT=value):
                assert len(seen(call)) == value, (name, value)
        with switches(ENABLE_NAN_LOGITS_CHECK=True):
            assert len(seen(call)) == (name == "maybe_detect_nan"), name
        assert not seen(call)


@on_every_platform
def our_mode_is_used_where_one_is_set() -> None:
    with switches(ENABLE_ASYNC_ASSERT=True), multiassert.override("warn"):
        probes().maybe_detect_nan(tensor(NAN), "x")
        assert only(multiassert.drain()).message == "x"
    with switches(ENABLE_ASYNC_ASSERT=True), multiassert.override("raise"):
        probes().maybe_detect_nan(tensor(NAN), "x")  # deferred, on the CPU too
        with pytest.raises(multiassert.AsyncAssertionError, match="NaN detected! x"):
            multiassert.drain()
    with switches(ENABLE_ASYNC_ASSERT=False), multiassert.override("raise"):
        probes().maybe_detect_nan(tensor(NAN), "x")  # SGLang's switch is off
        assert not multiassert.drain()


@on_every_platform
def mode_trap_is_what_it_is_elsewhere() -> None:
    with switches(ENABLE_ASYNC_ASSERT=True), multiassert.override("trap"):
        if device.type == "cpu":
            with pytest.raises(RuntimeError, match="NaN detected! x") as caught:
                probes().maybe_detect_nan(tensor(NAN), "x")
            assert not isinstance(caught.value, multiassert.AsyncAssertionError)
            assert caught.traceback[-1].path.name == "async_probe.py"  # SGLang's own, which is one kernel on CUDA
            with pytest.raises(RuntimeError, match="index < 0 .*x"):
                probes().maybe_detect_oob(ids(-1), 0, 4, "x")
        else:
            with pytest.raises(ValueError, match="trap is refused"):
                probes().maybe_detect_nan(tensor(NAN), "x")


@on_every_platform
def an_invariant_names_its_rows() -> None:
    invariants = module("utils.invariants")
    guard = invariant("guard", invariants.Bucket.GUARD)
    value = torch.tensor([[0.5, 0.5], [0.5, NAN], [2.0, 0.5]]).to(device)
    with switches(INVARIANT_CHECK=2):
        violation = only(seen(lambda: invariants.expect(guard, value, msg="confidence"), rows=("a", "b", "c")))
    assert (violation.kind, violation.rows) == ("cond", (1, 2))
    assert violation.message == "invariant-check FAILED [guard]: in_closed_range[0,1]: confidence"
    assert violation.site.file == __file__
    with switches(INVARIANT_CHECK=2):
        assert not seen(lambda: invariants.expect(guard, value[:1], msg="confidence"))
    with switches(INVARIANT_CHECK=0):
        assert not seen(lambda: invariants.expect(guard, value, msg="confidence"))


@on_every_platform
def an_invariant_that_only_warns_waits_for_nothing() -> None:
    invariants = module("utils.invariants")
    guard = invariant("warns", invariants.Bucket.GUARD)
    value = tensor(2, 0.5)
    with switches(INVARIANT_CHECK=1), no_wait():
        invariants.expect(guard, value)
        multiassert.step()
    found = multiassert.drain()  # which would raise what is to be raised
    if device.type == "cpu":
        assert not found  # SGLang counts, as its tests want it; see the_reporter_counts_on_the_cpu
    else:
        assert only(found).rows == (0,)


@on_every_platform
def what_sglang_calls_no_error_is_no_violation() -> None:
    invariants = module("utils.invariants")
    legitimate = invariant("legitimate", invariants.Bucket.SOFTEN)
    with switches(INVARIANT_CHECK=2):
        invariants.expect(legitimate, tensor(2, 0.5))
    assert multiassert.drain() == []


def invariant(name: str, bucket: Any) -> Any:
    """A new invariant, that values are from 0 to 1."""
    invariants = module("utils.invariants")
    invariants._REGISTRY.pop(name, None)
    return invariants.Invariant(name, bucket, invariants.InClosedRange(0, 1))


@on_every_platform
def compiled_code_of_sglang_keeps_its_probes() -> None:
    if device.type != "cpu":
        return  # the tests of compiled code run on devices

    def shifted(indices: torch.Tensor) -> torch.Tensor:
        probes().maybe_detect_oob(indices, 0, 4, "compiled")
        return indices + 1

    for mode in (None, "raise"):
        torch._dynamo.reset()
        compiled = torch.compile(shifted, backend="aot_eager", fullgraph=True)
        with multiassert.override(mode), switches(ENABLE_ASYNC_ASSERT=True):
            assert torch.equal(compiled(ids(0, 3)), ids(1, 4))
            multiassert.drain()
            with pytest.raises(RuntimeError, match="index >= 4 .*compiled") as error:
                compiled(ids(0, 4))
                multiassert.drain()
        found = getattr(error.value, "violations", ())  # in auto it is torch's own assert, in the graph
        assert [violation.site.function for violation in found] == ([] if mode is None else ["shifted"])


@on_every_platform
def captured_probes_of_sglang_go_on_while_our_mode_is_off() -> None:
    operators = backends.named(device.type).operators
    if operators is None:
        return  # the CPU captures nothing
    streams: Any = torch.get_device_module(device)
    graph, stream = getattr(streams, operators.graph_class)(), streams.Stream()
    logits = torch.zeros(2, 4, device=device)
    with streams.stream(stream):
        with switches(ENABLE_ASYNC_ASSERT=True):
            probes().maybe_detect_nan(logits, "in the graph")  # SGLang warms up before it captures
            with streams.graph(graph, stream=stream):
                probes().maybe_detect_nan(logits, "in the graph")
        with multiassert.override("warn"):
            pass  # a change of our mode, back to off
        assert not seen(graph.replay)
        logits[1] = NAN
        violation = only(seen(graph.replay))
    assert (violation.message, violation.rows) == ("in the graph", (1,))


# ---------------------------------------------------------------------------------------------------------------------
# Steps.


def fake_batch(is_decode: bool, *requests: str) -> Any:
    """What `run_batch` and we ask of a batch, of which SGLang's scheduler then runs `_run_batch_prebuilt` alone."""
    mode = types.SimpleNamespace(
        name="DECODE" if is_decode else "EXTEND",
        is_decode=lambda: is_decode,
        is_prebuilt=lambda: True,
        is_split_prefill=lambda: False,
    )
    fake = mock.MagicMock(forward_mode=mode, global_num_tokens=None, extend_num_tokens=0)
    fake.spec_algorithm.is_none.return_value = True
    fake.reqs = [types.SimpleNamespace(rid=request) for request in requests]
    return fake


def run_batch(batch: Any, forward: Callable[[], object]) -> object:
    """SGLang's own `Scheduler.run_batch`, with hooks and decorators, of a scheduler that has what that asks for."""
    scheduler = fake_scheduler(enable_overlap=False)
    scheduler._run_batch_prebuilt.side_effect = lambda batch: forward() or "result"
    return module("managers.scheduler").Scheduler.run_batch(scheduler, batch)


def fake_scheduler(**fields: Any) -> Any:
    """What `run_batch` asks of a scheduler."""
    return mock.MagicMock(
        forward_ct=6,
        scheduler_stage_metrics=None,
        forward_sleep_time=None,
        scripted_scheduler_hook=None,
        device_module=torch.get_device_module(device),
        **fields,
    )


@on_every_platform
def a_batch_of_the_scheduler_is_a_step_with_its_requests() -> None:
    mode = "raise" if device.type == "cpu" else None
    logits = torch.tensor([[1.0], [NAN]]).to(device)

    def forward() -> None:
        probes().maybe_detect_nan(logits, "logits")

    for is_decode, names in ((True, ("two",)), (False, None)):
        start_anew()
        with multiassert.override(mode), switches(ENABLE_ASYNC_ASSERT=True):
            with no_wait():
                assert run_batch(fake_batch(is_decode, "zero"), lambda: None) == "result"
                found = caught(functools.partial(run_batch, fake_batch(is_decode, "one", "two"), forward))
            let_time_pass()
            violation = only(found or caught(multiassert.poll))
        assert (violation.step, violation.row_names) == (1, names)
        assert violation.tag == f"batch 7, {'decode' if is_decode else 'extend'} of one two"


@on_every_platform
def a_bad_index_is_told_before_the_failure_that_it_causes() -> None:
    def forward() -> None:
        probes().maybe_detect_oob(ids(9), 0, 4, "slots")
        let_time_pass()
        raise RuntimeError("the device has failed")

    mode = "raise" if device.type == "cpu" else None
    with multiassert.override(mode), switches(ENABLE_ASYNC_ASSERT=True), pytest.raises(RuntimeError) as failure:
        run_batch(fake_batch(True, "one"), forward)
    if device.type == "cpu":  # nothing is sent before a use that cannot crash a device
        assert str(failure.value) == "the device has failed"
        assert only(caught(multiassert.drain)).value == 9
        return
    error = failure.value
    assert isinstance(error, multiassert.AsyncAssertionError)
    assert str(error.__cause__) == "the device has failed"
    assert (error.violations[0].value, error.violations[0].row_names) == (9, ("one",))


@on_every_platform
def what_is_seen_is_sent_once_for_each_kind_of_index_in_a_batch() -> None:
    if device.type == "cpu":
        return

    def forward() -> None:
        for _ in range(5):
            probes().maybe_detect_oob(ids(1), 0, 4, "slots of a layer")

    sent: list[object] = []
    with (
        switches(ENABLE_ASYNC_ASSERT=True),
        mock.patch.object(delivery, "send", side_effect=lambda *stamp: sent.append(stamp)),
    ):
        run_batch(fake_batch(True, "one"), forward)
        run_batch(fake_batch(True, "one"), forward)
    assert len(sent) == 2


@on_every_platform
def batches_cost_nothing_while_the_switches_are_off() -> None:
    before = delivery.current_step()
    assert run_batch(fake_batch(True, "one"), lambda: None) == "result"
    assert delivery.current_step() == before


class OverlapMode:
    """A scheduler that schedules on one stream; a graph that was captured on another is replayed on a third."""

    def __init__(self) -> None:
        operators = backends.named(device.type).operators
        assert operators is not None
        self.streams: Any = torch.get_device_module(device)
        self.schedule, self.forward, self.capture = (self.streams.Stream() for _ in range(3))
        self.graph = getattr(self.streams, operators.graph_class)()
        self.logits = torch.zeros(2, 4, device=device)
        with self.streams.stream(self.capture):
            probes().maybe_detect_nan(self.logits, "in the graph")
            with self.streams.graph(self.graph, stream=self.capture):
                probes().maybe_detect_nan(self.logits, "in the graph")
        let_time_pass()

    def replay(self, value: float) -> None:
        """As a batch whose second row is this."""
        self.logits[1].fill_(value)
        self.graph.replay()

    def run_batch(self, batch: Any, value: float) -> None:
        """SGLang's own `Scheduler.run_batch`, of a model of embeddings in overlap mode."""
        fields = {"forward_stream": self.forward, "schedule_stream": self.schedule}
        scheduler = fake_scheduler(enable_overlap=True, is_generation=False, **fields)
        scheduler.enable_unified_cache_external_linker = False
        scheduler.forward_stream_ctx = self.streams.stream(self.forward)
        scheduler.tp_worker.forward_batch_embedding.side_effect = lambda batch: self._forward(value)
        batch.forward_mode.is_prebuilt = lambda: False
        with mock.patch.object(module("managers.scheduler"), "resolve_forward_inputs"):
            module("managers.scheduler").Scheduler.run_batch(scheduler, batch)

    def _forward(self, value: float) -> tuple[object, bool]:
        assert self.streams.current_stream() == self.forward
        self.replay(value)
        return types.SimpleNamespace(embeddings=[], pooled_hidden_states=None), False


def found_however_streams_take_turns(
    launch: Callable[[OverlapMode], None],
) -> Iterator[Sequence[multiassert.Violation]]:
    """What is found if one stream gets so far, and then another one to its end, for each way to do that."""
    simulator = simulate.installed()
    if simulator is None:
        return  # the CPU has no streams
    for first, second in itertools.permutations(("schedule", "forward", "capture"), 2):
        for entries in itertools.count():
            start_anew()
            with switches(ENABLE_ASYNC_ASSERT=True):
                overlap = OverlapMode()
                with overlap.streams.stream(overlap.schedule), no_wait():
                    launch(overlap)
            done = simulator.advance(entries, stream=getattr(overlap, first).stream_id)
            simulator.advance(sys.maxsize, stream=getattr(overlap, second).stream_id)
            let_time_pass()
            yield caught(multiassert.poll)
            if done < entries:
                break


@on_every_platform
def what_graphs_see_in_overlap_mode_is_told_apart_by_batch() -> None:
    def launch(overlap: OverlapMode) -> None:
        for request, value in (("a", 0), ("b", NAN), ("c", 0)):
            overlap.run_batch(fake_batch(True, "first", request), value)

    ways = list(found_however_streams_take_turns(launch))
    assert len(ways) > 50 or device.type == "cpu"
    for violations in ways:
        violation = only(violations)
        assert (violation.step, violation.rows, violation.row_names) == (1, (1,), ("b",))


@on_every_platform
def what_graphs_see_while_the_scheduler_probes_an_index_is_not_lost() -> None:
    def launch(overlap: OverlapMode) -> None:
        overlap.run_batch(fake_batch(True, "first", "a"), 0)
        with overlap.streams.stream(overlap.forward):
            overlap.replay(NAN)  # as a sampling that waited for a grammar
            overlap.logits.fill_(0)
        probes().maybe_detect_oob(torch.ones(1, dtype=torch.int64, device=device), 0, 4, "slots of the next batch")

    for violations in found_however_streams_take_turns(launch):
        assert only(violations).rows == (1,)


BATCH_FIELDS = ("reqs", "forward_mode", "spec_algorithm", "global_num_tokens")
SCHEDULER_FIELDS = ("forward_ct", "device_module", "enable_overlap")


@on_every_platform
def a_batch_of_another_sglang_is_a_step_without_names() -> None:
    """Each field in turn is missing, as if it had another name."""
    for missing in (*BATCH_FIELDS, *SCHEDULER_FIELDS, "rid"):
        start_anew()
        violation, lines = third_batch_without(missing)
        assert (violation.step, violation.rows) == (2, (1,)), missing
        assert [missing in line for line in lines] == [True], (missing, lines)
        assert (violation.tag is None) == (missing in ("reqs", "rid", "forward_mode", "forward_ct")), missing
        assert violation.row_names == (None if missing in (*BATCH_FIELDS, "rid") else ("two",)), missing


def third_batch_without(missing: str) -> tuple[multiassert.Violation, list[str]]:
    """What a batch with a NaN says after two without a probe, and the warnings of all three."""
    from multiassert.engines.sglang_steps import around_run_batch, logger

    whole = fake_batch(True, "one", "two")
    batch = types.SimpleNamespace(**{name: getattr(whole, name) for name in BATCH_FIELDS if name != missing})
    if missing == "rid":
        batch.reqs = [types.SimpleNamespace(name="one")]
    values = {"forward_ct": 6, "device_module": torch.get_device_module(device), "enable_overlap": False}
    scheduler = types.SimpleNamespace(**{name: values[name] for name in values if name != missing})
    logits = torch.tensor([[1.0], [NAN]]).to(device)

    def forward(*_: object) -> None:
        probes().maybe_detect_nan(logits, "logits")

    lines: list[str] = []
    with (
        multiassert.override("raise" if device.type == "cpu" else None),
        switches(ENABLE_ASYNC_ASSERT=True),
        mock.patch("multiassert.engines.sglang_steps._warned", False),
        mock.patch.object(logger, "warning", side_effect=lambda text, *details: lines.append(text % details)),
    ):
        for _ in range(2):
            around_run_batch(lambda *_, **__: None, scheduler, batch=batch)
        found = caught(functools.partial(around_run_batch, forward, scheduler, batch))
        let_time_pass()
        return only(found or caught(multiassert.poll)), lines


def caught(call: Callable[[], object]) -> Sequence[multiassert.Violation]:
    """The violations that a call raises."""
    try:
        call()
    except multiassert.AsyncAssertionError as error:
        return error.violations
    return ()


# ---------------------------------------------------------------------------------------------------------------------
# What SGLang's own tests want of these functions.


@on_the_cpu
def the_words_are_those_of_sglang() -> None:
    calls: list[tuple[str, Callable[[], object]]] = [
        ("NaN detected! activations", lambda: probes().maybe_detect_nan(tensor(0, NAN), "activations")),
        ("Inf detected! activations", lambda: probes().maybe_detect_inf(tensor(0, INF), "activations")),
        ("outside", lambda: probes().maybe_detect_in_closed_range(tensor(-2.01), -2.0, 3.0, "scores")),
        ("outside", lambda: probes().maybe_detect_in_closed_range(tensor(3.01), -2.0, 3.0, "scores")),
        ("index < 0", lambda: probes().maybe_detect_oob(ids(-1, 4), low=0, high=5, msg="token ids")),
        ("index >= 5", lambda: probes().maybe_detect_oob(ids(0, 5), low=0, high=5, msg="token ids")),
        ("page-misaligned", lambda: probes().maybe_detect_page_aligned(ids(0, 5), page_size=4, msg="slots")),
        ("x", lambda: probes().maybe_assert_async(torch.tensor(False), "x")),
        ("x", lambda: probes().maybe_assert_sum(torch.tensor([True, True]), 3, "x")),
    ]
    switch = module("environ").envs.SGLANG_ENABLE_ASYNC_ASSERT
    for words, call in calls:
        with mock.patch.object(switch, "get", return_value=True), pytest.raises(RuntimeError, match=words):
            call()
        with mock.patch.object(switch, "get", return_value=False):
            call()


@on_the_cpu
def nothing_none_and_what_is_at_the_bounds_are_fine() -> None:
    with switches(ENABLE_ASYNC_ASSERT=True):
        for name in ("maybe_detect_nan", "maybe_detect_inf"):
            getattr(probes(), name)(None, "missing")
        probes().maybe_detect_nan(tensor(INF), "x")
        probes().maybe_detect_inf(tensor(NAN), "x")
        probes().maybe_detect_in_closed_range(None, 0.0, 1.0, "missing")
        probes().maybe_detect_in_closed_range(torch.tensor([]), 0.0, 1.0, "empty")
        probes().maybe_detect_in_closed_range(tensor(-2, 0, 3), -2.0, 3.0, "scores")
        probes().maybe_detect_oob(None, 0, 1, "missing")
        probes().maybe_detect_oob(torch.tensor([], dtype=torch.int64), 0, 1, "empty")
        probes().maybe_detect_oob(ids(0, 4), low=0, high=5, msg="token ids")
        probes().maybe_detect_page_aligned(None, page_size=4, msg="slots")
        probes().maybe_detect_page_aligned(torch.tensor([], dtype=torch.int64), page_size=4, msg="slots")
        probes().maybe_detect_page_aligned(ids(3), page_size=1, msg="slots")
        probes().maybe_detect_page_aligned(ids(0, 4, 8), page_size=4, msg="slots")
        probes().maybe_assert_sum(ids(1, 2), 3, "x")


@on_the_cpu
def logits_stay_as_they_are_where_sglang_heals_none() -> None:
    logits = tensor(NAN, INF, -INF, 2)
    with switches(SANITIZE_NAN_LOGITS=False), mock.patch.object(probes()._nan_warner, "check") as warn:
        probes().sanitize_nan_logits(logits, "sampler")
    assert str(logits.tolist()) == "[nan, inf, -inf, 2.0]"
    warn.assert_not_called()


@on_the_cpu
def the_throttled_warning_goes_by_way_of_sglangs_warner() -> None:
    logits = tensor(NAN, 2)
    with switches(SANITIZE_NAN_LOGITS=True), mock.patch.object(probes()._nan_warner, "check") as warn:
        probes().sanitize_nan_logits(logits, "sampler")
    warn.assert_called_once_with(logits, "sampler")


@on_the_cpu
def the_assert_comes_before_the_healing() -> None:
    logits = tensor(NAN)
    on = switches(SANITIZE_NAN_LOGITS=True, ENABLE_ASYNC_ASSERT=True)
    with on, pytest.raises(RuntimeError, match="NaN detected! sampler"):
        probes().sanitize_nan_logits(logits, "sampler")
    assert logits.isnan().all()


@on_the_cpu
def an_invariant_crashes_by_bucket_and_level_and_recovers_always() -> None:
    invariants = module("utils.invariants")
    bucket = invariants.Bucket
    crashes_from = {bucket.SOFTEN: 3, bucket.GUARD: 2, bucket.FATAL_CONTAINABLE: 2, bucket.FATAL_UNCONTAINABLE: 1}
    assert set(crashes_from) == set(bucket)
    for kind, lowest in crashes_from.items():
        declared = invariant(kind.value, kind)
        if kind is not bucket.FATAL_UNCONTAINABLE:
            declared.recover = lambda value: value.clamp(0, 1)
        for level in range(3):
            with switches(INVARIANT_CHECK=level), mock.patch.object(torch, "_assert_async") as watched:
                recovered = invariants.expect(declared, tensor(5, 0.5))
            assert watched.call_count == (level >= lowest), (kind, level)
            if level >= lowest:
                condition, text = watched.call_args.args
                assert not bool(condition)
                assert text.startswith(f"invariant-check FAILED [{kind.value}]")
            if kind is not bucket.FATAL_UNCONTAINABLE:
                assert recovered.tolist() == [1.0, 0.5]
            # Unwatched, it is our error, with the record.
            with switches(INVARIANT_CHECK=level):
                found = caught(functools.partial(invariants.expect, declared, tensor(5, 0.5)))
            assert [violation.rows for violation in found] == [(0,)] * (level >= lowest)
    with pytest.raises(ValueError, match="duplicate"):
        invariants.Invariant("guard", bucket.GUARD, invariants.InClosedRange(0, 1))


@on_the_cpu
def the_reporter_counts_on_the_cpu() -> None:
    invariants = module("utils.invariants")
    guard = invariant("counted", invariants.Bucket.GUARD)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    invariants.logger.addHandler(handler)
    with switches(INVARIANT_CHECK=1), mock.patch.object(torch, "_assert_async") as watched:
        invariants.expect(guard, tensor(5, 6, 0.5))
    invariants.logger.removeHandler(handler)
    watched.assert_not_called()
    assert ["counted" in line and "2 total" in line for line in lines] == [True]


@on_the_cpu
def sglangs_matrix_decides_where_the_mode_comes_from_sglangs_own_level() -> None:
    invariants = module("utils.invariants")
    fatal = invariant("fatal", invariants.Bucket.FATAL_UNCONTAINABLE)
    environment = {"SGLANG_INVARIANT_CHECK": "1"}
    modes = multiassert.settings.read_environment(environment, [])
    with multiassert.override("off"), switches(INVARIANT_CHECK=1):
        multiassert.settings.apply(modes)  # warn, for probes that are not SGLang's
        assert only(caught(lambda: invariants.expect(fatal, tensor(5)))).rows == (0,)


# ---------------------------------------------------------------------------------------------------------------------
# How it gets there.


def bound_by_name(values: Sequence[object]) -> int:
    """How many attributes of SGLang's modules are one of these."""
    return sum(
        any(value is known for known in values)
        for name, holder in list(sys.modules.items())
        if name.startswith("sglang.") and isinstance(holder, types.ModuleType)
        for value in list(vars(holder).values())
    )


@on_the_cpu
def every_binding_is_reached_and_given_back() -> None:
    ours = [getattr(probes(), name) for name in NAMES]
    assert bound_by_name(ours) > len(ours) + 5  # memory_pool, sampler and others have imported theirs by name
    adapter.uninstall()
    try:
        theirs = [getattr(probes(), name) for name in NAMES]
        assert all(function.__code__.co_filename == probes().__file__ for function in theirs)
        assert bound_by_name(ours) == 0
        count = bound_by_name(theirs)
        assert module("utils.invariants")._signal.__code__.co_filename == module("utils.invariants").__file__
        with switches(ENABLE_ASYNC_ASSERT=True), pytest.raises(RuntimeError) as caught_error:
            probes().maybe_detect_nan(tensor(NAN), "x")
        assert not isinstance(caught_error.value, multiassert.AsyncAssertionError)
    finally:
        hook()
    assert bound_by_name(theirs) == 0
    assert bound_by_name([getattr(probes(), name) for name in NAMES]) == count == bound_by_name(ours) + count


@on_the_cpu
def a_module_that_is_imported_later_has_ours() -> None:
    later = importlib.import_module("sglang.srt.speculative.eagle_utils")
    assert later.maybe_detect_oob is probes().maybe_detect_oob
    with switches(ENABLE_ASYNC_ASSERT=True), pytest.raises(multiassert.AsyncAssertionError):
        later.maybe_detect_oob(ids(-1), 0, 1, "x")


@on_the_cpu
def what_is_registered_again_stays_as_it_is() -> None:
    registry = module("plugins.hook_registry").HookRegistry
    before = {name: getattr(probes(), name) for name in NAMES}
    for _ in range(2):
        adapter.register()
        adapter.install()
        load_plugins()
    assert {name: getattr(probes(), name) for name in NAMES} == before
    ours = [target for target in registry._hooks if "async_probe" in target or "invariants" in target]
    assert len(ours) == 11
    assert all(len(registry._hooks[target]) == 1 for target in registry._hooks)


@on_the_cpu
def the_signatures_are_those_of_sglang() -> None:
    from multiassert.engines import sglang_probes

    for name in NAMES:
        theirs = inspect.signature(inspect.unwrap(getattr(probes(), name)))
        ours = inspect.signature(getattr(sglang_probes, name))
        assert list(ours.parameters) == list(theirs.parameters), name


@on_the_cpu
def a_mode_that_can_do_nothing_is_told() -> None:
    lines: list[str] = []
    with mock.patch.object(adapter.logger, "warning", side_effect=lambda text, *_: lines.append(text)):
        for mode, on, expected in (("raise", False, 1), ("raise", True, 0), ("off", False, 0)):
            lines.clear()
            adapter.uninstall()
            with multiassert.override(mode), switches(ENABLE_ASYNC_ASSERT=on):
                adapter.install()
            assert len(lines) == expected, (mode, on, lines)
    adapter.uninstall()
    hook()


@on_the_cpu
def a_function_that_sglang_does_not_have_is_left_out() -> None:
    lines: list[str] = []
    adapter.uninstall()
    check = probes().maybe_detect_page_aligned
    del probes().maybe_detect_page_aligned
    try:
        with mock.patch.object(adapter.logger, "warning", side_effect=lambda text, *_: lines.append(text % _)):
            hook()
        assert ["maybe_detect_page_aligned" in line for line in lines] == [True]
        with switches(ENABLE_ASYNC_ASSERT=True), pytest.raises(multiassert.AsyncAssertionError):
            probes().maybe_detect_nan(tensor(NAN), "x")
    finally:
        probes().maybe_detect_page_aligned = check
        adapter.uninstall()
        hook()


@on_the_cpu
def where_invariants_have_no_level_none_is_on() -> None:
    from multiassert.engines import sglang_switches

    invariants = module("utils.invariants")
    with switches(INVARIANT_CHECK=1):
        assert sglang_switches.any_is_on()
        with mock.patch.object(invariants, "resolve_level"):
            del invariants.resolve_level
            assert not sglang_switches.any_is_on()


@on_the_cpu
def a_module_that_sglang_does_not_have_is_left_out() -> None:
    lines: list[str] = []
    real = importlib.import_module

    def import_module(name: str, *package: str) -> types.ModuleType:
        if name == "sglang.srt.utils.invariants":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *package)

    adapter.uninstall()
    try:
        with (
            mock.patch.object(importlib, "import_module", side_effect=import_module),
            mock.patch.object(adapter.logger, "warning", side_effect=lambda text, *_: lines.append(text % _)),
        ):
            hook()
        assert ["sglang.srt.utils.invariants" in line for line in lines] == [True]
        assert not hasattr(module("utils.invariants")._signal, "__wrapped__")
        assert hasattr(module("managers.scheduler").Scheduler.run_batch, "__wrapped__")  # which comes after it
    finally:
        adapter.uninstall()
        hook()


# ---------------------------------------------------------------------------------------------------------------------


def load_plugins() -> None:
    """SGLang's own way to its plug-ins, as if for the first time in this process."""
    plugins = cast("Any", sys.modules["sglang.srt.plugins"])
    plugins._plugins_loaded = False
    plugins.load_plugins()


def hook() -> None:
    """Hand SGLang ours."""
    load_plugins()
    for name in NAMES:
        if hasattr(probes(), name):
            assert hasattr(getattr(probes(), name), "__wrapped__"), f"{name} is not replaced"


def start_anew() -> None:
    """No violation and no work from before."""
    delivery.start_anew()
    simulator = simulate.installed()
    if simulator is not None:
        simulator.reset()


def run(check: Check) -> str | None:
    """The traceback of a check that fails."""
    start_anew()
    try:
        with multiassert.override("off"):
            check()
    except BaseException:
        return traceback.format_exc()
    return None


def main(platform: str) -> None:
    """Run the checks of a platform, and print what came of them."""
    global device
    delivery.SECONDS_BETWEEN_SNAPSHOTS = INF  # a slow machine must not make a probe look by itself
    objects.prepare()
    objects.import_sglang()
    device = objects.device_of(platform)
    hook()
    checks = {**ON_EVERY_PLATFORM, **(ON_THE_CPU if platform == "cpu" else {})}
    results = {name: run(check) for name, check in checks.items()}
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
