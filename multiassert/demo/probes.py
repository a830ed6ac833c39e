"""All that a decoding run asks of multiassert, with what it costs; and the same checks as plain asserts, to compare."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator

import torch

import multiassert
from multiassert import Violation
from multiassert.demo import hardware
from multiassert.simulate import Ledger


@dataclasses.dataclass
class Cost:
    """What the calls of one run cost on a simulated device; elsewhere only the calls are counted."""

    probes: int = 0
    probe_kernels: int = 0
    snapshots: int = 0
    """Calls of step() and of poll()."""
    snapshot_kernels: int = 0
    waits: list[str] = dataclasses.field(default_factory=list)
    """Each host wait inside any of these calls, in words."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.probes + other.probes,
            self.probe_kernels + other.probe_kernels,
            self.snapshots + other.snapshots,
            self.snapshot_kernels + other.snapshot_kernels,
            self.waits + other.waits,
        )


class Probes:
    """The calls of multiassert in one run, counted, and the violations that they returned.

    A probe is called as `with probes.counted(): probes.maybe_detect_nan(...)`. What it calls is multiassert's own
    function, so a record names the line in the decoding code.
    """

    def __init__(self, device: torch.device, mode: str) -> None:
        self.device = device
        self.mode = mode
        self.cost = Cost()
        self.found: list[Violation] = []
        self.maybe_detect_nan: Callable[..., None] = multiassert.maybe_detect_nan
        self.maybe_detect_oob: Callable[..., None] = multiassert.maybe_detect_oob
        self.maybe_detect_page_aligned: Callable[..., None] = multiassert.maybe_detect_page_aligned

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """A scope that holds one probe."""
        with self.watched_for_waits() as ledger:
            yield
        self.cost.probes += 1
        self.cost.probe_kernels += len(ledger.kernels)

    @contextlib.contextmanager
    def watched_for_waits(self) -> Iterator[Ledger]:
        """A scope whose host waits are put down to the probes."""
        simulator = hardware.simulator_of(self.device)
        with contextlib.nullcontext(Ledger()) if simulator is None else simulator.record() as ledger:
            yield ledger
        self.cost.waits += map(str, ledger.waits)

    def begin(self) -> None:
        """Allocate what the probes need."""
        with self.watched_for_waits():
            multiassert.prewarm(self.device)

    def step(self, tag: str) -> None:
        """End a step of the engine."""
        with self._counted_snapshot():
            multiassert.step(tag=tag)

    def poll(self) -> None:
        """Send what was seen on its way, before work that a bad value would crash; keeps what is returned."""
        with self._counted_snapshot():
            self.found += multiassert.poll()

    @contextlib.contextmanager
    def _counted_snapshot(self) -> Iterator[None]:
        with self.watched_for_waits() as ledger:
            yield
        self.cost.snapshots += 1
        self.cost.snapshot_kernels += len(ledger.kernels)

    def end(self) -> RuntimeError | None:
        """Collect what is still under way, which may wait and is not counted; returns the error of a failed device.

        Violations come first: a failed device's error is raised only once there is nothing left to return.
        """
        try:
            while violations := multiassert.drain():
                self.found += violations
        except RuntimeError as failure:
            return failure
        return None


class PlainAsserts(Probes):
    """The same checks written with `torch._assert_async` alone, as engines do; multiassert itself is off."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, "off")
        self.maybe_detect_nan = _assert_no_nan
        self.maybe_detect_oob = _assert_in_bounds
        self.maybe_detect_page_aligned = _assert_page_aligned


def _assert_no_nan(tensor: torch.Tensor, message: str) -> None:
    _assert_plainly(~torch.any(torch.isnan(tensor)), f"NaN detected! {message}")


def _assert_in_bounds(indices: torch.Tensor, low: int, high: int, message: str, *, sentinel: int | None = None) -> None:
    if sentinel is None:
        above, below = indices.min() >= low, indices.max() < high
    else:
        is_sentinel = indices == sentinel
        above, below = ((indices >= low) | is_sentinel).all(), ((indices < high) | is_sentinel).all()
    _assert_plainly(above, f"index < {low}: {message}")
    _assert_plainly(below, f"index >= {high}: {message}")


def _assert_page_aligned(indices: torch.Tensor, page_size: int, message: str, *, where: torch.Tensor) -> None:
    _assert_plainly(((indices % page_size == 0) | ~where).all(), f"page-misaligned: {message}")


def _assert_plainly(condition: torch.Tensor, message: str) -> None:
    with warnings.catch_warnings():
        # torch_npu warns that it falls back to the CPU. The waits of it are counted and shown.
        warnings.simplefilter("ignore", UserWarning)
        torch._assert_async(condition, message)
