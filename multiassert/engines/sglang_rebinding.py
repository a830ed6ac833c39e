"""Functions put in place of a module's own: in the module, and wherever they were imported by name; now or later.

What is not reached: a binding that is no module's attribute, such as a default argument or a `functools.partial`.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any


def value_at(module: ModuleType, path: str) -> Any:
    """What a dotted path in a module leads to; None where there is no such thing."""
    holder, name = _holder(module, path)
    return getattr(holder, name, None)


def rebind(module: ModuleType, values: Mapping[str, Any]) -> None:
    """Put values at dotted paths of a module, and wherever what was there has been imported by name."""
    new_by_old: dict[int, tuple[Any, Any]] = {}
    for path, new in values.items():
        holder, name = _holder(module, path)
        old = getattr(holder, name)
        new_by_old[id(old)] = old, new
        setattr(holder, name, new)
    for other in list(sys.modules.values()):
        if isinstance(other, ModuleType) and not other.__name__.startswith("multiassert."):  # ours keep their own
            for key, value in list(vars(other).items()):
                if id(value) in new_by_old:
                    setattr(other, key, new_by_old[id(value)][1])


def _holder(module: ModuleType, path: str) -> tuple[Any, str]:
    """The module, or the class in it, and the name there."""
    *classes, name = path.split(".")
    holder: Any = module
    for part in classes:
        holder = getattr(holder, part, None)
    return holder, name


def surrounded(function: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `hook` with `function` and its arguments."""

    @functools.wraps(function)
    def hooked(*arguments: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        return hook(function, *arguments, **named)

    return hooked


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls `found` with each of the named modules once it is imported; at once where it has been."""

    def __init__(self, names: Sequence[str], found: Callable[[ModuleType], None]) -> None:
        self._names = names
        self._found = found

    def install(self) -> None:
        """Begin."""
        sys.meta_path.insert(0, self)
        for name in self._names:
            if name in sys.modules:
                self._found(sys.modules[name])

    def uninstall(self) -> None:
        """End; what was found stays as it is."""
        sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders give, with a loader that calls us when the module has run."""
        if name not in self._names:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                loader: Any = spec.loader
                if hasattr(loader, "exec_module"):
                    loader.exec_module = self._then_found(loader.exec_module)
                return spec
        return None

    def _then_found(self, execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def execute_module(module: ModuleType) -> None:
            execute(module)
            self._found(module)

        return execute_module
