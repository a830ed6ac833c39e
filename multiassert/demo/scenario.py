"""The story of the demo, from top to bottom: load, decode clean, inject each fault, report."""

from __future__ import annotations

import functools
import math

import multiassert
from multiassert.backends import Mechanism
from multiassert.demo import hardware
from multiassert.demo.decoding import DECODINGS, DRAFT_TREE, EARLY_EXIT, PROMPT_LOOKUP, Outcome, greedy, run
from multiassert.demo.faults import Fault
from multiassert.demo.model import Subject, load, one_thread, quiet_transformers
from multiassert.demo.probes import Cost, PlainAsserts, Probes
from multiassert.demo.report import CleanRun, Injection, Screen
from multiassert.demo.summary import Caught, Counts, Summary
from multiassert.demo.tree import warm_up
from multiassert.demo.watch import SOURCE_SLOTS, TARGET_LOGITS, TARGET_TOKEN_IDS
from multiassert.dispatch import route_of

MODE = "warn"


def play(tiny: bool, platform: str) -> Summary:
    """Play the whole demo on `platform`, in this process; returns what came of it, with what went wrong."""
    screen = Screen()
    with quiet_transformers(), one_thread():
        device = hardware.set_up(platform)
        where = platform if platform == "cpu" else f"{hardware.kind_of(device)} {platform}"
        screen.say(f"Loading the model for {where}" + ("." if tiny else ": unpacking it takes about 10 s."))
        subject = load(tiny, device)
        warm_up(device)
        screen.say(f"Decoding with {subject.name} on {where}, probes in mode {MODE}, nothing injected.")
        clean = decode_clean(subject)
        screen.show_clean(subject, clean)
        plain = decode_with_plain_asserts(subject, screen)
        injections = inject_faults(subject, clean, screen)
        screen.show_faults(subject, injections)
    problems = [problem for run in clean for problem in _problems_of_clean(subject, run)]
    problems += _problems_of_plain(plain, clean)
    problems += [problem for injection in injections for problem in _problems_of_fault(injection)]
    return _summary(subject, clean, plain, injections, problems)


def decode_clean(subject: Subject) -> list[CleanRun]:
    """Run every decoding with nothing injected, and plain greedy decoding beside it."""

    @functools.cache
    def expected(*prompt: int) -> list[int]:  # two of the decodings have a prompt in common
        return greedy(subject, list(prompt))

    return [
        CleanRun(
            run(decoding, subject, Probes(subject.device, MODE)),
            [expected(*prompt) for prompt in decoding.prompts(subject)],
        )
        for decoding in DECODINGS
    ]


def decode_with_plain_asserts(subject: Subject, screen: Screen) -> list[Outcome]:
    """Run every decoding once more with plain asserts; only on a simulated device, where host waits can be counted."""
    if hardware.simulator_of(subject.device) is None:
        return []
    screen.say("Decoding with plain torch._assert_async instead, nothing injected, to count its host waits.")
    return [run(decoding, subject, PlainAsserts(subject.device)) for decoding in DECODINGS]


def inject_faults(subject: Subject, clean: list[CleanRun], screen: Screen) -> list[Injection]:
    """Run each fault with probes and without."""
    outcomes = {run.outcome.watch.decoding: run.outcome for run in clean}
    faults = _faults(subject, outcomes)
    survives = hardware.survives_crashes(subject.device)
    if not survives:
        faults.sort(key=lambda fault: fault.crashes)
    injections = []
    for fault in faults:
        screen.say(f"Injecting: {fault.title}; {fault.decoding}, step {fault.step}, row {fault.row}.")
        decoding = next(decoding for decoding in DECODINGS if decoding.name == fault.decoding)
        watched = run(decoding, subject, Probes(subject.device, MODE), fault)
        unwatched = None
        if survives or not fault.crashes:
            unwatched = run(decoding, subject, Probes(subject.device, "off"), fault)
        injections.append(Injection(fault, outcomes[fault.decoding], watched, unwatched))
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
            crashes=True,
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


