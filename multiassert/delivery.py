"""From device state to the engineer: step, poll, drain, callbacks, the log, the error, the end of the process.

Everything a violation meets on its way happens under one lock and exactly once: it leaves its snapshot, gets its order,
goes to the callbacks, and then either waits to be raised or is logged and waits to be returned.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import datetime
import itertools
import logging
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from multiassert import ranks, settings, state
from multiassert.predicates import Finding
from multiassert.settings import Mode
from multiassert.sites import Message, Site, text_of
from multiassert.state import DeviceState, Hit, Snapshot, Stamp
from multiassert.throttle import Throttle
from multiassert.violation import VIOLATIONS_IN_ERROR, AsyncAssertionError, Violation, suppressed

logger = logging.getLogger(__name__)

# Probes snapshot by themselves after so many calls or seconds; much later where the engine calls step().
CALLS_BETWEEN_SNAPSHOTS = 256
SECONDS_BETWEEN_SNAPSHOTS = 0.1
PATIENCE_WITH_STEPS = 40

SECONDS_BETWEEN_LOGS = 10.0  # of one site, in mode warn
ROWS_LISTED = 4096  # more rows than that are told as one range
STEPS_REMEMBERED = 64  # longer than any snapshot is under way
LONGEST_MESSAGE = 4096  # characters; a message that is a callable may be of any length
# A run in mode warn that only reads the log never calls poll(), and ranks may wait long for each other. Then the first
# causes are kept, as long as they have no more rows and names than that together; the others are counted.
KEPT_VIOLATIONS = 10_000
KEPT_ROWS = 1_000_000


class _Log:
    """The log lines of mode warn, at most one in SECONDS_BETWEEN_LOGS for each site; then how many were left out."""

    def __init__(self) -> None:
        self._throttle: Throttle[tuple[Site, str]] = Throttle(1, SECONDS_BETWEEN_LOGS)

    def write(self, violation: Violation) -> None:
        self.write_ended()
        if self._throttle.admits((violation.site, violation.kind)) and logger.isEnabledFor(logging.WARNING):
            log(logging.WARNING, violation)

    def write_ended(self, all_of_them: bool = False) -> None:
        """How many were left out of the log, of the sites whose time is over, or of all."""
        for site_and_kind, count in self._throttle.ended(all_of_them):
            site, kind = site_and_kind or (None, None)
            what = "of other sites" if site is None else f"{kind} {site.message!r} at {site}"
            plain = {"event": "suppressed", **suppressed(site, kind, count)}
            logger.warning("%d more violations %s were not logged", count, what, extra={"multiassert": plain})


def log(level: int, violation: Violation) -> None:
    """Write the violation to the log: its line, and as `record.multiassert` its plain data, for logs that are JSON."""
    plain = {"event": "violation", **violation.to_dict()}
    logger.log(level, "%s", violation.log_line, extra={"multiassert": plain})


class Observer:
    """What a sink is told besides violations. Each call comes with the lock held, and must be quick."""

    def step_ended(self) -> None:
        """The engine has called step()."""

    def snapshot_sent(self) -> None:
        """A snapshot of a device state is on its way to the host."""

    def snapshot_arrived(self, steps: int) -> None:
        """The host opens one, so many calls of step() after the last step that it covers began."""

    def process_ends(self) -> None:
        """All that was seen has been handed over. It is called once more where there is more all the same."""


class _Kept(list[Violation]):
    """Violations that nobody has looked at yet: the first ones, in bounded memory."""

    def __init__(self, violations: Iterable[Violation] = ()) -> None:
        super().__init__()
        self.left_out = 0
        self._rows = 0
        for violation in violations:
            self.keep(violation)

    def keep(self, violation: Violation) -> None:
        rows = len(violation.rows) + len(violation.row_names or ())
        if len(self) >= KEPT_VIOLATIONS or (self and self._rows + rows > KEPT_ROWS):
            self.left_out += 1
            return
        self._rows += rows
        self.append(violation)

    @property
    def total(self) -> int:
        """With those left out."""
        return len(self) + self.left_out

    def without(self, known: set[int]) -> _Kept:
        """The same but for those with these ids; if none is left, those left out go with the others."""
        rest = _Kept(violation for violation in self if id(violation) not in known)
        rest.left_out = self.left_out if rest else 0
        return rest


class _Delivery:
    """Where this process stands: its step, its snapshots under way, its violations not yet looked at."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.step = 0
        self.steps_are_called = False
        self.under_way: collections.deque[Snapshot] = collections.deque()
        self.to_raise = _Kept()
        self.to_return = _Kept()
        self.device_failure: RuntimeError | None = None  # to raise when no violation is left to tell
        self.callbacks: list[Callable[[Violation], object]] = []
        self.observers: list[Observer] = []
        self.handing_over = False
        # Violations wait for step(group=...), so that all ranks raise at the same step.
        self.held_for_ranks = False
        self.log = _Log()
        # A callback that fails in a storm of violations must not make one of the log: by callback, site and kind.
        self.failing_callbacks: Throttle[tuple[int, Site, str]] = Throttle(1, SECONDS_BETWEEN_LOGS)
        # How many sites were hit in a step, for the order of those that arrive later.
        self.hit_in_step: collections.OrderedDict[int, int] = collections.OrderedDict()
        # What step() said of the latest steps, for snapshots that were sent before it.
        self.stamps_of_steps: collections.OrderedDict[int, Stamp] = collections.OrderedDict()
        self.probes_in_step = 0
        self.probes_in_earlier_steps = 0


