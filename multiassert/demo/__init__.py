"""The demo: real speculative decoding, clean first, then with three real failures, and what the probes say of each.

`run` decodes by prompt lookup, by early exit and with a draft tree over a paged KV pool, under probes in mode `warn`.
Clean, every text has to be what plain greedy decoding gives, with no violation and, where the device is simulated and
can tell, with no host wait inside a probe. Then one wrong value is injected at a time: the record has to name the
probe, the step, the row and the value. The same fault is run once more with the probes off, to show what would have
been seen without them.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from multiassert.demo.hardware import NoDeviceError
from multiassert.demo.model import MissingPackageError, check_packages

ALL_CAUGHT, SOMETHING_WRONG, CANNOT_RUN = 0, 1, 2
"""The exit codes."""


def run(tiny: bool = False, platforms: Sequence[str] = ("cpu",), summary_file: pathlib.Path | None = None) -> int:
    """Run the demo, print as it goes, and return the exit code; `tiny` needs no model package and no download.

    One platform is played in this process, several in a child process each. With `summary_file`, the summary of the one
    platform is written there instead of printed.
    """
    try:
        check_packages(tiny)
        return SOMETHING_WRONG if _play(tiny, platforms, summary_file) else ALL_CAUGHT
    except (MissingPackageError, NoDeviceError) as reason:
        print(reason, file=sys.stderr)
        return CANNOT_RUN


def _play(tiny: bool, platforms: Sequence[str], summary_file: pathlib.Path | None) -> list[str]:
    """Play on all platforms; returns what went wrong."""
    # Imported late: they need the packages that were just looked for.
    from rich.console import Console

    from multiassert.demo.summary import Played, show_together

    if len(platforms) > 1:
        from multiassert.demo.children import play_each

        played = play_each(platforms, tiny)
    else:
        from multiassert.demo.scenario import play

        (platform,) = platforms
        summary = play(tiny, platform)
        if summary_file is not None:
            summary.write(summary_file)
            return summary.problems
        played = [Played(platform, bool(summary.problems), summary)]
    show_together(played, Console(highlight=False))
    return [problem for one in played for problem in one.problems]
