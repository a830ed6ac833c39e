"""How many kernels a probe launches, and how often the host waits: on the CPU and on a simulated device.

A kernel is an ATen operator that is dispatched and is no view. Counts do not vary, so there is nothing to time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import multiassert
from benchmarks import contenders
from benchmarks.contenders import Probe
from benchmarks.table import Row, Spread, Table
from benchmarks.timing import Effort

EXPLANATION = (
    "Operators of a call that are no views, ours in mode raise, for a 64x1000 tensor (one element for a condition). "
    "On npu, which is simulated with the vendor's own list of operators, copies count too, and an operator that the "
    "vendor lacks falls back to the CPU, for which the host waits."
)
SIMULATED = "npu"


class KernelCount(TorchDispatchMode):
    """Names the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not operator.is_view:
            self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


Counts = dict[str, list[str]]  # the names of kernels, host waits and fallbacks


def tensor_for(probe: Probe, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that passes the probe."""
    if probe.name == "condition":
        return torch.ones(1, dtype=torch.bool)
    return torch.zeros(64, 1000).to(dtype)


def count_on_cpu(call: Callable[[], object]) -> Counts:
    """Run it with everything that it makes once made already, and no snapshot due, and count."""
    call()
    multiassert.drain()
    with KernelCount() as count:
        call()
    return {"kernels": count.names, "waits": [], "fallbacks": []}


def count_all(device: str, count: Callable[[Callable[[], object]], Counts]) -> dict[str, dict[str, Counts]]:
    """The counts of every probe and dtype, ours and SGLang's."""
    found: dict[str, dict[str, Counts]] = {}
    for probe in contenders.PROBES:
        for dtype in probe.dtypes:
            on_cpu = tensor_for(probe, dtype)
            on_device = on_cpu.to(device)
            row = found.setdefault(f"{probe.name}|{str(dtype).removeprefix('torch.')}", {})
            both = zip(contenders.contenders(probe, on_cpu), contenders.contenders(probe, on_device), strict=True)
            for trial, contender in both:
                if contender.name in ("deferred", "SGLang"):
                    try:
                        trial.ready()()
                    except (NotImplementedError, RuntimeError):
                        continue  # it has no such check for this dtype, which a device would say too late
                    row[contender.name] = count(contender.ready())
    return found


def measure(effort: Effort) -> Table:
    """Count on the CPU here, and on the simulated device in a process of its own, since a process has room for one."""
    table = Table("kernels", "Kernels and host waits", EXPLANATION)
    child = subprocess.run([sys.executable, "-m", "benchmarks.kernels"], stdout=subprocess.PIPE, text=True, check=True)
    for device, found in (("cpu", count_all("cpu", count_on_cpu)), (SIMULATED, json.loads(child.stdout))):
        for name, row in found.items():
            probe, dtype = name.split("|")
            ours, theirs = row.get("deferred"), row.get("SGLang")
            values: dict[str, Spread | None] = {"ours / SGLang": None}
            if ours and theirs:
                values["ours / SGLang"] = Spread.exactly(round(len(ours["kernels"]) / len(theirs["kernels"]), 2))
            for whose, counts in (("our", ours), ("SGLang's", theirs)):
                for kind, column in (("kernels", "kernels"), ("waits", "waits"), ("fallbacks", "fallbacks")):
                    values[f"{whose} {column}"] = None if counts is None else Spread.exactly(len(counts[kind]))
            note = "" if ours is None else ", ".join(kernel.removeprefix("aten.") for kernel in ours["kernels"])
            table.rows.append(Row({"device": device, "probe": probe, "dtype": dtype}, values, note))
    return table


def count_on_simulated_device() -> None:
    """What the child process does: print the counts as JSON."""
    contenders.sglang_async_probe()  # while there is no device that its import would look for a vendor's package of
    from multiassert import simulate

    simulator = simulate.install(SIMULATED)

    def count(call: Callable[[], object]) -> Counts:
        call()
        multiassert.drain()
        with simulator.record() as ledger:
            call()
        waits = [str(wait) for wait in ledger.waits]
        return {"kernels": ledger.kernels + ledger.fallbacks, "waits": waits, "fallbacks": ledger.fallbacks}

    print(json.dumps(count_all(SIMULATED, count)))


if __name__ == "__main__":
    count_on_simulated_device()
