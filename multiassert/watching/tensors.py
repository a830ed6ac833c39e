"""The tensors in what a module is given and in what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

# What is kept between calls was looked at when it was made, and may have slots that nobody has written yet.
CACHES = frozenset(("past_key_values", "past_key_value", "cache", "cache_params", "layer_past", "mems"))
PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
# A tensor, and the name of the argument or field it came in. (A NamedTuple takes torch.compile long to trace.)
Leaf = tuple[str, Tensor]


def is_mask(name: str) -> bool:
    """Whether an argument of that name is added to attention scores."""
    return "mask" in name or "bias" in name or "alibi" in name


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the positional arguments of a module's forward."""
    return tuple(p.name for p in _parameters(module) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def may_be_given(module: nn.Module, names: frozenset[str]) -> bool:
    """Whether a module's forward takes an argument of one of these names."""
    return any(p.name in names or p.kind is p.VAR_KEYWORD for p in _parameters(module))


def _parameters(module: nn.Module) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return []


def arguments_of(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name; positional ones past the known names by their number."""
    given = {names[i] if i < len(names) else str(i): value for i, value in enumerate(args)}
    given.update(kwargs)
    return given


def leaves(name: str, value: object) -> list[Leaf]:
    """Every tensor in a tuple, list or dict (transformers' outputs are dicts), however deep; others have none."""
    found: list[Leaf] = []
    if isinstance(value, Tensor):
        found.append((name, value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in CACHES:
                found += leaves(str(key), item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            found += leaves(name, item)
    return found


def is_seen_whole(given: Mapping[str, Any]) -> bool:
    """Whether `leaves` of these arguments are all that the module was given, apart from plain values."""
    for name, value in given.items():
        if not isinstance(value, PLAIN) and (name in CACHES or not _is_looked_into(value)):
            return False
    return True


def _is_looked_into(value: object) -> bool:
    if isinstance(value, Mapping):
        return is_seen_whole({str(key): item for key, item in value.items()})
    if isinstance(value, (tuple, list)):
        return all(_is_looked_into(item) for item in value)
    return isinstance(value, (Tensor, *PLAIN))
