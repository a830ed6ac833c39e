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
from torch._C import _is_tracing as is_tracing
from torch.compiler import is_compiling

from multiassert import backends, delivery, fused, glance, native, settings, state, tracing, transforms
from multiassert.arguments import Given, accept, observe
from multiassert.backends import Backend, Mechanism
from multiassert.predicates import Check, Extremes, Observation, extremes
from multiassert.settings import Mode
from multiassert.sites import Message, Site, require_message, resolve, text_of
from multiassert.transforms import innermost as innermost_transform

# A CPU tensor that is looked at in the call tells its rows exactly; there is no state that would have to hold them.
ALL_ROWS = 2**62


class Route(NamedTuple):
    """What a probe does on a device, as long as the settings stay."""

    backend: Backend
    mechanism: Mechanism | None  # None: off
    raises: bool
    host_sees_all: bool = False  # a look at the tensor waits for nothing
    is_fused: bool = False  # deferred probes may take the fused kernel
    asked_for: bool = False  # by an engine's own switch, whatever ours say


_routes: dict[torch.device, Route] = {}
_routes_asked_for: dict[torch.device, Route] = {}


def _forget_routes() -> None:
    _routes.clear()
    _routes_asked_for.clear()


settings.on_change(_forget_routes)


def route_of(device: torch.device, asked_for: bool = False) -> Route:
    """The route for tensors of `device`; raises ValueError where mode `trap` would be silent or would wait."""
    routes = _routes_asked_for if asked_for else _routes
    route = routes.get(device)
    if route is None:
        modes = settings.current
        route = _find_route(device, modes, asked_for)
        with settings.lock:
            if modes is settings.current:  # else another thread has changed them, and this route would stay
                routes[device] = route
    return route


def _find_route(device: torch.device, modes: settings.Modes, asked_for: bool) -> Route:
    backend = backends.for_device_type(device.type)
    mode = modes.where_asked_for(backend.name) if asked_for else modes.of(backend.name)
    if device.type == "meta" or mode is Mode.OFF:
        return Route(backend, None, False)
    if mode is Mode.TRAP:
        refusal = backend.trap_refusal()
        if refusal is not None:
            raise ValueError(f"{modes.source(backend.name)}: mode trap is refused on {backend.name}. {refusal}")
        is_fused = fused.is_chosen(backend, device, modes.kernels)
        return Route(backend, Mechanism.NATIVE, True, is_fused=is_fused, asked_for=asked_for)
    mechanism = backend.auto() if mode is Mode.AUTO else Mechanism.DEFERRED
    is_fused = fused.is_chosen(backend, device, modes.kernels)
    host_sees_all = device.type == "cpu" and modes.kernels != "exact"  # a look trusts reductions
    return Route(backend, mechanism, mode is not Mode.WARN, host_sees_all, is_fused, asked_for)


def probe(
    predicate: Callable[..., Observation | None],
    tensor: Tensor,
    arguments: tuple[Any, ...],
    message: Message | Site,
    where: Tensor | None = None,
    num_valid: SupportsIndex | Tensor | None = None,
    name: str = "tensor",
    only_warn: bool = False,
    asked_for: bool = False,
) -> RuntimeError | None:
    """Run a probe on its device; returns the error that its caller has to raise, so that no frame of ours is in it.

    `name` is what the public call names its tensor. `only_warn` reports through the deferred state, as mode `warn`.
    `asked_for` says that an engine's own switch is on: where our mode is off, it counts as auto.
    Must be called by the public call itself: the site is its caller.
    """
    if is_compiling():
        tracing.probe(predicate, tensor, arguments, message, where, num_valid, name, only_warn, asked_for)
        return None
    if innermost_transform() is not None:
        error: RuntimeError | None = transforms.below_transforms(
            probe, predicate, tensor, arguments, message, where, num_valid, name, only_warn, asked_for
        )
        return error
    if type(tensor) is not Tensor:
        found = with_data(tensor, name)
        if found is None:
            return None
        tensor = found
    device = tensor.device
    route = (_routes_asked_for if asked_for else _routes).get(device) or route_of(device, asked_for)
    if route.mechanism is None:
        return None
    if delivery.suspended_threads and threading.get_ident() in delivery.suspended_threads:
        return None
    if is_tracing():
        return None  # torch.jit deletes asserts, and would take device state for a constant
    # Counted before any look, so that ranks that run the same program count alike.
    position = delivery.next_position() if only_warn or route.mechanism is Mechanism.DEFERRED else 0
    if route.host_sees_all and where is None and num_valid is None and glance.is_clean(predicate, tensor, arguments):
        if type(message) is not str:
            require_message(message)
        return _after_clean_look(route, device) if route.mechanism is Mechanism.DEFERRED else None
    shape = tuple(tensor.shape)
    given = accept(tensor, arguments, where, num_valid, name)
    if only_warn or route.mechanism is Mechanism.DEFERRED:
        raises = route.raises and not only_warn
        return _record(predicate, given, route, message, tensor.dtype, shape, raises, position)
    observation, element_mask, row_mask = observe(predicate, given)
    if observation is None:
        return None
    site, own_message = resolve(message)
    check = observation.check
    if route.mechanism is Mechanism.NATIVE:
        native.assert_extremes(check, extremes(observation, 1, element_mask, row_mask), text_of(site, own_message))
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
        sequence=state.next_sequence(),
    )
    return delivery.report(violations, raises=True)


