"""Apple MPS: no assert up to torch 2.13; an error buffer from 2.14 on."""

from __future__ import annotations

import re

import torch

from multiassert.backends.base import Backend, NativeAssert


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
