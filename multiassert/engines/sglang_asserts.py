"""The device asserts that SGLang calls itself, past its probes: no adapter reaches them."""

from __future__ import annotations

import importlib.util
import pathlib

from multiassert.audit.device_asserts import WORDS
from multiassert.audit.files import search
from multiassert.audit.finding import Finding
from multiassert.audit.rules import BY_NAME
from multiassert.audit.search import audit

RULES = tuple(BY_NAME[name] for name in ("assert-without-message", "direct-assert"))
# What the adapter replaces.
COVERED = ("srt/utils/async_probe.py", "srt/utils/invariants.py")
NO_ENGINE_CODE = ("test", "tests", "benchmark")


def direct_asserts(package: pathlib.Path | None = None) -> list[Finding]:
    """Calls of `torch._assert_async` in the source of the installed SGLang; reads files, imports and touches nothing.

    Each finding has its path, line, source, why it matters and what to call instead, as of `multiassert audit`.
    `package` is the folder of another SGLang. Raises ModuleNotFoundError where there is none.
    """
    folder = _installed() if package is None else package
    paths = [source.path for source in search([folder], (*COVERED, *NO_ENGINE_CODE), with_tests=False)]
    words = [word.encode() for word in WORDS]
    # Most of some three thousand files hold no such word, and parsing all would take a minute.
    suspects = [path for path in paths if path.is_file() and any(word in path.read_bytes() for word in words)]
    return audit(suspects, RULES).findings


def _installed() -> pathlib.Path:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("sglang is not installed here: pass the folder of its package", name="sglang")
    return pathlib.Path(next(iter(spec.submodule_search_locations)))