def _record(
    predicate: Callable[..., Observation | None],
    given: Given,
    route: Route,
    message: Message | Site,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    raises: bool,
    position: int,
) -> RuntimeError | None:
    """Merge what a probe sees into the state of the tensor's device."""
    device = given.values.device
    launch: fused.Launch | None = None
    plan = fused.plan_of(predicate, dtype, given.arguments) if route.is_fused and not given.is_empty() else None
    if plan is not None:
        capturing = route.backend.is_capturing(device)
        launch = fused.prepare(plan, given.values, state.ROWS, given.mask, given.num_valid, capturing=capturing)
    observed: Extremes | fused.Launch
    if plan is not None and launch is not None:
        check, observed = plan.check, launch
    else:
        observation, element_mask, row_mask = observe(predicate, given)
        if observation is None:
            return None
        check, observed = observation.check, extremes(observation, state.ROWS, element_mask, row_mask)
    site, own_message = resolve(message)
    device_state = state.state_of(route.backend, device)
    device_state.asked_for |= route.asked_for
    device_state.record(
        site,
        check,
        observed,
        step=delivery.current_step(),
        position=position,
        raises=raises,
        dtype=dtype,
        shape=shape,
        message=own_message,
    )
    return delivery.after_record(device_state)


def is_clean_at_a_glance(
    predicate: Callable[..., Observation | None], tensor: Tensor, arguments: tuple[Any, ...]
) -> bool:
    """Whether the host can tell without a wait, and cheaply, that a predicate finds nothing; False says nothing."""
    return (
        not is_compiling()
        and innermost_transform() is None
        and type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and not is_tracing()
        and glance.is_clean(predicate, tensor, arguments)
    )


def with_data(tensor: object, name: str) -> Tensor | None:
    """The plain tensor whose values count; None where there are none (meta, fake). TypeError for what is no tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor or None, got {type(tensor).__name__}")
    return tensor if type(tensor) is torch.nn.Parameter else transforms.with_data(tensor)


def _after_clean_look(route: Route, device: torch.device) -> RuntimeError | None:
    """A call with nothing to record still counts as one that may send and look."""
    device_state = state.state_of(route.backend, device)
    if not device_state.calls_since_snapshot:
        return delivery.look() if delivery.has_news() else None
    device_state.calls_since_snapshot += 1
    return delivery.after_record(device_state)


def prewarm(device: torch.device | str) -> None:
    """Allocate the device state for a graph that is captured next, which may not allocate itself; no host wait.

    It serves the current stream, and one more that was never probed before: `torch.cuda.graph` makes a stream of its
    own. Each of the two takes about 2 MB on the device. A platform whose probes are off needs none, and neither does
    the CPU in mode `auto`; it costs nothing there.
    """
    device = torch.empty(0, device=device).device  # with its index, as tensors have it
    route = route_of(device)
    if route.mechanism in (Mechanism.DEFERRED, Mechanism.NATIVE):  # maybe_warn_nan is deferred beside a native assert
        state.prewarm(route.backend, device)


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
