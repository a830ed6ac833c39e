"""A violation: what is known of it, the line that is logged, the error that is raised."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence

import torch

from multiassert.sites import Site

# A line stays readable, and below the limit of most log collectors, with at most this many rows in it.
ROWS_IN_LINE = 32
VIOLATIONS_IN_ERROR = 16

# Plain data holds more, but not so much that a line of JSON is no line any more.
RUNS_IN_PLAIN_DATA = 256  # of rows, and as many names
LONGEST_TEXT = 1000  # of a tag or a name


@dataclasses.dataclass(frozen=True)
class Violation:
    """A site seen bad. Rows are indices of dimension 0; a 0-dimensional tensor has none."""

    kind: str  # nan, inf, low, high, misaligned, range or cond
    message: str
    site: Site
    platform: str
    device: torch.device
    rank: int | None  # of torch.distributed, or the environment's RANK
    node: str | None  # the machine's name, where there is a rank
    step: int | tuple[int, int]  # calls of step() before it; first and last, where a snapshot covers several
    tag: object
    rows: tuple[int | range, ...]  # a range where several rows share what the device remembers
    row_names: tuple[object, ...] | None  # the caller's names for these rows, from step(rows=...)
    value: int | float  # the offending value, or the worst one; for misaligned, its distance from the page's start
    bound: int | float | None  # the bound it broke; None where there is none, or where it is a tensor
    count: int | None  # how many values broke it; None where the mechanism does not count (only the fused kernel does)
    index: int | None  # the first of them, in the flattened tensor; None likewise
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the tensor that the site saw last in this step; -1 is a size not known
    order: int  # among the sites hit in the same step on this rank: 0 came first in the program
    headline: str = dataclasses.field(repr=False)  # what went wrong, in words; the message follows it
    sequence: int = dataclasses.field(
        default=0, repr=False
    )  # by when the host issued the probe, over the whole process
    position: int | None = dataclasses.field(
        default=None, repr=False
    )  # how many deferred probes were called before it in its step; None where the host does not know (compiled code)

    @property
    def last_step(self) -> int:
        """The step, or the last of those that the record covers."""
        return self.step if isinstance(self.step, int) else self.step[1]

    def with_names(self, tag: object, row_names: tuple[object, ...] | None) -> Violation:
        """The same record with other words for the step and its rows."""
        return dataclasses.replace(self, tag=tag, row_names=row_names)

    @property
    def text(self) -> str:
        """What went wrong and the message, in the words that SGLang's tests look for."""
        return f"{self.headline} {self.message}".rstrip()

    @property
    def log_line(self) -> str:
        """The violation as one line of key=value, always all keys, always in this order; text is JSON."""
        step = self.step if isinstance(self.step, int) else f"{self.step[0]}..{self.step[1]}"
        fields = {
            "kind": self.kind,
            "platform": self.platform,
            "device": self.device,
            "rank": _or_dash(self.rank),
            "node": "-" if self.node is None else json.dumps(self.node),
            "step": step,
            "tag": "-" if self.tag is None else json.dumps(str(self.tag)),
            "order": self.order,
            "rows": _row_list(self.rows),
            "row_names": "-" if self.row_names is None else json.dumps([str(n) for n in self.row_names[:ROWS_IN_LINE]]),
            "value": self.value,
            "bound": _or_dash(self.bound),
            "count": _or_dash(self.count),
            "index": _or_dash(self.index),
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": _shape_text(self.shape),
            "site": json.dumps(f"{self.site.file}:{self.site.line}:{self.site.function}"),
            "message": json.dumps(self.message),
        }
        return "multiassert violation " + " ".join(f"{key}={value}" for key, value in fields.items())

    def to_dict(self) -> dict[str, object]:
        """The record as plain data, always with all keys, for strict JSON: a NaN or an Inf is the text "nan" or "inf".

        `rows` are pairs of a first and a last row, of at most RUNS_IN_PLAIN_DATA runs; `row_count` counts all rows. The
        tag and the names of rows are text. Where a snapshot covers several steps, they are `first_step` to `step`.
        """
        runs = _runs(self.rows)
        names = self.row_names
        return {
            "kind": self.kind,
            "message": self.message,
            "text": self.text,
            "site": _place(self.site),
            "platform": self.platform,
            "device": str(self.device),
            "rank": self.rank,
            "node": self.node,
            "first_step": self.step if isinstance(self.step, int) else self.step[0],
            "step": self.last_step,
            "tag": None if self.tag is None else _short(self.tag),
            "order": self.order,
            "sequence": self.sequence,
            "position": self.position,
            "rows": [[run.start, run.stop - 1] for run in runs[:RUNS_IN_PLAIN_DATA]],
            "row_count": sum(map(len, runs)),
            "row_names": None if names is None else [_short(name) for name in names[:RUNS_IN_PLAIN_DATA]],
            "value": _plain_number(self.value),
            "bound": _plain_number(self.bound),
            "count": self.count,
            "index": self.index,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
        }

    @property
    def description(self) -> str:
        """The violation in a sentence for a person."""
        step = f"step {self.step}" if isinstance(self.step, int) else f"steps {self.step[0]} to {self.step[1]}"
        rank = "" if self.rank is None else f", rank {self.rank} on node {self.node}"
        where = f"{self.device}, {step}{rank}"
        rows = f", rows {_row_list(self.rows)}" if self.rows else ""
        names = "" if self.row_names is None else f" ({', '.join(str(n) for n in self.row_names[:ROWS_IN_LINE])})"
        what = f"{_shape_text(self.shape)} {str(self.dtype).removeprefix('torch.')}"
        counted = "" if self.count is None else f" ({self.count} of them, the first at {self.index})"
        return f"{self.text}\n    value {self.value}{counted}{rows}{names} of {what}, on {where}\n    at {self.site}"


