"""Injection coverage: which probes of a run have been seen to fire, and a way to make one fire where it stands.

    from multiassert import injection

    with injection.coverage() as coverage:
        with injection.poison("verify: target logits", row=2):
            engine.run()  # the probe sees a NaN in row 2, and the engine's own tensor stays as it is
        coverage.require_all_fired()

For tests: while one of the two is in use, probes look up where they stand at every call. Both see the calls of eager
code, and graphs as they are captured; compiled code makes no calls, so what it probes has to be poisoned itself, and
its sites count as seen when their violations arrive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from multiassert import delivery, dispatch, predicates, sites
from multiassert.arguments import accept, observe
from multiassert.sites import Site
from multiassert.transforms import innermost as innermost_transform
from multiassert.violation import Violation

sites.leave_out(__file__)

Probe = Callable[..., "RuntimeError | None"]
Around = Callable[..., "RuntimeError | None"]

# What the probes of a site look for, in the words of violations; an index has two ways to be out of bounds.
KINDS = {
    predicates.nan: "nan",
    predicates.inf: "inf",
    predicates.out_of_bounds: "bounds",
    predicates.page_misaligned: "misaligned",
    predicates.outside_closed_range: "range",
}
OTHER_KINDS = {"low": "bounds", "high": "bounds"}


# ---------------------------------------------------------------------------------------------------------------------
# Coverage.


@dataclasses.dataclass
class CoveredSite:
    """A probe of the run: how often it was called in eager code, and how many violations it has reported."""

    site: Site
    message: str
    kind: str  # nan, inf, bounds, misaligned, range or cond; empty for a site that no probe was called with
    calls: int = 0
    violations: int = 0

    def __str__(self) -> str:
        return f"{self.message or '(no message)'} ({self.kind or 'not called'}) at {self.site}"


class Coverage:
    """The probes that a run has come to, and which of them have fired."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: dict[tuple[str, int, str, str], CoveredSite] = {}

    @property
    def sites(self) -> list[CoveredSite]:
        """All of them, by file and line; those made by `site()` count from when they are made."""
        with self._lock:
            found = dict(self._sites)
        known = {key[:3] for key in found}
        for made in sites.all_made_beforehand():
            place = made.file, made.line, made.message
            if place not in known and not sites.is_generated(made):
                key = (*place, "")
                found[key] = CoveredSite(made, made.message, "")
        return [found[key] for key in sorted(found)]

    @property
    def never_fired(self) -> list[CoveredSite]:
        """Those without a violation so far. Drain first: what a device has not sent yet is not known."""
        return [each for each in self.sites if not each.violations]

    def require_all_fired(self, *but: str) -> None:
        """Wait for the devices, and raise AssertionError if a probe has never fired, unless `but` holds a part of it.

        Without any probe it raises, too: were they on?
        """
        __tracebackhide__ = True
        delivery.raise_if_error()
        every = self.sites
        if not every:
            raise AssertionError("no probe was called, so none was seen to fire: were they on?")
        silent = [str(each) for each in self.never_fired if not any(part in str(each) for part in but)]
        if silent:
            raise AssertionError(
                f"{len(silent)} of {len(every)} probes were never seen to fire:\n  " + "\n  ".join(silent)
            )

    def _of(self, site: Site, message: str, kind: str) -> CoveredSite:
        key = site.file, site.line, message, kind
        with self._lock:
            return self._sites.setdefault(key, CoveredSite(site, message, kind))

    def _called(self, predicate: Callable[..., object], site: Site, message: object) -> None:
        if sites.is_generated(site):
            return  # a watched model has hundreds of places, and nobody wrote a probe there
        kind = KINDS.get(predicate, "cond")
        self._of(site, message if isinstance(message, str) else site.message, kind).calls += 1

    def _reported(self, violation: Violation) -> None:
        site, kind = violation.site, OTHER_KINDS.get(violation.kind, violation.kind)
        if sites.is_generated(site):
            return
        # A message that is a callable is known only where there is something to report.
        known = (site.file, site.line, violation.message, kind) in self._sites
        self._of(site, violation.message if known else site.message, kind).violations += 1


@contextlib.contextmanager
def coverage() -> Iterator[Coverage]:
    """A scope in which every probe that is called is listed, and marked when it fires; no host wait is added."""
    covered = Coverage()
    remove = delivery.on_violation(covered._reported)

    def listing(probe: Probe, *arguments: Any, **named: Any) -> RuntimeError | None:
        if not torch.compiler.is_compiling() and innermost_transform() is None:
            site, message = sites.resolve(arguments[3])
            covered._called(arguments[0], site, message)
        return probe(*arguments, **named)

    try:
        with _around_every_probe(listing):
            yield covered
    finally:
        remove()


