"""Of all the places that turned bad, the first; and what can be said of it in a sentence.

A bad tensor makes all that is computed from it bad, so one cause has hundreds of places. What is told is the first
place of each call of the model, and a later one only with the rows in which no earlier one was bad. Calls that run at
the same time, on several threads, have lanes: each has places of its own, so that no call hides what is in another.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from multiassert.sites import Site
from multiassert.violation import Violation
from multiassert.watching.places import IDS, POSITIONS, Order, Place

Pair = tuple[Violation, bool]  # and whether it is to be raised
Row = int | range

LISTED = 8  # rows and ids in a line
CALLS_REMEMBERED = 4096  # of the model; longer than any snapshot is under way
ALL_ROWS: Row = -1


class Blame:
    """Condenses the violations of one watch."""

    def __init__(self, places: Mapping[Site, Place], order: Order, sentence: Callable[[Violation, Place], str]) -> None:
        self._places = places
        self._order = order
        self._sentence = sentence
        self._lanes: dict[int, _Calls] = {}

    def call_begins(self, lane: int, step: int, position: int) -> None:
        """Probes of this lane from here on are of another call of the model."""
        self._lane(lane).begins(step, position)

    def _lane(self, lane: int) -> _Calls:
        return self._lanes.setdefault(lane, _Calls())

    def condense(self, pairs: list[Pair]) -> list[Pair]:
        """The pairs without the watch's later places, in their order; those that are left are worded anew."""
        mine: dict[int, list[Pair]] = {}
        for pair in pairs:
            if pair[0].site in self._places:
                mine.setdefault(pair[0].last_step, []).append(pair)
        told: dict[int, Pair] = {}
        for step in sorted(mine):
            told.update(self._first_of(mine[step]))
        rest = (told.get(id(pair[0])) if pair[0].site in self._places else pair for pair in pairs)
        return [pair for pair in rest if pair is not None]

    def _first_of(self, pairs: Sequence[Pair]) -> dict[int, Pair]:
        """What is told of one step, by the id of the violation as it was."""
        ends = [self._places[violation.site].end for violation, _ in pairs]
        positions = {
            _of_ids(self._places[violation.site], violation): violation.rows
            for (violation, _), end in zip(pairs, ends, strict=True)
            if end == POSITIONS
        }
        pairs = [pair for pair, end in zip(pairs, ends, strict=True) if end != POSITIONS]
        is_in_order = all(violation.position is not None for violation, _ in pairs)
        if is_in_order:
            pairs = sorted(pairs, key=lambda pair: (_first_step(pair[0]), pair[0].position or 0))
        else:
            pairs = sorted(pairs, key=lambda pair: self._order.rank(self._places[pair[0].site]))
        told = {}
        of_step: dict[int, set[Row]] = {}
        before, place_before = frozenset[Row](), None
        for violation, raises in pairs:
            place = self._places[violation.site]
            if is_in_order:  # those of a probe that looks in the call itself have no position
                explained = self._lane(place.lane).explained_in(_first_step(violation), violation.position or 0)
            else:
                explained = of_step.setdefault(place.lane, set())
            if place is not place_before:
                before, place_before = frozenset(explained), place
            rows = _not_in(violation, place, before)
            if rows is None:
                continue
            explained.update(rows if place.rows_are_batch and rows else {ALL_ROWS})
            reworded = _with_rows(violation, rows)
            sentence = self._sentence(reworded, place)
            if place.end == IDS:
                sentence += _where(place, reworded, positions.get(_of_ids(place, violation), ()))
            told[id(violation)] = dataclasses.replace(reworded, message=sentence), raises
        return told


class _Calls:
    """The calls of a model that came one after the other, and the rows that are known to be bad in each."""

    def __init__(self) -> None:
        self._began: list[tuple[int, int]] = []  # by step and position in it
        self._explained: collections.OrderedDict[int, set[Row]] = collections.OrderedDict()
        self._forgotten = 0

    def begins(self, step: int, position: int) -> None:
        if self._began and (step, position) < self._began[-1]:
            self._forgotten += len(self._began) + 1
            self._began.clear()  # the process has started its steps anew
        self._began.append((step, position))
        if len(self._began) > 2 * CALLS_REMEMBERED:
            del self._began[:CALLS_REMEMBERED]
            self._forgotten += CALLS_REMEMBERED

    def explained_in(self, step: int, position: int) -> set[Row]:
        """The rows that are known to be bad in the call in which that was."""
        call = self._forgotten + bisect.bisect(self._began, (step, position))
        explained = self._explained.setdefault(call, set())
        while len(self._explained) > CALLS_REMEMBERED:
            self._explained.popitem(last=False)
        return explained


def _of_ids(place: Place, violation: Violation) -> tuple[str, int, str]:
    return place.module, place.lane, violation.kind


def _first_step(violation: Violation) -> int:
    return violation.step if isinstance(violation.step, int) else violation.step[0]


def _not_in(violation: Violation, place: Place, explained: frozenset[Row]) -> tuple[Row, ...] | None:
    """The rows that no earlier place explains; None where all are explained, or may be."""
    if ALL_ROWS in explained or (explained and not (place.rows_are_batch and violation.rows)):
        return None
    if not explained:
        return violation.rows
    rows = tuple(row for row in violation.rows if not any(_overlap(row, known) for known in explained))
    return rows or None


def _overlap(one: Row, other: Row) -> bool:
    one = range(one, one + 1) if isinstance(one, int) else one
    other = range(other, other + 1) if isinstance(other, int) else other
    return max(one.start, other.start) < min(one.stop, other.stop)


def _with_rows(violation: Violation, rows: tuple[Row, ...]) -> Violation:
    if rows == violation.rows:
        return violation
    names = violation.row_names
    if names is not None:
        is_told_by_row = len(names) == len(violation.rows)
        names = tuple(n for r, n in zip(violation.rows, names, strict=True) if r in rows) if is_told_by_row else None
    return dataclasses.replace(violation, rows=rows, row_names=names)


def _where(place: Place, violation: Violation, positions: Sequence[Row]) -> str:
    """Where the bad ids are, as exactly as it is known."""
    if violation.platform == "cpu":
        bad = [(number, index) for number, index in place.bad_ids if (number < 0) == (violation.kind == "low")]
        shown = ", ".join(f"{number} at {_index(index)}" for number, index in bad[:LISTED])
    else:
        shown = f"{violation.value} " + (f"at position {_list_of(positions)}" if positions else "")
        bad = []
    return f": {shown}" + (", ..." if len(bad) > LISTED else "") if shown else ""


def _index(index: tuple[int, ...]) -> str:
    if len(index) == 1:
        return f"index {index[0]}"
    return f"row {index[0]}, position {'x'.join(map(str, index[1:]))}"


def rows_of(violation: Violation) -> str:
    """The rows in a line; empty where there are none."""
    return _list_of(violation.rows)


def _list_of(rows: Sequence[Row]) -> str:
    shown = (str(row) if isinstance(row, int) else f"{row.start}..{row.stop - 1}" for row in rows[:LISTED])
    return ",".join(shown) + (",..." if len(rows) > LISTED else "")
