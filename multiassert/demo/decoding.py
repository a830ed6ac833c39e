"""The ways in which the demo decodes, and one run of one of them: what came out, what broke, what the probes saw."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import multiassert
from multiassert import Violation
from multiassert.demo import hardware
from multiassert.demo.faults import Fault
from multiassert.demo.model import Subject
from multiassert.demo.pool import PAGE_SIZE
from multiassert.demo.probes import Probes
from multiassert.demo.tree import TreeDecoder
from multiassert.demo.watch import Watch

MAX_NEW_TOKENS = 12

QUESTION = "Question: What is the capital of {0}? Answer: The capital of {0} is {1}.\n"
CAPITALS = (
    ("Italy", "Rome"),
    ("Spain", "Madrid"),
    ("Portugal", "Lisbon"),
    ("Austria", "Vienna"),
    ("Greece", "Athens"),
    ("Norway", "Oslo"),
    ("Sweden", "Stockholm"),
    ("Poland", "Warsaw"),
    ("Hungary", "Budapest"),
    ("Ireland", "Dublin"),
    ("Finland", "Helsinki"),
    ("Denmark", "Copenhagen"),
    ("Belgium", "Brussels"),
)
LAST_QUESTION = "Question: What is the capital of France? Answer:"

SENTENCE_PROMPT = "The capital of France is"
QUESTION_PROMPT = QUESTION.format(*CAPITALS[0]) + LAST_QUESTION
LONG_PROMPT = "".join(QUESTION.format(*names) for names in CAPITALS) + LAST_QUESTION
# The long prompt ends this many tokens before the end of its first page, so that a draft tree reaches over the border:
# then pages are taken for the tree and freed again.
TOKENS_TO_PAGE_BORDER = 10


@dataclasses.dataclass(frozen=True)
class Decoding:
    """A way of speculative decoding, with the prompts that it is shown on."""

    name: str
    prompts: Callable[[Subject], list[list[int]]]
    decode: Callable[[Subject, Watch, list[list[int]]], bool]
    """Puts the new tokens into the watch; returns whether all that it can verify besides the text was right."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run came to."""

    tokens: list[list[int]]
    error: Exception | None
    state_is_right: bool
    violations: list[Violation]
    watch: Watch

    def text(self, subject: Subject) -> str:
        """The new text, of all requests one after the other."""
        return " | ".join(subject.decode(tokens) for tokens in self.tokens)


def run(decoding: Decoding, subject: Subject, probes: Probes, fault: Fault | None = None) -> Outcome:
    """Decode once under `probes`, with `fault` injected; waits for the device at the end, to collect the violations."""
    prompts = decoding.prompts(subject)
    watch = Watch(subject.model, decoding.name, len(prompts), probes, fault)
    error: Exception | None = None
    state_is_right = False
    with multiassert.override(probes.mode):
        try:
            probes.begin()
            with watch.attached():
                state_is_right = decoding.decode(subject, watch, prompts)
        except (IndexError, RuntimeError) as raised:
            error = raised
        failure = probes.end()
    hardware.renew(subject.device)
    tokens = [trimmed(subject, tokens) for tokens in watch.emitted]
    return Outcome(tokens, error or failure, state_is_right, probes.found, watch)


def greedy(subject: Subject, prompt: list[int]) -> list[int]:
    """Decode plainly, a token at a time: what every speculative run has to come to."""
    return trimmed(subject, _generate(subject, prompt))


def trimmed(subject: Subject, tokens: list[int]) -> list[int]:
    """The tokens up to the end token or to as many as were asked for, which a step may overshoot."""
    tokens = tokens[:MAX_NEW_TOKENS]
    if subject.end_token in tokens:
        return tokens[: tokens.index(subject.end_token) + 1]
    return tokens


def _generate(subject: Subject, prompt: list[int], watch: Watch | None = None, **options: int) -> list[int]:
    """The token ids that `generate` adds to the prompt."""
    token_ids = torch.tensor([prompt], device=subject.device)
    all_ids: Any = subject.model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        streamer=watch,
        **options,
    )
    return list(all_ids[0, len(prompt) :].tolist())


def _by_prompt_lookup(subject: Subject, watch: Watch, prompts: list[list[int]]) -> bool:
    _generate(subject, prompts[0], watch, prompt_lookup_num_tokens=4)
    return True


def _by_early_exit(subject: Subject, watch: Watch, prompts: list[list[int]]) -> bool:
    _generate(subject, prompts[0], watch, assistant_early_exit=subject.early_exit_layers)
    return True


def _by_draft_tree(subject: Subject, watch: Watch, prompts: list[list[int]]) -> bool:
    decoder = TreeDecoder(subject, watch, prompts)
    decoder.decode(MAX_NEW_TOKENS)
    return decoder.moves_were_right


PROMPT_LOOKUP = Decoding("prompt lookup", lambda subject: [subject.encode(QUESTION_PROMPT)], _by_prompt_lookup)
EARLY_EXIT = Decoding("early exit", lambda subject: [subject.encode(SENTENCE_PROMPT)], _by_early_exit)
DRAFT_TREE = Decoding(
    "draft tree",
    lambda subject: [
        subject.encode(QUESTION_PROMPT),
        subject.encode(LONG_PROMPT)[-(PAGE_SIZE - TOKENS_TO_PAGE_BORDER) :],
    ],
    _by_draft_tree,
)
DECODINGS = (PROMPT_LOOKUP, EARLY_EXIT, DRAFT_TREE)