# The scopes that are open, on all threads. What they are put around is replaced while there is one.
_arounds: list[Around] = []
_arounds_lock = threading.Lock()
_replaced: dict[str, Any] = {}


@contextlib.contextmanager
def _around_every_probe(around: Around) -> Iterator[None]:
    """Have every call of a probe go through `around(probe, *arguments)`; scopes may end in any order."""
    with _arounds_lock:
        if not _arounds:
            _replaced.update({name: getattr(dispatch, name) for name in ("probe", "is_clean_at_a_glance")})
            dispatch.probe = _through_all(_replaced["probe"])
            # Else a clean tensor would not come to its probe.
            dispatch.is_clean_at_a_glance = lambda *arguments: False
        _arounds.append(around)
    try:
        yield
    finally:
        with _arounds_lock:
            _arounds.remove(around)
            if not _arounds:
                for name, original in _replaced.items():
                    setattr(dispatch, name, original)


def _through_all(probe: Probe) -> Probe:
    def through_all(*arguments: Any, **named: Any) -> RuntimeError | None:
        call = probe
        for around in list(_arounds):
            call = functools.partial(around, call)
        return call(*arguments, **named)

    return through_all


# ---------------------------------------------------------------------------------------------------------------------
# Poison.


@dataclasses.dataclass
class Poison:
    """What `poison` has done so far."""

    target: str | Site
    row: int | None
    value: int | float | None
    left: int
    calls: int = 0  # calls of matching probes
    poisoned: int = 0  # how many of them saw a bad value
    refusal: str = ""  # why the last one did not

    def matches(self, site: Site, message: str) -> bool:
        if isinstance(self.target, Site):
            return site is self.target
        return self.target in message or self.target in f"{os.path.normpath(site.file)}:{site.line}"


@contextlib.contextmanager
def poison(
    target: str | Site, *, row: int | None = None, value: int | float | None = None, times: int = 1
) -> Iterator[Poison]:
    """A scope in which a probe sees a bad value, in a copy that the host waits for; the tensor stays as it is.

    `target` is a part of the probe's message, a part of its `file:line`, or its Site. The first `times` calls in which
    a value counts are poisoned, at the last counting element of `row` (of any row by default), with `value`, or with
    what is bad for the probe: NaN, Inf, the first index out of bounds, one past a page's start, False. The violation is
    reported as any other, in the mode in force: in a native mode it ends the process.

    Raises AssertionError at the end where no probe was poisoned, with the reason: a test of that would show nothing.
    """
    __tracebackhide__ = True
    state = Poison(target, row, value, times)

    def poisoning(probe: Probe, *arguments: Any, **named: Any) -> RuntimeError | None:
        if state.left and not torch.compiler.is_compiling() and innermost_transform() is None:
            arguments = _poisoned_arguments(state, arguments, named)
        return probe(*arguments, **named)

    with _around_every_probe(poisoning):
        yield state
    if not state.poisoned:
        called = f"{state.calls} calls of such a probe, {state.refusal}" if state.calls else "no such probe was called"
        raise AssertionError(f"nothing was poisoned for {str(target)!r}: {called}")


