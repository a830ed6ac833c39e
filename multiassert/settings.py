"""Which mode each platform is in: environment variables, `configure`, `override`.

The environment is read once, at import. `active` is the one thing a disabled probe looks at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import pathlib
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch


class Mode(str, enum.Enum):
    """What a platform does with its probes; the table in the README says what each means."""

    OFF = "off"
    AUTO = "auto"
    WARN = "warn"
    RAISE = "raise"
    TRAP = "trap"


SPELLINGS: Mapping[str, Mode] = {
    **{mode.value: mode for mode in Mode},
    **dict.fromkeys(("", "0", "false", "none"), Mode.OFF),
    **dict.fromkeys(("1", "true", "on"), Mode.AUTO),
    "log": Mode.WARN,
    "strict": Mode.RAISE,
    "native": Mode.TRAP,
}
GOOD_VALUES = "off (0, false), auto (1, true, on), warn (log), raise (strict), trap (native)"
KNOWN_PLATFORMS = ("cpu", "cuda", "rocm", "npu", "musa", "xpu", "mps")

# Which kernels deferred probes are made of, where there is a choice.
KERNELS = ("auto", "triton", "torch", "exact")
KERNELS_VARIABLE = "MULTIASSERT_KERNELS"

# Where violations are written besides; multiassert.sinks reads it.
JSONL_VARIABLE = "MULTIASSERT_JSONL"

# They start like a platform's variable, and set no mode.
OTHER_VARIABLES = (KERNELS_VARIABLE, JSONL_VARIABLE)

# Variables that start like a platform's but are not one: they belong to the test suite.
RESERVED_PREFIX = "MULTIASSERT_TEST_"

RETIRED_VARIABLES = ("SGLANG_SPEC_NAN_DETECTION", "SGLANG_SPEC_OOB_DETECTION")
RETIRED_FLAG = "--enable-nan-detection"


def parse_mode(value: str | bool | Mode, name: str) -> Mode:
    """The mode that `value` spells; `name` is the variable or argument that the error names."""
    if isinstance(value, bool):
        return Mode.AUTO if value else Mode.OFF
    mode = SPELLINGS.get(value.strip().lower()) if isinstance(value, str) else None
    if mode is None:
        raise ValueError(f"{name}={value!r} is no mode of multiassert. Good values: {GOOD_VALUES}.")
    return mode


def parse_kernels(value: object, name: str) -> str:
    """One of KERNELS; `name` is the variable or argument that the error names."""
    kernels = value.strip().lower() if isinstance(value, str) else value
    if kernels not in KERNELS:
        raise ValueError(f"{name}={value!r} names no kernels. Good values: {', '.join(KERNELS)}.")
    return str(kernels)


@dataclasses.dataclass(frozen=True)
class Modes:
    """The mode of every platform, and where each one came from."""

    default: Mode = Mode.OFF
    default_source: str = "the default"
    by_platform: Mapping[str, Mode] = dataclasses.field(default_factory=dict)
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kernels: str = "auto"

    def of(self, platform: str) -> Mode:
        return self.by_platform.get(platform, self.default)

    def source(self, platform: str) -> str:
        return self.sources.get(platform, self.default_source)

    def where_asked_for(self, platform: str) -> Mode:
        """The mode of a probe that an engine's own switch has turned on: auto, unless our own names chose one."""
        mode = self.of(platform)
        is_ours = self.source(platform).startswith(("MULTIASSERT", "configure"))
        return mode if is_ours and mode is not Mode.OFF else Mode.AUTO

    @property
    def any_on(self) -> bool:
        return self.default is not Mode.OFF or any(mode is not Mode.OFF for mode in self.by_platform.values())


def _truth(name: str, value: str) -> bool:
    text = value.strip().lower()
    if text in ("1", "true", "yes", "y", "on"):
        return True
    if text in ("", "0", "false", "no", "n", "off"):
        return False
    raise ValueError(f"{name}={value!r} is neither true nor false. Good values: 1, true, yes, on, 0, false, no, off.")


