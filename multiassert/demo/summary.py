"""What the demo came to on one platform, as a file between processes, and one table over all platforms."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import signal
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

UNKNOWN = "-"


@dataclasses.dataclass(frozen=True)
class Caught:
    """What the record of an injected fault named; empty strings if there was none that names it."""

    fault: str
    probe: str = ""
    step: str = ""
    row: str = ""
    value: str = ""

    def __str__(self) -> str:
        return f"{self.probe}\nstep {self.step}, row {self.row}\nvalue {self.value}" if self.probe else "MISSED"


@dataclasses.dataclass(frozen=True)
class Counts:
    """What was counted in the clean runs on a simulated device."""

    kernels_per_probe: float
    kernels_per_snapshot: float
    waits: int
    """Host waits inside the probes, step() and poll()."""
    plain_waits: int
    """Host waits of the same checks as plain asserts."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """What the demo came to on one platform."""

    platform: str
    kind: str
    """real or simulated."""
    mechanism: str
    """How the probes reported."""
    automatic: str
    """How they would report in mode `auto`."""
    text: str
    text_is_right: bool
    violations_in_clean_runs: int
    steps: int
    probes: int
    counts: Counts | None
    caught: list[Caught]
    problems: list[str]

    def write(self, file: pathlib.Path) -> None:
        """Write it to `file`."""
        file.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, file: pathlib.Path) -> Summary:
        """Read what `write` wrote."""
        fields = json.loads(file.read_text(encoding="utf-8"))
        fields["counts"] = fields["counts"] and Counts(**fields["counts"])
        fields["caught"] = [Caught(**caught) for caught in fields["caught"]]
        return cls(**fields)


@dataclasses.dataclass(frozen=True)
class Played:
    """How the demo ended on one platform."""

    platform: str
    exit_code: int
    summary: Summary | None
    """None if its process died before it could say."""

    @property
    def problems(self) -> list[str]:
        """What went wrong on this platform."""
        if self.summary is None:
            return [f"{self.platform}: {self.ending}, before it had a result"]
        problems = self.summary.problems
        if self.exit_code and not problems:
            problems = [f"{self.ending}, although all was well before"]
        return [f"{self.platform}: {problem}" for problem in problems]

    @property
    def ending(self) -> str:
        """How the process ended, in words."""
        if self.exit_code < 0:
            return f"its process was killed by {signal.Signals(-self.exit_code).name}"
        return f"its process ended with exit code {self.exit_code}"


def show_together(played: Sequence[Played], console: Console) -> None:
    """Print one table with a column for each platform, and the verdict."""
    table = Table(title="All platforms" if len(played) > 1 else "Summary", title_justify="left", expand=True)
    table.add_column("", ratio=5, overflow="fold")
    for one in played:
        table.add_column(_heading(one), ratio=4, overflow="fold")

    def add_row(label: str, cell: Callable[[Summary], str]) -> None:
        cells = [UNKNOWN if one.summary is None else cell(one.summary) for one in played]
        table.add_row(escape(label), *map(escape, cells))

    def add_counts(label: str, cell: Callable[[Counts], str]) -> None:
        add_row(label, lambda summary: UNKNOWN if summary.counts is None else cell(summary.counts))

    if any(one.summary is None for one in played):
        table.add_row("", *("" if one.summary is not None else f"FAILED: {one.ending}" for one in played))
    add_row("mechanism", lambda summary: f"{summary.mechanism} (auto: {summary.automatic})")
    add_row("new text", lambda summary: summary.text)
    add_row("the text is right", lambda summary: "yes" if summary.text_is_right else "NO")
    add_row("violations in clean runs", lambda summary: str(summary.violations_in_clean_runs))
    add_row("steps", lambda summary: str(summary.steps))
    add_row("probe calls", lambda summary: str(summary.probes))
    add_counts("kernels per probe", lambda counts: f"{counts.kernels_per_probe:.1f}")
    add_counts("kernels per step(), poll()", lambda counts: f"{counts.kernels_per_snapshot:.1f}")
    add_counts("host waits added by the probes", lambda counts: str(counts.waits))
    add_counts("host waits of plain torch._assert_async instead", lambda counts: str(counts.plain_waits))
    table.add_section()
    add_row("faults caught", lambda summary: f"{sum(bool(c.probe) for c in summary.caught)} of {len(summary.caught)}")
    for fault in dict.fromkeys(caught.fault for one in played if one.summary for caught in one.summary.caught):
        table.add_section()
        add_row(fault, functools.partial(_caught_in, fault))
    console.print(table)
    problems = [problem for one in played for problem in one.problems]
    if not problems:
        console.print("All clean runs were clean, and every fault was caught.", style="green", soft_wrap=True)
    for problem in problems:
        console.print(escape(f"WRONG: {problem}"), style="red", soft_wrap=True)


def _heading(played: Played) -> str:
    if played.summary is None or played.platform == "cpu":
        return played.platform
    return f"{played.summary.kind} {played.platform}"


def _caught_in(fault: str, summary: Summary) -> str:
    return next((str(caught) for caught in summary.caught if caught.fault == fault), UNKNOWN)
