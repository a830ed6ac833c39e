"""What the demo puts on the screen."""

from __future__ import annotations

import dataclasses
import pathlib

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from multiassert import Violation
from multiassert.demo.decoding import Outcome
from multiassert.demo.faults import Fault
from multiassert.demo.model import Subject


@dataclasses.dataclass(frozen=True)
class CleanRun:
    """A run with nothing injected, and the tokens that plain greedy decoding gives for each request."""

    outcome: Outcome
    expected: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Injection:
    """One fault, the run with it under probes, the run with it without, and the run without it."""

    fault: Fault
    clean: Outcome
    watched: Outcome
    unwatched: Outcome | None
    """None where the device did not survive the run before."""

    @property
    def record(self) -> Violation | None:
        """The violation that names the fault, if it is the first one reported."""
        first = self.watched.violations[0] if self.watched.violations else None
        named = first is not None and self.fault.is_named_by(first, self.watched.watch.first_step)
        return first if named else None

    def step_of(self, record: Violation) -> int | None:
        """The step of the run that `record` is about; None if it is about several."""
        return record.step - self.watched.watch.first_step if isinstance(record.step, int) else None


class Screen:
    """Prints the demo's progress and its two tables."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)

    def say(self, text: str) -> None:
        self.console.print(escape(text), soft_wrap=True)

    def show_clean(self, subject: Subject, runs: list[CleanRun]) -> None:
        """Print what each clean run put out, one line for each request."""
        table = Table(title="Clean runs", title_justify="left", expand=True)
        table.add_column("decoding")
        table.add_column("new text", ratio=1, overflow="fold")
        table.add_column("as greedy?")
        table.add_column("tokens", justify="right")
        table.add_column("steps", justify="right")
        table.add_column("violations", justify="right")
        for run in runs:
            watch = run.outcome.watch
            for tokens, expected in zip(run.outcome.tokens, run.expected, strict=True):
                table.add_row(
                    watch.decoding,
                    escape(repr(subject.decode(tokens))),
                    "yes" if tokens == expected else "NO",
                    str(len(tokens)),
                    str(watch.step),
                    str(len(run.outcome.violations)),
                )
        self.console.print(table)

    def show_faults(self, subject: Subject, injections: list[Injection]) -> None:
        """Print which probe caught each fault and what would have been seen without probes."""
        table = Table(title="Injected faults", title_justify="left", show_lines=True, expand=True)
        table.add_column("fault", ratio=3, overflow="fold")
        table.add_column("caught by", ratio=4, overflow="fold")
        table.add_column("step", justify="right")
        table.add_column("row", justify="right")
        table.add_column("value", justify="right")
        table.add_column("bound", justify="right")
        table.add_column("with probes off", ratio=6, overflow="fold")
        for injection in injections:
            table.add_row(
                escape(f"{injection.fault.title}\nin {injection.fault.decoding}"),
                *map(escape, _record_cells(injection)),
                escape(_seen_without_probes(subject, injection)),
            )
        self.console.print(table)


def _record_cells(injection: Injection) -> tuple[str, str, str, str, str]:
    record = injection.record
    if record is None:
        others = [
            f"{other.text} (step {injection.step_of(other)}, rows {other.rows})"
            for other in injection.watched.violations
        ]
        return "MISSED" + "".join(f"; reported instead: {other}" for other in others), "-", "-", "-", "-"
    site = f"{pathlib.Path(record.site.file).name}:{record.site.line}"
    bound = "-" if record.bound is None else str(record.bound)
    step, rows = str(injection.step_of(record)), ", ".join(map(str, record.rows))
    return f"{record.text}\n{site}", step, rows, str(record.value), bound


def _seen_without_probes(subject: Subject, injection: Injection) -> str:
    """What a user would have seen: the exception, or the text of the request that came out differently."""
    outcome = injection.unwatched
    if outcome is None:
        return "not run: the device does not work any more after the crash in the run with probes"
    if outcome.error is not None:
        return f"{type(outcome.error).__name__}: {outcome.error}\nafter the text {outcome.text(subject)!r}"
    for tokens, clean_tokens in zip(outcome.tokens, injection.clean.tokens, strict=True):
        if tokens != clean_tokens:
            return f"no error, wrong text: {subject.decode(tokens)!r}"
    if not outcome.state_is_right:
        return "no error and, in so short a text, the same tokens; but wrong keys and values stay in the pool"
    return "no error, the same text"
