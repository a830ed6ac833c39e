"""What is bad, by kind and dtype, as exact tensor math that never waits for the device.

Every probe comes down to one question: are the smallest and the largest of some values inside their limits? A NaN
compares false with everything, so it is outside any limit. `Check` holds the limits and the words for a report,
`Observation` the tensors whose extremes matter, and `extremes` reduces them to one cell per row. The mechanisms differ
only in what they do with the extremes: assert on them, read them, or merge them into device state.

Limits are kept apart from tensors so that comparisons cannot wrap: torch compares an int32 tensor with 2**31 as with
-2**31 (torch 2.13, run), so a limit is always compared in the plane's dtype, never in the tensor's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, SupportsIndex, TypeVar

import torch
from torch import Tensor

from multiassert import settings

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

Number = int | float
Bound = SupportsIndex | Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

# Bounds that differ from call to call would make `remembered` grow without end.
REMEMBERED_AT_MOST = 4096


def at_trace_time(function: Function) -> Function:
    """Have the tracer call `function`, as `torch.compiler.assume_constant_result` does without importing the tracer.

    Inside torch.compile it is called once, with constants, and its result is a constant of the graph.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def remembered(make: Function) -> Function:
    """Call `make` once for the same arguments; what it makes is a constant of the graph in compiled code."""
    made: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(make)
    def known(*arguments: Any) -> Any:
        try:
            return made[arguments]
        except KeyError:
            if len(made) >= REMEMBERED_AT_MOST:
                made.clear()
            found = made[arguments] = make(*arguments)
            return found

    return at_trace_time(known)  # type: ignore[return-value]


class Finding(NamedTuple):
    """One kind of violation at one site, before it is told whose it is."""

    kind: str
    headline: str
    cells: list[int]
    value: Number
    bound: Number | None


@dataclasses.dataclass(frozen=True, eq=False)
class Check:
    """What the extremes of a probe are compared with, and the words for what is outside.

    A value is fine when `floor <= value <= ceiling`; None means that this side is not watched. Equal only to itself:
    the factories below are cached, so that one check is one object and identity is a cheap key.
    """

    plane: torch.dtype  # float32, float64 or int64: what the extremes are kept and compared in
    floor: Number | None
    ceiling: Number | None
    kinds: tuple[str, str]  # reported when below the floor, above the ceiling
    headlines: tuple[str, str]
    bounds: tuple[Number | None, Number | None]  # the caller's own bounds, for the report
    shift: int = 0  # what to add to an observed integer to get the tensor's value (uint64 is kept shifted)
    fixed_value: float | None = None  # the offending value, where the observation only says that it is there
    prefers_lowest: bool = False  # of one kind on both sides, whether the lowest value is the worst one
    masked: int | None = None  # a sentinel of out_of_bounds that no limit can excuse
    name: str = ""  # by which compiled code finds it again

    def above_floor(self, lower: Tensor | None) -> Tensor | None:
        """Which of these smallest values are fine; None where that side is not watched."""
        return None if lower is None or self.floor is None else lower.to(self.plane) >= self.floor

    def below_ceiling(self, upper: Tensor | None) -> Tensor | None:
        """Which of these largest values are fine; None where that side is not watched."""
        return None if upper is None or self.ceiling is None else upper.to(self.plane) <= self.ceiling

    @property
    def one_kind(self) -> bool:
        return self.kinds[0] == self.kinds[1]

    def fill(self, dtype: torch.dtype) -> Number | None:
        """A number that `dtype` can hold and that is inside the limits, to put where a mask says "not this one"."""
        floor: Number = -math.inf if self.floor is None else self.floor
        ceiling: Number = math.inf if self.ceiling is None else self.ceiling
        if not dtype.is_floating_point:
            lowest, highest = _integer_range(dtype)
            floor, ceiling = max(floor, lowest), min(ceiling, highest)
        if floor > ceiling:
            return None
        return 0 if floor <= 0 <= ceiling else floor if floor > 0 else ceiling

    def findings(self, low_cells: list[int], high_cells: list[int], lowest: Number, highest: Number) -> list[Finding]:
        """What to report of the cells that were outside; `lowest` and `highest` are the extremes over all cells."""
        value_below, value_above = self._value(lowest), self._value(highest)
        below = Finding(self.kinds[0], self.headlines[0], low_cells, value_below, self.bounds[0])
        above = Finding(self.kinds[1], self.headlines[1], high_cells, value_above, self.bounds[1])
        if self.one_kind and low_cells and high_cells:
            worst = below if self.prefers_lowest else above
            return [worst._replace(cells=sorted({*low_cells, *high_cells}))]
        return [finding for finding in (below, above) if finding.cells]

    def _value(self, observed: Number) -> Number:
        if self.fixed_value is not None:
            return self.fixed_value
        return observed + self.shift if self.plane is torch.int64 else float(observed)


