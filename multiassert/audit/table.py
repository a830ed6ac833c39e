"""The findings on the screen: a table for each rule, then one of all rules."""

from __future__ import annotations

import collections

from rich.console import Console
from rich.table import Table
from rich.text import Text

from multiassert.audit.rules import RULES, UNREADABLE
from multiassert.audit.search import Audit


def show(audit: Audit, console: Console) -> None:
    """Print what was found, the summary last."""
    for rule in RULES:
        findings = [finding for finding in audit.findings if finding.rule == rule.name]
        if not findings:
            continue
        title = f"{rule.name}: {rule.title}\n{rule.why}\nUse instead: {rule.instead}"
        table = Table(title=Text(title), title_justify="left", title_style="none", show_lines=True, expand=True)
        table.add_column("place", ratio=3, overflow="fold")
        if rule is UNREADABLE:
            table.add_column("reason", ratio=6, overflow="fold")
        else:
            table.add_column("source", ratio=4, overflow="fold")
            table.add_column("use instead", ratio=4, overflow="fold")
        for finding in findings:
            cells = [finding.why] if rule is UNREADABLE else [finding.source, finding.instead]
            table.add_row(*(_plain(cell) for cell in (finding.place, *cells)))
        console.print(table)
    console.print(_summary(audit))


def _summary(audit: Audit) -> Table:
    counts = collections.Counter(finding.rule for finding in audit.findings)
    files = {rule: len({finding.path for finding in audit.findings if finding.rule == rule}) for rule in counts}
    table = Table(title=f"{audit.files} files read, {len(audit.findings)} findings", title_justify="left")
    table.add_column("rule")
    table.add_column("findings", justify="right")
    table.add_column("in files", justify="right")
    for rule in RULES:
        table.add_row(rule.name, str(counts[rule.name]), str(files.get(rule.name, 0)))
    return table


def _plain(text: str) -> Text:
    """The text as it is, without markup, and without what would steer the terminal."""
    return Text("".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text))
