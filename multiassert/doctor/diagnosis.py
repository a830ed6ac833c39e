"""From what the examinations told to a judgement: what fires on a platform, what waits, what is silent."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from multiassert import backends, settings
from multiassert.backends import Backend, Mechanism, NativeAssert
from multiassert.doctor import examinations
from multiassert.doctor.children import Ended, Examination, run_all
from multiassert.settings import Mode

NATIVE_THAT_FIRES = (NativeAssert.FIRES, NativeAssert.RAISES, NativeAssert.ABORTS)


@dataclasses.dataclass(frozen=True)
class Row:
    """One question and its answer."""

    question: str
    seen: str
    good: bool | None  # None where nothing depends on it


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """One platform."""

    platform: str
    simulated: bool
    versions: Mapping[str, str]
    mode: str
    source: str  # which setting the mode came from
    mechanism: str  # of the mode, and of auto where it is off
    why: str  # what auto chooses and why, in a sentence
    fires: bool  # whether a NaN was seen to be reported in this mode, and all that its mechanism rests on holds
    rows: tuple[Row, ...]


def diagnose(platforms: Sequence[tuple[str, bool]], seconds: float, *, smoke: bool = False) -> list[Diagnosis]:
    """Examine platforms, given by name and whether they are simulated; each examination takes at most `seconds`.

    With `smoke` only whether a NaN is reported in the mode in force.
    """
    asked = [examinations.mode_in_force]
    if not smoke:
        asked += [
            examinations.device_and_deferred,
            examinations.native_call,
            examinations.native_captured,
            examinations.native_compiled,
        ]
        # Most children need it, and it takes seconds; those that are forked have it from here.
        importlib.import_module("torch._dynamo")
    children: list[Examination] = [functools.partial(each, *platform) for platform in platforms for each in asked]
    ended = iter(run_all(children, seconds))
    diagnoses = []
    for name, simulated in platforms:
        told = [next(ended) for _ in asked]
        diagnoses.append(_smoke(name, simulated, *told) if smoke else _full(name, simulated, *told))
    return diagnoses


def _smoke(platform: str, simulated: bool, in_force: Ended) -> Diagnosis:
    row = _fires_in_mode(_mechanism(platform), in_force)
    return _diagnosis(platform, simulated, {}, (row,), fires=bool(row.good))


def _full(
    platform: str, simulated: bool, in_force: Ended, device: Ended, call: Ended, captured: Ended, compiled: Ended
) -> Diagnosis:
    backend = backends.named(platform)
    mechanism = _mechanism(platform)
    in_mode = _fires_in_mode(mechanism, in_force)
    native, seen_native = _native_rows(backend, call, captured, compiled)
    deferred = _deferred_rows(device)
    rests_on = {
        Mechanism.IMMEDIATE: [],
        Mechanism.NATIVE: [Row("", "", seen_native in NATIVE_THAT_FIRES)],
        Mechanism.DEFERRED: deferred,
    }[mechanism]
    fires = bool(in_mode.good) and all(row.good is not False for row in rests_on)
    versions = device.told.get("versions", {})
    return _diagnosis(platform, simulated, versions, (in_mode, *native, *deferred), fires=fires)


def _diagnosis(
    platform: str, simulated: bool, versions: Mapping[str, str], rows: tuple[Row, ...], *, fires: bool
) -> Diagnosis:
    modes = settings.current
    return Diagnosis(
        platform=platform,
        simulated=simulated,
        versions=versions,
        mode=modes.of(platform).value,
        source=modes.source(platform),
        mechanism=_mechanism(platform).value,
        why=backends.named(platform).why(),
        fires=fires,
        rows=rows,
    )


def _mechanism(platform: str) -> Mechanism:
    mode = settings.current.of(platform)
    if mode in (Mode.OFF, Mode.AUTO):
        return backends.named(platform).auto()
    return Mechanism.NATIVE if mode is Mode.TRAP else Mechanism.DEFERRED


# ---------------------------------------------------------------------------------------------------------------------
# The mode in force.


# How a process ends that a device assert has ended. SIGKILL and SIGTERM come from somebody else.
ENDED_BY_ASSERT = ("SIGABRT", "SIGTRAP", "SIGILL", "SIGSEGV", "SIGBUS")


def _fires_in_mode(mechanism: Mechanism, ended: Ended) -> Row:
    """Whether the NaN was reported, and the clean tensor not. A native assert may do so by ending the process."""
    told, question = ended.told, "a NaN is reported in this mode"
    if not told.get("silent when clean", False):
        is_reported = bool(told.get("records")) or "silent when clean" in told
        return Row(question, "a clean tensor was reported" if is_reported else _how_it_failed(ended), False)
    records = told.get("records", [])
    if records:
        rows, values = [r["rows"] for r in records], [r["value"] for r in records]
        raised = told.get("raised", "logged").partition(":")[0]
        found = f"row {', '.join(map(str, rows[0]))}, value {values[0]}" if len(records) == 1 else f"{records}"
        is_right = (rows, values, records[0]["message"]) == ([[2]], ["nan"], examinations.MESSAGE)
        return Row(question, f"{found}; {raised}", is_right)
    has_message = examinations.MESSAGE in told.get("raised", "") + ended.output
    if "raised" in told:
        is_assert = mechanism is Mechanism.NATIVE and bool(told["is device's"])
        return Row(question, f"{told['raised']}; {_message(has_message)}", is_assert)
    if "records" in told:
        return Row(question, "nothing was reported", False)
    is_assert = mechanism is Mechanism.NATIVE and ended.how in ENDED_BY_ASSERT
    return Row(question, f"the process ended by {ended.how}; {_message(has_message)}", is_assert)


def _message(arrived: bool) -> str:
    return "the message was told" if arrived else "the message was lost"


def _how_it_failed(ended: Ended) -> str:
    return f"the examination failed: {ended.how}, {ended.last_words or 'no output'}"


# ---------------------------------------------------------------------------------------------------------------------
# torch._assert_async.


def _native_rows(
    backend: Backend, call: Ended, captured: Ended, compiled: Ended
) -> tuple[list[Row], NativeAssert | None]:
    """What was seen of it, and what that makes it; None where it could not be examined."""
    told = call.told
    if not told.get("passes when true", False):
        return [Row("native: examined", _how_it_failed(call), False if told else None)], None
    seen = _seen_native(backend.name, call)
    rows = [
        Row("native: a kernel on the device", _yes_no(told["kernel"]), None),
        Row("native: fires", _yes_no(seen is not NativeAssert.COMPILED_OUT), None),
        Row("native: how it ends", _how_it_ends(call), None),
        Row("native: host waits", _waits(told["waits"]), None),
        Row("native: in a captured graph", _captured(captured), None),
        Row("native: kept by Inductor", _compiled(compiled), None),
    ]
    as_claimed = backend.native is seen
    known = "as is known" if as_claimed else f"known as: {backend.native.value}"
    is_unknown = backend.native is NativeAssert.UNKNOWN
    rows.append(Row("native: in a word", f"{seen.value} ({known})", None if is_unknown else as_claimed))
    return rows, seen


def _seen_native(platform: str, call: Ended) -> NativeAssert:
    told = call.told
    if told.get("survived"):
        return NativeAssert.COMPILED_OUT
    if not told["kernel"]:
        return NativeAssert.MISSING
    if "raised" not in told and _ended_by_others(call):
        return NativeAssert.UNKNOWN
    raised_at_the_call = "raised" in told and "returned" not in told
    if platform == "cpu" and raised_at_the_call:
        return NativeAssert.RAISES
    if told["waits"].get("waits") or raised_at_the_call:  # how else could the host know
        return NativeAssert.WAITS
    return NativeAssert.FIRES if _message_arrived(call) else NativeAssert.ABORTS


def _ended_by_others(ended: Ended) -> bool:
    """Whether a process hung, or was ended from outside, so that nothing follows from its end."""
    return ended.how.startswith("no end") or ended.how in ("SIGKILL", "SIGTERM")


def _message_arrived(ended: Ended) -> bool:
    return bool(ended.told.get("message")) or examinations.MESSAGE in ended.output


def _how_it_ends(ended: Ended) -> str:
    told = ended.told
    if told.get("survived"):
        return "nothing happens"
    if "raised" in told:
        when = "at a later wait" if "returned" in told else "at the call"
        return f"{told['raised'].partition(':')[0]} {when}; {_message(_message_arrived(ended))}"
    return f"the process ends by {ended.how}; {_message(_message_arrived(ended))}"


def _waits(told: Mapping[str, Any]) -> str:
    if "waits" not in told:
        return _unanswered(told)
    return f"{'none' if not told['waits'] else told['waits']}, {told['how']}"


def _captured(ended: Ended) -> str:
    told = ended.told
    if "capture" not in told:
        return _not_examined(ended)
    if told["capture"]:
        return f"no: {told['capture']}"
    return "silent in a replay" if told.get("survived") else f"fires in a replay: {_how_it_ends(ended)}"


def _compiled(ended: Ended) -> str:
    if not ended.told.get("compiled"):
        return _not_examined(ended)
    return "no: it is compiled out, without a word" if ended.told.get("survived") else f"yes: {_how_it_ends(ended)}"


def _not_examined(ended: Ended) -> str:
    """The reason of a NotHere, which is the last line of a traceback; else how the child failed."""
    reason = ended.last_words.partition("NotHere: ")[2]
    return f"not here: {reason}" if reason else _how_it_failed(ended)


# ---------------------------------------------------------------------------------------------------------------------
# The deferred mechanism.


def _deferred_rows(device: Ended) -> list[Row]:
    told = device.told
    if "cost" not in told:
        return [Row("deferred: examined", _how_it_failed(device), False)]
    return [
        _kinds(told["kinds"]),
        _judged("deferred: host waits", told["waits"], lambda waits: (_waits(waits), not waits["waits"])),
        _judged("deferred: reductions keep NaN", told["reductions"], _reductions),
        _judged("deferred: captured graph", told["graph"], _replays),
        _judged("deferred: cost of a NaN probe", told["cost"], _cost),
        Row("deferred: kernels", "one fused Triton kernel" if told["fused"] else "torch's own", None),
        _judged("fp16 makes Inf and NaN", told["overflow"], _overflow),
    ]


def _judged(question: str, told: Any, judge: Any) -> Row:
    if isinstance(told, dict) and ("not here" in told or "failed" in told):
        return Row(question, _unanswered(told), False if "failed" in told else None)
    seen, good = judge(told)
    return Row(question, seen, good)


def _unanswered(told: Mapping[str, Any]) -> str:
    return f"not here: {told['not here']}" if "not here" in told else f"failed: {told.get('failed', 'no answer')}"


def _kinds(told: Mapping[str, str]) -> Row:
    question = "deferred: every kind, row and value"
    if "failed" in told:
        return Row(question, _unanswered(told), False)
    wrong = [f"{name}: {seen}" for name, seen in told.items() if seen]
    return Row(question, "; ".join(wrong) if wrong else f"all {len(told)}, and silent when clean", not wrong)


def _reductions(told: Mapping[str, Any]) -> tuple[str, bool]:
    lost = told["lost"]
    if lost:
        return f"lost: {', '.join(lost)}. {LOST_NAN_ADVICE}", settings.exact
    return f"yes, for {', '.join(told['asked'])}", True


LOST_NAN_ADVICE = "Set MULTIASSERT_KERNELS=exact, which compares every number itself."


def _replays(told: Sequence[Sequence[int]]) -> tuple[str, bool]:
    good = list(map(list, told)) == [[], [], [1], []]
    return ("the bad replay alone is reported, with its row" if good else f"rows after four replays: {told}"), good


def _cost(told: Mapping[str, Any]) -> tuple[str, None]:
    if "kernels" in told:
        return f"{told['kernels']} kernels", None
    return f"{told['microseconds']} us of the host's time, 64x4096 float16", None


def _overflow(told: Mapping[str, str]) -> tuple[str, bool]:
    seen, good = ", ".join(f"{what} = {value}" for what, value in told.items()), list(told.values()) == ["inf", "nan"]
    # Atlas training products and Atlas 200I/500 A2 have no other mode (torch_npu's page on INF_NAN_MODE_ENABLE, read).
    return seen + ("" if good else ": no Inf and NaN come to be here. On Ascend, set INF_NAN_MODE_ENABLE=1"), good


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"
