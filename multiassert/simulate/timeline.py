"""The simulated device in time: queues of work, what the host waited for, and graphs.

Work is queued per stream and runs only when something makes it run: the host waits, or a test says that time passes
(`run_all`, `advance`). There is no thread and no clock, so "not visible yet" can be asserted instead of slept for.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import threading
import traceback
from collections.abc import Callable, Iterator

import torch

_TORCH_FILES = os.path.dirname(torch.__file__) + os.sep
_OUR_FILES = os.path.dirname(__file__) + os.sep


class HiddenSync(AssertionError):
    """The host would have waited for the device, inside `no_sync()`."""


class DeviceFault(RuntimeError):
    """Work failed on the device: found at the next wait, and at every later one, as on hardware."""


@dataclasses.dataclass(frozen=True)
class HostWait:
    """One time that the host waited for the device."""

    kind: str  # item, copy to host, copy to device, stream, event, device, cpu fallback, data dependent, in the kernel
    what: str
    stack: traceback.StackSummary

    @property
    def place(self) -> str:
        """The innermost line that is neither torch's nor the simulator's."""
        for frame in reversed(self.stack):
            if not frame.filename.startswith((_TORCH_FILES, _OUR_FILES)):
                return f"{frame.filename}:{frame.lineno} in {frame.name}"
        return "?"

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}, at {self.place}"


@dataclasses.dataclass
class Ledger:
    """What happened on the device, in order: kernels and copies, host waits, operators that fell back to the CPU."""

    kernels: list[str] = dataclasses.field(default_factory=list)
    waits: list[HostWait] = dataclasses.field(default_factory=list)
    fallbacks: list[str] = dataclasses.field(default_factory=list)


class Work:
    """One entry of a queue; `run` is None for a marker (an event, a wait for another stream)."""

    __slots__ = ("after", "done", "name", "run")

    def __init__(self, run: Callable[[], None] | None, name: str, after: tuple[Queue, Work] | None = None) -> None:
        self.run = run
        self.name = name
        self.after = after
        self.done = False


class Queue:
    """The work of one stream that has not run yet."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.work: collections.deque[Work] = collections.deque()

    def run_next(self) -> None:
        """Run the first entry, and first what it waits for on another stream."""
        first = self.work[0]
        if first.after is not None:
            queue, awaited = first.after
            queue.run_until(awaited)
        self.work.popleft()
        first.done = True
        if first.run is not None and self.simulator.fault is None:
            try:
                first.run()
            except Exception as error:
                self.simulator.fault = error

    def run_until(self, awaited: Work) -> None:
        while self.work and not awaited.done:
            self.run_next()

    def run_all(self) -> None:
        while self.work:
            self.run_next()


