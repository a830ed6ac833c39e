"""Device memory: host bytes behind a tensor whose device really is the simulated one.

DLPack has a device code for extensions, and torch maps it to its one slot for out-of-tree devices, in both directions.
So a CPU tensor that is exported, relabelled and imported again comes back as a plain `torch.Tensor`, no subclass, with
a real storage on "npu:0" or "musa:0" (torch 2.13, run). Backwards, the same trick gives a kernel its CPU view.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

_CPU, _EXTENSION = 1, 12  # DLPack's device codes

# What fresh device memory holds: bytes that no test expects, so that a read that comes too early shows.
UNWRITTEN = 0xA5
UNWRITTEN_AT_MOST = 4096  # bytes; filling large tensors would only cost time


class _ExportedTensor(ctypes.Structure):
    """The leading fields of DLPack's DLTensor, a fixed binary interface."""

    _fields_ = (("data", ctypes.c_void_p), ("device_code", ctypes.c_int32), ("device_index", ctypes.c_int32))


_pointer_in_capsule = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in_capsule.restype = ctypes.c_void_p
_pointer_in_capsule.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _relabel(tensor: Tensor, device_code: int, device_index: int) -> Tensor:
    capsule = torch._C._to_dlpack(tensor)
    exported = _ExportedTensor.from_address(_pointer_in_capsule(capsule, b"dltensor"))
    exported.device_code, exported.device_index = device_code, device_index
    return torch._C._from_dlpack(capsule)


@functools.cache
def _travels_as_bytes(dtype: torch.dtype) -> bool:
    """Whether DLPack, as torch speaks it, has no name for a dtype."""
    return "float8" in str(dtype) or "float4" in str(dtype)


def allocate(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, index: int) -> Tensor:
    """A device tensor with unwritten memory."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        as_bytes = _travels_as_bytes(dtype)
        host = torch.empty_strided(size, stride, dtype=torch.uint8 if as_bytes else dtype, device="cpu")
        length = host.untyped_storage().nbytes()
        if 0 < length <= UNWRITTEN_AT_MOST:
            ctypes.memset(host.data_ptr(), UNWRITTEN if dtype is not torch.bool else 1, length)
        tensor = _relabel(host, _EXTENSION, index)
        return torch.ops.aten.view.dtype(tensor, dtype) if as_bytes else tensor


def host_view(tensor: Tensor) -> Tensor:
    """A CPU tensor over the bytes of a device tensor; keeps its storage alive, whatever becomes of the tensor."""
    if _travels_as_bytes(tensor.dtype):
        return _relabel(torch.ops.aten.view.dtype(tensor, torch.uint8), _CPU, 0).view(tensor.dtype)
    view = _relabel(tensor.detach(), _CPU, 0)
    view = view.conj() if tensor.is_conj() else view
    return torch._neg_view(view) if tensor.is_neg() else view