def _text_is_right(subject: Subject, run: CleanRun) -> bool:
    texts = [subject.decode(tokens) for tokens in run.outcome.tokens]
    has_answer = subject.expected_text is None or all(subject.expected_text in text for text in texts)
    return run.outcome.tokens == run.expected and has_answer


def _problems_of_clean(subject: Subject, run: CleanRun) -> list[str]:
    outcome = run.outcome
    problems = _problems_of_waits(outcome)
    if outcome.error is not None:
        problems.append(f"it raised {outcome.error!r}")
    if outcome.tokens != run.expected:
        problems.append("the text is not the one that plain greedy decoding gives")
    elif not _text_is_right(subject, run):
        problems.append(f"{outcome.text(subject)!r} lacks {subject.expected_text!r}")
    if not outcome.state_is_right:
        problems.append("keys and values were moved wrongly")
    problems += [f"a violation was reported: {violation.text}" for violation in outcome.violations]
    return [f"clean run of {outcome.watch.decoding}: {problem}" for problem in problems]


def _problems_of_waits(outcome: Outcome) -> list[str]:
    waits = outcome.watch.probes.cost.waits
    return [f"the probes made the host wait {len(waits)} times, first in {waits[0]}"] if waits else []


def _problems_of_plain(plain: list[Outcome], clean: list[CleanRun]) -> list[str]:
    """Both have to be the same run, or their host waits could not be compared."""
    return [
        f"{outcome.watch.decoding} came out differently with plain asserts: {outcome.error!r}"
        for outcome, run in zip(plain, clean, strict=False)
        if outcome.error is not None or outcome.watch.emitted != run.outcome.watch.emitted
    ]


def _problems_of_fault(injection: Injection) -> list[str]:
    watched, unwatched = injection.watched, injection.unwatched
    problems = _problems_of_waits(watched)
    if injection.record is None:
        problems.append("not caught with the right probe, step, row and value")
    if unwatched is not None and (watched.tokens, repr(watched.error)) != (unwatched.tokens, repr(unwatched.error)):
        problems.append("the run came out differently with probes on and off")
    return [f"{injection.fault.title}: {problem}" for problem in problems]


def _summary(
    subject: Subject, clean: list[CleanRun], plain: list[Outcome], injections: list[Injection], problems: list[str]
) -> Summary:
    with multiassert.override(MODE):
        route = route_of(subject.device)
    cost = sum((run.outcome.watch.probes.cost for run in clean), Cost())
    plain_cost = sum((outcome.watch.probes.cost for outcome in plain), Cost())
    counts = Counts(
        kernels_per_probe=cost.probe_kernels / max(cost.probes, 1),
        kernels_per_snapshot=cost.snapshot_kernels / max(cost.snapshots, 1),
        waits=len(cost.waits),
        plain_waits=len(plain_cost.waits),
    )
    return Summary(
        platform=route.backend.name,
        kind=hardware.kind_of(subject.device),
        mechanism=_name(route.mechanism),
        automatic=_name(route.backend.auto()),
        text=repr(subject.decode(clean[0].outcome.tokens[0])),
        text_is_right=all(_text_is_right(subject, run) for run in clean),
        violations_in_clean_runs=sum(len(run.outcome.violations) for run in clean),
        steps=sum(run.outcome.watch.step for run in clean),
        probes=cost.probes,
        counts=counts if plain else None,
        caught=[_caught(injection) for injection in injections],
        problems=problems,
    )


def _name(mechanism: Mechanism | None) -> str:
    return "off" if mechanism is None else mechanism.value


def _caught(injection: Injection) -> Caught:
    record = injection.record
    if record is None:
        return Caught(injection.fault.title)
    rows = ", ".join(map(str, record.rows))
    return Caught(injection.fault.title, record.message, str(injection.step_of(record)), rows, str(record.value))
