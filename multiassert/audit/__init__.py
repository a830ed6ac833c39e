"""`multiassert audit`: reads source code and lists what keeps it from being covered by probes.

Nothing is imported of the code that is read. Only what is certain is told: a check that is missed is better than one
that is told in vain. `# multiassert: ignore[rule]` on a line silences a rule there.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.util
import json
import os
import pathlib
import sys
from typing import Any

import multiassert
from multiassert.audit import sarif
from multiassert.audit.rules import BY_NAME, RULES
from multiassert.audit.search import Audit, audit

NOTHING_FOUND, FOUND, CANNOT_RUN = 0, 1, 2
"""The exit codes."""

HELP = "list what keeps source code from being covered: checks that wait, that are silent, or that run on CUDA only"
DESCRIPTION = (
    "Reads Python files and never imports them. Exit code 0 if nothing was found, 1 if something was, 2 if it cannot "
    "run. A comment `# multiassert: ignore[rule]` on the line silences a finding. Rules: "
    + "; ".join(f"{rule.name}, {rule.title}" for rule in RULES)
    + "."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `run`."""
    parser.add_argument("paths", nargs="+", type=pathlib.Path, metavar="PATH", help="a file, or a folder to search")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--sarif", type=pathlib.Path, metavar="FILE", help="write SARIF 2.1.0, for code scanning, too")
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="GLOB",
        help="leave out files and folders whose name, or path within the folder searched, is like this; repeatable",
    )
    parser.add_argument(
        "--rule",
        action="append",
        choices=[rule.name for rule in RULES],
        metavar="ID",
        help="look for this only; repeatable. What is unreadable is told all the same",
    )
    parser.add_argument(
        "--tests",
        action="store_true",
        help="read tests in the folders searched too, which are left out otherwise, since a test may wait",
    )


def run(options: argparse.Namespace) -> int:
    """Audit, print, and return the exit code."""
    missing = [path for path in options.paths if not os.path.lexists(path)]
    if missing:
        return _cannot_run(f"no such path: {', '.join(str(path) for path in missing)}")
    if not options.json and importlib.util.find_spec("rich") is None:
        return _cannot_run("the tables take the package rich: pip install rich, or choose --json")
    rules = RULES if options.rule is None else [BY_NAME[name] for name in options.rule]
    result = audit(options.paths, rules, options.exclude, options.tests)
    if not result.files and not result.findings:
        return _cannot_run("there is no Python file to read; --tests reads tests too")
    if options.sarif is not None:
        try:
            options.sarif.write_text(json.dumps(sarif.log(result.findings), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            return _cannot_run(f"{options.sarif} cannot be written: {error.strerror}")
    try:
        if options.json:
            print(json.dumps(_as_json(result), indent=1), flush=True)
        else:
            # Imported here, since it is a package that only this needs.
            from rich.console import Console

            from multiassert.audit import table

            table.show(result, Console(highlight=False))
    except BrokenPipeError:  # who reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FOUND if result.findings else NOTHING_FOUND


def _cannot_run(reason: str) -> int:
    print(f"multiassert audit: {reason}", file=sys.stderr)
    return CANNOT_RUN


def _as_json(result: Audit) -> dict[str, Any]:
    counts = collections.Counter(finding.rule for finding in result.findings)
    return {
        "version": multiassert.__version__,
        "files": result.files,
        "counts": {rule.name: counts[rule.name] for rule in RULES},
        "findings": [dataclasses.asdict(finding) for finding in result.findings],
    }
