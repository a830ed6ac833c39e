"""The state that one stream of one device keeps: what its probes have seen since the last snapshot.

A probe costs a reduction to one cell per row and one `maximum` or `minimum` into its slot. Cells are running extremes,
so an update that runs twice (checkpointing, autotuning, a graph's warm-up) changes nothing. A snapshot compares all
cells with the limits of their slots at once, on the device, and sends the host one code per cell and two extremes per
slot in a single copy that nobody waits for; then the cells start anew.

Memory is allocated before it is used and stays in place, because captured graphs hold on to its addresses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multiassert import fused
from multiassert.backends import Backend
from multiassert.predicates import Check, Extremes, identities
from multiassert.sites import Message, Site

ROWS = 256  # cells of a slot: more rows than that share cells
SLOTS = 256  # slots of a state's first page; when it is full another is added,
PAGE_GROWTH = 4  # so many times as large: each page costs a snapshot some kernels
SLOTS_PER_SITE = 4  # a site whose bounds keep changing takes this many before it uses an idle one of its own again
SNAPSHOTS_IN_FLIGHT = 4  # beyond it the state goes on collecting, and the next snapshot covers several steps

ALL_ROWS_IN_ONE = 0  # the block of a slot whose one cell stands for all rows

LOWER, UPPER = 0, 1
BYTES_OF_HITS = 16  # two int64
ABOVE_FLOOR, BELOW_CEILING = 2, 1  # bits of a cell's code; a fine cell has all the bits its page checks
NOT_SENT = 0xFF  # what the host puts where the last code will arrive: no cell has this code

# Orders what was seen across slots, streams and threads by when the host issued it.
_sequence = itertools.count()


def next_sequence() -> int:
    """A number that is larger than all before."""
    return next(_sequence)


class Stamp(NamedTuple):
    """What the engine says of the steps that a snapshot covers."""

    step: int
    ends_step: bool = False
    tag: object = None
    row_names: Sequence[object] | None = None


@dataclasses.dataclass
class Seen:
    """What the host knows of the calls of one slot since the last snapshot."""

    site: Site
    check: Check
    block: int
    order: int
    first_step: int
    raises: bool | None  # None: the mode when it is looked at decides, since compiled code keeps none
    dtype: torch.dtype
    shape: tuple[int, ...]  # -1 for a size that is not known
    message: Message | None
    position: int | None = None  # how many probes came before it in its step; None where the host does not know
    all_fused: bool = False  # whether all its calls went through the fused kernel, which counts


# What a slot is for: a site, a check, the tensor's dtype, and how many rows share a cell.
Key = tuple[Site, Check, torch.dtype, int]


class Slot:
    """The cells of one site, with one check at a time."""

    __slots__ = ("captured_rows", "hits", "index", "key", "limits_are_captured", "order", "page", "seen", "views")

    def __init__(self, page: Page, index: int) -> None:
        self.page = page
        self.index = index
        self.hits = page.hits[index] if page.counts else page.hits
        self.key: Key | None = None
        self.seen: Seen | None = None
        # Rows that a captured graph updates whenever it is replayed, without the host's knowledge.
        self.captured_rows = 0
        # Whether its limits were set inside a capture, so that they are in force only once the graph is replayed.
        self.limits_are_captured = False
        self.order = 0
        # Views of the leading cells, by how many: making one costs more than the update itself.
        self.views: dict[int, tuple[Tensor, Tensor]] = {}

    def cells(self, count: int) -> tuple[Tensor, Tensor]:
        views = self.views.get(count)
        if views is None:
            cells = self.page.cells
            views = cells[LOWER, self.index, :count], cells[UPPER, self.index, :count]
            self.views[count] = views
        return views


class Page:
    """Slots of one dtype in one piece of device memory."""

    def __init__(self, plane: torch.dtype, device: torch.device, capacity: int, counts: bool) -> None:
        lowest, highest = identities(plane)
        self.plane = plane
        self.capacity = capacity
        self.counts = counts
        self.slots: list[Slot] = []
        self.watches_floors = False
        self.rows_in_use = 0
        with torch.inference_mode(False):  # a tensor made in inference mode could not be updated outside of it
            self.cells = torch.empty((2, capacity, ROWS), dtype=plane, device=device)
            self.limits = torch.empty((2, capacity), dtype=plane, device=device)
            self.above_floor = torch.empty(capacity * ROWS, dtype=torch.bool, device=device)
            # How many values the fused kernel found outside, and where the first one was; and what that starts from.
            self.hits = torch.empty((capacity if counts else 0, 2), dtype=torch.int64, device=device)
            self.no_hits = torch.empty_like(self.hits)
        self.cells[LOWER].fill_(highest)
        self.cells[UPPER].fill_(lowest)
        for number, start in enumerate(fused.NO_HITS if counts else ()):
            self.hits[:, number].fill_(start)
            self.no_hits[:, number].fill_(start)
        # Limits nothing can break, until a slot sets its own.
        self.limits[LOWER].fill_(lowest)
        self.limits[UPPER].fill_(highest)

    def clear_slots(self) -> None:
        """Nothing has been seen; slot by slot, since a forked child hangs in a fill that takes several threads."""
        for slot in self.slots:
            self.clear(slot)

    def clear(self, slot: Slot) -> None:
        lowest, highest = identities(self.plane)
        self.cells[LOWER, slot.index].fill_(highest)
        self.cells[UPPER, slot.index].fill_(lowest)
        for number, start in enumerate(fused.NO_HITS if self.counts else ()):
            slot.hits[number].fill_(start)

    def new_slot(self) -> Slot:
        slot = Slot(self, len(self.slots))
        self.slots.append(slot)
        return slot

    def set_limits(self, slot: Slot, check: Check) -> None:
        if check.floor is not None:
            self.watches_floors = True
            self.limits[LOWER, slot.index].fill_(check.floor)
        if check.ceiling is not None:
            self.limits[UPPER, slot.index].fill_(check.ceiling)


class Part(NamedTuple):
    """Where a page's codes and extremes lie in the outbox on the device and in the inbox on the host."""

    page: Page
    slots: int
    rows: int
    hits: slice  # empty where the page does not count
    lowest: slice
    highest: slice
    codes: slice
    complete: int  # the code of a fine cell


