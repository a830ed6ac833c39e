"""The command line: `python -m multiassert demo`."""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run the subcommand that `arguments` (by default those of the process) name; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m multiassert", description="Device-side checks that do not wait.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_demo(commands)
    chosen = parser.parse_args(arguments)
    return int(chosen.run(chosen))


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="decode speculatively with a real model, inject three faults, show which probe caught each",
        description=(
            "Decodes with SmolLM2-135M-Instruct by prompt lookup, by early exit and with a draft tree over a paged KV "
            "pool; clean first, then with three faults injected one at a time. Exit code 0 if every fault was caught "
            "and the clean runs were clean, 1 if not, 2 if a package is missing."
        ),
    )
    demo.add_argument("--tiny", action="store_true", help="a small random model instead: no download, a few seconds")
    demo.add_argument("--platform", choices=("cpu",), default="cpu", help="where to run (default: %(default)s)")
    demo.set_defaults(run=_run_demo)


def _run_demo(chosen: argparse.Namespace) -> int:
    # Imported here: the other commands need neither transformers nor rich.
    from multiassert import demo

    return demo.run(tiny=chosen.tiny, platform=chosen.platform)


if __name__ == "__main__":
    sys.exit(main())
