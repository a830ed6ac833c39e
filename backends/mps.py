"""Apple MPS: no assert up to torch 2.13; an error buffer from 2.14 on."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable
from typing import Any

import torch

from multiassert.backends.base import Backend, Event, NativeAssert


class MpsBackend(Backend):
    name = "mps"

    def __init__(self) -> None:
        release = re.match(r"(\d+)\.(\d+)", torch.__version__)
        if release is not None and (int(release[1]), int(release[2])) >= (2, 14):
            self.native = NativeAssert.UNKNOWN
            self.native_facts = (
                "torch 2.14 added torch._assert_async for MPS (pytorch#186562); it has not been run here."
            )
        else:
            self.native = NativeAssert.MISSING
            self.native_facts = "torch up to 2.13 has no torch._assert_async kernel for MPS (read in its headers)."

    # torch.mps knows one stream, which has no name, and events that are recorded on it (torch 2.13, read).

    def current_stream(self, device: torch.device) -> Hashable:
        return None

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def record_event(self, stream: Any) -> Event | None:
        event = torch.mps.Event()
        event.record()
        return event