class Hit(NamedTuple):
    """A slot with cells outside its limits."""

    seen: Seen
    low_cells: list[int]
    high_cells: list[int]
    lowest: int | float
    highest: int | float
    outside: int | None  # how many values were, and the smallest index of one; None where it was not counted
    first: int | None


class Snapshot:
    """A copy of the state on its way to the host."""

    def __init__(
        self,
        state: DeviceState,
        stamp: Stamp,
        parts: list[Part],
        seen: dict[Slot, Seen],
        inbox: Tensor,
        ignores_captured: bool,
    ) -> None:
        self.state = state
        self.stamp = stamp
        self.failure: RuntimeError | None = None  # what the device said instead of an answer
        self._parts = parts
        self._seen = seen
        self._inbox = inbox
        self._ignored = {slot for slot in seen if slot.captured_rows} if ignores_captured else set()
        self._last_byte = parts[-1].codes.stop - 1
        self._event = state.backend.record_event(state.stream)

    def arrived(self) -> bool:
        """Whether the copy is on the host. A device that has failed gives no answer, but what it sent is here."""
        if self._event is None:
            return True
        try:
            # An event may not even be asked while a graph is being captured. A device that has failed may answer
            # either question with its error.
            return not self.state.is_capturing() and self._event.query()
        except RuntimeError as failure:
            self.failure = failure
            return bool(self._inbox[self._last_byte] != NOT_SENT)

    def wait(self) -> None:
        """Wait until it has arrived; a failure of the device is kept, not raised."""
        try:
            if self._event is not None:
                self._event.synchronize()
        except RuntimeError as failure:
            self.failure = failure

    def open(self) -> list[Hit]:
        """The hits in a snapshot that has arrived; gives its memory back, so it can be opened once."""
        hits = []
        for part in self._parts:
            codes = self._inbox[part.codes].view(part.slots, part.rows)
            if int(codes.min()) == part.complete:
                continue
            lowest = self._inbox[part.lowest].view(part.page.plane).tolist()
            highest = self._inbox[part.highest].view(part.page.plane).tolist()
            counted = self._inbox[part.hits].view(torch.int64).view(-1, 2).tolist()
            low, high = _cells_by_slot(codes, part.complete & ABOVE_FLOOR), _cells_by_slot(codes, BELOW_CEILING)
            for index in sorted({*low, *high}):
                slot = part.page.slots[index]
                if slot in self._ignored:
                    continue
                lower = lowest[index] if lowest else identities(part.page.plane)[1]
                seen = self._seen[slot]
                outside, first = counted[index] if counted and seen.all_fused else (None, None)
                cells = low.get(index, []), high.get(index, [])
                hits.append(Hit(seen, *cells, lower, highest[index], outside, first))
        self.state.take_back(self._inbox)
        return hits


