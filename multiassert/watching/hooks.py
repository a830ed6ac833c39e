"""The hooks on one module: look at what it is given and at what it returns, in eager and in compiled code.

Looking costs one probe for each tensor that no module has returned yet: the output of one module is mostly the input of
the next, and a tensor that was looked at is not looked at again as long as nobody has changed it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from multiassert import delivery, dispatch, predicates, settings
from multiassert.backends import Mechanism
from multiassert.watching import places
from multiassert.watching.finite import not_finite
from multiassert.watching.places import IDS, INPUT, OUTPUT, POSITIONS, Place
from multiassert.watching.scope import ARGUMENTS, Scope, layout_of, scope_of
from multiassert.watching.tensors import (
    CACHES,
    Leaf,
    arguments_of,
    is_mask,
    is_seen_whole,
    leaves,
    may_be_given,
    parameter_names,
)
from multiassert.watching.traced import trace_not_finite

if TYPE_CHECKING:
    from multiassert.watching.handle import Watch
    from multiassert.watching.operators import OperatorMode

NOTHING_KNOWN = Scope()
IDS_LOOKED_UP = 18  # of the first bad ones: more than a report shows


@dataclasses.dataclass
class Frame:
    """One module that runs."""

    hooks: Hooks
    scope: Scope
    handled: BaseException | None  # an exception that was on its way before the module was called
    flattens: bool = False  # whether it may make a list of rows of its batch


class Run:
    """One call of the model that is under way, on one thread."""

    def __init__(self, outermost: Hooks, lane: int) -> None:
        self.outermost = outermost
        self.lane = lane  # no other call that is under way has this number
        self.stack: list[Frame] = []  # the modules that run, the innermost last
        self.mode: OperatorMode | None = None
        self._looked_at: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._moved: dict[tuple[int, torch.device], tuple[Tensor, Tensor | None]] = {}

    @property
    def scope(self) -> Scope:
        return self.stack[-1].scope if self.stack else NOTHING_KNOWN

    @property
    def path(self) -> str:
        return self.stack[-1].hooks.path if self.stack else ""

    def frame_of(self, hooks: Hooks) -> Frame | None:
        """The frame of a module that has come to its end, as the innermost; None where its begin was not noted.

        Frames above it are of modules that an interrupt has ended: torch calls no hook then.
        """
        for index in range(len(self.stack) - 1, -1, -1):
            if self.stack[index].hooks is hooks:
                del self.stack[index + 1 :]
                return self.stack[index]
        return None

    def scope_on(self, device: torch.device) -> Scope:
        """The scope with its masks on a device, without a wait: a mask that cannot be had so is left out."""
        scope = self.scope
        mask, other = scope.mask, scope.other_mask
        if (mask is None or mask.device == device) and (other is None or other.device == device):
            return scope
        return scope._replace(mask=self._on(device, mask), other_mask=self._on(device, other))

    def _on(self, device: torch.device, mask: Tensor | None) -> Tensor | None:
        if mask is None or mask.device == device:
            return mask
        key = id(mask), device
        if key not in self._moved:
            self._moved[key] = mask, _moved_without_wait(mask, device)  # the mask is kept, and so its id
        return self._moved[key][1]

    def zero_like(self, tensor: Tensor) -> Tensor:
        """A 0 of its dtype on its device, made once in a call."""
        key = tensor.dtype, tensor.device
        if key not in self._zeros:
            self._zeros[key] = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
        return self._zeros[key]

    def is_new(self, tensor: Tensor) -> bool:
        """Whether a tensor was not looked at yet as it is now; from now on it was."""
        if tensor.is_inference():
            return True  # it does not tell whether it was changed
        known = self._looked_at.get(id(tensor))
        version = tensor._version
        if known is not None and known[0]() is tensor and known[1] == version:
            return False
        self._looked_at[id(tensor)] = weakref.ref(tensor), version
        return True


def _moved_without_wait(mask: Tensor, device: torch.device) -> Tensor | None:
    if device.type == "cpu":
        return None
    if mask.device.type == "cpu":
        if dispatch.route_of(device).backend.is_capturing(device):
            return None
        try:
            mask = mask.pin_memory()  # from other memory it would wait
        except (RuntimeError, NotImplementedError):
            return None
    return mask.to(device, non_blocking=True)


class Hooks:
    """What is called before and after one module. A copy of it, or one from a file, does nothing."""

    def __init__(self, watch: Watch, module: nn.Module, path: str, is_input_embedding: bool) -> None:
        self.watch = watch
        self.path = path
        self.is_root = path == ""  # the path itself would be a constant of compiled code, and another one in each layer
        self.names = parameter_names(module)
        self.may_open_scope = self.is_root or may_be_given(module, ARGUMENTS)
        self.input = places.made_for(watch.name, path, INPUT, module)
        self.output = places.made_for(watch.name, path, OUTPUT, module)
        self.input_key, self.output_key = places.key_of(path, INPUT), places.key_of(path, OUTPUT)
        self.number_of_ids = _number_of_ids(module) if is_input_embedding or not _has_own_forward(module) else 0
        self.ids: Place | None = None
        self.positions: Place | None = None
        if self.number_of_ids:
            self.ids = places.made_for(watch.name, path, IDS, module)
            self.positions = places.made_for(watch.name, path, POSITIONS, module)
        self.outer_traced = NOTHING_KNOWN
        # Torch's own modules write through torch, which counts. Fused kernels of others may not.
        self.writes_are_counted = type(module).__module__.startswith("torch.nn.")

    def __reduce__(self) -> tuple[Callable[[], Hooks], tuple[()]]:
        return _of_a_copy, ()  # a copied model is not watched

    def put_on(self, module: nn.Module, numbers: tuple[int, int] | None) -> tuple[int, int]:
        """Register both, under these numbers if given; returns the numbers."""
        before = module.register_forward_pre_hook(self.before, with_kwargs=True).id
        # Also when the module raises, so that no call of the model is left open.
        after = module.register_forward_hook(self.after, with_kwargs=True, always_call=True).id
        if numbers is None:
            return before, after
        # Torch gives each hook a number, which is a constant of compiled code: with other numbers, each layer would be
        # compiled anew (torch 2.13, run).
        for hooks in _all_before(module):
            hooks[numbers[0]] = hooks.pop(before)
        for hooks in _all_after(module):
            hooks[numbers[1]] = hooks.pop(after)
        return numbers

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at what the module is given."""
        __tracebackhide__ = True
        if not settings.active or self.watch.is_removed:
            return
        given = arguments_of(self.names, args, kwargs)
        if is_compiling():
            self._trace_before(given)
            return
        _eager_hooks()[0](self, module, given)

    def before_eagerly(self, module: nn.Module, given: Mapping[str, Any]) -> None:
        """The same in a call that no compiler traces."""
        __tracebackhide__ = True
        run = self.watch.enter(self)
        if run is None:
            return
        self.watch.order.note(self.input_key)
        scope = self._scope_inside(run, given)
        run.stack.append(Frame(self, scope, sys.exc_info()[1]))
        self.watch.traced = scope  # for modules inside that are compiled
        found = [leaf for name, value in given.items() if name not in CACHES for leaf in leaves(name, value)]
        if run.mode is not None:
            run.mode.module_begins(self, module, given, found)
            return
        if self.number_of_ids:
            self.look_at_ids(given, run)
        output = self.watch.in_lane(self.output, run.lane)
        output.input_is_known &= _is_known(given, found)
        for name, tensor in found:
            if can_be_bad(tensor) and run.is_new(tensor):
                look(tensor, self.input, run, is_mask(name))

    def _scope_inside(self, run: Run, given: Mapping[str, Any]) -> Scope:
        is_outermost = run.outermost is self
        return scope_of(run.scope, given, is_outermost) if is_outermost or self.may_open_scope else run.scope

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Look at what the module returns; None where it has raised."""
        __tracebackhide__ = True
        if is_compiling():
            if settings.active and not self.watch.is_removed:
                self._trace_after(result)
            return
        _eager_hooks()[1](self, args, kwargs, result)

    def after_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """The same in a call that no compiler traces."""
        __tracebackhide__ = True
        run = self.watch.runs.get(threading.get_ident())
        if run is None:
            return
        frame = run.frame_of(self)
        if frame is None:  # the probes were off when it began, or a hook before ours has raised
            if run.outermost is self:
                self.watch.leave(run)
            return
        failed = sys.exc_info()[1] is not frame.handled
        try:
            if not failed and run.mode is None and not self.watch.is_removed:
                self._look_at_result(run, args, kwargs, result)
        finally:
            self.watch.order.note(self.output_key)
            run.stack.pop()
            self.watch.traced = run.scope
            if run.outermost is self:
                self.watch.leave(run)
        if run.outermost is self and not failed and not self.watch.is_removed:
            self.watch.end_call()

    def _look_at_result(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        __tracebackhide__ = True
        own: dict[int, str] | None = None
        for name, tensor in leaves("", result):
            if not can_be_bad(tensor):
                continue
            if not run.is_new(tensor):
                if self.writes_are_counted:
                    continue
                if own is None:  # its arguments, which it may have written without torch's knowledge
                    given = arguments_of(self.names, args, kwargs)
                    own = {id(leaf): at for at, value in given.items() for at, leaf in leaves(at, value)}
                if id(tensor) not in own:
                    continue
                name = own[id(tensor)]
            look(tensor, self.output, run, is_mask(name))

    def look_at_ids(self, given: Mapping[str, Any], run: Run) -> None:
        """Look at the ids of an embedding before it fails on them, and send what was seen while the device is alive."""
        __tracebackhide__ = True
        ids = _ids_in(given)
        if ids is None or self.ids is None or self.positions is None:
            return
        bounds, batch = (0, self.number_of_ids, None), run.scope.batch
        place, positions = self.watch.in_lane(self.ids, run.lane), self.watch.in_lane(self.positions, run.lane)
        mechanism = dispatch.route_of(ids.device).mechanism
        if mechanism is None:
            return
        if dispatch.is_clean_at_a_glance(predicates.out_of_bounds, ids, bounds):
            delivery.next_position()
            return
        if ids.device.type == "cpu":
            place.bad_ids = _outside(ids, self.number_of_ids)
        place.rows_are_batch &= batch is not None and batch.shape[0] == ids.shape[0]
        error = None
        if ids.ndim > 1 and ids.device.type != "cpu":
            by_position = ids.flatten(1).t()
            error = dispatch.probe(predicates.out_of_bounds, by_position, bounds, positions.site, name="indices")
        if error is None:
            error = dispatch.probe(predicates.out_of_bounds, ids, bounds, place.site, name="indices")
        if error is None and mechanism is Mechanism.DEFERRED:
            error = delivery.send()
        if error is not None:
            raise error

    # In compiled code: no host, no memory of tensors, all places by their sites.

    def _trace_before(self, given: Mapping[str, Any]) -> None:
        self.outer_traced = self.watch.traced
        if self.may_open_scope:
            self.watch.traced = scope_of(self.outer_traced, given, self.is_root)
        places.note_traced(self.watch.number, self.input_key, True)
        if not is_seen_whole(given):
            places.note_unknown_input(self.watch.number, self.output_key)
        if self.number_of_ids and self.ids is not None and self.positions is not None:
            ids = _ids_in(given)
            if ids is not None:
                bounds = (0, self.number_of_ids, None)
                dispatch.probe(predicates.out_of_bounds, ids, bounds, self.ids.site, name="indices")
                if ids.ndim > 1:
                    by_position = ids.flatten(1).t()
                    dispatch.probe(predicates.out_of_bounds, by_position, bounds, self.positions.site, name="indices")
        for name, value in given.items():
            if name not in CACHES:
                for leaf in leaves(name, value):
                    self._trace_look(leaf, self.input, self.input_key)

    def _trace_after(self, result: object) -> None:
        for leaf in leaves("", result):
            self._trace_look(leaf, self.output, self.output_key)
        places.note_traced(self.watch.number, self.output_key, True)
        self.watch.traced = self.outer_traced
        self.outer_traced = NOTHING_KNOWN

    def _trace_look(self, leaf: Leaf, place: Place, key: str) -> None:
        name, tensor = leaf
        if can_be_bad(tensor):
            rows_are_batch, where, is_scores = layout_of(tensor, self.watch.traced)
            places.note_traced(self.watch.number, key, rows_are_batch)
            trace_not_finite(tensor, is_mask(name) or is_scores, place.site, where)


@functools.cache
def _eager_hooks() -> tuple[Callable[..., None], Callable[..., None]]:
    """Out of reach of the compiler, which calls these where it has skipped the hooks of a module that it compiles.

    It does so if there was nothing in them to compile at first, with the probes off (torch 2.13, run).
    """
    disable: Any = torch.compiler.disable
    return disable(Hooks.before_eagerly), disable(Hooks.after_eagerly)


# What hooks belong to that were copied with their module.
_NO_WATCH: Any = types.SimpleNamespace(is_removed=True, runs={})


def _of_a_copy() -> Hooks:
    hooks = Hooks.__new__(Hooks)
    hooks.watch = _NO_WATCH
    return hooks


def take_off(module: nn.Module, numbers: tuple[int, int]) -> None:
    """Take the hooks of these numbers off."""
    for hooks in _all_before(module):
        hooks.pop(numbers[0], None)
    for hooks in _all_after(module):
        hooks.pop(numbers[1], None)


def _all_before(module: nn.Module) -> list[dict[int, Any]]:
    return [module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs]


def _all_after(module: nn.Module) -> list[dict[int, Any]]:
    return [module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called]


def look(tensor: Tensor, place: Place, run: Run, allow_neginf: bool) -> None:
    """Probe a tensor that lies in the batch of the module that runs."""
    __tracebackhide__ = True
    if dispatch.is_clean_at_a_glance(not_finite, tensor, (False,)):
        delivery.next_position()
        return
    mechanism = dispatch.route_of(tensor.device).mechanism
    if mechanism is None:
        return
    # Of a tensor that wraps another one the probe sees what is inside, which may have another shape.
    rows_are_batch, where, is_scores = False, None, False
    if type(tensor) is Tensor:
        rows_are_batch, where, is_scores = layout_of(tensor, run.scope_on(tensor.device))
    place = run.outermost.watch.in_lane(place, run.lane)
    place.rows_are_batch &= rows_are_batch
    if where is not None and mechanism is Mechanism.DEFERRED:
        # One kernel, where a probe's own mask takes two or four: it makes a number a tensor each time.
        tensor, where = torch.where(where, tensor.detach(), run.zero_like(tensor)), None
    error = dispatch.probe(not_finite, tensor, (allow_neginf or is_scores,), place.site, where)
    if error is not None:
        raise error


def can_be_bad(tensor: Tensor) -> bool:
    """Whether it holds numbers that can be NaN or Inf, and a probe can read it."""
    has_numbers = tensor.is_floating_point() or tensor.is_complex()
    return has_numbers and (tensor.layout is torch.strided or tensor.is_nested) and not tensor.is_quantized


def _is_known(given: Mapping[str, Any], found: list[Leaf]) -> bool:
    """Whether all that a module is given is looked at: not inside an unknown object, and not -Inf in a mask."""
    if not is_seen_whole(given):
        return False
    for name, tensor in found:
        if not can_be_bad(tensor):
            if tensor.is_quantized or tensor.is_floating_point() or tensor.is_complex():
                return False
        elif is_mask(name):
            return False
    return True


def _number_of_ids(module: nn.Module) -> int:
    """How many ids an embedding has; 0 for any other module."""
    number, width = getattr(module, "num_embeddings", None), getattr(module, "embedding_dim", None)
    return number if isinstance(number, int) and isinstance(width, int) else 0


def _has_own_forward(module: nn.Module) -> bool:
    """Whether it is an embedding that may use its argument for something else, as Bart's positions do for its shape."""
    own = type(module).forward not in (nn.Embedding.forward, nn.EmbeddingBag.forward)
    return own and isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def _ids_in(given: Mapping[str, Any]) -> Tensor | None:
    for value in given.values():
        if isinstance(value, Tensor):
            is_integer = not (value.is_floating_point() or value.is_complex()) and value.dtype is not torch.bool
            return value if is_integer and value.ndim and value.numel() else None
    return None


def _outside(ids: Tensor, number: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The first bad ids on the CPU, each with its index."""
    bad = ((ids < 0) | (ids >= number)).nonzero()[:IDS_LOOKED_UP].tolist()
    return tuple((int(ids[tuple(index)]), tuple(index)) for index in bad)
