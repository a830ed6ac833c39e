"""SGLang's own classes, small and on the CPU or on a simulated device, for its tests and for scripts/sglang_waits.py.

    prepare()                       # before any import of SGLang
    import_sglang()                 # before a device is simulated: SGLang would look for the vendor's package
    device = device_of("npu")

What importing these takes: see PACKAGES.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

# What importing these takes besides SGLang itself, torch and the extra `bench`; and all of it by its modules' names.
PACKAGES = (
    "apache-tvm-ffi",
    "compressed-tensors",
    "dill",
    "einops",
    "fastapi",
    "openai",
    "partial-json-parser",
    "sentencepiece",
    "setproctitle",
    "uvicorn",
)
IMPORTED = (
    "aiohttp IPython msgspec numpy orjson PIL psutil pybase64 zmq requests starlette transformers triton "
    "tvm_ffi compressed_tensors dill einops fastapi openai partial_json_parser sentencepiece setproctitle uvicorn"
)
SLOTS, PAGE, VOCABULARY = 16, 4, 512
MODULES = (
    "sglang.srt.utils.async_probe",
    "sglang.srt.utils.invariants",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.layers.vocab_parallel_embedding",
    "sglang.srt.layers.sampler",
    "sglang.srt.speculative.spec_utils",
    "sglang.srt.managers.scheduler",
)

_scopes = contextlib.ExitStack()


class _Torchvision(types.ModuleType):
    """Stands for torchvision, which SGLang imports for images only, and which must fit the torch that is there."""

    __path__: ClassVar[list[str]] = []
    __version__ = "0.28"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":
            return enum.Enum(name, "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS")
        return type(name, (), {})


class _TorchvisionFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Torchvision(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def missing() -> str:
    """An empty string where SGLang can be imported, else what is missing."""
    names = ["sglang", *IMPORTED.split()]
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def prepare() -> None:
    """Stand in for torchvision where it is missing; quiet SGLang's warnings about hardware that is not there."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.insert(0, _TorchvisionFinder())
    warnings.filterwarnings("ignore", module="sglang")
    os.environ["SGLANG_NATIVE_MOVE_KV_CACHE"] = "1"  # a move in plain torch instead of a Triton kernel


def import_sglang() -> None:
    """Import the modules of SGLang that are used here; some ten seconds."""
    for name in MODULES:
        importlib.import_module(name)


def device_of(platform: str) -> torch.device:
    """The platform's device, simulated if it is not the CPU."""
    if platform != "cpu":
        from multiassert import simulate

        simulate.install(platform)
    return torch.empty(0, device=platform).device


def pool_on(device: torch.device) -> Any:
    """A KV pool of SLOTS slots and a page of padding, one layer."""
    memory_pool: Any = sys.modules["sglang.srt.mem_cache.memory_pool"]
    return memory_pool.MHATokenToKVPool(
        size=SLOTS,
        page_size=PAGE,
        dtype=torch.float32,
        head_num=2,
        head_dim=4,
        layer_num=1,
        device=str(device),
        enable_memory_saver=False,
    )


def embedding_on(device: torch.device) -> Any:
    """The embedding of VOCABULARY token ids, of no tensor-parallel group."""
    parallel: Any = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    _scopes.enter_context(parallel.override(tp_group=None))  # for good, since it is asked for at each call
    module: Any = sys.modules["sglang.srt.layers.vocab_parallel_embedding"]
    return module.VocabParallelEmbedding(VOCABULARY, 8, enable_tp=False).to(device)


@contextlib.contextmanager
def switches(**values: object) -> Iterator[None]:
    """SGLang's switches, without their prefix, for a while: `switches(ENABLE_ASYNC_ASSERT=True)`."""
    envs: Any = importlib.import_module("sglang.srt.environ").envs
    before = dict(os.environ)  # SGLang's own scope does not end where its body raises
    try:
        with contextlib.ExitStack() as scopes:
            for name, value in values.items():
                scopes.enter_context(getattr(envs, f"SGLANG_{name}").override(value))
            yield
    finally:
        for name in values:
            os.environ.pop(f"SGLANG_{name}", None)
        os.environ.update(before)
