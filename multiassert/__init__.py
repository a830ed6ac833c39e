"""Checks on device tensors that never stop the device: one API for every vendor's hardware.

A probe such as `maybe_detect_nan(logits, "verify: target logits")` costs a few small kernels. Where torch's own device
assert is known to work it is used; elsewhere a buffer on the device holds what was seen, and the host looks later.
"""

from multiassert import settings, sinks
from multiassert.delivery import current_step, drain, on_violation, poll, raise_if_error, step, suspend
from multiassert.dispatch import prewarm
from multiassert.probes import (
    maybe_assert_async,
    maybe_assert_sum,
    maybe_detect_in_closed_range,
    maybe_detect_inf,
    maybe_detect_nan,
    maybe_detect_oob,
    maybe_detect_page_aligned,
    maybe_warn_nan,
    sanitize_nan_logits,
    sanitize_oob,
)
from multiassert.ranks import SilentRankError
from multiassert.settings import configure, override
from multiassert.sites import Site, site
from multiassert.speculative import get_src_tgt_cache_loc
from multiassert.violation import AsyncAssertionError, Violation
from multiassert.watching import Watch, watch

__version__ = "0.1.0"


__all__ = [
    "AsyncAssertionError",
    "SilentRankError",
    "Site",
    "Violation",
    "Watch",
    "configure",
    "current_step",
    "drain",
    "get_src_tgt_cache_loc",
    "maybe_assert_async",
    "maybe_assert_sum",
    "maybe_detect_in_closed_range",
    "maybe_detect_inf",
    "maybe_detect_nan",
    "maybe_detect_oob",
    "maybe_detect_page_aligned",
    "maybe_warn_nan",
    "on_violation",
    "override",
    "poll",
    "prewarm",
    "raise_if_error",
    "sanitize_nan_logits",
    "sanitize_oob",
    "site",
    "step",
    "suspend",
    "watch",
]

settings.read_process_environment()
sinks.open_those_of_environment()
