"""Does a probe still fire there? One row of docs/alive.md for each way to run code, each first clean, then with a NaN.

The table is written from what these tests saw, by `python -m tests.all_platforms --write`, and compared in each run.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import multiassert
from conftest import ChildRun, finish
from multiassert import backends, simulate

ROW = 2  # of four: the one with the NaN
REPLAYS = 2000

# Told in the table instead of a test.
NO_GRAPHS = "by design: a CPU has no graphs"
NO_STREAMS = "by design: a CPU has no streams"
ONE_DEVICE = "by design: there is one CPU"
NO_INDUCTOR = "unknown: Inductor generates no code for a simulated device"

Way = Callable[[torch.Tensor], None]


@dataclasses.dataclass(frozen=True)
class Row:
    """A way to run a probe on a tensor."""

    name: str
    run: Way
    not_on_cpu: str = ""
    not_simulated: str = ""
    fires: bool = True


rows: list[Row] = []


def row(name: str, **reasons: Any) -> Callable[[Way], Way]:
    def add(run: Way) -> Way:
        rows.append(Row(name, run, **reasons))
        return run

    return add


SITE = multiassert.site("probe")


def forward(hidden: torch.Tensor) -> torch.Tensor:
    hidden = hidden * 2
    multiassert.maybe_detect_nan(hidden, SITE)
    return hidden.relu().sum()


@row("eager")
def eager(values: torch.Tensor) -> None:
    forward(values)


@row("torch.compile, aot_eager, fullgraph")
def compiled(values: torch.Tensor) -> None:
    torch.compile(forward, backend="aot_eager", fullgraph=True)(values)


@row("torch.compile, Inductor, fullgraph", not_simulated=NO_INDUCTOR)
def compiled_by_inductor(values: torch.Tensor) -> None:
    torch.compile(forward, fullgraph=True)(values)


@row("torch.compile, dynamic shapes, with gradients")
def compiled_training(values: torch.Tensor) -> None:
    step = torch.compile(forward, backend="aot_eager", fullgraph=True, dynamic=True)
    for hidden in (torch.zeros(3, 8, device=values.device), values.clone()):
        step(hidden.requires_grad_()).backward()


@row("captured graph, replayed", not_on_cpu=NO_GRAPHS)
def replayed(values: torch.Tensor) -> None:
    _replay(values, 1)


@row(f"captured graph, {REPLAYS:,} replays with no Python in between", not_on_cpu=NO_GRAPHS)
def replayed_often(values: torch.Tensor) -> None:
    _replay(values, REPLAYS)


@row("captured graph of compiled code", not_on_cpu=NO_GRAPHS)
def compiled_and_captured(values: torch.Tensor) -> None:
    _replay(values, 1, torch.compile(forward, backend="aot_eager", fullgraph=True))


@row("captured graph, replayed on another stream", not_on_cpu=NO_GRAPHS)
def replayed_elsewhere(values: torch.Tensor) -> None:
    module = torch.get_device_module(values.device)
    stream = module.Stream()
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        _replay(values, 1)
    module.current_stream().wait_stream(stream)


def _replay(values: torch.Tensor, times: int, function: Callable[[torch.Tensor], Any] = forward) -> None:
    """Capture with clean values, so that a hit is of a replay; the values are bad in the middle only."""
    module = torch.get_device_module(values.device)
    operators = backends.for_device_type(values.device.type).operators
    graph = getattr(module, operators.graph_class if operators is not None else "CUDAGraph")()
    static, stream = torch.zeros_like(values), module.Stream()
    with module.stream(stream), multiassert.suspend():
        function(static)  # warm up: a first run may compile and allocate
    multiassert.prewarm(values.device)
    with module.stream(stream):
        function(static)
    module.current_stream().wait_stream(stream)
    with module.graph(graph, stream=stream):
        function(static)
    for number in range(times):
        if number == times // 2:
            static.copy_(values)
        if number == times // 2 + 1:
            static.zero_()
        graph.replay()


@row("side stream", not_on_cpu=NO_STREAMS)
def side_stream(values: torch.Tensor) -> None:
    module = torch.get_device_module(values.device)
    stream = module.Stream()
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        forward(values)


@row("second device", not_on_cpu=ONE_DEVICE)
def second_device(values: torch.Tensor) -> None:
    module = torch.get_device_module(values.device)
    if module.device_count() < 2:
        pytest.skip("not here: one device")
    other = torch.device(values.device.type, 1)
    forward(torch.zeros_like(values))
    with module.device(other):
        forward(values.to(other))


@row("torch.func.vmap")
def vmap(values: torch.Tensor) -> None:
    torch.func.vmap(forward)(values)


@row("torch.func.grad")
def grad(values: torch.Tensor) -> None:
    torch.func.grad(forward)(values)


@row("torch.func.jvp")
def jvp(values: torch.Tensor) -> None:
    torch.func.jvp(forward, (values,), (torch.ones_like(values),))


@row("torch.func.functionalize")
def functionalize(values: torch.Tensor) -> None:
    torch.func.functionalize(forward)(values)


@row("autograd")
def autograd(values: torch.Tensor) -> None:
    forward(values.clone().requires_grad_()).backward()


@row("activation checkpoint (runs twice, told once)")
def checkpointed(values: torch.Tensor) -> None:
    checkpoint(forward, values.clone().requires_grad_(), use_reentrant=False).backward()


@row("autocast")
def autocast(values: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        forward(values)


@row("inference mode")
def inference_mode(values: torch.Tensor) -> None:
    with torch.inference_mode():
        forward(values)


@row("another thread")
def another_thread(values: torch.Tensor) -> None:
    thread = threading.Thread(target=forward, args=(values,))
    thread.start()
    thread.join()


@row("torch.export", fires=False)
def exported(values: torch.Tensor) -> None:
    class Model(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return forward(hidden)

    torch.export.export(Model(), (torch.zeros_like(values),)).module()(values)


@row("torch.jit.trace", fires=False)
def traced(values: torch.Tensor) -> None:
    torch.jit.trace(forward, (values,), check_trace=False)(values)


@row("tensors without data (meta)", fires=False)
def without_data(values: torch.Tensor) -> None:
    forward(values.to("meta"))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("way", rows, ids=lambda way: way.run.__name__)
def test_alive(way: Row, device: torch.device, platform: str, record_property: Callable[[str, object], None]) -> None:
    record_property("alive", f"{way.name}: {'yes' if way.fires else 'no probe in it'}")
    reason = way.not_on_cpu if platform == "cpu" else way.not_simulated if simulate.installed() else ""
    if reason:
        pytest.skip(reason)
    bad = torch.zeros(4, 8)
    bad[ROW, 5] = math.nan
    clean, bad = torch.zeros(4, 8, device=device), bad.to(device)
    with multiassert.override("warn"):
        way.run(clean)
        multiassert.step()
        finish(device)
        assert multiassert.drain() == []
        way.run(bad)
        multiassert.step()
        finish(device)
        found = multiassert.drain()
        way.run(clean)
        multiassert.step()
        finish(device)
        assert multiassert.drain() == []
    assert [(v.kind, v.message, v.rows, v.step) for v in found] == ([("nan", "probe", (ROW,), 1)] if way.fires else [])


IN_A_CHILD = """
import os, sys, torch, multiassert
from multiassert import simulate

