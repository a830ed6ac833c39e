"""Each kind of probe with a clean tensor, a bad one, and the record that must come of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import multiassert
from multiassert.doctor.machine import Machine

Probe = Callable[[Tensor, str], None]
Record = tuple[str, tuple[int, ...], str]  # the kind, the rows, the value
Kind = tuple[str, Probe, Tensor, Tensor, Record]


def every_kind(machine: Machine) -> list[Kind]:
    """The name of each kind, the call, a clean and a bad tensor on the device, and the record."""
    zeros, ids = machine.rows(), machine.put(torch.arange(4))
    odd = machine.put(torch.tensor([0, 64, 130, 192]))
    yes, no = machine.put(torch.tensor(True)), machine.put(torch.tensor(False))
    bounds, pages = multiassert.maybe_detect_oob, multiassert.maybe_detect_page_aligned
    within, total = multiassert.maybe_detect_in_closed_range, multiassert.maybe_assert_sum
    return [
        ("NaN", multiassert.maybe_detect_nan, zeros, machine.rows(math.nan, 2), ("nan", (2,), "nan")),
        ("Inf", multiassert.maybe_detect_inf, zeros, machine.rows(math.inf, 1), ("inf", (1,), "inf")),
        ("index too high", lambda t, m: bounds(t, 0, 4, m), ids, ids * 3, ("high", (2, 3), "9")),
        ("index too low", lambda t, m: bounds(t, 0, 4, m), ids, ids - 2, ("low", (0, 1), "-2")),
        ("page alignment", lambda t, m: pages(t, 64, m), ids * 64, odd, ("misaligned", (2,), "2")),
        ("closed range", lambda t, m: within(t, 0.0, 1.0, m), zeros, machine.rows(2.0, 3), ("range", (3,), "2.0")),
        ("condition", multiassert.maybe_assert_async, yes, no, ("cond", (), "0")),
        ("sum", lambda t, m: total(t, 6, m), ids, ids + 1, ("cond", (0,), "10")),
    ]
