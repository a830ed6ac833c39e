"""The native mechanism: torch._assert_async, on one condition for each kind."""

from __future__ import annotations

import torch

from multiassert.predicates import Check, Extremes, at_trace_time

# CUDA refuses longer messages on the host, even where the condition holds (torch 2.13, read in TensorCompare.cu).
MESSAGE_BYTES = 254


def assert_extremes(check: Check, observed: Extremes, message: str) -> None:
    """Assert on the device that the extremes are inside their limits."""
    above_floor, below_ceiling = check.above_floor(observed.lower), check.below_ceiling(observed.upper)
    conditions = [above_floor, below_ceiling]
    if above_floor is not None and below_ceiling is not None and check.one_kind:
        conditions = [None, above_floor & below_ceiling]
    for condition, headline in zip(conditions, check.headlines, strict=True):
        if condition is not None:
            # Always with a message: torch.compile deletes the overload without one (torch 2.13, run).
            torch._assert_async(condition, assert_text(headline, message))


@at_trace_time
def assert_text(headline: str, message: str) -> str:
    """A text that every native assert takes: one line of at most 254 bytes, without what breaks generated code."""
    text = f"{headline} {message}"
    text = " ".join(text.replace("\\", "/").replace('"', "'").replace("'''", "''").replace("\0", "").split())
    return text.encode(errors="replace")[:MESSAGE_BYTES].decode(errors="ignore")
