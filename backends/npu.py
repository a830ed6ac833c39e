"""Ascend NPU (torch_npu): no kernel for the assert, so the deferred state is the only way without a host wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from multiassert.backends.base import Backend, NativeAssert
from multiassert.backends.vendor import VendorOperators, argument, is_device_scalar


def _index_put_waits(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """`x[mask] = one value` becomes masked_fill_(mask, value.item()), and Python puts the value on the device."""
    indices, value = args[1], args[2]
    masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
    return int(masked and value.numel() == 1 and value.device.type != "cpu")


def _scatter_reduce_waits(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Three reads back, a CPU kernel and one write, without a warning, but for a float32 sum that includes self."""
    include_self = argument(args, kwargs, 5, "include_self", True)
    sums = argument(args, kwargs, 4, "reduce") in ("sum", "add")
    return 0 if include_self and sums and args[0].dtype is torch.float32 else 4


class NpuBackend(Backend):
    name = "npu"
    native = NativeAssert.MISSING
    native_facts = (
        "torch_npu 2.13.0 has no kernel for torch._assert_async: each call is a CPU fallback that makes the host wait "
        "(read from its dispatcher)."
    )
    # Waits were read in the op-plugin and Ascend-pytorch sources of 2026-08-21; nothing of it was run on a device.
    operators = VendorOperators(
        file="npu.txt",
        falls_back_to_cpu=True,
        graph_class="NPUGraph",
        unpinned_upload_waits=True,
        waiting={
            "aten::scatter_reduce.two": _scatter_reduce_waits,
            "aten::scatter_reduce_.two": _scatter_reduce_waits,
            # A CANN without aclnnInplaceIndexFill reads every index back.
            "aten::index_fill_.int_Scalar": lambda args, kwargs: max(1, args[2].numel()),
            "aten::index_fill_.int_Tensor": lambda args, kwargs: max(1, args[2].numel()) + is_device_scalar(args[3]),
            "aten::_index_put_impl_": _index_put_waits,
        },
    )
