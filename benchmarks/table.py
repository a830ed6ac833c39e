"""What a benchmark found: tables of rows, each value with its spread."""

from __future__ import annotations

import dataclasses

import numpy
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median with its quartiles, over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: NDArray[numpy.float64]) -> Spread:
        """The spread of some values."""
        low, median, high = numpy.percentile(values, [25, 50, 75])
        return cls(float(median), float(low), float(high))

    @classmethod
    def exactly(cls, value: float) -> Spread:
        """A value that does not vary: a count."""
        return cls(value, value, value)

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.median:g}"
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclasses.dataclass
class Row:
    """One line of a table: what was measured, in words, and the values. None is a contender that cannot do it."""

    what: dict[str, str]
    values: dict[str, Spread | None]
    note: str = ""


@dataclasses.dataclass
class Table:
    """The findings of one benchmark."""

    key: str
    title: str
    explanation: str
    rows: list[Row] = dataclasses.field(default_factory=list)

    def columns(self) -> tuple[list[str], list[str]]:
        """The names of the words and of the values, in the order of their first use."""
        words = dict.fromkeys(name for row in self.rows for name in row.what)
        values = dict.fromkeys(name for row in self.rows for name in row.values)
        return list(words), list(values)