_delivery = _Delivery()

# Threads inside suspend(), by how deep. Probes look here only if it is not empty.
suspended_threads: dict[int, int] = {}


# ---------------------------------------------------------------------------------------------------------------------
# The calls of an engine.


def step(
    tag: object = None,
    rows: Sequence[object] | None = None,
    *,
    group: torch.distributed.ProcessGroup | None = None,
    timeout: datetime.timedelta | None = None,
) -> None:
    """End an engine iteration: send what the probes saw on its way to the host, without waiting for any device.

    Each device state costs a fixed number of small kernels and one copy into pinned memory; then it starts anew.
    Snapshots that have arrived meanwhile are looked at: in mode `raise` a violation raises AsyncAssertionError here. An
    error of the device itself is raised as it is, once there is nothing else to raise.
    While a graph is being captured, or when the host is several steps ahead of the device, the state goes on
    collecting, and the next snapshot covers a range of steps.

    `tag` is anything that tells this iteration from others in a record. `rows` names the rows of this iteration's
    tensors, in order (request ids, say); a record then carries the names of its rows.

    With a torch.distributed `group`, of which every rank must call this equally often, violations of mode `raise` are
    raised by all ranks at the same call, two calls after the host of some rank has seen one, with the records of all
    ranks; from the first such call on, poll() and the probes hold them back until then. It costs one asynchronous
    all_reduce of one integer, and the host waits for the answer of two calls ago: for a rank or a device that is
    further behind. SilentRankError is raised where ranks do not answer within `timeout` (5 minutes), with the records
    of this rank if it has any. Where mode is `auto`, a probe on the CPU still raises at its own call.
    """
    __tracebackhide__ = True
    others = None if group is None else ranks.of_group(group)
    patience = ranks.timeout_of(timeout)
    delivery = _delivery
    with delivery.lock:
        stamp = Stamp(delivery.step, True, tag, None if rows is None else tuple(rows))
        if tag is not None or rows is not None:
            delivery.stamps_of_steps[stamp.step] = stamp
            if len(delivery.stamps_of_steps) > STEPS_REMEMBERED:
                delivery.stamps_of_steps.popitem(last=False)
        _hand_over(_arrived())  # before sending, since it frees the memory of another snapshot
        delivery.steps_are_called = True
        delivery.held_for_ranks = others is not None
        _send_all(stamp)
        delivery.step += 1
        delivery.probes_in_earlier_steps += delivery.probes_in_step
        delivery.probes_in_step = 0
        delivery.log.write_ended()
        _tell_observers(lambda observer: observer.step_ended())
    error = look() if others is None else _look_with_others(others, patience)
    if error is not None:
        raise error


