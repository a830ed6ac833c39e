"""All rules over all files: the findings, without those that a comment silences."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pathlib
import re
import tokenize
from collections.abc import Sequence

from multiassert.audit import files
from multiassert.audit.files import UnreadableError
from multiassert.audit.finding import Finding, Found, Rule
from multiassert.audit.module import Module
from multiassert.audit.rules import UNREADABLE

IGNORE = re.compile(r"#\s*multiassert:\s*ignore\[([^\]]*)\]")


@dataclasses.dataclass(frozen=True)
class Audit:
    """What came of it."""

    files: int
    """How many were read."""
    findings: list[Finding]


def audit(
    paths: Sequence[pathlib.Path], rules: Sequence[Rule], exclude: Sequence[str] = (), with_tests: bool = False
) -> Audit:
    """Look at the files with the rules; what cannot be read is a finding of its own, whatever the rules."""
    findings: list[Finding] = []
    count = 0
    for source in files.search(paths, exclude, with_tests):
        try:
            if source.error is not None:
                raise source.error
            findings += look_at(files.parse(source.path, source.folders), rules)
            count += 1
        except RecursionError:
            findings.append(_unreadable(source.path, "its code is nested too deeply"))
        except UnreadableError as reason:
            findings.append(_unreadable(source.path, str(reason)))
    return Audit(count, findings)


def look_at(module: Module, rules: Sequence[Rule]) -> list[Finding]:
    """The findings of one file, from its beginning to its end."""
    silenced = _silenced(module.text)
    findings = []
    for rule in rules:
        if rule.find is not None and any(word in module.text for word in rule.words):
            for found in rule.find(module):
                lines = range(found.node.lineno, (found.node.end_lineno or found.node.lineno) + 1)
                if not any(rule.name in silenced.get(line, ()) for line in lines):
                    findings.append(_finding(module, rule, found))
    return sorted(findings, key=lambda finding: (finding.line, finding.column))


def _finding(module: Module, rule: Rule, found: Found) -> Finding:
    node = found.node
    end_line = node.end_lineno or node.lineno
    return Finding(
        rule.name,
        module.path,
        node.lineno,
        _column(module, node.lineno, node.col_offset),
        end_line,
        _column(module, end_line, node.end_col_offset or node.col_offset),
        module.lines[node.lineno - 1].strip(),
        rule.why,
        found.instead,
    )


def _column(module: Module, line: int, byte: int) -> int:
    """The column in characters, from 1; the tree counts bytes, from 0."""
    return len(module.lines[line - 1].encode()[:byte].decode(errors="replace")) + 1


def _unreadable(path: pathlib.Path, reason: str) -> Finding:
    why = f"{UNREADABLE.why} Reason: {reason}"
    return Finding(UNREADABLE.name, files.shown(path), 1, 1, 1, 1, "", why, UNREADABLE.instead)


def _silenced(text: str) -> dict[int, set[str]]:
    """The rules that a comment silences, by line."""
    if IGNORE.search(text) is None:
        return {}
    silenced: dict[int, set[str]] = {}
    with contextlib.suppress(tokenize.TokenError, SyntaxError):  # of what the parser takes and this does not
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            match = IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
            if match is not None:
                silenced[token.start[0]] = {name.strip() for name in match[1].split(",")}
    return silenced
