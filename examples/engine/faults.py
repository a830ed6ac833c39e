"""Wrong values put into one request, and an engine that has them. The engine itself knows nothing of faults."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from blame import LOGITS, PAGE_STARTS, READ_SLOTS, SAMPLED_IDS, WRITE_SLOTS
from engine import Engine, HostCopy
from scheduler import Batch, Request
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Fault:
    """A wrong value in one request, in the step that makes its new token number `token` (the prompt makes number 0)."""

    title: str
    victim: str
    token: int
    site: str
    """The message of the first probe that sees it."""
    hidden_state: bool = False
    put_in: Callable[[FaultyEngine, Request], None] | None = None
    """What is spoilt just before the step is launched."""
    spoil_id: bool = False

    def row_in(self, batch: Batch) -> int | None:
        """The victim's row, if this is the step."""
        for row, request in enumerate(batch.requests):
            # The batch was launched already as far as the request's own count goes.
            if request.name == self.victim and request.launched - 1 == self.token:
                return row
        return None


def nan_in_hidden_state(victim: str, token: int = 3) -> Fault:
    """The model's first layer puts out NaN for the request's row: a bad kernel, an overflow."""
    return Fault("NaN in a hidden state", victim, token, LOGITS, hidden_state=True)


def nan_in_kv_page(victim: str, token: int = 3) -> Fault:
    """The keys and values of the request's first token turn to NaN in the pool: a page that was written too late."""

    def put_in(engine: FaultyEngine, request: Request) -> None:
        engine.pool.storage[engine.slot_table[request.seat, :1]] = math.nan

    return Fault("NaN in a KV page", victim, token, LOGITS, put_in=put_in)


def id_outside_the_vocabulary(victim: str, token: int = 3) -> Fault:
    """The sampler returns the vocabulary's size as an id, as one does that counts padded columns."""
    return Fault("a sampled id outside the vocabulary", victim, token, SAMPLED_IDS, spoil_id=True)


def page_past_the_pool(victim: str, token: int = 3) -> Fault:
    """The request's first page lies behind the end of the pool, in the table that says what to read."""

    def put_in(engine: FaultyEngine, request: Request) -> None:
        engine.slot_table[request.seat, :1] = engine.pool.slots

    return Fault("a slot to read past the pool", victim, token, READ_SLOTS, put_in=put_in)


def page_misaligned(victim: str, token: int = 3) -> Fault:
    """The request's first page begins one slot too late, in the table that says what to read."""

    def put_in(engine: FaultyEngine, request: Request) -> None:
        engine.slot_table[request.seat, :1] += 1

    return Fault("a page that begins within a page", victim, token, PAGE_STARTS, put_in=put_in)


def slot_past_the_pool(victim: str, token: int = 0, position: int | None = None) -> Fault:
    """The slot of one token, the last that the step puts in, or that at `position`, lies behind the end of the pool."""

    def put_in(engine: FaultyEngine, request: Request) -> None:
        last = request.cached - 1 if position is None else position
        engine.slot_table[request.seat, last : last + 1] = engine.pool.slots

    return Fault("a slot to write past the pool", victim, token, WRITE_SLOTS, put_in=put_in)


FAULTS = (
    nan_in_hidden_state,
    nan_in_kv_page,
    id_outside_the_vocabulary,
    page_past_the_pool,
    page_misaligned,
    slot_past_the_pool,
)


class FaultyEngine(Engine):
    """The engine with one fault or none. It keeps the logits that each token was chosen from, to compare runs."""

    def __init__(self, *arguments: Any, fault: Fault | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.fault = fault
        self.fault_step: int | None = None
        self.batches: list[Batch] = []
        self.logits: dict[str, list[Tensor]] = {}

    def launch(self, batch: Batch) -> HostCopy:
        """With a note of the batch."""
        self.batches.append(batch)
        return super().launch(batch)

    def prepare(self, batch: Batch) -> None:
        """With what is spoilt before the step reads or writes anything."""
        super().prepare(batch)
        row = None if self.fault is None else self.fault.row_in(batch)
        if self.fault is not None and row is not None:
            self.fault_step = batch.step
            if self.fault.put_in is not None:
                self.fault.put_in(self, batch.requests[row])

    def decode(self, batch: Batch, ids: Tensor, prefix: Tensor, cached: Tensor) -> tuple[Tensor, Tensor]:
        """With a NaN behind the first layer."""
        row = None if self.fault is None else self.fault.row_in(batch)
        if self.fault is None or not self.fault.hidden_state or row is None:
            return super().decode(batch, ids, prefix, cached)

        def spoil(layer: torch.nn.Module, arguments: tuple[Any, ...], hidden: Tensor) -> Tensor:
            spoilt = hidden.clone()
            spoilt[row, 0, 0] = math.nan
            return spoilt

        hook = self.subject.model.model.layers[0].register_forward_hook(spoil)
        try:
            return super().decode(batch, ids, prefix, cached)
        finally:
            hook.remove()

    def sample(self, batch: Batch, logits: Tensor) -> Tensor:
        """With an id that is none."""
        ids = super().sample(batch, logits)
        for request, chosen_from in zip(batch.requests, logits, strict=False):
            self.logits.setdefault(request.name, []).append(chosen_from.clone())
        row = None if self.fault is None else self.fault.row_in(batch)
        if self.fault is not None and self.fault.spoil_id and row is not None:
            ids[row] = self.subject.vocabulary_size
        return ids
