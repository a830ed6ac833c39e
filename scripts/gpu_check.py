"""What only an accelerator can answer, asked of the one that is here: a table within four minutes.

    python scripts/gpu_check.py                              on the accelerator that torch finds
    python scripts/gpu_check.py --only captured compiled     the checks whose names begin so
    python scripts/gpu_check.py --platform npu --simulate    the script itself, on a simulated device

Each check says yes, no, or not here with the reason. They run in a worker process: one that fails, hangs or takes the
device down costs only itself, since the next one gets a new worker. The exit code is 1 if any check says no, and 2 if
there is no device. With MULTIASSERT_TEST_SILENT set probes see nothing, and all but "versions" must say no.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import copy
import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import math
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

import multiassert
from multiassert import AsyncAssertionError, Violation, backends, delivery, simulate, state
from multiassert.backends import Mechanism, NativeAssert
from multiassert.doctor import machine as examined
from multiassert.doctor.kinds import every_kind
from multiassert.doctor.machine import LONG_WORK_SECONDS, NotHere
from multiassert.presence import VENDOR_PACKAGES

PLATFORMS = ("cuda", "rocm", "npu", "musa", "xpu", "generic", "cpu")
BUDGET_SECONDS = 230.0
PROCESS_SECONDS = 90.0  # of a process that a check starts
spawn = multiprocessing.get_context("spawn")  # no accelerator can be used on from a forked child


class Wrong(Exception):
    """A check saw something else than what is promised."""


def expect(what: str, seen: object, wanted: object) -> None:
    """Raise Wrong where `seen` is not what is `wanted`."""
    if seen != wanted:
        raise Wrong(f"{what}: saw {seen}, expected {wanted}")


# ---------------------------------------------------------------------------------------------------------------------
# The machine, and what the checks do with it.


class Machine(examined.Machine):
    """The device under test."""

    @contextlib.contextmanager
    def host_waits_forbidden(self) -> Iterator[None]:
        """A scope in which a host wait raises; proven by one that does."""
        self.need("set_sync_debug_mode")
        probed, raises = torch.ones(1, device=self.device), False
        self.module.set_sync_debug_mode("error")
        try:
            try:
                probed.item()
            except (RuntimeError, simulate.HiddenSync):
                raises = True
            if not raises:
                raise NotHere("the device's sync debug mode lets .item() pass, so it would prove nothing")
            yield
        finally:
            self.module.set_sync_debug_mode("default")


@functools.cache
def set_up(platform: str, simulated: bool) -> Machine:
    """The machine of these options; raises NotHere."""
    os.environ.setdefault(
        "TORCHINDUCTOR_COMPILE_THREADS", "1"
    )  # its workers would take longer to start than to compile
    logging.getLogger("multiassert").propagate = False  # the table tells what was reported
    logging.getLogger("multiassert").addHandler(logging.NullHandler())
    if simulated:
        simulator = simulate.install(platform)
        return Machine(platform, torch.empty(0, device=platform).device, simulator)
    if platform in VENDOR_PACKAGES and importlib.util.find_spec(VENDOR_PACKAGES[platform]) is not None:
        importlib.import_module(VENDOR_PACKAGES[platform])
    device_type = {"rocm": "cuda", "generic": torch._C._get_privateuse1_backend_name()}.get(platform, platform)
    module = getattr(torch, device_type, None)
    if module is None or not module.is_available():
        raise NotHere(f"torch {torch.__version__} finds no {platform} device here; --simulate simulates npu and musa")
    found = backends.for_device_type(device_type).name
    if platform not in ("generic", found):
        raise NotHere(f"the devices here are those of {found}, not of {platform}")
    return Machine(platform, torch.empty(0, device=device_type).device, None)


def probes(mode: str) -> contextlib.AbstractContextManager[None]:
    """A scope with probes in `mode`, or off, where this script's tests want to see the checks fail."""
    return multiassert.override("off" if os.environ.get("MULTIASSERT_TEST_SILENT") else mode)


def brief(violations: Sequence[Violation]) -> list[tuple[object, ...]]:
    """What a report must get right: the probe, its rows, its step."""
    return [(v.message, v.rows, v.step) for v in violations]


def expect_alarm(machine: Machine, run: Callable[[float], object], message: str, row: int = 2) -> None:
    """Expect that `run(0)` is silent, and that `run(NaN)` is reported once, with its row and step."""
    run(0.0)
    expect("reported of a clean tensor", brief(machine.reports()), [])
    run(math.nan)
    wanted = [(message, (row,), delivery.current_step())]
    expect("reported of a bad tensor", brief(machine.reports()), wanted)


Call = tuple[Callable[..., object], tuple[object, ...]]


def in_processes(*calls: Call) -> list[tuple[str, str]]:
    """Run calls in new processes, all at once: how each one ended, and what it wrote to stdout and stderr."""
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder, str(number)) for number in range(len(calls))]
        processes = [spawn.Process(target=_in_process, args=(f, *call)) for f, call in zip(files, calls, strict=True)]
        deadline = time.monotonic() + PROCESS_SECONDS
        for process in processes:
            process.start()
        ended = []
        for process, file in zip(processes, files, strict=True):
            process.join(max(0.0, deadline - time.monotonic()))
            code = process.exitcode
            process.kill()
            process.join()
            how = f"no end within {PROCESS_SECONDS:.0f} s" if code is None else f"exit code {code}"
            how = signal.Signals(-code).name if code is not None and code < 0 else how
            ended.append((how, file.read_text(errors="replace") if file.exists() else ""))
        return ended


