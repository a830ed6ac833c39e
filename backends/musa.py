"""Moore Threads MUSA (torch_musa): the assert reads its condition back to the host at every call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from multiassert.backends.base import Backend, NativeAssert
from multiassert.backends.vendor import VendorOperators, argument, is_device_scalar, is_host_scalar


def _clamp_waits(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Two bounds of one element each are read back."""
    bounds = argument(args, kwargs, 1, "min"), argument(args, kwargs, 2, "max")
    return 2 * all(isinstance(bound, torch.Tensor) and bound.numel() <= 1 for bound in bounds)


def _where_waits(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Host scalars are moved over with a blocking copy."""
    return is_host_scalar(args[1]) + is_host_scalar(args[2])


class MusaBackend(Backend):
    name = "musa"
    native = NativeAssert.WAITS
    native_facts = "torch_musa 2.7.1's torch._assert_async calls .item(), a host wait at every call (read in source)."
    # Waits were read in the source of torch_musa 2.7.1; nothing of it was run on a device.
    operators = VendorOperators(
        file="musa.txt",
        falls_back_to_cpu=False,
        graph_class="MUSAGraph",
        unpinned_upload_waits=False,
        waiting={
            "aten::fill_.Tensor": lambda args, kwargs: int(is_device_scalar(args[1])),
            "aten::masked_fill_.Tensor": lambda args, kwargs: int(is_device_scalar(args[2])),
            "aten::index_fill_.int_Tensor": lambda args, kwargs: int(is_device_scalar(args[3])),
            "aten::clamp.Tensor": _clamp_waits,
            "aten::clamp.Tensor_out": _clamp_waits,
            "aten::clamp_.Tensor": _clamp_waits,
            "aten::where.self": _where_waits,
            "aten::where.self_out": _where_waits,
        },
    )
