"""ROCm: device type "cuda" with torch.version.hip; whether the assert exists was decided when torch was built."""

from __future__ import annotations

import re

import torch

from multiassert.backends.base import Backend, NativeAssert


def native_assert(torch_version: str, build_configuration: str) -> NativeAssert:
    """What a ROCm build of torch does with a kernel assert, by its version and `torch.__config__.show()`.

    Read in the headers of the release wheels: `CUDA_KERNEL_ASSERT` expands to nothing in 2.2 to 2.7 (pytorch#114660)
    and to `abort()` without a message from 2.8 on (pytorch#155262), unless the build has USE_ROCM_KERNEL_ASSERT.
    """
    if re.search(r"USE_ROCM_KERNEL_ASSERT=(ON|1|TRUE)\b", build_configuration, re.IGNORECASE):
        return NativeAssert.FIRES
    release = re.match(r"(\d+)\.(\d+)", torch_version)
    if release is None:
        return NativeAssert.UNKNOWN
    return NativeAssert.ABORTS if (int(release[1]), int(release[2])) >= (2, 8) else NativeAssert.COMPILED_OUT


class RocmBackend(Backend):
    name = "rocm"
    launches_triton = True

    def asserts_compiled(self) -> bool:
        return False  # Inductor compiles it out on HIP, in torch 2.9 to 2.13 (triton_heuristics.py, read)

    def __init__(self) -> None:
        self.native = native_assert(torch.__version__, torch.__config__.show())
        consequence = {
            NativeAssert.FIRES: "was built with USE_ROCM_KERNEL_ASSERT, so torch._assert_async traps with its message",
            NativeAssert.ABORTS: "ends the process with abort() and loses the message (pytorch#155262)",
            NativeAssert.COMPILED_OUT: "has kernel asserts compiled to nothing (pytorch#114660)",
        }.get(self.native, "is of a version that cannot be read, so what its assert does is unknown")
        self.native_facts = f"This ROCm torch {torch.__version__} {consequence} (read in source)."