_CHECK_FIELDS = tuple(field.name for field in dataclasses.fields(Check))
_checks_of_compiled_code: dict[str, Check] = {}


def check_factory(make: Function) -> Function:
    """Make one check for the same arguments. In compiled code, where no constant can be an object, a copy of it."""
    make_once = remembered(make)

    @at_trace_time
    def name_of(*arguments: Any) -> str:
        name = f"{make.__name__}{arguments}"
        _checks_of_compiled_code[name] = make_once(*arguments)
        return name

    @functools.wraps(make)
    def known(*arguments: Any) -> Check:
        if torch.compiler.is_compiling():
            name = name_of(*arguments)
            return Check(**{field: _check_field(name, field) for field in _CHECK_FIELDS[:-1]}, name=name)
        made: Check = make_once(*arguments)
        return made

    return known  # type: ignore[return-value]


@at_trace_time
def _check_field(name: str, field: str) -> Any:
    return getattr(_checks_of_compiled_code[name], field)


def check_named(name: str) -> Check:
    """The check that compiled code has a copy of."""
    return _checks_of_compiled_code[name]


class Observation(NamedTuple):
    """The values whose extremes a check compares; rows are dimension 0. The two tensors are mostly the same one."""

    check: Check
    for_floor: Tensor
    for_ceiling: Tensor
    # A mask that the predicate itself adds (a sentinel), broadcastable to the values.
    counts: Tensor | None = None


# ---------------------------------------------------------------------------------------------------------------------
# The kinds. Each takes a detached tensor of at least one dimension, not empty, and returns what to observe, or None
# where the dtype makes a violation impossible.


def nan(tensor: Tensor) -> Observation | None:
    """NaN anywhere; Inf is fine."""
    dtype = tensor.dtype
    values = tensor if _is_fp8(dtype) else _real_values(tensor)
    if values is not None and (_is_fp8(dtype) or settings.exact):
        # fp8 has no reductions, but `!=` works on all five kinds and knows each kind's NaN (torch 2.13, run).
        flags = values != values
        return Observation(_flags_check(), flags, flags)
    return None if values is None else _both(_nan_check(float_plane(values.dtype)), values)


def inf(tensor: Tensor, allow_neginf: bool) -> Observation | None:
    """Inf anywhere, with -Inf excused or not; NaN is fine."""
    if _is_fp8(tensor.dtype):
        if tensor.dtype is not torch.float8_e5m2:
            return None  # the other four kinds have no Inf
        tensor = tensor.to(torch.float32)
    values = _real_values(tensor)
    if values is None:
        return None
    # A NaN would hide an Inf in the same row from amax and amin.
    values = torch.nan_to_num(values, nan=0.0, posinf=math.inf, neginf=-math.inf)
    return _both(_inf_check(float_plane(values.dtype), bool(allow_neginf)), values)


def out_of_bounds(indices: Tensor, low: Bound, high: Bound, sentinel: SupportsIndex | None) -> Observation:
    """An index outside `[low, high)`; low and high are told apart."""
    require_integers(indices, "indices")
    excused = None if sentinel is None else _integer(sentinel, "sentinel")
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return _outside_tensor_bounds(indices, low, high, excused)
    check = _bounds_check(indices.dtype, _integer(low, "low"), _integer(high, "high"), excused)
    values = _integer_values(indices)
    counts = None if check.masked is None else values != check.masked - check.shift
    return Observation(check, values, values, counts)


