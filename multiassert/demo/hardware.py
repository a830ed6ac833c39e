"""Where the demo runs: the CPU, a real npu or musa device where there is one, else a simulated one."""

from __future__ import annotations

from typing import Any

import torch

from multiassert import delivery, simulate
from multiassert.presence import missing_of

PLATFORMS = ("cpu", "npu", "musa")


class NoDeviceError(Exception):
    """A platform has no device here and cannot be simulated either; the text says why."""


def set_up(platform: str) -> torch.device:
    """The device of `platform`; installs a simulated one where there is no real one. Raises NoDeviceError."""
    if missing_of(platform):
        try:
            simulator = simulate.install(platform)
        except RuntimeError as error:
            raise NoDeviceError(f"There is no {platform} device here, and none can be simulated: {error}.") from error
        if not simulator.compiled_half:
            _copy_tensors_by_cloning(platform)
    return torch.device(platform)


def simulator_of(device: torch.device) -> simulate.Simulator | None:
    """The simulator behind `device`; None if the device is real."""
    simulator = simulate.installed()
    return simulator if simulator is not None and simulator.name == device.type else None


def kind_of(device: torch.device) -> str:
    """Whether `device` is real or simulated, in a word."""
    return "real" if simulator_of(device) is None else "simulated"


def survives_crashes(device: torch.device) -> bool:
    """Whether work on `device` is possible after a run that crashed it: on the CPU an error is only an exception."""
    return device.type == "cpu" or simulator_of(device) is not None


def renew(device: torch.device) -> None:
    """Start a simulated device anew after a run, whether it crashed or not; elsewhere there is nothing to do.

    A real device that crashed works in no call of the same process any more: there it would take a new process.
    """
    simulator = simulator_of(device)
    if simulator is not None:
        simulator.reset()
        delivery.start_anew()


def _copy_tensors_by_cloning(platform: str) -> None:
    """Make `copy.deepcopy` clone a tensor of a device that is simulated without a compiler: torch's way crashes there.

    Transformers copies its settings so, which hold tensors, where the model drafts for itself.
    """
    copy_as_torch: Any = torch.Tensor.__deepcopy__

    def copy(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
        if tensor.device.type != platform or id(tensor) in memo:
            return copy_as_torch(tensor, memo)
        memo[id(tensor)] = tensor.detach().clone()
        return memo[id(tensor)]

    torch.Tensor.__deepcopy__ = copy  # type: ignore[method-assign]
