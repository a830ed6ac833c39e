"""The command line: `python -m multiassert doctor`, `audit` and what else there is."""

from __future__ import annotations

import argparse
import pathlib
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run the subcommand that `arguments` (by default those of the process) name; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m multiassert", description="Device-side checks that do not wait.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_doctor(commands)
    _add_demo(commands)
    _add_audit(commands)
    _add_ci(commands)
    chosen = parser.parse_args(arguments)
    return int(chosen.run(chosen))


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from multiassert import doctor

    parser = commands.add_parser("doctor", help=doctor.HELP, description=f"{doctor.__doc__} {doctor.run.__doc__}")
    doctor.add_arguments(parser)
    parser.set_defaults(run=doctor.run)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="decode speculatively with a real model, inject three faults, show which probe caught each",
        description=(
            "Decodes with SmolLM2-135M-Instruct by prompt lookup, by early exit and with a draft tree over a paged KV "
            "pool; clean first, then with three faults injected one at a time. Exit code 0 if every fault was caught "
            "and the clean runs were clean, 1 if not, 2 if it cannot run here, since a package is missing."
        ),
    )
    demo.add_argument("--tiny", action="store_true", help="a small random model instead: no download, a few seconds")
    demo.add_argument(
        "--platform",
        type=_platforms,
        default="cpu",
        metavar="NAMES",
        help="where to run: cpu, npu, musa, or several with commas between them. Where there is no real npu or musa "
        "device it is simulated (default: %(default)s)",
    )
    # How the process of a platform tells the one that shows them all.
    demo.add_argument("--summary", type=pathlib.Path, help=argparse.SUPPRESS)
    demo.set_defaults(run=_run_demo)


def _run_demo(chosen: argparse.Namespace) -> int:
    # Imported here: the other commands need neither transformers nor rich.
    from multiassert import demo

    return demo.run(chosen.tiny, chosen.platform, chosen.summary)


def _add_audit(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from multiassert import audit

    parser = commands.add_parser("audit", help=audit.HELP, description=audit.DESCRIPTION)
    audit.add_arguments(parser)
    parser.set_defaults(run=audit.run)


def _add_ci(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from multiassert import ci

    parser = commands.add_parser("ci", help="print the settings of a platform's CI runners", description=ci.__doc__)
    ci.add_arguments(parser)
    parser.set_defaults(run=ci.run)


def _platforms(text: str) -> tuple[str, ...]:
    # Imported here: it imports torch, which the help does not need.
    from multiassert.demo.hardware import PLATFORMS

    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not set(names) <= set(PLATFORMS):
        raise argparse.ArgumentTypeError(f"good names are {', '.join(PLATFORMS)}, with commas between them")
    return names


if __name__ == "__main__":
    sys.exit(main())
