"""What a probe costs on the accelerator that is here: exactness first, then microseconds, within five minutes.

    python scripts/gpu_bench.py                              on the accelerator that torch finds
    python scripts/gpu_bench.py --quick --json bench.json    fewer shapes, a minute; the numbers as JSON too
    python scripts/gpu_bench.py --platform npu --simulate    the script itself, on a simulated device: no real times

Eager is a call from Python in mode raise, where it is deferred, over and over without a wait: the host or the device,
whichever is slower. Replayed is the same call in a captured graph, so the device alone. The contenders of a row take
turns in random order, and a ratio is taken within a round. Each call has another tensor than the one before, so that
large ones come from memory and not from a cache. The exit code is 1 if any probe is not exact, and 2 if there is no
device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.utils.benchmark import Timer

# Neither this folder nor the one above it is installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import gpu_check
from gpu_check import Machine, NotHere

import multiassert
from benchmarks import contenders, environment, timing
from benchmarks.table import Spread
from multiassert import backends, fused

BUDGET_SECONDS = 280.0
EFFORT = timing.Effort(quick=False, rounds=15, seconds_a_row=0.6, seconds_a_turn=0.004)
QUICK_EFFORT = timing.Effort(quick=True, rounds=5, seconds_a_row=0.0, seconds_a_turn=0.0005)
SECONDS_A_ROW = 3.0  # about what one takes, with its capture; none is begun with less left

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
WITH_INF = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2)
INTEGERS = (torch.int32, torch.int64)
VOCABULARY = contenders.VOCABULARY
PAGE = 64

OURS, OURS_TORCH, SGLANG, PLAIN = "ours", "ours, torch kernels", "SGLang", "plain torch"
READ_AT_LEAST = 256 * 2**20  # bytes that the calls of a turn read together, as far as MOST_TENSORS allow
FEWEST_TENSORS, MOST_TENSORS = 4, 16
OUT_OF_TIME = "out of time"
NO_TIMES = "The device is simulated: the times below are those of a CPU that plays it, and mean nothing."


def name_of(dtype: torch.dtype) -> str:
    """The dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------------------------------------------------
# Exactness: what the probes say, against plain torch on the CPU.


Report = tuple[str, tuple[int | range, ...], str]  # the kind, the rows, and the value where only one can be meant


@dataclasses.dataclass(frozen=True)
class Exactness:
    """What came of one probe on one tensor, clean and bad."""

    check: str
    result: str  # exact, wrong, or not here
    seen: str


@dataclasses.dataclass(frozen=True)
class Case:
    """A probe, a clean and a bad tensor, and where plain torch says that the bad one is bad, by kind of violation."""

    name: str
    probe: Callable[[Tensor, str], None]
    clean: Tensor
    bad: Tensor
    masks: dict[str, Tensor]

    def expected(self) -> list[Report]:
        """What has to be reported."""
        found: list[Report] = []
        for kind, mask in self.masks.items():
            rows = mask.reshape(mask.shape[0], -1).any(-1).nonzero().flatten().tolist()
            values = self.bad.double()[mask] if self.bad.dtype.is_floating_point else self.bad[mask]
            value = {"low": values.min, "high": values.max}.get(kind, lambda: "any")()
            found.append((kind, tuple(rows), str(value.item() if isinstance(value, Tensor) else value)))
        return found


