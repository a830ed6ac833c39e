"""What is asked of a device, each examination in a child process: it tells facts, and judges nothing.

A fact that cannot be had is told as {"not here": reason}, so that no question stays without an answer.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import multiassert
from multiassert import backends, delivery, fused, presence, settings
from multiassert.doctor.children import Tell
from multiassert.doctor.kinds import every_kind
from multiassert.doctor.machine import Machine, NotHere, set_up
from multiassert.violation import Violation

MESSAGE = "doctor: a NaN put there on purpose"
PACKAGES = ("triton", "pytorch-triton-rocm", "triton-xpu", "torch-npu", "torch-musa", "torchada")
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def presence_of_platforms(tell: Tell) -> None:
    """For each platform that torch or we know: an empty string where its device is here, else what is missing."""
    own_name = torch._C._get_privateuse1_backend_name()
    names = [*settings.KNOWN_PLATFORMS, *([own_name] if own_name not in ("privateuseone", "npu", "musa") else [])]
    tell("missing", {name: presence.missing_of(name) for name in names})


def mode_in_force(platform: str, simulated: bool, tell: Tell) -> None:
    """A clean tensor and then a NaN, in the platform's mode; in mode auto where it is off."""
    machine = set_up(platform, simulated)
    seen: list[Violation] = []
    multiassert.on_violation(seen.append)
    mode = settings.current.of(platform)
    clean, bad = machine.rows(), machine.rows(math.nan)
    with multiassert.override(**{platform: settings.Mode.AUTO if mode is settings.Mode.OFF else mode}):
        try:
            _probe_and_drain(machine, clean)
            tell("silent when clean", not seen)
            if not seen:
                _probe_and_drain(machine, bad)
        except Exception as error:
            tell("is device's", isinstance(error, RuntimeError))
            tell("raised", f"{type(error).__name__}: {_first_line(error)}")
        tell("records", [_record(violation) for violation in seen])
    os._exit(0)  # a device that was trapped may fail, or hang, on the way out


def _probe_and_drain(machine: Machine, tensor: Tensor) -> None:
    multiassert.maybe_detect_nan(tensor, MESSAGE)
    multiassert.step()
    machine.finish()
    multiassert.drain()


# ---------------------------------------------------------------------------------------------------------------------
# torch._assert_async itself, as torch has it: nothing of ours is in between.


def native_call(platform: str, simulated: bool, tell: Tell) -> None:
    """One call whose condition holds, while the device is busy, and one whose condition does not."""
    machine = set_up(platform, simulated)
    tell("kernel", _has_kernel(machine.device.type))
    yes, no = machine.put(torch.tensor(True)), machine.put(torch.tensor(False))
    torch._assert_async(yes, MESSAGE)  # the first call may load a kernel, which takes time of its own
    machine.finish()
    tell("waits", _or_not_here(lambda: _waits_in(machine, lambda: torch._assert_async(yes, MESSAGE))))
    machine.finish()
    tell("passes when true", True)
    _must_not_survive(machine, lambda: torch._assert_async(no, MESSAGE), tell)


def _has_kernel(device_type: str) -> bool:
    key = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}.get(device_type, "PrivateUse1")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::_assert_async.msg", key))


def _waits_in(machine: Machine, call: Callable[[], object]) -> dict[str, Any]:
    """Whether the host waits in a call: counted where the device is simulated, else by whether it outlasts a kernel."""
    if machine.simulator is not None:
        with machine.simulator.record() as ledger:
            call()
        return {"waits": len(ledger.waits), "how": "counted by the simulated device"}
    for _ in range(2):  # a busy machine may once take longer than the kernel by itself
        machine.finish()
        long_work = machine.start_long_work()
        began = time.monotonic()
        call()
        took, still_busy = time.monotonic() - began, not long_work.query()
        if still_busy:
            break
    return {"waits": int(not still_busy), "how": f"returned after {took * 1000:.1f} ms beside a longer kernel"}


