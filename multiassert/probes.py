"""The probes: what an engine calls. Off, each costs one look at `settings.active`.

Every call accepts None and empty tensors and checks nothing then. None of them changes its tensor, except
`sanitize_nan_logits`, and none waits for a device. In mode `auto` on CPU a violation raises AsyncAssertionError in the
call; in modes `warn` and `raise` it is reported by a later step, poll, drain or probe.

`msg` is a string, a callable that is called only when there is something to report, or a `Site` made by `site()`.
`where` is a bool mask that broadcasts to the tensor: elements where it is False do not count. `num_valid` is how many
leading rows count, rows being indices of dimension 0: an int, or a 0-dim integer tensor on the same device, which a
replayed graph reads anew each time. `sentinel` is one index value that is always fine. Pass these, and `allow_neginf`,
by keyword. (The signatures do not insist: with keyword-only parameters a probe that is off costs twice as much, Python
3.11, `python -m benchmarks --only off`.)
"""

from __future__ import annotations

import functools
import os
from typing import SupportsIndex, overload

import torch
from torch import Tensor

from multiassert import delivery, dispatch, predicates, settings
from multiassert.sites import Message, Site


def maybe_detect_nan(
    tensor: Tensor | None,
    msg: Message | Site = "",
    where: Tensor | None = None,
    num_valid: SupportsIndex | Tensor | None = None,
) -> None:
    """Report rows that hold a NaN: a reduction and a merge on the device, no host wait. Inf is fine.

    Takes any shape and dtype; integers and bools are fine by nature, a complex number is NaN where a part of it is.
    Raises TypeError for a sparse or quantized tensor and for a `where` that is not bool, ValueError for a `where` that
    does not broadcast and for a `num_valid` larger than the rows.
    """
    __tracebackhide__ = True
    if settings.active and tensor is not None:
        error = dispatch.probe(predicates.nan, tensor, (), msg, where, num_valid)
        if error is not None:
            raise error


def maybe_detect_inf(
    tensor: Tensor | None,
    msg: Message | Site = "",
    allow_neginf: bool = False,
    where: Tensor | None = None,
    num_valid: SupportsIndex | Tensor | None = None,
) -> None:
    """Report rows that hold an Inf: three or four kernels on the device, no host wait. NaN is fine.

    `allow_neginf` excuses -Inf (masked logits, log-probabilities). A row that holds both NaN and Inf is reported. fp8
    formats without Inf are fine by nature. On Ascend in saturation mode an fp16 overflow becomes 65504, and there is no
    Inf to be found. Raises as `maybe_detect_nan`.
    """
    __tracebackhide__ = True
    if settings.active and tensor is not None:
        error = dispatch.probe(predicates.inf, tensor, (allow_neginf,), msg, where, num_valid)
        if error is not None:
            raise error


def maybe_detect_oob(
    indices: Tensor | None,
    low: SupportsIndex | Tensor,
    high: SupportsIndex | Tensor,
    msg: Message | Site = "",
    sentinel: SupportsIndex | None = None,
    where: Tensor | None = None,
    num_valid: SupportsIndex | Tensor | None = None,
) -> None:
    """Report indices outside `[low, high)`: running extremes on the device, no host wait.

    Below and above are two kinds, `low` and `high`, and may both be reported. Bounds are ints of any size, or integer
    tensors on the same device that broadcast (a length per row), and may differ from call to call. Comparisons are
    exact for every integer dtype. (With bounds that are tensors, the record tells the very last value of 64 bits on
    either side as the one next to it.) It reports and does not prevent: what a bad index destroys before the host looks
    is destroyed; `sanitize_oob` is there for that. Raises TypeError for indices that are no integers, ValueError for
    low above high; otherwise as `maybe_detect_nan`.
    """
    __tracebackhide__ = True
    if settings.active and indices is not None:
        error = dispatch.probe(
            predicates.out_of_bounds, indices, (low, high, sentinel), msg, where, num_valid, name="indices"
        )
        if error is not None:
            raise error


def maybe_detect_page_aligned(
    indices: Tensor | None,
    page_size: SupportsIndex,
    msg: Message | Site = "",
    sentinel: SupportsIndex | None = None,
    where: Tensor | None = None,
    num_valid: SupportsIndex | Tensor | None = None,
) -> None:
    """Report indices that are no multiple of `page_size`: two kernels on the device, no host wait.

    The record's value is the largest distance from the start of a page. Page sizes 0 and 1 check nothing. Raises
    TypeError for indices or a page size that are no integers, ValueError for a negative page size; otherwise as
    `maybe_detect_nan`.
    """
    __tracebackhide__ = True
    if settings.active and indices is not None:
        error = dispatch.probe(
            predicates.page_misaligned, indices, (page_size, sentinel), msg, where, num_valid, name="indices"
        )
        if error is not None:
            raise error


def maybe_detect_in_closed_range(
    tensor: Tensor | None,
    low: float,
    high: float,
    msg: Message | Site = "",
    where: Tensor | None = None,
    num_valid: SupportsIndex | Tensor | None = None,
) -> None:
    """Report values outside `[low, high]`, NaN among them: running extremes on the device, no host wait.

    Bounds are numbers. For an integer tensor the comparison is exact; for a float tensor the bounds are rounded to its
    dtype first, as torch does, so that a bfloat16 0.1 lies in [0, 0.1]. Raises TypeError for complex tensors and bounds
    that are no numbers, ValueError for low above high; otherwise as `maybe_detect_nan`.
    """
    __tracebackhide__ = True
    if settings.active and tensor is not None:
        error = dispatch.probe(predicates.outside_closed_range, tensor, (low, high), msg, where, num_valid)
        if error is not None:
            raise error