def _default_from_sglang(environment: Mapping[str, str], arguments: list[str]) -> tuple[Mode, str]:
    """The mode for all platforms that SGLang's own names ask for, when `MULTIASSERT` is not set."""
    name = "SGLANG_ENABLE_ASYNC_ASSERT"
    if _truth(name, environment.get(name, "")):
        return Mode.AUTO, name
    name = "SGLANG_INVARIANT_CHECK"
    if name in environment:
        level = environment[name].strip().lower()
        # SGLang itself takes the numbers (0.5.23, read).
        levels = {"off": Mode.OFF, "warn": Mode.WARN, "strict": Mode.RAISE}
        numbers = dict(zip("012", levels.values(), strict=True))
        if level not in {**levels, **numbers}:
            good = ", ".join((*levels, *numbers))
            raise ValueError(f"{name}={environment[name]!r} is no level. Good values: {good}.")
        return {**levels, **numbers}[level], name
    retired = [old for old in RETIRED_VARIABLES if _truth(old, environment.get(old, ""))]
    retired += [RETIRED_FLAG] if RETIRED_FLAG in arguments else []
    if retired:
        warnings.warn(
            f"{', '.join(retired)} is retired and still turns all probes on: set MULTIASSERT=auto instead.",
            FutureWarning,
            stacklevel=2,
        )
        return Mode.AUTO, retired[0]
    return Mode.OFF, "the default"


def _is_device_type(name: str) -> bool:
    try:
        return torch.device(name).index is None
    except RuntimeError:
        return False


def read_environment(environment: Mapping[str, str], arguments: list[str]) -> Modes:
    """The modes that `environment` and the command line ask for; raises ValueError on a bad value."""
    if "MULTIASSERT" in environment:
        default, default_source = parse_mode(environment["MULTIASSERT"], "MULTIASSERT"), "MULTIASSERT"
    else:
        default, default_source = _default_from_sglang(environment, arguments)
    by_platform, sources = {}, {}
    for name, value in environment.items():
        if not name.startswith("MULTIASSERT_") or name.startswith(RESERVED_PREFIX) or name in OTHER_VARIABLES:
            continue
        platform = name.removeprefix("MULTIASSERT_").lower()
        by_platform[platform] = parse_mode(value, name)
        sources[platform] = name
        if platform not in KNOWN_PLATFORMS and not _is_device_type(platform):
            warnings.warn(
                f"{name} names no device type that torch {torch.__version__} knows here; it takes effect when a "
                f"tensor of device type {platform!r} is probed. Known: {', '.join(KNOWN_PLATFORMS)}.",
                stacklevel=2,
            )
    kernels = parse_kernels(environment.get(KERNELS_VARIABLE, "auto"), KERNELS_VARIABLE)
    return Modes(default, default_source, by_platform, sources, kernels)


# True while any platform is on. Probes read it as `settings.active`, and so do the guards of compiled code.
active: bool = False
# Whether no reduction is trusted with a NaN (kernels="exact").
exact: bool = False
current: Modes = Modes()
# The latest modes that were not all off. They decide for what compiled code saw and kept no mode with.
last_on: Modes = Modes()

lock = threading.RLock()
_listeners: list[Callable[[], None]] = []


def on_change(listener: Callable[[], None]) -> None:
    """Call `listener` after every change of the modes."""
    _listeners.append(listener)


def apply(modes: Modes) -> None:
    """Put `modes` in force, in this process, for all threads."""
    with lock:
        _set(modes)
    _tell_listeners()


def _set(modes: Modes) -> None:
    global active, current, exact, last_on
    current = modes
    exact = modes.kernels == "exact"
    active = modes.any_on
    last_on = modes if active else last_on


def _tell_listeners() -> None:
    """Outside of the lock, since listeners take locks of their own."""
    for listener in _listeners:
        listener()


