"""`python -m multiassert.audit PATH...`, the same as `python -m multiassert audit PATH...`."""

from __future__ import annotations

import argparse
import sys

from multiassert import audit


def main(arguments: list[str] | None = None) -> int:
    """Audit what `arguments` (by default those of the process) name; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m multiassert.audit", description=audit.DESCRIPTION)
    audit.add_arguments(parser)
    return audit.run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
