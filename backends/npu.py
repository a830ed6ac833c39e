"""Ascend NPU (torch_npu): no kernel for the assert, so the deferred state is the only way without a host wait."""

from __future__ import annotations

from multiassert.backends.base import Backend, NativeAssert


class NpuBackend(Backend):
    name = "npu"
    native = NativeAssert.MISSING
    native_facts = (
        "torch_npu 2.13.0 has no kernel for torch._assert_async: each call is a CPU fallback that makes the host wait "
        "(read from its dispatcher)."
    )
