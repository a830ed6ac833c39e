"""From a probe's tensor to its backend, and from there to a mechanism: immediate, native or deferred.

Only `tensor.device.type` decides, at call time: where torchada or torch_npu's transfer shim is loaded, `is_cuda`,
`torch.cuda.is_available()` and even `torch.device` say something else than what the tensor is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor

from multiassert import backends, delivery, settings, state
from multiassert.backends import Backend, Mechanism
from multiassert.predicates import Check, Extremes, Observation, extremes
from multiassert.settings import Mode
from multiassert.sites import Message, Site, resolve, text_of

# A CPU tensor that is looked at in the call tells its rows exactly; there is no state that would have to hold them.
ALL_ROWS = 2**62

# CUDA refuses longer messages on the host, even where the condition holds (torch 2.13, read in TensorCompare.cu).
MESSAGE_BYTES = 254


class Route(NamedTuple):
    """What a probe does on a device, as long as the settings stay."""

    backend: Backend
    mechanism: Mechanism | None  # None: off
    raises: bool


_routes: dict[torch.device, Route] = {}


def _forget_routes() -> None:
    _routes.clear()


settings.on_change(_forget_routes)


def route_of(device: torch.device) -> Route:
    """The route for tensors of `device`; raises ValueError where mode `trap` would be silent or would wait."""
    route = _routes.get(device)
    if route is None:
        route = _routes[device] = _find_route(device)
    return route


def _find_route(device: torch.device) -> Route:
    backend = backends.for_device_type(device.type)
    modes = settings.current
    mode = modes.of(backend.name)
    if device.type == "meta" or mode is Mode.OFF:
        return Route(backend, None, False)
    if mode is Mode.TRAP:
        refusal = backend.trap_refusal()
        if refusal is not None:
            raise ValueError(f"{modes.source(backend.name)}: mode trap is refused on {backend.name}. {refusal}")
        return Route(backend, Mechanism.NATIVE, True)
    mechanism = backend.auto() if mode is Mode.AUTO else Mechanism.DEFERRED
    return Route(backend, mechanism, mode is not Mode.WARN)


def probe(
    predicate: Callable[..., Observation | None],
    tensor: Tensor,
    arguments: tuple[Any, ...],
    message: Message | Site,
    where: Tensor | None = None,
    num_valid: SupportsIndex | Tensor | None = None,
    *,
    name: str = "tensor",
    only_warn: bool = False,
) -> RuntimeError | None:
    """Run a probe on its device; returns the error that its caller has to raise, so that no frame of ours is in it.

    `name` is what the public call names its tensor. `only_warn` reports through the deferred state, as mode `warn`.
    Must be called by the public call itself: the site is its caller.
    """
    if torch.compiler.is_compiling():
        # In compiled code a probe breaks the graph, and runs as in eager code. Made here, and not by a decorator, since
        # that would import the compiler with us.
        outside: Callable[..., RuntimeError | None] = torch.compiler.disable(_probe)
        return outside(predicate, tensor, arguments, message, where, num_valid, name, only_warn)
    return _probe(predicate, tensor, arguments, message, where, num_valid, name, only_warn)


def _probe(
    predicate: Callable[..., Observation | None],
    tensor: Tensor,
    arguments: tuple[Any, ...],
    message: Message | Site,
    where: Tensor | None,
    num_valid: SupportsIndex | Tensor | None,
    name: str,
    only_warn: bool,
) -> RuntimeError | None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor or None, got {type(tensor).__name__}")
    route = route_of(tensor.device)
    if route.mechanism is None:
        return None
    if delivery.suspended_threads and threading.get_ident() in delivery.suspended_threads:
        return None
    shape = tuple(tensor.shape)
    observation, element_mask, row_mask = _observe(predicate, tensor, arguments, where, num_valid, name)
    if observation is None:
        return None
    site, own_message = resolve(message)
    check = observation.check
    if only_warn or route.mechanism is Mechanism.DEFERRED:
        device_state = state.state_of(route.backend, tensor.device)
        device_state.record(
            site,
            check,
            extremes(observation, state.ROWS, element_mask, row_mask),
            step=delivery.current_step(),
            raises=route.raises and not only_warn,
            dtype=tensor.dtype,
            shape=shape,
            message=own_message,
        )
        return delivery.after_record(device_state)
    if route.mechanism is Mechanism.NATIVE:
        _assert_native(check, extremes(observation, 1, element_mask, row_mask), lambda: text_of(site, own_message))
        return None
    observed = extremes(observation, ALL_ROWS, element_mask, row_mask)
    low_cells, high_cells = _cells_outside(check, observed)
    if not low_cells and not high_cells:
        return None
    findings = check.findings(low_cells, high_cells, *_worst(check, observed))
    violations = delivery.describe(
        findings,
        site=site,
        message=own_message,
        platform=route.backend.name,
        device=tensor.device,
        stamp=state.Stamp(delivery.current_step()),
        first_step=delivery.current_step(),
        block=observed.block,
        dtype=tensor.dtype,
        shape=shape,
    )
    return delivery.report(violations, raises=True)


def prewarm(device: torch.device | str) -> None:
    """Allocate the state of `device` for its current stream: what a captured graph may not do; no host wait.

    Call it on the stream that the graph will be captured on. A platform whose probes are off or native needs none, and
    it costs nothing there.
    """
    device = torch.empty(0, device=device).device  # with its index, as tensors have it
    route = route_of(device)
    if route.mechanism is Mechanism.DEFERRED:
        state.state_of(route.backend, device).prewarm()


# ---------------------------------------------------------------------------------------------------------------------
# Arguments.


def _observe(
    predicate: Callable[..., Observation | None],
    tensor: Tensor,
    arguments: tuple[Any, ...],
    where: Tensor | None,
    num_valid: SupportsIndex | Tensor | None,
    name: str,
) -> tuple[Observation | None, Tensor | None, Tensor | None]:
    """What a predicate observes of a tensor, with the masks for its elements and its rows."""
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
    row_mask = None
    if num_valid is not None:
        count = _host_number(num_valid, values)
        if isinstance(count, Tensor):
            row_mask = _rows_below(count, values)
        else:
            count = _row_count(count, values.shape[0], name)
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


def _rows_below(num_valid: Tensor, values: Tensor) -> Tensor:
    if num_valid.ndim or num_valid.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise TypeError(
            "num_valid must be an int or a 0-dim integer tensor, "
            f"got {num_valid.dtype} of shape {tuple(num_valid.shape)}"
        )
    if num_valid.device != values.device:
        raise ValueError(f"num_valid must be on the device of the tensor ({values.device}), got {num_valid.device}")
    return torch.arange(values.shape[0], device=values.device) < num_valid


# ---------------------------------------------------------------------------------------------------------------------
# Immediate: the host can look at the extremes at once.


def _cells_outside(check: Check, observed: Extremes) -> tuple[list[int], list[int]]:
    return _false_cells(check.above_floor(observed.lower)), _false_cells(check.below_ceiling(observed.upper))


def _false_cells(fine: Tensor | None) -> list[int]:
    if fine is None or bool(fine.all()):
        return []
    cells: list[int] = (~fine).nonzero().flatten().tolist()
    return cells


def _worst(check: Check, observed: Extremes) -> tuple[int | float, int | float]:
    lowest = 0 if observed.lower is None else observed.lower.to(check.plane).amin().item()
    highest = 0 if observed.upper is None else observed.upper.to(check.plane).amax().item()
    return lowest, highest


# ---------------------------------------------------------------------------------------------------------------------
# Native: torch._assert_async on one condition for each kind.


def _assert_native(check: Check, observed: Extremes, message: Callable[[], str]) -> None:
    text = message()
    above_floor, below_ceiling = check.above_floor(observed.lower), check.below_ceiling(observed.upper)
    conditions = [above_floor, below_ceiling]
    if above_floor is not None and below_ceiling is not None and check.one_kind:
        conditions = [None, above_floor & below_ceiling]
    for condition, headline in zip(conditions, check.headlines, strict=True):
        if condition is not None:
            # Always with a message: torch.compile deletes the overload without one (torch 2.13, run).
            torch._assert_async(condition, native_text(f"{headline} {text}"))


def native_text(text: str) -> str:
    """A message that every native assert takes: one line of at most 254 bytes, without what breaks generated code."""
    text = " ".join(text.replace("\\", "/").replace('"', "'").replace("'''", "''").replace("\0", "").split())
    return text.encode(errors="replace")[:MESSAGE_BYTES].decode(errors="ignore")
