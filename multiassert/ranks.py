"""What the ranks of a torch.distributed group tell each other, so that all of them raise at the same step.

Once a step each rank contributes one integer: whether it has a violation to raise. The maximum over the ranks is under
way while the engine goes on, and is looked at CALLS_BETWEEN_ASKING_AND_LOOKING calls later, by every rank at the same
call. Only when some rank has something do they exchange records, and wait for each other.

Only all_reduce of int32 is used, which every vendor's backend has (gloo, nccl, hccl, mccl). A rank that does not answer
is named with the help of the group's store: the others leave a mark there before they give up.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import pickle
import socket
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from multiassert import backends
from multiassert.violation import Violation

# Far enough behind that the answer is there mostly before it is asked for, also for a host that runs a step ahead.
CALLS_BETWEEN_ASKING_AND_LOOKING = 2
TIMEOUT = datetime.timedelta(minutes=5)  # below torch.distributed's own, after which some backends end the process
RECORDS_OF_A_RANK = 16  # that the other ranks are told; each rank raises all its own
SECONDS_BETWEEN_LOOKS = 0.001
SECONDS_BEFORE_MARK = 1.0  # that a rank is here and waits, for those that give up later


class SilentRankError(RuntimeError):
    """Ranks of the group did not take part in `step(group=...)` in time; `ranks` are those that left no sign."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.ranks)


@functools.cache
def node() -> str:
    """The name of this machine, as a record of a rank has it."""
    return socket.gethostname()