def _in_process(file: pathlib.Path, call: Callable[..., object], arguments: tuple[object, ...]) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open(file, "w") as opened:
        for stream in (1, 2):
            os.dup2(opened.fileno(), stream)
    call(*arguments)


@dataclasses.dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    run: Callable[[Machine], str]
    seconds: float  # about what it takes on a GPU


CHECKS: dict[str, Check] = {}


def check(name: str, seconds: float = 2) -> Callable[[Callable[[Machine], str]], Callable[[Machine], str]]:
    """Register a check. It runs in mode warn and returns what it saw, or raises."""

    def register(run: Callable[[Machine], str]) -> Callable[[Machine], str]:
        CHECKS[name] = Check(name, run, seconds)
        return run

    return register


# ---------------------------------------------------------------------------------------------------------------------
# What this is, and eager probes.


@check("versions")
def versions(machine: Machine) -> str:
    """Which software and which device the other rows are about; it cannot say no."""
    parts = [f"torch {torch.__version__}"]
    parts += [f"{name} {found}" for name in ("cuda", "hip", "xpu") if (found := getattr(torch.version, name, None))]
    for package in ("triton", "pytorch-triton-rocm", "triton-xpu", *VENDOR_PACKAGES.values()):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            parts.append(f"{package} {importlib.metadata.version(package)}")
    if machine.device.type == "cuda" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        asked = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
        parts.append(f"driver {(asked.stdout.split() or ['unknown'])[0]}")
    if hasattr(machine.module, "get_device_name"):
        parts.append(f"{machine.module.device_count()} x {machine.module.get_device_name(machine.device)}")
    return ", ".join(parts)


def _eager(machine: Machine, look: Callable[[], list[Violation]]) -> str:
    cases = every_kind(machine)
    for name, probe, clean, _, _ in cases:
        probe(clean, name)
    expect("reported of clean tensors", brief(look()), [])
    for name, probe, _, bad, _ in cases:
        probe(bad, name)
    wanted = [(name, *record, 1) for name, _, _, _, record in cases]
    found = [(v.message, v.kind, v.rows, str(v.value), v.step) for v in look()]
    expect("reported of bad tensors", found, wanted)
    return f"{len(cases)} kinds with their rows, values and step, in program order; silent on clean tensors"


@check("eager: mode warn")
def eager_warn(machine: Machine) -> str:
    """Every kind of probe reports its row, value and step; on clean tensors none does."""
    return _eager(machine, machine.reports)


@check("eager: mode raise")
def eager_raise(machine: Machine) -> str:
    """The same, as an AsyncAssertionError."""

    def raised() -> list[Violation]:
        try:
            expect("what poll() returns in mode raise", machine.reports(), [])
        except AsyncAssertionError as error:
            return list(error.violations)
        return []

    with probes("raise"):
        return _eager(machine, raised)


@check("eager: dtypes")
def dtypes(machine: Machine) -> str:
    """A NaN in every float dtype that has one, and an index out of bounds in every integer dtype of the device."""
    known = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
    integers = [dtype for dtype in known if re.fullmatch(r"torch\.u?int(8|16|32|64)", str(dtype))]
    tensors, absent = {}, []
    for dtype in [*(dtype for dtype in known if dtype.is_floating_point), *integers]:
        name, bad = str(dtype).removeprefix("torch."), 101 if dtype in integers else math.nan
        try:
            both = [torch.tensor(values).to(dtype) for values in ([3, 3], [3, bad])]
            if dtype not in integers and not both[1].float().isnan().any():
                continue
        except (RuntimeError, NotImplementedError):
            continue  # torch itself makes no such numbers
        try:
            tensors[name] = [tensor.to(machine.device) for tensor in both]
            machine.finish()
        except (RuntimeError, TypeError):
            absent.append(name)
    for which in range(2):
        for name, both in tensors.items():
            if both[which].dtype.is_floating_point:
                multiassert.maybe_detect_nan(both[which], name)
            else:
                multiassert.maybe_detect_oob(both[which], 0, 100, name)
        expect("reported", brief(machine.reports()), [(name, (1,), 1) for name in tensors] if which else [])
    return ", ".join(tensors) + (f"; the device has no {', '.join(absent)}" if absent else "")


# ---------------------------------------------------------------------------------------------------------------------
# What the host waits for, and what it takes.


@check("no host wait")
def no_host_wait(machine: Machine) -> str:
    """Twenty steps of every probe where a host wait would raise; the fault in the middle is reported."""
    cases, found = every_kind(machine), []
    for name, probe, clean, _, _ in cases:
        probe(clean, name)
    expect("reported of clean tensors", brief(machine.reports()), [])
    with machine.host_waits_forbidden():
        for number in range(1, 21):
            for name, probe, clean, bad, _ in cases:
                probe(bad if (number, name) == (10, "NaN") else clean, name)
            multiassert.step()
            found += multiassert.poll()
    found += multiassert.drain()
    expect("reported", [(v.message, v.rows) for v in found], [("NaN", (2,))])
    steps = (found[0].step,) if isinstance(found[0].step, int) else found[0].step
    expect("whether step 10 is in the record", steps[0] <= 10 <= steps[-1], True)
    return f"{20 * len(cases)} probes, 20 steps and 20 polls, none waited; a fault in step 10 was told as {steps}"


