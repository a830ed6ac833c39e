"""CPU: work is done when its call returns, so `auto` looks at once and raises at the call."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import Any

import torch

from multiassert.backends.base import Backend, Event, Mechanism, NativeAssert


class CpuBackend(Backend):
    name = "cpu"
    native = NativeAssert.RAISES
    native_facts = "torch._assert_async on CPU raises RuntimeError with the message at the call (torch 2.13, run)."

    def auto(self) -> Mechanism:
        return Mechanism.IMMEDIATE

    def current_stream(self, device: torch.device) -> Hashable:
        return None

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def is_capturing(self, device: torch.device) -> bool:
        return False

    def record_event(self, stream: Any) -> Event | None:
        return None

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
