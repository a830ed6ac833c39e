"""The watch over a model: its hooks, what they found, and how to end it."""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
import weakref
from typing import Any

from torch import nn

from multiassert import delivery
from multiassert.sites import Site
from multiassert.violation import Violation
from multiassert.watching import places
from multiassert.watching.blame import Blame, Pair, rows_of
from multiassert.watching.hooks import NOTHING_KNOWN, Hooks, Run, take_off
from multiassert.watching.operators import OperatorMode
from multiassert.watching.places import IDS, INPUT, OPERATOR, OUTPUT, Order, Place, Traced

KEPT = 1000  # violations, the first ones

# By name; a watch lives as long as its model, whose hooks hold it.
_watched: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
# Whose calls are under way, by thread: a module that two models share is looked at by the one that runs.
_running: dict[int, list[Watch]] = {}


class Watch:
    """The hooks of `multiassert.watch` on one model, and what they found. A context manager, which takes them off."""

    def __init__(self, model: nn.Module, name: str, ops: bool, step_per_call: bool) -> None:
        was_wrapped, model = model, _innermost(model)
        _refuse_twice(model)
        _warn_if_compiled(model, is_wrapped=was_wrapped is not model)
        self.name = name
        self.number = next(_numbers)
        self.step_per_call = step_per_call
        self.looks_at_operators = ops
        self.is_removed = False
        self.violations: list[Violation] = []
        self.places: dict[Site, Place] = {}
        self.order = Order()
        self.runs: dict[int, Run] = {}
        self.places_of_operators: dict[tuple[str, str, str, int, str, int], Place] = {}
        self.traced = NOTHING_KNOWN
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self._model = model
        self._own = {id(module) for module in self.modules.values()}
        self._traced_places = Traced(self.order, not_batch=set(), of_unknown_input=set())
        self._in_lanes: dict[tuple[Place, int], Place] = {}
        self._lanes_lock = threading.Lock()
        self._blame = Blame(self.places, self.order, self._sentence)
        self._numbers: tuple[int, int] | None = None
        places.remember(self.number, self._traced_places)
        inputs = _input_embeddings(model)
        for path, module in self.modules.items():
            hooks = Hooks(self, module, path, id(module) in inputs)
            for place in (hooks.input, hooks.output, hooks.ids, hooks.positions):
                if place is not None:
                    self.places[place.site] = place
            self._numbers = hooks.put_on(module, self._numbers)
        delivery.condense_with(_weakly(self))
        _watched[model] = name

    # What a user asks.

    def first(self) -> Violation | None:
        """The first cause of all that has arrived on the host so far, or None; touches no device."""
        return min(self.violations, key=lambda violation: violation.last_step, default=None)

    def report(self) -> str:
        """What has arrived on the host so far, a line for each, first cause first; touches no device."""
        ordered = sorted(self.violations, key=lambda violation: violation.last_step)
        return "\n".join(map(self._line, ordered)) or "nothing bad was seen"

    def bad_weights(self) -> list[str]:
        """The names of the model's weights that hold NaN or Inf; waits for the device."""
        return [
            f"{path}.{name}" if path else name
            for path, module in self.modules.items()
            for name in places.bad_weights(module)
        ]

    def remove(self) -> None:
        """Take the hooks off; what was seen on a device and has not arrived yet is still told. May be called again.

        Nothing is looked at from then on, also in a call of the model that is under way.
        """
        self.is_removed = True
        own = self.runs.get(threading.get_ident())
        if own is not None and not (own.mode is not None and own.mode.is_at_work):
            self.leave(own)
        for module in self.modules.values():
            if module is not self._model:
                self._take_off(module)
        self._take_off_the_last()
        _watched.pop(self._model, None)

    def _take_off_the_last(self) -> None:
        """The hooks of the model itself stay as long as calls are under way that they have to end."""
        if not self.runs:
            self._take_off(self._model)

    def _take_off(self, module: nn.Module) -> None:
        if self._numbers is not None:
            take_off(module, self._numbers)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __del__(self) -> None:
        # The garbage collector may call this at any line, so it takes no lock.
        with contextlib.suppress(AttributeError):
            places.forget(self.number)

    # For the hooks.

    def enter(self, hooks: Hooks) -> Run | None:
        """The call of the model that is under way, or a new one; None where the module runs for another watch."""
        thread = threading.get_ident()
        run = self.runs.get(thread)
        if run is not None and not hooks.is_root:
            return run
        if run is not None:
            self.leave(run)  # an interrupt has left it open
        module = id(self.modules[hooks.path])
        if any(module in other._own for other in _running.get(thread, ())):
            return None
        with self._lanes_lock:
            taken = {other.lane for other in self.runs.values()}
            run = self.runs[thread] = Run(hooks, lane=next(n for n in itertools.count() if n not in taken))
        _running.setdefault(thread, []).append(self)
        self._blame.call_begins(run.lane, *_now())
        if self.looks_at_operators:
            run.mode = OperatorMode(self, run)
            run.mode.__enter__()  # type: ignore[no-untyped-call]
        return run

    def leave(self, run: Run) -> None:
        """The call is over, well or not."""
        thread = threading.get_ident()
        if run.mode is not None:
            run.mode.take_off()
            run.mode = None
        if self.runs.get(thread) is run:
            del self.runs[thread]
            _running[thread].remove(self)
            if not _running[thread]:
                del _running[thread]
        if self.is_removed:
            self._take_off_the_last()

    def end_call(self) -> None:
        """A call has come to its end."""
        __tracebackhide__ = True
        if self.step_per_call:
            delivery.step(tag=self.name or None)

    def in_lane(self, place: Place, lane: int) -> Place:
        """A place as the call in that lane has it."""
        if not lane:
            return place
        own = self._in_lanes.get((place, lane))
        if own is None:
            own = self._in_lanes[place, lane] = places.in_lane(place, lane)
            self.places[own.site] = own
        return own

    # For the reports.

    def condense(self, pairs: list[Pair]) -> list[Pair]:
        """Leave out what follows from an earlier place of the same call."""
        traced = self._traced_places
        for place in list(self.places.values()):
            key = places.key_of(place.module, place.end)
            if key in traced.not_batch:
                place.rows_are_batch = False
            if key in traced.of_unknown_input:
                place.input_is_known = False
        told = self._blame.condense(pairs)
        mine = [violation for violation, _ in told if violation.site in self.places]
        self.violations += mine[: KEPT - len(self.violations)]
        return told

    def _sentence(self, violation: Violation, place: Place) -> str:
        what, why = self._what(place), self._why(violation, place)
        if violation.rows and not place.rows_are_batch:
            why = f"{why}, dimension 0 is not the batch's".removeprefix(", ")
        return (f"{self.name}: " if self.name else "") + (f"{what}; {why}" if why else what)

    def _what(self, place: Place) -> str:
        shown = self._shown(place.module)
        if place.end == OPERATOR:
            return place.site.message
        if place.end == IDS:
            return f"{shown}: ids"
        if place.end == INPUT and place.module:
            return f"functional code in {self._shown(self._parent(place.module))} before {place.module}"
        last = self._last_inside(place.module) if place.end == OUTPUT else None
        return f"{shown}: {place.end}" if last is None else f"functional code in {shown} after {last}"

    def _why(self, violation: Violation, place: Place) -> str:
        """What is certain about the cause; empty where the place says it all."""
        if place.end == OPERATOR:
            return f"its argument was bad: {place.argument}" if place.argument else "its arguments were clean"
        if place.end == INPUT and not place.module:
            return "it was given so"
        if place.end != OUTPUT or self._last_inside(place.module) is not None:
            return ""
        clean, certain = [], ""
        if place.input_is_known:
            clean.append("input")
        if violation.platform == "cpu":
            module = self.modules[place.module]
            bad = places.bad_weights(module)
            if bad:
                certain = f"its {' and '.join(bad)} not finite"
            elif places.weights_are_known(module):
                clean.append("weights")
        verb = "was" if clean == ["input"] else "were"
        return ", ".join(filter(None, (f"its {' and '.join(clean)} {verb} clean" if clean else "", certain)))

    def _line(self, violation: Violation) -> str:
        what, separator, why = violation.message.partition(";")
        kind = {"nan": " NaN", "inf": " Inf"}.get(violation.kind, "")
        step = f"step {violation.step}" if isinstance(violation.step, int) else "steps {} to {}".format(*violation.step)
        rows, place = rows_of(violation), self.places.get(violation.site)
        if rows:
            rows = f"{'row' if place is not None and place.rows_are_batch else 'index'} {rows}, "
        return f"{what}{kind}, {rows}{step}{separator}{why}"

    def _shown(self, path: str) -> str:
        return path or type(self._model).__name__

    def _parent(self, path: str) -> str:
        """The module whose code calls it: lists of modules have none."""
        while path:
            path = path.rpartition(".")[0]
            if not isinstance(self.modules.get(path), (nn.ModuleList, nn.ModuleDict)):
                break
        return path

    def _last_inside(self, path: str) -> str | None:
        """The last module that a module has called; None where it has called none."""
        start = f"{path}." if path else ""
        inside = [p for p in list(self.places.values()) if p.module != path and p.module.startswith(start)]
        passed = [p for p in inside if p.end == OUTPUT and self.order.was_passed(p)]
        return max(passed, key=self.order.rank).module if passed else None


