"""What 100 probes cost a decode step of a tiny model, eager and compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

import multiassert
from benchmarks import contenders, timing
from benchmarks.table import Row, Table
from benchmarks.timing import Contender, Effort
from multiassert import Site

EXPLANATION = (
    "33 layers of width 128, batch 8, a cache of 64 tokens, in float32: an index probe and two NaN probes a layer, "
    "another on the logits. Each layer is compiled by Inductor, all by the same code. `deferred` calls `step` too. A "
    "model this small does so little work that probes weigh more than they ever will. SGLang's have one message for "
    "all layers, since a message a layer would compile each anew."
)
LAYERS, WIDTH, HEADS, BATCH, CACHE, VOCABULARY = 33, 128, 4, 8, 64, 4096


@dataclasses.dataclass(frozen=True)
class Probes:
    """The two probes that the model calls, each with the site last."""

    nan: Callable[[Tensor, Site], object]
    slots: Callable[[Tensor, int, int, Site], object]


class Layer(nn.Module):
    """Attention of one token over the cache, and a perceptron, with their probes."""

    cache: Tensor

    def __init__(self, number: int, probes: Probes | None) -> None:
        super().__init__()
        self.projections = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("cache", torch.randn(2, BATCH, CACHE, WIDTH))
        self.probes: Probes | None = probes
        self.sites = [multiassert.site(f"layer {number}: {what}") for what in ("slots", "attention", "perceptron")]

    def forward(self, hidden: Tensor, slots: Tensor) -> Tensor:
        """One token for each of the batch."""
        if self.probes is not None:
            self.probes.slots(slots, 0, CACHE, self.sites[0])
        query, key, value = self.projections(hidden).chunk(3, -1)
        batch = torch.arange(BATCH)
        self.cache[0, batch, slots] = key
        self.cache[1, batch, slots] = value
        shape = BATCH, -1, HEADS, WIDTH // HEADS
        query, keys, values = (part.view(shape).transpose(1, 2) for part in (query, self.cache[0], self.cache[1]))
        attended = nn.functional.scaled_dot_product_attention(query, keys, values)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(BATCH, WIDTH))
        if self.probes is not None:
            self.probes.nan(hidden, self.sites[1])
        hidden = hidden + self.down(nn.functional.gelu(self.up(hidden)))
        if self.probes is not None:
            self.probes.nan(hidden, self.sites[2])
        return hidden


class Model(nn.Module):
    """Tokens to logits."""

    def __init__(self, probes: Probes | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(number, probes) for number in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.probes: Probes | None = probes
        self.site = multiassert.site("logits")

    def forward(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """One decode step."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, slots)
        logits: Tensor = self.head(hidden)
        if self.probes is not None:
            self.probes.nan(logits, self.site)
        return logits


def _models() -> dict[str, Probes | None]:
    models = {"ours": Probes(multiassert.maybe_detect_nan, multiassert.maybe_detect_oob), "none": None}
    sglang = contenders.sglang_async_probe()
    if sglang is not None:
        models["SGLang"] = Probes(
            lambda tensor, site: sglang.maybe_detect_nan(tensor, "layer"),
            lambda tensor, low, high, site: sglang.maybe_detect_oob(tensor, low, high, "layer"),
        )
    return models


def measure(effort: Effort) -> Table:
    """Race the models, without the compiler first."""
    table = Table("decode", "A decode step with 100 probes", EXPLANATION)
    for how in ("eager",) if effort.quick else ("eager", "compiled"):
        race = timing.race(_contenders(compiled=how == "compiled"), effort)
        ratios = [("off", "no probes"), ("auto", "no probes"), ("deferred", "no probes"), ("SGLang", "no probes")]
        ratios += [("auto", "SGLang"), ("deferred", "SGLang"), ("auto", "off"), ("deferred", "off")]
        values = {f"{ours} / {theirs}": race.ratio(ours, theirs) for ours, theirs in ratios}
        note = "; ".join(f"{name} cannot ({reason})" for name, reason in race.refusals.items())
        table.rows.append(Row({"how": how}, {**values, "us, no probes": race.time("no probes")}, note))
    return table


def _contenders(compiled: bool) -> list[Contender]:
    found = {}
    inputs = {"tokens": torch.zeros(BATCH, dtype=torch.int64), "slots": torch.zeros(BATCH, dtype=torch.int64)}
    for name, probes in _models().items():
        model = Model(probes).requires_grad_(False)
        if compiled:
            for layer in model.layers:
                layer.compile()
        found[name] = {"model": model, "step": multiassert.step, **inputs}
    statement = "model(tokens, slots)"
    racers = [
        Contender("no probes", statement, found["none"]),
        Contender("off", statement, found["ours"], contenders.mode_off),
        Contender("auto", statement, found["ours"], contenders.mode_auto),
        Contender("deferred", f"{statement}; step()", found["ours"], contenders.mode_deferred),
    ]
    if "SGLang" in found:
        racers.append(Contender("SGLang", statement, found["SGLang"], contenders.open_sglang_gate))
    return racers