def poll() -> list[Violation]:
    """Send what was seen so far on its way to the host, and look at what has arrived; never waits for a device.

    Returns the violations of mode `warn` that no earlier call returned, first cause first. Raises AsyncAssertionError
    for those of mode `raise`. Called in the middle of a step, it costs one snapshot more; do that before work that a
    bad index would crash: a device that has failed sends nothing any more, but what was on its way before is reported.
    An error of the device itself is raised as it is, once there is nothing else to return or to raise.
    """
    __tracebackhide__ = True
    with _delivery.lock:
        _hand_over(_arrived())
        _send_all(Stamp(_delivery.step))
    return _look_and_return()


def drain() -> list[Violation]:
    """Send all that was seen to the host and wait for it; waits for the devices that were probed.

    Returns and raises as poll() does, also what step(group=...) holds back for the other ranks.
    """
    __tracebackhide__ = True
    _bring_in_everything()
    with _delivery.lock:
        held, _delivery.held_for_ranks = _delivery.held_for_ranks, False
        try:
            return _look_and_return()
        finally:
            _delivery.held_for_ranks = held


def raise_if_error(
    *, group: torch.distributed.ProcessGroup | None = None, timeout: datetime.timedelta | None = None
) -> None:
    """Drain, then raise AsyncAssertionError if there is any violation, whatever its mode; waits as drain() does.

    With a torch.distributed `group`, whose ranks must all call it, it waits for them and raises on all of them if any
    has a violation, with the records of all. SilentRankError is raised where ranks do not answer within `timeout`.
    """
    __tracebackhide__ = True
    others = None if group is None else ranks.of_group(group)
    patience = ranks.timeout_of(timeout)
    _bring_in_everything()
    with _delivery.lock:
        own = sorted([*_delivery.to_raise, *_delivery.to_return], key=_by_first_cause)
    error = _exchanged(others, patience, own) if others else _delivered(own, own, _delivery.device_failure)
    if error is not None:
        raise error


@contextlib.contextmanager
def suspend() -> Iterator[None]:
    """A scope in which the probes of this thread record nothing, for warm-up and dummy weights; touches no device.

    A graph captured inside has no probes in it. Compiled code and captured graphs have no threads to tell apart: while
    any thread is inside, what their probes see then is dropped. (Where the device is several steps behind when it is
    entered, that begins with the next snapshot only: what came before must not be lost.)
    """
    thread = threading.get_ident()
    with _delivery.lock:
        suspended_threads[thread] = suspended_threads.get(thread, 0) + 1
        _rest_or_wake()
    try:
        yield
    finally:
        with _delivery.lock:
            suspended_threads[thread] -= 1
            if not suspended_threads[thread]:
                del suspended_threads[thread]
            _rest_or_wake()


def on_violation(callback: Callable[[Violation], object]) -> Callable[[], None]:
    """Hand every violation to `callback` when the host first sees it, whatever the mode; touches no device.

    It is called on the thread that looked, before the violation is logged or raised, one call at a time. All violations
    are handed over, be it a million: to limit what it writes is up to the callback. An exception of the callback is
    logged, at most every 10 seconds for a site, and loses nothing. Returns a function that takes the callback off.
    """
    if not callable(callback):
        raise TypeError(f"callback must be callable, got {type(callback).__name__}")
    return _added(callback, lambda: _delivery.callbacks)


# ---------------------------------------------------------------------------------------------------------------------
# For the sinks.


def locked() -> contextlib.AbstractContextManager[object]:
    """The lock under which callbacks and observers are called: a sink takes it before any lock of its own."""
    return _delivery.lock


def observe(observer: Observer) -> Callable[[], None]:
    """Tell `observer` of steps, snapshots and the end of the process; returns a function that ends it."""
    return _added(observer, lambda: _delivery.observers)


Item = TypeVar("Item")


def _added(item: Item, to_list: Callable[[], list[Item]]) -> Callable[[], None]:
    """Add to a list of the delivery that is in force; returns a function that takes it off again."""
    with _delivery.lock:
        to_list().append(item)

    def remove() -> None:
        with _delivery.lock, contextlib.suppress(ValueError):
            to_list().remove(item)

    return remove


