"""A rule, and a place where it is not kept."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator

from multiassert.audit.module import Module


@dataclasses.dataclass(frozen=True)
class Found:
    """What a rule found in the tree of a file."""

    node: ast.expr | ast.stmt
    instead: str
    """The call to use there."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Something that keeps code from being covered by probes."""

    name: str
    title: str
    why: str
    """Why it matters, with the platforms."""
    instead: str
    """What to use, in general."""
    level: str
    """error where a check does nothing or data is wrong, else warning: the words of SARIF."""
    words: tuple[str, ...] = ()
    """A file without any of them need not be looked at."""
    find: Callable[[Module], Iterator[Found]] | None = None
    """None where it is not the tree that is looked at."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One place in a file."""

    rule: str
    path: str
    line: int
    column: int
    """The first character is 1."""
    end_line: int
    end_column: int
    source: str
    """The source line; empty for a file that could not be read."""
    why: str
    instead: str

    @property
    def place(self) -> str:
        """Where it is, as editors take it."""
        return f"{self.path}:{self.line}:{self.column}"
