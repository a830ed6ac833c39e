"""Whether a fused kernel fires on this device: shown with a bad value before any probe relies on it.

A kernel that compiles and stays silent would be the worst of probes. So each variant first judges a small tensor of the
same kind, once clean and once with one bad value, and is used only where device memory then says what it has to.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from multiassert import predicates
from multiassert.fused import COUNT, FIRST, NO_HITS, UNIT, Launch, Plan, Tiling, make_launch

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides


def fires(
    plan: Plan, launch: Launch, values: Tensor, where: Tensor | None, num_valid: int | Tensor | None, tiling: Tiling
) -> bool:
    """Run the kernel of a launch on small tensors and look at what it wrote; the host waits for the device, once.

    Where no small tensor leads to the same kernel, or no value of the dtype is bad, it is only shown that it runs.
    """
    sizes, strides = _layout(launch, tiling)
    clean, bad = _numbers(plan, values.dtype)
    if clean is None:
        return _runs(plan, launch)
    mask = None if where is None else _laid_out(torch.ones((), dtype=torch.bool), sizes, strides, where)
    count = num_valid
    if isinstance(num_valid, Tensor):
        count = _laid_out(torch.tensor(sizes[0]).to(num_valid.dtype), (), (), num_valid)
    elif num_valid is not None:
        count = sizes[0]
    small = _laid_out(clean, sizes, strides, values)
    sample = make_launch(plan, small, sizes[0], mask, count, tiling)
    if sample is None or sample.variant() != launch.variant():
        return _runs(plan, launch)
    lower, upper, hits = _judge(plan, sample)
    nothing = _identities(plan, sizes[0])
    if not (torch.equal(lower, nothing[0]) and torch.equal(upper, nothing[1]) and hits == list(NO_HITS)):
        return False
    if bad is None:
        return True
    row, column = sizes[0] - 1, (sizes[1] - 1 if len(sizes) > 1 else 0)
    small[(row, column) if len(sizes) > 1 else row] = bad.to(small.device)
    lower, upper, hits = _judge(plan, sample)
    is_outside = torch.zeros(sizes[0], dtype=torch.bool)
    if plan.check.floor is not None:
        is_outside |= ~(lower >= plan.check.floor)
    if plan.check.ceiling is not None:
        is_outside |= ~(upper <= plan.check.ceiling)
    expected = [1, row * (sizes[1] if len(sizes) > 1 else 1) + column]
    return is_outside.nonzero().flatten().tolist() == [row] and [hits[COUNT], hits[FIRST]] == expected


def _runs(plan: Plan, launch: Launch) -> bool:
    cells = torch.empty(1, dtype=plan.check.plane, device=launch.device)
    launch.on_no_rows().run(cells, cells, torch.empty(2, dtype=torch.int64, device=launch.device))
    return True


def _judge(plan: Plan, sample: Launch) -> tuple[Tensor, Tensor, list[int]]:
    """What the kernel leaves in cells and hits that were at their start."""
    lower, upper = (cells.to(sample.device) for cells in _identities(plan, sample.cells))
    hits = torch.tensor(NO_HITS, device=sample.device)
    sample.run(lower, upper, hits)
    return lower.cpu(), upper.cpu(), hits.tolist()


def _identities(plan: Plan, rows: int) -> tuple[Tensor, Tensor]:
    lowest, highest = predicates.identities(plan.check.plane)
    lower = torch.full((rows,), highest, dtype=plan.check.plane, device="cpu")
    return lower, torch.full((rows,), lowest, dtype=plan.check.plane, device="cpu")


def _layout(launch: Launch, tiling: Tiling) -> Layout:
    """A small layout that takes the same kernel, or else one that does not, which is found out."""
    adjoining, off = launch.constants["adjoining"], launch.constants["unit"] != UNIT
    tile = launch.constants["tile_rows"], launch.constants["tile_columns"]
    if tile == tiling.single_elements:
        return ((3 * UNIT + off,), (1 if adjoining == "rows" else 2,))
    if adjoining == "columns":
        columns = 2 * UNIT - off
        if tile == tiling.long_rows:
            columns += -(-tiling.long_rows[1] // 4 // UNIT) * UNIT
        return (4, columns), (columns, 1)
    if adjoining == "rows":
        rows = 3 * UNIT + off
        return (rows, 4), (1, rows)
    return (4, 2 * UNIT - 1), (4 * UNIT, 2)


def _laid_out(number: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor of one number, in memory as `like` is: on its device, and aligned or not."""
    offset = int(like.data_ptr() % UNIT != 0)
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    memory = number.expand(span + offset).clone().to(like.device)
    return memory.as_strided(sizes, strides, offset)


def _numbers(plan: Plan, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """A value that is fine and one that is bad, as tensors of the dtype; None where there is none."""
    check: Any = plan.check
    observed = torch.int64 if dtype is torch.uint64 else torch.float32 if dtype.is_complex else dtype
    fine = check.fill(observed)
    if fine is None:
        return None, None
    if dtype.is_floating_point or dtype.is_complex:
        bad = math.inf if check.kinds[1] == "inf" else math.nan
        numbers = torch.tensor([fine, bad], dtype=torch.float64, device="cpu").to(dtype)
        if check.kinds[1] == "range" and not check.floor <= numbers[0].to(check.plane).item() <= check.ceiling:
            return None, None  # the dtype has no such value, and rounds it out of the range
        return numbers[0], numbers[1]
    candidates = [check.ceiling, check.floor]
    raw = [
        int(limit) + side + check.shift for limit, side in zip(candidates, (1, -1), strict=True) if limit is not None
    ]
    if plan.page_size:
        raw = [1, plan.page_size + 1]
    fitting = [number for number in raw if predicates.fits(number, dtype) and number != plan.sentinel]
    made = [torch.tensor(number, dtype=dtype, device="cpu") for number in (int(fine) + check.shift, *fitting[:1])]
    return made[0], (made[1] if len(made) > 1 else None)