def native_captured(platform: str, simulated: bool, tell: Tell) -> None:
    """The same in a captured graph: a replay whose condition holds, and one whose condition does not."""
    machine = set_up(platform, simulated)
    static, graph = machine.put(torch.tensor(True)), machine.new_graph()
    try:
        with machine.module.graph(graph, stream=machine.module.Stream()):
            torch._assert_async(static, MESSAGE)
        graph.replay()
        machine.finish()
    except Exception as error:
        tell("capture", f"{type(error).__name__}: {_first_line(error)}")
        os._exit(0)
    tell("capture", "")
    static.fill_(False)
    _must_not_survive(machine, graph.replay, tell)


def native_compiled(platform: str, simulated: bool, tell: Tell) -> None:
    """The same in code compiled by Inductor."""
    machine = set_up(platform, simulated)
    if simulated or machine.device.type not in ("cpu", "cuda", "xpu"):
        raise NotHere("Inductor generates no code for this device")

    def forward(hidden: Tensor) -> Tensor:
        hidden = hidden * 2
        torch._assert_async(hidden.amax() < 1, MESSAGE)
        return hidden + 1

    compiled = torch.compile(forward, fullgraph=True)
    try:
        compiled(machine.rows())
        machine.finish()
    except Exception as error:
        raise NotHere(f"torch.compile fails here: {type(error).__name__}: {_first_line(error)}") from None
    tell("compiled", True)
    bad = machine.rows(1.0)
    _must_not_survive(machine, lambda: compiled(bad), tell)


def _must_not_survive(machine: Machine, call: Callable[[], object], tell: Tell) -> None:
    """What comes of a call whose condition does not hold; ends the process, whose device may be lost."""
    try:
        call()
        tell("returned", True)
        machine.finish()
        tell("survived", True)
    except Exception as error:
        tell("raised", f"{type(error).__name__}: {_first_line(error)}")
        tell("message", MESSAGE in str(error))
    os._exit(0)


# ---------------------------------------------------------------------------------------------------------------------
# The deferred mechanism.


def device_and_deferred(platform: str, simulated: bool, tell: Tell) -> None:
    """Which device it is, and all that the deferred mechanism promises of it."""
    machine = set_up(platform, simulated)
    tell("versions", _versions(machine))
    tell("overflow", _or_not_here(lambda: _overflow(machine)))
    tell("fused", _has_fused_kernel(machine))
    tell("reductions", _or_not_here(lambda: _reductions_that_lose_nan(machine)))
    with multiassert.override(**{platform: "warn"}):
        tell("kinds", _or_not_here(lambda: _kinds(machine)))
        tell("waits", _or_not_here(lambda: _deferred_waits(machine)))
        tell("graph", _or_not_here(lambda: _replays(machine)))
        tell("cost", _or_not_here(lambda: _cost(machine)))


