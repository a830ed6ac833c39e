"""The platforms that a project's tests run on under pytest: a list that is the same everywhere, and what is behind it.

The names come from the command line or the environment alone, so that all workers of pytest-xdist collect the same
tests. Whether a name stands for a real device, a simulated one or none is found out when a test asks for it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping

import pytest
import torch

from multiassert import simulate
from multiassert.presence import SIMULATED, VENDOR_PACKAGES, missing_of
from multiassert.settings import KNOWN_PLATFORMS

# torch's own tests take their devices from these.
ONLY_FOR = "PYTORCH_TESTING_DEVICE_ONLY_FOR"
EXCEPT_FOR = "PYTORCH_TESTING_DEVICE_EXCEPT_FOR"

REAL = "real"
AS_SIMULATED = "simulated"


class Platforms:
    """The chosen platforms, and what each turned out to be in this process."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.found: dict[str, str] = {}  # real or simulated, for the summary
        self._missing: dict[str, str] = {}

    def ready(self, name: str) -> str:
        """Make the platform usable, by simulation if it must be; skips the test where that cannot be done."""
        if name not in self.found and name not in self._missing:
            missing = missing_of(name)
            if not missing:
                self.found[name] = REAL
            elif name in SIMULATED:
                self._simulate(name, missing)
            else:
                self._missing[name] = missing
        if name in self._missing:
            pytest.skip(f"{name}: {self._missing[name]}")
        return name

    def _simulate(self, name: str, missing: str) -> None:
        try:
            simulate.install(name)
            self.found[name] = AS_SIMULATED
        except RuntimeError as refusal:
            self._missing[name] = f"{missing}, and it cannot be simulated: {refusal}"


PLATFORMS = pytest.StashKey[Platforms]()


def platforms_of(config: pytest.Config) -> Platforms:
    """The platforms of a run; raises UsageError for names that are none, and for required ones that are not there."""
    if PLATFORMS not in config.stash:
        required = _split(config.getoption("multiassert_require") or "")
        chosen = _split(config.getoption("multiassert_platform") or "") or required
        _refuse_unknown("--multiassert-platform", chosen)
        _refuse_unknown("--multiassert-require", required)
        absent = {name: missing_of(name) for name in required}
        if any(absent.values()):
            told = "; ".join(f"{name} is not there: {missing}" for name, missing in absent.items() if missing)
            raise pytest.UsageError(f"--multiassert-require {','.join(required)}: {told}")
        config.stash[PLATFORMS] = Platforms(chosen or names_of_environment(os.environ))
    return config.stash[PLATFORMS]


def names_of_environment(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The platforms that torch's own variables ask for, in their order; cpu where they are not set."""
    excluded = _split(environment.get(EXCEPT_FOR, ""))
    names = [_platform_of(name) for name in _split(environment.get(ONLY_FOR, "")) or ("cpu",) if name not in excluded]
    return tuple(dict.fromkeys(names))


def _platform_of(device_type: str) -> str:
    """The platform behind a name of torch's tests, where one name stands for several vendors."""
    if device_type == "cuda" and torch.version.hip:
        return "rocm"
    if device_type == "privateuse1":
        installed = [name for name, package in VENDOR_PACKAGES.items() if importlib.util.find_spec(package)]
        return installed[0] if installed else next(iter(VENDOR_PACKAGES))
    return device_type


def _split(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))


def _refuse_unknown(option: str, names: tuple[str, ...]) -> None:
    plugged_in = [entry_point.name for entry_point in importlib.metadata.entry_points(group="multiassert.backends")]
    good = (*KNOWN_PLATFORMS, simulate.GENERIC, *plugged_in)
    unknown = [name for name in names if name not in good]
    if unknown:
        raise pytest.UsageError(f"{option}: {', '.join(unknown)} is no platform. Good names: {', '.join(good)}.")
