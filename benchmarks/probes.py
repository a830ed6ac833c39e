"""Every probe at every size and dtype, on the CPU, where nothing violates anything."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from benchmarks import contenders, timing
from benchmarks.contenders import VOCABULARY, Probe
from benchmarks.table import Row, Table
from benchmarks.timing import Effort

EXPLANATION = (
    "Times as parts of another contender's, below 1 is faster. `auto` looks in the call, `deferred` is mode raise with "
    "its own snapshots. `plain` is the same check in plain torch, `limit` the quickest single reduction over the same "
    "tensor (for floats `sum`). `us` is the time of a call in auto, for a feeling. All tensors pass their check."
)

PLAIN_SHAPES = {
    "64": (64,),
    "1x151936": (1, VOCABULARY),
    "64x151936": (64, VOCABULARY),
    "10 M": (10_000_000,),
    "65536x152": (65536, 152),  # as many elements, in many rows
}
PADDED_VOCABULARY = VOCABULARY + 128

QUICK_SHAPES = ("1", "64", "1x151936")
QUICK_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)

# Where the size says little that it does not say of these.
EVERYWHERE = ("nan", "inf", "closed range", "out of bounds", "page aligned, 64")
FEW_SHAPES = ("64", "64x151936")
FP8_SHAPES = ("64", "1x151936", "64x151936")  # some hundred times slower than other dtypes
ONE_ELEMENT = "1"
MASKED, SLICED = "64x151936, half -inf", "64x151936 of 64x152064"


@dataclasses.dataclass(frozen=True)
class Case:
    """A probe, and the tensor that it is given."""

    probe: Probe
    shape: str
    dtype: torch.dtype

    def tensor(self) -> torch.Tensor:
        """Values that violate nothing."""
        if self.probe.name == "condition":
            return torch.ones(1, dtype=torch.bool)
        if self.shape == SLICED:
            return self._values((64, PADDED_VOCABULARY))[:, :VOCABULARY]
        if self.shape == MASKED:
            logits = self._values((64, VOCABULARY))
            logits[:, VOCABULARY // 2 :] = -math.inf
            return logits
        return self._values(PLAIN_SHAPES[self.shape])

    def _values(self, shape: tuple[int, ...]) -> torch.Tensor:
        if self.probe.name == "sum":
            return torch.zeros(shape, dtype=self.dtype)
        if not self.dtype.is_floating_point:
            return torch.randint(0, VOCABULARY // 192, shape, dtype=self.dtype) * 192  # multiples of 64 and of 48
        return torch.rand(shape).to(self.dtype) if "range" in self.probe.name else torch.randn(shape).to(self.dtype)


def cases(quick: bool) -> Iterator[Case]:
    """All of them, or some of each kind."""
    for probe in contenders.PROBES:
        for dtype in probe.dtypes:
            for shape in _shapes(probe, dtype):
                if not quick or (shape in QUICK_SHAPES and dtype in QUICK_DTYPES):
                    yield Case(probe, shape, dtype)


def _shapes(probe: Probe, dtype: torch.dtype) -> Iterator[str]:
    is_float = dtype.is_floating_point
    is_fp8 = is_float and dtype.itemsize == 1
    if probe.name == "condition":
        yield ONE_ELEMENT
    elif is_fp8:
        yield from FP8_SHAPES
    elif probe.name not in EVERYWHERE:
        yield from FEW_SHAPES
    else:
        yield from PLAIN_SHAPES
    if is_float and not is_fp8 and probe.name in ("nan", "inf, -inf excused", "sanitize logits"):
        yield MASKED
    if is_float and not is_fp8 and probe.name in ("nan", "inf", "closed range"):
        yield SLICED


def measure(effort: Effort) -> Table:
    """Time everyone at every case."""
    table = Table("probes", "Probes on the CPU", EXPLANATION)
    for case in cases(effort.quick):
        tensor = case.tensor()
        reductions = contenders.reductions(tensor)
        limit = reductions[0].name if effort.quick or len(reductions) == 1 else timing.fastest(reductions, effort)
        reduction = next(reduction for reduction in reductions if reduction.name == limit)
        racers = [*contenders.contenders(case.probe, tensor), dataclasses.replace(reduction, name="limit")]
        race = timing.race(racers, effort)
        refusals = [f"{name} cannot ({reason})" for name, reason in race.refusals.items()]
        table.rows.append(
            Row(
                {"probe": case.probe.name, "shape": case.shape, "dtype": str(case.dtype).removeprefix("torch.")},
                {
                    "auto / SGLang": race.ratio("auto", "SGLang"),
                    "deferred / SGLang": race.ratio("deferred", "SGLang"),
                    "auto / plain": race.ratio("auto", "plain"),
                    "deferred / plain": race.ratio("deferred", "plain"),
                    "auto / limit": race.ratio("auto", "limit"),
                    "us": race.time("auto"),
                    **{f"us, {name}": race.time(name) for name in ("deferred", "SGLang", "plain", "limit")},
                },
                "; ".join([f"limit: {limit}", *refusals] if len(reductions) > 1 else refusals),
            )
        )
    return table