@check("no host wait: busy device")
def busy_device(machine: Machine) -> str:
    """While a long kernel runs, probe, step and poll return at once and say nothing; afterwards they report."""
    clean, bad = machine.rows(), machine.rows(math.nan)
    multiassert.maybe_detect_nan(clean, "busy")
    expect("reported of a clean tensor", brief(machine.reports()), [])
    long_work = machine.start_long_work()
    began = time.monotonic()
    multiassert.maybe_detect_nan(bad, "busy")
    multiassert.step()
    early = multiassert.poll()
    took = time.monotonic() - began
    still_busy = not long_work.query()
    machine.finish()
    late = multiassert.poll()
    expect("whether the device was still busy", still_busy, True)
    expect("reported while it was", brief(early), [])
    expect("reported afterwards", brief(late), [("busy", (2,), 1)])
    expect(f"whether {took:.3f} s are far less than the kernel's", took < LONG_WORK_SECONDS / 3, True)
    return f"probe, step and poll took {took * 1000:.1f} ms beside a longer kernel"


@check("pinned copies", seconds=4)
def pinned_copies(machine: Machine) -> str:
    """A thousand sites of 256 rows: the copies are pinned and wait for nothing, and the state stays where it is."""
    machine.need("set_sync_debug_mode")
    sites = [multiassert.site(f"site {number}") for number in range(1000)]
    clean, bad = machine.rows(count=256), machine.rows(math.nan, 255, count=256)
    addresses, pinned, size = set(), set(), 0
    for number in range(3):
        with machine.host_waits_forbidden() if number else contextlib.nullcontext():  # the first one allocates
            for at, site in enumerate(sites):
                multiassert.maybe_detect_nan(bad if number == 2 and at in (0, 999) else clean, site)
            multiassert.step()
        machine.finish()
        wanted = [(f"site {at}", (255,), 2) for at in (0, 999)] if number == 2 else []
        expect(f"reported in step {number}", brief(multiassert.poll()), wanted)
        for device_state in state.all_states():
            addresses.add(tuple(page.cells.data_ptr() for page in device_state._pages))
            pinned |= {inbox.is_pinned() for inbox in device_state._inboxes}
            size = device_state._outbox.numel()
    expect("whether the host's memory is pinned", pinned, {True})
    expect("how many places the state was at", len(addresses), 1)
    return f"copies of at most {size // 1024} KiB into pinned memory, none waited; addresses stayed"


@check("memory of a NaN probe")
def memory(machine: Machine) -> str:
    """A probe on 64x151936 bfloat16 needs far less memory than its tensor: there is no temporary of its size."""
    machine.need("max_memory_allocated", "memory_allocated", "reset_peak_memory_stats")
    logits = torch.zeros(64, 151936, dtype=torch.bfloat16, device=machine.device)
    peaks = []

    def run(value: float) -> None:
        logits[63, 151935] = value
        machine.module.reset_peak_memory_stats()
        before = machine.module.memory_allocated()
        multiassert.maybe_detect_nan(logits, "logits")
        peaks.append(machine.module.max_memory_allocated() - before)

    expect_alarm(machine, run, "logits", row=63)  # the first call allocates the state, the second one is measured
    size = logits.numel() * logits.element_size()
    expect(f"whether {peaks[1]} bytes are far below {size}", peaks[1] < size / 20, True)
    return f"at most {peaks[1]} bytes beside a tensor of {size}"


# ---------------------------------------------------------------------------------------------------------------------
# What ends a process, each in processes of its own.


def _native_eager(machine: Machine, value: float) -> None:
    multiassert.maybe_detect_nan(machine.rows(value), "the native message")


def _native_captured(machine: Machine, value: float) -> None:
    static, graph = machine.rows(), machine.new_graph()
    with machine.module.graph(graph):
        multiassert.maybe_detect_nan(static * 2, "the native message")
    graph.replay()
    machine.finish()
    static.copy_(machine.rows(value))
    graph.replay()


def _native_compiled(machine: Machine, value: float) -> None:
    def forward(hidden: Tensor) -> Tensor:
        hidden = hidden * 2
        multiassert.maybe_detect_nan(hidden, "the native message")
        return hidden + 1

    compiled = torch.compile(forward, fullgraph=True)
    compiled(machine.rows())
    machine.finish()
    compiled(machine.rows(value))


def _run_native(
    scenario: Callable[[Machine, float], None], machine_of: tuple[str, bool], mode: str, value: float
) -> None:
    machine = set_up(*machine_of)
    with probes(mode):
        scenario(machine, value)
        machine.finish()