def probe_calls() -> int:
    """How many deferred probes were called so far, on all threads; those in compiled and captured code are no calls."""
    return _delivery.probes_in_earlier_steps + _delivery.probes_in_step


def _tell_observers(tell: Callable[[Observer], object]) -> None:
    for observer in list(_delivery.observers):
        try:
            tell(observer)
        except Exception:  # a sink that fails must not lose a snapshot
            logger.exception("%s of multiassert failed, and is told nothing more", type(observer).__name__)
            with contextlib.suppress(ValueError):
                _delivery.observers.remove(observer)


def _tell_of_arrival(steps: int) -> None:
    _tell_observers(lambda observer: observer.snapshot_arrived(steps))


# ---------------------------------------------------------------------------------------------------------------------
# For the probes.


def current_step() -> int:
    """How often step() was called so far, which is what records call the step under way; touches no device."""
    return _delivery.step


def next_position() -> int:
    """How many deferred probes were called in this step before this one, on all threads."""
    _delivery.probes_in_step += 1
    return _delivery.probes_in_step - 1


def send(tag: object = None, row_names: Sequence[object] | None = None) -> RuntimeError | None:
    """Send what was seen so far on its way, and look at what has arrived; the error to raise, if any. Never waits."""
    _send_all(Stamp(_delivery.step, False, tag, row_names))
    return look()


# Violations as they arrive, first cause first, each with whether it is to be raised; None from one that is over.
Condense = Callable[[list[tuple[Violation, bool]]], "list[tuple[Violation, bool]] | None"]
_condensers: list[Condense] = []


def condense_with(condense: Condense) -> None:
    """Let `condense` leave out or reword violations before anybody sees them, until it returns None."""
    with _delivery.lock:
        _condensers.append(condense)


def after_record(device_state: DeviceState) -> RuntimeError | None:
    """What a probe does once it has recorded: snapshot if it is time, and look if something is under way."""
    delivery = _delivery
    try:
        if device_state.is_capturing():
            return None  # an event may not even be asked while a graph is being captured
    except RuntimeError as failure:
        delivery.device_failure = failure
        return look()
    patience = PATIENCE_WITH_STEPS if delivery.steps_are_called else 1
    if device_state.calls_since_snapshot == 1:
        device_state.unsent_since = time.monotonic()  # not before: a first call may take long, and is no reason to send
    if (
        device_state.calls_since_snapshot >= CALLS_BETWEEN_SNAPSHOTS * patience
        or time.monotonic() - device_state.unsent_since > SECONDS_BETWEEN_SNAPSHOTS * patience
    ):
        _send_all(Stamp(delivery.step))
    return look() if has_news() else None


def has_news() -> bool:
    """Whether there may be something to look at."""
    return bool(_delivery.under_way or _delivery.to_raise)


def report(violations: Iterable[Violation], raises: bool) -> RuntimeError | None:
    """Deliver violations that were found without a snapshot."""
    violations = list(violations)
    _hand_over([(violation, raises) for violation in violations])
    with _delivery.lock:
        if _delivery.held_for_ranks and raises and not _delivery.handing_over:
            return _delivered(violations, violations, None)  # those of the call itself are not held
        return _error()


def describe(
    findings: Sequence[Finding],
    *,
    site: Site,
    message: Message | None,
    platform: str,
    device: torch.device,
    stamp: Stamp,
    first_step: int,
    block: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    sequence: int,
    position: int | None = None,
    count: int | None = None,
    index: int | None = None,
) -> list[Violation]:
    """The records of one site's findings; `sequence` orders them among those of other sites."""
    first_step = min(first_step, stamp.step)  # another thread may have ended the step meanwhile
    violations = []
    text = text_of(site, message)
    text = text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}..."
    with _delivery.lock:
        order = _delivery.hit_in_step.get(stamp.step, 0)
        _delivery.hit_in_step[stamp.step] = order + 1
        while len(_delivery.hit_in_step) > STEPS_REMEMBERED:
            _delivery.hit_in_step.popitem(last=False)
    if len(findings) > 1:
        count = index = None  # counted together
    rank = ranks.own_rank()
    for finding in findings:
        rows = _rows(finding.cells, block, shape)
        violations.append(
            Violation(
                kind=finding.kind,
                message=text,
                site=site,
                platform=platform,
                device=device,
                rank=rank,
                node=None if rank is None else ranks.node(),
                step=stamp.step if first_step == stamp.step else (first_step, stamp.step),
                tag=stamp.tag,
                rows=rows,
                row_names=_names(rows, stamp.row_names) if first_step == stamp.step else None,
                value=finding.value,
                bound=finding.bound,
                count=count,
                index=index,
                dtype=dtype,
                shape=shape,
                order=order,
                headline=finding.headline,
                sequence=sequence,
                position=position,
            )
        )
    return violations


