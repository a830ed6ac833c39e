"""The story of the demo, from top to bottom: load, decode clean, inject each fault, report."""

from __future__ import annotations

import math

import torch

from multiassert.demo.decoding import DECODINGS, DRAFT_TREE, EARLY_EXIT, PROMPT_LOOKUP, Outcome, greedy, run
from multiassert.demo.faults import Fault
from multiassert.demo.model import Subject, load, one_thread, quiet_transformers
from multiassert.demo.report import CleanRun, Injection, Screen
from multiassert.demo.watch import SOURCE_SLOTS, TARGET_LOGITS, TARGET_TOKEN_IDS


def play(tiny: bool, platform: str) -> list[str]:
    """Play the whole demo on `platform`; returns what went wrong, which is nothing if all is well."""
    screen = Screen()
    with quiet_transformers(), one_thread():
        screen.say("Loading the model" + ("." if tiny else ": unpacking it takes about 15 s."))
        subject = load(tiny, torch.device(platform))
        screen.say(f"Decoding with {subject.name} on {subject.device}, probes in mode warn, nothing injected.")
        clean = decode_clean(subject)
        screen.show_clean(subject, clean)
        injections = inject_faults(subject, clean, screen)
        screen.show_faults(subject, injections)
    problems = [problem for run in clean for problem in _problems_of_clean(subject, run)]
    problems += [problem for injection in injections for problem in _problems_of_fault(injection)]
    screen.conclude(problems)
    return problems


def decode_clean(subject: Subject) -> list[CleanRun]:
    """Run every decoding with nothing injected, and plain greedy decoding beside it."""
    return [
        CleanRun(run(decoding, subject, "warn"), [greedy(subject, prompt) for prompt in decoding.prompts(subject)])
        for decoding in DECODINGS
    ]


def inject_faults(subject: Subject, clean: list[CleanRun], screen: Screen) -> list[Injection]:
    """Run each fault with probes and without."""
    outcomes = {run.outcome.watch.decoding: run.outcome for run in clean}
    injections = []
    for fault in _faults(subject, outcomes):
        screen.say(f"Injecting: {fault.title}; {fault.decoding}, step {fault.step}, row {fault.row}.")
        decoding = next(decoding for decoding in DECODINGS if decoding.name == fault.decoding)
        injections.append(
            Injection(
                fault,
                clean=outcomes[fault.decoding],
                watched=run(decoding, subject, "warn", fault),
                unwatched=run(decoding, subject, "off", fault),
            )
        )
    return injections


def _faults(subject: Subject, clean: dict[str, Outcome]) -> list[Fault]:
    """The three faults, each placed where the clean run shows that the spoilt row is one that counts."""
    lookup_step, lookup_row = _step_and_row(clean[PROMPT_LOOKUP.name])
    exit_step, exit_row = _step_and_row(clean[EARLY_EXIT.name])
    tree_step, tree_row = _step_and_row(clean[DRAFT_TREE.name])
    return [
        Fault(
            title="NaN target logits in one row",
            decoding=PROMPT_LOOKUP.name,
            place=TARGET_LOGITS,
            step=lookup_step,
            row=lookup_row,
            value=math.nan,
            kind="nan",
        ),
        Fault(
            title=f"a token id equal to the vocabulary size, {subject.vocabulary_size}",
            decoding=EARLY_EXIT.name,
            place=TARGET_TOKEN_IDS,
            step=exit_step,
            row=exit_row,
            value=subject.vocabulary_size,
            kind="high",
        ),
        Fault(
            title="a KV slot outside the pool, -1",
            decoding=DRAFT_TREE.name,
            place=SOURCE_SLOTS,
            step=tree_step,
            row=tree_row,
            value=-1,
            kind="low",
        ),
    ]


def _step_and_row(clean: Outcome) -> tuple[int, int]:
    """The step in which most was accepted for the first request, and the row of the last token that was.

    What follows hangs most on that token. The first two steps are left out, so that a step number of 0 or 1 by mistake
    does not pass for a right one.
    """
    accepted = [counts[0] for counts in clean.watch.emitted_in_step]
    step = max(range(2, len(accepted)), key=lambda step: accepted[step], default=0)
    return step, accepted[step] - 1 if accepted else 0


def _problems_of_clean(subject: Subject, run: CleanRun) -> list[str]:
    outcome = run.outcome
    problems = []
    if outcome.error is not None:
        problems.append(f"it raised {outcome.error!r}")
    if outcome.tokens != run.expected:
        problems.append("the text is not the one that plain greedy decoding gives")
    if not outcome.state_is_right:
        problems.append("keys and values were moved wrongly")
    if subject.expected_text is not None:
        texts = [subject.decode(tokens) for tokens in outcome.tokens]
        problems += [f"{text!r} lacks {subject.expected_text!r}" for text in texts if subject.expected_text not in text]
    problems += [f"a violation was reported: {violation.text}" for violation in outcome.violations]
    return [f"clean run of {outcome.watch.decoding}: {problem}" for problem in problems]


def _problems_of_fault(injection: Injection) -> list[str]:
    watched, unwatched = injection.watched, injection.unwatched
    problems = []
    if injection.record is None:
        problems.append("not caught with the right probe, step, row and value")
    if (watched.tokens, repr(watched.error)) != (unwatched.tokens, repr(unwatched.error)):
        problems.append("the run came out differently with probes on and off")
    return [f"{injection.fault.title}: {problem}" for problem in problems]
