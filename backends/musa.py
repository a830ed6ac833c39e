"""Moore Threads MUSA (torch_musa): the assert reads its condition back to the host at every call."""

from __future__ import annotations

from multiassert.backends.base import Backend, NativeAssert


class MusaBackend(Backend):
    name = "musa"
    native = NativeAssert.WAITS
    native_facts = "torch_musa 2.7.1's torch._assert_async calls .item(), a host wait at every call (read in source)."
