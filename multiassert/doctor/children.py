"""Processes of their own for what may hang, trap or abort: what each told before it ended, and how it ended.

Nothing of a device is touched in the process that asks, and nothing that it starts outlives it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
AT_ONCE = 2  # more of them on a device would measure each other

# What a child calls for each thing that it has learnt; the value must be JSON.
Tell = Callable[[str, Any], None]
Examination = Callable[[Tell], None]


@dataclasses.dataclass(frozen=True)
class Ended:
    """A child that has ended."""

    how: str  # "exit code 0", "SIGABRT", "no end within 60 s"
    told: dict[str, Any]
    output: str  # its stdout and stderr

    @property
    def well(self) -> bool:
        return self.how == "exit code 0"

    @property
    def last_words(self) -> str:
        """The last line that it wrote, for a report."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""


def run_all(examinations: Sequence[Examination], seconds: float, at_once: int = AT_ONCE) -> list[Ended]:
    """Run each in a process of its own, some at once, each for at most `seconds`; in their order."""
    with tempfile.TemporaryDirectory(prefix="multiassert-doctor-") as folder:
        waiting = [_Child(each, pathlib.Path(folder, str(number))) for number, each in enumerate(examinations)]
        children, running = list(waiting), list[_Child]()
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    running.append(waiting.pop(0))
                    running[-1].start()
                multiprocessing.connection.wait([child.process.sentinel for child in running], timeout=0.1)
                for child in running:
                    child.end_if_over(seconds)
                running = [child for child in running if child.ended is None]
        finally:
            for child in running:
                child.kill()
        return [child.ended for child in children if child.ended is not None]


def start_method() -> str:
    """fork where nothing forbids it: a child then has torch without importing it anew.

    A process that has initialised a device, or runs threads, may not be forked; and macOS forbids it by itself.
    """
    is_simple = threading.active_count() == 1 and not torch.cuda.is_initialized()
    return "fork" if sys.platform == "linux" and is_simple else "spawn"


class _Child:
    def __init__(self, examination: Examination, folder: pathlib.Path) -> None:
        self._folder = folder
        context: Any = multiprocessing.get_context(start_method())
        self.process = context.Process(target=_examine, args=(examination, folder))
        self.ended: Ended | None = None
        self._began = 0.0

    def start(self) -> None:
        self._folder.mkdir()
        self._began = time.monotonic()
        self.process.start()

    def end_if_over(self, seconds: float) -> None:
        """Note how it ended, or end it where its time is over."""
        code = self.process.exitcode
        if code is not None:
            self.ended = self._as_ended(f"exit code {code}" if code >= 0 else signal.Signals(-code).name)
        elif time.monotonic() - self._began > seconds:
            self.ended = self._as_ended(f"no end within {seconds:.0f} s")
        if self.ended is not None:
            self.kill()

    def kill(self) -> None:
        """End it and all that it has started, such as the workers of torch's compiler."""
        if self.process.pid is not None and (self._folder / "leads").exists():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()

    def _as_ended(self, how: str) -> Ended:
        told, output = self._folder / "told", self._folder / "output"
        lines = told.read_text(encoding="utf-8").splitlines() if told.exists() else []
        pairs = [json.loads(line) for line in lines if line.endswith("]")]  # a killed one may leave half a line
        return Ended(how, dict(pairs), output.read_text(errors="replace") if output.exists() else "")


def _examine(examination: Examination, folder: pathlib.Path) -> None:
    """What a child does."""
    import resource

    os.setpgrp()
    (folder / "leads").touch()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    output = open(folder / "output", "w", encoding="utf-8", buffering=1)  # noqa: SIM115, until the process ends
    for stream in (1, 2):  # what is written below Python, such as the text of a device assert
        os.dup2(output.fileno(), stream)
    sys.stdout = sys.stderr = output
    try:
        examination(functools.partial(_tell, folder / "told"))
    except Exception:
        traceback.print_exc()
        os._exit(1)


def _die_with_parent() -> None:
    """End when the doctor does, even where it is killed and can end nothing."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _tell(file: pathlib.Path, name: str, value: Any) -> None:
    with open(file, "a", encoding="utf-8") as opened:
        opened.write(json.dumps([name, value]) + "\n")