def cases(quick: bool) -> Iterator[Case]:
    """The probes on a handful of shapes and dtypes, the bad values at random places that are the same in each run."""
    chance = torch.Generator().manual_seed(2)
    shapes = ((1, 33), (3, 257)) if quick else ((1, 33), (3, 1000), (64, 32768), (256, 1031))

    def spoilt(clean: Tensor, *values: float) -> Tensor:
        bad = clean.flatten().clone()
        for value in values:
            place = int(torch.randint(len(bad), (1,), generator=chance))
            bad[place] = torch.tensor(value).to(clean.dtype)
        return bad.reshape(clean.shape)

    def floats(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=chance).to(dtype)

    for shape in shapes:
        for dtype in FLOATS:
            clean = floats(dtype, shape)
            bad = spoilt(clean, math.nan)
            yield Case(f"nan {name_of(dtype)} {shape}", multiassert.maybe_detect_nan, clean, bad, {"nan": nans(bad)})
        for dtype in WITH_INF:
            clean = floats(dtype, shape)
            bad = spoilt(clean, math.inf)
            mask = bad.float().isinf()
            yield Case(f"inf {name_of(dtype)} {shape}", multiassert.maybe_detect_inf, clean, bad, {"inf": mask})
        for dtype in FLOATS[:3]:
            clean = floats(dtype, shape)
            bad = spoilt(clean, 1.5, -0.5)
            mask = (bad < 0) | (bad > 1)
            yield Case(f"range {name_of(dtype)} {shape}", within_one, clean, bad, {"range": mask})
    index_shapes: list[tuple[int, ...]] = [(1,), (7,), (64, 5), (256,)]
    for index_shape in index_shapes:
        for dtype in INTEGERS:
            clean = torch.randint(VOCABULARY, index_shape, generator=chance, dtype=dtype)
            above = spoilt(clean, VOCABULARY)
            below = spoilt(clean, -1)
            what = f"{name_of(dtype)} {index_shape}"
            yield Case(f"out of bounds, above {what}", within_vocabulary, clean, above, {"high": above >= VOCABULARY})
            yield Case(f"out of bounds, below {what}", within_vocabulary, clean, below, {"low": below < 0})
            slots = clean * PAGE
            between = spoilt(slots, PAGE * 5 + 3)
            yield Case(f"page aligned {what}", on_pages, slots, between, {"misaligned": between % PAGE != 0})


def nans(tensor: Tensor) -> Tensor:
    """Where plain torch sees a NaN."""
    return tensor.float().isnan()


def within_one(tensor: Tensor, message: str) -> None:
    """The range probe for [0, 1]."""
    multiassert.maybe_detect_in_closed_range(tensor, 0.0, 1.0, message)


def within_vocabulary(tensor: Tensor, message: str) -> None:
    """The index probe for token ids."""
    multiassert.maybe_detect_oob(tensor, 0, VOCABULARY, message)


def on_pages(tensor: Tensor, message: str) -> None:
    """The page probe."""
    multiassert.maybe_detect_page_aligned(tensor, PAGE, message)


def check_exactness(machine: Machine, quick: bool, kernels: str) -> list[Exactness]:
    """Probe all clean tensors, look, probe all bad ones, look."""
    results: dict[str, Exactness] = {}
    moved: list[tuple[Case, Tensor, Tensor]] = []
    for case in cases(quick):
        try:
            moved.append((case, case.clean.to(machine.device), case.bad.to(machine.device)))
            machine.finish()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            results[case.name] = Exactness(case.name, "not here", f"the device has no such tensor: {error}")
    with gpu_check.probes("warn"), multiassert.override(kernels=kernels):
        reports: list[dict[str, list[Report]]] = []
        for which in (1, 2):
            for case, *tensors in moved:
                try:
                    case.probe(tensors[which - 1], case.name)
                except (RuntimeError, TypeError, NotImplementedError) as error:
                    results[case.name] = Exactness(case.name, "wrong", f"{type(error).__name__}: {error}")
            reports.append({})
            for violation in machine.reports():
                value = str(violation.value) if violation.kind in ("low", "high") else "any"
                record = (violation.kind, violation.rows, value)
                reports[-1].setdefault(violation.message, []).append(record)
    for case, *_ in moved:
        clean, bad = (report.get(case.name, []) for report in reports)
        expected = case.expected()
        if case.name not in results:
            exact = not clean and sorted(bad) == sorted(expected)
            seen = f"{bad}" if exact else f"clean: {clean}; bad: {bad}, expected {expected}"
            results[case.name] = Exactness(case.name, "exact" if exact else "wrong", seen)
    return [dataclasses.replace(each, check=f"{each.check}, {kernels} kernels") for each in results.values()]


# ---------------------------------------------------------------------------------------------------------------------
# Times.


@dataclasses.dataclass(frozen=True)
class Contender:
    """Somebody's call, and what has to be set before its turn."""

    name: str
    call: Callable[[Tensor], object]
    prepare: Callable[[], object]


Turn = Callable[[int], float]  # repeats a contender so many times, and returns the seconds that a call took