# ---------------------------------------------------------------------------------------------------------------------
# The way of a violation.


def _send_all(stamp: Stamp) -> None:
    with _delivery.lock:
        for device_state in state.all_states():
            _send(device_state, stamp)


def _send(device_state: DeviceState, stamp: Stamp) -> None:
    try:
        snapshot = device_state.snapshot(stamp)
    except RuntimeError as failure:  # of the device: what is on the host already is told first
        _delivery.device_failure = failure
        return
    if snapshot is not None:
        _delivery.under_way.append(snapshot)
        _tell_observers(lambda observer: observer.snapshot_sent())


def _rest_or_wake() -> None:
    """Turn the probes in captured graphs off or on, as probes are now: the graphs go on seeing, and nobody looks.

    A word on the device that the graphs read could not take their reductions out either; it would add a kernel to each.
    """
    for device_state in state.all_states():
        if not device_state.is_updated_unseen:
            continue
        with _delivery.lock:
            is_on = device_state.asked_for or settings.current.of(device_state.backend.name) is not Mode.OFF
            if is_on and not suspended_threads:
                device_state.wake()
            elif device_state.rest():
                _send(device_state, Stamp(_delivery.step))  # what was seen until now counts


settings.on_change(_rest_or_wake)


def _bring_in_everything() -> None:
    """Wait for the snapshots under way, which frees their memory, then for one more of what was seen since."""
    with _delivery.lock:
        _wait_for_all()
        _send_all(Stamp(_delivery.step))
        _wait_for_all()


def _wait_for_all() -> None:
    for snapshot in _delivery.under_way:
        snapshot.wait()
    _hand_over(_arrived())


def look() -> RuntimeError | None:
    """Hand over what has arrived; the error to raise, if any: violations, or else a failure of the device."""
    if _delivery.under_way:
        with _delivery.lock:
            _hand_over(_arrived())
    with _delivery.lock:
        error, failure = _error(), _delivery.device_failure
        if error is not None:
            error.__cause__ = failure
            return error
        if not _delivery.to_return:
            _delivery.device_failure = None
        return failure


def _look_and_return() -> list[Violation]:
    __tracebackhide__ = True
    with _delivery.lock:
        error = look()
        # A failure of the device waits until the violations that it may follow from have been told.
        if error is not None and (isinstance(error, AsyncAssertionError) or not _delivery.to_return):
            raise error
        violations, _delivery.to_return = _delivery.to_return, _Kept()
    if violations.left_out:
        logger.warning(
            "%d violations came after the %d that are returned now, before anybody looked, and were not kept: call "
            "multiassert.poll() more often.",
            violations.left_out,
            len(violations),
        )
    return sorted(violations, key=_by_first_cause)


def _look_with_others(others: ranks.Ranks, timeout: datetime.timedelta) -> RuntimeError | None:
    """As look(), but what is to be raised is raised by all ranks at once."""
    with _delivery.lock:
        _hand_over(_arrived())
        hit = bool(_delivery.to_raise)
    if _delivery.device_failure is not None and not hit:
        return look()
    try:
        if any(device_state.is_capturing() for device_state in state.all_states()):
            return None  # every rank captures its graphs at the same steps
        others.ask(hit)
        if not others.any_hit(timeout):
            return None
        _bring_in_everything()  # so that the first cause is known, and not just what was seen first
    except RuntimeError as failure:  # of a rank that is silent, or of this rank's own device
        return _delivered(_delivery.to_raise, _delivery.to_raise, failure)
    return _exchanged(others, timeout, _delivery.to_raise)


