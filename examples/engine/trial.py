"""Serve the same requests with and without a fault, and say what the fault did to each of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from faults import Fault, FaultyEngine
from scheduler import Request

import multiassert
from multiassert.demo import hardware
from multiassert.demo.decoding import CAPITALS, QUESTION, greedy
from multiassert.demo.model import Subject
from multiassert.demo.pool import PAGE_SIZE
from multiassert.simulate import HostWait, Ledger


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request, and before which step it comes."""

    step: int
    name: str
    prompt: list[int]
    max_new_tokens: int


VICTIM = "r3"
LANES = 4
PAGES = LANES + 2
"""As few as will do, so that a page is soon another request's: two are nobody's."""


def arrivals(subject: Subject) -> list[Arrival]:
    """Seven requests for four lanes: they come, wait, run and leave at different steps."""
    steps_and_lengths = ((0, 6), (0, 7), (1, 9), (1, 5), (2, 4), (3, 6), (4, 3))
    example, *asked = (QUESTION.format(*names) for names in CAPITALS)
    return [
        Arrival(step, f"r{number}", subject.encode(example + question.split(" Answer:")[0] + " Answer:"), length)
        for number, ((step, length), question) in enumerate(zip(steps_and_lengths, asked, strict=False))
    ]


@dataclasses.dataclass
class Served:
    """What became of the requests of one run."""

    requests: dict[str, Request]
    engine: FaultyEngine
    seen: dict[str, int] = dataclasses.field(default_factory=dict)
    """For each request that ended with an error, the last step that had been launched by then."""
    wiped: dict[str, bool] = dataclasses.field(default_factory=dict)
    """For each of them, whether its pages were zero and free when its seat was."""
    ledger: Ledger = dataclasses.field(default_factory=Ledger)
    left_over: list[multiassert.Violation] = dataclasses.field(default_factory=list)
    """What the probes saw and the engine did not use."""

    @property
    def steps(self) -> int:
        return len(self.engine.batches)

    @property
    def ended(self) -> list[str]:
        return [name for name, request in self.requests.items() if request.error is not None]


def serve(
    subject: Subject, coming: Sequence[Arrival], fault: Fault | None = None, mode: str = "warn", **options: int
) -> Served:
    """Serve all that come, until the last one has ended; in `mode`, with options of the engine."""
    with multiassert.override(mode):
        served = Served({}, FaultyEngine(subject, fault=fault, **{"lanes": LANES, "pages": PAGES, **options}))
        simulator = hardware.simulator_of(subject.device)
        pages_of: dict[str, list[int]] = {}
        moment = 0
        while served.engine.has_work or any(arrival.step >= moment for arrival in coming):
            for arrival in coming:
                if arrival.step == moment:
                    request = Request(arrival.name, arrival.prompt, arrival.max_new_tokens)
                    served.requests[arrival.name] = request
                    served.engine.submit(request)
            if simulator is None:
                ended = served.engine.step()
            else:
                with simulator.record() as ledger:
                    ended = served.engine.step()
                served.ledger.waits += ledger.waits
            for request in ended:
                if request.error is not None:
                    served.seen[request.name] = served.engine.batches[-1].step
            for name, request in served.requests.items():
                if request.seat:
                    pages_of[name] = list(served.engine.pool.pages_of[request.seat])
                elif request.error is not None and name not in served.wiped:
                    served.wiped[name] = _are_free_and_zero(served.engine, pages_of[name])
            moment += 1
        served.left_over = served.engine.unread + multiassert.drain()
    return served


def _are_free_and_zero(engine: FaultyEngine, pages: list[int]) -> bool:
    are_zero = [not engine.pool.storage[page * PAGE_SIZE : (page + 1) * PAGE_SIZE].cpu().any() for page in pages]
    return bool(pages) and all(are_zero) and set(pages) <= set(engine.pool.free_pages)


def waits_of_probes(ledger: Ledger) -> list[HostWait]:
    """The host waits that happened inside of multiassert, and not in the engine's own calls."""
    return [wait for wait in ledger.waits if any(map(_is_multiasserts, (frame.filename for frame in wait.stack)))]


def _is_multiasserts(file: str) -> bool:
    package = multiassert.__path__[0]
    others = (f"{package}/simulate/", f"{package}/demo/")
    return file.startswith(f"{package}/") and not file.startswith(others)


