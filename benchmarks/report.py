"""Tables on the terminal, in Markdown and in JSON; rows that miss a target say so."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence

import rich.box
import rich.table
from rich.console import Console
from rich.text import Text

from benchmarks import targets
from benchmarks.table import Row, Table

CANNOT = "-"
WIDTH_OF_A_FILE = 250
ROWS_TOLD = 5  # of those that miss a target; the tables mark them all


def cells(table: Table, row: Row) -> list[tuple[str, bool]]:
    """The texts of a row's cells, and for each whether it misses a target."""
    words, names = table.columns()
    missed = {target.value for target in targets.missed(table, row)}
    texts = [(row.what.get(word, ""), False) for word in words]
    for name in names:
        value = row.values.get(name)
        texts.append((CANNOT if value is None else str(value), name in missed))
    return [*texts, (row.note, False)]


def headings(table: Table) -> list[str]:
    """The headings over these cells."""
    words, names = table.columns()
    return [*words, *names, "note"]


def verdict_cells(tables: Iterable[Table]) -> list[list[str]]:
    """Each target, met or missed, and by which rows."""
    found = []
    for target, count, misses in targets.verdicts(tables):
        worst = sorted(misses, key=lambda row: target.excess(row), reverse=True)[:ROWS_TOLD]
        rows = "; ".join(f"{' '.join(row.what.values())}: {row.values[target.value]}" for row in worst)
        verdict = f"missed by {len(misses)} of {count}" if misses else f"met by all {count}"
        found.append([target.says, f"{target.value} <= {target.at_most:g}", verdict, rows])
    return found


VERDICT_HEADINGS = ["target", "limit", "verdict", "worst rows"]


def show(tables: Sequence[Table]) -> None:
    """Print all tables, and then the targets."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE)
    for table in tables:
        shown = rich.table.Table(*headings(table), title=table.title, box=rich.box.SIMPLE, caption=table.explanation)
        for row in table.rows:
            shown.add_row(*(Text(text, style="red" if missed else "") for text, missed in cells(table, row)))
        console.print(shown)
    verdicts = rich.table.Table(*VERDICT_HEADINGS, title="Targets", box=rich.box.SIMPLE)
    for verdict in verdict_cells(tables):
        verdicts.add_row(*map(Text, verdict))
    console.print(verdicts)


def write_json(path: pathlib.Path, tables: Sequence[Table], environment: Mapping[str, str], command: str) -> None:
    """All values, with what was measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "command": command,
        "environment": environment,
        "tables": [dataclasses.asdict(table) for table in tables],
        "targets": [dict(zip(VERDICT_HEADINGS, cells, strict=True)) for cells in verdict_cells(tables)],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


LEFT_OUT = """## Left out, and rows that are not won

- Batching: many small probes looked at together, in one launch at `step`. By then an engine may have written other
  values into the same tensors (static input buffers, slots that are used again): the look would be at other data than
  the probe was given. It would be faster, and not exact.
- `maybe_assert_async` of one element on the CPU: torch's own assert takes half a microsecond, less than it takes to
  find out that no transform, capture, trace or suspension is in force. It stays at about two times SGLang's.
- Page alignment of 64 elements: `&`, `max` and a read are three small operators where SGLang takes four; what is
  left is the fixed cost of each.
- Bounds of large int64 tensors: SGLang reads the data twice, ours once, so one half is the floor, and the row lies
  on it.
- A sum of large tensors: both take the same sum."""


def write_markdown(
    path: pathlib.Path,
    tables: Sequence[Table],
    environment: Mapping[str, str],
    command: str,
    plots: Mapping[str, str],
    title: str = "Benchmarks",
    notes: str = LEFT_OUT,
) -> None:
    """The whole report; `plots` are images by what they show, as the page names them."""
    lines = [
        f"# {title}",
        "",
        f"Written by `{command}`; do not edit. Values are medians with their quartiles, over rounds in which everyone "
        "who is compared was timed once, in random order. Times are of this machine; the ratios are what counts.",
        "",
        *_markdown_table(list(environment), [list(environment.values())]),
        "## Targets",
        "",
        *_markdown_table(VERDICT_HEADINGS, verdict_cells(tables)),
    ]
    for name, file in plots.items():
        lines += [f"![{name}]({file})", ""]
    lines += [notes, ""] if notes else []
    for table in tables:
        lines += [f"## {table.title}", "", table.explanation, ""]
        rows = [[f"**{text}, missed**" if missed else text for text, missed in cells(table, row)] for row in table.rows]
        lines += _markdown_table(headings(table), rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines).rstrip() + "\n")


def _markdown_table(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]
