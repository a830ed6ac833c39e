"""Serve requests with one fault at a time, and show that it ends one request while the others notice nothing.

    python examples/engine/run.py --platform cpu,npu,musa [--tiny]

npu and musa are simulated where there is no real one. Exits with 1 if anything is not as README.md promises.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from multiassert.demo import hardware
from multiassert.demo.model import MissingPackageError, check_packages, load, one_thread, quiet_transformers

ALL_AS_PROMISED, SOMETHING_WRONG, CANNOT_RUN = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Report:
    """What came of one platform; `verdicts` are those of trial.py as plain data."""

    platform: str
    verdicts: list[dict[str, str]]
    problems: list[str]


def report_on(platform: str, tiny: bool) -> Report:
    """Serve on `platform` in this process: without a fault, then with each fault, probes on and off."""
    from faults import FAULTS  # late: they import transformers, which is not there in every case
    from trial import VICTIM, arrivals, judge, problems_without_fault, serve, without

    # The records are in the table; as lines of the log they would stand in between.
    logging.getLogger("multiassert").setLevel(logging.ERROR)
    with quiet_transformers(), one_thread():
        device = hardware.set_up(platform)
        subject = load(tiny, device)
        coming = arrivals(subject)
        healthy, off = serve(subject, coming), serve(subject, coming, mode="off")
        absent = serve(subject, without(coming, VICTIM))
        problems = problems_without_fault(subject, healthy, absent, off)
        verdicts = []
        for make_fault in FAULTS:
            fault = make_fault(VICTIM)
            watched = serve(subject, coming, fault)
            # Without probes it does the same on each platform, and a simulated one is slow.
            unwatched = serve(subject, coming, fault, mode="off") if platform == "cpu" else None
            verdicts.append(judge(fault, watched, unwatched, healthy, absent))
    name = platform if platform == "cpu" else f"{hardware.kind_of(device)} {platform}"
    problems += [problem for verdict in verdicts for problem in verdict.problems]
    rows = [{**dataclasses.asdict(verdict), "problems": ""} for verdict in verdicts]
    return Report(name, rows, [f"{name}: {problem}" for problem in problems])


def report_from_child(platform: str, tiny: bool) -> Report:
    """The same in a process of its own, since a process can simulate one vendor only."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "report.json")
        command = [sys.executable, __file__, "--platform", platform, "--write", str(file)]
        exit_code = subprocess.run([*command, *(["--tiny"] if tiny else [])], check=False).returncode
        if not file.exists():
            return Report(platform, [], [f"{platform}: its process ended with {exit_code}, before it had a result"])
        return Report(**json.loads(file.read_text(encoding="utf-8")))


def show(reports: Sequence[Report]) -> None:
    """Print one table over all platforms, and what is not as promised."""
    console = Console(highlight=False)
    table = Table(show_lines=True, expand=True)
    widths = {"fault": 5, "ended": 2, "its error": 9, "seen": 2, "tokens of the others the same": 5}
    widths |= {"pages free and zero": 3, "host waits added a step": 4, "with the probes off": 5}
    for heading, width in widths.items():
        table.add_column(heading, ratio=width, overflow="fold")
    for report in reports:
        for verdict in report.verdicts:
            columns = ("ended", "error", "seen", "others", "pages", "waits", "unwatched")
            table.add_row(
                escape(f"{report.platform}: {verdict['fault']}"), *(escape(verdict[column]) for column in columns)
            )
    console.print(table)
    problems = [problem for report in reports for problem in report.problems]
    for problem in problems:
        console.print(escape(problem), style="red", soft_wrap=True)
    if not problems:
        console.print("All as promised.", style="green")


def main() -> int:
    """Read the command line and run; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="cpu", help=f"with commas between them: {', '.join(hardware.PLATFORMS)}")
    parser.add_argument("--tiny", action="store_true", help="a small random model: a few seconds, nothing to download")
    parser.add_argument("--write", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    platforms = [name.strip() for name in arguments.platform.split(",")]
    unknown = [name for name in platforms if name not in hardware.PLATFORMS]
    if unknown:
        parser.error(f"--platform {arguments.platform}: good names are {', '.join(hardware.PLATFORMS)}")
    try:
        check_packages(arguments.tiny)
        if len(platforms) > 1:
            reports = [report_from_child(platform, arguments.tiny) for platform in platforms]
        else:
            reports = [report_on(platforms[0], arguments.tiny)]
    except (MissingPackageError, hardware.NoDeviceError) as reason:
        print(reason, file=sys.stderr)
        return CANNOT_RUN
    if arguments.write is not None:
        arguments.write.write_text(json.dumps(dataclasses.asdict(reports[0])), encoding="utf-8")
    else:
        show(reports)
    return SOMETHING_WRONG if any(report.problems for report in reports) else ALL_AS_PROMISED


if __name__ == "__main__":
    sys.exit(main())