def _native(machine: Machine, scenario: Callable[[Machine, float], None]) -> str:
    backend = backends.for_device_type(machine.device.type)
    mode = "auto" if backend.auto() is Mechanism.NATIVE else "trap"
    if mode == "trap" and backend.trap_refusal() is not None:
        raise NotHere(f"{backend.native_facts} So trap is refused")
    same = scenario, (machine.platform, machine.simulator is not None), mode
    clean, bad = in_processes((_run_native, (*same, 0.0)), (_run_native, (*same, math.nan)))
    expect(f"how the clean process ended ({clean[1].strip()[-200:]})", clean[0], "exit code 0")
    expect("whether the clean process told of a NaN", "NaN detected!" in clean[1], False)
    expect("whether the bad process ended well", bad[0] == "exit code 0", False)
    told = "NaN detected! the native message" in bad[1]
    if backend.native is not NativeAssert.ABORTS:
        expect(f"whether the message was told ({bad[0]})", told, True)
    return f"mode {mode}: {bad[0]}, the message was {'told' if told else 'lost'}; the clean process was silent"


@check("native: eager", seconds=12)
def native_eager(machine: Machine) -> str:
    """The native assert ends a process and tells its message; its clean twin ends well."""
    return _native(machine, _native_eager)


@check("native: captured", seconds=12)
def native_captured(machine: Machine) -> str:
    """The same from inside a captured graph, at the replay that is bad."""
    machine.need("graph")
    return _native(machine, _native_captured)


@check("native: compiled", seconds=20)
def native_compiled(machine: Machine) -> str:
    """The same in compiled code."""
    _need_inductor(machine)
    if not backends.for_device_type(machine.device.type).asserts_compiled():
        raise NotHere("torch's compiler drops the assert here, so compiled code is deferred in mode auto")
    return _native(machine, _native_compiled)


def _crash(platform: str, simulated: bool) -> None:
    machine = set_up(platform, simulated)
    table = torch.zeros(10, 4, device=machine.device)
    ids = torch.tensor([3, 10], device=machine.device)
    with probes("raise"):
        multiassert.maybe_detect_oob(ids, 0, 10, "token ids")
        multiassert.poll()  # on its way before the work that the index crashes
        with contextlib.suppress(RuntimeError):
            torch.nn.functional.embedding(ids, table)
            machine.finish()
        multiassert.drain()


@check("crash: the index is named", seconds=10)
def crash(machine: Machine) -> str:
    """An index that takes the device down is still named, if poll() was called before its use."""
    machine.need()
    ((how, told),) = in_processes((_crash, (machine.platform, machine.simulator is not None)))
    named = "AsyncAssertionError" in told and "token ids" in told and "value 10, rows 1 of 2" in told
    expect(f"whether it was named ({how}, {told.strip()[-200:]})", named, True)
    return f"named with its row and value after the device was lost; {how}"


# ---------------------------------------------------------------------------------------------------------------------
# Compiled code.


def _need_inductor(machine: Machine) -> None:
    if machine.simulator is not None or machine.device.type not in ("cuda", "xpu", "cpu"):
        raise NotHere("Inductor generates no code for this device")
    if machine.device.type == "cpu" and not (shutil.which("g++") or shutil.which("c++")):
        raise NotHere("Inductor needs a C++ compiler, and there is none")
    if machine.device.type != "cpu" and importlib.util.find_spec("triton") is None:
        raise NotHere("Inductor needs triton, and it is not installed")


def _counting_compiler(machine: Machine) -> Any:
    """Inductor; on a simulated device torch's tracer alone, without code generation."""
    from torch._dynamo.testing import CompileCounterWithBackend

    if machine.simulator is None:
        _need_inductor(machine)
    torch._dynamo.reset()
    return CompileCounterWithBackend("inductor" if machine.simulator is None else "aot_eager")


class Layer(torch.nn.Module):
    """A layer with a probe inside."""

    def __init__(self, machine: Machine, number: int = 0) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8).to(machine.device)
        self.site = multiassert.site(f"layer {number}")

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.linear(hidden)
        multiassert.maybe_detect_nan(hidden, self.site)
        return hidden.relu()


@check("compiled: shapes", seconds=25)
def compiled_shapes(machine: Machine) -> str:
    """One full graph for a fixed shape, and one for shapes that change; each names step and row."""

    def run(compiled: Callable[[Tensor], object], count: int, value: float) -> None:
        compiled(machine.rows(value, count - 1, count))

    counts = []
    for shapes in ([4], [3, 5, 17]):
        compiler = _counting_compiler(machine)
        compiled = torch.compile(Layer(machine), backend=compiler, fullgraph=True, dynamic=len(shapes) > 1)
        for count in shapes:
            expect_alarm(machine, functools.partial(run, compiled, count), "layer 0", count - 1)
        counts.append(compiler.frame_count)
    expect("compilations for a fixed shape", counts[0], 1)
    expect("whether two compilations do for three shapes", counts[1] <= 2, True)
    return f"{compiler.backend}: {counts[0]} compilation for a fixed shape, {counts[1]} for three shapes"


