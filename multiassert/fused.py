"""One Triton kernel for a deferred probe: it reads the tensor once, and writes only where a value is outside.

`state` merges the extremes of every call into cells, with a reduction and one or two kernels more. This module does the
same in one launch, and clean data leave device memory as it was. Where a value is outside its limits, the row's cells
take the worst one, as they would have, and the slot's `hits` learn how many there were and where the first one was.

What is bad is said by `predicates` alone: a `Plan` takes its limits from the check that a predicate makes. What no plan
or layout covers is left to the caller, who then reduces with torch.

Triton is imported when the first probe could use it, never with this module.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import operator
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multiassert import predicates
from multiassert.backends import Backend
from multiassert.predicates import Check, Observation, remembered

# What `hits` holds of a slot, and what its two numbers start from.
COUNT, FIRST = 0, 1
NO_HITS = (0, predicates.INT64_MAX)


class Tiling(NamedTuple):
    """How the work is cut up: the rows and columns that a program looks at together, and how many programs there are.

    Sizes are powers of two, and few: each is a kernel of its own. There are several programs for each multiprocessor
    of the largest GPUs; with more tiles than programs, a program looks at many.
    """

    long_rows: tuple[int, int] = (1, 4096)
    short_rows: tuple[int, int] = (64, 64)
    single_elements: tuple[int, int] = (4096, 1)
    programs: int = 2048


USUAL_TILING = Tiling()
# What the compiler is told that addresses are multiples of, so that it loads 16 bytes at once.
UNIT = 16


# ---------------------------------------------------------------------------------------------------------------------
# Where there is Triton.


def available(backend: Backend, device: torch.device) -> bool:
    """Whether probes of tensors on `device` may take the fused kernel.

    CUDA and ROCm may; another platform says so with `launches_triton = True` in its backend. With TRITON_INTERPRET=1,
    set before Triton is imported, the CPU may instead, very slowly.
    """
    if not backend.launches_triton and device.type != "cpu":
        return False
    kernels = _kernels()
    if kernels is None:
        return False
    return device.type == "cpu" if _is_interpreted(kernels) else backend.launches_triton


def is_chosen(backend: Backend, device: torch.device, kernels: str) -> bool:
    """Whether probes there take the fused kernel, by the setting of that name; ValueError where it cannot be had."""
    if kernels in ("torch", "exact"):
        return False
    found = available(backend, device)
    if kernels == "triton" and backend.launches_triton and not found:
        raise ValueError(
            f"kernels is set to triton, but Triton cannot be imported here for {device}. Install triton, or set "
            "MULTIASSERT_KERNELS=auto (or configure(kernels='auto')): probes then use torch's own kernels."
        )
    return found


@functools.cache
def _kernels() -> Any:
    """The module of kernels; None where Triton is not installed or does not work."""
    try:
        from multiassert import fused_kernels
    except Exception as failure:  # a Triton that fails in its import is no reason to end an engine
        if not isinstance(failure, ModuleNotFoundError):
            logging.getLogger(__name__).warning("Triton cannot be imported, so probes do without it: %s", failure)
        return None
    return fused_kernels


def _is_interpreted(kernels: Any) -> bool:
    return type(kernels.record_kernel).__name__ == "InterpretedFunction"


# ---------------------------------------------------------------------------------------------------------------------
# What to compare with what.


class Plan(NamedTuple):
    """How the kernel reads a dtype for one predicate with its bounds, and what it compares."""

    check: Check
    reads: str  # "float", "integer" or the name of an fp8 dtype
    observes: str
    nan_is_outside: bool
    floor_bits: int
    ceiling_bits: int
    sentinel: int | None
    page_size: int


def plan_of(
    predicate: Callable[..., Observation | None], dtype: torch.dtype, arguments: tuple[Any, ...]
) -> Plan | None:
    """The plan for a predicate of `predicates` with its arguments; None where the kernel does not cover it.

    None is also the answer where `dtype` makes a violation impossible, which the predicate then says once more. Raises
    what the predicate raises.
    """
    for argument in arguments:
        if isinstance(argument, Tensor):
            return None
    # 1, 1.0 and True are the same key, but not the same argument.
    return _plan(predicate, dtype, tuple(map(type, arguments)), *arguments)


@remembered
def _plan(
    predicate: Callable[..., Observation | None], dtype: torch.dtype, types: tuple[type, ...], *arguments: Any
) -> Plan | None:
    if predicate not in _PREDICATES or dtype not in _DTYPES:
        return None
    observation = predicate(torch.zeros(16, dtype=torch.uint8, device="cpu").view(dtype), *arguments)
    if observation is None:
        return None
    check = observation.check
    is_fp8 = dtype.is_floating_point and dtype.itemsize == 1
    reads = "integer"
    if dtype.is_floating_point or dtype.is_complex:
        reads = str(dtype).removeprefix("torch.") if is_fp8 else "float"
    observes, sentinel, page_size = "value", None, 0
    if predicate is predicates.nan and is_fp8:
        observes = "nan flag"
    elif predicate is predicates.out_of_bounds:
        sentinel = check.masked
    elif predicate is predicates.page_misaligned:
        page_size, excused = operator.index(arguments[0]), arguments[1]
        observes = "distance from power of two" if page_size & (page_size - 1) == 0 else "distance from page"
        sentinel = None if observation.counts is None else operator.index(excused)
    if sentinel is not None and sentinel > predicates.INT64_MAX:
        sentinel -= 2**64  # the kernel compares the bits of a uint64
    return Plan(
        check,
        reads,
        observes,
        predicate is not predicates.inf,
        _bits(check.floor, check.plane),
        _bits(check.ceiling, check.plane),
        sentinel,
        page_size,
    )


_PREDICATES = (
    predicates.nan,
    predicates.inf,
    predicates.out_of_bounds,
    predicates.page_misaligned,
    predicates.outside_closed_range,
)
_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
    )
    if hasattr(torch, name)  # the last fp8 dtype came with torch 2.7
)


def _bits(limit: float | None, plane: torch.dtype) -> int:
    """The bits of a limit: a launch would round a Python float to float32."""
    if limit is None:
        return 0
    if plane is torch.int64:
        return int(limit)
    as_float, as_int = ("<d", "<q") if plane is torch.float64 else ("<f", "<i")
    bits: int = struct.unpack(as_int, struct.pack(as_float, limit))[0]
    return bits


# ---------------------------------------------------------------------------------------------------------------------
# Where the values are.


class Geometry(NamedTuple):
    """A tensor and its mask as rows and columns, and how programs share them."""

    sizes: tuple[int, int, int, int, int, int]  # the kernel's parameters from `rows` to `where_column_stride`
    rows_per_item: int  # rows of the kernel for each index of dimension 0
    adjoining: str  # whether neighbours in memory are "columns", "rows" or "nothing"
    unit: int
    tile: tuple[int, int]
    grid: tuple[int, int]
    row_tiles_each: int
    column_tiles_each: int


@functools.lru_cache(maxsize=4096)
def _geometry(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    where_strides: tuple[int, ...],
    parts: int,
    tiling: Tiling,
) -> Geometry | None:
    """The rows and columns of a shape that is not empty; None where the strides allow none without a copy."""
    split = _split(shape, strides, where_strides)
    if split is None:
        return None
    rows, columns = math.prod(shape[:split]), math.prod(shape[split:])
    row_stride, column_stride = _collapsed(shape[:split], strides[:split]), _collapsed(shape[split:], strides[split:])
    where_row_stride = _collapsed(shape[:split], where_strides[:split])
    where_column_stride = _collapsed(shape[split:], where_strides[split:])
    is_long = rows == 1 or columns >= tiling.long_rows[1] // 4
    if columns == 1:
        adjoining, tile = "rows" if row_stride == 1 else "nothing", tiling.single_elements
    elif column_stride == 1:
        adjoining, tile = "columns", tiling.long_rows if is_long else tiling.short_rows
    else:
        adjoining, tile = "rows" if row_stride == 1 else "nothing", tiling.short_rows
    row_stride, column_stride = row_stride * parts, column_stride * parts
    along = (columns, row_stride) if adjoining == "columns" else (rows, column_stride)
    unit = UNIT if adjoining != "nothing" and not any(length % UNIT for length in along) else 1
    column_unit, row_unit = unit if adjoining == "columns" else 1, unit if adjoining == "rows" else 1
    row_tiles, column_tiles = -(-rows // tile[0]), -(-columns // tile[1])
    row_programs = min(row_tiles, tiling.programs)
    column_programs = min(column_tiles, max(1, tiling.programs // row_tiles))
    row_tiles_each, column_tiles_each = -(-row_tiles // row_programs), -(-column_tiles // column_programs)
    return Geometry(
        (
            rows // row_unit,
            columns // column_unit,
            row_stride // column_unit,
            column_stride // row_unit,
            where_row_stride,
            where_column_stride,
        ),
        rows // shape[0],
        adjoining,
        unit,
        tile,
        (-(-row_tiles // row_tiles_each), -(-column_tiles // column_tiles_each)),
        row_tiles_each,
        column_tiles_each,
    )


def _split(shape: tuple[int, ...], *all_strides: tuple[int, ...]) -> int | None:
    """How many dimensions can be taken for rows, and all others for columns; None where strides forbid any way."""
    for split in range(1, len(shape) + 1):
        halves = (
            (shape[half], strides[half]) for strides in all_strides for half in (slice(split), slice(split, None))
        )
        if all(_is_uniform(sizes, strides) for sizes, strides in halves):
            return split
    return None


def _is_uniform(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether several dimensions have one stride when they are taken for one."""
    known = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    return all(outer == size * inner for (_, outer), (size, inner) in itertools.pairwise(known))