def page_misaligned(indices: Tensor, page_size: SupportsIndex, sentinel: SupportsIndex | None) -> Observation | None:
    """An index that is no multiple of `page_size`; the value of the record is its distance from the page's start."""
    require_integers(indices, "indices")
    size = _integer(page_size, "page_size")
    if not 0 <= size <= INT64_MAX:
        raise ValueError(f"page_size must be at least 0 (0 and 1: every index is aligned), got {size}")
    excused = None if sentinel is None else _integer(sentinel, "sentinel")
    if size <= 1:
        return None
    values = indices.view(torch.int64) if indices.dtype is torch.uint64 else _integer_values(indices)
    if size > _integer_range(values.dtype)[1]:
        values = values.to(torch.int64)
    if indices.dtype is not torch.uint64 or size & (size - 1) == 0:
        offsets = values & (size - 1) if size & (size - 1) == 0 else torch.remainder(values, size)
    else:
        # A uint64 read as int64 is 2**64 too small where it is negative; put that back, modulo the page.
        offsets = torch.remainder(values, size)
        missing = 2**64 % size - size
        offsets = torch.where(values < 0, torch.remainder(offsets + missing, size), offsets)
    counts = None
    if excused is not None and excused % size and fits(excused, indices.dtype):
        counts = values != (excused - 2**64 if indices.dtype is torch.uint64 and excused > INT64_MAX else excused)
    return Observation(_page_check(size), offsets, offsets, counts)


def outside_closed_range(tensor: Tensor, low: Number, high: Number) -> Observation:
    """A value outside `[low, high]`; NaN is outside. Bounds are rounded to a float tensor's dtype, as torch does."""
    dtype = tensor.dtype
    _require_real(tensor)
    low, high = _number(low, "low"), _number(high, "high")
    if low > high:
        raise ValueError(f"low must not be above high, got low={low}, high={high}")
    if _is_integer(dtype):
        return _both(range_check(dtype, torch.int64, low, high), _integer_values(tensor))
    values = tensor.to(torch.float32) if _is_fp8(dtype) else tensor
    if settings.exact:
        floor, ceiling = _round_to(values.dtype, low), _round_to(values.dtype, high)
        if (floor, ceiling) == (-math.inf, math.inf):
            flags = values != values
            return Observation(_no_number_check(low, high), flags, flags)
        values = torch.where(values == values, values, -math.inf if ceiling == math.inf else math.inf)
    return _both(range_check(values.dtype, float_plane(values.dtype), low, high), values)


def condition(cond: Tensor) -> Observation:
    """A condition that is false; NaN counts as true, as in torch."""
    if cond.numel() != 1:
        raise ValueError(f"cond must have exactly one element, got shape {tuple(cond.shape)}: reduce it with .all()")
    holds = cond.reshape(1).to(torch.bool)
    return Observation(_condition_check(), holds, holds)


def conditions(cond: Tensor) -> Observation:
    """Conditions, one for each element, of which any is false."""
    return _both(_condition_check(), cond.to(torch.bool))


def sum_differs(tensor: Tensor, expected: Number) -> Observation:
    """A tensor whose sum is not `expected`."""
    _require_real(tensor)
    expected = _number(expected, "expected")
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64) or _is_fp8(tensor.dtype):
        tensor = tensor.to(torch.float32 if _is_fp8(tensor.dtype) else torch.int64)
    total = tensor.sum().reshape(1)
    if settings.exact and total.dtype.is_floating_point:
        total = torch.where(total == total, total, -math.inf if expected == math.inf else math.inf)
    plane = torch.int64 if not total.dtype.is_floating_point else float_plane(total.dtype)
    return _both(_sum_check(total.dtype, plane, expected), total)


