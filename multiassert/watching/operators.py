"""The first faulty operator: a dispatch mode over a call of the model, which looks at what each operator returns.

Told is the operator, the module it runs in, and the line that called it. Not looked at: views, which hold nothing new,
and memory that nobody has written yet. An operator that is given what stands for "not this one" (-Inf, or a number
below any score) may return -Inf, and so may all that follows up to a softmax or an exp; a NaN is never excused.
Logarithms may return -Inf.

Indices are looked at before the operator fails on them. Where Python's indexing wraps (x[i], x[i] = y, take), an index
from -size on is fine; where torch itself raises for one below 0 (embedding, gather, scatter, index_select, index_add,
index_copy), it is told.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from multiassert import delivery, dispatch, predicates, sites
from multiassert.backends import Mechanism
from multiassert.sites import Site
from multiassert.watching.finite import not_finite
from multiassert.watching.hooks import Hooks, Run, can_be_bad, look
from multiassert.watching.places import OPERATOR, Place
from multiassert.watching.tensors import Leaf, is_mask, leaves

if TYPE_CHECKING:
    from multiassert.watching.handle import Watch

OUR_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
# Of what we do with tensors ourselves, as a hook or as a probe in the model; not the demo, which has models.
OUR_OPERATORS = (OUR_FOLDER, os.path.dirname(__file__) + os.sep, os.path.join(OUR_FOLDER, "backends", ""))

# By the name of the operator without its overload.
UNWRITTEN = frozenset(
    f"aten.{name}"
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_")
)
WRITES_A_PART = frozenset(
    f"aten.{name}_"
    for name in (
        "index_put",
        "_index_put_impl",
        "_unsafe_index_put",
        "index_copy",
        "index_add",
        "index_fill",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "masked_fill",
        "masked_scatter",
        "put",
        "fill_diagonal",
    )
)
LOGARITHMS = frozenset(
    f"aten.{name}{end}"
    for name in (
        "log",
        "log2",
        "log10",
        "log1p",
        "logit",
        "log_softmax",
        "_log_softmax",
        "logsumexp",
        "xlogy",
        "special_xlogy",
    )
    for end in ("", "_")
)
# What comes out of these is finite also where -Inf went in.
ENDS_EXCUSE = frozenset(
    f"aten.{name}" for name in ("softmax", "_softmax", "_safe_softmax", "exp", "exp_", "sigmoid", "sigmoid_", "tanh")
)
ATTENTION = "aten._scaled_dot_product"
CONSTANTS = frozenset(("aten.lift", "aten.lift_fresh", "aten.lift_fresh_copy"))
APPLIES_A_MASK = frozenset(
    f"aten.{name}{end}" for name in ("where", "masked_fill", "add", "maximum", "minimum") for end in ("", "_")
)
EXCUSED_BELOW = -1e4  # what masks are made of: -10000, -1e9, the least number of a dtype, -Inf

# The position of the indices, of the dimension they go along, and whether they may count from the end.
INDEXED = {
    "aten.index_select": (2, 1, False),
    "aten.gather": (2, 1, False),
    **{
        f"aten.{name}{end}": (2, 1, False)
        for name in ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy")
        for end in ("", "_")
    },
    "aten.index_fill": (2, 1, True),
    "aten.index_fill_": (2, 1, True),
}
INDEXED_IN_LISTS = frozenset(
    ("aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_", "aten._unsafe_index")
)


class OperatorMode(TorchDispatchMode):
    """Looks at every operator of one call of the model."""

    def __init__(self, watch: Watch, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_at_work = False
        self._watch = watch
        self._run = run
        self._excused: dict[int, StorageWeakRef] = {}
        self._may_excuse: dict[int, StorageWeakRef] = {}  # constants on a device, which only a wait would tell
        self._unwritten: dict[int, StorageWeakRef] = {}
        self._weights = {id(weight): name for name, weight in watch.modules[""].named_parameters()}

    def take_off(self) -> None:
        """End it also where a mode of somebody else has begun inside it and goes on."""
        above = []
        if self not in _get_current_dispatch_mode_stack():
            return
        while _get_current_dispatch_mode_stack()[-1] is not self:
            above.append(_pop_mode())
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for mode in reversed(above):
            _push_mode(mode)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Look at the indices, run the operator, look at what it returns."""
        __tracebackhide__ = True
        kwargs = kwargs or {}
        if self._watch.is_removed or _is_called_by_us(sys._getframe(1)):
            return operator(*args, **kwargs)
        self.is_at_work = True
        try:
            return self._run_and_look(operator, args, kwargs)
        finally:
            self.is_at_work = False

    def _run_and_look(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        __tracebackhide__ = True
        name = str(operator.overloadpacket)
        given = leaves("", [*args, *kwargs.values()])
        for indices, low, high in _indices(name, args):
            self._look_at_indices(name, indices, low, high)
        written = _written(operator, args, kwargs)
        if name in CONSTANTS:
            self._note_constants(given)
        for _, tensor in given:
            if can_be_bad(tensor) and id(tensor) not in written and not self._is_known(tensor):
                if not tensor.ndim:
                    self._note_constants([("", tensor)])
                self._look(name, tensor, self._weights.get(id(tensor), "an argument that no operator here made"))
        result = operator(*args, **kwargs)
        self._after(name, operator, args, kwargs, given, leaves("", result))
        return result

    def _note_constants(self, given: list[Leaf]) -> None:
        """What a program writes as a tensor may stand for "not this one", as a number may."""
        for _, tensor in given:
            if not tensor.is_floating_point() or tensor.itemsize == 1:
                continue
            if tensor.device.type != "cpu":
                _put(self._may_excuse, tensor)
            elif bool(((tensor <= EXCUSED_BELOW) | (tensor == math.inf)).any()):
                _put(self._excused, tensor)

    def module_begins(self, hooks: Hooks, module: nn.Module, given: Mapping[str, Any], leaves: list[Leaf]) -> None:
        """A module is called: look at its ids, and learn which of its arguments are masks."""
        __tracebackhide__ = True
        batch = self._run.scope.batch
        is_flat_inside = next(module.children(), None) is None
        takes_batch = batch is not None and batch.ndim > 1 and any(t.shape[:2] == batch.shape[:2] for _, t in leaves)
        self._run.stack[-1].flattens = is_flat_inside and takes_batch
        for name, tensor in leaves:
            if is_mask(name):
                _put(self._excused, tensor)
        if hooks.number_of_ids:
            hooks.look_at_ids(given, self._run)

    def _after(
        self,
        name: str,
        operator: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: list[Leaf],
        results: list[Leaf],
    ) -> None:
        __tracebackhide__ = True
        if name in UNWRITTEN:
            for _, tensor in results:
                _put(self._unwritten, tensor)
            return
        if operator.is_view:
            for _, tensor in results:
                self._run.is_new(tensor)  # its values were looked at where they were made
            return
        is_excused = name in LOGARITHMS or _has_scalar_of_masks([*args, *kwargs.values()])
        if name not in ENDS_EXCUSE and not name.startswith(ATTENTION):
            is_excused = is_excused or any(_has(self._excused, tensor) for _, tensor in given)
        if name in APPLIES_A_MASK:
            is_excused = is_excused or any(_has(self._may_excuse, tensor) for _, tensor in given)
        # Attention returns sums of exponentials beside its result, -Inf for a query that looks at nothing.
        for _, tensor in results[:1] if name.startswith(ATTENTION) else results:
            if name in WRITES_A_PART and _has(self._unwritten, tensor):
                continue
            if is_excused:
                _put(self._excused, tensor)
            elif name in ENDS_EXCUSE:
                _take(self._excused, tensor)
            self._run.is_new(tensor)
            self._look(name, tensor)

    def _is_known(self, tensor: Tensor) -> bool:
        return not self._run.is_new(tensor) or _has(self._unwritten, tensor)

    def _look(self, name: str, tensor: Tensor, argument: str = "") -> None:
        __tracebackhide__ = True
        if not can_be_bad(tensor):
            return
        if dispatch.is_clean_at_a_glance(not_finite, tensor, (False,)):
            delivery.next_position()
            return
        may_be_neginf = _has(self._excused, tensor) or _has(self._may_excuse, tensor)
        look(self._in_batch(tensor), self._place(name, argument), self._run, may_be_neginf)

    def _in_batch(self, tensor: Tensor) -> Tensor:
        """A linear layer makes [batch, positions, n] one list of rows, and its result what it was: so do we."""
        batch = self._run.scope.batch
        if not self._run.stack or not self._run.stack[-1].flattens:
            return tensor
        if batch is not None and tensor.ndim == 2 and tensor.shape[0] == batch.shape[:2].numel():
            return tensor.view(*batch.shape[:2], tensor.shape[1])
        return tensor

    def _look_at_indices(self, name: str, indices: Tensor, low: int, high: int) -> None:
        __tracebackhide__ = True
        mechanism = dispatch.route_of(indices.device).mechanism
        if mechanism is None:
            return
        place = self._place(name, "indices")
        place.rows_are_batch = False
        error = dispatch.probe(predicates.out_of_bounds, indices, (low, high, None), place.site, name="indices")
        if error is None and mechanism is Mechanism.DEFERRED:
            error = delivery.send()
        if error is not None:
            raise error

    def _place(self, name: str, argument: str) -> Place:
        """The place of an operator: where it is called, in the module that runs."""
        frame = sys._getframe(1)
        while frame.f_back is not None and not _is_users(frame.f_code.co_filename):
            frame = frame.f_back
        file, line, path = frame.f_code.co_filename, frame.f_lineno, self._run.path
        key = path, name, file, line, argument, self._run.lane
        place = self._watch.places_of_operators.get(key)
        if place is None:
            text = f"{path or type(self._watch.modules['']).__name__}: {name} at {os.path.basename(file)}:{line}"
            place = Place(path, OPERATOR, Site(text, file, line, frame.f_code.co_name), argument, lane=self._run.lane)
            self._watch.places_of_operators[key] = place
            self._watch.places[place.site] = place
        return place


def _is_called_by_us(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.startswith(TORCH_FOLDER):
        frame = frame.f_back
    return frame is not None and os.path.dirname(frame.f_code.co_filename) + os.sep in OUR_OPERATORS


def _is_users(file: str) -> bool:
    return sites.is_callers(file) and not file.startswith(OUR_FOLDER)


def _indices(name: str, args: Sequence[Any]) -> Iterator[tuple[Tensor, int, int]]:
    """The indices of an operator, each with its bounds."""
    if name in INDEXED:
        at, along, wraps = INDEXED[name]
        if len(args) > at and isinstance(args[at], Tensor):
            size = args[0].shape[args[along]] if args[0].ndim else 1
            yield args[at], -size if wraps else 0, size
    elif name in ("aten.embedding", "aten.embedding_bag", "aten._embedding_bag"):
        yield args[1], 0, args[0].shape[0]
    elif name == "aten.take":
        yield args[1], -args[0].numel(), args[0].numel()
    elif name in INDEXED_IN_LISTS:
        dimension = 0
        for index in args[1]:
            if isinstance(index, Tensor) and index.dtype not in (torch.bool, torch.uint8):
                size = args[0].shape[dimension]
                yield index, -size, size
            dimension += index.ndim if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) else 1


def _written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """The arguments that it writes: what was in them before does not matter."""
    found = set()
    for number, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found |= {id(tensor) for _, tensor in leaves("", value)}
    return found


def _has_scalar_of_masks(values: Sequence[Any]) -> bool:
    return any(
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and (value <= EXCUSED_BELOW or value == math.inf)
        for value in values
    )


# Sets of storages: a tensor and its views have one in common. A weak reference keeps its number from being given anew.


def _put(storages: dict[int, StorageWeakRef], tensor: Tensor) -> None:
    reference = StorageWeakRef(tensor.untyped_storage())
    storages[reference.cdata] = reference


def _has(storages: dict[int, StorageWeakRef], tensor: Tensor) -> bool:
    return bool(storages) and tensor.layout is torch.strided and tensor.untyped_storage()._cdata in storages


def _take(storages: dict[int, StorageWeakRef], tensor: Tensor) -> None:
    storages.pop(tensor.untyped_storage()._cdata, None)
