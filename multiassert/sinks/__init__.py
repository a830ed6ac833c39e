"""Where violations go besides the log and the error: `jsonlines` writes them to a file, `prometheus` counts them.

A sink is a callback of `on_violation`, so it is given every violation, whatever the mode, and limits itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from multiassert import settings

logger = logging.getLogger(__name__)


def open_those_of_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Write lines of JSON where MULTIASSERT_JSONL says; touches no device, and opens no file before a violation.

    A path that cannot be written to is logged, and ends nothing. Raises ValueError for a path with an unknown name in
    braces.
    """
    path = environment.get(settings.JSONL_VARIABLE, "").strip()
    if not path:
        return
    from multiassert.sinks import jsonlines

    try:
        jsonlines.write_to(path)
    except ValueError as error:
        raise ValueError(f"{settings.JSONL_VARIABLE}: {error}") from None
    except OSError as error:
        logger.warning("%s: violations are not written to %s: %s", settings.JSONL_VARIABLE, path, error)