def _cells_by_slot(codes: Tensor, bit: int) -> dict[int, list[int]]:
    """The cells whose code lacks `bit`, by slot."""
    by_slot: dict[int, list[int]] = {}
    if bit:
        for slot, cell in ((codes & bit) == 0).nonzero().tolist():
            by_slot.setdefault(slot, []).append(cell)
    return by_slot


class DeviceState:
    """What the probes on one stream of one device have seen. All methods may be called from any thread."""

    def __init__(self, backend: Backend, device: torch.device, stream: Hashable) -> None:
        self.backend = backend
        self.device = device
        self.stream = stream
        self.calls_since_snapshot = 0
        self.unsent_since = 0.0  # when the first of these calls had ended, by the monotonic clock
        self.asked_for = False  # by an engine's own switch, so that our settings do not put its captured graphs to rest
        self._lock = threading.RLock()
        self._pages: list[Page] = []
        self._slots: dict[Key, Slot] = {}
        self._by_site: dict[tuple[Site, torch.dtype], list[Slot]] = {}
        self._seen: dict[Slot, Seen] = {}
        self._outbox: Tensor = torch.empty(0)
        self._inboxes: list[Tensor] = []
        self._in_flight = 0
        self._updates_unseen = False  # by captured or compiled code
        # Whether what captured and compiled code sees does not count, since the last snapshot and from the next one on.
        self._rests = False
        self._is_to_rest = False

    def is_capturing(self) -> bool:
        """Whether the work of this state's stream, or of the caller's, is being recorded into a graph."""
        if self.backend.is_capturing(self.device):
            return True
        with self.backend.on_stream(self.stream):
            return self.backend.is_capturing(self.device)

    def record(
        self,
        site: Site,
        check: Check,
        observed: Extremes | fused.Launch,
        *,
        step: int,
        position: int,
        raises: bool,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        message: Message | None,
    ) -> None:
        """Merge what a probe observed into its slot: one or two kernels on the device, no host wait."""
        block, is_fused = observed.block, isinstance(observed, fused.Launch)
        with self._lock:
            key = site, check, dtype, block
            slot = self._slots.get(key) or self._lease(key)
            seen = slot.seen
            if seen is None:
                # Beside slots that captured or compiled code updates, whose calls the host does not see, the order of
                # a step is that of the first calls.
                order = slot.order if self._updates_unseen else next(_sequence)
                seen = Seen(site, check, block, order, step, raises, dtype, shape, message, position, is_fused)
                slot.seen = self._seen[slot] = seen
            else:
                seen.all_fused = seen.all_fused and is_fused
                seen.raises = True if raises else seen.raises
                if block == 1 or shape[0] >= seen.shape[0]:  # folded rows are cut at the number of rows
                    seen.shape = shape
                seen.message = message
            self.calls_since_snapshot += 1
            rows = observed.cells
            slot.page.rows_in_use = max(slot.page.rows_in_use, rows)
            if self.backend.is_capturing(self.device):
                slot.captured_rows = max(slot.captured_rows, rows)
                self._updates_unseen = True
            elif slot.limits_are_captured:
                slot.page.set_limits(slot, check)
                slot.limits_are_captured = False
            low_cells, high_cells = slot.cells(rows)
            if isinstance(observed, fused.Launch):
                observed.run(low_cells, high_cells, slot.hits)
                return
            if observed.upper is not None:
                torch.maximum(high_cells, observed.upper, out=high_cells)
            if observed.lower is not None:
                torch.minimum(low_cells, observed.lower, out=low_cells)

    def compiled_cells(
        self,
        site: Site,
        check: Check,
        *,
        block: int,
        step: int,
        raises: bool | None,
        dtype: torch.dtype,
        shape: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """The cells of a slot that compiled code updates from now on, without the host's knowledge."""
        with self._lock, self.backend.on_stream(self.stream):
            key = site, check, dtype, block
            slot = self._slots.get(key) or self._lease(key)
            slot.captured_rows = ROWS
            slot.page.rows_in_use = ROWS
            self._updates_unseen = True
            if slot.seen is None:
                seen = Seen(site, check, block, slot.order, step, raises, dtype, shape, None)
                slot.seen = self._seen[slot] = seen
            return slot.cells(ROWS)

    def prewarm(self, planes: tuple[torch.dtype, ...] = (torch.float32, torch.int64)) -> None:
        """Allocate a page for each dtype, and what a snapshot needs."""
        with self._lock:
            for plane in planes:
                if not any(page.plane is plane for page in self._pages):
                    self._add_page(plane)

    def _lease(self, key: Key) -> Slot:
        """A slot for a site's new check: a fresh one, or an idle one of the same site when it has many."""
        site, check = key[:2]
        own = self._by_site.setdefault((site, check.plane), [])
        idle = None
        if len(own) >= SLOTS_PER_SITE:
            idle = next((slot for slot in own if slot.seen is None and not slot.captured_rows), None)
        if idle is None:
            page = next((p for p in self._pages if p.plane is check.plane and len(p.slots) < p.capacity), None)
            slot = (page or self._add_page(check.plane)).new_slot()
        else:
            slot = idle
            own.remove(slot)
            if slot.key is not None:
                del self._slots[slot.key]
        own.append(slot)
        slot.page.set_limits(slot, check)
        slot.limits_are_captured = self.backend.is_capturing(self.device)
        slot.order = next(_sequence)
        slot.key = key
        self._slots[key] = slot
        return slot

    def _add_page(self, plane: torch.dtype) -> Page:
        if self.backend.is_capturing(self.device):
            raise RuntimeError(
                f"multiassert has no device state left on {self.device} for this probe, and a graph is being captured, "
                f"so none can be allocated. Call multiassert.prewarm({str(self.device)!r}) before each capture on a "
                "stream that is new to it."
            )
        capacity = SLOTS * PAGE_GROWTH ** sum(page.plane is plane for page in self._pages)
        page = Page(plane, self.device, capacity, counts=fused.available(self.backend, self.device))
        self._pages.append(page)
        size = sum(p.capacity * (2 * p.plane.itemsize + ROWS + BYTES_OF_HITS) for p in self._pages)
        with torch.inference_mode(False):
            self._outbox = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._inboxes = [self._new_inbox() for _ in range(SNAPSHOTS_IN_FLIGHT - self._in_flight)]
        return page

    def _new_inbox(self) -> Tensor:
        with torch.inference_mode(False):
            return self.backend.host_buffer(self._outbox.numel())

    def take_back(self, inbox: Tensor) -> None:
        with self._lock:
            self._in_flight -= 1
            fits = inbox.numel() == self._outbox.numel()  # a page may have been added while it was away
            self._inboxes.append(inbox if fits else self._new_inbox())

    def snapshot(self, stamp: Stamp) -> Snapshot | None:
        """Send what was seen on its way to the host and start anew; no host wait.

        Returns None where nothing was seen, where a graph is being captured, and where too many snapshots are still
        under way: then the state goes on collecting.
        """
        with self._lock:
            if not self._seen or not self._inboxes or self.is_capturing():
                return None
            with self._ordered_with_caller(), self.backend.on_stream(self.stream), torch.no_grad():
                parts = self._lay_out()
                for part in parts:
                    self._judge(part)
                size = parts[-1].codes.stop
                inbox = self._inboxes[-1]
                inbox[size - 1] = NOT_SENT
                inbox[:size].copy_(self._outbox[:size], non_blocking=True)
                snapshot = Snapshot(self, stamp, parts, self._seen, inbox, ignores_captured=self._rests)
                for part in parts:
                    self._clear(part)
            # Only now, so that an error of the device on the way here loses neither what was seen nor a buffer.
            self._inboxes.pop()
            self._in_flight += 1
            self._rests = self._is_to_rest
            self._start_anew(stamp.step + stamp.ends_step)
            return snapshot

    @property
    def is_updated_unseen(self) -> bool:
        """Whether captured or compiled code may have updated it."""
        return self._updates_unseen

    def rest(self) -> bool:
        """From the next snapshot on, what captured graphs see does not count; returns whether that is news."""
        with self._lock:
            was_awake, self._is_to_rest = not self._is_to_rest, True
            return was_awake

    def wake(self) -> None:
        """Drop what captured graphs saw while it did not count: two kernels for each of their slots, no host wait."""
        with self._lock:
            self._is_to_rest = False
            if not self._rests or self.is_capturing():
                return  # nothing may be cleared in a capture: the next snapshot drops it
            self._rests = False
            with self._ordered_with_caller(), self.backend.on_stream(self.stream), torch.no_grad():
                for slot in self._seen:
                    if slot.captured_rows:
                        slot.page.clear(slot)

    @contextlib.contextmanager
    def _ordered_with_caller(self) -> Iterator[None]:
        """Keep the caller's stream, on which captured and compiled code may run, out of the snapshot: no host wait."""
        caller: Any = self.backend.current_stream(self.device)
        if not self._updates_unseen or caller == self.stream:
            yield
            return
        own: Any = self.stream
        own.wait_stream(caller)
        yield
        caller.wait_stream(own)

    def start_anew_in_child(self) -> None:
        """Forget what the parent of a forked child saw and what it had under way."""
        self._lock = threading.RLock()
        if self.device.type != "cpu":
            return
        for page in self._pages:
            page.clear_slots()
        self._in_flight = 0
        self._inboxes = [self._new_inbox() for _ in range(SNAPSHOTS_IN_FLIGHT)] if self._pages else []
        self._start_anew(0)

    def _start_anew(self, step: int) -> None:
        """Nothing has been seen, but what captured graphs may see when they are replayed."""
        self.calls_since_snapshot = 0
        for page in self._pages:
            page.rows_in_use = 0
        seen, self._seen = self._seen, {}
        for slot, last in seen.items():
            slot.seen = None
            if slot.captured_rows:
                slot.seen = self._seen[slot] = dataclasses.replace(last, first_step=step, position=None)
                slot.page.rows_in_use = max(slot.page.rows_in_use, slot.captured_rows)

    def _lay_out(self) -> list[Part]:
        """Pages in use, one behind the other; hits and extremes come first in each, where their alignment is kept."""
        parts: list[Part] = []
        position = 0
        for page in self._pages:
            slots, rows = len(page.slots), page.rows_in_use
            if not rows:
                continue
            both = page.watches_floors
            hits_end = position + (slots * BYTES_OF_HITS if page.counts else 0)
            low_end = hits_end + (slots * page.plane.itemsize if both else 0)
            high_end = low_end + slots * page.plane.itemsize
            end = high_end + slots * rows
            complete = ABOVE_FLOOR | BELOW_CEILING if both else BELOW_CEILING
            extremes = slice(hits_end, low_end), slice(low_end, high_end)
            parts.append(Part(page, slots, rows, slice(position, hits_end), *extremes, slice(high_end, end), complete))
            position = -(-end // 8) * 8
        return parts

    def _judge(self, part: Part) -> None:
        """Compare a page's cells with their limits, and put codes, extremes and hits in the outbox."""
        page, slots, rows = part.page, part.slots, part.rows
        if page.counts:
            self._outbox[part.hits].view(torch.int64).view(slots, 2).copy_(page.hits[:slots])
        lower, upper = page.cells[LOWER, :slots, :rows], page.cells[UPPER, :slots, :rows]
        codes = self._outbox[part.codes]
        below_ceiling = codes.view(torch.bool).view(slots, rows)
        torch.le(upper, page.limits[UPPER, :slots].unsqueeze(1), out=below_ceiling)
        torch.amax(upper, 1, out=self._outbox[part.highest].view(page.plane))
        if page.watches_floors:
            above_floor = page.above_floor[: slots * rows]
            torch.ge(lower, page.limits[LOWER, :slots].unsqueeze(1), out=above_floor.view(slots, rows))
            torch.add(codes, above_floor.view(torch.uint8), alpha=ABOVE_FLOOR, out=codes)
            torch.amin(lower, 1, out=self._outbox[part.lowest].view(page.plane))

    def _clear(self, part: Part) -> None:
        """Start the cells of a page anew."""
        lowest, highest = identities(part.page.plane)
        part.page.cells[UPPER, : part.slots, : part.rows].fill_(lowest)
        if part.page.watches_floors:
            part.page.cells[LOWER, : part.slots, : part.rows].fill_(highest)
        if part.page.counts:
            part.page.hits[: part.slots].copy_(part.page.no_hits[: part.slots])


# ---------------------------------------------------------------------------------------------------------------------
# All states of this process.

_states: dict[tuple[torch.device, Hashable], DeviceState] = {}
# For a capture on a stream that was never probed, such as the one that torch.cuda.graph makes for itself.
_spares: dict[torch.device, DeviceState] = {}
_states_lock = threading.Lock()


def state_of(backend: Backend, device: torch.device) -> DeviceState:
    """The state of the current stream of `device`, made at its first use."""
    key = (device, backend.current_stream(device))
    state = _states.get(key)
    return _new_state(backend, *key) if state is None else state


def _new_state(backend: Backend, device: torch.device, stream: Hashable) -> DeviceState:
    with _states_lock:
        spare = _spares.pop(device, None) if backend.is_capturing(device) else None
        if spare is not None:
            spare.stream = stream
        return _states.setdefault((device, stream), spare or DeviceState(backend, device, stream))


def prewarm(backend: Backend, device: torch.device) -> None:
    """Allocate the state of the current stream of `device`, and one for a stream that is captured later."""
    state_of(backend, device).prewarm()
    if device.type == "cpu" or device in _spares:
        return
    spare = DeviceState(backend, device, backend.current_stream(device))
    spare.prewarm()
    with _states_lock:
        _spares.setdefault(device, spare)


def all_states() -> list[DeviceState]:
    """The states of all devices and streams that were probed."""
    with _states_lock:
        return list(_states.values())


_forget_listeners: list[Callable[[], None]] = []


def on_forget(listener: Callable[[], None]) -> None:
    """Call `listener` when all states are dropped."""
    _forget_listeners.append(listener)


def forget_all() -> None:
    """Drop every state with all that was seen."""
    with _states_lock:
        _states.clear()
        _spares.clear()
    for listener in _forget_listeners:
        listener()


def start_anew_in_child() -> None:
    """After a fork: keep the memory, which compiled code in the child goes on using, and forget what the parent saw.

    Only a CPU's state is of use there: no accelerator can be used on from a forked child.
    """
    global _states_lock
    _states_lock = threading.Lock()  # the parent may have held it
    for state in _states.values():
        state.start_anew_in_child()