def maybe_assert_async(cond: Tensor | None, msg: Message | Site = "") -> None:
    """Report a condition that is false: one or two kernels on the device, no host wait.

    `cond` has one element, of any dtype; NaN counts as true, as in torch. Raises ValueError for more elements.
    """
    __tracebackhide__ = True
    if settings.active and cond is not None:
        error = dispatch.probe(predicates.condition, cond, (), msg, name="cond")
        if error is not None:
            raise error


def maybe_assert_sum(tensor: Tensor | None, expected: float, msg: Message | Site = "") -> None:
    """Report a tensor whose sum is not `expected`: a sum and a merge on the device, no host wait.

    Integers are summed in int64, floats in their dtype. The record's value is the sum, its kind `cond`.
    """
    __tracebackhide__ = True
    if settings.active and tensor is not None:
        error = dispatch.probe(predicates.sum_differs, tensor, (expected,), msg)
        if error is not None:
            raise error


def maybe_warn_nan(tensor: Tensor | None, msg: Message | Site = "") -> None:
    """Log rows that hold a NaN, throttled per site, whatever the mode that is on; never raises for one, never waits."""
    __tracebackhide__ = True
    if settings.active and tensor is not None:
        error = dispatch.probe(predicates.nan, tensor, (), msg, only_warn=True)
        if error is not None:
            raise error


# Beyond any real logit, and far enough from the largest float that dividing by a temperature does not overflow.
HEALED_LOGIT = 1e30


def sanitize_nan_logits(logits: Tensor | None, msg: Message | Site = "") -> None:
    """Heal logits in place on the device, no host wait: NaN and -Inf become -1e30, +Inf becomes 1e30.

    NaN logits sample ids outside the vocabulary. They are reported first, as by `maybe_detect_nan`, when probes are on;
    the healing does not depend on the mode. Dtypes that end below 1e30 get a quarter of their largest value. SGLang's
    SGLANG_SANITIZE_NAN_LOGITS=0 turns the healing off. Raises TypeError for logits that are no real floats.
    """
    __tracebackhide__ = True
    if logits is None:
        return
    most = healed_logit(logits.dtype) if _heals_logits() else 0.0
    if dispatch.is_clean_at_a_glance(predicates.inf, logits, (False,)):
        delivery.next_position()
        return  # its sum or its extremes are finite: no NaN to report either, and nothing to heal
    if settings.active:
        error = dispatch.probe(predicates.nan, logits, (), msg, name="logits")
        if error is not None:
            raise error
    if most:
        heal(logits, most)


def heal(logits: Tensor, most: float) -> None:
    """Bring NaN and Inf to within `most`, in place, on the device, no host wait."""
    with torch.no_grad():
        torch.nan_to_num_(logits, nan=-most, posinf=most, neginf=-most)


@functools.cache
def healed_logit(dtype: torch.dtype) -> float:
    """What becomes of an infinite logit; raises TypeError for a dtype that is none of logits."""
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise TypeError(f"logits must be floats of at least 16 bits, got {dtype}")
    return min(HEALED_LOGIT, torch.finfo(dtype).max / 4)


@functools.cache
def _heals_logits() -> bool:
    return os.environ.get("SGLANG_SANITIZE_NAN_LOGITS", "1").strip().lower() not in ("0", "false", "no", "off")


@overload
def sanitize_oob(
    indices: Tensor,
    low: SupportsIndex | Tensor,
    high: SupportsIndex | Tensor,
    msg: Message | Site = "",
    *,
    fill: SupportsIndex = 0,
) -> Tensor: ...
@overload
def sanitize_oob(
    indices: None,
    low: SupportsIndex | Tensor,
    high: SupportsIndex | Tensor,
    msg: Message | Site = "",
    *,
    fill: SupportsIndex = 0,
) -> None: ...
def sanitize_oob(
    indices: Tensor | None,
    low: SupportsIndex | Tensor,
    high: SupportsIndex | Tensor,
    msg: Message | Site = "",
    *,
    fill: SupportsIndex = 0,
) -> Tensor | None:
    """Return indices that are safe to use, on the device, no host wait: what is outside `[low, high)` becomes `fill`.

    The argument is left as it is. What is outside is reported, as by `maybe_detect_oob`, when probes are on; the
    replacing does not depend on the mode. Raises ValueError where `fill` is outside `[low, high)` itself or does not
    fit the dtype; otherwise as `maybe_detect_oob`.
    """
    __tracebackhide__ = True
    if indices is None:
        return None
    # Where the fill is one that is accepted, a clean tensor needs no more than the copy.
    if (
        type(low) is type(high) is type(fill) is int
        and low <= fill < high
        and dispatch.is_clean_at_a_glance(predicates.out_of_bounds, indices, (low, high, None))
        and predicates.fits(fill, indices.dtype)
    ):
        delivery.next_position()
        return indices.clone()
    safe = predicates.replace_out_of_bounds(indices, low, high, fill)
    if settings.active:
        error = dispatch.probe(predicates.out_of_bounds, indices, (low, high, None), msg, name="indices")
        if error is not None:
            raise error
    return safe
