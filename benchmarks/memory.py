"""How much memory a probe takes while it runs, beside the tensor that it reads.

Torch's profiler notes every allocation, those inside an operator too; the trace that it exports is read here.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import contenders
from benchmarks.contenders import VOCABULARY
from benchmarks.table import Row, Spread, Table
from benchmarks.timing import Contender, Effort

EXPLANATION = (
    "The most bytes that were allocated at one time during a call, as a part of the tensor's own bytes, for "
    "64x151936. Read from the allocations in the trace of torch.profiler."
)


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that was allocated at one time while it ran."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    allocations = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
    held = peak = 0
    for event in allocations:
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def measure(effort: Effort) -> Table:
    """Run everyone once for each probe and dtype."""
    table = Table("memory", "Memory while a probe runs", EXPLANATION)
    shape = (1, VOCABULARY) if effort.quick else (64, VOCABULARY)
    for probe in contenders.PROBES:
        for dtype in probe.dtypes:
            if probe.name == "condition":
                continue
            tensor = torch.zeros(shape).to(dtype)
            values: dict[str, Spread | None] = {}
            for contender in contenders.contenders(probe, tensor):
                values[contender.name] = _relative_peak(contender, tensor)
            what = {"probe": probe.name, "dtype": str(dtype).removeprefix("torch.")}
            table.rows.append(Row(what, values))
    return table


def _relative_peak(contender: Contender, tensor: torch.Tensor) -> Spread | None:
    try:
        peak = peak_bytes(contender.ready())
    except (NotImplementedError, RuntimeError):
        return None  # it has no such check for this dtype
    return Spread.exactly(float(f"{peak / (tensor.numel() * tensor.element_size()):.3g}"))