def _or_not_here(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except NotHere as reason:
        return {"not here": str(reason)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {_first_line(error)}"}
    finally:
        delivery.start_anew()


def _versions(machine: Machine) -> dict[str, str]:
    versions: dict[str, str] = {"torch": str(torch.__version__)}
    versions |= {name: found for name in ("cuda", "hip", "xpu") if (found := getattr(torch.version, name, None))}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if machine.simulator is not None:
        operators = backends.named(machine.platform).operators
        versions["operators of"] = "the CPU" if operators is None else operators.provenance()["package"]
    elif hasattr(machine.module, "get_device_name"):
        versions["device"] = f"{machine.module.device_count()} x {machine.module.get_device_name(machine.device)}"
    return versions


def _has_fused_kernel(machine: Machine) -> bool:
    backend = backends.for_device_type(machine.device.type)
    return fused.is_chosen(backend, machine.device, settings.current.kernels)


def _overflow(machine: Machine) -> dict[str, str]:
    """What 60000 * 2 and the root of -1 are in fp16: Inf and NaN, or 65504 and 0 in Ascend's saturation mode."""
    if machine.simulator is not None:
        raise NotHere("a simulated device computes as the CPU does")
    numbers = machine.put(torch.tensor([60000.0, -1.0], dtype=torch.float16))
    return {"60000 * 2": str((numbers[0] * 2).item()), "sqrt(-1)": str(numbers[1].sqrt().item())}


def _reductions_that_lose_nan(machine: Machine) -> dict[str, list[str]]:
    """Where amax, amin and maximum or minimum into a slot return a number although they were given a NaN."""
    lost, asked = list[str](), []
    for dtype in FLOATS:
        try:
            lost += _lost_in(machine, dtype)
        except (RuntimeError, TypeError):
            if dtype is torch.float32:
                raise
            continue  # a dtype that the device lacks, or cannot reduce: no probe of it can be silent
        asked.append(str(dtype).removeprefix("torch."))
    return {"asked": asked, "lost": lost}


def _lost_in(machine: Machine, dtype: torch.dtype) -> list[str]:
    zeros, lost = machine.put(torch.zeros(3, 1000, dtype=dtype)), []
    for column in (0, 499, 999):
        values = zeros.clone()
        values[1, column] = math.nan
        clean, number = zeros[:, 0].float(), values.amax(1).float()
        reduced = {
            "amax": values.amax(1),
            "amin": values.amin(1),
            "aminmax": values.aminmax(dim=1).max,
            "maximum": torch.maximum(number, clean),
            "maximum, NaN kept before": torch.maximum(clean, number),
            "minimum": torch.minimum(number, clean),
        }
        machine.finish()
        for name, result in reduced.items():
            if result.cpu().float().isnan().tolist() != [False, True, False]:
                lost.append(f"{name} of {dtype}, column {column} of 1000")
    return lost


def _kinds(machine: Machine) -> dict[str, str]:
    """For each kind an empty string where it was reported as it must be, and silent when clean; else what was seen."""
    cases, seen = every_kind(machine), dict[str, str]()
    for name, probe, clean, bad, wanted in cases:
        probe(clean, name)
        early = machine.reports()
        probe(bad, name)
        found = [(violation.kind, violation.rows, str(violation.value)) for violation in machine.reports()]
        seen[name] = f"a clean tensor was reported: {early}" if early else ""
        if not early and found != [wanted]:
            seen[name] = f"saw {found}, expected {[wanted]}"
    return seen


def _deferred_waits(machine: Machine) -> dict[str, Any]:
    """How often the host waits in ten steps of every kind of probe; the first step, which allocates, is not counted."""
    machine.need()
    cases = every_kind(machine)

    def steps(count: int) -> None:
        for _ in range(count):
            for name, probe, clean, _, _ in cases:
                probe(clean, name)
            multiassert.step()
            multiassert.poll()

    steps(1)
    machine.finish()
    return {"probes": 10 * len(cases), **_waits_in(machine, lambda: steps(10))}


def _replays(machine: Machine) -> list[list[int]]:
    """The rows reported after each of four replays of a graph with a probe, of which the third is bad."""
    static, graph, stream = machine.rows(), machine.new_graph(), machine.module.Stream()
    found = []
    with machine.module.stream(stream):
        multiassert.prewarm(machine.device)
        with machine.module.graph(graph, stream=stream):
            multiassert.maybe_detect_nan(static * 2, "captured")
        for number in range(4):
            static[1] = math.nan if number == 2 else 0
            graph.replay()
            found.append([row for violation in machine.reports() for row in _record(violation)["rows"]])
    return found


def _cost(machine: Machine) -> dict[str, Any]:
    """The host's time for a NaN probe of 64x4096 numbers, and on a simulated device its kernels."""
    hidden = machine.put(torch.zeros(64, 4096, dtype=torch.float16))
    for _ in range(20):
        multiassert.maybe_detect_nan(hidden, "cost")
    machine.finish()
    multiassert.step()  # else the probe that is counted may be one that sends a snapshot by itself
    machine.finish()
    if machine.simulator is not None:
        with machine.simulator.record() as ledger:
            multiassert.maybe_detect_nan(hidden, "cost")
        return {"kernels": len(ledger.kernels)}
    took = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(20):
            multiassert.maybe_detect_nan(hidden, "cost")
        took.append((time.perf_counter() - began) / 20)
        machine.finish()
    return {"microseconds": round(min(took) * 1e6, 2)}


def _record(violation: Violation) -> dict[str, Any]:
    rows = [row for each in violation.rows for row in (each if isinstance(each, range) else [each])]
    return {"kind": violation.kind, "rows": rows, "value": str(violation.value), "message": violation.message}


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:200]