def _exchanged(others: ranks.Ranks, timeout: datetime.timedelta, own: list[Violation]) -> RuntimeError | None:
    """The error with the violations of all ranks."""
    own = sorted(own, key=_by_first_cause)
    try:
        told, failure = others.exchange(own, timeout), _delivery.device_failure
    except RuntimeError as silence:
        told, failure = own, silence
    return _delivered(own, told, failure)


def _delivered(own: list[Violation], told: Sequence[Violation], failure: RuntimeError | None) -> RuntimeError | None:
    """The error that tells violations, this process's own among them, or else the failure they may follow from."""
    told = tuple(told)
    with _delivery.lock:
        known = set(map(id, own))
        left_out = _delivery.to_raise.left_out + _delivery.to_return.left_out
        _delivery.to_raise = _delivery.to_raise.without(known)
        _delivery.to_return = _delivery.to_return.without(known)
        left_out -= _delivery.to_raise.left_out + _delivery.to_return.left_out
        if not told:
            if failure is _delivery.device_failure:
                _delivery.device_failure = None
            return failure
    error = AsyncAssertionError(told, left_out)
    error.__cause__ = failure
    return error


def _error() -> AsyncAssertionError | None:
    with _delivery.lock:
        if _delivery.handing_over:
            return None  # a callback looks: what it was called for is raised after it, and not into it
        if _delivery.held_for_ranks and _delivery.device_failure is None:
            return None  # a device that has failed cannot go on with the others
        violations, _delivery.to_raise = _delivery.to_raise, _Kept()
    return AsyncAssertionError(sorted(violations, key=_by_first_cause), violations.left_out) if violations else None


def _arrived() -> list[tuple[Violation, bool]]:
    """Open the snapshots that have arrived: their violations, and whether each is to be raised."""
    arrived = [snapshot for snapshot in _delivery.under_way if snapshot.arrived()]
    for snapshot in _delivery.under_way:
        _delivery.device_failure = snapshot.failure or _delivery.device_failure
    if not arrived:
        return []
    for snapshot in arrived:
        _tell_of_arrival(_delivery.step - snapshot.stamp.step)
    for snapshot in arrived:
        _delivery.under_way.remove(snapshot)
    hits = [(snapshot, hit) for snapshot in arrived for hit in snapshot.open()]
    hits.sort(key=lambda pair: (pair[0].stamp.step, pair[1].seen.order))
    return [
        (violation, _raises(snapshot, hit)) for snapshot, hit in hits for violation in _violations_of(snapshot, hit)
    ]


def _raises(snapshot: Snapshot, hit: Hit) -> bool:
    if hit.seen.raises is not None:
        return hit.seen.raises
    return settings.last_on.of(snapshot.state.backend.name) is not Mode.WARN


def _violations_of(snapshot: Snapshot, hit: Hit) -> list[Violation]:
    seen, stamp = hit.seen, snapshot.stamp
    if not stamp.ends_step:  # sent within its step, which may have a name by now
        stamp = _delivery.stamps_of_steps.get(stamp.step, stamp)
    return describe(
        seen.check.findings(hit.low_cells, hit.high_cells, hit.lowest, hit.highest),
        site=seen.site,
        message=seen.message,
        platform=snapshot.state.backend.name,
        device=snapshot.state.device,
        stamp=stamp,
        first_step=seen.first_step,
        block=seen.block,
        dtype=seen.dtype,
        shape=seen.shape,
        sequence=seen.order,
        position=seen.position,
        count=hit.outside,
        index=hit.first,
    )


def _hand_over(violations: list[tuple[Violation, bool]]) -> None:
    """Callbacks first, then the log or the queue of those to be raised."""
    with _delivery.lock:
        for condense in list(_condensers):
            try:
                condensed = condense(violations)
            except Exception:  # then all of them are told
                logger.exception("violations of multiassert could not be condensed")
                continue
            if condensed is None:
                _condensers.remove(condense)
            else:
                violations = condensed
        for violation, raises in violations:
            # Kept before anything of the caller's runs, so that nothing it does can lose a violation.
            if raises:
                _delivery.to_raise.keep(violation)
            else:
                _delivery.to_return.keep(violation)
        outermost, _delivery.handing_over = not _delivery.handing_over, True
        try:
            for violation, raises in violations:
                for callback in list(_delivery.callbacks):
                    try:
                        callback(violation)
                    except Exception:
                        _log_failure_of(callback, violation)
                if not raises:
                    _delivery.log.write(violation)
        finally:  # a callback may be left by an interrupt, too
            if outermost:
                _delivery.handing_over = False