def difference(one: Served, other: Served, names: Sequence[str]) -> float:
    """By how much the logits, from which the tokens of these requests were chosen, differ at most between two runs."""
    furthest = 0.0
    for name in names:
        for here, there in zip(one.engine.logits[name], other.engine.logits[name], strict=False):
            apart = (here.cpu() - there.cpu()).abs().nan_to_num(math.inf)
            furthest = max(furthest, float(apart.max()))
    return furthest


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What one fault did, as text for the table, and what was not as promised."""

    fault: str
    ended: str
    error: str
    seen: str
    others: str
    pages: str
    waits: str
    unwatched: str
    problems: list[str]


def judge(fault: Fault, with_fault: Served, unwatched: Served | None, healthy: Served, absent: Served) -> Verdict:
    """Compare the run with the fault with one without it, and with one to which the victim never came.

    `unwatched` is the run with the fault and the probes off, or None where there was none.
    """
    victim = with_fault.requests[fault.victim]
    late = with_fault.seen.get(fault.victim, 0) - (with_fault.engine.fault_step or 0)
    others = list(absent.requests)
    differing = [name for run in (absent, healthy) for name in differing_tokens(with_fault, run) if name in others]
    are_wiped = with_fault.wiped == {fault.victim: True}
    waits = waits_of_probes(with_fault.ledger)
    promised = {
        "it was put in": with_fault.engine.fault_step is not None,
        "it ends its request, and no other": with_fault.ended == [fault.victim],
        "the error names the probe and the step": victim.error is not None
        and victim.error.violation.message == fault.site
        and victim.error.step == with_fault.engine.fault_step,
        "it is seen when one more step was launched": late == 1,
        "the request keeps its tokens from before": victim.tokens
        == healthy.requests[fault.victim].tokens[: fault.token],
        "the others' tokens are the same": not differing,
        "the pages are free and zero": are_wiped,
        "the probes add no host wait": not waits,
        "every record is used": not with_fault.left_over,
    }
    return Verdict(
        fault=fault.title,
        ended=", ".join(with_fault.ended) or "NONE",
        error=str(victim.error),
        seen=f"{late} step late",
        others=f"{'NO' if differing else 'yes'}, logits differ by {difference(with_fault, absent, others):g}",
        pages="yes" if are_wiped else "NO",
        waits=waits_text(with_fault),
        unwatched="-" if unwatched is None else _harm(unwatched, healthy),
        problems=[f"{fault.title}: not so: {promise}" for promise, is_kept in promised.items() if not is_kept],
    )


def problems_without_fault(subject: Subject, healthy: Served, absent: Served, off: Served) -> list[str]:
    """What is not as promised where nothing is wrong."""
    greedy_tokens = {
        name: greedy(subject, request.prompt)[: request.max_new_tokens] for name, request in healthy.requests.items()
    }
    promised = {
        "no request ends with an error": not healthy.ended and not absent.ended and not off.ended,
        "no probe reports": not healthy.left_over and not absent.left_over,
        "each text is that of plain greedy decoding": greedy_tokens
        == {name: request.tokens for name, request in healthy.requests.items()},
        "without r3, and with the probes off, it is the same": not differing_tokens(absent, healthy)
        and not differing_tokens(off, healthy),
        "the host waits no more often with probes than without": len(healthy.ledger.waits) == len(off.ledger.waits)
        and not waits_of_probes(healthy.ledger),
    }
    return [f"without a fault: not so: {promise}" for promise, is_kept in promised.items() if not is_kept]


def differing_tokens(one: Served, other: Served) -> list[str]:
    """The requests of both runs whose tokens are not the same."""
    common = one.requests.keys() & other.requests.keys()
    return sorted(name for name in common if one.requests[name].tokens != other.requests[name].tokens)


def _harm(unwatched: Served, healthy: Served) -> str:
    """What the fault did where no probe looked."""
    assert not unwatched.ended
    wrong = differing_tokens(unwatched, healthy)
    if wrong:
        return f"no error, wrong text: {', '.join(wrong)}"
    wrong = [name for name in healthy.requests if difference(unwatched, healthy, [name])]
    return f"no error, wrong logits: {', '.join(wrong)}" if wrong else "no error, and all is right"


def waits_text(served: Served) -> str:
    """Host waits a step; only a simulated device can tell."""
    if hardware.simulator_of(served.engine.device) is None:
        return "-"
    added = len(waits_of_probes(served.ledger))
    own = len(served.ledger.waits) - added
    return f"{added / served.steps:g} (engine: {own / served.steps:g})"


def without(coming: Sequence[Arrival], name: str) -> list[Arrival]:
    """The same requests but one."""
    return [arrival for arrival in coming if arrival.name != name]
