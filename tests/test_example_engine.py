"""The example engine: one bad row ends one request, and the others do not notice.

Each fault is put in on the platform of the run, with the tiny model; what it must come to is that of a run without it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import multiassert
from conftest import finish
from multiassert.demo.model import Subject, load, quiet_transformers
from multiassert.demo.pool import PAGE_SIZE

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "engine"
sys.path.insert(0, str(EXAMPLE))  # where its modules find each other, too

import blame  # noqa: E402
import engine  # noqa: E402
import faults  # noqa: E402
import run  # noqa: E402
import trial  # noqa: E402
from faults import Fault, FaultyEngine  # noqa: E402
from scheduler import Batch, Request  # noqa: E402
from trial import VICTIM, Arrival, Served  # noqa: E402

ROUNDING = 1e-5  # a processor may add up the rows of a matrix in an order that differs by where they stand


CPU = torch.device("cpu")


@functools.cache
def subject_on(device: torch.device) -> Subject:
    with quiet_transformers():
        subject = load(True, device)
    finish(device)
    return subject


def on_cpu() -> Subject:
    """For what is about no platform."""
    return subject_on(CPU)


@pytest.fixture
def subject(device: torch.device) -> Subject:
    return subject_on(device)


@functools.cache
def healthy_on(device: torch.device) -> Served:
    subject = subject_on(device)
    return trial.serve(subject, trial.arrivals(subject))


@functools.cache
def absent_on(device: torch.device) -> Served:
    subject = subject_on(device)
    return trial.serve(subject, trial.without(trial.arrivals(subject), VICTIM))


def serve(subject: Subject, fault: Fault | None = None, **options: Any) -> Served:
    return trial.serve(subject, trial.arrivals(subject), fault, **options)


def others_are_as_in(reference: Served, served: Served, *ended: str) -> bool:
    """Whether only `ended` have an error, and every other request's tokens and logits are as without the fault."""
    others = [name for name in reference.requests if name not in ended]
    tokens = {name: served.requests[name].tokens for name in others}
    return (
        served.ended == sorted(ended)
        and tokens == {name: reference.requests[name].tokens for name in others}
        and trial.difference(served, reference, others) < ROUNDING
        and not served.left_over
    )


