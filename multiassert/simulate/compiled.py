"""Builds the compiled half, once for each torch, and loads it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from typing import Any

import torch

SOURCE = pathlib.Path(__file__).with_name("guard.cpp")
WITHOUT_IT = (
    "Without the compiled half there is one device, torch.Event and torch.Stream are not the simulated ones (use the "
    "device module's own), there are no device generators, to('cpu', non_blocking=True) raises, and a deepcopy of a "
    "device tensor ends the process. The compiled half takes a C++20 compiler: c++ or g++ on PATH, or what CXX names."
)


def _compiler() -> list[str] | None:
    """The compiler's command; CXX may hold arguments too."""
    command = shlex.split(os.environ.get("CXX", ""))
    if command:
        return command if shutil.which(command[0]) else None
    found = shutil.which("c++") or shutil.which("g++")
    return None if found is None else [found]


def _cache_folder() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME")
    home = pathlib.Path(base) if base else pathlib.Path.home() / ".cache"
    try:
        folder = home / "multiassert"
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = pathlib.Path(tempfile.mkdtemp(prefix="multiassert-"))
    return folder


def build() -> pathlib.Path | None:
    """The built half, from the cache where source and torch are the same; None without a compiler."""
    compiler = _compiler()
    if compiler is None:
        return None
    torch_folder = pathlib.Path(torch.__file__).parent
    made_of = SOURCE.read_bytes() + f"{torch.__version__} {torch_folder} {sys.version} {compiler}".encode()
    built = _cache_folder() / hashlib.sha256(made_of).hexdigest()[:16] / "multiassert_guard.so"
    if built.exists():
        return built
    built.parent.mkdir(parents=True, exist_ok=True)
    unfinished = built.with_suffix(f".{os.getpid()}")
    command = [
        *(*compiler, "-std=c++20", "-O0", "-w", "-fPIC", "-shared", "-fvisibility=hidden"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{torch_folder / 'include'}",
        f"-I{sysconfig.get_paths()['include']}",
        *("-o", str(unfinished), str(SOURCE)),
        f"-L{torch_folder / 'lib'}",
        *("-lc10", "-ltorch_cpu", "-ltorch_python"),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"the compiled half of the simulated device does not build:\n{run.stderr[-2000:]}")
    os.replace(unfinished, built)  # at once, since several processes may build it
    return built


def load() -> Any | None:
    """The compiled half as a module; None without a compiler."""
    built = build()
    if built is None:
        return None
    spec = importlib.util.spec_from_file_location("multiassert_guard", built)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {built}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
