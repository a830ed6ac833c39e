"""Bad input: a clear error that names the argument, at the call, and nothing recorded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import multiassert
from multiassert import (
    maybe_assert_async,
    maybe_assert_sum,
    maybe_detect_in_closed_range,
    maybe_detect_inf,
    maybe_detect_nan,
    maybe_detect_oob,
    maybe_detect_page_aligned,
    sanitize_nan_logits,
    sanitize_oob,
)

X = torch.zeros(4, 8)
I = torch.zeros(4, dtype=torch.int64)  # noqa: E741

BAD = {
    "low above high": (lambda: maybe_detect_oob(I, 5, 4), ValueError, r"low must not be above high.*low=5.*high=4"),
    "float low": (lambda: maybe_detect_oob(I, 0.5, 4), TypeError, "low must be an integer.*0.5"),
    "text high": (lambda: maybe_detect_oob(I, 0, "4"), TypeError, "high must be an integer"),
    "float indices": (lambda: maybe_detect_oob(X, 0, 4), TypeError, r"indices must be an integer tensor.*float32"),
    "complex indices": (lambda: maybe_detect_oob(X + 0j, 0, 4), TypeError, "indices must be an integer tensor"),
    "float sentinel": (lambda: maybe_detect_oob(I, 0, 4, sentinel=-1.0), TypeError, "sentinel must be an integer"),
    "bound that does not broadcast": (
        lambda: maybe_detect_oob(I, 0, torch.ones(3, dtype=torch.int64)),
        ValueError,
        r"a bound.*\(3,\).*\(4,\)",
    ),
    "bound wider than the indices": (
        lambda: maybe_detect_oob(I, 0, torch.ones(2, 4, dtype=torch.int64)),
        ValueError,
        r"a bound.*\(2, 4\)",
    ),
    "float bound": (lambda: maybe_detect_oob(I, 0, X[:, 0]), TypeError, "high must be an integer tensor"),
    "uint64 bound": (
        lambda: maybe_detect_oob(I, 0, I.view(torch.uint64)),
        TypeError,
        "high must be.*int64 can hold.*uint64",
    ),
    "page negative": (lambda: maybe_detect_page_aligned(I, -1), ValueError, "page_size must be at least 0.*-1"),
    "page float": (lambda: maybe_detect_page_aligned(I, 2.0), TypeError, "page_size must be an integer"),
    "page of floats": (lambda: maybe_detect_page_aligned(X, 2), TypeError, "indices must be an integer tensor"),
    "closed range reversed": (lambda: maybe_detect_in_closed_range(X, 1.0, 0.0), ValueError, "low must not be above"),
    "closed range NaN": (
        lambda: maybe_detect_in_closed_range(X, 0.0, float("nan")),
        TypeError,
        "high must be.*not NaN",
    ),
    "closed range complex": (lambda: maybe_detect_in_closed_range(X + 0j, 0, 1), TypeError, "real numbers"),
    "where does not broadcast": (
        lambda: maybe_detect_nan(X, where=torch.ones(3, dtype=torch.bool)),
        ValueError,
        r"where of shape \(3,\)",
    ),
    "where wider than the tensor": (
        lambda: maybe_detect_nan(X, where=torch.ones(2, 4, 8, dtype=torch.bool)),
        ValueError,
        "where of shape",
    ),
    "where not bool": (lambda: maybe_detect_nan(X, where=torch.ones(4, 8)), TypeError, "where must be a bool.*float32"),
    "where a list": (lambda: maybe_detect_nan(X, where=[True]), TypeError, "where must be a bool tensor, got list"),
    "num_valid too large": (
        lambda: maybe_detect_nan(X, num_valid=5),
        ValueError,
        "num_valid must be from 0 to the 4.*5",
    ),
    "num_valid negative": (lambda: maybe_detect_inf(X, num_valid=-1), ValueError, "num_valid must be from 0"),
    "num_valid float": (lambda: maybe_detect_nan(X, num_valid=2.0), TypeError, "num_valid must be an int"),
    "num_valid a vector": (lambda: maybe_detect_nan(X, num_valid=I), TypeError, r"num_valid must be.*shape \(4,\)"),
    "num_valid a float tensor": (
        lambda: maybe_detect_nan(X, num_valid=X[0, 0]),
        TypeError,
        "num_valid must be.*float32",
    ),
    "no tensor": (lambda: maybe_detect_nan([1.0]), TypeError, "tensor must be a tensor or None, got list"),
    "a number for indices": (lambda: maybe_detect_oob(3, 0, 4), TypeError, "indices must be a tensor or None, got int"),
    "msg a number": (lambda: maybe_detect_nan(X, 7), TypeError, "msg must be a string, a callable or a Site, got int"),
    "sparse": (
        lambda: maybe_detect_nan(X.to_sparse()),
        TypeError,
        "tensor must be a dense tensor, got a sparse_coo one",
    ),
    "quantized": (
        lambda: maybe_detect_nan(torch.quantize_per_tensor(X, 0.1, 0, torch.quint8)),
        TypeError,
        "got a quantized one",
    ),
    "cond of many elements": (lambda: maybe_assert_async(X == 0), ValueError, r"cond must have exactly one.*\(4, 8\)"),
    "cond a bool": (lambda: maybe_assert_async(True), TypeError, "cond must be a tensor or None, got bool"),
    "sum of complex": (lambda: maybe_assert_sum(X + 0j, 0), TypeError, "tensor must hold real numbers"),
    "sum expected text": (lambda: maybe_assert_sum(X, "0"), TypeError, "expected must be an int or a float"),
    "fill outside": (lambda: sanitize_oob(I, 1, 4, fill=0), ValueError, r"fill must be inside.*\[1, 4\).*got 0"),
    "fill in an empty range": (lambda: sanitize_oob(I, 0, 0), ValueError, "fill must be inside"),
    "fill that does not fit": (
        lambda: sanitize_oob(I.to(torch.int8), 0, 1000, fill=200),
        ValueError,
        "fill must fit.*int8.*200",
    ),
    "logits of integers": (lambda: sanitize_nan_logits(I), TypeError, "logits must be floats"),
    "site of a number": (lambda: multiassert.site(3), TypeError, "message must be a string"),
    "callback not callable": (lambda: multiassert.on_violation(3), TypeError, "callback must be callable"),
}


@pytest.mark.parametrize("mode", ["auto", "trap", "raise", "warn"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_at_the_call(name: str, mode: str) -> None:
    call, error, text = BAD[name]
    with multiassert.override(mode):
        with pytest.raises(error, match=text):
            call()
        assert multiassert.drain() == []


PROBES: dict[str, Callable[[torch.Tensor | None], None]] = {
    "nan": maybe_detect_nan,
    "inf": maybe_detect_inf,
    "oob": lambda t: maybe_detect_oob(t, 0, 4),
    "page": lambda t: maybe_detect_page_aligned(t, 64),
    "range": lambda t: maybe_detect_in_closed_range(t, 0, 1),
    "cond": maybe_assert_async,
    "warn": multiassert.maybe_warn_nan,
    "logits": lambda t: sanitize_nan_logits(t.float() if t is not None else None),
    "sanitize": lambda t: None if sanitize_oob(t, 0, 4) is t else pytest.fail("not the same"),
}


@pytest.mark.parametrize("mode", ["off", "auto", "trap", "raise", "warn"])
@pytest.mark.parametrize("name", PROBES)
def test_none_and_empty_check_nothing(name: str, mode: str) -> None:
    with multiassert.override(mode):
        PROBES[name](None)
        for shape in ((0,), (0, 8), (4, 0), (3, 0, 2)):
            PROBES[name](torch.empty(shape, dtype=torch.int64))
        assert multiassert.drain() == []


def test_the_sum_of_nothing_is_zero() -> None:
    with multiassert.override("warn"):
        maybe_assert_sum(None, 5)
        maybe_assert_sum(torch.empty(0), 0)
        assert multiassert.drain() == []


def test_meta_tensors_hold_nothing_to_check() -> None:
    with multiassert.override("auto"):
        maybe_detect_nan(torch.empty(4, 8, device="meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mode", ["off", "warn"])
def test_sanitize_nan_logits_heals_in_place_whatever_the_mode(mode: str, dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 2.0], [float("nan"), float("inf")], [-float("inf"), 3.0]], dtype=dtype)
    address = logits.data_ptr()
    with multiassert.override(mode):
        sanitize_nan_logits(logits, "sampler")
        assert [v.rows for v in multiassert.drain()] == ([(1,)] if mode == "warn" else [])
    assert torch.equal(logits, torch.tensor([[1.0, 2.0], [-1e30, 1e30], [-1e30, 3.0]], dtype=dtype))
    assert logits.data_ptr() == address


def test_sanitized_fp16_logits_survive_a_temperature() -> None:
    logits = torch.tensor([[1.0, float("nan"), float("inf")]], dtype=torch.float16)
    sanitize_nan_logits(logits)
    assert torch.isfinite(logits / 0.3).all()
    assert logits[0, 2] > 10_000


def test_sanitize_nan_logits_asserts_before_it_heals() -> None:
    logits = torch.tensor([[float("nan")]])
    with multiassert.override("auto"), pytest.raises(RuntimeError, match="NaN detected! sampler"):
        sanitize_nan_logits(logits, "sampler")
    assert logits.isnan().all()


def test_sanitize_oob_returns_safe_indices_and_reports() -> None:
    indices = torch.tensor([3, -1, 9, 4], dtype=torch.int32)
    assert sanitize_oob(indices, 0, 5, "ids").tolist() == [3, 0, 0, 4]
    with multiassert.override("warn"):
        safe = sanitize_oob(indices, 0, 5, "ids", fill=2)
        assert [(v.kind, v.rows, v.value) for v in multiassert.drain()] == [("low", (1,), -1), ("high", (2,), 9)]
    assert safe.tolist() == [3, 2, 2, 4]
    assert safe.dtype is torch.int32
    assert indices.tolist() == [3, -1, 9, 4]


def test_sanitize_oob_with_a_bound_per_row() -> None:
    indices = torch.tensor([[0, 3], [5, 2]])
    assert sanitize_oob(indices, 0, torch.tensor([[2], [6]])).tolist() == [[0, 0], [5, 2]]


def test_bounds_on_the_device_a_length_per_row() -> None:
    positions = torch.tensor([[0, 1, 2], [0, 1, 2]], dtype=torch.int32)
    lengths = torch.tensor([[3], [2]])
    with multiassert.override("warn"):
        maybe_detect_oob(positions, 0, lengths, "positions")
        (violation,) = multiassert.drain()
        assert (violation.kind, violation.rows, violation.value, violation.bound) == ("high", (1,), 2, None)
        maybe_detect_oob(positions, 0, lengths, "valid rows only", num_valid=1)
        maybe_detect_oob(positions, torch.tensor(0), torch.tensor(3), "0-dim bounds")
        assert multiassert.drain() == []