def pool_is_clean(served: Served) -> bool:
    """Whether all pages are back, the padding page is zero, and no page that may be handed out holds a NaN."""
    pool = served.engine.pool
    storage = pool.storage.cpu()
    waste = engine.WASTE_SLOT // PAGE_SIZE
    pages = [page for page in range(pool.slots // PAGE_SIZE) if page not in (0, waste)]
    return (
        sorted(pool.free_pages) == pages
        and not storage[:PAGE_SIZE].any()
        and all(bool(storage[page * PAGE_SIZE : (page + 1) * PAGE_SIZE].isfinite().all()) for page in pages)
    )


# ---------------------------------------------------------------------------------------------------------------------
# What is promised.


def test_without_a_fault_nobody_ends(subject: Subject, device: torch.device) -> None:
    healthy, absent = healthy_on(device), absent_on(device)
    assert others_are_as_in(absent, healthy)
    longest = max(healthy.requests.values(), key=lambda request: request.max_new_tokens)
    assert longest.tokens == trial.greedy(subject, longest.prompt)[: longest.max_new_tokens]
    assert [len(request.tokens) for request in healthy.requests.values()] == [6, 7, 9, 5, 4, 6, 3]
    assert pool_is_clean(healthy)
    assert len({batch.names.index("r2") for batch in healthy.engine.batches if "r2" in batch.names}) > 1, (
        "the rows of the batch have to move"
    )


@pytest.mark.parametrize("make_fault", faults.FAULTS, ids=lambda make_fault: make_fault.__name__)
def test_a_fault_ends_one_request(
    make_fault: Callable[[str], Fault], subject: Subject, device: torch.device, platform: str
) -> None:
    fault = make_fault(VICTIM)
    served = serve(subject, fault)
    step = served.engine.fault_step
    assert step is not None
    assert others_are_as_in(absent_on(device), served, VICTIM)
    assert served.requests[VICTIM].tokens == healthy_on(device).requests[VICTIM].tokens[: fault.token]
    assert served.seen == {VICTIM: step + 1}
    assert served.wiped == {VICTIM: True}
    assert pool_is_clean(served)
    error = served.requests[VICTIM].error
    assert error is not None
    assert (error.step, error.suspects) == (step, (VICTIM,))
    assert error.message.endswith(fault.site)
    if fault.site in blame.A_ROW_FOR_EACH_REQUEST:
        assert error.violation.row_names == (VICTIM,)
    assert (error.violation.platform, pathlib.Path(error.site.file)) == (platform, EXAMPLE / "engine.py")
    assert str(error).startswith(f"request {VICTIM} ended in step {step}: {error.message} (value ")


def test_the_host_waits_once_in_a_step(device: torch.device, simulator: multiassert.simulate.Simulator) -> None:
    healthy = healthy_on(device)
    assert [wait.kind for wait in healthy.ledger.waits] == ["event"] * healthy.steps
    assert trial.waits_of_probes(healthy.ledger) == []


def test_waits_of_probes_are_counted(
    subject: Subject, simulator: multiassert.simulate.Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that drains instead makes the host wait in multiassert, and the count says so."""
    monkeypatch.setattr(multiassert, "poll", multiassert.drain)
    served = trial.serve(subject, trial.arrivals(subject)[:1])
    assert served.steps > 1
    assert len(trial.waits_of_probes(served.ledger)) >= served.steps - 1


# ---------------------------------------------------------------------------------------------------------------------
# What makes it hard: the record comes late.


def test_a_fault_in_the_last_step_withholds_the_result(subject: Subject, device: torch.device) -> None:
    """The request has left the batch when its record comes, and another one has its row."""
    healthy = healthy_on(device)
    last = len(healthy.requests[VICTIM].tokens) - 1
    served = serve(subject, faults.nan_in_hidden_state(VICTIM, token=last), pages=12)
    step = served.engine.fault_step
    assert step is not None
    row = served.engine.batches[step].names.index(VICTIM)
    assert VICTIM not in served.engine.batches[step + 1].names
    assert len(served.engine.batches[step + 1].names) > row, "its row has to be another request's"
    assert others_are_as_in(absent_on(device), served, VICTIM)
    assert served.requests[VICTIM].tokens == healthy.requests[VICTIM].tokens[:last]
    assert served.seen == {VICTIM: step + 1}
    assert pool_is_clean(served)


def test_a_fault_after_the_end_takes_nothing_back(
    subject: Subject, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end token is seen when one step more was launched. What is bad in that step is no fault of the result."""
    tokens = healthy_on(device).requests[VICTIM].tokens
    monkeypatch.setattr(subject.model.generation_config, "eos_token_id", tokens[2])
    alone = [arrival for arrival in trial.arrivals(subject) if arrival.name in (VICTIM, "r4")]
    served = trial.serve(subject, alone, faults.nan_in_hidden_state(VICTIM, token=3), lanes=1, pages=3)
    assert served.engine.fault_step is not None
    assert served.requests[VICTIM].tokens == tokens[:3]
    assert served.ended == []
    assert pool_is_clean(served), "the page has to be wiped all the same"
    assert served.requests["r4"].tokens
    assert all(bool(logits.isfinite().all()) for logits in served.engine.logits["r4"])


def test_two_steps_ahead(subject: Subject, device: torch.device) -> None:
    served = serve(subject, faults.nan_in_kv_page(VICTIM), ahead=2)
    assert served.engine.fault_step is not None
    assert served.seen == {VICTIM: served.engine.fault_step + 2}
    assert others_are_as_in(absent_on(device), served, VICTIM)
    assert served.wiped == {VICTIM: True}
    assert pool_is_clean(served)


class PollsWithinSteps(FaultyEngine):
    """Sends what was seen before the step has ended, so that the record has no names."""

    def sample(self, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
        self.unread += multiassert.poll()
        return super().sample(batch, logits)


def test_a_record_sent_within_its_step(subject: Subject, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "FaultyEngine", PollsWithinSteps)
    served = serve(subject, faults.nan_in_kv_page(VICTIM))
    error = served.requests[VICTIM].error
    assert error is not None
    # The CPU's is looked at before the step has names; a device's comes later.
    assert error.violation.row_names == (None if device.type == "cpu" else (VICTIM,))
    assert error.step == served.engine.fault_step
    assert others_are_as_in(absent_on(device), served, VICTIM)


# ---------------------------------------------------------------------------------------------------------------------
# Whose rows. From here on, on the CPU.


@pytest.mark.parametrize(("position", "owner"), [(0, "r2"), (1, "r2"), (0, "r3"), (90, "r3")])
def test_rows_of_tokens_are_not_rows_of_requests(position: int, owner: str) -> None:
    """Step 1 puts in r0's and r1's next tokens, then the prompts of r2 and of r3: row 3 is r2's, and not r3's."""
    served = serve(on_cpu(), faults.slot_past_the_pool(owner, position=position))
    assert served.engine.fault_step == 1
    assert served.ended == [owner]


def test_a_range_of_rows_names_several_requests() -> None:
    """Of 402 tokens each two share a cell. The last token of r0 is alone in row 200; with 201 of r0, it is not."""
    prompt = on_cpu().encode("The quick brown fox jumps over the lazy dog. " * 5)[:201]
    coming = [Arrival(0, "r0", prompt, 3), Arrival(0, "r1", prompt[::-1], 3), Arrival(2, "r2", prompt[1:], 3)]
    healthy = trial.serve(on_cpu(), coming)

    shared = trial.serve(on_cpu(), coming, faults.slot_past_the_pool("r0", position=200))
    assert others_are_as_in(healthy, shared, "r0", "r1")
    errors = [shared.requests[name].error for name in ("r0", "r1")]
    assert [error is not None and error.suspects for error in errors] == [("r0", "r1")] * 2
    assert all("in one or more of r0, r1" in str(error) for error in errors)

    alone = trial.serve(on_cpu(), coming, faults.slot_past_the_pool("r0", position=199))
    assert others_are_as_in(healthy, alone, "r0")
    assert alone.requests["r0"].error is not None
    assert alone.requests["r0"].error.suspects == ("r0",)
    assert any(isinstance(row, range) for row in alone.requests["r0"].error.violation.rows)


class SpoilsTwo(FaultyEngine):
    """With NaN in the pages of two requests."""

    def prepare(self, batch: Batch) -> None:
        super().prepare(batch)
        for request in batch.requests:
            if batch.step == 4 and request.name in ("r1", "r3"):
                self.pool.storage[self.slot_table[request.seat, :1]] = math.nan


def test_two_bad_rows_end_two_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "FaultyEngine", SpoilsTwo)
    served = serve(on_cpu())
    assert others_are_as_in(healthy_on(CPU), served, "r1", "r3")
    errors = [served.requests[name].error for name in ("r1", "r3")]
    assert [error is not None and (error.step, error.suspects) for error in errors] == [(4, ("r1",)), (4, ("r3",))]
    assert pool_is_clean(served)


class SpoilsPadding(FaultyEngine):
    """With NaN in the rows of nobody."""

    padded_steps = 0

    def decode(self, batch: Batch, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, keys_and_values = super().decode(batch, *inputs)
        logits[len(batch.requests) :] = math.nan
        self.padded_steps += len(batch.requests) < self.lanes
        return logits, keys_and_values


def test_padding_rows_end_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "FaultyEngine", SpoilsPadding)
    found: list[multiassert.Violation] = []
    multiassert.on_violation(found.append)
    served = serve(on_cpu())
    assert found == []
    assert isinstance(served.engine, SpoilsPadding)
    assert served.engine.padded_steps
    assert others_are_as_in(healthy_on(CPU), served)


def test_requests_of_other_records() -> None:
    """Records that cover two steps, of sites the engine does not know, and of steps that are not its own."""
    served = serve(on_cpu(), faults.nan_in_kv_page(VICTIM))
    error = served.requests[VICTIM].error
    assert error is not None
    batches = dict(enumerate([named_batch(0, "a", "b", "c"), named_batch(1, "b", "c", "d")], start=error.step))
    record = dataclasses.replace(error.violation, row_names=None, rows=(1,), step=error.step)

    def requests_of(**changes: Any) -> list[list[str]]:
        return blame.requests_of(dataclasses.replace(record, **changes), batches)

    assert requests_of() == [["b"]]
    assert requests_of(rows=(0, 2)) == [["a"], ["c"]]
    assert requests_of(row_names=("z",)) == [["z"]], "the names in the record go before those of the batch"
    assert requests_of(step=(error.step, error.step + 1)) == [["b", "c"]]
    assert requests_of(rows=(range(2),)) == [["a", "b"]]
    assert requests_of(rows=(range(2),), row_names=("a", "b")) == [["a", "b"]]
    assert requests_of(message="a probe in the model") == [["a", "b", "c"]]
    assert requests_of(step=error.step + 7) == [[]]


def named_batch(step: int, *names: str) -> Batch:
    return Batch(step, tuple(Request(name, [1], 1) for name in names), len(names), (1,) * len(names))


# ---------------------------------------------------------------------------------------------------------------------
# The rest.


def test_a_request_of_several_pages() -> None:
    """It grows over the border of a page, and a fault in its second page ends it alone."""
    prompt = on_cpu().encode("The quick brown fox jumps over the lazy dog. " * 6)[: PAGE_SIZE - 2]
    coming = [Arrival(0, "r0", prompt, 6), Arrival(0, "r1", prompt[:20], 6)]
    healthy = trial.serve(on_cpu(), coming, pages=5, pages_per_request=2)
    short = trial.serve(on_cpu(), coming[1:], pages=5, pages_per_request=2)
    assert healthy.requests["r1"].tokens == short.requests["r1"].tokens
    assert healthy.requests["r0"].tokens == trial.greedy(on_cpu(), prompt)[:6]
    served = trial.serve(
        on_cpu(), coming, faults.slot_past_the_pool("r0", token=4, position=PAGE_SIZE), pages=5, pages_per_request=2
    )
    assert others_are_as_in(healthy, served, "r0")
    assert served.requests["r0"].error is not None
    assert served.requests["r0"].error.violation.message == blame.READ_SLOTS
    assert pool_is_clean(served)


def test_a_seat_is_clean_for_its_next_owner() -> None:
    """What was wrong in the slots of one request must not be read, and blamed on the next one in its seat."""
    subject = on_cpu()
    long = subject.encode("The quick brown fox jumps over the lazy dog. " * 7)[:280]
    coming = [Arrival(0, "r0", long, 3), *(Arrival(1, f"r{number}", long[:9], 3) for number in (1, 2, 3))]
    fault = faults.slot_past_the_pool("r0", token=1, position=PAGE_SIZE)
    served = trial.serve(subject, coming, fault, lanes=1, pages=6, pages_per_request=2)
    assert served.engine.fault_step == 1
    assert served.ended == ["r0"]
    assert len(served.engine.scheduler.free_seats) == 2, "two seats for four requests"


def test_in_mode_raise_the_engine_ends() -> None:
    with pytest.raises(multiassert.AsyncAssertionError, match=f"NaN detected! {blame.LOGITS}"):
        serve(on_cpu(), faults.nan_in_kv_page(VICTIM), mode="raise")


def test_requests_that_cannot_be_served() -> None:
    one = engine.Engine(on_cpu())
    good = Request("a", [1, 2], 3)
    one.submit(good)
    for bad, reason in (
        (Request("a", [1], 1), "in use"),
        (Request("b", [], 1), "0 prompt tokens"),
        (Request("b", [1], 0), "0 new ones"),
        (Request("b", [1] * PAGE_SIZE, 1), f"at most {PAGE_SIZE}"),
    ):
        with pytest.raises(ValueError, match=reason):
            one.submit(bad)
    with pytest.raises(ValueError, match="pages=2"):
        engine.Engine(on_cpu(), pages=2)
    while one.has_work:
        one.step()
    assert len(good.tokens) == 3
    one.submit(Request("a", [1, 2], 3))


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    report = run.report_from_child("cpu", tiny=True)
    assert report.problems == []
    assert [verdict["ended"] for verdict in report.verdicts] == [VICTIM] * len(faults.FAULTS)
    # Without probes the NaN stays in a page, and so the page's next owner is wrong, too.
    assert [verdict["unwatched"] for verdict in report.verdicts[:2]] == ["no error, wrong text: r3, r4"] * 2
    assert all(VICTIM in verdict["unwatched"] for verdict in report.verdicts), "a fault without harm shows nothing"
    assert exit_code_of([report], monkeypatch) == run.ALL_AS_PROMISED
    assert "All as promised." in capsys.readouterr().out
    assert exit_code_of([dataclasses.replace(report, problems=["cpu: it hangs"])], monkeypatch) == run.SOMETHING_WRONG
    assert "cpu: it hangs" in capsys.readouterr().out


def exit_code_of(reports: Sequence[run.Report], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["run.py", "--tiny"])
    monkeypatch.setattr(run, "report_on", lambda platform, tiny: reports[0])
    return run.main()


def test_a_child_without_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert run.report_from_child("cpu", tiny=True).problems == ["cpu: its process ended with 1, before it had a result"]
