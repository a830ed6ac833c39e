"""What a probe costs that is off: `python -m benchmarks.off_path`.

Prints nanoseconds a call, beside a call of an empty function with the same arguments, both measured in the same loop
and in turns, so that a busy machine slows both. The target is at most 60 ns more than the empty function.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import torch

import multiassert

CALLS = 20_000
TURNS = 60


def empty(tensor: Any, a0: Any = None, a1: Any = None, a2: Any = None, *, where: Any = None) -> None:
    """Do nothing, as a call that was taken out by hand."""


PROBES: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "maybe_detect_nan": (multiassert.maybe_detect_nan, ("verify: target logits",)),
    "maybe_detect_inf": (multiassert.maybe_detect_inf, ("verify: target logits",)),
    "maybe_detect_oob": (multiassert.maybe_detect_oob, (0, 151936, "ids")),
    "maybe_detect_page_aligned": (multiassert.maybe_detect_page_aligned, (64, "slots")),
    "maybe_detect_in_closed_range": (multiassert.maybe_detect_in_closed_range, (0.0, 1.0, "confidence")),
    "maybe_assert_async": (multiassert.maybe_assert_async, ("condition",)),
    "maybe_assert_sum": (multiassert.maybe_assert_sum, (1, "sum")),
    "maybe_warn_nan": (multiassert.maybe_warn_nan, ("logits",)),
}


def nanoseconds(call: Callable[..., None], arguments: tuple[Any, ...]) -> float:
    """The best time of a call in this turn."""
    tensor = torch.zeros(4)
    names = {"call": call, "tensor": tensor, **{f"a{i}": argument for i, argument in enumerate(arguments)}}
    statement = f"call(tensor, {', '.join(f'a{i}' for i in range(len(arguments)))})"
    return timeit.timeit(statement, globals=names, number=CALLS) / CALLS * 1e9


def main() -> None:
    """Measure and print."""
    print(f"{'probe, off':32}{'ns a call':>10}{'empty call':>12}{'difference':>12}")
    with multiassert.override("off"):
        for name, (probe, arguments) in PROBES.items():
            turns = [(nanoseconds(probe, arguments), nanoseconds(empty, arguments)) for _ in range(TURNS)]
            off, nothing = (min(column) for column in zip(*turns, strict=True))
            print(f"{name:32}{off:10.1f}{nothing:12.1f}{off - nothing:12.1f}")


if __name__ == "__main__":
    main()
