"""SGLang's probes as multiassert's: the same names, arguments, switches and words, and no wait on any device.

SGLang's switches decide at each call whether a probe looks: `SGLANG_ENABLE_ASYNC_ASSERT`,
`SGLANG_ENABLE_NAN_LOGITS_CHECK`, `SGLANG_INVARIANT_CHECK` and `SGLANG_SANITIZE_NAN_LOGITS`. How it looks is up to
multiassert's mode for the platform of the tensor, which is `auto` where `MULTIASSERT` and its kin are not set, or off.

Importing this imports SGLang's settings; `multiassert.engines.sglang` does so once SGLang is there. What SGLang's own
tests pin of these functions is kept (0.5.23): they ask `envs.<name>.get()`, the throttled warning goes by way of
`_nan_warner.check`, and an invariant that fails on the CPU goes by way of `torch._assert_async`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from multiassert import dispatch, predicates, probes, sites
from multiassert.backends import Mechanism
from multiassert.engines import sglang_steps as steps
from multiassert.engines.sglang_switches import assertions, envs, nan_checks

ASYNC_PROBE = "sglang.srt.utils.async_probe"
INVARIANTS = "sglang.srt.utils.invariants"
HOOK_REGISTRY = "sglang.srt.plugins.hook_registry"


def leave_frames_out() -> None:
    """Have records name the place in SGLang that called a probe, and none between it and us."""
    specs = [importlib.util.find_spec(name) for name in (ASYNC_PROBE, INVARIANTS)]
    if importlib.util.find_spec("sglang.srt.plugins") is not None:
        specs.append(importlib.util.find_spec(HOOK_REGISTRY))
    sites.leave_out(__file__, *(spec.origin for spec in specs if spec is not None and spec.origin is not None))


# What SGLang has in these places itself, by name; the adapter fills it.
originals: dict[str, Callable[..., Any]] = {}


def _mechanism(tensor: Tensor) -> Mechanism | None:
    """How a finding in the tensor reaches the host; None in compiled code, and where that is up to another tensor."""
    if is_compiling() or type(tensor) is not Tensor:
        return None
    return dispatch.route_of(tensor.device, asked_for=True).mechanism


def maybe_detect_nan(tensor: Tensor | None, msg: str = "") -> None:
    """Report rows that hold a NaN, as `multiassert.maybe_detect_nan`, where SGLang checks for NaN; no host wait.

    Where the platform's own assert is used (CUDA), it is SGLang's own function: there it is one kernel.
    """
    __tracebackhide__ = True
    if (nan_checks.get() or assertions.get()) and tensor is not None:
        if _mechanism(tensor) is Mechanism.NATIVE and "maybe_detect_nan" in originals:
            originals["maybe_detect_nan"](tensor, msg)
            return
        error = dispatch.probe(predicates.nan, tensor, (), msg, asked_for=True)
        if error is not None:
            raise error


def maybe_detect_inf(tensor: Tensor | None, msg: str = "") -> None:
    """Report rows that hold an Inf, as `multiassert.maybe_detect_inf`, where SGLang asserts; no host wait."""
    __tracebackhide__ = True
    if assertions.get() and tensor is not None:
        error = dispatch.probe(predicates.inf, tensor, (False,), msg, asked_for=True)
        if error is not None:
            raise error


def maybe_detect_in_closed_range(tensor: Tensor | None, low: float, high: float, msg: str = "") -> None:
    """Report values outside `[low, high]`, where SGLang asserts; no host wait."""
    __tracebackhide__ = True
    if assertions.get() and tensor is not None:
        error = dispatch.probe(predicates.outside_closed_range, tensor, (low, high), msg, asked_for=True)
        if error is not None:
            raise error


def maybe_detect_oob(indices: Tensor | None, low: int, high: int, msg: str = "") -> None:
    """Report indices outside `[low, high)`, as `multiassert.maybe_detect_oob`, where SGLang asserts; no host wait."""
    __tracebackhide__ = True
    if assertions.get() and indices is not None:
        error = dispatch.probe(
            predicates.out_of_bounds, indices, (low, high, None), msg, name="indices", asked_for=True
        )
        error = error or steps.send_before_use(indices, msg)
        if error is not None:
            raise error


def maybe_detect_page_aligned(indices: Tensor | None, page_size: int, msg: str = "") -> None:
    """Report indices that are no multiple of `page_size`, where SGLang asserts; no host wait."""
    __tracebackhide__ = True
    if assertions.get() and indices is not None:
        error = dispatch.probe(
            predicates.page_misaligned, indices, (page_size, None), msg, name="indices", asked_for=True
        )
        if error is not None:
            raise error


def maybe_assert_async(cond: Tensor, msg: str = "") -> None:
    """Report a condition that is false, where SGLang asserts; no host wait."""
    __tracebackhide__ = True
    if assertions.get():
        error = dispatch.probe(predicates.condition, cond, (), msg, name="cond", asked_for=True)
        if error is not None:
            raise error


def maybe_assert_sum(tensor: Tensor, expected: int, msg: str = "") -> None:
    """Report a tensor whose sum is not `expected`, where SGLang asserts; no host wait."""
    __tracebackhide__ = True
    if assertions.get():
        error = dispatch.probe(predicates.sum_differs, tensor, (expected,), msg, asked_for=True)
        if error is not None:
            raise error


def maybe_warn_nan(tensor: Tensor | None, msg: str = "") -> None:
    """Log rows that hold a NaN where SGLang has no check for NaN that is harder; on every platform, no host wait."""
    __tracebackhide__ = True
    if tensor is not None and not (nan_checks.get() or assertions.get()):
        warner = getattr(sys.modules[ASYNC_PROBE], "_nan_warner", None)
        if warner is not None:
            warner.check(tensor, msg)
        else:
            check(warner, tensor, msg)


def check(warner: object, tensor: Tensor, msg: str) -> None:
    """SGLang's `_AsyncNanWarner.check`, which looks on CUDA only and warns once, whatever the site."""
    __tracebackhide__ = True
    error = dispatch.probe(predicates.nan, tensor, (), msg, only_warn=True, asked_for=True)
    if error is not None:
        raise error


