"""Probes in code compiled by torch: part of the graph, alive, exact, and one compilation for all sites."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo.testing

import multiassert
from conftest import finish
from multiassert import AsyncAssertionError
from multiassert.backends import Mechanism

# Inductor has no code generation for a simulated device.
BACKENDS = ("aot_eager", "inductor")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, platform: str) -> str:
    if request.param == "inductor" and platform not in ("cpu", "cuda", "rocm", "xpu"):
        pytest.skip(f"Inductor generates no code for {platform}")
    return str(request.param)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counted(backend: str) -> torch._dynamo.testing.CompileCounterWithBackend:
    return torch._dynamo.testing.CompileCounterWithBackend(backend)


def every_probe(hidden: torch.Tensor, ids: torch.Tensor, where: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    hidden = hidden * 2
    multiassert.maybe_detect_nan(hidden, "nan")
    multiassert.maybe_detect_inf(hidden, "inf")
    multiassert.maybe_detect_oob(ids, 0, 10, "ids", sentinel=77)
    multiassert.maybe_detect_oob(ids, 0, count * 100, "ids, a bound on the device")
    multiassert.maybe_detect_page_aligned(ids, 4, "pages", sentinel=77)
    multiassert.maybe_detect_in_closed_range(hidden, -1000.0, 1000.0, "range")
    multiassert.maybe_assert_async((hidden == hidden).all(), "condition")
    multiassert.maybe_assert_sum(ids, 24, "sum")
    multiassert.maybe_detect_nan(hidden, "masked", where=where)
    multiassert.maybe_detect_nan(hidden, "valid rows", num_valid=count)
    multiassert.maybe_detect_nan(hidden, "valid rows, known", num_valid=2)
    return hidden.relu()


def arguments(device: torch.device, bad: bool) -> list[torch.Tensor]:
    hidden, ids = torch.zeros(4, 8), torch.tensor([0, 4, 8, 12]) - (0 if bad else torch.tensor([0, 0, 0, 0]))
    ids = torch.tensor([1, -3, 77, 12]) if bad else torch.tensor([8, 8, 8, 0])
    where = torch.ones(4, 8, dtype=torch.bool)
    if bad:
        hidden[2, 1], hidden[3] = math.nan, math.inf
        where[2, 1] = False
    return [tensor.to(device) for tensor in (hidden, ids, where, torch.tensor(3))]


def test_every_probe_in_one_graph(device: torch.device, backend: str) -> None:
    compiles = counted(backend)
    compiled = torch.compile(every_probe, backend=compiles, fullgraph=True)
    with multiassert.override("warn"):
        compiled(*arguments(device, bad=False))
        multiassert.step()
        assert multiassert.drain() == []
        compiled(*arguments(device, bad=True))
        found = multiassert.drain()
        multiassert.step()
        assert multiassert.drain() == []
    assert compiles.frame_count == 1
    assert [(v.message, v.kind, v.rows) for v in found] == [
        ("nan", "nan", (2,)),
        ("inf", "inf", (3,)),
        ("ids", "low", (1,)),
        ("ids", "high", (3,)),
        ("ids, a bound on the device", "low", (1,)),
        ("pages", "misaligned", (0, 1)),
        ("range", "range", (2, 3)),
        ("condition", "cond", ()),
        ("sum", "cond", (0,)),
        ("valid rows", "nan", (2,)),
    ]
    first_line = every_probe.__code__.co_firstlineno
    assert [v.site.line - first_line for v in found] == [2, 3, 4, 4, 5, 6, 7, 8, 9, 11]
    assert {v.site.file for v in found} == {__file__}
    assert {v.step for v in found} == {1}


@pytest.mark.parametrize("mode", ["auto", "raise", "trap"])
def test_what_a_mode_does_in_a_graph(mode: str, device: torch.device, backend: str, platform: str) -> None:
    """On CPU, auto is the assert: there is no looking in the middle of a graph."""
    native = multiassert.backends.named(platform)
    if mode == "trap" and native.trap_refusal() is not None:
        pytest.skip(f"trap is refused on {platform}, as test_cases shows")
    if platform in ("cuda", "rocm", "xpu") and (mode == "trap" or native.auto() is Mechanism.NATIVE):
        pytest.skip(f"a trap ends the process on {platform}")
    compiled = torch.compile(every_probe, backend=backend, fullgraph=True)
    with multiassert.override(mode):
        compiled(*arguments(device, bad=False))
        multiassert.drain()
        with pytest.raises(RuntimeError, match="NaN detected! nan") as raised:
            compiled(*arguments(device, bad=True))
            multiassert.drain()
    assert isinstance(raised.value, AsyncAssertionError) is (mode == "raise" or platform != "cpu")


def test_turning_modes_after_compiling_takes_effect(device: torch.device, backend: str) -> None:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        multiassert.maybe_detect_nan(hidden, "probe")
        return hidden + 1

    compiles = counted(backend)
    compiled = torch.compile(forward, backend=compiles, fullgraph=True)
    bad = torch.full((2, 2), math.nan).to(device)
    compiled(bad)
    assert multiassert.drain() == []
    for _ in range(3):
        with multiassert.override("warn"):
            compiled(bad)
            assert [v.message for v in multiassert.drain()] == ["probe"]
        with multiassert.override("raise"), pytest.raises(AsyncAssertionError):
            compiled(bad)
            multiassert.drain()
        with multiassert.override("warn"), multiassert.suspend():
            compiled(bad)
        compiled(bad)
        assert multiassert.drain() == []
    assert compiles.frame_count <= 5


class Layer(torch.nn.Module):
    def __init__(self, number: int, with_site: bool = True) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.message = multiassert.site(f"layer {number}") if with_site else f"layer {number}"

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(hidden)
        multiassert.maybe_detect_nan(hidden, self.message)
        multiassert.maybe_detect_inf(hidden, self.message)
        return hidden.relu()


def test_forty_layers_with_a_site_each_compile_once(
    device: torch.device, backend: str, record_property: Callable[[str, object], None]
) -> None:
    layers = [Layer(number).to(device) for number in range(40)]
    compiles = counted(backend)
    for layer in layers:
        layer.compile(backend=compiles, fullgraph=True)
    with multiassert.override("warn"), torch.no_grad():
        for step in range(3):
            hidden = torch.zeros(4, 8, device=device)
            for number, layer in enumerate(layers):
                if (step, number) == (1, 23):
                    hidden[2] = math.nan
                hidden = layer(hidden)
            multiassert.step()
            finish(device)
        found = multiassert.drain()
        late = Layer(40).to(device)
        late.compile(backend=compiles, fullgraph=True)
        late(torch.full((4, 8), math.nan, device=device))
        assert [v.message for v in multiassert.drain()] == ["layer 40"]
    record_property(f"compilations of 40 layers with a Site each, {backend}", compiles.frame_count)
    assert compiles.frame_count == 1
    assert [(v.message, v.rows, v.step, v.kind) for v in found] == [
        (f"layer {number}", (2,), 1, "nan") for number in range(23, 40)
    ]


def test_copied_layers_are_compiled_too_and_keep_their_mode(device: torch.device) -> None:
    original = Layer(0).to(device)
    copies = [copy.deepcopy(original) for _ in range(2)]
    with multiassert.override("warn"):
        for layer in (original, *copies, pickle.loads(pickle.dumps(original))):
            layer.compile(backend="aot_eager", fullgraph=True)
            layer(torch.full((2, 8), math.nan, device=device))
    # Looked at when probes are off again: what was seen in mode warn is not raised.
    assert {v.message for v in multiassert.drain()} == {"layer 0"}


def test_eager_and_compiled_probes_of_a_step_come_in_program_order(device: torch.device) -> None:
    layer = Layer(0).to(device)
    layer.compile(backend="aot_eager", fullgraph=True)
    bad = torch.full((2, 8), math.nan, device=device)
    with multiassert.override("warn"):
        for _ in range(3):
            multiassert.maybe_detect_nan(bad, "eager, first")
            layer(bad)
            multiassert.maybe_detect_nan(bad, "eager, last")
            multiassert.step()
            finish(device)
            assert [v.message for v in multiassert.poll()] == ["eager, first", "layer 0", "eager, last"]


def test_a_string_for_each_layer_is_warned_about(device: torch.device) -> None:
    layers = [Layer(number, with_site=False).to(device) for number in range(6)]
    with multiassert.override("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for layer in layers:
            layer.compile(backend="aot_eager", fullgraph=True)
            layer(torch.zeros(4, 8, device=device))
    advice = [str(warning.message) for warning in caught if "multiassert.site(message)" in str(warning.message)]
    assert len(advice) == 2, "one for each of the two probes"


def test_dynamic_shapes_and_gradients(device: torch.device, backend: str) -> None:
    layer = Layer(0).to(device)
    compiles = counted(backend)
    compiled = torch.compile(layer, backend=compiles, fullgraph=True, dynamic=True)
    with multiassert.override("raise"):
        for rows in (3, 5, 17):
            hidden = torch.zeros(rows, 8, device=device)
            compiled(hidden).sum().backward()
            multiassert.step()
            finish(device)
            multiassert.poll()
            hidden[rows - 1] = math.nan
            compiled(hidden)
            with pytest.raises(AsyncAssertionError) as raised:
                multiassert.drain()
            assert raised.value.violations[0].rows == (rows - 1,)
    assert compiles.frame_count <= 2
    assert layer.linear.weight.grad is not None


def test_more_rows_than_cells_are_seen_and_not_named(device: torch.device, backend: str) -> None:
    compiled = torch.compile(Layer(0).to(device), backend=backend, fullgraph=True, dynamic=True)
    with multiassert.override("warn"):
        for rows in (300, 1000):
            hidden = torch.zeros(rows, 8, device=device)
            compiled(hidden)
            assert multiassert.drain() == []
            hidden[rows - 1] = math.nan
            compiled(hidden)
            assert [(v.kind, v.rows) for v in multiassert.drain()] == [("nan", ())]


def test_a_probe_on_which_nothing_depends_survives(device: torch.device, backend: str) -> None:
    def forward(hidden: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        multiassert.maybe_detect_nan(hidden * 3, "nobody reads this")
        return other + 1

    compiled = torch.compile(forward, backend=backend, fullgraph=True)
    with multiassert.override("warn"):
        compiled(torch.full((2, 2), math.nan, device=device), torch.zeros(2, device=device))
        assert [v.message for v in multiassert.drain()] == ["nobody reads this"]


@pytest.mark.parametrize(
    "message", ['quote " and \' and """', "back\\slash \\n", "new\nline", "越界 NaN ü", "%s {0} {x}", ""]
)
@pytest.mark.parametrize("mode", ["auto", "warn"])
def test_messages_do_not_break_generated_code(message: str, mode: str, device: torch.device, backend: str) -> None:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        multiassert.maybe_detect_nan(hidden, message)
        return hidden + 1

    compiled = torch.compile(forward, backend=backend, fullgraph=True)
    with multiassert.override(mode):
        compiled(torch.zeros(2, 2, device=device))
        multiassert.drain()
        if mode == "warn":
            compiled(torch.full((2, 2), math.nan, device=device))
            assert [v.message for v in multiassert.drain()] == [message]
        else:
            with pytest.raises(RuntimeError, match="NaN detected!"):
                compiled(torch.full((2, 2), math.nan, device=device)), multiassert.drain()


