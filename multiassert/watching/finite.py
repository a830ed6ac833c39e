"""One look for NaN and Inf together: what a watched tensor is asked, at the price of one probe instead of two."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from multiassert import glance, predicates, settings
from multiassert.predicates import Check, Finding, Number, Observation, check_factory, float_plane


@dataclasses.dataclass(frozen=True, eq=False)
class FiniteCheck(Check):
    """Tells afterwards, by the worst value, whether it was a NaN or an Inf."""

    def findings(self, low_cells: list[int], high_cells: list[int], lowest: Number, highest: Number) -> list[Finding]:
        """One finding with all rows; a NaN is worse than an Inf."""
        cells = sorted({*low_cells, *high_cells})
        if not cells:
            return []
        worst = highest if math.isnan(highest) or high_cells else lowest
        kind, headline = ("nan", "NaN detected!") if math.isnan(worst) else ("inf", "Inf detected!")
        return [Finding(kind, headline, cells, float(worst), None)]


def not_finite(tensor: Tensor, allow_neginf: bool) -> Observation | None:
    """NaN and Inf anywhere, with -Inf excused or not: a predicate, as those of multiassert.predicates."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.dtype.is_floating_point or "float4" in str(tensor.dtype):
        return None
    if tensor.dtype.itemsize == 1:
        tensor = tensor.to(torch.float32)  # fp8 has no reductions, and float32 keeps each kind's NaN and Inf
    if settings.exact:  # a reduction may lose the NaN; it is told as an Inf then
        tensor = torch.where(tensor == tensor, tensor, math.inf)
    return Observation(finite_check(float_plane(tensor.dtype), bool(allow_neginf)), tensor, tensor)


@check_factory
def finite_check(plane: torch.dtype, allow_neginf: bool) -> Check:
    largest = torch.finfo(plane).max
    floor = None if allow_neginf else -largest
    return FiniteCheck(plane, floor, largest, ("inf", "inf"), ("NaN or Inf detected!",) * 2, (None, None))


# That look says yes only where the sum or the extremes are finite, and then there is no NaN either.
glance.look_as(not_finite, predicates.inf)