def replace_out_of_bounds(indices: Tensor, low: Bound, high: Bound, fill: SupportsIndex) -> Tensor:
    """A copy of `indices` in which everything outside `[low, high)` is `fill`."""
    require_integers(indices, "indices")
    replacement = _integer(fill, "fill")
    if indices.numel() == 0:
        return indices
    if not fits(replacement, indices.dtype):
        raise ValueError(f"fill must fit {indices.dtype}, got {replacement}")
    values = _integer_values(indices)
    shift = 2**63 if indices.dtype is torch.uint64 else 0
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        values = values.to(torch.int64)
        inside = ~_is_below(values, low, "low", indices, shift) & _is_below(values, high, "high", indices, shift)
        return torch.where(inside, indices, bool(replacement) if indices.dtype is torch.bool else replacement)
    floor, ceiling = _integer(low, "low"), _integer(high, "high") - 1
    if not floor <= replacement <= ceiling:
        raise ValueError(f"fill must be inside [low, high) = [{floor}, {ceiling + 1}), got {replacement}")
    lowest, highest = _integer_range(values.dtype)
    # The fill is inside both, so there is room between these limits, and the values' own dtype holds them.
    values = values.to(torch.int64) if values.dtype is torch.bool else values
    nearest = values.clamp(max(floor - shift, lowest), min(ceiling - shift, highest))
    return torch.where(values == nearest, indices, bool(replacement) if indices.dtype is torch.bool else replacement)


# ---------------------------------------------------------------------------------------------------------------------
# The limits, made once for each dtype and bounds.


@check_factory
def _condition_check() -> Check:
    return Check(torch.int64, 1, None, ("cond", "cond"), ("assertion failed:",) * 2, (None, None), fixed_value=0)


@check_factory
def _flags_check() -> Check:
    """The check for flags that say where a NaN is."""
    return Check(torch.int64, None, 0, ("nan", "nan"), ("NaN detected!",) * 2, (None, None), fixed_value=math.nan)


@check_factory
def _nan_check(plane: torch.dtype) -> Check:
    return Check(plane, None, math.inf, ("nan", "nan"), ("NaN detected!",) * 2, (None, None), fixed_value=math.nan)


@check_factory
def _inf_check(plane: torch.dtype, allow_neginf: bool) -> Check:
    largest = torch.finfo(plane).max
    floor = None if allow_neginf else -largest
    return Check(plane, floor, largest, ("inf", "inf"), ("Inf detected!",) * 2, (None, None))


@check_factory
def _bounds_check(dtype: torch.dtype, low: int, high: int, sentinel: int | None) -> Check:
    if low > high:
        raise ValueError(f"low must not be above high, got low={low}, high={high}")
    floor, ceiling = low, high - 1
    if sentinel is not None and (floor <= sentinel <= ceiling or not fits(sentinel, dtype)):
        sentinel = None
    elif sentinel == floor - 1:
        floor, sentinel = floor - 1, None  # the usual -1 beside [0, high): a wider range costs no kernel
    elif sentinel == ceiling + 1:
        ceiling, sentinel = ceiling + 1, None
    shift = 2**63 if dtype is torch.uint64 else 0
    headlines = (
        f"index < {low} (negative, or a sentinel that was not masked?):",
        f"index >= {high} (out of range):",
    )
    floor, ceiling = floor - shift, ceiling - shift
    kinds, bounds = ("low", "high"), (low, high)
    nothing_is_fine = floor > INT64_MAX or ceiling < INT64_MIN
    if nothing_is_fine:
        # Whatever is seen at all is outside on one side: limits that every value breaks, with the words of that side.
        side = 0 if floor > INT64_MAX else 1
        kinds, headlines, bounds = (kinds[side],) * 2, (headlines[side],) * 2, (bounds[side],) * 2
        floor, ceiling = INT64_MAX, INT64_MIN
    floor, ceiling = _clamp_to_int64(floor), _clamp_to_int64(ceiling)
    return Check(
        torch.int64,
        floor,
        ceiling,
        kinds,
        headlines,
        bounds,
        shift,
        prefers_lowest=kinds[0] == kinds[1] == "low",
        masked=sentinel,
    )


@check_factory
def _tensor_bounds_check(low: int | None, high: int | None, shift: int) -> Check:
    """The check for values of which only the offending ones are left; everything else is at the identity."""
    headlines = (
        f"index < {'its low bound' if low is None else low}:",
        f"index >= {'its high bound' if high is None else high} (out of range):",
    )
    return Check(torch.int64, INT64_MAX, INT64_MIN, ("low", "high"), headlines, (low, high), shift)


@check_factory
def _page_check(page_size: int) -> Check:
    headline = f"page-misaligned indices (page_size={page_size}):"
    return Check(torch.int64, None, 0, ("misaligned",) * 2, (headline,) * 2, (page_size, page_size))