def _now() -> tuple[int, int]:
    """The step, and how many probes were called in it so far."""
    while True:
        step, position = delivery.current_step(), delivery.next_position()
        if step == delivery.current_step():  # else another thread has ended it meanwhile
            return step, position


def _innermost(model: nn.Module) -> nn.Module:
    """The model that torch.compile has wrapped."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def _refuse_twice(model: nn.Module) -> None:
    for other, name in list(_watched.items()):
        if other is model or any(m is model for m in other.modules()) or any(m is other for m in model.modules()):
            named = f" as {name!r}" if name else ""
            raise ValueError(
                f"this {type(model).__name__} is watched already{named}, or has a part in common with what is (a "
                f"{type(other).__name__}). Call remove() on that watch first, or watch the outermost module only."
            )


def _input_embeddings(model: nn.Module) -> set[int]:
    """The ids of the modules that transformers knows as taking token ids."""
    found: set[int] = set()
    for module in model.modules():
        get: Any = getattr(module, "get_input_embeddings", None)
        if callable(get):
            with contextlib.suppress(AttributeError, NotImplementedError):
                found.add(id(get()))
    return found


def _warn_if_compiled(model: nn.Module, is_wrapped: bool) -> None:
    compiled = [type(module).__name__ for module in model.modules() if module._compiled_call_impl is not None]
    if compiled or is_wrapped:
        warnings.warn(
            f"torch.compile was called on this {compiled[0] if compiled else type(model).__name__} before "
            "multiassert.watch: what it has compiled so far runs on without being watched, and says nothing. Call "
            "watch() before torch.compile, or torch._dynamo.reset() now.",
            stacklevel=4,
        )


def _weakly(watch: Watch) -> Any:
    """The watch's condense, without keeping the watch and its model alive."""
    reference = weakref.ref(watch)

    def condense(pairs: list[Pair]) -> list[Pair] | None:
        alive = reference()
        return None if alive is None else alive.condense(pairs)

    return condense