def own_rank() -> int | None:
    """The rank of this process: of torch.distributed, or the environment's RANK; None where it has none."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else None


class Ranks:
    """The ranks of one group. Every method but the first must be called by all of them, in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.members: list[int] = dist.get_process_group_ranks(group)
        self._group = weakref.ref(group)  # the table of all ranks must not keep it alive
        self._rank = dist.get_rank()
        self._device = _device_of_collectives(group)
        self._asked: list[_Collective] = []
        self._collectives = 0
        self._silence: SilentRankError | None = None
        self._name = group.group_name
        self._store = dist.distributed_c10d.PrefixStore("multiassert", dist.distributed_c10d._get_default_store())
        self._store.set(f"node/{self._rank}", node())

    def ask(self, hit: bool) -> None:
        """Tell the others whether this rank has a violation, and ask them; waits for nothing."""
        self._asked.append(self._all_reduce(torch.tensor([int(hit)], dtype=torch.int32), dist.ReduceOp.MAX))

    def any_hit(self, timeout: datetime.timedelta) -> bool:
        """Whether some rank had a violation CALLS_BETWEEN_ASKING_AND_LOOKING calls ago; the same on every rank.

        Waits where the answer is not there yet. Raises SilentRankError after `timeout`.
        """
        if len(self._asked) <= CALLS_BETWEEN_ASKING_AND_LOOKING:
            return False
        answer = self._wait(self._asked[0], timeout)
        del self._asked[0]  # only now: an interrupt must not leave this rank one behind
        return bool(answer.item())

    def exchange(self, own: list[Violation], timeout: datetime.timedelta) -> list[Violation]:
        """All that the ranks have to tell, the first cause first; every rank waits for every other.

        Answers that are still under way say nothing new after this, and are dropped.
        """
        while self._asked:
            self._wait(self._asked[0], timeout)
            del self._asked[0]
        place, told = self.members.index(self._rank), b""
        if own:
            told = pickle.dumps([_portable(violation) for violation in own[:RECORDS_OF_A_RANK]])
        sizes = torch.zeros(len(self.members), dtype=torch.int32)
        sizes[place] = len(told)
        sizes = self._wait(self._all_reduce(sizes, dist.ReduceOp.MAX), timeout)
        with_records = sizes.nonzero().flatten().tolist()
        if not with_records:
            return []
        words = -(-int(sizes.max()) // 4)
        records = torch.zeros(len(with_records), words, dtype=torch.int32)
        if own:
            padded = bytearray(told.ljust(words * 4, b"\0"))
            records[with_records.index(place)] = torch.frombuffer(padded, dtype=torch.int32)
        # Where one rank has put its bytes all others have zeros: the sum is those bytes.
        records = self._wait(self._all_reduce(records, dist.ReduceOp.SUM), timeout)
        all_told = list(own)
        for row, member in zip(records, with_records, strict=True):
            if member != place:
                all_told += pickle.loads(bytes(row.view(torch.uint8)[: int(sizes[member])].tolist()))
        return sorted(all_told, key=_by_first_cause)

    def _all_reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> _Collective:
        if self._silence is not None:
            raise SilentRankError(str(self._silence), self._silence.ranks)
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed while multiassert was asking its ranks")
        self._collectives += 1
        return _Collective(self._collectives, values, operation, group, self._device)

    def _wait(self, collective: _Collective, timeout: datetime.timedelta) -> Tensor:
        try:
            return self._answer(collective, timeout)
        except SilentRankError as silence:
            self._silence = silence  # the group is out of step for good
            raise

    def _answer(self, collective: _Collective, timeout: datetime.timedelta) -> Tensor:
        began = time.monotonic()
        seconds = timeout.total_seconds()
        marked, failure = False, None
        while True:
            try:
                if failure is None and collective.is_done():
                    return collective.result
            except RuntimeError as error:  # the connection to a rank that has died, mostly
                failure = error
            waited = time.monotonic() - began
            if not marked and (failure is not None or waited >= min(seconds / 2, SECONDS_BEFORE_MARK)):
                with contextlib.suppress(RuntimeError):
                    self._store.set(self._mark(collective.number, self._rank), node())
                marked = True
            if waited >= seconds:
                raise self._silence_of(collective.number, seconds, failure) from failure
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _mark(self, number: int, rank: int) -> str:
        return f"waits/{self._name}/{number}/{rank}"

    def _silence_of(self, number: int, seconds: float, failure: RuntimeError | None) -> SilentRankError:
        try:
            silent = [rank for rank in self.members if not self._store.check([self._mark(number, rank)])]
            nodes = {
                rank: self._store.get(f"node/{rank}").decode() for rank in silent if self._store.check([f"node/{rank}"])
            }
        except RuntimeError as error:
            return SilentRankError(
                f"the ranks of the group did not answer within {seconds:g} s, and neither did their store, which "
                f"mostly lives on rank 0: {error}. Look at the log of rank 0 first.",
                (),
            )
        if not silent:
            return SilentRankError(
                f"every rank of the group waits, but their {number}. exchange was not done within {seconds:g} s"
                f"{f': {failure}' if failure else ''}. Do all ranks call step(group=...) and raise_if_error(group=...) "
                "in the same order, and with other collectives of the group between them in the same order?",
                (),
            )
        names = ", ".join(f"{rank} ({nodes.get(rank, 'node unknown')})" for rank in silent)
        here = ", ".join(str(rank) for rank in self.members if rank not in silent)
        return SilentRankError(
            f"no answer from rank {names} within {seconds:g} s. Certain: rank {here} of the group waited in "
            "step(group=...) or raise_if_error(group=...). The others left no sign: they ended, hang, are late, or "
            "call it less often. Look at their logs first; what this rank saw itself is raised with this error.",
            tuple(silent),
        )


class _Collective:
    """One all_reduce of int32 values under way, on a stream of its own where it runs on a device."""

    def __init__(
        self,
        number: int,
        values: Tensor,
        operation: dist.ReduceOp.RedOpType,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.number = number
        self.result = values
        self._event = None
        if device.type == "cpu":
            self._work = dist.all_reduce(values, op=operation, group=group, async_op=True)
            return
        backend = backends.for_device_type(device.type)
        stream = _stream_of_collectives(device)
        with backend.on_stream(stream):
            self._on_device = values.pin_memory().to(device, non_blocking=True)
            self._work = dist.all_reduce(self._on_device, op=operation, group=group, async_op=True)
            self._work.wait()  # orders the stream behind the collective; the host goes on
            self.result = torch.empty_like(values, pin_memory=True)
            self.result.copy_(self._on_device, non_blocking=True)
            self._event = backend.record_event(stream)

    def is_done(self) -> bool:
        """Whether the result is on the host; raises RuntimeError where it will never be."""
        if self._event is not None:
            return self._event.query()
        if not self._work.is_completed():
            return False
        self._work.wait()
        return True


@functools.cache
def _stream_of_collectives(device: torch.device) -> Any:
    """A stream apart, so that no work of the engine waits for the slowest rank."""
    return backends.for_device_type(device.type).module(device).Stream(device)


def _device_of_collectives(group: dist.ProcessGroup) -> torch.device:
    """The CPU where the group has a backend for it, since that costs the device nothing; else its current device."""
    types = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
    if "cpu" in types:
        return torch.device("cpu")
    return torch.device(types[0], torch.get_device_module(types[0]).current_device())


def _portable(violation: Violation) -> Violation:
    """The record with the caller's own objects as text: other ranks may not know their classes."""
    names = violation.row_names
    return violation.with_names(_plain(violation.tag), None if names is None else tuple(map(_plain, names)))


def _plain(value: object) -> object:
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def _by_first_cause(violation: Violation) -> tuple[int, int, int, int]:
    return violation.last_step, violation.position or 0, violation.rank or 0, violation.sequence


_all_ranks: weakref.WeakKeyDictionary[dist.ProcessGroup, Ranks] = weakref.WeakKeyDictionary()


def of_group(group: object) -> Ranks | None:
    """The ranks of a group, made at its first use; None where there is no other rank than this one."""
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            f"group must be a torch.distributed process group that this rank is in, got {group!r}: for all ranks, call "
            "torch.distributed.init_process_group(...) and pass torch.distributed.group.WORLD"
        )
    if dist.get_world_size(group) == 1:
        return None
    ranks = _all_ranks.get(group)
    if ranks is None:
        ranks = _all_ranks[group] = Ranks(group)
    return ranks


def timeout_of(timeout: datetime.timedelta | None) -> datetime.timedelta:
    """The time to wait for other ranks, checked."""
    if timeout is None:
        return TIMEOUT
    if not isinstance(timeout, datetime.timedelta) or timeout <= datetime.timedelta(0):
        raise TypeError(f"timeout must be a datetime.timedelta above zero, got {timeout!r}")
    return timeout
