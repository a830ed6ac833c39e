"""CUDA: the assert is real, asynchronous, and fatal to the process."""

from __future__ import annotations

from multiassert.backends.base import Backend, NativeAssert


class CudaBackend(Backend):
    name = "cuda"
    launches_triton = True
    native = NativeAssert.FIRES
    native_facts = (
        "torch._assert_async on CUDA traps on the device, prints its message to stderr and costs the CUDA context "
        "(pytorch#134813, read in source)."
    )
