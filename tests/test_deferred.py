"""What the deferred mechanism promises on a device: no host wait, one small copy a step, nothing too early or lost.

On a simulated device the promises are counted; on a real one, what can be checked from outside is.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import math
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import multiassert
from conftest import finish
from multiassert import AsyncAssertionError, backends, dispatch, simulate
from multiassert.backends import Mechanism
from multiassert.simulate import Simulator

Probe = Callable[[], None]


def mixed_probes(device: torch.device) -> list[Probe]:
    """One clean call of every probe, with and without masks, over many dtypes."""
    logits = {dtype: torch.randn(4, 96, device=device).to(dtype) for dtype in (torch.float32, torch.bfloat16)}
    half = torch.zeros(4, 8, dtype=torch.float16, device=device)
    fp8 = torch.zeros(4, 8, device=device).to(torch.float8_e4m3fn)
    ids = torch.arange(4, device=device)
    ids32 = torch.zeros(2, 5, dtype=torch.int32, device=device)
    many = torch.zeros(1000, dtype=torch.int64, device=device)
    row_mask = torch.ones(4, 1, dtype=torch.bool, device=device)
    mask = torch.ones(4, 96, dtype=torch.bool, device=device)
    count = torch.tensor(3, device=device)
    lengths = torch.tensor([[3], [5]], device=device)
    true = torch.ones((), dtype=torch.bool, device=device)
    float32, bfloat16 = logits[torch.float32], logits[torch.bfloat16]
    return [
        lambda: multiassert.maybe_detect_nan(float32, "nan float32"),
        lambda: multiassert.maybe_detect_nan(bfloat16, "nan bfloat16", num_valid=3),
        lambda: multiassert.maybe_detect_nan(bfloat16, "nan rows on the device", num_valid=count),
        lambda: multiassert.maybe_detect_nan(float32, "nan masked", where=mask),
        lambda: multiassert.maybe_detect_nan(float32, "nan masked rows", where=row_mask),
        lambda: multiassert.maybe_detect_nan(fp8, "nan fp8"),
        lambda: multiassert.maybe_detect_inf(half, "inf half"),
        lambda: multiassert.maybe_detect_inf(float32, "inf, -inf allowed", allow_neginf=True),
        lambda: multiassert.maybe_detect_oob(ids, 0, 4, "ids"),
        lambda: multiassert.maybe_detect_oob(ids32, 0, 9, "ids, a sentinel beside", sentinel=-1),
        lambda: multiassert.maybe_detect_oob(ids32, 0, 9, "ids, a sentinel far off", sentinel=77),
        lambda: multiassert.maybe_detect_oob(ids32, 0, lengths, "ids, a length per row"),
        lambda: multiassert.maybe_detect_oob(many, 0, 9, "more ids than cells"),
        lambda: multiassert.maybe_detect_page_aligned(many, 64, "page starts"),
        lambda: multiassert.maybe_detect_page_aligned(many, 48, "page starts, no power of two"),
        lambda: multiassert.maybe_detect_in_closed_range(half, 0.0, 1.0, "range"),
        lambda: multiassert.maybe_assert_async(true, "condition"),
        lambda: multiassert.maybe_assert_sum(half, 0, "sum"),
        lambda: multiassert.maybe_warn_nan(float32, "warn"),
        lambda: multiassert.sanitize_nan_logits(float32, "healed"),
        lambda: _safe_ids(ids),
    ]


def _safe_ids(ids: torch.Tensor) -> None:
    multiassert.sanitize_oob(ids, 0, 4, "safe ids")


def test_ten_thousand_probes_and_a_thousand_steps_wait_for_nothing(
    simulator: Simulator, device: torch.device, record_property: Callable[[str, object], None]
) -> None:
    probes = mixed_probes(device)
    order = random.Random(0).choices(probes, k=10_000)
    with multiassert.override("raise"):
        for probe in probes:
            probe()
        multiassert.drain()
        with simulator.record() as ledger, simulator.no_sync():
            for number, probe in enumerate(order):
                probe()
                if number % 10 == 9:
                    multiassert.step()
                    simulator.run_all()
        assert ledger.waits == []
        assert ledger.fallbacks == []
        copies = ledger.kernels.count("copy to host")
        assert 900 <= copies <= 1000
        multiassert.drain()
    record_property("host waits of 10,000 probes and 1,000 steps", len(ledger.waits))


def test_plain_torch_asserts_would_wait_each_time(
    simulator: Simulator, device: torch.device, platform: str, record_property: Callable[[str, object], None]
) -> None:
    """The same count for `torch._assert_async`, so that the difference is a number."""
    logits = torch.zeros(4, 96, device=device)
    with simulator.record() as ledger:
        for _ in range(10_000):
            torch._assert_async(~torch.any(torch.isnan(logits)), "NaN")
    simulator.run_all()
    record_property("host waits of 10,000 plain torch._assert_async", len(ledger.waits))
    assert len(ledger.waits) == (0 if platform == "generic" else 10_000)


def test_a_step_is_at_most_one_copy_of_at_most_64_kib(simulator: Simulator, device: torch.device) -> None:
    sites = [multiassert.site(f"site {number}") for number in range(200)]
    logits = torch.zeros(256, 8, device=device)
    ids = torch.zeros(256, dtype=torch.int64, device=device)
    with multiassert.override("raise"):
        multiassert.step()  # from here on the engine says when; before, probes send by themselves every so often
        for _ in range(3):
            with simulator.record() as ledger:
                for site in sites[:100]:
                    multiassert.maybe_detect_nan(logits, site)
                for site in sites[100:]:
                    multiassert.maybe_detect_oob(ids, 0, 9, site)
                multiassert.step()
            assert ledger.kernels.count("copy to host") == 1
        (snapshot,) = list(multiassert.delivery._delivery.under_way)[-1:]
        assert snapshot._last_byte < 64 * 1024
        multiassert.drain()


def test_a_violation_is_invisible_until_its_work_has_run(simulator: Simulator, device: torch.device) -> None:
    bad = torch.zeros(4, 8, device=device)
    bad[2] = float("nan")
    simulator.run_all()
    with multiassert.override("warn"), simulator.no_sync():
        multiassert.maybe_detect_nan(bad, "late")
        multiassert.step()
        while simulator.pending > 1:
            assert multiassert.poll() == []
            simulator.advance()
        simulator.advance()
        (violation,) = multiassert.poll()
    assert (violation.rows, violation.step) == ((2,), 0)


def test_the_host_may_run_ahead(simulator: Simulator, device: torch.device) -> None:
    """More steps under way than there are buffers: nothing waits, the last record covers a range of steps."""
    rows = [torch.zeros(10, 8, device=device) for _ in range(10)]
    for step, tensor in enumerate(rows):
        tensor[step] = float("nan")
    simulator.run_all()
    with multiassert.override("warn"), simulator.no_sync():
        for tensor in rows:
            multiassert.maybe_detect_nan(tensor, "ahead")
            multiassert.step()
        assert multiassert.poll() == []
        simulator.run_all()
        found = multiassert.poll()
        simulator.run_all()
        found += multiassert.poll()
    assert [v.step for v in found] == [0, 1, 2, 3, (4, 10)]
    assert sorted(row for v in found for row in v.rows) == list(range(10))


@pytest.fixture
def graphs(simulator: Simulator, device: torch.device) -> tuple[object, Callable[[], object]]:
    """The device's module and a way to make a graph."""
    operators = backends.named(simulator.name).operators
    module = torch.get_device_module(device)
    return module, getattr(module, operators.graph_class if operators is not None else "CUDAGraph")


