"""What a vendor's torch package does with ATen operators: the facts behind the simulated device.

A list of names is data, in `operators/`, with its provenance in its first lines. What cannot be said by a name, such as
a kernel that waits only for certain arguments, is a function on the platform's page.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

# From the arguments of one call to how many times the host waits in it.
Waits = Callable[[tuple[Any, ...], Mapping[str, Any]], int]


@dataclasses.dataclass(frozen=True)
class VendorOperators:
    """One vendor's operators."""

    file: str  # in operators/
    falls_back_to_cpu: bool  # whether an operator that is not listed runs on the CPU, or raises
    graph_class: str  # what the vendor calls its captured graph
    unpinned_upload_waits: bool  # whether a non_blocking copy from unpinned memory waits
    waiting: Mapping[str, Waits]  # listed, yet the host waits

    def native(self) -> frozenset[str]:
        """The listed names, such as "aten::amax.out"."""
        return frozenset(line for line in self._lines() if not line.startswith("#"))

    def provenance(self) -> dict[str, str]:
        """Which package the list is of, how it was read and when."""
        comments = (line.removeprefix("#").strip() for line in self._lines() if line.startswith("#"))
        return dict(comment.split(": ", 1) for comment in comments if ": " in comment)

    def _lines(self) -> tuple[str, ...]:
        folder = pathlib.Path(__file__).parent / "operators"
        return tuple((folder / self.file).read_text(encoding="utf-8").splitlines())


def argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str, default: Any = None) -> Any:
    """One argument of an operator's call, given by position or by name."""
    return args[position] if position < len(args) else kwargs.get(name, default)


def is_device_scalar(value: object) -> bool:
    """Whether a value is a 0-dim tensor on a device."""
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type != "cpu"


def is_host_scalar(value: object) -> bool:
    """Whether a value is a 0-dim tensor on the CPU."""
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu"
