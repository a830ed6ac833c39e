"""The command: measures, prints, writes the report. It fails for an error only, never for a number."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Callable

import torch
from rich.console import Console

from benchmarks import (
    contenders,
    decode_step,
    environment,
    kernels,
    memory,
    off_path,
    plots,
    probes,
    report,
    step_cost,
    timing,
)
from benchmarks.table import Table
from benchmarks.timing import Effort

SECTIONS: dict[str, Callable[[Effort], Table | list[Table]]] = {
    "off": off_path.measure,
    "probes": probes.measure,
    "kernels": kernels.measure,
    "memory": memory.measure,
    "step": step_cost.measure,
    "decode": decode_step.measure,
}


def arguments() -> argparse.Namespace:
    """What the command was given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small tensors, few rounds: shows that it works")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="these parts")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of torch; if not given its own choice, and 1 if quick"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all values")
    parser.add_argument("--markdown", type=pathlib.Path, metavar="FILE", help="write the report")
    parser.add_argument("--plots", type=pathlib.Path, metavar="FOLDER", help="write the pictures")
    return parser.parse_args()


def main() -> None:
    """Measure what was asked for."""
    given = arguments()
    if given.threads is not None or given.quick:
        torch.set_num_threads(given.threads or 1)  # threads that wait for each other make a busy machine very slow
    console = Console(stderr=True)
    if contenders.sglang_async_probe() is None:
        console.print("SGLang is not installed: its columns stay empty.")
    tables: list[Table] = []
    for section in given.only:
        console.print(f"measuring: {section}")
        found = SECTIONS[section](timing.QUICK if given.quick else timing.FULL)
        tables += found if isinstance(found, list) else [found]
    where = environment.describe()
    command = " ".join(["python -m benchmarks", *sys.argv[1:]])
    report.show(tables)
    if given.json:
        report.write_json(given.json, tables, where, command)
    drawn = plots.draw(given.plots, tables) if given.plots else {}
    if given.markdown:
        names = {title: os.path.relpath(file, given.markdown.parent) for title, file in drawn.items()}
        report.write_markdown(given.markdown, tables, where, command, names)


if __name__ == "__main__":
    main()
