"""The probes as statements: ours, SGLang's, plain torch, and the least that reading the tensor once takes."""

from __future__ import annotations

import dataclasses
import importlib
import os
from types import ModuleType
from typing import Any

import torch

import multiassert
from benchmarks.timing import Contender

SGLANG_VARIABLES = ("SGLANG_ENABLE_ASYNC_ASSERT", "SGLANG_SANITIZE_NAN_LOGITS")
VOCABULARY = 151936

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
INDICES = (torch.int32, torch.int64)


@dataclasses.dataclass(frozen=True)
class Probe:
    """One check, as each contender writes it; None where one has no such check. `x` is the tensor."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    ours: str
    sglang: str | None
    plain: str


PROBES = (
    Probe(
        "nan",
        FLOATS,
        "ours.maybe_detect_nan(x, 'logits')",
        "sglang.maybe_detect_nan(x, 'logits')",
        "torch._assert_async(~torch.isnan(x).any(), 'logits')",
    ),
    Probe(
        "inf",
        FLOATS,
        "ours.maybe_detect_inf(x, 'hidden')",
        "sglang.maybe_detect_inf(x, 'hidden')",
        "torch._assert_async(~torch.isinf(x).any(), 'hidden')",
    ),
    Probe(
        "inf, -inf excused",
        FLOATS,
        "ours.maybe_detect_inf(x, 'logits', allow_neginf=True)",
        None,
        "torch._assert_async(~torch.isposinf(x).any(), 'logits')",
    ),
    Probe(
        "closed range",
        FLOATS,
        "ours.maybe_detect_in_closed_range(x, 0.0, 1.0, 'confidence')",
        "sglang.maybe_detect_in_closed_range(x, 0.0, 1.0, 'confidence')",
        "torch._assert_async(((x >= 0.0) & (x <= 1.0)).all(), 'confidence')",
    ),
    Probe(
        "out of bounds",
        INDICES,
        f"ours.maybe_detect_oob(x, 0, {VOCABULARY}, 'ids')",
        f"sglang.maybe_detect_oob(x, 0, {VOCABULARY}, 'ids')",
        f"torch._assert_async(((x >= 0) & (x < {VOCABULARY})).all(), 'ids')",
    ),
    Probe(
        "page aligned, 64",
        INDICES,
        "ours.maybe_detect_page_aligned(x, 64, 'slots')",
        "sglang.maybe_detect_page_aligned(x, 64, 'slots')",
        "torch._assert_async(~(x % 64).any(), 'slots')",
    ),
    Probe(
        "page aligned, 48",
        INDICES,
        "ours.maybe_detect_page_aligned(x, 48, 'slots')",
        "sglang.maybe_detect_page_aligned(x, 48, 'slots')",
        "torch._assert_async(~(x % 48).any(), 'slots')",
    ),
    Probe(
        "sum",
        (torch.float32, *INDICES),
        "ours.maybe_assert_sum(x, 0, 'lengths')",
        "sglang.maybe_assert_sum(x, 0, 'lengths')",
        "torch._assert_async(x.sum() == 0, 'lengths')",
    ),
    Probe(
        "condition",
        (torch.bool,),
        "ours.maybe_assert_async(x, 'condition')",
        "sglang.maybe_assert_async(x, 'condition')",
        "torch._assert_async(x, 'condition')",
    ),
    Probe(
        "sanitize logits",
        FLOATS[:3],
        "ours.sanitize_nan_logits(x, 'logits')",
        "sglang.sanitize_nan_logits(x, 'logits')",
        "torch.nan_to_num_(x, nan=-1e30, posinf=1e30, neginf=-1e30)",
    ),
    Probe(
        "sanitize ids",
        INDICES,
        f"ours.sanitize_oob(x, 0, {VOCABULARY}, 'ids')",
        None,
        f"torch.where((x >= 0) & (x < {VOCABULARY}), x, 0)",
    ),
)


def sglang_async_probe() -> ModuleType | None:
    """SGLang's probes as installed, or None where they are not."""
    try:
        return importlib.import_module("sglang.srt.utils.async_probe")
    except ImportError:
        return None


def open_sglang_gate() -> None:
    """Have SGLang's probes check something."""
    os.environ.update(dict.fromkeys(SGLANG_VARIABLES, "1"))


def close_sglang_gate() -> None:
    """Have SGLang's probes return at once, as they do by default."""
    for variable in SGLANG_VARIABLES:
        os.environ.pop(variable, None)


def mode_auto() -> None:
    """On CPU: looked at in the call."""
    multiassert.configure("auto")


def mode_deferred() -> None:
    """Recorded, and looked at later; snapshots by itself now and then, which is part of what it costs."""
    multiassert.configure("raise")


def mode_off() -> None:
    """Off."""
    multiassert.configure("off")


def contenders(probe: Probe, tensor: torch.Tensor) -> list[Contender]:
    """Everyone who has such a check, except for the read limit."""
    names: dict[str, Any] = {"ours": multiassert, "x": tensor}
    found = [
        Contender("auto", probe.ours, names, mode_auto),
        Contender("deferred", probe.ours, names, mode_deferred),
        Contender("plain", probe.plain, names),
    ]
    sglang = sglang_async_probe()
    if probe.sglang is not None and sglang is not None:
        found.append(Contender("SGLang", probe.sglang, {**names, "sglang": sglang}, open_sglang_gate))
    return found


def reductions(tensor: torch.Tensor) -> list[Contender]:
    """Reductions that read the tensor once: the quickest of them is the limit for a check."""
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        # Of a slice the sum by rows is many times faster than the sum at once.
        statement = "x.sum()" if tensor.is_contiguous() else "x.sum(-1)"
        return [Contender(statement, statement, {"x": tensor})]
    if tensor.dtype.itemsize == 1:  # neither fp8 nor bool has reductions
        tensor = tensor.view(torch.uint8)
    statements = ("x.sum()", "x.amin()", "x.amax()", "x.min()", "x.max()", "x.aminmax()")
    return [Contender(statement, statement, {"x": tensor}) for statement in statements]
