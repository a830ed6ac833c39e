"""The demo: real speculative decoding, clean first, then with three real failures, and what the probes say of each.

`run` decodes by prompt lookup, by early exit and with a draft tree over a paged KV pool, under probes in mode `warn`.
Clean, every text has to be what plain greedy decoding gives, with no violation. Then one wrong value is injected at a
time: the record has to name the probe, the step, the row and the value. The same fault is run once more with the probes
off, to show what would have been seen without them.
"""

from __future__ import annotations

import sys

from multiassert.demo.model import MissingPackageError, check_packages

ALL_CAUGHT, SOMETHING_WRONG, PACKAGE_MISSING = 0, 1, 2
"""The exit codes."""


def run(tiny: bool = False, platform: str = "cpu") -> int:
    """Run the demo, print as it goes, and return the exit code; `tiny` needs no model package and no download."""
    try:
        check_packages(tiny)
        # Imported late: it needs the packages that were just looked for.
        from multiassert.demo.scenario import play

        return SOMETHING_WRONG if play(tiny, platform) else ALL_CAUGHT
    except MissingPackageError as missing:
        print(missing, file=sys.stderr)
        return PACKAGE_MISSING