def test_a_captured_probe_fires_at_the_replay_that_is_bad_and_not_before(
    simulator: Simulator, device: torch.device, graphs: tuple[object, Callable[[], object]]
) -> None:
    module, new_graph = graphs
    static, stream, graph = torch.zeros(4, 8, device=device), module.Stream(), new_graph()  # type: ignore[attr-defined]
    with multiassert.override("warn"), module.stream(stream):  # type: ignore[attr-defined]
        multiassert.prewarm(device)
        with module.graph(graph, stream=stream):  # type: ignore[attr-defined]
            hidden = static * 2
            multiassert.maybe_detect_nan(hidden, "in the graph")
            multiassert.maybe_detect_oob(hidden.to(torch.int64), 0, 100, "ids in the graph")
        with simulator.no_sync():
            for step in range(6):
                if step == 3:
                    static[1] = float("nan")
                if step == 4:
                    static.zero_()
                    static[2] = 50
                graph.replay()  # type: ignore[attr-defined]
                multiassert.step()
                simulator.run_all()
                found = multiassert.poll()
                if step == 3:
                    assert [(v.message, v.rows) for v in found if v.kind == "nan"] == [("in the graph", (1,))]
                    assert {v.step for v in found} == {3}
                elif step >= 4:
                    assert [(v.message, v.rows, v.value, v.step) for v in found] == [
                        ("ids in the graph", (2,), 100, step)
                    ]
                else:
                    assert found == []


