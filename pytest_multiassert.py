"""multiassert's pytest plugin as pytest sees it: options, the marker, the fixtures.

It is a module beside the package, and imports neither torch nor multiassert before a run asks for them: pytest imports
every installed plugin at the start of every run, also of projects that have nothing to do with it. The entry point has
the module's name, so that `pytest_plugins = ["pytest_multiassert"]` and `-p pytest_multiassert` find the same plugin
again; `-p no:multiassert` leaves it out. What it does is in multiassert/pytest_plugin.py, pytest_platforms.py and
pytest_children.py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

    from multiassert.injection import Poison
    from multiassert.pytest_children import RunInChildProcess
    from multiassert.pytest_platforms import Platforms
    from multiassert.pytest_plugin import AsyncViolations, Watch

    PoisonProbe = Callable[..., AbstractContextManager[Poison]]

MARKER = "async_violations"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("multiassert", "probes on device tensors")
    mode_help = "the mode of multiassert's probes, in this process and in those it starts: off, auto, warn, raise, trap"
    group.addoption("--multiassert", dest="multiassert_mode", metavar="MODE", help=mode_help)
    parser.addini("multiassert", f"{mode_help}; --multiassert and the MULTIASSERT variables win over it")
    group.addoption(
        "--multiassert-platform",
        metavar="NAMES",
        help="what tests with the fixture multiassert_platform or multiassert_device run on, with commas between the "
        "names: cpu, cuda, rocm, npu, musa, xpu, mps. Where there is no real npu or musa it is simulated, one of the "
        "two in a process (default: PYTORCH_TESTING_DEVICE_ONLY_FOR, or else cpu)",
    )
    group.addoption(
        "--multiassert-coverage",
        nargs="?",
        const="report",
        choices=("report", "require"),
        help="list at the end which probes were never seen to fire; with require the run fails if there is one",
    )
    group.addoption(
        "--multiassert-require",
        metavar="NAMES",
        help="platforms whose real device must be there; without it the run ends with a usage error",
    )


@pytest.hookimpl(tryfirst=True)  # before anything of the project's own starts a child process
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARKER}(kind=None, site=None, row=None): the test fails unless its probes see such a violation, and no "
        "other. kind: nan, inf, low, high, misaligned, range or cond. site: a part of the message or of file:line. "
        "row: an index, or the name that step(rows=...) gave.",
    )
    mode, source = config.getoption("multiassert_mode"), "--multiassert"
    if mode is None and not _environment_asks():
        mode, source = config.getini("multiassert") or None, "the ini option multiassert"
    if mode is not None or _environment_asks():
        _turn_on(config, mode, source)
    if config.getoption("multiassert_coverage"):
        _watch(config)
    if config.getoption("multiassert_platform") or config.getoption("multiassert_require"):
        _platforms(config)


def _environment_asks() -> bool:
    """Whether a variable sets the mode of a platform: all that start like one do, but for these."""
    others = ("MULTIASSERT_TEST_", "MULTIASSERT_KERNELS", "MULTIASSERT_JSONL")
    return any(
        name == "MULTIASSERT" or (name.startswith("MULTIASSERT_") and not name.startswith(others))
        for name in os.environ
    )


def _turn_on(config: pytest.Config, mode: str | None, source: str) -> None:
    """Probes on in the given mode, or in that of the environment; all tests are watched if any platform is on."""
    try:
        from multiassert import pytest_plugin

        is_on = pytest_plugin.set_mode(config, mode, source)
    except ValueError as error:  # it lists the good values
        raise pytest.UsageError(str(error)) from None
    if is_on:
        _watch(config).watches_all = True


def _watch(config: pytest.Config) -> Watch:
    """The part that follows the tests, started at its first use."""
    from multiassert import pytest_plugin

    return pytest_plugin.watch_of(config)


def _platforms(config: pytest.Config) -> Platforms:
    from multiassert import pytest_platforms

    return pytest_platforms.platforms_of(config)


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(MARKER in getattr(item, "fixturenames", ()) or item.get_closest_marker(MARKER) for item in session.items):
        _watch(session.config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "multiassert_platform" in metafunc.fixturenames:
        names = _platforms(metafunc.config).names
        metafunc.parametrize("multiassert_platform", names, indirect=True, scope="session")
        _watch(metafunc.config)  # it tells at the end which of them were real


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, in the process that has the workers
def pytest_testnodedown(node: Any) -> None:
    told = getattr(node, "workeroutput", {}).get("multiassert")
    if told is not None:
        _watch(node.config).add_worker(told)


@pytest.fixture
def async_violations(request: pytest.FixtureRequest) -> AsyncViolations:
    """What the probes see in this test. Where probes are off, they are on in mode raise for the length of the test.

    `async_violations.expect(kind="nan", site="logits", row=1)` does what the marker does. `async_violations.drain()`
    waits for the devices and returns what no other call has raised or returned, whatever the mode; what it returns
    fails no test.
    """
    return _watch(request.config).violations_of(request.node)


@pytest.fixture
def run_in_child_process() -> RunInChildProcess:
    """Run a function, or code, in a Python process of its own: for what ends one, such as a trap on a device.

    `run_in_child_process(body, *arguments, timeout=120, env={...})` takes a function at the top level of a module, or
    code as a string, and returns how the child ended: `returncode`, `signal`, `stdout`, `stderr`, and `violations`, as
    its log lines tell them. The child inherits the environment, simulates the platform that is simulated here, and
    writes no core dump. One that does not end in time is killed, with all it has started, and the test fails.
    """
    from multiassert import pytest_children

    return pytest_children.run_in_child_process


@pytest.fixture
def poison_probe() -> PoisonProbe:
    """Make a probe see a bad value where it stands, in a copy: `with poison_probe("verify: logits", row=2): ...`.

    It is `multiassert.injection.poison`: what the probe reports then is a violation as any other, so the test expects
    it. A probe that the scope did not come to is an error.
    """
    from multiassert import injection

    return injection.poison


@pytest.fixture(scope="session")
def multiassert_platform(request: pytest.FixtureRequest) -> str:
    """The platform that a test runs on: one run of the test for each of --multiassert-platform.

    A platform that is not there is simulated if that can be done, else the test is skipped and told why.
    """
    if not hasattr(request, "param"):
        pytest.fail(
            "multiassert_platform and multiassert_device have to be arguments of a test function or of a fixture of "
            "one: pytest gives no parameters to the methods of unittest.TestCase, nor to getfixturevalue().",
            pytrace=False,
        )
    name: str = _platforms(request.config).ready(request.param)
    return name


@pytest.fixture(scope="session")
def multiassert_device(multiassert_platform: str) -> torch.device:
    """The platform's device, with its index, as tensors have it."""
    from multiassert import presence

    return presence.device_of(multiassert_platform)
