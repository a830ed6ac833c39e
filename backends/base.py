"""What a platform must answer. Everything here works for any torch accelerator; a platform overrides what differs.

Requirements: no vendor package is ever imported from here, nothing is asked of a device before a tensor of it was
probed, and the answers about the native assert are facts with a source, not hopes.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Hashable
from typing import Any, Protocol

import torch

from multiassert.backends.vendor import VendorOperators


class NativeAssert(enum.Enum):
    """What `torch._assert_async` does on a platform when its condition is false."""

    FIRES = "fires"  # ends the work with the message, and the host never waited
    RAISES = "raises"  # an ordinary exception with the message, at the call
    ABORTS = "aborts"  # ends the process, the message is lost
    WAITS = "waits"  # fires, but every call makes the host wait
    MISSING = "missing"  # no kernel: a hidden fallback to the CPU, so a wait, or an error
    COMPILED_OUT = "compiled out"  # does nothing at all
    UNKNOWN = "unknown"  # nobody has shown it


class Mechanism(enum.Enum):
    """How a probe's finding reaches the host."""

    IMMEDIATE = "immediate"  # looked at in the call itself
    NATIVE = "native"  # torch._assert_async
    DEFERRED = "deferred"  # kept in device state, looked at later


class Event(Protocol):
    """Marks a place in a stream's work."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Backend:
    """One platform."""

    name: str  # the platform, as in MULTIASSERT_<NAME>
    native: NativeAssert = NativeAssert.UNKNOWN
    native_facts: str = "What torch._assert_async does on this device has not been shown."  # one sentence, with source
    launches_triton = False  # whether Triton's kernels can be launched on its tensors
    operators: VendorOperators | None = None  # what is known of the vendor's operators, for the simulated device

    def auto(self) -> Mechanism:
        """The mechanism of mode `auto`: native only where it is known to fire without a host wait."""
        return Mechanism.NATIVE if self.native is NativeAssert.FIRES else Mechanism.DEFERRED

    def asserts_compiled(self) -> bool:
        """Whether the native assert survives torch.compile's own backend, so that it fires in compiled code."""
        return True

    def why(self) -> str:
        """One sentence on why `auto` chooses what it chooses."""
        return f"{self.native_facts} So auto is {self.auto().value}."

    def trap_refusal(self) -> str | None:
        """Why mode `trap` cannot be had here, and what to use instead; None where it can."""
        if self.native in (NativeAssert.FIRES, NativeAssert.RAISES, NativeAssert.ABORTS):
            return None
        return f"{self.native_facts} Use raise, which reports from device state without a host wait."

    # Streams, events, memory.

    def module(self, device: torch.device) -> Any:
        """torch.cuda, torch.npu and so on."""
        return torch.get_device_module(device)

    def current_stream(self, device: torch.device) -> Hashable:
        """The stream on which work for `device` is put now; equal streams compare equal."""
        stream: Hashable = self.module(device).current_stream(device)
        return stream

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """A scope in which work goes to `stream`."""
        context: contextlib.AbstractContextManager[Any] = self.module(stream.device).stream(stream)
        return context

    def is_capturing(self, device: torch.device) -> bool:
        """Whether the current stream's work is being recorded into a graph instead of run."""
        module = self.module(device)
        query = getattr(module, "is_current_stream_capturing", None)
        if query is None:
            return False
        if device.index is None or device.index == module.current_device():
            return bool(query())
        with module.device(device):  # the query is about the current device
            return bool(query())

    def record_event(self, stream: Any) -> Event | None:
        """An event behind the work put on `stream` so far; None where work is done when its call returns."""
        event = self.module(stream.device).Event()
        event.record(stream)
        marker: Event = event
        return marker

    def host_buffer(self, size: int) -> torch.Tensor:
        """Bytes on the host that a device can write without a host wait."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