def suppressed(site: Site | None, kind: str | None, count: int) -> dict[str, object]:
    """What is told of violations that were only counted, as plain data; no site where they are of too many."""
    message, place = (None, None) if site is None else (site.message, _place(site))
    return {"count": count, "kind": kind, "message": message, "site": place}


def _place(site: Site) -> dict[str, object]:
    return {"file": site.file, "line": site.line, "function": site.function}


def _shape_text(shape: tuple[int, ...]) -> str:
    return "x".join("?" if size < 0 else str(size) for size in shape) or "scalar"


def _or_dash(value: object) -> object:
    return "-" if value is None else value


def _row_list(rows: Sequence[int | range]) -> str:
    shown = ",".join(
        f"{row.start}..{row.stop - 1}" if isinstance(row, range) else str(row) for row in rows[:ROWS_IN_LINE]
    )
    more = len(rows) - ROWS_IN_LINE
    return (shown or "-") + (f",+{more}" if more > 0 else "")


def _runs(rows: Sequence[int | range]) -> list[range]:
    """The same rows, with neighbours in one range."""
    runs: list[range] = []
    for row in rows:
        run = row if isinstance(row, range) else range(row, row + 1)
        if runs and runs[-1].stop == run.start:
            runs[-1] = range(runs[-1].start, run.stop)
        else:
            runs.append(run)
    return runs


def _plain_number(value: int | float | None) -> int | float | str | None:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: object) -> str:
    try:
        return str(value)[:LONGEST_TEXT]
    except Exception as error:  # of the caller's own object
        return f"(its text raised {type(error).__name__})"


class AsyncAssertionError(AssertionError, RuntimeError):
    """Probes saw violations; `violations` lists them, the first cause first.

    `left_out` counts those that came after so many others, before anybody looked, that they were not kept. The process
    and the device stay usable. It is both an AssertionError and, as torch's own assert, a RuntimeError.
    """

    def __init__(self, violations: Iterable[Violation], left_out: int = 0) -> None:
        self.violations: tuple[Violation, ...] = tuple(violations)
        self.left_out = left_out
        super().__init__(self.violations)

    def __str__(self) -> str:
        shown = [violation.description for violation in self.violations[:VIOLATIONS_IN_ERROR]]
        more = len(self.violations) - len(shown)
        if more > 0:
            shown.append(f"and {more} more in .violations")
        if self.left_out:
            shown.append(f"and {self.left_out} that came later, and were not kept")
        if len(self.violations) > 1:
            shown.append(_certainty(self.violations))
        return "\n".join(shown)


def _certainty(violations: Sequence[Violation]) -> str:
    """What is known of the order of several violations, the first of them first."""
    first = violations[0]
    ranks = list(dict.fromkeys(violation.rank for violation in violations))
    firsts = [next(v for v in violations if v.rank == rank) for rank in ranks]
    rivals = [v for v in firsts if v.last_step == first.last_step and (v.position or 0) == (first.position or 0)]
    told = "The first is the first cause: the probe that came first in the program of the earliest step"
    if len(ranks) == 1:
        return f"{told}. The others may follow from it."
    hit = f"{len(ranks)} ranks were hit: {_list_of(ranks)}."
    if len(rivals) > 1:
        tied = _list_of(rival.rank for rival in rivals)
        return f"{hit} Ranks {tied} in the same step at the same place of the program: which was first is not known."
    return f"{hit} {told}, of all ranks. The others may follow from it."


def _list_of(ranks: Iterable[int | None]) -> str:
    return ", ".join(map(str, sorted(rank for rank in ranks if rank is not None)))


# As users import it: tracebacks and pytest's summary are shorter by a name that tells them nothing.
AsyncAssertionError.__module__ = "multiassert"