def _changed(
    base: Modes, mode: str | bool | Mode | None, kernels: str | None, platforms: Mapping[str, str | bool | Mode]
) -> Modes:
    by_platform, sources = dict(base.by_platform), dict(base.sources)
    default, default_source = base.default, base.default_source
    if mode is not None:
        default, default_source = parse_mode(mode, "mode"), "configure"
        by_platform, sources = {}, {}
    for platform, value in platforms.items():
        by_platform[platform] = parse_mode(value, platform)
        sources[platform] = "configure"
    chosen = base.kernels if kernels is None else parse_kernels(kernels, "kernels")
    return Modes(default, default_source, by_platform, sources, chosen)


def _refuse_silent_traps(modes: Modes) -> None:
    """Raise where `trap` was asked of a named platform on which the assert would be silent or would wait."""
    from multiassert import backends

    for platform, mode in modes.by_platform.items():
        refusal = backends.named(platform).trap_refusal() if mode is Mode.TRAP else None
        if refusal is not None:
            raise ValueError(f"{modes.source(platform)}: mode trap is refused on {platform}. {refusal}")


def configure(
    mode: str | bool | Mode | None = None, /, *, kernels: str | None = None, **platforms: str | bool | Mode
) -> None:
    """Set modes at run time; takes effect at the next probe, in compiled code too. No host wait.

    Touches a device only where captured graphs have probes in them: what they see while the platform is off is dropped.

    `configure("raise")` sets every platform. `configure("raise", cuda="trap", npu="warn")` sets every platform, then
    the named ones. `configure(npu="warn")` changes that one and leaves the others. The change holds for the whole
    process, all threads. `kernels` is what deferred probes are made of where there is a choice (CUDA, ROCm): `triton`,
    one launch a probe; `torch`, two or three; `auto`, Triton where it is found and was shown to fire; `exact`, torch's,
    which compare each number themselves, for a device whose reductions lose NaN (`multiassert doctor` tells). Raises
    ValueError for a bad value, and for `trap` on a named platform where the assert would be silent or would wait.
    """
    with lock:
        modes = _changed(current, mode, kernels, platforms)
        _refuse_silent_traps(modes)
        _set(modes)
    _tell_listeners()


@contextlib.contextmanager
def override(
    mode: str | bool | Mode | None = None, /, *, kernels: str | None = None, **platforms: str | bool | Mode
) -> Iterator[None]:
    """Set modes as `configure` does for the length of a `with` block.

    Nests, and restores what was in force before, also when the body raises. What a probe recorded inside keeps its
    mode: a violation found in `override("raise")` and looked at later still raises.
    """
    with lock:
        before = current
        modes = _changed(before, mode, kernels, platforms)
        _refuse_silent_traps(modes)
        _set(modes)
    _tell_listeners()
    try:
        yield
    finally:
        apply(before)


def read_process_environment() -> None:
    """Read the environment of this process (done once, at import) and put it in force."""
    try:
        modes = read_environment(os.environ, sys.argv)
        _refuse_silent_traps(modes)
    except ValueError as error:
        if _is_own_command():
            print(f"multiassert: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        raise error.with_traceback(None) from None
    apply(modes)


def _is_own_command() -> bool:
    """Whether this process is our command line: while `python -m` looks for a package, it is all that argv says."""
    if sys.argv[:1] == ["-m"]:
        # As in `python -m multiassert`, `python -um multiassert`, `python -mmultiassert`.
        options = [option for option in sys.orig_argv if re.fullmatch(rf"-[A-Za-z]*m({__package__})?", option)]
        module = sys.orig_argv[sys.orig_argv.index(options[0]) + 1 :][:1] if options else []
        return bool(options) and (options[0].endswith(str(__package__)) or module == [__package__])
    return bool(sys.argv) and pathlib.Path(sys.argv[0]).stem == __package__
