"""Requests that come and go: who is in the batch of a step, in which row, on which pages of the KV pool."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from multiassert import Violation
from multiassert.demo.pool import PAGE_SIZE, PagedPool


class RequestError(RuntimeError):
    """One request ended because a probe saw a bad value in its rows; kept in `request.error`, never raised.

    `step` is the engine's step in which the value was seen, `violation` the whole record. Of several `suspects` one or
    more had the bad value; it is not known which, so all of them ended.
    """

    def __init__(self, request: str, violation: Violation, step: int, suspects: Sequence[str]) -> None:
        self.message = violation.text
        self.site = violation.site
        self.step = step
        self.violation = violation
        self.suspects = tuple(suspects)
        whose = "" if len(suspects) == 1 else f", in one or more of {', '.join(suspects)}"
        super().__init__(f"request {request} ended in step {step}: {self.message} (value {violation.value}){whose}")


@dataclasses.dataclass(eq=False)
class Request:
    """What a client asked for, and how far it has come."""

    name: str
    prompt: list[int]
    max_new_tokens: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    """The new tokens, each added only after the step that made it was looked at."""
    error: RequestError | None = None
    is_done: bool = False

    # The scheduler's.
    seat: int = 0
    """Its row in the tables on the device while it has pages; 0 is nobody's."""
    cached: int = 0
    """How many of its tokens have their keys and values in the pool, or will when the launched steps have run."""
    launched: int = 0
    """How many new tokens were asked of the device; the host has seen fewer of them."""
    needs_wiping: bool = False
    """Whether a probe saw something bad in any of its steps, so that its pages may hold it still."""

    @property
    def pages(self) -> int:
        """How many pages it takes at most; all are reserved when it is let in, so it never has to be put out again."""
        return -(-(len(self.prompt) + self.max_new_tokens) // PAGE_SIZE)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Who is in which row in one step, as it was when the step was launched."""

    step: int
    requests: tuple[Request, ...]
    decoding: int
    """The first so many rows go on by a token; the others are new, and put in their whole prompt."""
    cached: tuple[int, ...]
    """For each request, how many tokens were in the pool before this step."""

    @property
    def new(self) -> tuple[Request, ...]:
        return self.requests[self.decoding :]

    @property
    def names(self) -> list[str]:
        """Whose the rows are in tensors with a row for each request."""
        return [request.name for request in self.requests]

    @property
    def token_owners(self) -> list[str]:
        """Whose the rows are in tensors with a row for each token that the step puts into the pool."""
        owners = self.names[: self.decoding]
        for request in self.new:
            owners += [request.name] * len(request.prompt)
        return owners


class Scheduler:
    """First come, first served, in a batch of at most `lanes`."""

    def __init__(self, pool: PagedPool, lanes: int, seats: int) -> None:
        self.pool = pool
        self.lanes = lanes
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: list[Request] = []
        self.free_seats = list(range(1, seats + 1))
        self._steps = 0

    def next_batch(self) -> Batch | None:
        """The batch of the next step, those that were let in last; None if there is nothing to do.

        Rows close up when a request leaves, so a request's row may be another one in each step.
        """
        self.running = [r for r in self.running if not r.is_done and r.launched < r.max_new_tokens]
        decoding = len(self.running)
        while self.waiting and len(self.running) < self.lanes and self._has_room_for(self.waiting[0]):
            self.running.append(self._seated(self.waiting.popleft()))
        if not self.running:
            return None
        batch = Batch(self._steps, tuple(self.running), decoding, tuple(r.cached for r in self.running))
        for request in self.running:
            request.cached = request.cached + 1 if request.cached else len(request.prompt)
            request.launched += 1
        self._steps += 1
        return batch

    def release(self, request: Request) -> None:
        """Give the request's pages and its seat to whoever comes next."""
        self.pool.release_tail(request.seat, 0)
        self.free_seats.append(request.seat)
        request.seat = 0

    def _has_room_for(self, request: Request) -> bool:
        return bool(self.free_seats) and request.pages <= len(self.pool.free_pages)

    def _seated(self, request: Request) -> Request:
        request.seat = self.free_seats.pop(0)
        self.pool.reserve(request.seat, request.pages * PAGE_SIZE)
        return request