def _collapsed(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """That stride; 0 where there is only one element."""
    return next((stride for size, stride in zip(reversed(sizes), reversed(strides), strict=True) if size != 1), 0)


# ---------------------------------------------------------------------------------------------------------------------
# Launches.


class Launch:
    """One probe, ready to run: everything but the slot that it updates."""

    __slots__ = ("_numbers", "_pointers", "block", "cells", "constants", "device", "grid")

    def __init__(
        self,
        pointers: tuple[Tensor, Tensor | None, Tensor | None],
        numbers: tuple[int, ...],
        constants: dict[str, Any],
        grid: tuple[int, int],
        cells: int,
        block: int,
    ) -> None:
        self._pointers = pointers
        self._numbers = numbers
        self.constants = constants
        self.device = pointers[0].device
        self.grid = grid
        self.cells = cells  # how many leading cells of the slot it may update
        self.block = block  # how many neighbouring rows share a cell

    def run(self, lower_cells: Tensor, upper_cells: Tensor, hits: Tensor) -> None:
        """Judge the values, and merge what is outside into the cells and the hits of a slot: one kernel, no host wait.

        `hits` are two int64: how many elements were outside, and the smallest index of one in the flattened tensor;
        they start from NO_HITS. Unlike the cells, the count grows when the same values are looked at twice.
        """
        with _on_device(self.device):
            _kernels().record_kernel[self.grid](*self.all_arguments(lower_cells, upper_cells, hits), **self.constants)

    def all_arguments(self, lower_cells: Any, upper_cells: Any, hits: Any) -> tuple[Any, ...]:
        """The arguments of the kernel before its constants."""
        return *self._pointers, lower_cells, upper_cells, hits, *self._numbers

    def on_no_rows(self) -> Launch:
        """The same kernel, which then looks at nothing."""
        return Launch(self._pointers, (0, *self._numbers[1:]), self.constants, (1, 1), 0, 1)

    def variant(self) -> tuple[object, ...]:
        """Whatever of it makes Triton compile another kernel, but for the dtype of the cells."""
        pointers = ((None if t is None else (t.dtype, t.data_ptr() % UNIT == 0)) for t in self._pointers)
        return self.device, *self.constants.values(), *pointers


def prepare(
    plan: Plan,
    values: Tensor,
    cells: int,
    where: Tensor | None = None,
    num_valid: int | Tensor | None = None,
    *,
    capturing: bool = False,
    tiling: Tiling = USUAL_TILING,
) -> Launch | None:
    """Make the launch that looks at `values`; None where the caller has to do it with torch, and nothing happened.

    `values` is detached, of at least one dimension, and not empty; `where` is a bool mask that broadcasts to it;
    `num_valid` is how many indices of dimension 0 count, an int from 1 to all of them or a 0-dim integer tensor on the
    same device, which the kernel reads. With more rows than `cells`, neighbouring rows share one.

    A kernel that this process has not used yet is compiled here and shown to fire, for which the host waits once. While
    a graph is being captured that is impossible: then the answer is None, unless the kernel was used before.
    """
    launch = make_launch(plan, values, cells, where, num_valid, tiling)
    if launch is None or not _fires(plan, launch, values, where, num_valid, tiling, capturing):
        return None
    return launch


def make_launch(
    plan: Plan,
    values: Tensor,
    cells: int,
    where: Tensor | None,
    num_valid: int | Tensor | None,
    tiling: Tiling = USUAL_TILING,
) -> Launch | None:
    """As `prepare`, without a look at whether the kernel fires."""
    if values.is_conj() or values.is_neg():
        return None  # what memory holds has another sign
    shape = tuple(values.shape)
    if isinstance(num_valid, int):
        shape, num_valid = (num_valid, *shape[1:]), None
    mask = None if where is None else where.expand(values.shape)
    strides = values.stride()
    parts = 2 if values.dtype.is_complex else 1
    geometry = _geometry(shape, strides, strides if mask is None else mask.stride(), parts, tiling)
    if geometry is None:
        return None
    block = 1 if shape[0] <= cells else -(-shape[0] // cells)
    pointers = _in_known_dtype(values), None if mask is None else mask.view(torch.uint8), num_valid
    # In the order of the kernel's parameters.
    numbers = (
        *geometry.sizes,
        geometry.rows_per_item,
        geometry.rows_per_item * block,
        geometry.row_tiles_each,
        geometry.column_tiles_each,
        plan.floor_bits,
        plan.ceiling_bits,
        plan.sentinel or 0,
        plan.page_size,
    )
    constants = {
        "reads": plan.reads,
        "observes": plan.observes,
        "parts": parts,
        "has_floor": plan.check.floor is not None,
        "has_ceiling": plan.check.ceiling is not None,
        "has_sentinel": plan.sentinel is not None,
        "nan_is_outside": plan.nan_is_outside,
        "adjoining": geometry.adjoining,
        "unit": geometry.unit,
        "tile_rows": geometry.tile[0],
        "tile_columns": geometry.tile[1],
    }
    return Launch(pointers, numbers, constants, geometry.grid, -(-shape[0] // block), block)


def _in_known_dtype(values: Tensor) -> Tensor:
    """The same memory in a dtype that every Triton knows."""
    if values.dtype.is_complex:
        return torch.view_as_real(values)
    if values.dtype is torch.bool or (values.dtype.is_floating_point and values.dtype.itemsize == 1):
        return values.view(torch.uint8)
    return values


# Whether a kernel was shown to fire in this process, by all that makes Triton compile another one.
_tried: dict[tuple[Any, ...], bool] = {}


def _fires(
    plan: Plan,
    launch: Launch,
    values: Tensor,
    where: Tensor | None,
    num_valid: int | Tensor | None,
    tiling: Tiling,
    capturing: bool,
) -> bool:
    """Whether the kernel of a launch was shown to fire; shows it if it is new."""
    key = plan.check.plane, launch.variant()
    known = _tried.get(key)
    if known is not None:
        return known
    if capturing:
        return False
    from multiassert import fused_proof

    try:
        # Compiling needs tools that may be missing; that must not come out when a probe is half recorded.
        fires = fused_proof.fires(plan, launch, values, where, num_valid, tiling)
        reason = "its kernel did not report a bad value as it has to"
    except Exception as failure:  # whatever it is, torch can do the same work
        fires, reason = False, f"{type(failure).__name__}: {failure}"
    if not fires:
        logging.getLogger(__name__).warning(
            "Triton fails on %s, so probes there do without it: %s", launch.device, reason
        )
    _tried[key] = fires
    return fires


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, whatever the tensors say."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    module: Any = torch.get_device_module(device)
    if module.current_device() == device.index:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = module.device(device)
    return context