def test_a_graph_reads_num_valid_anew_at_each_replay(
    simulator: Simulator, device: torch.device, graphs: tuple[object, Callable[[], object]]
) -> None:
    module, new_graph = graphs
    logits, valid = torch.zeros(4, 8, device=device), torch.tensor(4, device=device)
    stream, graph = module.Stream(), new_graph()  # type: ignore[attr-defined]
    logits[3] = float("nan")  # a padding row, or not
    with multiassert.override("warn"), module.stream(stream):  # type: ignore[attr-defined]
        multiassert.prewarm(device)
        with module.graph(graph, stream=stream):  # type: ignore[attr-defined]
            multiassert.maybe_detect_nan(logits, "padded", num_valid=valid)
        seen = []
        for count in (3, 4, 2, 4):
            valid.fill_(count)
            graph.replay()  # type: ignore[attr-defined]
            multiassert.step()
            simulator.run_all()
            seen.append([v.rows for v in multiassert.poll()])
    assert seen == [[], [(3,)], [], [(3,)]]


def test_a_graph_replayed_on_another_stream_than_it_was_captured_on(
    simulator: Simulator, device: torch.device, graphs: tuple[object, Callable[[], object]]
) -> None:
    """As engines do: captured on a side stream, replayed on the main one. No replay may fall into a snapshot."""
    module, new_graph = graphs
    static, stream, graph = torch.zeros(4, 8, device=device), module.Stream(), new_graph()  # type: ignore[attr-defined]
    with multiassert.override("warn"):
        with module.stream(stream):  # type: ignore[attr-defined]
            multiassert.prewarm(device)
            with module.graph(graph, stream=stream):  # type: ignore[attr-defined]
                multiassert.maybe_detect_nan(static * 2, "in the graph")
        found = []
        with simulator.no_sync():
            for step in range(4):
                static[step] = float("nan")
                graph.replay()  # type: ignore[attr-defined]
                multiassert.step()
                static.zero_()
        for _ in range(8):
            simulator.run_all()
            found += multiassert.poll()
    assert [(v.step, v.rows) for v in found] == [(step, (step,)) for step in range(4)]


def test_a_snapshot_waits_on_the_device_for_the_replays_of_the_callers_stream(
    simulator: Simulator, device: torch.device, graphs: tuple[object, Callable[[], object]]
) -> None:
    module, new_graph = graphs
    bad, stream, graph = torch.full((2, 2), float("nan"), device=device), module.Stream(), new_graph()  # type: ignore[attr-defined]
    with multiassert.override("warn"):
        with module.stream(stream):  # type: ignore[attr-defined]
            multiassert.prewarm(device)
            with module.graph(graph, stream=stream):  # type: ignore[attr-defined]
                multiassert.maybe_detect_nan(bad, "in the graph")
        graph.replay()  # type: ignore[attr-defined]
        multiassert.step()
        simulator.advance(1000, stream=stream.stream_id)  # the snapshot's stream alone goes on
        assert [v.step for v in multiassert.poll()] == [0]


def test_a_step_of_another_thread_puts_nothing_into_a_capture(
    simulator: Simulator, device: torch.device, graphs: tuple[object, Callable[[], object]]
) -> None:
    module, new_graph = graphs
    bad, stream, graph = torch.full((2, 2), float("nan"), device=device), module.Stream(), new_graph()  # type: ignore[attr-defined]
    with multiassert.override("warn"), module.stream(stream):  # type: ignore[attr-defined]
        multiassert.maybe_detect_nan(bad, "before")
        with module.graph(graph, stream=stream):  # type: ignore[attr-defined]
            before = len(graph._work)  # type: ignore[attr-defined]
            with concurrent.futures.ThreadPoolExecutor(1) as other:
                other.submit(multiassert.step).result()  # raises here what it raised there
            assert len(graph._work) == before  # type: ignore[attr-defined]
        assert [v.message for v in multiassert.drain()] == ["before"]


