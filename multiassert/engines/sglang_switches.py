"""SGLang's own switches, asked at each call, as SGLang does: `envs.<name>.get()`.

Importing this imports SGLang's settings, and nothing else of it but its package.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

INVARIANTS = "sglang.srt.utils.invariants"

envs: Any = importlib.import_module("sglang.srt.environ").envs
assertions: Any = envs.SGLANG_ENABLE_ASYNC_ASSERT
nan_checks: Any = getattr(envs, "SGLANG_ENABLE_NAN_LOGITS_CHECK", assertions)  # older versions have the one only


def any_is_on() -> bool:
    """Whether any of SGLang's probes would look at a tensor now."""
    if assertions.get() or nan_checks.get():
        return True
    resolve_level = getattr(sys.modules.get(INVARIANTS), "resolve_level", None)
    return resolve_level is not None and bool(resolve_level())