@check("compiled: forty sites", seconds=12)
def forty_sites(machine: Machine) -> str:
    """Forty layers with a site each take one compilation, and the first bad layer comes first."""
    compiler, layers = _counting_compiler(machine), [Layer(machine, number) for number in range(40)]
    with torch.no_grad():
        for layer in layers:
            layer.compile(backend=compiler, fullgraph=True)
        for first_bad in (40, 23):
            hidden = machine.rows()
            for number, layer in enumerate(layers):
                hidden = layer(machine.rows(math.nan) if number == first_bad else hidden)
            wanted = [(f"layer {number}", (2,), 1) for number in range(first_bad, 40)]
            expect("reported", brief(machine.reports()), wanted)
    expect("compilations", compiler.frame_count, 1)
    return f"{compiler.backend}: 1 compilation; a NaN in layer 23 was reported by 23 to 39, in that order"


@check("compiled: one fused kernel", seconds=15)
def one_fused_kernel(machine: Machine) -> str:
    """The probe becomes part of the kernel that makes its tensor, which is never written to memory."""
    _need_inductor(machine)
    from torch._inductor.utils import run_and_get_code

    def forward(hidden: Tensor) -> Tensor:
        hidden = hidden * 2 + 1
        multiassert.maybe_detect_nan(hidden, "fused")
        return hidden.sum(1)

    compiled, hidden = torch.compile(forward, fullgraph=True), torch.zeros(64, 4096, device=machine.device)

    def run(value: float) -> None:
        hidden[63, 5] = value
        compiled(hidden)

    with torch._inductor.config.patch(force_disable_caches=True):
        _, (code,) = run_and_get_code(run, 0.0)
    expect_alarm(machine, run, "fused", row=63)
    kernels = code.count("async_compile.triton(") or code.count('extern "C"')
    expect("kernels", kernels, 1)
    expect("whether the probed tensor is written", f"empty_strided_{machine.device.type}((64, 4096)" in code, False)
    return "1 kernel for product, sum and probe; the product is never written"


