"""SGLang's own call sites run through multiassert, with no change to SGLang.

    pip install multiassert     # beside SGLang, which finds it by its entry point, in every process
    SGLANG_ENABLE_ASYNC_ASSERT=1 MULTIASSERT_NPU=warn python -m sglang.launch_server ...

SGLang's plug-ins (`sglang.srt.plugins`, 0.5.23) are loaded by its engine, server, scheduler, detokenizer and
data-parallel controller. `SGLANG_PLUGINS` without `multiassert` in it leaves this one out. For a SGLang without
plug-ins call `install()` early in each process, from a `sitecustomize` say.

SGLang's switches keep their meaning and are read at each call: see `multiassert.engines.sglang_probes`. A step ends
when SGLang's scheduler has launched a batch: see `multiassert.engines.sglang_steps`. What SGLang asserts past its
probes is not reached: `multiassert.engines.sglang_asserts.direct_asserts()` lists it.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from multiassert import settings
from multiassert.engines import sglang_rebinding as rebinding

logger = logging.getLogger(__name__)

ASYNC_PROBE = "sglang.srt.utils.async_probe"
INVARIANTS = "sglang.srt.utils.invariants"
SCHEDULER = "sglang.srt.managers.scheduler"
PLUGINS = "sglang.srt.plugins"
HOOK_REGISTRY = "sglang.srt.plugins.hook_registry"

# Kinds of hooks, by SGLang's names.
REPLACE, AROUND = "replace", "around"


@dataclasses.dataclass
class _Replaced:
    """A function of SGLang's that is ours now."""

    module: ModuleType
    path: str
    original: Any
    ours: Any
    by_plugin: bool


_replaced: dict[str, _Replaced] = {}
_after_import: rebinding.AfterImport | None = None


def register() -> None:
    """Register with SGLang's plug-ins what replaces its probes, which SGLang then applies; touches no device.

    SGLang calls it by the entry point `sglang.srt.plugins`, in every process that loads plug-ins. It may be called
    again. Where SGLang has no plug-ins it is `install()`.
    """
    if importlib.util.find_spec(PLUGINS) is None:
        install()
        return
    plugins = importlib.import_module(HOOK_REGISTRY)
    # Importing the scheduler takes seconds. A process that runs one has imported it before it loads plug-ins.
    names = (ASYNC_PROBE, INVARIANTS, *((SCHEDULER,) if SCHEDULER in sys.modules else ()))
    for module in _those_there_are(names):
        for path, hook, kind in _hooks(module):
            _note(module, path, hook, by_plugin=True)
            plugins.HookRegistry.register(f"{module.__name__}.{path}", hook, plugins.HookType(kind))


def _those_there_are(names: Sequence[str]) -> Iterator[ModuleType]:
    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            logger.warning("this SGLang has no %s (%s): nothing is put in its place", name, error)
        else:
            yield module


def install() -> None:
    """Replace SGLang's probes without its plug-ins, now or once SGLang is imported; imports nothing of it itself.

    Every module is reached that has imported a probe by name, or will. It holds for this process: call it in each, from
    a `sitecustomize` module or at the start of the engine. It may be called again.
    """
    global _after_import
    if _after_import is None:
        _after_import = rebinding.AfterImport((ASYNC_PROBE, INVARIANTS, SCHEDULER), _replace)
        _after_import.install()


def _replace(module: ModuleType) -> None:
    values = {
        path: hook if kind == REPLACE else rebinding.surrounded(rebinding.value_at(module, path), hook)
        for path, hook, kind in _hooks(module)
    }
    for path, ours in values.items():
        _note(module, path, ours, by_plugin=False)
    rebinding.rebind(module, values)


def uninstall() -> None:
    """Give SGLang its own functions back, for tests; hooks of other plug-ins on the same functions go, too."""
    global _after_import
    if _after_import is not None:
        _after_import.uninstall()
        _after_import = None
    for module in {replaced.module.__name__: replaced.module for replaced in _replaced.values()}.values():
        rebinding.rebind(module, {r.path: r.original for r in _replaced.values() if r.module is module})
    for target, replaced in _replaced.items():
        if replaced.by_plugin:
            registry = sys.modules[HOOK_REGISTRY].HookRegistry
            others = [hook for hook in registry._hooks.pop(target, ()) if hook[1] is not replaced.ours]
            registry._hooks.update({target: others} if others else {})
            registry._patched.discard(target)
    _replaced.clear()


def _hooks(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """What to put in place of what in a module of SGLang, or around it; without what has been put there."""
    # Imported here, since they take SGLang's settings.
    from multiassert.engines import sglang_probes, sglang_steps

    sglang_probes.leave_frames_out()
    hooks = [(path, hook, REPLACE) for path, hook in sglang_probes.REPLACEMENTS.get(module.__name__, {}).items()]
    if module.__name__ == SCHEDULER:
        hooks.append((sglang_steps.RUN_BATCH, sglang_steps.around_run_batch, AROUND))
    for path, hook, kind in hooks:
        if rebinding.value_at(module, path) is None:
            logger.warning("this SGLang has no %s.%s: nothing is put in its place", module.__name__, path)
        elif not _is_ours(module, path):
            yield path, hook, kind


def _is_ours(module: ModuleType, path: str) -> bool:
    replaced = _replaced.get(f"{module.__name__}.{path}")
    return replaced is not None and (replaced.by_plugin or rebinding.value_at(module, path) is replaced.ours)


def _note(module: ModuleType, path: str, ours: Any, by_plugin: bool) -> None:
    if not _replaced:
        _warn_of_switches()
    from multiassert.engines import sglang_probes

    original = sglang_probes.originals[path] = rebinding.value_at(module, path)
    _replaced[f"{module.__name__}.{path}"] = _Replaced(module, path, original, ours, by_plugin)


def _warn_of_switches() -> None:
    """A mode that is on does nothing for SGLang's probes while SGLang's own switches are off: say so."""
    from multiassert.engines import sglang_switches

    if settings.active and not sglang_switches.any_is_on():
        logger.warning(
            "a mode of multiassert is on, but SGLang's own switches are off, so that its probes look at nothing: set "
            "SGLANG_ENABLE_ASYNC_ASSERT=1, or SGLANG_ENABLE_NAN_LOGITS_CHECK=1 for those of NaN"
        )
