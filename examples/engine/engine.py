"""A small engine with continuous batching over a paged KV pool, in which one bad row ends one request.

It runs one step ahead, as SGLang and vLLM do: while the device works on a step, the host launches the next one, and
only then reads what the step before came to. Sampled ids go from step to step on the device. So the engine waits for
the device once in a step, for ids that are there in most cases, and the probes add no wait to that.
"""

from __future__ import annotations

import collections
from typing import Any

import torch
from blame import LOGITS, PAGE_STARTS, READ_SLOTS, SAMPLED_IDS, WRITE_SLOTS, requests_of, steps_of
from scheduler import Batch, Request, RequestError, Scheduler
from torch import Tensor
from transformers import DynamicCache

import multiassert
from multiassert import Violation
from multiassert.demo.model import Subject
from multiassert.demo.pool import PAGE_SIZE, PagedPool

# Two pages are nobody's. Page 0 stays zero, and is read where there is nothing to read. What must not be written where
# it should go is written to page 1, which nobody reads: if it went to page 0, the NaN of one request would be read,
# behind the mask, by all. (A mask is no protection: 0 * NaN is NaN.)
PADDING_SLOT = 0
WASTE_SLOT = PAGE_SIZE


class Engine:
    """Greedy decoding of requests that arrive and leave at any step.

    `lanes` is how many requests run together. All steps have the shape of a full batch with full contexts: the kernels
    are then the same ones in each step, and no request's numbers depend on who else is there.
    """

    def __init__(
        self, subject: Subject, lanes: int = 4, pages: int = 16, pages_per_request: int = 1, ahead: int = 1
    ) -> None:
        if pages < pages_per_request + 2:
            raise ValueError(f"pages={pages}: one request takes up to {pages_per_request}, and two are nobody's")
        self.subject = subject
        self.device = subject.device
        self.lanes = lanes
        self.ahead = ahead
        self.context = pages_per_request * PAGE_SIZE
        seats = lanes * (ahead + 1)  # those who run, and those who are done but still in a step that was launched
        self.pool = PagedPool(subject.model.config, pages, seats + 1, self.device)
        self.pool.free_pages.remove(WASTE_SLOT // PAGE_SIZE)
        self.scheduler = Scheduler(self.pool, lanes, seats)
        self.slot_table = torch.full((seats + 1, self.context), PADDING_SLOT, device=self.device)
        """For each seat, the slots of its tokens; the engine's page table."""
        self.last_ids = torch.zeros(seats + 1, dtype=torch.long, device=self.device)
        self.in_flight: collections.deque[tuple[Batch, HostCopy]] = collections.deque()
        self.first_step = multiassert.current_step()
        """What records call this engine's step 0: they count the calls of step() in the whole process."""
        self.unread: list[Violation] = []
        multiassert.prewarm(self.device)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self.in_flight)

    def submit(self, request: Request) -> None:
        """Let a request wait for its turn."""
        if not request.prompt or request.max_new_tokens < 1 or request.pages * PAGE_SIZE > self.context:
            raise ValueError(
                f"request {request.name}: {len(request.prompt)} prompt tokens and {request.max_new_tokens} new ones; "
                f"good are one or more of each, and together at most {self.context}"
            )
        if request.name in self._names_in_use():
            raise ValueError(f"request {request.name}: this name is in use, and records tell requests by their names")
        self.scheduler.waiting.append(request)

    def _names_in_use(self) -> set[str]:
        in_flight = (request for batch, _ in self.in_flight for request in batch.requests)
        return {request.name for request in (*self.scheduler.waiting, *self.scheduler.running, *in_flight)}

    def step(self) -> list[Request]:
        """Launch the next step and read the one before; returns the requests that ended, each with text or an error."""
        batch = self.scheduler.next_batch()
        if batch is not None:
            self.in_flight.append((batch, self.launch(batch)))
        if self.in_flight and (batch is None or len(self.in_flight) > self.ahead):
            return self._read()
        return []

    # -----------------------------------------------------------------------------------------------------------------
    # On the device: nothing in here waits.

    @torch.no_grad()
    def launch(self, batch: Batch) -> HostCopy:
        """Put one step on the device: read the pool, run the model, write the pool, sample; with a probe at each."""
        self.prepare(batch)
        padding = [0] * (self.lanes - len(batch.requests))
        seats = [request.seat for request in batch.requests] + padding
        seat_of_row, cached = _to_device([seats, [*batch.cached, *padding]], self.device)

        slots = self.slot_table[seat_of_row]  # [lanes, context]
        starts = slots[:, ::PAGE_SIZE]
        multiassert.maybe_detect_page_aligned(starts, PAGE_SIZE, PAGE_STARTS, num_valid=len(batch.requests))
        # Sanitized, since a bad index does its damage long before the host hears of it: it crashes the device, or it
        # reads and writes what is another request's. Whole pages are read, as attention kernels do.
        pages = (starts.unsqueeze(2) + torch.arange(PAGE_SIZE, device=self.device)).flatten(1)
        to_read = multiassert.sanitize_oob(pages, 0, self.pool.slots, READ_SLOTS, fill=PADDING_SLOT)
        logits, decoded = self.decode(batch, self.last_ids[seat_of_row], self.pool.read(to_read), cached)

        written = [decoded[: batch.decoding]]
        to_write = [slots.gather(1, cached.unsqueeze(1))[: batch.decoding, 0]]
        for row, request in enumerate(batch.new, start=batch.decoding):
            logits[row], keys_and_values = self._prefill(request)
            written.append(keys_and_values)
            to_write.append(slots[row, : len(request.prompt)])
        # [tokens]: as many rows as tokens, of which a new request has many. See blame.py for whose they are.
        safe = multiassert.sanitize_oob(torch.cat(to_write), 0, self.pool.slots, WRITE_SLOTS, fill=WASTE_SLOT)
        self.pool.write(safe, torch.cat(written))

        multiassert.maybe_detect_nan(logits, LOGITS, num_valid=len(batch.requests))
        sampled = self.sample(batch, logits)[: len(batch.requests)]
        ids = multiassert.sanitize_oob(sampled, 0, self.subject.vocabulary_size, SAMPLED_IDS)
        self.last_ids[seat_of_row[: len(batch.requests)]] = ids

        multiassert.step(tag=f"engine step {batch.step}", rows=batch.names)
        # Behind step() on the same stream: when the ids are on the host, so is what the probes of this step saw.
        return HostCopy(ids)

    def decode(self, batch: Batch, ids: Tensor, prefix: Tensor, cached: Tensor) -> tuple[Tensor, Tensor]:
        """One token for each lane: logits [lanes, vocabulary], keys and values [lanes, layers, 2, heads, head size].

        What comes out of the lanes of new requests and of nobody is not used.
        """
        cache = _Cache(prefix)
        is_seen = torch.arange(self.context + 1, device=self.device) < cached.unsqueeze(1)
        is_seen[:, -1] = True  # the token itself, which comes last
        mask = torch.zeros(is_seen.shape, dtype=prefix.dtype, device=self.device)
        mask = mask.masked_fill(~is_seen, torch.finfo(prefix.dtype).min)[:, None, None]
        logits = self.subject.model(ids.unsqueeze(1), mask, cached.unsqueeze(1), cache).logits[:, -1]
        return logits, cache.new_ones()[:, 0]

    def sample(self, batch: Batch, logits: Tensor) -> Tensor:
        """The next token id of each row."""
        return logits.argmax(dim=-1)

    def _prefill(self, request: Request) -> tuple[Tensor, Tensor]:
        """The whole prompt of one request, by itself: its last logits, and keys and values with a row a token."""
        cache = _Cache()
        ids = _to_device([request.prompt], self.device)
        logits = self.subject.model(ids, None, None, cache, logits_to_keep=1).logits[0, -1]
        return logits, cache.new_ones()[0]

    def prepare(self, batch: Batch) -> None:
        """Put the pages of new requests into the slot table."""
        for request in batch.new:
            for number, page in enumerate(self.pool.pages_of[request.seat]):
                slots = torch.arange(page * PAGE_SIZE, (page + 1) * PAGE_SIZE, device=self.device)
                self.slot_table[request.seat, number * PAGE_SIZE : (number + 1) * PAGE_SIZE] = slots

    # -----------------------------------------------------------------------------------------------------------------
    # On the host, one step later.

    def _read(self) -> list[Request]:
        """Read the oldest step that was launched: first what the probes saw, then the tokens."""
        batch, ids = self.in_flight.popleft()
        tokens = ids.wait()
        ended = self._end_the_bad_ones(batch)
        # A result is handed out only here, after the step in which it ended was looked at. A request whose last step
        # was bad has left the batch by now, since the host knew beforehand that it was the last; but not a token of it
        # has been given to anybody, so there is nothing to take back: it ends with its error instead of its text.
        for request, token in zip(batch.requests, tokens, strict=True):
            if request.is_done:
                continue  # of a request that ended in an earlier step, or just now: a token too many
            request.tokens.append(token)
            if len(request.tokens) == request.max_new_tokens or token == self.subject.end_token:
                request.is_done = True
                ended.append(request)
        for request in batch.requests:
            if request.is_done:
                self._release(request)
        return ended

    def _end_the_bad_ones(self, batch: Batch) -> list[Request]:
        """End the requests whose rows were seen bad, and no others; they have made another token or two meanwhile."""
        self.unread += multiassert.poll()  # never waits; first causes come first
        launched = [batch, *(later for later, _ in self.in_flight)]
        batches = {self.first_step + one.step: one for one in launched}
        requests = {request.name: request for one in launched for request in one.requests}
        ended = []
        for violation in list(self.unread):
            step = steps_of(violation)[0] - self.first_step
            if step > batch.step:
                continue  # of a step that is read next; where the device is fast, it is here already
            self.unread.remove(violation)
            for suspects in requests_of(violation, batches):
                for request in [requests[name] for name in suspects if name in requests]:
                    request.needs_wiping = True
                    if not request.is_done:  # else it ended in an earlier step, or for an earlier cause
                        request.is_done = True
                        request.error = RequestError(request.name, violation, step, suspects)
                        ended.append(request)
        return ended

    def _release(self, request: Request) -> None:
        """Give back the pages of a request that is done, once no launched step has it: such a step may be bad yet.

        The pages of a bad one are wiped. A NaN that stays behind in a page reaches its next owner even from slots that
        are masked for it. The device does it in order, after what was launched before and before what comes next.
        """
        if any(request in later.requests for later, _ in self.in_flight):
            return
        if request.needs_wiping:
            for page in self.pool.pages_of[request.seat]:
                self.pool.storage[page * PAGE_SIZE : (page + 1) * PAGE_SIZE].zero_()
        self.slot_table[request.seat].fill_(PADDING_SLOT)
        self.scheduler.release(request)