def sanitize_nan_logits(logits: Tensor | None, msg: str = "") -> None:
    """Heal logits in place where SGLang does: NaN and -Inf become -1e30, +Inf becomes 1e30; no host wait.

    NaN is reported first. In float16 SGLang's -1e30 is -Inf, of which softmax makes NaN again; here it is -16376.
    """
    __tracebackhide__ = True
    maybe_detect_nan(logits, msg)
    if logits is not None and envs.SGLANG_SANITIZE_NAN_LOGITS.get():
        maybe_warn_nan(logits, msg)
        probes.heal(logits, probes.healed_logit(logits.dtype))


def signal(ok: Tensor, *, inv: Any, level: Any, msg: str) -> None:
    """What `invariants.expect` does with the elementwise answer of a property: report the rows where it is false.

    Where SGLang would crash, it is as any probe; where SGLang would count and log, it is logged here, with rows. On the
    CPU, where counting waits for nothing, and for what SGLang does not call an error (`Bucket.SOFTEN`), SGLang counts.
    """
    __tracebackhide__ = True
    invariants = sys.modules[INVARIANTS]
    text = f"invariant-check FAILED [{inv.name}]: {msg}"
    crashes = invariants._crashes(inv.bucket, level)
    if not crashes and (inv.bucket is invariants.Bucket.SOFTEN or ok.device.type == "cpu"):
        key = f"{inv.name}@rank{invariants._get_rank()}"
        invariants._reporter.record(key, inv.bucket, (~ok).sum(), msg)
    elif not (crashes and _mechanism(ok) is Mechanism.IMMEDIATE and _assert_holds(ok, text)):
        error = dispatch.probe(predicates.conditions, ok, (), text, name="ok", only_warn=not crashes, asked_for=True)
        if error is not None:
            raise error


def _assert_holds(ok: Tensor, text: str) -> bool:
    """Whether torch's own assert lets it pass; SGLang's tests count its calls."""
    try:
        torch._assert_async(ok.all(), text)
    except RuntimeError:
        return False
    return True


REPLACEMENTS: dict[str, dict[str, Callable[..., Any]]] = {
    ASYNC_PROBE: {
        "maybe_detect_nan": maybe_detect_nan,
        "maybe_detect_inf": maybe_detect_inf,
        "maybe_detect_in_closed_range": maybe_detect_in_closed_range,
        "maybe_detect_oob": maybe_detect_oob,
        "maybe_detect_page_aligned": maybe_detect_page_aligned,
        "maybe_assert_async": maybe_assert_async,
        "maybe_assert_sum": maybe_assert_sum,
        "maybe_warn_nan": maybe_warn_nan,
        "sanitize_nan_logits": sanitize_nan_logits,
        "_AsyncNanWarner.check": check,
    },
    INVARIANTS: {"_signal": signal},
}