def work(platform):
    torch.set_num_threads(1)
    if platform != "cpu":
        simulate.install(platform)
    told = []
    for value in (0.0, float("nan")):
        hidden = torch.full((4, 8), value).to(platform)
        multiassert.maybe_detect_nan(hidden, "in a child")
        multiassert.step()
        told.append([(v.message, v.rows) for v in multiassert.drain()])
    print(told, flush=True)
"""

FORK = """
platform = {platform!r}
if platform == "cpu":
    work(platform)  # used before the fork; an accelerator must not be
child = os.fork()
if child == 0:
    work(platform)
    os._exit(0)
os.waitpid(child, 0)
"""


def test_fork(
    platform: str, device: torch.device, run_child: ChildRun, record_property: Callable[[str, object], None]
) -> None:
    record_property("alive", "worker by fork, after the import: yes")
    run = run_child(IN_A_CHILD + FORK.format(platform=platform), MULTIASSERT="warn")
    children = 2 if platform == "cpu" else 1
    assert run.stdout.splitlines() == ["[[], [('in a child', (0, 1, 2, 3))]]"] * children, run.stderr


def work_in_a_spawned_process(platform: str, told: Any) -> None:
    if platform != "cpu":
        simulate.install(platform)
    seen = []
    with multiassert.override("warn"):
        for value in (0.0, math.nan):
            multiassert.maybe_detect_nan(torch.full((4, 8), value).to(platform), "in a child")
            multiassert.step()
            seen.append([(v.message, v.rows) for v in multiassert.drain()])
    told.put(seen)


def test_spawn(platform: str, device: torch.device, record_property: Callable[[str, object], None]) -> None:
    record_property("alive", "worker by spawn: yes")
    if platform not in ("cpu", "npu", "musa", "generic"):
        pytest.skip("unknown: not written for a real device")
    context = multiprocessing.get_context("spawn")
    told: Any = context.Queue()
    process = context.Process(target=work_in_a_spawned_process, args=(platform, told))
    process.start()
    assert told.get(timeout=100) == [[], [("in a child", (0, 1, 2, 3))]]
    process.join(100)
    assert process.exitcode == 0