@check("compiled: CUDA graphs", seconds=20)
def compiled_cuda_graphs(machine: Machine) -> str:
    """mode="reduce-overhead" keeps its CUDA graphs with a probe inside, and the probe fires in a replay."""
    if machine.device.type != "cuda":
        raise NotHere("torch.compile makes CUDA graphs for CUDA and ROCm only")
    _need_inductor(machine)
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_trees import get_manager

    torch._dynamo.reset()
    counters.clear()
    hidden, compiled = machine.rows(), torch.compile(Layer(machine), mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for number in range(12):  # a warm-up, a recording, then replays
            hidden[2] = math.nan if number == 8 else 0
            torch.compiler.cudagraph_mark_step_begin()
            compiled(hidden)
            wanted = [("layer 0", (2,), 8)] if number == 8 else []
            expect(f"reported in call {number}", brief(machine.reports()), wanted)
    manager = get_manager(machine.device.index, create_if_none_exists=False)
    recorded = sum(len(nodes) for nodes in manager.roots.values()) if manager is not None else 0
    expect("CUDA graphs that were given up", counters["inductor"]["cudagraph_skips"], 0)
    expect("whether a CUDA graph was recorded", recorded > 0, True)
    return f"{recorded} graph recorded, none given up; reported by the replay in step 8 alone"


# ---------------------------------------------------------------------------------------------------------------------
# Captured graphs.


def _captured(machine: Machine, static: Tensor, **masks: Any) -> tuple[Any, Any]:
    """A graph with a probe on twice `static`, and the stream it was captured on."""
    graph, stream = machine.new_graph(), machine.module.Stream()
    with machine.module.stream(stream):
        multiassert.prewarm(machine.device)
        with machine.module.graph(graph, stream=stream):
            multiassert.maybe_detect_nan(static * 2, "captured", **masks)
    return graph, stream


@check("captured: the bad replay alone")
def bad_replay(machine: Machine) -> str:
    """Nothing is reported of the capture and of clean replays; a bad replay is reported in its step and not later."""
    static = machine.rows()
    graph, stream = _captured(machine, static)
    with machine.module.stream(stream):
        for number in range(6):
            static[1] = math.nan if number == 3 else 0
            graph.replay()
            wanted = [("captured", (1,), 3)] if number == 3 else []
            expect(f"reported in step {number}", brief(machine.reports()), wanted)
    return "6 replays, reported in the one that was bad"


@check("captured: a thousand replays")
def thousand_replays(machine: Machine) -> str:
    """A thousand replays without a call of ours between them; the bad one is in the record of the next step."""
    static = machine.rows()
    graph, stream = _captured(machine, static)

    def run(value: float) -> None:
        for number in range(1000):
            static[2] = value if number == 500 else 0
            graph.replay()

    with machine.module.stream(stream):
        expect_alarm(machine, run, "captured")
    return "a thousand clean replays were silent; one bad replay among a thousand was reported"


@check("captured: replays on another stream")
def other_stream(machine: Machine) -> str:
    """Captured on a side stream, replayed on the main one, as engines do: no replay gets lost in a snapshot."""
    static, found = machine.rows(), []
    graph, _ = _captured(machine, static)
    for number in range(4):
        static[number] = math.nan
        graph.replay()
        multiassert.step()
        static.zero_()
    for _ in range(4):
        machine.finish()
        found += multiassert.poll()
    expect("reported", brief(found), [("captured", (number,), number) for number in range(4)])
    return "4 replays, 4 records, each with its own step"


@check("captured: num_valid changes")
def num_valid_changes(machine: Machine) -> str:
    """A number of valid rows on the device is read anew at each replay."""
    static, valid, seen = machine.rows(math.nan, 3), torch.tensor(4, device=machine.device), []
    graph, stream = _captured(machine, static, num_valid=valid)
    with machine.module.stream(stream):
        for count in (3, 4, 2, 4):
            valid.fill_(count)
            graph.replay()
            seen.append([v.rows for v in machine.reports()])
    expect("reported with 3, 4, 2 and 4 valid rows", seen, [[], [(3,)], [], [(3,)]])
    return "a bad padding row was reported only while it counted"


@check("captured: suspend() at warm-up")
def suspended_warm_up(machine: Machine) -> str:
    """A warm-up on garbage inside suspend() reports nothing; the probe captured afterwards does."""
    static, stream, graph, silent = (
        machine.rows(math.nan),
        machine.module.Stream(),
        machine.new_graph(),
        machine.new_graph(),
    )
    with machine.module.stream(stream):
        multiassert.prewarm(machine.device)
        with multiassert.suspend():
            multiassert.maybe_detect_nan(static * 2, "suspended")
            with machine.module.graph(silent, stream=stream):
                multiassert.maybe_detect_nan(static * 2, "suspended")
            silent.replay()
        with machine.module.graph(graph, stream=stream):
            multiassert.maybe_detect_nan(static * 2, "captured")
        expect("reported of the warm-up", brief(machine.reports()), [])
        graph.replay()
        expect("reported of the replay", brief(machine.reports()), [("captured", (2,), 1)])
    return "silent in the warm-up and in a graph captured in it; reported by the graph captured after"


@check("captured: not prewarmed")
def not_prewarmed(machine: Machine) -> str:
    """A probe that would have to allocate inside a capture says which call is missing."""
    static, graph, stream, said = machine.rows(), machine.new_graph(), machine.module.Stream(), "nothing"
    try:
        with machine.module.graph(graph, stream=stream):
            multiassert.maybe_detect_nan(static, "not prewarmed")
    except RuntimeError as error:
        said = str(error)
    expect(f"whether the error names prewarm ({said})", "Call multiassert.prewarm(" in said, True)
    return "raised, and named the call that was missing"


@check("captured: make_graphed_callables", seconds=4)
def graphed_callables(machine: Machine) -> str:
    """A module with a probe, captured by torch itself: forward reports, backward gives the gradients of eager code."""
    machine.need("graph", "make_graphed_callables")
    layer = Layer(machine)
    eager, sample = copy.deepcopy(layer), machine.rows().requires_grad_()
    multiassert.prewarm(machine.device)  # for the stream that torch captures on, too
    graphed = machine.module.make_graphed_callables(layer, (sample,))
    expect("reported of warm-up and capture", brief(machine.reports()), [])
    hidden = torch.randn(4, 8, device=machine.device, requires_grad=True)
    gradients: list[Any] = []
    for module in (graphed, eager):
        module(hidden).sum().backward()
        gradients.append(module.linear.weight.grad)
    expect(
        "whether the gradients are those of eager code", torch.allclose(gradients[0], gradients[1], 1e-4, 1e-5), True
    )
    expect_alarm(machine, lambda value: graphed(machine.rows(value).requires_grad_()), "layer 0")
    return "reported by the forward graph; gradients as in eager code"


# ---------------------------------------------------------------------------------------------------------------------
# Streams, devices, transforms, threads and processes.


@check("side stream: in order")
def side_stream(machine: Machine) -> str:
    """A probe sees what its own stream has written before it, however late, and nothing that is written after it."""
    machine.need("Stream", "stream")
    tensor = machine.rows()

    def run(value: float) -> None:
        machine.start_long_work()
        multiassert.maybe_detect_nan(tensor, "before")
        tensor[2] = value
        multiassert.maybe_detect_nan(tensor, "after")

    with machine.module.stream(machine.module.Stream()):
        expect_alarm(machine, run, "after")
    return "the probe before the write was silent, the one after it reported"


@check("side stream: two stay parallel", seconds=4)
def parallel_streams(machine: Machine) -> str:
    """Probes and a step put no order between two streams: long work on both takes about the time of one."""
    machine.need("Stream", "stream")
    streams = machine.module.Stream(), machine.module.Stream()
    clean, bad = machine.rows(), machine.rows(math.nan)

    def run(tensors: Sequence[Tensor]) -> bool:
        work = []
        for stream, tensor in zip(streams, tensors, strict=True):
            with machine.module.stream(stream):
                work.append(machine.start_long_work())
                multiassert.maybe_detect_nan(tensor, "parallel")
        return not any(event.query() for event in work)

    run((clean, clean))
    expect("reported of clean tensors", brief(machine.reports()), [])
    began = time.monotonic()
    expect("whether the long work was still under way", run((clean, bad)), True)
    multiassert.step()
    if machine.simulator is None:
        machine.finish()
        took = time.monotonic() - began
        expect(f"whether {took:.2f} s are about the time of one", took < 1.6 * LONG_WORK_SECONDS, True)
        seen = f"twice {LONG_WORK_SECONDS} s of work took {took:.2f} s"
    else:
        machine.simulator.advance(1000, stream=streams[1].stream_id)
        seen = "one of two streams stood still, and the other was reported"
    expect("reported", brief(multiassert.poll()), [("parallel", (2,), 1)])
    return seen


@check("two devices")
def two_devices(machine: Machine) -> str:
    """A probe on the second device, while the first is the current one, names the second."""
    machine.need("device_count", "device")
    if machine.module.device_count() < 2:
        raise NotHere("there is 1 device")
    second = torch.device(machine.device.type, 1)
    for bad in (False, True):
        multiassert.maybe_detect_nan(machine.rows(), "first")
        multiassert.maybe_detect_nan(machine.rows(math.nan if bad else 0).to(second), "second")
        multiassert.step()
        for index in range(2):
            with machine.module.device(index):
                machine.finish()
        found = [(v.message, v.device, v.rows) for v in multiassert.poll()]
        expect("reported", found, [("second", second, (2,))] if bad else [])
    return f"reported on {second} while {machine.device} was the current one"


@check("transforms")
def transforms(machine: Machine) -> str:
    """Under vmap, grad and checkpoint a probe reports once, with its row."""
    from torch.utils.checkpoint import checkpoint

    def forward(hidden: Tensor) -> Tensor:
        hidden = hidden * 2
        multiassert.maybe_detect_nan(hidden, "transformed")
        return hidden.sum()

    under: dict[str, Callable[[Tensor], object]] = {
        "vmap": torch.func.vmap(forward),
        "grad": torch.func.grad(forward),
        "checkpoint": lambda hidden: checkpoint(forward, hidden.requires_grad_(), use_reentrant=False).backward(),
    }

    def run(call: Callable[[Tensor], object], value: float) -> None:
        call(machine.rows(value))

    for call in under.values():
        expect_alarm(machine, functools.partial(run, call), "transformed")
    return f"{', '.join(under)}: reported once each, silent on clean tensors"


@check("threads")
def threads(machine: Machine) -> str:
    """Four threads probe while the main one steps: each bad tensor is reported exactly once."""
    clean, bad, found = machine.rows(), machine.rows(math.nan), []

    def work(number: int) -> None:
        for call in range(100):
            multiassert.maybe_detect_nan(bad if call == 50 else clean, f"thread {number}")

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        multiassert.step()
        found += multiassert.poll()
        time.sleep(0.002)
    found += multiassert.drain()
    expect("reported", sorted((v.message, v.rows) for v in found), [(f"thread {n}", (2,)) for n in range(4)])
    return "400 probes in 4 threads, 4 bad tensors, 4 records"


def _spawned(machine_of: tuple[str, bool], value: float) -> None:
    machine = set_up(*machine_of)
    with probes("raise"):
        multiassert.maybe_detect_nan(machine.rows(value), "spawned")


@check("spawned worker", seconds=10)
def spawned_worker(machine: Machine) -> str:
    """A worker of multiprocessing that ends right after a bad tensor ends with exit code 1, else with 0."""
    machine_of = machine.platform, machine.simulator is not None
    clean, bad = in_processes((_spawned, (machine_of, 0.0)), (_spawned, (machine_of, math.nan)))
    expect("how the clean and the bad worker ended", (clean[0], bad[0]), ("exit code 0", "exit code 1"))
    expect("whether the bad one named its probe", "NaN detected! spawned" in bad[1], True)
    return "exit code 0 when clean, 1 with a NaN in the last step"


def _rank(platform: str, rank: int, world: int, file: str) -> None:
    device, distributed = set_up(platform, False).device, torch.distributed
    if device.type != "cpu":
        device = torch.device(device.type, rank)
        torch.get_device_module(device).set_device(rank)
    distributed.init_process_group(
        distributed.get_default_backend_for_device(device), init_method=f"file://{file}", rank=rank, world_size=world
    )
    with probes("raise"):
        for number in range(20):
            hidden = torch.full((4, 8), math.nan if (rank, number) == (world - 1, 5) else 0.0, device=device)
            multiassert.maybe_detect_nan(hidden, "on a rank")
            try:
                multiassert.step(group=distributed.group.WORLD, timeout=datetime.timedelta(seconds=20))
            except AsyncAssertionError as error:
                first = error.violations[0]
                print(f"call {number} raised for rank {first.rank}, step {first.step}", flush=True)
                break
    distributed.destroy_process_group()


@check("ranks: all raise for one", seconds=25)
def ranks(machine: Machine) -> str:
    """With step(group=...) a NaN on the last rank raises on every rank at the same call, and names that rank."""
    if "group" not in inspect.signature(multiassert.step).parameters:
        raise NotHere("this multiassert has no step(group=...)")
    if machine.simulator is not None:
        raise NotHere("a simulated device has no collectives")
    world = 2 if machine.device.type == "cpu" else machine.module.device_count()
    if world < 2:
        raise NotHere("there is 1 device, and a rank needs one of its own")
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        ended = in_processes(*((_rank, (machine.platform, rank, world, store)) for rank in range(world)))
    told = [next((line for line in text.splitlines() if line.startswith("call ")), text[-200:]) for _, text in ended]
    expect("how the ranks ended", {how for how, _ in ended}, {"exit code 0"})
    expect("what the ranks tell", told, [told[0]] * world)
    expect(f"whether it is rank {world - 1} ({told[0]})", f"raised for rank {world - 1}, step 5" in told[0], True)
    return f"{world} ranks: {told[0]}, on each"


# ---------------------------------------------------------------------------------------------------------------------
# Running the checks: a worker process runs them, the main one keeps the time.


@dataclasses.dataclass(frozen=True)
class Result:
    """One row of the table as it came out."""

    check: str
    result: str
    seen: str
    seconds: float


def attempt(name: str, platform: str, simulated: bool) -> tuple[Result, bool]:
    """Run one check from a clean start: its result, and whether the device still works."""
    machine = set_up(platform, simulated)
    delivery.start_anew()
    if machine.simulator is not None:
        machine.simulator.reset()
    began = time.monotonic()
    try:
        with probes("warn"):
            result, seen = "yes", CHECKS[name].run(machine)
    except NotHere as reason:
        result, seen = "not here", str(reason)
    except Wrong as wrong:
        result, seen = "no", str(wrong)
    except Exception as error:
        traceback.print_exc()
        result, seen = "no", f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    delivery.start_anew()  # what a failed check has left behind is not to be told when the process ends
    try:
        works = bool((torch.zeros(2, device=machine.device) == 0).all().item())
    except Exception:
        works = False
    return Result(name, result, " ".join(seen.split())[:600], seconds), works


class Worker:
    """The process that runs the checks, and processes of theirs with it."""

    def __init__(self, platform: str, simulated: bool) -> None:
        self._machine_of = platform, simulated
        self._pool = ProcessPoolExecutor(1, mp_context=spawn, initializer=os.setsid)
        self._process_group = self._pool.submit(os.getpid).result()

    def run(self, chosen: Check, seconds: float) -> tuple[Result, bool]:
        """A check's result, and whether this worker can run another one; raises NotHere without a device."""
        try:
            return self._pool.submit(attempt, chosen.name, *self._machine_of).result(seconds)
        except BrokenProcessPool:
            return Result(chosen.name, "no", "the process that ran it ended", 0.0), False
        except concurrent.futures.TimeoutError:
            result = "no" if seconds >= _limit(chosen) else "out of time"
            return Result(chosen.name, result, f"no end within {seconds:.0f} s", seconds), False

    def end(self, can_go_on: bool) -> None:
        """End the process, kindly where it can still listen."""
        self._pool.shutdown(wait=can_go_on)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process_group, signal.SIGKILL)