def _poisoned_arguments(state: Poison, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    predicate, tensor, given, message, *others = arguments
    site, own_message = sites.resolve(message)
    if not state.matches(site, own_message if isinstance(own_message, str) else site.message):
        return arguments
    where, num_valid, name, _, asked_for = (*others, *[None] * 5)[:5]  # below a transform all come by position
    name, asked_for = name or named.get("name", "tensor"), bool(asked_for or named.get("asked_for"))
    values = dispatch.with_data(tensor, name)
    if values is None:
        return arguments  # nothing is there to look at, so it is not looked at
    state.calls += 1
    state.refusal = _refusal(values, asked_for)
    if state.refusal:
        return arguments
    # What the probe itself refuses is refused in its words.
    observe(predicate, accept(values, given, where, num_valid, name))
    try:
        bad = poisoned(predicate, values, given, where, num_valid, state.row, state.value)
    except ValueError as reason:
        state.refusal = str(reason)
        return arguments
    state.left -= 1
    state.poisoned += 1
    return predicate, bad, given, message, *others


def _refusal(tensor: Tensor, asked_for: bool) -> str:
    """Why a poison in this tensor would show nothing; empty where it would."""
    route = dispatch.route_of(tensor.device, asked_for)
    if route.mechanism is None:
        return f"while the probes of {route.backend.name} were off"
    if threading.get_ident() in delivery.suspended_threads:
        return "within suspend()"
    if tensor.device.type != "cpu" and route.backend.is_capturing(tensor.device):
        return "while a graph was captured, in which a poison would stay"
    return ""


def poisoned(
    predicate: Callable[..., object],
    tensor: Tensor,
    given: tuple[Any, ...],
    where: Tensor | None,
    num_valid: object,
    row: int | None,
    value: int | float | None,
) -> Tensor:
    """A copy of a probe's tensor with one bad value that counts; the host waits. ValueError where there can be none."""
    on_host = tensor.detach().cpu().clone()
    flat = on_host.reshape(-1)
    counting = _counting(on_host, where, num_valid, row).reshape(-1).nonzero()
    if not len(counting):
        raise ValueError(f"in which no value{'' if row is None else f' of row {row}'} counts")
    index = int(counting[-1])
    bad = _bad_value(predicate, on_host, given, index) if value is None else value
    if bad is None:
        raise ValueError(f"to which no value of {on_host.dtype} is bad")
    flat[index] = bad
    return flat.view(on_host.shape).to(tensor.device)


def _counting(tensor: Tensor, where: Tensor | None, num_valid: object, row: int | None) -> Tensor:
    """Which elements a probe looks at, of those in `row`."""
    counts = torch.ones(tensor.shape, dtype=torch.bool)
    if where is not None:
        counts &= where.detach().cpu()
    if tensor.ndim:
        if num_valid is not None:
            count: Any = num_valid.cpu() if isinstance(num_valid, Tensor) else num_valid
            counts[operator.index(count) :] = False
        if row is not None:
            counts &= (torch.arange(tensor.shape[0]) == row).view(-1, *[1] * (tensor.ndim - 1))
    return counts


def _bad_value(predicate: Callable[..., object], tensor: Tensor, given: tuple[Any, ...], index: int) -> Any:
    """A value that the predicate finds at that place; None where the dtype holds none."""
    dtype = tensor.dtype
    if predicate is predicates.nan:
        return _if_it_holds(dtype, math.nan)
    if predicate is predicates.inf:
        return _if_it_holds(dtype, math.inf)
    if predicate in (predicates.condition, predicates.conditions):
        return 0
    here = tensor.reshape(-1)[index].item()
    if predicate is predicates.page_misaligned:
        page_size, sentinel = (*given, None)[:2]
        offsets = range(1, 4) if page_size > 1 else ()
        candidates: Any = [here - here % page_size + each for each in offsets if each % page_size]
        excused = sentinel
    elif dtype.is_floating_point:  # a NaN is outside any range, and makes any sum differ
        candidates, excused = [math.nan], None
    elif predicate is predicates.sum_differs:
        candidates, excused = [here + 1, here - 1], None
    elif predicate is predicates.outside_closed_range:
        candidates, excused = [_integer_above(given[1]), _integer_below(given[0])], None
    else:
        low, high = (_at(bound, tensor, index) for bound in given[:2])
        candidates, excused = [high, low - 1, high + 1, low - 2], given[2]
    return next((each for each in candidates if each != excused and _if_it_holds(dtype, each) is not None), None)


def _integer_above(bound: float) -> float:
    return math.floor(bound) + 1 if math.isfinite(bound) else bound


def _integer_below(bound: float) -> float:
    return math.ceil(bound) - 1 if math.isfinite(bound) else bound


def _at(bound: Any, tensor: Tensor, index: int) -> Any:
    """A bound at one place of the tensor."""
    if isinstance(bound, Tensor):
        return bound.detach().cpu().expand(tensor.shape).reshape(-1)[index].item()
    return operator.index(bound)


def _if_it_holds(dtype: torch.dtype, value: int | float) -> int | float | None:
    """The value where the dtype holds it, else None."""
    if not dtype.is_floating_point and not dtype.is_complex:
        return value if isinstance(value, int) and predicates.fits(value, dtype) else None
    try:
        held = torch.tensor([value]).to(dtype).to(torch.complex128 if dtype.is_complex else torch.float64)[0].item()
    except (RuntimeError, NotImplementedError):
        return None
    same = math.isnan(held.real) if math.isnan(value) else held == value
    return value if same else None
