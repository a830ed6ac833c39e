"""Contenders, timed in turns: one after the other in each round, in random order, told as ratios within the round.

Each is a statement that torch's own benchmark timer runs. Two times are only ever compared where they were taken in the
same round, so that a busy machine slows both.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence

import numpy
import torch
from torch.utils.benchmark import Timer

from benchmarks.table import Spread


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much time a benchmark may take."""

    quick: bool
    rounds: int  # at most
    seconds_a_row: float  # no new round is begun after it, once there are FEWEST_ROUNDS
    seconds_a_turn: float  # a contender is repeated within its turn until about that long


FULL = Effort(quick=False, rounds=25, seconds_a_row=0.8, seconds_a_turn=0.002)
QUICK = Effort(quick=True, rounds=5, seconds_a_row=0.0, seconds_a_turn=0.0002)
FEWEST_ROUNDS = 5


def nothing() -> None:
    """Prepare nothing."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A statement to time. `prepare` is called, untimed, before each of its turns."""

    name: str
    statement: str
    names: Mapping[str, object]
    prepare: Callable[[], object] = nothing

    def ready(self) -> Callable[[], object]:
        """Prepare, and return the statement as a function to call."""
        self.prepare()
        function: Callable[[], object] = eval(f"lambda: {self.statement}", {"torch": torch, **self.names})
        return function


@dataclasses.dataclass(frozen=True)
class Race:
    """The seconds a call took, by contender and round, and why a contender could not take part."""

    seconds: Mapping[str, Sequence[float]]
    refusals: Mapping[str, str]

    def ratio(self, ours: str, theirs: str) -> Spread | None:
        """The time of one as a part of the other's, round by round; None where one did not take part."""
        if ours not in self.seconds or theirs not in self.seconds:
            return None
        return Spread.of(numpy.divide(self.seconds[ours], self.seconds[theirs]))

    def time(self, name: str, units_a_second: float = 1e6) -> Spread | None:
        """The time a call took, in microseconds: to get a feeling for it, and not to be compared."""
        return Spread.of(numpy.multiply(self.seconds[name], units_a_second)) if name in self.seconds else None


def race(contenders: Sequence[Contender], effort: Effort) -> Race:
    """Time the contenders in turns."""
    timers: dict[str, Timer] = {}
    repeats: dict[str, int] = {}
    refusals: dict[str, str] = {}
    for contender in contenders:
        names = {"torch": torch, "prepare": contender.prepare, **contender.names}
        timer = Timer(contender.statement, setup="prepare()", globals=names, num_threads=torch.get_num_threads())
        try:
            once = timer.timeit(1).median
        except (NotImplementedError, RuntimeError, TypeError) as error:
            refusals[contender.name] = f"{type(error).__name__}: {error}"
            continue
        if once < effort.seconds_a_turn:  # a single call of a short statement is timed badly
            once = timer.timeit(max(1, int(effort.seconds_a_turn / 2 / once))).median
        timers[contender.name] = timer
        repeats[contender.name] = max(1, round(effort.seconds_a_turn / once))
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    order = list(timers)
    began = time.monotonic()
    for turn in range(effort.rounds):
        if turn >= FEWEST_ROUNDS and time.monotonic() - began > effort.seconds_a_row:
            break
        random.shuffle(order)
        for name in order:
            seconds[name].append(timers[name].timeit(repeats[name]).median)
    return Race(seconds, refusals)


def fastest(contenders: Sequence[Contender], effort: Effort) -> str:
    """The name of the quickest of them, from a short race."""
    short = dataclasses.replace(effort, rounds=FEWEST_ROUNDS, seconds_a_row=0.0)
    seconds = race(contenders, short).seconds
    return min(seconds, key=lambda name: float(numpy.median(seconds[name])))