class Graph:
    """Captured work; a replay queues it again, over the same memory."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._work: list[Work] = []
        self.queue: Queue | None = None

    def add(self, work: Work) -> None:
        self._work.append(work)

    def capture_begin(self, *ignored: object, **also_ignored: object) -> None:
        simulator = self._simulator
        index = simulator.current_device()
        if simulator.capture is not None:
            raise RuntimeError("a capture is already under way")
        if simulator.current_stream(index) == 0:
            raise RuntimeError("a graph must be captured on a stream that is not the default one")
        self._work, self.queue = [], simulator.queue(index, simulator.current_stream(index))
        simulator.capture = self

    def capture_end(self) -> None:
        self._simulator.capture = None

    def replay(self) -> None:
        index = self._simulator.current_device()
        for work in self._work:
            self._simulator.submit(work.run, work.name, index)

    def reset(self) -> None:
        self._work = []

    def pool(self) -> tuple[int, int]:
        return (0, 0)


class Simulator:
    """A simulated device: its streams and what happened on it. `install` returns the one of this process.

    `kernels`, `waits` and `fallbacks` are the ledgers since the last `reset`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.RLock()
        self.current_device: Callable[[], int] = lambda: 0
        self.device_count = 1
        self.compiled_half = False
        self.generator = torch.Generator()  # what random kernels draw from where they are given no generator
        self._next_id = 1
        self.reset()

    def reset(self, eager: bool = False) -> None:
        """Forget everything: queued work, ledgers, faults. With `eager`, work runs when it is queued from now on."""
        with self.lock:
            self.ledger = Ledger()
            self.eager = eager
            self.fault: Exception | None = None
            self.capture: Graph | None = None
            self._forbidden = False
            self._queues: dict[tuple[int, int], Queue] = {}
            self._current = threading.local()
            self._events: dict[int, tuple[Queue, Work]] = {}

    @property
    def kernels(self) -> list[str]:
        return self.ledger.kernels

    @property
    def waits(self) -> list[HostWait]:
        return self.ledger.waits

    @property
    def fallbacks(self) -> list[str]:
        return self.ledger.fallbacks

    # For tests.

    def run_all(self) -> None:
        """Time passes until the device is idle; no host wait is counted."""
        with self.lock:
            for queue in list(self._queues.values()):
                queue.run_all()

    def advance(self, count: int = 1, index: int = 0, stream: int | None = None) -> int:
        """Run the next entries of one stream, the current one by default; how many there were."""
        with self.lock:
            queue = self.queue(index, self.current_stream(index) if stream is None else stream)
            for done in range(count):
                if not queue.work:
                    return done
                queue.run_next()
            return count

    @property
    def pending(self) -> int:
        """How many entries have not run yet, on all streams."""
        with self.lock:
            return sum(len(queue.work) for queue in self._queues.values())

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A scope in which a host wait raises HiddenSync, at the line that would have waited."""
        before, self._forbidden = self._forbidden, True
        try:
            yield
        finally:
            self._forbidden = before

    def forbid_waits(self, forbidden: bool) -> None:
        """What `no_sync` does, without a scope, as the vendors' sync-debug mode "error" does."""
        self._forbidden = forbidden

    @contextlib.contextmanager
    def record(self) -> Iterator[Ledger]:
        """A scope whose own ledger is what it yields, filled in at its end."""
        starts = len(self.kernels), len(self.waits), len(self.fallbacks)
        ledger = Ledger()
        try:
            yield ledger
        finally:
            ledger.kernels = self.kernels[starts[0] :]
            ledger.waits = self.waits[starts[1] :]
            ledger.fallbacks = self.fallbacks[starts[2] :]

    # For kernels.

    def submit(
        self,
        run: Callable[[], None] | None,
        name: str,
        index: int,
        *,
        queue: Queue | None = None,
        after: tuple[Queue, Work] | None = None,
    ) -> Work:
        """Put work on the current stream of a device, or on `queue`; into the graph that is being captured there."""
        with self.lock:
            work = Work(run, name, after)
            queue = queue or self.queue(index, self.current_stream(index))
            if self.capture is not None and queue is self.capture.queue:
                self.capture.add(work)
                return work
            if run is not None:
                self.kernels.append(name)
            queue.work.append(work)
            if self.eager:
                queue.run_all()
            return work

    def note_wait(self, kind: str, what: str) -> None:
        """Count a host wait; raises where none is allowed."""
        if self.capture is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: the host waits ({kind}: {what})")
        wait = HostWait(kind, what, traceback.extract_stack(limit=24))
        self.waits.append(wait)
        if self._forbidden:
            raise HiddenSync(f"the host would wait for the device: {wait}")

    def wait_for_stream(self, kind: str, what: str, index: int) -> None:
        """A host wait for the work on the current stream of a device."""
        with self.lock:
            self.note_wait(kind, what)
            self.queue(index, self.current_stream(index)).run_all()
            self.raise_fault()

    def wait_for_device(self, what: str) -> None:
        """A host wait for all streams."""
        with self.lock:
            self.note_wait("device", what)
            self.run_all()
            self.raise_fault()

    def raise_fault(self) -> None:
        if self.fault is not None:
            raise DeviceFault(str(self.fault)) from self.fault

    def index_of(self, index: int | None) -> int:
        """A device's number, the current device's where none is given; raises where there is no such device."""
        if index is None:
            return self.current_device()
        if not 0 <= index < self.device_count:
            raise RuntimeError(f"invalid device ordinal: {self.name}:{index}, {self.device_count} simulated")
        return index

    # Streams and events, by number; stream 0 is each device's default. Torch's own guard asks these questions too,
    # through the compiled half, which knows them by these names.

    def queue(self, index: int, stream: int) -> Queue:
        with self.lock:
            return self._queues.setdefault((index, stream), Queue(self))

    def current_stream(self, index: int) -> int:
        streams: dict[int, int] = getattr(self._current, "streams", {})
        return streams.get(index, 0)

    def exchange_stream(self, index: int, stream: int) -> int:
        before = self.current_stream(index)
        if not hasattr(self._current, "streams"):
            self._current.streams = {}
        self._current.streams[index] = stream
        return before

    def new_stream(self, index: int, priority: int = 0) -> int:
        self._next_id += 1
        return self._next_id

    def stream_query(self, index: int, stream: int) -> bool:
        if self.capture is not None:
            raise RuntimeError("operation not permitted when stream is capturing: a stream was asked")
        if self.queue(index, stream).work:
            return False
        self.raise_fault()
        return True

    def stream_sync(self, index: int, stream: int) -> None:
        with self.lock:
            self.note_wait("stream", f"stream {stream}")
            self.queue(index, stream).run_all()
            self.raise_fault()

    def device_sync(self, index: int) -> None:
        self.wait_for_device("synchronize")

    def event_record(self, event: int, index: int, stream: int) -> int:
        queue = self.queue(index, stream)
        if not event:
            self._next_id += 1
            event = self._next_id
        self._events[event] = queue, self.submit(None, "event", index, queue=queue)
        return event

    def event_block(self, event: int, index: int, stream: int) -> None:
        queue = self.queue(index, stream)
        recorded = self._events.get(event)  # None where a reset has forgotten it
        if recorded is not None and not recorded[1].done and recorded[0] is not queue:
            if self.capture is not None and recorded[0] is self.capture.queue:
                raise NotImplementedError("a capture that goes on to a second stream is not simulated")
            self.submit(None, "wait for event", index, queue=queue, after=recorded)

    def event_query(self, event: int) -> bool:
        if self.capture is not None:
            raise RuntimeError("operation not permitted when stream is capturing: an event was asked")
        if event in self._events and not self._events[event][1].done:
            return False
        self.raise_fault()
        return True

    def event_sync(self, event: int) -> None:
        with self.lock:
            self.note_wait("event", "event")
            if event in self._events:
                queue, marker = self._events[event]
                queue.run_until(marker)
            self.raise_fault()

    def event_destroy(self, event: int) -> None:
        self._events.pop(event, None)

    def event_elapsed(self, start: int, end: int) -> float:
        return 0.0
