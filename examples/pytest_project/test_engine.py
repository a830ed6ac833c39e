"""Tests of code that has probes in it: one that fails, two that pass, one that is about a violation."""

from __future__ import annotations

import pytest
import torch
from engine import VOCABULARY, embed, sample


def logits_with_nan_in_row(row: int) -> torch.Tensor:
    """Logits as a broken kernel would make them."""
    logits = torch.zeros(4, VOCABULARY)
    logits[row, 7] = float("nan")
    return logits


def test_a_fault_that_nobody_looks_at() -> None:
    """Fails: argmax takes NaN for the largest value, the assertion holds, and the probe saw it all the same."""
    assert sample(logits_with_nan_in_row(1)).shape == (4,)


def test_the_next_one() -> None:
    """Passes: what the probe saw above fails the test above."""
    assert sample(torch.eye(VOCABULARY)).tolist() == list(range(VOCABULARY))


@pytest.mark.async_violations(kind="nan", site="logits", row=2)
def test_a_fault_is_seen() -> None:
    """Passes: the test is about the violation, and fails without it or with another one."""
    sample(logits_with_nan_in_row(2))


def test_a_platform(multiassert_device: torch.device) -> None:
    """Passes: runs on each of --multiassert-platform, on the CPU by default."""
    tokens = torch.tensor([3, 1], device=multiassert_device)
    assert sample(embed(tokens)).tolist() == [3, 1]
