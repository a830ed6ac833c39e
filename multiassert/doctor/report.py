"""The diagnoses on the screen, as JSON, as Markdown, and as lines for a server's log."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

import multiassert
from multiassert.doctor.diagnosis import Diagnosis

MARKS = {True: "yes", False: "NO", None: ""}
WHY = "what auto chooses, and why"
HEADINGS = ("platform", "mode", "set by", "mechanism", WHY, "fires")


@dataclasses.dataclass(frozen=True)
class Findings:
    """All that the doctor has to say."""

    diagnoses: Sequence[Diagnosis]
    not_here: Mapping[str, str]  # platforms that a setting of their own turns on, and why they are not here
    direct_asserts: Mapping[str, Sequence[str]]  # by engine, the calls that no setting of ours reaches
    left_out: Sequence[str] = ()  # platforms that are here and off

    @property
    def fires(self) -> bool:
        return all(diagnosis.fires for diagnosis in self.diagnoses)


def as_table(findings: Findings) -> None:
    """Print a table of all answers for each platform, then one of what comes of them."""
    # Imported here, since it is a package that only this needs.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    styles = {True: "green", False: "bold red", None: ""}
    for diagnosis in findings.diagnoses:
        table = Table(title=f"{_name(diagnosis)}: {_versions(diagnosis)}", title_justify="left", expand=True)
        table.add_column("question", ratio=2)
        table.add_column("what was seen", ratio=5)
        table.add_column("as it must be")
        for row in diagnosis.rows:
            table.add_row(Text(row.question), Text(row.seen), Text(MARKS[row.good], styles[row.good]))
        console.print(table)
    table = Table(title="in short", title_justify="left", show_lines=True, expand=True)
    for heading in HEADINGS:
        table.add_column(heading, ratio=5 if heading == WHY else None)
    for diagnosis in findings.diagnoses:
        *cells, fires = (Text(cell) for cell in _summary(diagnosis))
        fires.stylize(styles[diagnosis.fires])
        table.add_row(*cells, fires)
    console.print(table)
    for line in _notes(findings):
        console.print(Text(line))


def as_json(findings: Findings) -> None:
    """Print one JSON object."""
    written = {
        "version": multiassert.__version__,
        "fires": findings.fires,
        "platforms": [dataclasses.asdict(diagnosis) for diagnosis in findings.diagnoses],
        "enabled but not here": dict(findings.not_here),
        "off, and left out": list(findings.left_out),
        "direct asserts": {engine: list(calls) for engine, calls in findings.direct_asserts.items()},
    }
    print(json.dumps(written, indent=1))


def as_markdown(findings: Findings) -> None:
    """Print the same tables in Markdown."""
    print("\n".join(_markdown(HEADINGS, [_summary(diagnosis) for diagnosis in findings.diagnoses])))
    for diagnosis in findings.diagnoses:
        rows = [(row.question, row.seen, MARKS[row.good]) for row in diagnosis.rows]
        print(f"\n## {_name(diagnosis)}\n\n{_versions(diagnosis)}\n")
        print("\n".join(_markdown(("question", "what was seen", "as it must be"), rows)))
    for line in _notes(findings):
        print(f"\n{line}")


def as_lines(findings: Findings) -> None:
    """Print a line for each platform."""
    for diagnosis in findings.diagnoses:
        verdict = "fires" if diagnosis.fires else "WOULD NOT FIRE"
        (row,) = diagnosis.rows
        print(f"multiassert doctor: {_name(diagnosis)}, {_mode(diagnosis)}: {verdict} ({row.seen})")
    for line in _notes(findings):
        print(f"multiassert doctor: {line}")


def _notes(findings: Findings) -> list[str]:
    """What is to be said besides, a line each."""
    lines = [f"{name} is not here: {why}" for name, why in findings.not_here.items()]
    if findings.left_out:
        off = ", ".join(findings.left_out)
        lines.append(f"off, and not examined: {off}. MULTIASSERT=auto turns all platforms on.")
    for engine, calls in findings.direct_asserts.items():
        lines.append(
            f"{engine} calls torch._assert_async itself in {len(calls)} places, which no setting here reaches:"
        )
        lines += [f"  {call}" for call in calls]
    return lines


def _name(diagnosis: Diagnosis) -> str:
    return f"{'simulated ' if diagnosis.simulated else ''}{diagnosis.platform}"


def _mode(diagnosis: Diagnosis) -> str:
    return f"mode {diagnosis.mode} by {diagnosis.source}"


def _versions(diagnosis: Diagnosis) -> str:
    return ", ".join(f"{name} {version}" for name, version in diagnosis.versions.items()) or "not examined"


def _summary(diagnosis: Diagnosis) -> tuple[str, ...]:
    fires = MARKS[diagnosis.fires]
    return _name(diagnosis), diagnosis.mode, diagnosis.source, diagnosis.mechanism, diagnosis.why, fires


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [headings, ["---"] * len(headings), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
