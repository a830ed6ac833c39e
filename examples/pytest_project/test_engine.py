"""Tests of code that has probes in it: one that fails, two that pass, two that are about a violation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

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


@pytest.mark.async_violations(kind="high", site="token ids", row=1)
def test_the_probe_before_the_embedding_fires(poison_probe: Callable[..., AbstractContextManager[object]]) -> None:
    """Passes: the probe sees a bad value, in a copy; the engine's own tokens are fine."""
    with poison_probe("token ids", row=1):
        assert embed(torch.tensor([3, 1])).argmax(-1).tolist() == [3, 1]