def _limit(chosen: Check) -> float:
    return max(100.0, 5 * chosen.seconds)


def run_checks(platform: str, simulated: bool, chosen: Sequence[Check], budget: float) -> list[Result]:
    """Run checks one after the other within `budget` seconds; raises NotHere without a device."""
    ends = time.monotonic() + budget
    worker: Worker | None = None
    results, can_go_on = [], True
    try:
        for each in chosen:
            left = ends - time.monotonic()
            if left < each.seconds:
                results.append(Result(each.name, "out of time", "not run: out of time", 0.0))
                continue
            worker = worker or Worker(platform, simulated)
            can_go_on = False
            result, can_go_on = worker.run(each, min(_limit(each), left))
            results.append(result)
            if not can_go_on:
                worker.end(can_go_on)
                worker = None
    finally:
        if worker is not None:
            worker.end(can_go_on)
    return results


def table_of(results: Sequence[Result], title: str) -> Table:
    """The results as a table."""
    table = Table(title=title, show_lines=True)
    table.add_column("check", max_width=24)
    table.add_column("result", no_wrap=True)
    table.add_column("what was seen", ratio=1)
    table.add_column("seconds", justify="right", no_wrap=True)
    styles = {"yes": "green", "no": "bold red"}
    for each in results:
        row = each.check, each.result, escape(each.seen), f"{each.seconds:.1f}"
        table.add_row(*row, style=styles.get(each.result, "dim"))
    return table


