"""The code under test: the last steps of an engine, with a probe before and after."""

from __future__ import annotations

import torch

from multiassert import maybe_detect_nan, maybe_detect_oob

VOCABULARY = 32


def sample(logits: torch.Tensor) -> torch.Tensor:
    """The token of each row."""
    maybe_detect_nan(logits, "logits")
    return logits.argmax(-1)


def embed(tokens: torch.Tensor) -> torch.Tensor:
    """A vector for each token; a token that is none would be read from somebody else's memory on some devices."""
    maybe_detect_oob(tokens, 0, VOCABULARY, "token ids")
    return torch.nn.functional.one_hot(tokens.clamp(0, VOCABULARY - 1), VOCABULARY).float()
