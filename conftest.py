"""What all tests share: platforms, a clean multiassert before and after each test, child processes for what ends one.

    pytest                              on the CPU
    pytest --platform npu               on a real NPU where there is one, else on the simulated one
    pytest --platform all               on every platform that is really there; the others are skipped
    MULTIASSERT_TEST_PLATFORMS=cpu,npu  the same as --platform cpu,npu

A test that asks for `device` or `platform` runs once on each of the chosen platforms. The others are about no platform,
and run where cpu is among them. A process can simulate one vendor only: see `tests/all_platforms.py` for all of them.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import multiassert
from multiassert import backends, delivery, presence, simulate
from multiassert.backends import NativeAssert

PLATFORMS = ("cpu", "cuda", "rocm", "npu", "musa", "xpu", "mps", "generic")

ChildRun = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--platform",
        default=os.environ.get("MULTIASSERT_TEST_PLATFORMS", "cpu"),
        help=f"platforms to test on, with commas between them: {', '.join(PLATFORMS)}; or all (default: cpu)",
    )


def pytest_configure(config: pytest.Config) -> None:
    chosen = config.getoption("--platform")
    names = PLATFORMS if chosen == "all" else tuple(name.strip() for name in chosen.split(",") if name.strip())
    unknown = [name for name in names if name not in PLATFORMS]
    if unknown or not names:
        raise pytest.UsageError(f"--platform {chosen}: good names are {', '.join(PLATFORMS)}, all")
    states = {name: _state_of(name) for name in names}
    if chosen != "all":
        to_simulate = [name for name, state in states.items() if state and name in presence.SIMULATED]
        if len(to_simulate) > 1:
            raise pytest.UsageError(
                f"--platform {chosen}: one process simulates one vendor, run {' and '.join(to_simulate)} separately"
            )
        for name in to_simulate:
            simulate.install(name)
            states[name] = ""
        missing = [f"{name}: {state}" for name, state in states.items() if state]
        if missing:
            raise pytest.UsageError(f"--platform {chosen}: {'; '.join(missing)}")
    config.stash[CHOSEN] = states


CHOSEN = pytest.StashKey[dict[str, str]]()


def _state_of(platform: str) -> str:
    """An empty string where the platform's real device is there, else what is missing."""
    if platform == "npu" and importlib.util.find_spec("torch_npu") is not None:
        # Asked of the real library: an operator without a kernel is an error, not a hidden fallback to the CPU.
        os.environ.setdefault("TORCH_NPU_FALLBACK_CPU_DISABLE", "1")
    return presence.missing_of(platform)


def pytest_report_header(config: pytest.Config) -> list[str]:
    simulator = simulate.installed()
    lines = []
    for name, missing in config.stash[CHOSEN].items():
        if missing:
            lines.append(f"platform {name}: not here, {missing}")
        elif simulator is not None and simulator.name == name:
            operators = backends.named(name).operators
            source = operators.provenance()["package"] if operators is not None else "no vendor"
            half = "with" if simulator.compiled_half else "without"
            lines.append(f"platform {name}: simulated, operators of {source}, {half} its compiled half")
        else:
            lines.append(f"platform {name}: real")
    return lines


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "platform" in metafunc.fixturenames:
        metafunc.parametrize("platform", list(metafunc.config.stash[CHOSEN]), indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "cpu" in config.stash[CHOSEN]:
        return
    about_no_platform = [item for item in items if "platform" not in getattr(item, "fixturenames", ())]
    items[:] = [item for item in items if item not in about_no_platform]
    config.hook.pytest_deselected(items=about_no_platform)


@pytest.fixture
def platform(request: pytest.FixtureRequest) -> str:
    """The name of the platform that the test runs on."""
    name: str = request.param
    missing = request.config.stash[CHOSEN][name]
    if missing:
        pytest.skip(f"{name}: {missing}")
    return name


@pytest.fixture
def device(platform: str) -> torch.device:
    """The platform's device, with its index as tensors have it."""
    return torch.empty(0, device="cuda" if platform == "rocm" else platform).device


@pytest.fixture
def simulator(platform: str) -> simulate.Simulator:
    """The simulated device, for tests that look into it."""
    found = simulate.installed()
    if found is None or found.name != platform:
        pytest.skip(f"{platform} is not simulated here")
    return found


@pytest.fixture
def traps(platform: str) -> bool:
    """Whether the platform takes mode trap and the process survives it."""
    if backends.named(platform).native in (NativeAssert.FIRES, NativeAssert.ABORTS):
        pytest.skip(f"a trap ends the process on {platform}")
    return backends.named(platform).trap_refusal() is None


@pytest.fixture(autouse=True)
def clean_multiassert(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Probes off, no violation from another test, and none left behind unseen by this one."""
    # A slow machine must not make a probe snapshot by itself, where a test counts kernels or chooses what is seen when.
    monkeypatch.setattr(delivery, "SECONDS_BETWEEN_SNAPSHOTS", math.inf)
    simulator = simulate.installed()
    delivery.start_anew()
    if simulator is not None:
        simulator.reset()
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


def finish(device: torch.device) -> None:
    """Let time pass until the device has done its work."""
    simulator = simulate.installed()
    if simulator is not None and simulator.name == device.type:
        simulator.run_all()
    elif device.type != "cpu":
        torch.get_device_module(device).synchronize()


def step_and_finish(device: torch.device, tag: object = None, rows: Sequence[object] | None = None) -> None:
    """End a step and look at it: on the CPU step() has it at once, elsewhere once the device has done its work."""
    __tracebackhide__ = True
    multiassert.step(tag, rows)
    finish(device)
    violations = multiassert.poll()
    assert not violations, "in mode warn, poll() has to be called by the test itself"


def to_device(value: Any, device: torch.device) -> Any:
    """A tensor on the device; anything else as it is."""
    return value.to(device) if isinstance(value, torch.Tensor) else value
