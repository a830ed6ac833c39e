"""The look for NaN and Inf in code that torch.compile traces.

`dispatch.probe` can be traced, too, and does the same. But a model has a thousand places, and all that a probe accepts
takes the tracer a quarter of a second each; here is only what a watched tensor needs (torch 2.13, run).
"""

from __future__ import annotations

import torch
from torch import Tensor

from multiassert import delivery, dispatch, settings, state, tracing
from multiassert.predicates import at_trace_time, float_plane
from multiassert.sites import Site
from multiassert.watching.finite import finite_check, not_finite


def trace_not_finite(tensor: Tensor, allow_neginf: bool, site: Site, where: Tensor | None) -> None:
    """Trace the probe into the graph."""
    if where is not None and where.device != tensor.device:
        # Between devices nobody waits; to and from the host somebody would.
        between_devices = where.device.type != "cpu" and tensor.device.type != "cpu"
        where = where.to(tensor.device, non_blocking=True) if between_devices else None
    mode = settings.current.of(_platform_of(tensor.device.type))
    mechanism = _mechanism(tensor.device.type, mode)
    if mechanism == "off" or delivery.suspended_threads:
        return
    if (
        mechanism != "deferred"
        or settings.exact
        or not _has_reductions(tensor.dtype)
        or not tensor.numel()
        or not tensor.ndim
    ):
        dispatch.probe(not_finite, tensor, (allow_neginf,), site, where)
        return
    values = tensor.detach()
    if where is not None:
        values = torch.where(where, values, 0)
    rows_are_named = True if values.shape[0] <= state.ROWS else False  # noqa: SIM210 (a constant of the graph)
    if not rows_are_named:
        values = values.unsqueeze(0)
    lane = _lane(tensor.device, tensor.dtype, tensor.ndim, rows_are_named, allow_neginf)
    inner = tuple(range(1, values.ndim))
    cells = getattr(site, f"upper_cells_{lane}")[: values.shape[0]]
    torch.maximum(cells, values.amax(inner) if inner else values, out=cells)
    if not allow_neginf:
        cells = getattr(site, f"lower_cells_{lane}")[: values.shape[0]]
        torch.minimum(cells, values.amin(inner) if inner else values, out=cells)


@at_trace_time
def _platform_of(device_type: str) -> str:
    return tracing.platform_of(device_type)


@at_trace_time
def _mechanism(device_type: str, mode: settings.Mode) -> str:
    if torch.compiler.is_exporting():
        return "off"
    return tracing.mechanism_of(tracing.platform_of(device_type), mode, True)


@at_trace_time
def _has_reductions(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@at_trace_time
def _lane(device: torch.device, dtype: torch.dtype, ndim: int, rows_are_named: bool, allow_neginf: bool) -> int:
    check = finite_check(float_plane(dtype), allow_neginf)  # a copy, as long as something is traced
    return tracing.lane_of(check.name, device, dtype, ndim, rows_are_named, False)
