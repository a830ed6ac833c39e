"""Intel XPU: the assert is there, but it ends the process and its message is lost."""

from __future__ import annotations

from multiassert.backends.base import Backend, NativeAssert


class XpuBackend(Backend):
    name = "xpu"
    native = NativeAssert.ABORTS
    native_facts = (
        "torch._assert_async on XPU ends the process and loses the message (pytorch#142135, torch-xpu-ops#5165, read)."
    )