@check_factory
def range_check(dtype: torch.dtype, plane: torch.dtype, low: Number, high: Number) -> Check:
    shift = 2**63 if dtype is torch.uint64 else 0
    bounds, prefers_lowest = (low, high), False
    if plane is torch.int64:
        floor, ceiling = _integer_limits(low, high, shift)
        if (floor, ceiling) == (INT64_MAX, INT64_MIN):  # every value is outside, and on the same side
            prefers_lowest = _ceil(low) - shift > INT64_MAX
            bounds = (low, low) if prefers_lowest else (high, high)
    else:
        floor, ceiling = _round_to(dtype, low), _round_to(dtype, high)
    headlines = (f"value outside [{low}, {high}]:",) * 2
    return Check(plane, floor, ceiling, ("range", "range"), headlines, bounds, shift, prefers_lowest=prefers_lowest)


@check_factory
def _no_number_check(low: Number, high: Number) -> Check:
    """The check for flags that say where a NaN is, which is the one thing outside a range of all numbers."""
    headlines = (f"value outside [{low}, {high}]:",) * 2
    return Check(torch.int64, None, 0, ("range",) * 2, headlines, (low, high), fixed_value=math.nan)


@check_factory
def _sum_check(dtype: torch.dtype, plane: torch.dtype, expected: Number) -> Check:
    if plane is torch.int64:
        floor, ceiling = _integer_limits(expected, expected, 0)
    else:
        floor = ceiling = _round_to(dtype, expected)
        if abs(expected) > torch.finfo(dtype).max and not _is_infinite(expected):
            floor, ceiling = math.inf, -math.inf  # no sum is a number beyond its dtype
    headline = f"sum is not {expected}:"
    return Check(plane, floor, ceiling, ("cond", "cond"), (headline,) * 2, (expected, expected))


# ---------------------------------------------------------------------------------------------------------------------
# Reducing to one cell per row.


class Extremes(NamedTuple):
    """The smallest and largest value of each cell; None where that side is not watched. `block` rows share a cell."""

    lower: Tensor | None
    upper: Tensor | None
    block: int

    @property
    def cells(self) -> int:
        """How many cells there are."""
        return int((self.lower if self.upper is None else self.upper).shape[0])  # type: ignore[union-attr]


