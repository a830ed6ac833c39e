"""What all tests share: a clean multiassert before and after each, and child processes for what ends one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

import multiassert
from multiassert import delivery

ChildRun = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def clean_multiassert() -> Iterator[None]:
    """Probes off, no violation from another test, and none left behind unseen by this one."""
    delivery.start_anew()
    with multiassert.override("off"):
        yield
    delivery.start_anew()


@pytest.fixture
def run_child() -> ChildRun:
    """Run Python code in a process of its own, with the given environment variables and none of MULTIASSERT's."""

    def run(code: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MULTIASSERT", "SGLANG"))}
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**inherited, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
