"""The platforms, one small file each: what is true of a device type and what its streams and events are called.

A backend never imports its vendor's package: a tensor of the vendor's proves that it is there. Third parties register
theirs under the entry-point group `multiassert.backends`: the name is the device type, the object a `Backend` class.
"""

if __name__ != "multiassert.backends":
    raise ImportError("import this package as multiassert.backends: it is part of multiassert and has no other name")

import functools
import importlib.metadata

import torch

from multiassert.backends.base import Backend, Mechanism, NativeAssert
from multiassert.backends.cpu import CpuBackend
from multiassert.backends.cuda import CudaBackend
from multiassert.backends.generic import GenericBackend
from multiassert.backends.mps import MpsBackend
from multiassert.backends.musa import MusaBackend
from multiassert.backends.npu import NpuBackend
from multiassert.backends.rocm import RocmBackend
from multiassert.backends.xpu import XpuBackend

__all__ = ["Backend", "Mechanism", "NativeAssert", "for_device_type", "named"]

_BUILT_IN: dict[str, type[Backend]] = {
    backend.name: backend
    for backend in (
        CpuBackend,
        CudaBackend,
        RocmBackend,
        NpuBackend,
        MusaBackend,
        XpuBackend,
        MpsBackend,
    )
}


@functools.cache
def named(platform: str) -> Backend:
    """The backend of a platform; a third party's wins over ours, and any unknown name is a generic device."""
    for entry_point in importlib.metadata.entry_points(group="multiassert.backends", name=platform):
        backend = entry_point.load()
        if not (isinstance(backend, type) and issubclass(backend, Backend)):
            raise TypeError(f"entry point {entry_point.value} must be a subclass of multiassert.backends.Backend")
        return backend()
    backend_class = _BUILT_IN.get(platform)
    return GenericBackend(platform) if backend_class is None else backend_class()


def for_device_type(device_type: str) -> Backend:
    """The backend for tensors whose `device.type` is this; ROCm's tensors say "cuda"."""
    return named("rocm" if device_type == "cuda" and torch.version.hip else device_type)
