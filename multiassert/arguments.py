"""What a caller passed to a probe: checked, sliced to the rows that count, and brought to what a predicate observes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor

from multiassert.predicates import Observation


class Given(NamedTuple):
    """A probe's arguments, checked: values without autograd, of at least one dimension, uncut and not observed yet."""

    values: Tensor
    arguments: tuple[Any, ...]
    mask: Tensor | None
    num_valid: int | Tensor | None

    def is_empty(self) -> bool:
        return self.values.numel() == 0 or (isinstance(self.num_valid, int) and self.num_valid == 0)


def accept(
    tensor: Tensor,
    arguments: tuple[Any, ...],
    where: Tensor | None,
    num_valid: SupportsIndex | Tensor | None,
    name: str,
) -> Given:
    """Check what a caller passed; raises what the public calls document."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"{name} must be a dense tensor, got a {kind} one: probe its values instead")
    values = tensor.detach()
    if values.ndim == 0:
        values = values.reshape(1)
    arguments = tuple(_host_number(argument, values) for argument in arguments)
    for argument in arguments:
        if isinstance(argument, Tensor):
            _require_broadcast(argument, values, "a bound", name)
    mask = None if where is None else _mask_of(where, values, name)
    count = None
    if num_valid is not None:
        count = _host_number(num_valid, values)
        if isinstance(count, Tensor):
            _require_count(count, values)
        else:
            count = _row_count(count, values.shape[0], name)
    return Given(values, arguments, mask, count)


def observe(
    predicate: Callable[..., Observation | None], given: Given
) -> tuple[Observation | None, Tensor | None, Tensor | None]:
    """What a predicate observes of a tensor, with the masks for its elements and its rows."""
    values, arguments, mask, count = given
    row_mask = None
    if isinstance(count, Tensor):
        row_mask = torch.arange(values.shape[0], device=values.device) < count
    elif count is not None:
        arguments = tuple(
            argument.expand(values.shape)[:count] if isinstance(argument, Tensor) else argument
            for argument in arguments
        )
        mask = None if mask is None else mask.expand(values.shape)[:count]
        values = values[:count]
    if values.numel() == 0:
        return None, None, None
    observation = predicate(values, *arguments)
    if observation is None:
        return None, None, None
    if mask is not None and _is_per_row(mask, values):
        per_row = mask.reshape(mask.shape[0]).expand(values.shape[0])
        row_mask = per_row if row_mask is None else row_mask & per_row
        mask = None
    if mask is not None and observation.for_ceiling.ndim > values.ndim:
        mask = mask.unsqueeze(-1)  # a complex tensor is observed as pairs of reals
    return observation, mask, row_mask


def _host_number(value: Any, values: Tensor) -> Any:
    """A tensor of one element on the CPU, beside values on a device, is a number the host knows already."""
    if isinstance(value, Tensor) and value.device.type == "cpu" and values.device.type != "cpu" and value.numel() == 1:
        return value.item()
    return value


def _require_broadcast(value: Tensor, values: Tensor, what: str, name: str) -> None:
    if value.device != values.device:
        raise ValueError(f"{what} must be on the device of {name} ({values.device}), got {value.device}")
    try:
        broadcast = torch.broadcast_shapes(value.shape, values.shape)
    except RuntimeError:
        broadcast = None
    if broadcast != values.shape:
        raise ValueError(
            f"{what} of shape {tuple(value.shape)} does not broadcast to {name} of shape {tuple(values.shape)}"
        )


def _mask_of(where: Tensor, values: Tensor, name: str) -> Tensor:
    if not isinstance(where, Tensor) or where.dtype is not torch.bool:
        got = where.dtype if isinstance(where, Tensor) else type(where).__name__
        raise TypeError(f"where must be a bool tensor, got {got}")
    _require_broadcast(where, values, "where", name)
    return where[(None,) * (values.ndim - where.ndim)]


def _is_per_row(mask: Tensor, values: Tensor) -> bool:
    return values.ndim > 1 and all(size == 1 for size in mask.shape[1:])


def _row_count(num_valid: object, rows: int, name: str) -> int:
    try:
        count = num_valid.__index__()  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        raise TypeError(
            f"num_valid must be an int or a 0-dim integer tensor, got {type(num_valid).__name__} {num_valid!r}"
        ) from None
    if not 0 <= count <= rows:
        raise ValueError(f"num_valid must be from 0 to the {rows} rows of {name}, got {count}")
    return int(count)


def _require_count(num_valid: Tensor, values: Tensor) -> None:
    if num_valid.ndim or num_valid.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise TypeError(
            "num_valid must be an int or a 0-dim integer tensor, "
            f"got {num_valid.dtype} of shape {tuple(num_valid.shape)}"
        )
    if num_valid.device != values.device:
        raise ValueError(f"num_valid must be on the device of the tensor ({values.device}), got {num_valid.device}")
