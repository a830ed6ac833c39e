"""`multiassert doctor`: shows on this machine what fires, what waits and what is silent, and changes nothing on it.

Whatever touches a device runs in a child process with a time limit and without core dumps, since a device assert may
end it; no child outlives the doctor. On CUDA that means that a real device assert is set off, in a child.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from collections.abc import Sequence

from multiassert import presence, settings
from multiassert.doctor import examinations, report
from multiassert.doctor.children import run_all
from multiassert.doctor.diagnosis import diagnose
from multiassert.engines.sglang_asserts import direct_asserts

FIRES, WOULD_NOT_FIRE, CANNOT_RUN = 0, 1, 2
"""The exit codes."""

SECONDS = 120.0
SMOKE_SECONDS = 30.0  # a device that takes longer to start is ill; most take one

HELP = "show on this machine which probes fire, which make the host wait, and which would be silent"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `run`."""
    parser.add_argument(
        "--platform",
        type=_names,
        metavar="NAMES",
        help="platforms that must be here, with commas between them (default: those that are)",
    )
    parser.add_argument(
        "--simulate",
        type=_names,
        default=(),
        metavar="NAMES",
        help=f"platforms to simulate besides: {', '.join(presence.SIMULATED)}",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of tables")
    form.add_argument("--markdown", action="store_true", help="print Markdown instead of tables")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="only whether a NaN is reported in the modes that are set, in a few seconds and one line a platform: for "
        "the start of a server. Where all platforms are off there is nothing to do",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help=f"for each examination (default: {SECONDS:.0f}, with --smoke {SMOKE_SECONDS:.0f})",
    )


def run(options: argparse.Namespace) -> int:
    """Examine, print, and return the exit code: 1 if what is enabled would not fire, 2 if nothing can be examined.

    Where a platform is off, it is examined as if it were in mode auto; with --smoke it is left out. A platform that is
    on and not here is told and is no failure, since one environment may serve several machines: name it with --platform
    where it must be here.
    """
    if not (options.json or options.markdown or options.smoke) and importlib.util.find_spec("rich") is None:
        return _cannot_run(
            "the tables take the package rich: pip install rich, or choose --json, --markdown or --smoke"
        )
    unknown = [name for name in options.simulate if name not in presence.SIMULATED]
    if unknown:
        return _cannot_run(
            f"--simulate {','.join(unknown)}: cannot be simulated. Good names: {', '.join(presence.SIMULATED)}."
        )
    seconds = options.timeout or (SMOKE_SECONDS if options.smoke else SECONDS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(CANNOT_RUN))  # so that it ends its children
    try:
        here, absent = _platforms(options.platform, seconds)
    except LookupError as error:
        return _cannot_run(str(error))
    platforms = [(name, False) for name in here] + [(name, True) for name in options.simulate if name not in here]
    off = [name for name, _ in platforms if settings.current.of(name) is settings.Mode.OFF] if options.smoke else []
    platforms = [each for each in platforms if each[0] not in off]
    modes = settings.current
    on_by_name = [name for name, mode in modes.by_platform.items() if mode is not settings.Mode.OFF]
    findings = report.Findings(
        diagnose(platforms, seconds, smoke=options.smoke),
        {name: f"on by {modes.source(name)}, {absent[name]}" for name in on_by_name if name in absent},
        {} if options.smoke else _direct_asserts(),
        off,
    )
    show = report.as_lines if options.smoke else report.as_table
    show = report.as_json if options.json else report.as_markdown if options.markdown else show
    show(findings)
    return FIRES if findings.fires else WOULD_NOT_FIRE


def _direct_asserts() -> dict[str, list[str]]:
    """The calls of torch._assert_async in installed engines, which no setting of ours reaches, by engine."""
    try:
        return {"sglang": [f"{each.place}: {each.source}" for each in direct_asserts()]}
    except ModuleNotFoundError:
        return {}


def _platforms(required: Sequence[str] | None, seconds: float) -> tuple[list[str], dict[str, str]]:
    """The platforms to examine, and why the others are not here; LookupError where one of `required` is not."""
    (asked,) = run_all([examinations.presence_of_platforms], seconds)
    if "missing" not in asked.told:
        raise LookupError(f"asking torch for its devices failed: {asked.how}, {asked.last_words or 'no output'}")
    missing: dict[str, str] = asked.told["missing"]
    here = [name for name, why in missing.items() if not why]
    for name in required or ():
        if name not in missing:
            raise LookupError(f"--platform {name} is no platform. Good names: {', '.join(missing)}.")
        if missing[name]:
            raise LookupError(f"--platform {name}: not here, {missing[name]}. --simulate simulates some.")
    return list(required or here), {name: why for name, why in missing.items() if why}


def _cannot_run(reason: str) -> int:
    print(f"multiassert doctor: {reason}", file=sys.stderr)
    return CANNOT_RUN


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
