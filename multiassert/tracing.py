"""Probes in code that torch.compile traces: part of the graph, with no break, and one compilation for all sites.

What a probe needs of the host is done once, while it is traced: functions marked by `at_trace_time` are called by the
tracer itself, with constants, and what they return is a constant of the graph. What remains in the graph is tensor math
that updates the cells of a slot in place, which no compiler may remove, and which Inductor fuses with what made the
tensor.

Layers that share compiled code differ in their Site only. A Site holds its cells as tensor attributes, so that the
tracer takes them for inputs: one compilation serves them all, provided that each Site has its cells before the compiled
code runs. So when one Site is traced, all Sites get cells, and so do those that are made later.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from multiassert import arguments, backends, delivery, native, settings, sites, state
from multiassert.backends import Mechanism
from multiassert.predicates import Observation, at_trace_time, check_named, extremes
from multiassert.settings import Mode
from multiassert.sites import Message, Site

# Distinct messages at one place of shared code after which it looks like a message per layer.
MESSAGES_BEFORE_ADVICE = 4


def probe(
    predicate: Callable[..., Observation | None],
    tensor: Tensor,
    given: tuple[Any, ...],
    message: Message | Site,
    where: Tensor | None,
    num_valid: SupportsIndex | Tensor | None,
    name: str,
    only_warn: bool,
    asked_for: bool,
) -> None:
    """Trace a probe into the graph. Changes of the mode after compiling take effect, by a guard on the mode."""
    if torch.compiler.is_exporting():
        return  # an exported program has no process whose state it could update
    platform = platform_of(tensor.device.type)
    needs_record = isinstance(message, Site) or only_warn
    modes = settings.current
    mode = modes.where_asked_for(platform) if asked_for else modes.of(platform)
    mechanism = mechanism_of(platform, mode, needs_record)
    if mechanism == "off" or delivery.suspended_threads:
        return
    accepted = arguments.accept(tensor, given, where, num_valid, name)
    observation, element_mask, row_mask = arguments.observe(predicate, accepted)
    if observation is None:
        return
    if mechanism == "native":
        text = message.message if isinstance(message, Site) else _constant_text(message)
        native.assert_extremes(observation.check, extremes(observation, 1, element_mask, row_mask), text)
        return
    # How many rows share a cell would have to be a constant of the graph, and a dynamic shape has none: where there are
    # more rows than cells, all share one, and the record names none. The branch makes a guard of the comparison.
    rows_are_named = True if observation.for_ceiling.shape[0] <= state.ROWS else False  # noqa: SIM210
    observed = extremes(observation, state.ROWS if rows_are_named else 1, element_mask, row_mask)
    lane = lane_of(observation.check.name, tensor.device, tensor.dtype, tensor.ndim, rows_are_named, only_warn)
    if asked_for:
        _ask_for(tensor.device)
    if isinstance(message, Site):
        lower_cells, upper_cells = getattr(message, f"lower_cells_{lane}"), getattr(message, f"upper_cells_{lane}")
    else:
        lower_cells, upper_cells = _cells_of_message(_constant_text(message), lane)
    if observed.upper is not None:
        upper = upper_cells[: observed.upper.shape[0]]
        torch.maximum(upper, observed.upper, out=upper)
    if observed.lower is not None:
        lower = lower_cells[: observed.lower.shape[0]]
        torch.minimum(lower, observed.lower, out=lower)


@at_trace_time
def platform_of(device_type: str) -> str:
    return backends.for_device_type(device_type).name


@at_trace_time
def mechanism_of(platform: str, mode: Mode, needs_record: bool) -> str:
    """Off, native or deferred. There is no immediate look in a graph: on CPU, auto is the assert that raises there."""
    if mode is Mode.OFF or platform == "meta":
        return "off"
    backend = backends.named(platform)
    if mode is Mode.TRAP:
        refusal = backend.trap_refusal()
        if refusal is not None:
            raise ValueError(f"mode trap is refused on {platform}. {refusal}")
        return "native"
    # The text of an assert is part of the graph, so layers with a Site each could not share one.
    has_assert = backend.auto() is not Mechanism.DEFERRED and backend.asserts_compiled()
    return "native" if mode is Mode.AUTO and has_assert and not needs_record else "deferred"


@at_trace_time
def _constant_text(message: Message) -> str:
    return message if isinstance(message, str) else "(a message that is computed is not, in compiled code)"


# ---------------------------------------------------------------------------------------------------------------------
# Lanes: what the sites of one kind of probe share, by a name that is a constant of the graph.


class _Lane:
    """One check on one device state, with a slot for every site that compiled code may meet."""

    def __init__(self, number: int, key: tuple[str, state.DeviceState, torch.dtype, int, bool, bool]) -> None:
        self.number = number
        self.key = key

    def cells_for(self, site: Site) -> tuple[Tensor, Tensor]:
        check_name, device_state, dtype, ndim, rows_are_named, only_warn = self.key
        lower, upper = device_state.compiled_cells(
            site,
            check_named(check_name),
            block=1 if rows_are_named else state.ALL_ROWS_IN_ONE,
            step=delivery.current_step(),
            raises=False if only_warn else None,
            dtype=dtype,
            shape=(-1,) * ndim,  # sizes may differ from call to call
        )
        for cells in (lower, upper):
            # A plain tensor that a graph mutates switches CUDA graphs off for that graph (torch 2.13, read).
            torch._dynamo.mark_static_address(cells, guard=False)
        return lower, upper

    def give_cells(self, site: Site) -> None:
        """Make the cells attributes of the site: the tracer reads an attribute anew, but a dictionary only once."""
        lower, upper = self.cells_for(site)
        object.__setattr__(site, f"lower_cells_{self.number}", lower)
        object.__setattr__(site, f"upper_cells_{self.number}", upper)


_lanes: dict[int, _Lane] = {}
_numbers = itertools.count()
state.on_forget(_lanes.clear)


@at_trace_time
def lane_of(
    check_name: str, device: torch.device, dtype: torch.dtype, ndim: int, rows_are_named: bool, only_warn: bool
) -> int:
    """Make the lane if it is new, give every Site its cells of it, and return its number."""
    device_state = state.state_of(backends.for_device_type(device.type), device)
    key = check_name, device_state, dtype, ndim, rows_are_named, only_warn
    for number, lane in _lanes.items():
        if lane.key == key:
            return number
    number = next(_numbers)
    _lanes[number] = lane = _Lane(number, key)
    for site in sites.all_made_beforehand():
        lane.give_cells(site)
    return number


@at_trace_time
def _ask_for(device: torch.device) -> None:
    state.state_of(backends.for_device_type(device.type), device).asked_for = True


def _give_cells_of_all_lanes(site: Site) -> None:
    for lane in _lanes.values():
        lane.give_cells(site)


sites.on_new_site(_give_cells_of_all_lanes)


# ---------------------------------------------------------------------------------------------------------------------
# Messages that are strings: constants of the graph, each with a site of its own.

_sites_of_messages: dict[tuple[str, int], dict[str, Site]] = {}


@at_trace_time
def _cells_of_message(message: str, lane: int) -> tuple[Tensor, Tensor]:
    place = torch._guards.TracingContext.extract_stack()
    frame = next(f for f in reversed(place) if sites.is_callers(f.filename))
    by_message = _sites_of_messages.setdefault((frame.filename, frame.lineno or 0), {})
    if message not in by_message:
        by_message[message] = Site(message, frame.filename, frame.lineno or 0, frame.name)
        if len(by_message) == MESSAGES_BEFORE_ADVICE:
            warnings.warn(
                f"the probe at {frame.filename}:{frame.lineno} is compiled anew for each of its messages, and torch "
                "gives up after 8. Make a multiassert.site(message) for each layer beforehand, and pass that as msg.",
                stacklevel=2,
            )
    return _lanes[lane].cells_for(by_message[message])