def _log_failure_of(callback: Callable[[Violation], object], violation: Violation) -> None:
    """Log the exception that is being handled."""
    _delivery.failing_callbacks.ended()
    if _delivery.failing_callbacks.admits((id(callback), violation.site, violation.kind)):
        logger.exception("a callback of on_violation raised; the violation was: %s", violation.log_line)


def _by_first_cause(violation: Violation) -> tuple[int, int]:
    return violation.last_step, violation.sequence


def _rows(cells: list[int], block: int, shape: tuple[int, ...]) -> tuple[int | range, ...]:
    if not shape or block == state.ALL_ROWS_IN_ONE:
        return ()
    if block > 1:
        rows = shape[0] if shape[0] >= 0 else (cells[-1] + 1) * block
        return tuple(range(cell * block, min((cell + 1) * block, rows)) for cell in cells)
    if len(cells) > ROWS_LISTED:
        return (range(cells[0], cells[-1] + 1),)
    return tuple(cells)


def _names(rows: tuple[int | range, ...], names: Sequence[object] | None) -> tuple[object, ...] | None:
    if names is None:
        return None
    indices = itertools.chain.from_iterable(row if isinstance(row, range) else (row,) for row in rows)
    return tuple(names[index] for index in itertools.islice(indices, ROWS_LISTED) if index < len(names))


# ---------------------------------------------------------------------------------------------------------------------
# The end of the process, and a new one by fork.


def _drain_at_exit() -> None:
    """Drain, so that a violation of the last step is not lost; in mode raise the process ends with exit code 1."""
    with _delivery.lock:
        known = _delivery.to_return.total
        try:
            _bring_in_everything()
        except RuntimeError as error:
            logger.warning("the device could not be asked for its last violations at exit: %s", error)
        found = _delivery.to_return.total - known
        to_raise, _delivery.to_raise = _delivery.to_raise, _Kept()
        _delivery.log.write_ended(all_of_them=True)
        _tell_observers(lambda observer: observer.process_ends())
    if found:
        logger.warning(
            "%d violations were looked at only because the process ended: call multiassert.drain() before it does.",
            found,
        )
    if to_raise:
        # An exception in an exit handler is printed, and the exit code stays 0: a failed run would pass.
        sys.stdout.flush()
        if logger.hasHandlers():  # else logging would print on stderr what comes there anyway
            for violation in to_raise[:VIOLATIONS_IN_ERROR]:
                log(logging.ERROR, violation)
        untold = AsyncAssertionError(to_raise, to_raise.left_out)
        print(f"multiassert.AsyncAssertionError at exit: {untold}", file=sys.stderr, flush=True)
        logging.shutdown()
        os._exit(1)


def start_anew() -> None:
    """Forget steps, device states, violations and callbacks: the state of a new process."""
    global _delivery
    _delivery = _Delivery()
    suspended_threads.clear()
    state.forget_all()


def _start_anew_in_child() -> None:
    """A forked child has its parent's state in memory, but what is in it is the parent's to report."""
    global _delivery
    callbacks, observers = _delivery.callbacks, _delivery.observers
    _delivery = _Delivery()
    _delivery.callbacks, _delivery.observers = callbacks, observers
    suspended_threads.clear()
    state.start_anew_in_child()


def _drain_at_exit_of_worker(_: object) -> None:
    """The processes of multiprocessing leave without the exit handlers of the interpreter, but with these."""
    multiprocessing.util.Finalize(None, _drain_at_exit, exitpriority=0)


atexit.register(_drain_at_exit)
multiprocessing.util.register_after_fork(_drain_at_exit, _drain_at_exit_of_worker)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew_in_child)
