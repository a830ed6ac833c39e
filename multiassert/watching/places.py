"""Places: the two ends of every module, each with its site, and their order in the program."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from multiassert import sites
from multiassert.predicates import at_trace_time
from multiassert.sites import Site
from multiassert.watching.tensors import is_mask

INPUT, OUTPUT, IDS, POSITIONS, OPERATOR = "input", "output", "ids", "positions of ids", "operator"
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # of a layer, as a part of a module's name


@dataclasses.dataclass(eq=False)
class Place:
    """One end of a module, or an operator in it."""

    module: str  # its name in the model, "" for the model itself
    end: str
    site: Site
    argument: str = ""  # of an operator that was given something bad: what that was
    rows_are_batch: bool = True  # until a tensor was seen there of which that is not certain
    input_is_known: bool = True  # of an output: until the module was given something that nobody looked at
    lane: int = 0  # which of the calls that run at the same time; each has places of its own
    # What the host saw itself, on the CPU: id, and where it was in its tensor. The latest call counts.
    bad_ids: tuple[tuple[int, tuple[int, ...]], ...] = ()


def made_for(name: str, path: str, end: str, module: nn.Module) -> Place:
    """The place at one end of a module; its record points to where the module's forward is written."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    file, line = (code.co_filename, code.co_firstlineno) if code is not None else ("?", 0)
    message = f"{_joined(name, path, module)}: {end}"
    site = sites.register(message, file, line, f"{type(module).__name__}.forward", is_generated=True)
    return Place(path, end, site)


def in_lane(place: Place, lane: int) -> Place:
    """The same place for a call that runs while others do, on another thread: it must not hide what those tell."""
    site = place.site
    site = sites.register(site.message, site.file, site.line, site.function, is_generated=True)
    return dataclasses.replace(place, site=site, lane=lane)


def _joined(name: str, path: str, module: nn.Module) -> str:
    shown = path or type(module).__name__
    return f"{name}: {shown}" if name else shown


# ---------------------------------------------------------------------------------------------------------------------
# The order of the program. The host knows it for eager calls by when it issued them, but not for compiled code, and a
# module's children are listed in the order in which they were made. So the first time that a place is passed (in
# compiled code, when it is traced) is noted, and layers go by their numbers. What is noted is the same for all layers,
# so that they can share compiled code.


class Order:
    """When each place was passed first."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}

    def note(self, key: str) -> None:
        """Note that a place, by the name that it shares with the same place of other layers, is passed now."""
        self._first.setdefault(key, len(self._first))

    def was_passed(self, place: Place) -> bool:
        """Whether it was passed at all, or the same place of another layer."""
        return key_of(place.module, place.end) in self._first

    def rank(self, place: Place) -> tuple[tuple[int, int], ...]:
        """By what places are sorted into the order of the program."""
        ranks = []
        parts = place.module.split(".") if place.module else []
        for index, part in enumerate(parts):
            prefix = key_of(".".join(parts[: index + 1]), "")
            first = min(
                (rank for key, rank in self._first.items() if _is_inside(key, prefix)), default=len(self._first)
            )
            # A module's input comes before all that is in it, and its output after that.
            ranks.append((1, int(part)) if part.isdigit() else (1, first))
        ranks.append((2, 0) if place.end == OUTPUT else (0, 0))
        return tuple(ranks)


def key_of(module: str, end: str) -> str:
    """The name that a place shares with the same place of other layers."""
    return f"{NUMBER.sub('*', module)}:{end}"


def _is_inside(key: str, prefix: str) -> bool:
    module, inside = key.rpartition(":")[0], prefix.rpartition(":")[0]
    return module == inside or module.startswith(inside + ".")


class Traced(NamedTuple):
    """What is noted of the places of a model while it is traced, by the name that a place shares with other layers."""

    order: Order
    not_batch: set[str]  # dimension 0 is not certainly the batch's there
    of_unknown_input: set[str]


_traced: dict[int, Traced] = {}


def remember(number: int, traced: Traced) -> None:
    """Let traced code find what it notes in, by a number, which can be a constant of it."""
    _traced[number] = traced


@at_trace_time
def note_traced(number: int, key: str, rows_are_batch: bool) -> None:
    """Note a place that is being traced, and whether its rows are the batch's."""
    if number in _traced:
        traced = _traced[number]
        traced.order.note(key)
        if not rows_are_batch:
            traced.not_batch.add(key)


@at_trace_time
def note_unknown_input(number: int, key: str) -> None:
    """Note that the module of an output that is being traced is given something that nobody looks at."""
    if number in _traced:
        _traced[number].of_unknown_input.add(key)


def forget(number: int) -> None:
    _traced.pop(number, None)


def bad_weights(module: nn.Module) -> list[str]:
    """The names of the module's own weights and buffers that are not finite; waits for the device they are on."""
    return [name for name, is_finite in _weights(module) if is_finite is False]


def weights_are_known(module: nn.Module) -> bool:
    """Whether `bad_weights` sees all of a module's own weights: not a tensor that is no parameter and no buffer."""
    others = any(isinstance(value, (torch.Tensor, torch.ScriptObject)) for value in vars(module).values())
    return not others and all(is_finite is not None for _, is_finite in _weights(module))


def _weights(module: nn.Module) -> Iterator[tuple[str, bool | None]]:
    """Each weight by name, and whether it is finite; None where that cannot be told."""
    for name, weight in module.named_parameters(recurse=False):
        yield name, _is_finite(weight, allow_neginf=False)
    for name, buffer in module.named_buffers(recurse=False):
        yield name, _is_finite(buffer, allow_neginf=is_mask(name))


def _is_finite(weight: torch.Tensor, allow_neginf: bool) -> bool | None:
    if weight.is_floating_point() and weight.itemsize == 1:
        if "float4" in str(weight.dtype):
            return True  # two numbers in a byte, and none of them is a NaN or an Inf
        weight = weight.float()  # torch has no isfinite for fp8 (torch 2.13, run)
    try:
        fine = weight.isfinite()
        return bool((fine | weight.isneginf() if allow_neginf else fine).all())
    except (RuntimeError, NotImplementedError, TypeError):  # quantized, or of a library that has no such operator
        return None