def contenders_for(probe: contenders.Probe, machine: Machine) -> list[Contender]:
    """Everyone who has such a check."""

    def call_of(statement: str, **names: object) -> Callable[[Tensor], object]:
        call: Callable[[Tensor], object] = eval(f"lambda x: {statement}", {"torch": torch, **names})
        return call

    def raising(kernels: str) -> Callable[[], object]:
        return lambda: multiassert.configure("raise", kernels=kernels)

    found = [Contender(OURS, call_of(probe.ours, ours=multiassert), raising("auto"))]
    if has_fused_kernels(machine):
        found.append(Contender(OURS_TORCH, call_of(probe.ours, ours=multiassert), raising("torch")))
    # Where a device is simulated, SGLang takes it for one that its vendor's package serves.
    sglang = None if machine.simulator is not None else contenders.sglang_async_probe()
    if probe.sglang is not None and sglang is not None:
        found.append(Contender(SGLANG, call_of(probe.sglang, sglang=sglang), contenders.open_sglang_gate))
    found.append(Contender(PLAIN, call_of(probe.plain), timing.nothing))
    return found


def has_fused_kernels(machine: Machine) -> bool:
    """Whether our probes are one Triton kernel here."""
    return fused.available(backends.for_device_type(machine.device.type), machine.device)


def eager(machine: Machine, contender: Contender, tensors: Sequence[Tensor]) -> Turn:
    """Calls from Python, timed by the clock from an idle device to an idle device."""

    def clock() -> float:
        machine.finish()
        return time.perf_counter()

    names = {"call": contender.call, "tensors": tensors}
    timer = Timer("for x in tensors: call(x)", globals=names, timer=clock)
    return lambda repeats: timer.timeit(repeats).median / len(tensors)