def extremes(
    observation: Observation, cells: int, element_mask: Tensor | None = None, row_mask: Tensor | None = None
) -> Extremes:
    """Reduce an observation to at most `cells` cells, without a host wait.

    `element_mask` broadcasts to the values, `row_mask` has one element per row: only where they are true do values
    count. With more rows than cells, each cell holds `block` neighbouring rows.
    """
    check, counts = observation.check, observation.counts
    if counts is not None:
        element_mask = counts if element_mask is None else element_mask & counts
    pair: Pair = (
        None if check.floor is None else observation.for_floor,
        None if check.ceiling is None else observation.for_ceiling,
    )
    if element_mask is not None:
        pair = _mask(check, element_mask, pair)
    rows = observation.for_ceiling.shape[0]
    block = 1 if rows <= cells else -(-rows // cells)
    if row_mask is None:
        return Extremes(*_reduce(pair, block), block)
    return Extremes(*_reduce(_mask(check, row_mask, _reduce(pair, 1)), block), block)


# What is watched for the floor and for the ceiling: mostly the same tensor; None is a side that is not watched.
Pair = tuple[Tensor | None, Tensor | None]


def _mask(check: Check, mask: Tensor, pair: Pair) -> Pair:
    """Put what cannot be a violation where the mask is false."""
    for_floor, for_ceiling = pair
    dtype = (for_ceiling if for_floor is None else for_floor).dtype  # type: ignore[union-attr]
    fill = check.fill(dtype)
    if fill is None:
        # No value that this dtype can hold is fine: widen, and use the identities of min and max.
        lowest, highest = identities(check.plane)
        return (
            None if for_floor is None else torch.where(mask, for_floor.to(check.plane), highest),
            None if for_ceiling is None else torch.where(mask, for_ceiling.to(check.plane), lowest),
        )
    fill = bool(fill) if dtype is torch.bool else fill
    floor = None if for_floor is None else torch.where(mask, for_floor, fill)
    if for_floor is for_ceiling:
        return floor, floor
    return floor, None if for_ceiling is None else torch.where(mask, for_ceiling, fill)


def _reduce(pair: Pair, block: int) -> Pair:
    """The extremes of each `block` rows."""
    for_floor, for_ceiling = pair
    if for_floor is for_ceiling:
        smallest, largest = _cells(for_floor, block, _smallest_and_largest)
        return smallest, largest
    return (
        None if for_floor is None else _cells(for_floor, block, _smallest)[0],
        None if for_ceiling is None else _cells(for_ceiling, block, _largest)[0],
    )


def _cells(values: Any, block: int, reduce: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    if block == 1:
        return (values, values) if values.ndim == 1 else reduce(values)
    whole = values.shape[0] // block
    head = reduce(values[: whole * block].unflatten(0, (whole, block)))
    if whole * block == values.shape[0]:
        return head
    tail = reduce(values[whole * block :].unsqueeze(0))
    return tuple(torch.cat(parts) for parts in zip(head, tail, strict=True))


def _inner_dimensions(values: Tensor) -> tuple[int, ...]:
    return tuple(range(1, values.ndim))


def _smallest(values: Tensor) -> tuple[Tensor]:
    return (values.amin(_inner_dimensions(values)),)


def _largest(values: Tensor) -> tuple[Tensor]:
    return (values.amax(_inner_dimensions(values)),)


def _smallest_and_largest(values: Tensor) -> tuple[Tensor, Tensor]:
    if values.ndim > 2 and values.is_contiguous():
        values = values.view(values.shape[0], -1)
    # One kernel instead of two, but on the CPU it is many times slower for floats (torch 2.13, run).
    if values.ndim == 2 and not (values.device.type == "cpu" and values.dtype.is_floating_point):
        smallest, largest = values.aminmax(dim=1)
        return smallest, largest
    return *_smallest(values), *_largest(values)


# ---------------------------------------------------------------------------------------------------------------------
# Dtypes and numbers.


@remembered
def identities(plane: torch.dtype) -> tuple[Number, Number]:
    """What max and min start from: the lowest and the highest value of the plane."""
    return (INT64_MIN, INT64_MAX) if plane is torch.int64 else (-math.inf, math.inf)


@remembered
def _is_fp8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1 and "float8" in str(dtype)


@remembered
def _is_integer(dtype: torch.dtype) -> bool:
    if dtype is torch.bool:
        return True
    try:
        torch.iinfo(dtype)
    except TypeError:
        return False
    return dtype.itemsize >= 1 and str(dtype).removeprefix("torch.").startswith(("int", "uint"))


@remembered
def _integer_range(dtype: torch.dtype) -> tuple[int, int]:
    if dtype is torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return info.min, info.max


def fits(value: int, dtype: torch.dtype) -> bool:
    lowest, highest = _integer_range(dtype)
    return lowest <= value <= highest


def float_plane(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _real_values(tensor: Tensor) -> Tensor | None:
    """The floats in a tensor, complex ones as two; None where the dtype can hold neither NaN nor Inf."""
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor.resolve_conj())
    if not tensor.dtype.is_floating_point or "float4" in str(tensor.dtype):
        return None
    return tensor


def _integer_values(tensor: Tensor) -> Tensor:
    """The integers in a tensor in a dtype that has reductions (torch 2.13 has none for uint16, uint32 and uint64)."""
    if tensor.dtype is torch.uint64:
        return tensor.view(torch.int64) ^ INT64_MIN  # shifted by -2**63, so that the order is kept
    if tensor.dtype in (torch.uint16, torch.uint32):
        return tensor.to(torch.int64)
    return tensor


def _both(check: Check, values: Tensor) -> Observation:
    return Observation(check, values, values)


def _outside_tensor_bounds(indices: Tensor, low: Bound, high: Bound, sentinel: int | None) -> Observation:
    shift = 2**63 if indices.dtype is torch.uint64 else 0
    check = _tensor_bounds_check(
        None if isinstance(low, Tensor) else _integer(low, "low"),
        None if isinstance(high, Tensor) else _integer(high, "high"),
        shift,
    )
    values = _integer_values(indices)
    values = values.to(torch.int64)  # there is room for every bound, and no comparison can wrap
    counts = None
    if sentinel is not None and fits(sentinel, indices.dtype):
        counts = values != sentinel - shift
    below = _is_below(values, low, "low", indices, shift)
    above = ~_is_below(values, high, "high", indices, shift)
    low_values = high_values = values
    if indices.dtype.itemsize == 8:
        # One end of int64 stands for "nothing seen". A value there is still seen, and told as the one next to it.
        low_values, high_values = values.clamp(max=INT64_MAX - 1), values.clamp(min=INT64_MIN + 1)
    return Observation(
        check, torch.where(below, low_values, INT64_MAX), torch.where(above, high_values, INT64_MIN), counts
    )


def _is_below(values: Tensor, bound: Bound, name: str, indices: Tensor, shift: int) -> Tensor:
    """Where int64 values, shifted, are below a bound that is not."""
    if not isinstance(bound, Tensor):
        limit = _integer(bound, name) - shift
        if INT64_MIN <= limit <= INT64_MAX:
            return values < limit
        return torch.full_like(values, limit > INT64_MAX, dtype=torch.bool)
    require_integers(bound, name)
    if bound.dtype is torch.uint64:
        raise TypeError(f"{name} must be a tensor of a dtype that int64 can hold, got {bound.dtype}")
    if bound.device != indices.device and bound.ndim:
        raise ValueError(f"{name} must be on the device of indices ({indices.device}), got {bound.device}")
    bound = bound.to(torch.int64)
    return values < (bound.clamp(min=0) ^ INT64_MIN if shift else bound)


def require_integers(tensor: Tensor, name: str) -> None:
    if not _is_integer(tensor.dtype):
        raise TypeError(f"{name} must be an integer tensor, got {tensor.dtype}")


def _integer(value: object, name: str) -> int:
    if isinstance(value, Tensor) and value.device.type != "cpu":
        raise TypeError(f"{name} must be known to the host, got a tensor on {value.device}: reading it would wait")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__} {value!r}") from None


def _number(value: object, name: str) -> Number:
    if isinstance(value, (int, float)) and not (isinstance(value, float) and math.isnan(value)):
        return value
    raise TypeError(f"{name} must be an int or a float and not NaN, got {type(value).__name__} {value!r}")


def _require_real(tensor: Tensor) -> None:
    dtype = tensor.dtype
    if not (_is_integer(dtype) or (dtype.is_floating_point and "float4" not in str(dtype))):
        raise TypeError(f"tensor must hold real numbers of at least 8 bits, got {dtype}")


def _integer_limits(low: Number, high: Number, shift: int) -> tuple[Number, Number]:
    """Limits in the int64 plane for `[low, high]`; where no int64 can be inside, limits that every value breaks."""
    floor, ceiling = _ceil(low) - shift, _floor(high) - shift
    if floor > INT64_MAX or ceiling < INT64_MIN:
        return INT64_MAX, INT64_MIN
    return _clamp_to_int64(floor), _clamp_to_int64(ceiling)


def _clamp_to_int64(value: Number) -> int:
    return int(min(max(value, INT64_MIN), INT64_MAX))


def _is_infinite(value: Number) -> bool:
    return isinstance(value, float) and math.isinf(value)  # math.isinf takes no int beyond the floats


def _ceil(value: Number) -> Number:
    return value if _is_infinite(value) else math.ceil(value)


def _floor(value: Number) -> Number:
    return value if _is_infinite(value) else math.floor(value)


def _round_to(dtype: torch.dtype, value: Number) -> float:
    """The nearest value of `dtype`, but a finite one for a finite value: past the largest, Inf must stay outside."""
    if not _is_infinite(value):
        largest = torch.finfo(dtype).max
        value = min(max(value, -largest), largest)
    # From an int in one step: by way of float64 it would be rounded twice.
    exact = (
        torch.tensor(value, device="cpu")
        if _is_int64(value)
        else torch.tensor(float(value), dtype=torch.float64, device="cpu")
    )
    return float(exact.to(dtype))


def _is_int64(value: Number) -> bool:
    return isinstance(value, int) and INT64_MIN <= value <= INT64_MAX
