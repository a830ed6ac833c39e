"""Where and when numbers were measured: what somebody needs to get similar ones."""

from __future__ import annotations

import datetime
import importlib.metadata
import pathlib
import platform

import torch

PACKAGES = ("multiassert", "sglang", "triton", "numpy")


def describe() -> dict[str, str]:
    """Versions, processor, threads and date."""
    return {
        "date": datetime.date.today().isoformat(),
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in PACKAGES},
    }


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
