"""The failures that the demo injects, and what it takes for one to count as caught."""

from __future__ import annotations

import dataclasses
import math

import torch

from multiassert import Violation


def step_tag(decoding: str, step: int) -> str:
    """What the records of one step of a decoding run are labelled with."""
    return f"{decoding}, step {step}"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One wrong value, put into one row of one tensor in one step of a run."""

    title: str
    decoding: str
    place: str
    """The message of the probe that stands there."""
    step: int
    row: int
    value: int | float
    kind: str
    """The kind of violation that it is."""
    crashes: bool = False
    """Whether it makes a device fail."""

    def strikes(self, place: str, step: int) -> bool:
        """Whether the tensor at `place` in `step` is the one to spoil."""
        return place == self.place and step == self.step

    def put_into(self, rows: torch.Tensor) -> torch.Tensor:
        """A copy of `rows` whose row is spoilt; on the tensor's own device."""
        spoilt = rows.clone()
        spoilt[self.row] = self.value
        return spoilt

    def is_named_by(self, violation: Violation, first_step: int) -> bool:
        """Whether `violation` says what was injected: the probe, the kind, the step, the row and the value.

        `first_step` is the number of the run's first step, since steps are counted through the whole process. What was
        sent in the middle of a step has no tag, which the engine gives only at the end of it.
        """
        return (
            violation.message == self.place
            and violation.kind == self.kind
            and violation.tag in (None, step_tag(self.decoding, self.step))
            and violation.step == first_step + self.step
            and violation.rows == (self.row,)
            and _same(violation.value, self.value)
        )


def _same(found: int | float, injected: int | float) -> bool:
    return math.isnan(found) if math.isnan(injected) else found == injected