def default_platform() -> str:
    """The platform of the accelerator that torch finds; the CPU, which has little to say, is never the default."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        raise NotHere("torch finds no accelerator here: choose one with --platform, and --simulate to simulate it")
    name = backends.for_device_type(found.type).name
    return name if name in PLATFORMS else "generic"


def main(arguments: Sequence[str]) -> int:
    """Run the chosen checks and print the table last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=PLATFORMS, help="default: that of the accelerator that torch finds")
    parser.add_argument("--simulate", action="store_true", help="on a simulated npu, musa or generic device")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results to FILE too")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only checks whose names begin so")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, metavar="SECONDS", help="default: %(default)s")
    options = parser.parse_args(arguments)
    chosen = [each for each in CHECKS.values() if not options.only or each.name.startswith(tuple(options.only))]
    if not chosen:
        parser.error(f"--only {' '.join(options.only)}: the names are {'; '.join(CHECKS)}")
    try:
        platform = options.platform or default_platform()
        results = run_checks(platform, options.simulate, chosen, options.budget)
    except (NotHere, ValueError) as reason:
        print(reason, file=sys.stderr)
        return 2
    if options.json:
        rows = [dataclasses.asdict(each) for each in results]
        written = {"platform": platform, "simulated": options.simulate, "checks": rows}
        options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    Console().print(table_of(results, f"{'simulated ' if options.simulate else ''}{platform}"))
    return int(any(each.result == "no" for each in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