def replayed(machine: Machine, contender: Contender, tensors: Sequence[Tensor]) -> Turn:
    """A graph of the calls, timed on the device by events."""
    machine.need("Event", "Stream")
    graph, stream = machine.new_graph(), machine.module.Stream()
    with machine.module.stream(stream):
        multiassert.prewarm(machine.device)
        contender.call(tensors[0])  # compiles what is to be compiled
        machine.finish()
        with machine.module.graph(graph, stream=stream):
            for tensor in tensors:
                contender.call(tensor)
    machine.finish()

    def turn(repeats: int) -> float:
        began = time.perf_counter()
        first, last = (machine.module.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(repeats):
            graph.replay()
        last.record()
        machine.finish()
        if machine.simulator is not None:  # its events tell no time
            return (time.perf_counter() - began) / repeats / len(tensors)
        return float(first.elapsed_time(last)) / 1000 / repeats / len(tensors)

    return turn


Way = Callable[[Machine, Contender, Sequence[Tensor]], Turn]


def race(
    machine: Machine, way: Way, racing: Sequence[Contender], tensors: Sequence[Tensor], effort: timing.Effort
) -> timing.Race:
    """Time the contenders in turns, as `benchmarks.timing` does, with the device's own clock."""
    turns: dict[str, Turn] = {}
    repeats: dict[str, int] = {}
    refusals: dict[str, str] = {}
    prepare = {contender.name: contender.prepare for contender in racing}
    for contender in racing:
        contender.prepare()
        try:
            turn = way(machine, contender, tensors)
            turn(1)
            once = turn(1) * len(tensors)
        except NotHere:
            raise
        except Exception as error:  # what somebody else's kernel raises for a dtype can be anything
            refusals[contender.name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            continue
        turns[contender.name] = turn
        repeats[contender.name] = max(1, round(effort.seconds_a_turn / max(once, 1e-7)))
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    order = list(turns)
    began = time.monotonic()
    for number in range(effort.rounds):
        if number >= timing.FEWEST_ROUNDS and time.monotonic() - began > effort.seconds_a_row:
            break
        random.shuffle(order)
        for name in order:
            prepare[name]()
            seconds[name].append(turns[name](repeats[name]))
    return timing.Race(seconds, refusals)


def read_bandwidth(machine: Machine) -> Spread:
    """Bytes a second that a large reduction reads, the quickest of two: the limit for a probe."""
    count = 2**18 if machine.simulator is not None or machine.device.type == "cpu" else 2**28
    large = torch.ones(count, device=machine.device)
    found = []
    for name, call in (("sum", torch.sum), ("amax", torch.amax)):
        turn = eager(machine, Contender(name, call, timing.nothing), [large])
        turn(2)
        found.append(Spread.of(numpy.array([large.nbytes / turn(4) for _ in range(7)])))
    return max(found, key=lambda spread: spread.median)


# ---------------------------------------------------------------------------------------------------------------------
# Rows.


@dataclasses.dataclass(frozen=True)
class Row:
    """One probe on one dtype and shape, one way: what was measured, or why not."""

    probe: str
    dtype: str
    shape: tuple[int, ...]
    way: str
    microseconds: dict[str, Spread]
    ratios: dict[str, Spread]  # ours to each other contender
    bandwidth_share: Spread | None
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class Subject:
    """What a row is about."""

    probe: contenders.Probe
    dtype: torch.dtype
    shape: tuple[int, ...]

    def tensors(self, device: torch.device) -> list[Tensor]:
        """Tensors that pass the probe, enough of them that a large one is not in a cache when its turn comes."""
        size = math.prod(self.shape) * self.dtype.itemsize
        count = min(max(math.ceil(READ_AT_LEAST / size), FEWEST_TENSORS), MOST_TENSORS)
        if self.dtype.is_floating_point:
            first = torch.rand(self.shape, device=device).to(self.dtype)
        else:
            first = (torch.arange(math.prod(self.shape)).reshape(self.shape) * PAGE).to(self.dtype).to(device)
        return [first, *(first.clone() for _ in range(count - 1))]


def subjects(quick: bool) -> list[Subject]:
    """The rows in the order in which they are measured: what is asked for most comes first."""
    nan, bounds, pages = (
        next(probe for probe in contenders.PROBES if probe.name == name)
        for name in ("nan", "out of bounds", f"page aligned, {PAGE}")
    )
    if quick:
        return [
            Subject(nan, torch.bfloat16, (1, 4096)),
            Subject(nan, torch.float32, (64, 4096)),
            Subject(nan, torch.float8_e4m3fn, (8, 4096)),
            Subject(bounds, torch.int64, (64,)),
        ]
    found = [
        Subject(nan, dtype, (rows, columns))
        for columns in (VOCABULARY, 32768)
        for dtype in FLOATS
        for rows in (64, 1, 256, 8)
    ]
    few = [Subject(bounds, torch.int64, shape) for shape in ((64,), (1,), (256,), (64, 5), (2048,))]
    few += [Subject(bounds, torch.int32, (64,)), Subject(pages, torch.int64, (64,))]
    return found[:4] + few + found[4:]


def measure(
    machine: Machine, chosen: Sequence[Subject], effort: timing.Effort, ends: float
) -> tuple[Spread, list[Row]]:
    """The read bandwidth, and the rows for which there is time."""
    bandwidth = read_bandwidth(machine)
    rows = []
    for subject in chosen:
        for name, way in (("eager", eager), ("replayed", replayed)):
            about = (subject.probe.name, name_of(subject.dtype), subject.shape, name)
            if ends - time.monotonic() < (0 if effort.quick else SECONDS_A_ROW):
                rows.append(Row(*about, {}, {}, None, [OUT_OF_TIME]))
                continue
            try:
                tensors = subject.tensors(machine.device)
                raced = race(machine, way, contenders_for(subject.probe, machine), tensors, effort)
            except (NotHere, RuntimeError, NotImplementedError) as reason:
                rows.append(Row(*about, {}, {}, None, [str(reason)]))
                continue
            finally:
                multiassert.configure("off")
                contenders.close_sglang_gate()
            rows.append(_row(about, raced, tensors[0].nbytes, bandwidth))
    return bandwidth, rows


def _row(about: tuple[str, str, tuple[int, ...], str], raced: timing.Race, size: int, bandwidth: Spread) -> Row:
    microseconds = {name: spread for name in raced.seconds if (spread := raced.time(name)) is not None}
    others = [name for name in raced.seconds if name != OURS]
    ratios = {name: ratio for name in others if (ratio := raced.ratio(OURS, name)) is not None}
    share = None
    if about[-1] == "replayed" and OURS in raced.seconds:
        share = Spread.of(size / numpy.array(raced.seconds[OURS]) / bandwidth.median)
    return Row(*about, microseconds, ratios, share, [f"{name}: {why}" for name, why in raced.refusals.items()])


def table_of(rows: Sequence[Row], title: str) -> Table:
    """The rows as a table, in which only the contenders that took part have columns."""
    names = [name for name in (OURS, OURS_TORCH, SGLANG, PLAIN) if any(name in row.microseconds for row in rows)]
    table = Table(title=escape(title), title_justify="left")
    for heading in ("probe", "dtype", "shape", "way"):
        table.add_column(heading, no_wrap=heading != "probe")
    for name in names:
        table.add_column(f"{name}, us", justify="right")
    table.add_column("of bandwidth", justify="right")
    for name in names[1:]:
        table.add_column(f"{OURS} / {name}", justify="right")
    for row in rows:
        cells = [row.probe, row.dtype, "x".join(map(str, row.shape)), row.way]
        cells += [_microseconds(row.microseconds.get(name)) for name in names]
        cells.append("-" if row.bandwidth_share is None else f"{row.bandwidth_share.median:.0%}")
        cells += [str(row.ratios.get(name, "-")) for name in names[1:]]
        table.add_row(*map(escape, cells), end_section=row.way == "replayed")
    return table


def _microseconds(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:,.1f} ({spread.low:,.1f} to {spread.high:,.1f})"


def show_exactness(results: Sequence[Exactness], console: Console) -> bool:
    """Print what is not exact, and return whether anything is not."""
    wrong = [each for each in results if each.result == "wrong"]
    for each in results:
        if each.result != "exact":
            console.print(escape(f"{each.result.upper()}: {each.check}: {each.seen}"), soft_wrap=True)
    exact = sum(each.result == "exact" for each in results)
    console.print(f"Exactness: {exact} of {len(results)} cases are exact, {len(wrong)} are wrong.", soft_wrap=True)
    return bool(wrong)


def show_notes(rows: Sequence[Row], console: Console) -> None:
    """Print why there are gaps in the table."""
    late = sum(OUT_OF_TIME in row.notes for row in rows)
    if late:
        console.print(f"{late} of {len(rows)} rows are empty: out of time; a longer --budget has them", soft_wrap=True)
    notes = [
        f"{row.probe}, {row.dtype}, {row.way}: {note}" for row in rows for note in row.notes if note != OUT_OF_TIME
    ]
    for note in dict.fromkeys(notes):
        console.print(escape(note), soft_wrap=True)


def main(arguments: Sequence[str]) -> int:
    """Check, measure, and print the table last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=gpu_check.PLATFORMS, help="default: that of the accelerator torch finds")
    parser.add_argument("--simulate", action="store_true", help="on a simulated npu, musa or generic device")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller shapes, fewer rounds")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the numbers to FILE too")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, metavar="SECONDS", help="default: %(default)s")
    options = parser.parse_args(arguments)
    ends = time.monotonic() + options.budget
    console = Console(highlight=False)
    if not console.is_terminal:  # wide enough for a row in a line
        console = Console(highlight=False, width=220)
    try:
        machine = gpu_check.set_up(options.platform or gpu_check.default_platform(), options.simulate)
    except (NotHere, ValueError, RuntimeError) as reason:
        print(reason, file=sys.stderr)
        return 2
    kernels = ("auto", "torch") if has_fused_kernels(machine) else ("torch",)
    exactness = [each for name in kernels for each in check_exactness(machine, options.quick, name)]
    is_wrong = show_exactness(exactness, console)
    effort = QUICK_EFFORT if options.quick else EFFORT
    bandwidth, rows = measure(machine, subjects(options.quick), effort, ends)
    title = heading(machine, bandwidth)
    if options.json:
        written = as_json(machine, options.quick, exactness, bandwidth, rows)
        options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    show_notes(rows, console)
    console.print(table_of(rows, title))
    return int(is_wrong)


def heading(machine: Machine, bandwidth: Spread) -> str:
    """What the times are of."""
    kernels = "one Triton kernel a probe" if has_fused_kernels(machine) else "torch's kernels"
    measured = (
        f"{gpu_check.versions(machine)}\nA large reduction reads {bandwidth.median / 1e9:.0f} GB/s; ours: {kernels}"
    )
    return f"{NO_TIMES}\n{measured}" if machine.simulator is not None else measured


def as_json(
    machine: Machine, quick: bool, exactness: Sequence[Exactness], bandwidth: Spread, rows: Sequence[Row]
) -> dict[str, Any]:
    """All that is known, for another program."""
    return {
        "platform": machine.platform,
        "simulated": machine.simulator is not None,
        "times_mean_something": machine.simulator is None,
        "quick": quick,
        "environment": {**environment.describe(), "device": gpu_check.versions(machine)},
        "fused_kernels": has_fused_kernels(machine),
        "exactness": [dataclasses.asdict(each) for each in exactness],
        "bytes_per_second": dataclasses.asdict(bandwidth),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