def test_the_first_cause_comes_first_although_its_stream_is_slower(simulator: Simulator, device: torch.device) -> None:
    module = torch.get_device_module(device)
    bad, streams = torch.full((2, 2), float("nan"), device=device), [module.Stream(), module.Stream()]
    simulator.run_all()
    with multiassert.override("warn"):
        for stream, message in zip(streams, ("cause", "consequence"), strict=True):
            with module.stream(stream):
                multiassert.maybe_detect_nan(bad, message)
        multiassert.step()
        simulator.advance(100, stream=streams[1].stream_id)
        multiassert.step()  # sees the consequence, and does not return it
        simulator.run_all()
        assert [v.message for v in multiassert.drain()] == ["cause", "consequence"]


def test_a_site_first_seen_in_a_capture_has_its_limits_in_eager_code_too(
    simulator: Simulator, device: torch.device, graphs: tuple[object, Callable[[], object]]
) -> None:
    module, new_graph = graphs
    ids, stream = torch.tensor([99], device=device), module.Stream()  # type: ignore[attr-defined]
    site = multiassert.site("ids")
    with multiassert.override("warn"), module.stream(stream):  # type: ignore[attr-defined]
        multiassert.prewarm(device)
        with module.graph(new_graph(), stream=stream):  # type: ignore[attr-defined]
            multiassert.maybe_detect_oob(ids, 0, 5, site)
        multiassert.maybe_detect_oob(ids, 0, 5, site)  # the graph has not been replayed
        assert [(v.kind, v.value) for v in multiassert.drain()] == [("high", 99)]


def test_a_capture_while_a_snapshot_is_under_way(
    simulator: Simulator, device: torch.device, graphs: tuple[object, Callable[[], object]]
) -> None:
    module, new_graph = graphs
    bad, stream = torch.full((2, 2), float("nan"), device=device), module.Stream()  # type: ignore[attr-defined]
    with multiassert.override("warn"), module.stream(stream):  # type: ignore[attr-defined]
        multiassert.prewarm(device)
        multiassert.maybe_detect_nan(bad, "before")
        multiassert.step()
        with module.graph(new_graph(), stream=stream):  # type: ignore[attr-defined]
            multiassert.maybe_detect_nan(bad, "captured")
        assert [v.message for v in multiassert.drain()] == ["before"]


def test_a_sentinel_on_the_device_is_refused_and_not_read(simulator: Simulator, device: torch.device) -> None:
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    with multiassert.override("warn"), simulator.no_sync(), pytest.raises(TypeError, match="sentinel must be known"):
        multiassert.maybe_detect_oob(ids, 0, 5, "ids", sentinel=ids[0])


def test_the_first_probe_inside_a_capture_says_what_to_do(
    simulator: Simulator, device: torch.device, graphs: tuple[object, Callable[[], object]]
) -> None:
    module, new_graph = graphs
    logits, stream = torch.zeros(4, 8, device=device), module.Stream()  # type: ignore[attr-defined]
    with (
        multiassert.override("raise"),
        pytest.raises(RuntimeError, match=r"multiassert\.prewarm\("),
        module.graph(new_graph(), stream=stream),  # type: ignore[attr-defined]
    ):
        multiassert.maybe_detect_nan(logits, "not prewarmed")


def test_prewarming_serves_one_stream_that_was_never_probed(
    simulator: Simulator, device: torch.device, graphs: tuple[object, Callable[[], object]]
) -> None:
    """torch.cuda.graph makes a stream of its own, which nobody could prewarm."""
    module, new_graph = graphs
    bad, graph = torch.full((4, 8), float("nan"), device=device), new_graph()
    with multiassert.override("warn"):
        for message in ("first", "second"):
            multiassert.prewarm(device)
            multiassert.prewarm(device)
            with module.graph(graph, stream=module.Stream()):  # type: ignore[attr-defined]
                multiassert.maybe_detect_nan(bad, message)
                multiassert.maybe_detect_oob(torch.zeros(2, dtype=torch.int64, device=device), 0, 4, message)
            graph.replay()  # type: ignore[attr-defined]
            assert [v.message for v in multiassert.drain()] == [message]
        with (
            pytest.raises(RuntimeError, match=r"multiassert\.prewarm\("),
            module.graph(new_graph(), stream=module.Stream()),  # type: ignore[attr-defined]
        ):
            multiassert.maybe_detect_nan(bad, "a third stream, not prewarmed")


def test_a_capture_inside_suspend_has_no_probe_in_it(
    simulator: Simulator, device: torch.device, graphs: tuple[object, Callable[[], object]]
) -> None:
    module, new_graph = graphs
    bad, stream, graph = torch.full((4, 8), float("nan"), device=device), module.Stream(), new_graph()  # type: ignore[attr-defined]
    with multiassert.override("warn"), multiassert.suspend(), module.graph(graph, stream=stream):  # type: ignore[attr-defined]
        multiassert.maybe_detect_nan(bad, "suspended")
    graph.replay()  # type: ignore[attr-defined]
    assert multiassert.drain() == []


