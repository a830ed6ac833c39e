"""Any other device type: nothing is known of its assert, everything deferred works on it."""

from __future__ import annotations

from multiassert.backends.base import Backend


class GenericBackend(Backend):
    def __init__(self, device_type: str) -> None:
        self.name = device_type
        self.native_facts = f"What torch._assert_async does on device type {device_type!r} has not been shown."