def test_the_probe_is_fused_into_its_producers_kernel() -> None:
    """No full-size temporary: the generated code has one kernel, and never stores the product for the probe."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * 2 + 1
        multiassert.maybe_detect_nan(hidden, "fused")
        return hidden.sum(1)

    with multiassert.override("warn"):
        from torch._inductor.utils import run_and_get_code

        compiled = torch.compile(forward, fullgraph=True)
        _, (code,) = run_and_get_code(compiled, torch.zeros(64, 4096))
        assert code.count('extern "C"') == 1, code
        assert "empty_strided_cpu((64, 4096)" not in code


def test_the_state_is_static_for_cuda_graphs() -> None:
    """A mutated input that is neither static nor managed switches CUDA graphs off; the cells are marked static."""
    layer = Layer(0)
    with multiassert.override("warn"), torch.no_grad():
        torch.compile(layer, backend="aot_eager", fullgraph=True)(torch.zeros(2, 8))
        message = layer.message
        assert isinstance(message, multiassert.Site)
        cells = [value for name, value in vars(message).items() if "_cells_" in name]
        assert len(cells) == 4
        assert all(cell._dynamo_static_input_type == "unguarded" for cell in cells)


def test_without_fullgraph_there_is_no_break_either(device: torch.device) -> None:
    compiles = counted("aot_eager")
    compiled = torch.compile(every_probe, backend=compiles)
    with multiassert.override("warn"), warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(*arguments(device, bad=False))
        multiassert.drain()
    assert compiles.frame_count == 1