def resting(way: str) -> contextlib.AbstractContextManager[None]:
    return multiassert.suspend() if way == "suspend" else multiassert.override("off")


@pytest.mark.parametrize("way", ["off", "suspend"])
@pytest.mark.parametrize("steps_inside", [0, 1, 6])  # 6: more than can be under way
def test_a_captured_probe_is_turned_off_and_on_without_a_new_capture(
    simulator: Simulator,
    device: torch.device,
    graphs: tuple[object, Callable[[], object]],
    way: str,
    steps_inside: int,
) -> None:
    module, new_graph = graphs
    static, stream, graph = torch.zeros(4, 8, device=device), module.Stream(), new_graph()  # type: ignore[attr-defined]
    bad, clean = torch.zeros(4, 8), torch.zeros(4, 8, device=device)
    bad[2] = float("nan")
    bad = bad.to(device)

    def replay(values: torch.Tensor) -> None:
        static.copy_(values)
        graph.replay()  # type: ignore[attr-defined]

    with multiassert.override("warn"):
        multiassert.prewarm(device)
        with module.graph(graph, stream=stream):  # type: ignore[attr-defined]
            multiassert.maybe_detect_nan(static * 2, "in the graph")
        multiassert.step()
        with simulator.no_sync():
            replay(bad)  # counts
            with resting(way):
                replay(bad)
                for _ in range(steps_inside):
                    multiassert.step()
                    replay(bad)
            replay(clean)
            multiassert.step()
            simulator.run_all()
            found = multiassert.poll()
            assert [(v.message, v.step, v.rows) for v in found] == [("in the graph", 1, (2,))]
            multiassert.step()
            simulator.run_all()
            assert multiassert.poll() == []
            replay(bad)
            multiassert.step()
            simulator.run_all()
            assert [(v.step, v.rows) for v in multiassert.poll()] == [(steps_inside + 3, (2,))]


def test_a_captured_probe_that_is_turned_on_while_another_graph_is_captured(
    simulator: Simulator, device: torch.device, graphs: tuple[object, Callable[[], object]]
) -> None:
    module: Any = graphs[0]
    static, stream, graph, other = torch.zeros(4, 8, device=device), module.Stream(), graphs[1](), module.Stream()
    bad, clean = torch.full((4, 8), float("nan"), device=device), torch.zeros(4, 8, device=device)
    with multiassert.override("warn"):
        multiassert.prewarm(device)
        with module.graph(graph, stream=stream):
            multiassert.maybe_detect_nan(static, "in the graph")
        multiassert.step()
        off = multiassert.override("off")
        off.__enter__()
        static.copy_(bad)
        graph.replay()  # type: ignore[attr-defined]
        static.copy_(clean)
        with module.graph(graphs[1](), stream=other):
            off.__exit__(None, None, None)
        multiassert.step()
        assert multiassert.drain() == []
        static.copy_(bad)
        graph.replay()  # type: ignore[attr-defined]
        assert [v.message for v in multiassert.drain()] == ["in the graph"]


def test_turning_a_captured_probe_off_adds_no_kernel_to_a_replay(
    simulator: Simulator, device: torch.device, graphs: tuple[object, Callable[[], object]]
) -> None:
    """Why there is no switch on the device: it could not take the reduction out of the graph, only add to it."""
    module, new_graph = graphs
    static, graph, stream = torch.zeros(4, 8, device=device), new_graph(), module.Stream()  # type: ignore[attr-defined]
    site = multiassert.site("in the graph")
    with multiassert.override("warn"):
        with module.stream(stream):  # type: ignore[attr-defined]
            multiassert.maybe_detect_nan(static, site)  # so that its limits are set before
        with module.graph(graph, stream=stream):  # type: ignore[attr-defined]
            multiassert.maybe_detect_nan(static, site)
    assert len(graph._work) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("look", ["step", "poll"])
