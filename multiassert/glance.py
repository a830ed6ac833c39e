"""A first look at a CPU tensor, which is free of any wait: whether it is surely clean.

A clean tensor is the rule, and knowing that it is clean takes less than finding the rows that are not: one reduction of
the whole tensor, with no temporary. A look that says no decides nothing; the exact predicate follows. So each look here
may be wrong in that direction only. Measured in `benchmarks/`: `sum` is the one reduction that runs at the speed of
memory in float32, bfloat16 and float16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as _dispatch_modes

from multiassert import predicates
from multiassert.predicates import Observation

FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))

# Elements that are looked at together where a look needs a temporary: it stays in the cache.
CHUNK = 131_072


def is_clean(predicate: Callable[..., Observation | None], tensor: Tensor, arguments: tuple[Any, ...]) -> bool:
    """Whether a tensor of the CPU is surely without a violation; False says nothing."""
    look = _LOOKS[predicate]
    if _dispatch_modes():
        return False  # a tracer, say, which takes no number out of a tensor
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    return look(tensor.detach() if tensor.requires_grad else tensor, *arguments)


def _nan(tensor: Tensor) -> bool:
    if tensor.dtype in FLOATS:
        total = _total(tensor)
        return total == total  # a NaN survives any sum
    bits = _WITHOUT_NAN.get(tensor.dtype)
    return bits is not None and bits.hold(tensor)


def _inf(tensor: Tensor, allow_neginf: object) -> bool:
    if tensor.dtype not in FLOATS:
        bits = _WITHOUT_POSITIVE_INF if allow_neginf else _WITHOUT_INF
        return tensor.dtype is torch.float8_e5m2 and bits.hold(tensor)
    total = _total(tensor)
    if math.isfinite(total) or (allow_neginf and total == -math.inf):
        return True  # an Inf survives a sum, as an Inf or as a NaN; with +Inf or NaN in it, no sum is -Inf
    # float16 overflows in sums of healthy values.
    lowest, highest = _extremes(tensor)
    return highest < math.inf and (lowest > -math.inf or bool(allow_neginf))


def _range(tensor: Tensor, low: Any, high: Any) -> bool:
    if type(low) not in (int, float) or type(high) not in (int, float) or not low <= high:
        return False
    if tensor.dtype in FLOATS:
        check = predicates.range_check(tensor.dtype, predicates.float_plane(tensor.dtype), low, high)
        low, high = check.floor, check.ceiling
    elif tensor.dtype not in INTEGERS:
        return False
    lowest, highest = _extremes(tensor)
    return bool(low <= lowest and highest <= high)


def _bounds(indices: Tensor, low: object, high: object, sentinel: object) -> bool:
    if type(low) is not int or type(high) is not int or low > high or indices.dtype not in INTEGERS:
        return False
    if sentinel is not None:
        if type(sentinel) is not int:
            return False
        # The usual -1 beside [0, high) is one more value that is fine.
        low, high = (low - 1 if sentinel == low - 1 else low), (high + 1 if sentinel == high else high)
    lowest, highest = _extremes(indices)
    return bool(low <= lowest and highest < high)


def _pages(indices: Tensor, page_size: object, sentinel: object) -> bool:
    if type(page_size) is not int or page_size < 2 or sentinel is not None or indices.dtype not in INTEGERS:
        return False
    if page_size > _largest(indices.dtype):
        return False
    power_of_two = not page_size & (page_size - 1)
    if indices.numel() <= 2 * CHUNK or not indices.is_contiguous():
        offsets = indices & (page_size - 1) if power_of_two else indices % page_size
        return not offsets.max().item()
    chunks = indices.view(-1).split(CHUNK)
    if not power_of_two:
        return not any((chunk % page_size).max().item() for chunk in chunks)
    # A bit that is set somewhere is set in the union of all values.
    union = chunks[0].clone()
    for chunk in chunks[1:-1]:
        torch.bitwise_or(union, chunk, out=union)
    return not any((chunk & (page_size - 1)).max().item() for chunk in (union, chunks[-1]))


def _condition(cond: Tensor) -> bool:
    dtype = cond.dtype
    known = dtype is torch.bool or dtype in FLOATS or dtype in INTEGERS
    return known and cond.numel() == 1 and bool(cond)


def _conditions(cond: Tensor) -> bool:
    return cond.dtype is torch.bool and bool(cond.all())


def _sum(tensor: Tensor, expected: object) -> bool:
    if tensor.dtype not in FLOATS and tensor.dtype not in INTEGERS:
        return False
    # A number that the dtype cannot hold is equal to no sum, and is rounded by the exact predicate.
    return type(expected) in (int, float) and tensor.sum().item() == expected


_LOOKS: dict[Callable[..., Observation | None], Callable[..., bool]] = {
    predicates.nan: _nan,
    predicates.inf: _inf,
    predicates.out_of_bounds: _bounds,
    predicates.page_misaligned: _pages,
    predicates.outside_closed_range: _range,
    predicates.condition: _condition,
    predicates.conditions: _conditions,
    predicates.sum_differs: _sum,
}


def look_as(predicate: Callable[..., Observation | None], other: Callable[..., Observation | None]) -> None:
    """Look at tensors for `predicate` as for `other`, which must not be content where `predicate` is not."""
    _LOOKS[predicate] = _LOOKS[other]


def _total(tensor: Tensor) -> float:
    if tensor.is_contiguous():
        return tensor.sum().item()
    return tensor.sum(-1).sum().item()  # over a slice this is many times faster than one sum (torch 2.13, run)


def _extremes(tensor: Tensor) -> tuple[Any, Any]:
    if tensor.ndim < 2 or tensor.is_contiguous():
        lowest, highest = tensor.aminmax()
    else:
        lowest, highest = tensor.amin(-1).amin(), tensor.amax(-1).amax()
    return lowest.item(), highest.item()


@functools.cache
def _largest(dtype: torch.dtype) -> int:
    return torch.iinfo(dtype).max


# fp8 has no reductions, but its bits have. What all bits must be below as signed and as unsigned integers, or above as
# signed ones; every value of the five formats was looked at (torch 2.13, run).
class _Bits(NamedTuple):
    signed_below: int | None = None
    unsigned_below: int | None = None
    signed_above: int | None = None

    def hold(self, tensor: Tensor) -> bool:
        signed, unsigned = tensor.view(torch.int8), tensor.view(torch.uint8)
        return bool(
            (self.signed_below is None or signed.max().item() < self.signed_below)
            and (self.unsigned_below is None or unsigned.max().item() < self.unsigned_below)
            and (self.signed_above is None or signed.min().item() > self.signed_above)
        )


_WITHOUT_NAN = {
    torch.float8_e4m3fn: _Bits(signed_below=0x7F, unsigned_below=0xFF),
    torch.float8_e5m2: _Bits(signed_below=0x7D, unsigned_below=0xFD),
    torch.float8_e4m3fnuz: _Bits(signed_above=-0x80),
    torch.float8_e5m2fnuz: _Bits(signed_above=-0x80),
}
if hasattr(torch, "float8_e8m0fnu"):  # new in torch 2.7
    _WITHOUT_NAN[torch.float8_e8m0fnu] = _Bits(unsigned_below=0xFF)
_WITHOUT_INF = _Bits(signed_below=0x7C, unsigned_below=0xFC)
_WITHOUT_POSITIVE_INF = _Bits(signed_below=0x7C)
