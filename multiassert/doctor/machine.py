"""A device under examination, in the child process that examines it."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import torch
from torch import Tensor

import multiassert
from multiassert import Violation, presence, simulate

LONG_WORK_SECONDS = 0.4
GRAPH_CLASSES = ("CUDAGraph", "NPUGraph", "MUSAGraph", "XPUGraph")


class NotHere(Exception):
    """A question that cannot be asked of this machine; the text is the reason."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """The device of a platform."""

    platform: str
    device: torch.device
    simulator: simulate.Simulator | None

    @property
    def module(self) -> Any:
        """torch.cuda, torch.npu and so on."""
        return torch.get_device_module(self.device)

    def need(self, *names: str) -> None:
        """Raise NotHere on the CPU, and where the device's module lacks one of the names."""
        if self.device.type == "cpu":
            raise NotHere("a CPU has done its work when a call returns: it has no streams and no graphs")
        missing = [name for name in names if not hasattr(self.module, name)]
        if missing:
            raise NotHere(f"torch.{self.device.type} has no {', '.join(missing)}")

    def finish(self) -> None:
        """Let the device do all its work; a failure of it is raised here."""
        if self.simulator is not None:
            self.simulator.run_all()  # time passes, and no host wait is counted
            self.simulator.raise_fault()
        elif self.device.type != "cpu":
            self.module.synchronize()

    def put(self, tensor: Tensor) -> Tensor:
        """A copy on the device; it is there when this returns."""
        moved = tensor.to(self.device)
        self.finish()
        return moved

    def rows(self, value: float = 0.0, row: int = 2, count: int = 4) -> Tensor:
        """Rows of eight zeros, with one value in one of them; they are there when this returns."""
        tensor = torch.zeros(count, 8)
        tensor[row, 5] = value
        return self.put(tensor)

    def reports(self) -> list[Violation]:
        """End a step, let the device finish, and look without waiting."""
        multiassert.step()
        self.finish()
        return multiassert.poll()

    def new_graph(self) -> Any:
        """An empty graph of the device's own class."""
        self.need("graph", "Stream", "stream")
        found = next((name for name in GRAPH_CLASSES if hasattr(self.module, name)), None)
        if found is None:
            raise NotHere(f"torch.{self.device.type} has none of {', '.join(GRAPH_CLASSES)}")
        return getattr(self.module, found)()

    def start_long_work(self) -> Any:
        """Keep the current stream busy for LONG_WORK_SECONDS (simulated time stands still); the event of its end."""
        self.need("Event")
        if self.simulator is None:
            self.need("_sleep")
            self.module._sleep(int(LONG_WORK_SECONDS * _cycles_per_second(self.module)))
        event = self.module.Event()
        event.record()
        return event


@functools.cache
def _cycles_per_second(module: Any) -> float:
    cycles = 200_000_000
    for count in (cycles // 10, cycles):  # at first an idle device's clock is slow
        module.synchronize()
        began = time.monotonic()
        module._sleep(count)
        module.synchronize()
    return cycles / (time.monotonic() - began)


def set_up(platform: str, simulated: bool) -> Machine:
    """The machine of a platform, in this process; raises NotHere."""
    simulator = simulate.install(platform) if simulated else None
    missing = "" if simulated else presence.missing_of(platform)
    if missing:
        raise NotHere(missing)
    return Machine(platform, presence.device_of(platform), simulator)
