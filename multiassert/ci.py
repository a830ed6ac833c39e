"""What a CI job sets so that a violation fails it: `python -m multiassert ci --platform npu --format github`.

The variable of each platform, with a mode that is known to make the job fail there, written as the job's file takes it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping

from multiassert import backends, settings
from multiassert.settings import Mode

FORMATS = ("github", "shell", "docker", "gitlab")

RAISES = "a violation raises AsyncAssertionError some steps later, or ends the process with exit code 1"

# The mode for a job, and what a violation does in it. `auto` only where what it chooses is known to end the job: on
# ROCm that depends on how torch was built, which is not known here but on the runner.
MODES: Mapping[str, tuple[Mode, str]] = {
    "cuda": (Mode.AUTO, "a violation traps on the device, which ends the process, with the message on stderr"),
    "rocm": (Mode.RAISE, RAISES),
    "npu": (Mode.RAISE, RAISES),
    "musa": (Mode.RAISE, RAISES),
    "xpu": (Mode.RAISE, RAISES),
    "cpu": (Mode.AUTO, "a violation raises AsyncAssertionError in the probe's own call"),
}

WHAT_OTHER_MODES_DO = {
    Mode.OFF: "no probe runs, so no violation fails the job",
    Mode.AUTO: "what a violation does depends on the build of torch; multiassert.backends.named({platform!r}).why()",
    Mode.WARN: "a violation is logged, and does NOT fail the job",
    Mode.RAISE: RAISES,
    Mode.TRAP: "a violation is what torch._assert_async makes of it, on most platforms the end of the process",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "--platform",
        type=_platforms,
        required=True,
        metavar="NAMES",
        help=f"what the job's runner has: {', '.join(MODES)}, or several with commas between them",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="github",
        help="a block for a GitHub workflow, exports for a shell, arguments for docker run and docker exec, or a block "
        "for .gitlab-ci.yml (default: %(default)s)",
    )
    parser.add_argument(
        "--mode",
        type=_mode,
        help="off, auto, warn, raise or trap (default: what makes a violation fail the job on that platform)",
    )


def run(options: argparse.Namespace) -> int:
    """Print the settings; returns the exit code: 2 where mode trap is refused on a platform."""
    values, notes = {}, []
    for platform in options.platform:
        mode, effect = MODES[platform]
        if options.mode is not None and options.mode is not mode:
            mode, effect = options.mode, WHAT_OTHER_MODES_DO[options.mode].format(platform=platform)
        refusal = backends.named(platform).trap_refusal() if mode is Mode.TRAP else None
        if refusal is not None:
            print(f"--mode trap is refused on {platform}. {refusal}", file=sys.stderr)
            return 2
        values[f"MULTIASSERT_{platform.upper()}"] = mode.value
        notes.append(f"{platform}: {effect}.")
    if options.format == "docker":  # what is printed goes into a command, which has no place for notes
        print("\n".join(notes), file=sys.stderr)
    else:
        print("\n".join(f"# {note}" for note in notes))
    print(formatted(values, options.format))
    return 0


def formatted(values: Mapping[str, str], form: str) -> str:
    """Variables and their values as a file of that format takes them."""
    if form == "github":
        return "\n".join(["env:", *(f"  {name}: {_yaml(value)}" for name, value in values.items())])
    if form == "gitlab":
        # There $ begins the name of another variable.
        lines = (f"  {name}: {_yaml(value.replace('$', '$$'))}" for name, value in values.items())
        return "\n".join(["variables:", *lines])
    if form == "shell":
        return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in values.items())
    return " ".join(f"-e {shlex.quote(f'{name}={value}')}" for name, value in values.items())


def _yaml(value: str) -> str:
    """Always in quotes: without them YAML takes `off` for false. Every JSON string is one of YAML."""
    return json.dumps(value)


def _platforms(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not set(names) <= set(MODES):
        raise argparse.ArgumentTypeError(f"good names are {', '.join(MODES)}, with commas between them")
    return names


def _mode(text: str) -> Mode:
    try:
        return settings.parse_mode(text, "--mode")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
