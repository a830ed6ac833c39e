"""SGLang's plug-ins in a process that leaves ours out and in one that it spawns, for tests/test_sglang.py.

python -m tests.sglang_spawned      prints what a bad index raises in each, before and after plug-ins are loaded
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import types
from typing import Any


def errors_before_and_after_plugins() -> list[str]:
    """What a probe raises, called by SGLang's name and by one that was imported from there before."""
    os.environ["SGLANG_ENABLE_ASYNC_ASSERT"] = "1"
    probes: Any = importlib.import_module("sglang.srt.utils.async_probe")
    holder: Any = types.ModuleType("holder")  # as a module that has imported the probe by its name
    holder.maybe_detect_oob = probes.maybe_detect_oob
    sys.modules["holder"] = holder
    errors = [_error(probes), _error(holder)]
    importlib.import_module("sglang.srt.plugins").load_plugins()
    return [*errors, _error(probes), _error(holder)]


def _error(holder: Any) -> str:
    import torch

    try:
        holder.maybe_detect_oob(torch.tensor([-1]), 0, 4, "slots")
    except RuntimeError as error:
        return type(error).__name__
    return "nothing"


def _tell(queue: Any) -> None:
    queue.put(errors_before_and_after_plugins())


def main() -> None:
    """Run here without our plug-in, and in a spawned process with it."""
    os.environ["SGLANG_PLUGINS"] = "other"
    here = errors_before_and_after_plugins()
    del os.environ["SGLANG_PLUGINS"]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_tell, args=(queue,))
    process.start()
    spawned = queue.get(timeout=100)
    process.join()
    print(json.dumps([here, spawned]), flush=True)


if __name__ == "__main__":
    main()
