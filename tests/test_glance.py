"""The first look at a CPU tensor: it settles what is common, and never passes what is bad."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import multiassert
from multiassert import AsyncAssertionError, glance, predicates

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FP8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_e")]
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def masked_logits(dtype: torch.dtype) -> torch.Tensor:
    """Half of them -Inf, as a grammar leaves them."""
    logits = torch.randn(8, 400).to(dtype)
    logits[:, ::2] = -math.inf
    return logits


def pages(dtype: torch.dtype, size: int) -> torch.Tensor:
    return (torch.arange(400_000) % (torch.iinfo(dtype).max // size + 1) * size).to(dtype)


SETTLED: dict[str, Callable[[], bool]] = {
    **{f"nan {d}": lambda d=d: glance.is_clean(predicates.nan, masked_logits(d), ()) for d in FLOATS},
    **{
        f"nan in a slice {d}": lambda d=d: glance.is_clean(predicates.nan, masked_logits(d)[:, 3:90], ())
        for d in FLOATS
    },
    **{f"nan {d}": lambda d=d: glance.is_clean(predicates.nan, torch.ones(9).to(d), ()) for d in FP8},
    **{f"inf {d}": lambda d=d: glance.is_clean(predicates.inf, torch.randn(8, 99).to(d), (False,)) for d in FLOATS},
    **{f"inf beside masks {d}": lambda d=d: glance.is_clean(predicates.inf, masked_logits(d), (True,)) for d in FLOATS},
    "inf, a sum that overflows": lambda: glance.is_clean(predicates.inf, torch.full((9000,), 9.0).half(), (False,)),
    "inf, e5m2": lambda: glance.is_clean(predicates.inf, torch.ones(9).to(torch.float8_e5m2), (False,)),
    **{
        f"range {d}": lambda d=d: glance.is_clean(predicates.outside_closed_range, torch.rand(9, 9).to(d), (0, 1.0))
        for d in FLOATS
    },
    "a bound that is rounded": lambda: glance.is_clean(
        predicates.outside_closed_range, torch.tensor([0.1], dtype=torch.bfloat16), (0.0, 0.1)
    ),
    **{
        f"ids {d}": lambda d=d: glance.is_clean(predicates.out_of_bounds, torch.arange(9).to(d), (0, 9, None))
        for d in INTEGERS
    },
    "ids with their sentinel": lambda: glance.is_clean(predicates.out_of_bounds, torch.arange(-1, 9), (0, 9, -1)),
    **{
        f"pages {d}": lambda d=d: glance.is_clean(predicates.page_misaligned, pages(d, 64), (64, None))
        for d in INTEGERS
    },
    "pages of 48": lambda: glance.is_clean(predicates.page_misaligned, pages(torch.int64, 48), (48, None)),
    "pages in a slice": lambda: glance.is_clean(predicates.page_misaligned, pages(torch.int64, 4)[::2], (8, None)),
    "condition": lambda: glance.is_clean(predicates.condition, torch.tensor(True), ()),
    "sum": lambda: glance.is_clean(predicates.sum_differs, torch.arange(4), (6,)),
}


@pytest.mark.parametrize("name", SETTLED)
def test_what_is_common_is_settled_by_the_first_look(name: str) -> None:
    assert SETTLED[name]()


@pytest.mark.parametrize("dtype", FP8)
def test_no_bits_of_fp8_are_passed_that_are_bad(dtype: torch.dtype) -> None:
    for bits in range(256):
        tensor = torch.tensor([0x38, bits, 0x39], dtype=torch.uint8).view(dtype)
        values = tensor.float()
        assert glance.is_clean(predicates.nan, tensor, ()) is not bool(values.isnan().any())
        if dtype is torch.float8_e5m2:
            for allow_neginf in (False, True):
                bad = values == math.inf if allow_neginf else values.isinf()
                assert not (bad.any() and glance.is_clean(predicates.inf, tensor, (allow_neginf,)))


@pytest.mark.parametrize("position", [0, 1, 63, 64, 131_071, 131_072, 262_143, 262_144, 299_999])
@pytest.mark.parametrize("size", [64, 48])
def test_a_misaligned_index_in_any_chunk_is_found(position: int, size: int) -> None:
    indices = torch.arange(300_000) * size
    assert glance.is_clean(predicates.page_misaligned, indices, (size, None))
    indices[position] += size // 2
    assert not glance.is_clean(predicates.page_misaligned, indices, (size, None))
    with multiassert.override("auto"), pytest.raises(AsyncAssertionError) as raised:
        multiassert.maybe_detect_page_aligned(indices, size, "slots")
    (violation,) = raised.value.violations
    assert (violation.rows, violation.value) == ((position,), size // 2)


@pytest.mark.parametrize("mode", ["auto", "warn", "raise"])
def test_a_clean_call_is_settled_by_one_look(mode: str) -> None:
    logits, ids = torch.zeros(4, 8), torch.arange(4)
    with (
        multiassert.override(mode),
        mock.patch.object(predicates, "extremes", side_effect=AssertionError),
        mock.patch("multiassert.dispatch.extremes", side_effect=AssertionError),
    ):
        multiassert.maybe_detect_nan(logits, "nan")
        multiassert.maybe_detect_inf(logits, "inf")
        multiassert.maybe_detect_in_closed_range(logits, 0, 1, "range")
        multiassert.maybe_detect_oob(ids, 0, 4, "ids")
        multiassert.maybe_detect_page_aligned(ids * 4, 4, "pages")
        multiassert.maybe_assert_async(torch.tensor(True), "condition")
        multiassert.maybe_assert_sum(ids, 6, "sum")
        assert multiassert.drain() == []


def test_clean_calls_after_a_hit_send_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """They record nothing themselves, but a hit of another site must not wait for the next hit."""
    bad, clean = torch.full((2, 2), math.nan), torch.zeros(2, 2)
    found: list[Any] = []
    remove = multiassert.on_violation(found.append)
    with multiassert.override("warn"):
        multiassert.maybe_detect_nan(bad, "bad")
        for _ in range(multiassert.delivery.CALLS_BETWEEN_SNAPSHOTS):
            multiassert.maybe_detect_nan(clean, "clean")
        remove()
    assert [violation.message for violation in found] == ["bad"]


@pytest.mark.parametrize("mode", ["auto", "warn"])
def test_a_bad_message_is_refused_on_clean_tensors_too(mode: str) -> None:
    with multiassert.override(mode), pytest.raises(TypeError, match="msg must be a string, a callable or a Site"):
        multiassert.maybe_detect_nan(torch.zeros(2), 7)  # type: ignore[arg-type]


def test_gradients_are_not_recorded() -> None:
    weights = torch.ones(3, requires_grad=True)
    with multiassert.override("auto"):
        multiassert.maybe_detect_nan(weights, "weights")
        multiassert.maybe_detect_in_closed_range(weights * 2, 0, 2, "twice")


def test_a_tracer_is_not_asked_for_numbers() -> None:
    """make_fx runs on plain tensors, under a dispatch mode that lets none of their values out."""
    for mode in ("off", "raise"):
        with multiassert.override(mode):
            traced = make_fx(lambda ids: multiassert.sanitize_oob(ids, 0, 4, "ids"))(torch.arange(4))
            assert traced(torch.arange(4)).tolist() == [0, 1, 2, 3]
            make_fx(lambda x: multiassert.maybe_detect_nan(x, "nan"))(torch.zeros(4))
