"""The findings as SARIF 2.1.0, the format that code scanning shows."""

from __future__ import annotations

import collections
import hashlib
import os
import pathlib
import urllib.parse
from collections.abc import Sequence
from typing import Any

import multiassert
from multiassert.audit.finding import Finding, Rule
from multiassert.audit.rules import RULES

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
HOME = "https://github.com/multiassert/multiassert"
NUMBERS = {rule.name: number for number, rule in enumerate(RULES)}


def log(findings: Sequence[Finding]) -> dict[str, Any]:
    """One run of the tool. Paths are relative to the folder that it ran in, as a rule the root of the repository."""
    driver = {
        "name": "multiassert",
        "version": multiassert.__version__,
        "informationUri": HOME,
        "rules": [_rule(rule) for rule in RULES],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, number) for finding, number in _numbered(findings)],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.name,
        "name": "".join(word.capitalize() for word in rule.name.split("-")),
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.why},
        "help": {
            "text": f"{rule.why}\n\nUse instead: {rule.instead}\n\nTo silence it: # multiassert: ignore[{rule.name}]",
            "markdown": f"{rule.why}\n\n**Use instead:** {rule.instead}\n\n"
            f"**To silence it:** `# multiassert: ignore[{rule.name}]` on the line",
        },
        "helpUri": HOME,
        "defaultConfiguration": {"level": rule.level},
        "properties": {"precision": "high", "problem.severity": rule.level, "tags": ["reliability"]},
    }


def _result(finding: Finding, number: int) -> dict[str, Any]:
    region = {"startLine": finding.line, "startColumn": finding.column}
    if (finding.end_line, finding.end_column) > (finding.line, finding.column):
        region |= {"endLine": finding.end_line, "endColumn": finding.end_column}
    rule = RULES[NUMBERS[finding.rule]]
    # In a message of SARIF braces mark a place to fill.
    instead = rule.instead if {"{", "}"} & set(finding.instead) else finding.instead
    place: dict[str, Any] = {"artifactLocation": _artifact(finding.path), "region": region}
    return {
        "ruleId": finding.rule,
        "ruleIndex": NUMBERS[finding.rule],
        "level": rule.level,
        "message": {"text": f"{finding.why} Use instead: {instead}"},
        "locations": [{"physicalLocation": place}],
        "partialFingerprints": {"multiassert/v1": _fingerprint(finding, number)},
    }


def _artifact(path: str) -> dict[str, str]:
    absolute = pathlib.Path(os.path.abspath(path))
    try:
        relative = pathlib.PurePosixPath(absolute.relative_to(pathlib.Path.cwd()).as_posix())
    except ValueError:  # it lies elsewhere
        return {"uri": absolute.as_uri()}
    return {"uri": urllib.parse.quote(str(relative)), "uriBaseId": "%SRCROOT%"}


def _numbered(findings: Sequence[Finding]) -> list[tuple[Finding, int]]:
    """Each finding, and how many of the same rule with the same source line came before it in the same file."""
    counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
    numbered = []
    for finding in findings:
        same = (finding.rule, finding.path, finding.source)
        numbered.append((finding, counts[same]))
        counts[same] += 1
    return numbered


def _fingerprint(finding: Finding, number: int) -> str:
    """What stays the same when lines move."""
    text = "\n".join([finding.rule, _artifact(finding.path)["uri"], finding.source, str(number)])
    return hashlib.sha256(text.encode()).hexdigest()