def test_thousands_of_replays_with_no_python_in_between(
    simulator: Simulator, device: torch.device, graphs: tuple[object, Callable[[], object]], look: str
) -> None:
    module, new_graph = graphs
    static, graph = torch.zeros(4, 8, device=device), new_graph()
    with multiassert.override("warn"):
        multiassert.prewarm(device)
        with module.graph(graph):  # type: ignore[attr-defined]
            static.mul_(1.5).add_(1)  # from 0 it overflows float32 after some 215 replays
            multiassert.maybe_detect_inf(static, "in the graph")
        multiassert.step()
        for _ in range(2000):
            graph.replay()  # type: ignore[attr-defined]
        static.zero_()
        getattr(multiassert, look)()
        simulator.run_all()
        (violation,) = multiassert.poll()
        assert (violation.rows, violation.value, violation.step) == ((0, 1, 2, 3), float("inf"), 1)
        multiassert.step()
        for _ in range(100):
            graph.replay()  # type: ignore[attr-defined]
        multiassert.step()
        assert multiassert.drain() == []


@pytest.mark.parametrize("capture_query", ["answers", "fails"])
def test_an_index_that_crashes_the_device_is_named_when_it_was_on_its_way(
    simulator: Simulator, device: torch.device, capture_query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's query whether a graph is captured, too, may answer with the error of earlier work."""
    module = torch.get_device_module(device)
    is_capturing = module.is_current_stream_capturing
    if capture_query == "fails":
        monkeypatch.setattr(module, "is_current_stream_capturing", lambda: (simulator.raise_fault(), is_capturing())[1])
    table, ids = torch.zeros(10, 4, device=device), torch.tensor([3, 10], device=device)
    with multiassert.override("raise"):
        multiassert.maybe_detect_oob(ids, 0, 10, "token ids")
        multiassert.poll()  # before the work that a bad index would crash
        torch.nn.functional.embedding(ids, table)
        simulator.run_all()
        with pytest.raises(AsyncAssertionError, match="token ids") as raised:
            multiassert.drain()
    assert isinstance(raised.value.__cause__, simulate.DeviceFault)
    assert [(v.kind, v.rows, v.value) for v in raised.value.violations] == [("high", (1,), 10)]
    with pytest.raises(simulate.DeviceFault):  # and the device's own error is not hidden afterwards
        multiassert.drain()


def test_an_index_that_crashes_the_device_is_lost_when_it_was_not_on_its_way(
    simulator: Simulator, device: torch.device
) -> None:
    """What the documentation says is not promised."""
    table, ids = torch.zeros(10, 4, device=device), torch.tensor([3, 10], device=device)
    with multiassert.override("raise"):
        multiassert.maybe_detect_oob(ids, 0, 10, "token ids")
        torch.nn.functional.embedding(ids, table)
        with pytest.raises(simulate.DeviceFault):
            multiassert.drain()


def test_in_mode_warn_the_record_is_returned_before_the_devices_error(
    simulator: Simulator, device: torch.device
) -> None:
    table, ids = torch.zeros(10, 4, device=device), torch.tensor([3, 10], device=device)
    with multiassert.override("warn"):
        multiassert.maybe_detect_oob(ids, 0, 10, "token ids")
        multiassert.poll()
        torch.nn.functional.embedding(ids, table)
        simulator.run_all()
        assert [v.value for v in multiassert.drain()] == [10]
        with pytest.raises(simulate.DeviceFault):
            multiassert.drain()


def test_whether_a_graph_is_captured_is_asked_of_the_probed_device(
    simulator: Simulator, device: torch.device, graphs: tuple[object, Callable[[], object]]
) -> None:
    module: Any = graphs[0]
    if module.device_count() < 2:
        pytest.skip("the simulated device has a second one only with its compiled half")
    backend, other = backends.for_device_type(device.type), torch.device(device.type, 1)
    with module.graph(graphs[1]()):
        assert (backend.is_capturing(device), backend.is_capturing(other)) == (True, False)
        with module.device(other):
            assert (backend.is_capturing(device), backend.is_capturing(other)) == (True, False)


def test_probes_on_two_streams_wait_for_neither(simulator: Simulator, device: torch.device) -> None:
    module = torch.get_device_module(device)
    tensors = [torch.zeros(4, 8, device=device) for _ in range(2)]
    tensors[1][3] = float("nan")
    simulator.run_all()
    streams = [module.Stream(), module.Stream()]
    with multiassert.override("warn"), simulator.no_sync():
        for stream, tensor in zip(streams, tensors, strict=True):
            with module.stream(stream):
                multiassert.maybe_detect_nan(tensor, f"stream {streams.index(stream)}")
        multiassert.step()
        simulator.advance(100, stream=streams[1].stream_id)  # the second stream runs although the first does not
        assert [(v.message, v.rows) for v in multiassert.poll()] == [("stream 1", (3,))]
        simulator.run_all()
        assert multiassert.poll() == []


def test_the_state_stays_where_it_is(device: torch.device) -> None:
    """Captured graphs hold on to its addresses."""
    with multiassert.override("warn"):
        multiassert.prewarm(device)
        (state,) = multiassert.state.all_states()
        addresses = [page.cells.data_ptr() for page in state._pages]
        bad = torch.full((2, 2), float("nan"), device=device)
        for number in range(600):
            multiassert.maybe_detect_nan(bad, multiassert.site(f"site {number}"))
        assert len(multiassert.drain()) == 600
        assert [page.cells.data_ptr() for page in state._pages[: len(addresses)]] == addresses
        assert [page.capacity for page in state._pages if page.plane is torch.float32] == [256, 1024]


def test_pages_that_were_added_are_looked_at_too(device: torch.device) -> None:
    with multiassert.override("warn"):
        for number in range(600):
            tensor = torch.zeros(2, 2)
            tensor[1] = float("nan") if number in (0, 300, 599) else 0
            multiassert.maybe_detect_nan(tensor.to(device), multiassert.site(f"site {number}"))
            if number == 100:
                multiassert.step()
                finish(device)
        found = multiassert.drain()
    assert sorted((v.message, v.rows) for v in found) == [(f"site {n}", (1,)) for n in (0, 300, 599)]


def test_off_and_native_platforms_need_no_state(device: torch.device) -> None:
    multiassert.prewarm(device)
    assert multiassert.state.all_states() == []


def test_a_page_of_float64_is_made_when_it_is_needed(device: torch.device) -> None:
    tensor = torch.tensor([1e300, -1e300], dtype=torch.float64, device=device)
    with multiassert.override("warn"):
        multiassert.maybe_detect_inf(tensor, "large, but finite")
        multiassert.maybe_detect_in_closed_range(tensor, -1e300, 1e299, "range")
        (violation,) = multiassert.drain()
    assert (violation.message, violation.rows, violation.value) == ("range", (0,), 1e300)


def test_kernels_per_probe(simulator: Simulator, device: torch.device) -> None:
    """Never more than SGLang's probe dispatches: NaN 4, Inf 4, range 5, out of bounds 6, page 4, sum 3."""
    logits, ids = torch.zeros(4, 96, device=device), torch.zeros(64, dtype=torch.int64, device=device)
    ids2d, true = torch.zeros(4, 8, dtype=torch.int32, device=device), torch.ones((), dtype=torch.bool, device=device)
    most: dict[str, tuple[int, Probe]] = {
        "nan": (2, lambda: multiassert.maybe_detect_nan(logits, "nan")),
        "inf": (4, lambda: multiassert.maybe_detect_inf(logits, "inf")),
        "inf, -inf allowed": (3, lambda: multiassert.maybe_detect_inf(logits, "inf", allow_neginf=True)),
        "range": (3, lambda: multiassert.maybe_detect_in_closed_range(logits, 0, 1, "range")),
        "ids": (2, lambda: multiassert.maybe_detect_oob(ids, 0, 9, "ids")),
        "ids in rows": (3, lambda: multiassert.maybe_detect_oob(ids2d, 0, 9, "ids")),
        "pages": (2, lambda: multiassert.maybe_detect_page_aligned(ids, 64, "pages")),
        "condition": (1, lambda: multiassert.maybe_assert_async(true, "condition")),
        "sum": (3, lambda: multiassert.maybe_assert_sum(ids, 0, "sum")),
    }
    with multiassert.override("raise"):
        for name, (kernels, probe) in most.items():
            for turn in range(2):  # the first call sets the limits of its slot
                with simulator.record() as ledger:
                    probe()
                if turn:
                    assert len(ledger.kernels) <= kernels, f"{name}: {ledger.kernels}"
        multiassert.step()
        for _, probe in most.values():
            probe()
        with simulator.record() as ledger:
            multiassert.step()
        assert len(ledger.kernels) <= 15, ledger.kernels
        multiassert.drain()


def test_every_operator_of_the_deferred_path_is_native_and_does_not_wait(
    simulator: Simulator, device: torch.device
) -> None:
    """The vendor's list itself is asked, not only what the simulation makes of it."""
    operators = backends.named(simulator.name).operators
    if operators is None:
        pytest.skip("a device of no vendor has no list")
    dispatched: set[str] = set()

    class Notes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            dispatched.add(str(func.name()))
            return func(*args, **(kwargs or {}))

    with multiassert.override("raise"), Notes():
        for probe in mixed_probes(device):
            probe()
        multiassert.step()
        multiassert.drain()
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
    native = operators.native()
    # A composite operator of torch's ends in others, which the ledger of kernels holds.
    beyond = {n for n in dispatched if n not in native and not any(has_kernel(n, key) for key in composite)}
    assert beyond == set()
    assert len(dispatched) > 15
    kernels = {kernel for kernel in simulator.kernels if kernel.startswith("aten::")}
    assert {kernel for kernel in kernels if kernel not in native and kernel != "aten::copy_"} == set()


def test_dispatch_reaches_the_deferred_mechanism(device: torch.device, platform: str) -> None:
    with multiassert.override("auto"):
        expected = {"cpu": Mechanism.IMMEDIATE, "generic": Mechanism.DEFERRED}
        assert dispatch.route_of(device).mechanism is expected.get(platform, backends.named(platform).auto())
    with multiassert.override("raise"):
        assert dispatch.route_of(device).mechanism is Mechanism.DEFERRED


def test_nothing_of_the_probed_tensors_is_kept(device: torch.device) -> None:
    with multiassert.override("warn"):
        tensor = torch.zeros(4, 8, device=device)
        storage = weakref.ref(tensor)
        multiassert.maybe_detect_nan(tensor, "gone")
        multiassert.drain()
        del tensor
        gc.collect()
        assert storage() is None


# ---------------------------------------------------------------------------------------------------------------------
# A device whose reductions lose NaN.


@pytest.fixture
def reductions_lose_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a device on which the largest of some numbers and a NaN is one of the numbers."""
    for name in ("maximum", "minimum"):
        merge = getattr(torch, name)

        def keeping_numbers(cells: torch.Tensor, new: torch.Tensor, *, out: torch.Tensor, merge: Any = merge) -> Any:
            return out.copy_(torch.where(new == new, merge(cells, new), cells))

        monkeypatch.setattr(torch, name, keeping_numbers)
    for name in ("amax", "amin", "aminmax"):
        reduce = getattr(torch.Tensor, name)

        def without_nan(values: torch.Tensor, *args: Any, reduce: Any = reduce, **kwargs: Any) -> Any:
            values = values.nan_to_num(0.0, torch.inf, -torch.inf) if values.dtype.is_floating_point else values
            return reduce(values, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, without_nan)


@pytest.mark.usefixtures("reductions_lose_nan")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize(("kernels", "sees_nan"), [("torch", False), ("exact", True)])
def test_exact_kernels_trust_no_reduction_with_a_nan(
    kernels: str, sees_nan: bool, dtype: torch.dtype, device: torch.device
) -> None:
    clean = torch.ones(3, 5).to(dtype)
    rows = {}
    with multiassert.override("warn", kernels=kernels):
        for column in (0, 4):
            bad = clean.clone()
            bad[1, column] = math.nan
            for tensor, name in ((clean, "clean"), (bad, "bad")):
                on_device = tensor.to(device)
                multiassert.maybe_detect_nan(on_device, name)
                if not dtype.is_complex:
                    multiassert.maybe_detect_in_closed_range(on_device, 0.0, 2.0, f"{name} range")
                    multiassert.maybe_detect_in_closed_range(on_device, 0.0, math.inf, f"{name} half")
                    multiassert.maybe_detect_in_closed_range(on_device, -math.inf, math.inf, f"{name} all")
                    multiassert.maybe_detect_in_closed_range(on_device * 3, 0.0, 2.0, f"{name} three")
                    multiassert.maybe_assert_sum(on_device, 15.0, f"{name} sum")
                finish(device)
            rows[column] = {v.message: (v.rows, v.value) for v in multiassert.drain()}
    for found in rows.values():
        assert (found.pop("bad", ((), 0))[0] == (1,)) is sees_nan
        if not dtype.is_complex:
            assert found.pop("clean three") == ((0, 1, 2), 3.0), "what is no NaN keeps its value"
            found.pop("bad three")
        if not dtype.is_complex:
            assert (found.pop("bad sum", ((), 0))[0] == (0,)) is sees_nan
        assert set(found) == ({"bad range", "bad half", "bad all"} if sees_nan and not dtype.is_complex else set())
        assert all(each[0] == (1,) for each in found.values())