class HostCopy:
    """Token ids on their way to the host."""

    def __init__(self, ids: Tensor) -> None:
        self.event: Any = None
        if ids.device.type == "cpu":
            self.host = ids
            return
        self.host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
        self.host.copy_(ids, non_blocking=True)
        self.event = torch.get_device_module(ids.device).Event()
        self.event.record()

    def wait(self) -> list[int]:
        """Wait for them: the one place where the engine waits for the device."""
        if self.event is not None:
            self.event.synchronize()
        return list(self.host.tolist())


class _Cache(DynamicCache):
    """What the model asks for keys and values in one pass: those of the prefix, and behind them its new ones.

    DynamicCache itself makes the host wait for the device, once in each layer for a tensor without elements.
    """

    def __init__(self, prefix: Tensor | None = None) -> None:
        super().__init__()
        self.prefix = prefix
        self.new: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the new keys and values of a layer [requests, heads, tokens, head size], return all."""
        new = torch.stack((key_states, value_states))
        self.new.append(new)
        if self.prefix is None:
            return key_states, value_states
        both = torch.cat((self.prefix[:, :, layer_idx].permute(2, 0, 3, 1, 4), new), dim=3)
        return both[0], both[1]

    def new_ones(self) -> Tensor:
        """The new keys and values: [requests, tokens, layers, 2, heads, head size]."""
        return torch.stack(self.new).permute(2, 4, 0, 1, 3, 5)


def _to_device(numbers: list[list[int]], device: torch.device) -> Tensor:
    """Numbers of the host on the device, without a wait."""
    on_host = torch.tensor(numbers, pin_memory=device.type != "cpu")
    return on_host.to(device, non_blocking=True)
