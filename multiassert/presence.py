"""Which platforms have a real device in this process. Importing a vendor's package is part of asking, so it is never
done unasked: the doctor, the demo, the pytest plugin and this project's own tests ask.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import torch

from multiassert import simulate

VENDOR_PACKAGES = {"npu": "torch_npu", "musa": "torch_musa"}
SIMULATED = (*VENDOR_PACKAGES, simulate.GENERIC)


def device_type_of(platform: str) -> str:
    """What `tensor.device.type` says on the platform; ROCm's tensors say "cuda"."""
    return "cuda" if platform == "rocm" else platform


def missing_of(platform: str) -> str:
    """An empty string where the platform's real device is there, else what is missing. May initialise the device."""
    if platform == "cpu":
        return ""
    if platform == simulate.GENERIC:
        return "it is never real"
    simulator = simulate.installed()
    if simulator is not None and simulator.name == platform:
        return "it is simulated in this process"
    if platform in VENDOR_PACKAGES:
        package = VENDOR_PACKAGES[platform]
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
        try:
            importlib.import_module(package)
        except Exception as error:  # installed, but without the driver or the torch that it needs
            return f"{package} cannot be imported: {' '.join(str(error).split())[:200]}"
    if platform in ("cuda", "rocm") and bool(torch.version.hip) is not (platform == "rocm"):
        return f"this torch {torch.__version__} is not built for it"
    module = getattr(torch, device_type_of(platform), None)
    is_available: Callable[[], bool] | None = getattr(module, "is_available", None)
    if is_available is None:
        return f"this torch {torch.__version__} knows no torch.{device_type_of(platform)}"
    try:
        return "" if is_available() else f"torch.{device_type_of(platform)} finds no device"
    except Exception as error:  # one broken vendor package must not hide the other platforms
        return f"torch.{device_type_of(platform)} cannot be asked: {' '.join(str(error).split())[:200]}"


def device_of(platform: str) -> torch.device:
    """The device that tensors of the platform have, with its index."""
    return torch.empty(0, device=device_type_of(platform)).device
