"""Every probe, on every dtype and layout, in every mechanism that a CPU tensor can take, against plain Python.

Tensors are made of bit patterns, with a bias to those that are special; `reference.py` decodes the same patterns and
says what must be found: the kinds, the rows, the worst value, the bound. No false alarm, no silence, no exception that
is not documented.

MULTIASSERT_TEST_EXAMPLES multiplies the number of examples; 1, the default, takes less than a minute.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import multiassert
from multiassert import AsyncAssertionError, Violation, glance
from tests import reference
from tests.reference import FLOAT32, ComplexFormat, Finding, FloatFormat, Format, IntegerFormat, Real, Value

DTYPES = {getattr(torch, name): made_of for name, made_of in reference.FORMATS.items()}
DTYPES[torch.bool] = IntegerFormat(1, signed=False)

INTEGERS = [dtype for dtype, made_of in DTYPES.items() if isinstance(made_of, IntegerFormat)]
FLOATS = [dtype for dtype, made_of in DTYPES.items() if isinstance(made_of, FloatFormat)]
COMPLEX = [dtype for dtype, made_of in DTYPES.items() if isinstance(made_of, ComplexFormat)]
FP8 = [dtype for dtype in FLOATS if dtype.itemsize == 1]
LOGITS = [dtype for dtype in FLOATS if dtype.itemsize > 1]
BOUND_DTYPES = [dtype for dtype in INTEGERS if dtype is not torch.uint64]
NUM_VALID_DTYPES = [torch.int64, torch.int32, torch.int16, torch.uint8]

STATE_ROWS = 256  # more rows than that share what the device remembers
MESSAGE = "the message"
WORDS = {
    "nan": "NaN detected!",
    "inf": "Inf detected!",
    "low": "index < ",
    "high": "index >= ",
    "misaligned": "page-misaligned ",
    "range": "value outside [",
    "cond": "",
}

settings.register_profile(
    "exactness",
    deadline=None,  # a busy machine is no failure
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def examples(count: int) -> settings:
    """Settings for so many examples of each dtype, times MULTIASSERT_TEST_EXAMPLES."""
    factor = float(os.environ.get("MULTIASSERT_TEST_EXAMPLES", "1"))
    return settings(settings.get_profile("exactness"), max_examples=max(1, round(count * factor)))


def each(dtypes: Sequence[torch.dtype]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dtype", dtypes, ids=name_of)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.fixture(autouse=True, scope="module")
def quiet_log() -> Iterator[None]:
    logger = logging.getLogger("multiassert")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads that wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors: a shape, a layout, and the bit patterns in the memory below it.


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the elements of a shape lie in memory.

    Dimensions are stored in `order`. A dimension has `skipped` elements before its first one and steps of `steps`, or
    one element for all of it if it is `expanded`. `offset` elements come before everything.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    skipped: tuple[int, ...]
    steps: tuple[int, ...]
    expanded: tuple[bool, ...]
    offset: int

    def stored_shape(self) -> list[int]:
        per_dimension = zip(self.shape, self.skipped, self.steps, self.expanded, strict=True)
        sizes = [1 if expanded else skipped + size * step for size, skipped, step, expanded in per_dimension]
        return [sizes[dimension] for dimension in self.order]

    def length(self) -> int:
        """How many elements the memory has to hold."""
        return self.offset + max(1, math.prod(self.stored_shape()))

    def view(self, memory: Tensor) -> Tensor:
        stored = self.stored_shape()
        view = memory[self.offset : self.offset + math.prod(stored)].view(stored)
        view = view.permute([self.order.index(dimension) for dimension in range(len(self.shape))])
        for dimension, (size, skipped, step) in enumerate(zip(self.shape, self.skipped, self.steps, strict=True)):
            if not self.expanded[dimension]:
                view = view.movedim(dimension, 0)[skipped : skipped + size * step : step].movedim(0, dimension)
        return view.expand(self.shape)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A tensor, and what is in it as Python numbers."""

    tensor: Tensor
    memory: Tensor
    layout: Layout
    patterns: tuple[int, ...]

    @property
    def format(self) -> Format:
        return DTYPES[self.tensor.dtype]

    def rows(self, shape: tuple[int, ...] | None = None) -> list[list[Any]]:
        """The values of each row, where the tensor is broadcast to `shape`."""
        shape = self.layout.shape if shape is None else shape
        positions = self.layout.view(torch.arange(self.layout.length())).expand(shape)
        if not positions.numel():
            return [[] for _ in range(shape[0])]
        decode = functools.cache(self.format.decode)
        by_row = positions.reshape(shape[0] if shape else 1, -1).tolist()
        return [[decode(self.patterns[position]) for position in row] for row in by_row]

    def numbers(self) -> list[Any]:
        """The values in memory, each once, NaN left out."""
        decoded: set[Any] = {self.format.decode(pattern) for pattern in {*self.patterns}}
        return sorted(number for number in decoded if not math.isnan(number))

    def fresh(self) -> Sample:
        """The same in other memory."""
        memory = self.memory.clone()
        return dataclasses.replace(self, memory=memory, tensor=self.layout.view(memory))

    def bits(self) -> Tensor:
        return self.memory.view(torch.uint8)

    def __repr__(self) -> str:
        shown = ", ".join(map(hex, self.patterns[:40])) + (", ..." if len(self.patterns) > 40 else "")
        return f"Sample({self.tensor.dtype}, {self.layout}, patterns {shown})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would write all fields


def sample_of(dtype: torch.dtype, patterns: Sequence[int], layout: Layout | None = None) -> Sample:
    """A tensor of these bit patterns; one row for each if no layout is given."""
    layout = layout or Layout((len(patterns),), (0,), (0,), (1,), (False,), 0)
    data = b"".join(pattern.to_bytes(dtype.itemsize, "little") for pattern in patterns)
    memory = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone().view(dtype)
    return Sample(layout.view(memory), memory, layout, tuple(patterns))


FEW_ROWS = st.lists(st.sampled_from([1, 2, 3, 5]), max_size=3)
NO_ELEMENT = st.permutations([0, 1, 3]).map(lambda sizes: sizes[:2])
MANY_ROWS = st.tuples(st.sampled_from([256, 257, 511, 512, 1000]), st.lists(st.sampled_from([1, 2]), max_size=2)).map(
    lambda pair: [pair[0], *pair[1]]
)
SHAPES = st.one_of(FEW_ROWS, FEW_ROWS, FEW_ROWS, FEW_ROWS, MANY_ROWS, NO_ELEMENT).map(tuple)
SMALL_SHAPES = st.one_of(FEW_ROWS, FEW_ROWS, FEW_ROWS, NO_ELEMENT).map(tuple)


@st.composite
def layouts(draw: st.DrawFn, shapes: st.SearchStrategy[tuple[int, ...]], may_expand: bool = True) -> Layout:
    """Contiguous, with an offset, strided, transposed, expanded, or several of these."""
    shape = draw(shapes)
    dimensions = range(len(shape))
    name = draw(st.sampled_from(["contiguous", "offset", "strided", "transposed", "expanded", "all"]))

    def per_dimension(plain: Any, other: st.SearchStrategy[Any], names: tuple[str, ...]) -> tuple[Any, ...]:
        return tuple(draw(other) if name in names else plain for _ in dimensions)

    return Layout(
        shape=shape,
        order=tuple(draw(st.permutations(dimensions)) if name in ("transposed", "all") else dimensions),
        skipped=per_dimension(0, st.integers(0, 2), ("strided", "all")),
        steps=per_dimension(1, st.integers(1, 2), ("strided", "all")),
        expanded=per_dimension(False, st.booleans(), ("expanded", "all") if may_expand else ()),
        offset=draw(st.integers(1, 3)) if name in ("offset", "all") else 0,
    )


def patterns_of(dtype: torch.dtype) -> st.SearchStrategy[int]:
    """Bit patterns: special ones, any, and one in three NaN or Inf, where there are these."""
    made_of = DTYPES[dtype]
    if dtype is torch.bool:
        return st.integers(0, 1)
    special, finite = made_of.special_patterns(), finite_patterns(made_of)
    not_finite = [pattern for pattern in special if pattern not in finite]
    wild = [st.sampled_from(not_finite)] if not_finite else []
    return st.one_of(st.sampled_from(special), st.integers(0, 2**made_of.bits - 1), *wild)


def finite_patterns(made_of: Format) -> list[int]:
    numbers = {pattern: made_of.decode(pattern) for pattern in made_of.special_patterns()}
    return [p for p, number in numbers.items() if all(map(math.isfinite, reference.parts(number)))]


@st.composite
def samples(
    draw: st.DrawFn,
    dtype: torch.dtype,
    shapes: st.SearchStrategy[tuple[int, ...]] = SHAPES,
    patterns: st.SearchStrategy[int] | None = None,
    may_expand: bool = True,
) -> Sample:
    """A tensor: a few patterns repeated, and some more planted at single places."""
    layout = draw(layouts(shapes, may_expand))
    if patterns is None:
        # Where nothing may be found, everything has to be finite.
        tame = st.sampled_from(finite_patterns(DTYPES[dtype]))
        patterns = draw(st.sampled_from([patterns_of(dtype), patterns_of(dtype), tame]))
    length = layout.length()
    repeated = draw(st.lists(patterns, min_size=1, max_size=3))
    stored = [repeated[position % len(repeated)] for position in range(length)]
    for position, pattern in draw(st.dictionaries(st.integers(0, length - 1), patterns, max_size=4)).items():
        stored[position] = pattern
    return sample_of(dtype, stored, layout)


def broadcastable_to(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes that broadcast to `shape`: any sizes replaced by 1, any leading dimensions left out."""
    sizes = st.tuples(*(st.sampled_from([size, 1]) for size in shape))
    return st.tuples(sizes, st.integers(0, len(shape))).map(lambda pair: pair[0][pair[1] :])


@dataclasses.dataclass(frozen=True)
class Counted:
    """Which elements count: the keywords of a probe, and the same in Python."""

    where: Sample | None = None
    num_valid: int | None = None
    num_valid_dtype: torch.dtype | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        keywords: dict[str, Any] = {}
        if self.where is not None:
            keywords["where"] = self.where.tensor
        if self.num_valid is not None:
            dtype = self.num_valid_dtype
            keywords["num_valid"] = self.num_valid if dtype is None else torch.tensor(self.num_valid, dtype=dtype)
        return keywords

    def of(self, sample: Sample) -> list[list[Any]]:
        """The rows of `sample`, with None for what does not count."""
        rows = sample.rows()
        if self.where is not None:
            masks = self.where.rows(sample.layout.shape)
            rows = [[v if m else None for v, m in zip(*pair, strict=True)] for pair in zip(rows, masks, strict=True)]
        if self.num_valid is not None:
            rows = [row if index < self.num_valid else [None] * len(row) for index, row in enumerate(rows)]
        return rows


@st.composite
def countings(draw: st.DrawFn, sample: Sample) -> Counted:
    shape = sample.layout.shape
    has_where, has_num_valid = draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (0, 1), (1, 1)]))
    where = draw(samples(torch.bool, broadcastable_to(shape))) if has_where else None
    if not has_num_valid:
        return Counted(where)
    rows = shape[0] if shape else 1
    num_valid = draw(st.one_of(st.sampled_from([0, rows]), st.integers(0, rows)))
    fitting = [dtype for dtype in NUM_VALID_DTYPES if num_valid <= torch.iinfo(dtype).max]
    return Counted(where, num_valid, draw(st.sampled_from([None, *fitting])))


# ---------------------------------------------------------------------------------------------------------------------
# Bounds.


# At the ends of every integer dtype, and past those of float64.
POWERS = (0, 7, 8, 15, 16, 31, 32, 63, 64, 70, 1100)
EXTREMES = [sign * 2**power + near for power in POWERS for sign in (-1, 1) for near in (-1, 0, 1)]


def integers_near(sample: Sample) -> st.SearchStrategy[int]:
    """The values of a tensor and their neighbours, the extremes of every dtype and beyond, anything."""
    near = sorted({number + step for number in sample.numbers() for step in (-2, -1, 0, 1, 2)})
    return st.one_of(
        st.sampled_from(near), st.sampled_from(near), st.sampled_from(EXTREMES), st.integers(-(2**70), 2**70)
    )


def floats_near(sample: Sample, made_of: FloatFormat) -> st.SearchStrategy[Real]:
    """The values of a tensor, their neighbours as float64 and in the dtype, half way to these, extremes, anything."""
    extremes: list[Real] = [*EXTREMES, math.inf, -math.inf, made_of.largest, -made_of.largest, 1e300, -1e300, 0.1]
    near: set[Real] = {0}
    for number in sample.numbers():
        if math.isinf(number):
            continue
        step = math.ulp(number) * 2.0 ** (52 - made_of.mantissa_bits)
        near |= {number, number - step, number + step, number - step / 2, number + step / 2}
        near |= {math.nextafter(number, math.inf), math.nextafter(number, -math.inf)}
        near |= {math.nextafter(number + step / 2, to) for to in (math.inf, -math.inf)}
        if number == int(number) and abs(number) < 2**62:
            near |= {int(number) - 1, int(number) + 1, int(number + step / 2) - 1, int(number + step / 2) + 1}
    numbers = st.sampled_from(sorted(near))
    return st.one_of(numbers, numbers, numbers, st.sampled_from(extremes), st.floats(allow_nan=False))


# ---------------------------------------------------------------------------------------------------------------------
# Mechanisms.


def take_violations() -> list[Violation]:
    """Drain, whatever the mode of what is found."""
    try:
        return multiassert.drain()
    except AsyncAssertionError as error:
        return [*error.violations, *multiassert.drain()]


def immediate(call: Callable[[], object]) -> Sequence[Violation]:
    try:
        call()
    except AsyncAssertionError as error:
        return error.violations
    return ()


def deferred_raise(call: Callable[[], object]) -> Sequence[Violation]:
    try:
        call()  # raises already if the state is due to be looked at
        returned = multiassert.drain()
    except AsyncAssertionError as error:
        return error.violations
    assert returned == []
    return ()


def deferred_warn(call: Callable[[], object]) -> Sequence[Violation]:
    call()
    return multiassert.drain()


RECORDING = {"auto": immediate, "raise": deferred_raise, "warn": deferred_warn}


def check_all(call: Callable[[Tensor], object], sample: Sample, expected: list[Finding]) -> None:
    """Run a probe in every mechanism: what is found must be what is expected, and the tensor must not change."""
    bits = sample.bits().clone()
    for mode in RECORDING:
        check_recording(mode, call, sample, expected)
        assert torch.equal(sample.bits(), bits), f"mode {mode} changed the tensor"
    check_trap(call, sample, expected)
    assert torch.equal(sample.bits(), bits), "mode trap changed the tensor"


def check_recording(mode: str, call: Callable[[Tensor], object], sample: Sample, expected: list[Finding]) -> None:
    take_violations()
    with multiassert.override(mode):
        violations = RECORDING[mode](lambda: call(sample.tensor))
    check_records(mode, violations, sample, expected)
    if not expected:
        # A first look at the whole tensor may have said so; the exact predicate has to say the same.
        with multiassert.override(mode), mock.patch.object(glance, "is_clean", return_value=False):
            check_records(mode, RECORDING[mode](lambda: call(sample.tensor)), sample, [])


def check_records(mode: str, violations: Sequence[Violation], sample: Sample, expected: list[Finding]) -> None:
    found = [violation.kind for violation in violations]
    assert found == [finding.kind for finding in expected], f"mode {mode} found {violations}, not {expected}"
    for violation, finding in zip(violations, expected, strict=True):
        shape = sample.layout.shape
        assert violation.shape == shape
        assert violation.dtype == sample.tensor.dtype
        assert violation.message == MESSAGE
        assert violation.bound == finding.bound, f"mode {mode}: {violation}"
        is_same = violation.value == finding.value or (math.isnan(violation.value) and math.isnan(finding.value))
        assert is_same, f"mode {mode}: value {violation.value}, not {finding.value}"
        assert isinstance(violation.value, type(finding.value))
        if not shape:
            assert violation.rows == ()
        elif finding.rows is not None and any(isinstance(row, range) for row in violation.rows):
            assert mode != "auto"
            assert shape[0] > STATE_ROWS
            check_ranges(violation.rows, finding.rows, shape[0])
        elif finding.rows is not None:
            assert violation.rows == tuple(finding.rows), f"mode {mode}"


def check_ranges(ranges: Sequence[int | range], bad: list[int], rows: int) -> None:
    """Neighbouring rows share a cell: all the bad ones are in a range, and no range is without a bad one."""
    reported: list[int] = []
    for found in ranges:
        assert isinstance(found, range)
        assert found.step == 1
        assert 0 < len(found) <= math.ceil(rows / STATE_ROWS)
        assert not {*found}.isdisjoint(bad), f"no bad row in {found}"
        reported += found
    assert reported == sorted({*reported})
    assert {*bad} <= {*reported} <= {*range(rows)}


def check_trap(call: Callable[[Tensor], object], sample: Sample, expected: list[Finding]) -> None:
    """torch._assert_async raises RuntimeError with a message that begins with the first finding's words."""
    trap = None
    with multiassert.override("trap"):
        try:
            call(sample.tensor)
        except RuntimeError as error:
            trap = error
    assert (trap is not None) == bool(expected), f"mode trap: {trap!r}, not {expected}"
    if trap is not None:
        assert type(trap) is RuntimeError, "mode trap must leave it to torch"
        assert str(trap).startswith(WORDS[expected[0].kind])
        assert str(trap).endswith(MESSAGE) or len(str(trap)) == 254, "only a long headline may cut the message"
    assert multiassert.drain() == [], "mode trap leaves nothing in the state"


# ---------------------------------------------------------------------------------------------------------------------
# The properties.


@each([*DTYPES])
@examples(30)
@given(data=st.data())
def test_nan(dtype: torch.dtype, data: st.DataObject) -> None:
    sample = data.draw(samples(dtype))
    counted = data.draw(countings(sample))
    expected = reference.nan(counted.of(sample))
    check_all(lambda x: multiassert.maybe_detect_nan(x, MESSAGE, **counted.keywords), sample, expected)
    with multiassert.override("raise"):
        multiassert.maybe_warn_nan(sample.tensor, MESSAGE)
    check_records("warn", multiassert.drain(), sample, reference.nan(sample.rows()))


@each([*DTYPES])
@examples(30)
@given(data=st.data(), allow_neginf=st.booleans())
def test_inf(dtype: torch.dtype, data: st.DataObject, allow_neginf: bool) -> None:
    sample = data.draw(samples(dtype))
    counted = data.draw(countings(sample))
    expected = reference.inf(counted.of(sample), allow_neginf)

    def probe(x: Tensor) -> None:
        multiassert.maybe_detect_inf(x, MESSAGE, allow_neginf=allow_neginf, **counted.keywords)

    check_all(probe, sample, expected)


@each(INTEGERS)
@examples(70)
@given(data=st.data())
def test_out_of_bounds(dtype: torch.dtype, data: st.DataObject) -> None:
    sample = data.draw(samples(dtype))
    counted = data.draw(countings(sample))
    low, high = sorted(data.draw(st.tuples(integers_near(sample), integers_near(sample)), "bounds"))
    sentinel = data.draw(sentinels(sample, (low, high)), "sentinel")
    expected = reference.out_of_bounds(counted.of(sample), low, high, sentinel)

    def probe(x: Tensor) -> None:
        multiassert.maybe_detect_oob(x, low, high, MESSAGE, sentinel=sentinel, **counted.keywords)

    check_all(probe, sample, expected)


def sentinels(sample: Sample, bounds: tuple[int, int] = (0, 0)) -> st.SearchStrategy[int | None]:
    """None, the values just outside of the bounds, values of the tensor and anything else."""
    return st.one_of(st.none(), st.sampled_from([bounds[0] - 1, bounds[1], -1]), integers_near(sample))


@dataclasses.dataclass(frozen=True)
class Bound:
    """A bound as a probe takes it, and as numbers."""

    given: int | Tensor
    numbers: int | list[list[int | None]]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        shown = self.given if isinstance(self.given, int) else f"{self.given.dtype} {self.numbers}"
        printer.text(f"Bound({shown})"[:500])


@st.composite
def bounds(draw: st.DrawFn, indices: Sample, as_tensor: bool) -> Bound:
    if not as_tensor:
        number = draw(integers_near(indices))
        return Bound(number, number)
    dtype = draw(st.sampled_from(BOUND_DTYPES))
    made_of = DTYPES[dtype]
    assert isinstance(made_of, IntegerFormat)
    near = {number + step for number in indices.numbers() for step in (-1, 0, 1)}
    fitting = [number % 2**made_of.bits for number in near if made_of.lowest <= number <= made_of.highest]
    patterns = st.one_of(st.sampled_from(sorted(fitting)), patterns_of(dtype)) if fitting else patterns_of(dtype)
    sample = draw(samples(dtype, broadcastable_to(indices.layout.shape), patterns))
    return Bound(sample.tensor, sample.rows(indices.layout.shape))


@each(INTEGERS)
@examples(60)
@given(data=st.data(), tensors=st.sampled_from([(True, True), (True, False), (False, True)]))
def test_out_of_tensor_bounds(dtype: torch.dtype, data: st.DataObject, tensors: tuple[bool, bool]) -> None:
    sample = data.draw(samples(dtype))
    counted = data.draw(countings(sample))
    low, high = (data.draw(bounds(sample, as_tensor)) for as_tensor in tensors)
    sentinel = data.draw(sentinels(sample), "sentinel")
    expected = reference.out_of_bounds(counted.of(sample), low.numbers, high.numbers, sentinel)

    def probe(x: Tensor) -> None:
        multiassert.maybe_detect_oob(x, low.given, high.given, MESSAGE, sentinel=sentinel, **counted.keywords)

    check_all(probe, sample, as_told_with_tensor_bounds(expected, dtype))


def as_told_with_tensor_bounds(findings: list[Finding], dtype: torch.dtype) -> list[Finding]:
    """As documented: with bounds that are tensors, the least 64-bit value above one is told as the next, and so on."""
    if dtype.itemsize < 8:
        return findings
    ends = torch.iinfo(dtype)
    told = {"low": lambda value: min(value, ends.max - 1), "high": lambda value: max(value, ends.min + 1)}
    return [finding._replace(value=told[finding.kind](finding.value)) for finding in findings]


PAGE_SIZES = st.one_of(
    st.integers(0, 20),
    st.sampled_from([64, 127, 128, 255, 256, 1000, 2**15, 2**16 + 1, 2**31, 2**32 - 1, 2**62, 2**62 + 1, 2**63 - 1]),
)


@each(INTEGERS)
@examples(50)
@given(data=st.data(), page_size=PAGE_SIZES)
def test_page_aligned(dtype: torch.dtype, data: st.DataObject, page_size: int) -> None:
    sample = data.draw(samples(dtype))
    counted = data.draw(countings(sample))
    sentinel = data.draw(sentinels(sample), "sentinel")
    expected = reference.page_misaligned(counted.of(sample), page_size, sentinel)

    def probe(x: Tensor) -> None:
        multiassert.maybe_detect_page_aligned(x, page_size, MESSAGE, sentinel=sentinel, **counted.keywords)

    check_all(probe, sample, expected)


def compared_as(dtype: torch.dtype) -> FloatFormat | None:
    """The format that bounds are rounded to, of fp8 float32; None for integers, which are compared exactly."""
    made_of = FLOAT32 if dtype in FP8 else DTYPES[dtype]
    return made_of if isinstance(made_of, FloatFormat) else None


@each([*INTEGERS, *FLOATS])
@examples(60)
@given(data=st.data())
def test_closed_range(dtype: torch.dtype, data: st.DataObject) -> None:
    sample = data.draw(samples(dtype))
    counted = data.draw(countings(sample))
    rounded_to = compared_as(dtype)
    if rounded_to is None:
        halves = integers_near(sample).filter(lambda x: abs(x) < 2**80).map(lambda x: x + 0.5)
        bound = st.one_of(integers_near(sample), halves, st.floats(allow_nan=False))
    else:
        bound = floats_near(sample, rounded_to)
    low, high = sorted(data.draw(st.tuples(bound, bound), "bounds"))
    expected = reference.outside_closed_range(counted.of(sample), low, high, rounded_to)

    def probe(x: Tensor) -> None:
        multiassert.maybe_detect_in_closed_range(x, low, high, MESSAGE, **counted.keywords)

    check_all(probe, sample, expected)


@each([*DTYPES])
@examples(10)
@given(data=st.data())
def test_condition(dtype: torch.dtype, data: st.DataObject) -> None:
    sample = data.draw(samples(dtype, st.sampled_from([(), (1,), (1, 1)])))
    check_all(lambda x: multiassert.maybe_assert_async(x, MESSAGE), sample, reference.condition(sample.rows()))


@each([*INTEGERS, *FLOATS])
@examples(30)
@given(data=st.data())
def test_sum(dtype: torch.dtype, data: st.DataObject) -> None:
    made_of, rounded_to = DTYPES[dtype], compared_as(dtype)
    shapes, patterns = SMALL_SHAPES, patterns_of(dtype)
    if rounded_to is not None:
        # Small integers, so that every partial sum is exact; or one value, which may be anything.
        if data.draw(st.booleans(), "one value"):
            shapes = st.sampled_from([(), (1,), (1, 1)])
        else:
            special = [made_of.decode(pattern) for pattern in made_of.special_patterns()]
            exact = [pattern for pattern, x in zip(made_of.special_patterns(), special, strict=True) if is_tame(x)]
            patterns = st.sampled_from(exact)
    sample = data.draw(samples(dtype, shapes, patterns))
    rows = sample.rows()
    total = sum(value for row in rows for value in row)
    near: list[Real] = [0, 0.5, math.inf, -math.inf, *EXTREMES]
    if math.isfinite(total):
        near += [total, total, total, total + 1, total - 1]
    expected_sum = data.draw(st.sampled_from(near), "expected")
    expected = reference.sum_differs(rows, expected_sum, rounded_to) if sample.tensor.numel() else []
    check_all(lambda x: multiassert.maybe_assert_sum(x, expected_sum, MESSAGE), sample, expected)


def is_tame(number: Value) -> bool:
    return number in (0, 1, 2, -1) or number != number or abs(number) == math.inf


@each(INTEGERS)
@examples(50)
@given(data=st.data(), tensors=st.sampled_from([(False, False), (True, True), (True, False), (False, True)]))
def test_sanitize_oob(dtype: torch.dtype, data: st.DataObject, tensors: tuple[bool, bool]) -> None:
    sample = data.draw(samples(dtype))
    low, high = (data.draw(bounds(sample, as_tensor)) for as_tensor in tensors)
    if isinstance(low.numbers, int) and isinstance(high.numbers, int) and low.numbers > high.numbers:
        low, high = high, low
    fill = data.draw(st.one_of(st.sampled_from(sample.numbers()), integers_near(sample)), "fill")
    rows = sample.rows()
    if sample.tensor.numel() and not may_fill(sample, low, high, fill):
        with pytest.raises(ValueError, match="fill must"):
            multiassert.sanitize_oob(sample.tensor, low.given, high.given, MESSAGE, fill=fill)
        return
    safe = [
        [fill if reference.out_of_bounds([[value]], *ends) else value for value, *ends in zip(*lists, strict=True)]
        for lists in zip(rows, rows_of(low, rows), rows_of(high, rows), strict=True)
    ]
    results: list[Tensor] = []

    def probe(x: Tensor) -> None:
        results.append(multiassert.sanitize_oob(x, low.given, high.given, MESSAGE, fill=fill))

    probe(sample.tensor)
    expected = reference.out_of_bounds(rows, low.numbers, high.numbers)
    check_all(probe, sample, as_told_with_tensor_bounds(expected, dtype) if any(tensors) else expected)
    # Off, and deferred until drained; the other mechanisms return only where nothing was found.
    assert len(results) >= 2
    for result in results:
        assert result.dtype is dtype
        assert result.shape == sample.tensor.shape
        assert [[int(x) for x in row] for row in rows_in(result)] == safe


def may_fill(sample: Sample, low: Bound, high: Bound, fill: int) -> bool:
    made_of = sample.format
    assert isinstance(made_of, IntegerFormat)
    inside = True
    if isinstance(low.numbers, int) and isinstance(high.numbers, int):
        inside = low.numbers <= fill < high.numbers
    return inside and made_of.lowest <= fill <= made_of.highest


def rows_of(bound: Bound, rows: list[list[Any]]) -> list[list[Any]]:
    return [[bound.numbers] * len(row) for row in rows] if isinstance(bound.numbers, int) else bound.numbers


def rows_in(tensor: Tensor) -> list[list[Any]]:
    if not tensor.numel():
        return [[] for _ in range(tensor.shape[0])]
    listed: list[list[Any]] = tensor.reshape(tensor.shape[0] if tensor.ndim else 1, -1).tolist()
    return listed


@each(LOGITS)
@examples(40)
@given(data=st.data())
def test_sanitize_nan_logits(dtype: torch.dtype, data: st.DataObject) -> None:
    sample = data.draw(samples(dtype, may_expand=False))  # torch refuses to write to an expanded tensor
    made_of = sample.format
    assert isinstance(made_of, FloatFormat)
    expected = reference.nan(sample.rows())
    healed = healed_patterns(sample, made_of)

    def probe(x: Tensor) -> None:
        multiassert.sanitize_nan_logits(x, MESSAGE)

    for mode in ("off", *RECORDING):
        fresh = sample.fresh()
        if mode == "off":
            probe(fresh.tensor)
        else:
            check_recording(mode, probe, fresh, expected)
        if mode in ("off", "warn") or not expected:
            assert torch.equal(fresh.bits(), sample_of(dtype, healed).bits()), f"mode {mode} left {fresh.tensor}"
    check_trap(probe, sample.fresh(), expected)


def healed_patterns(sample: Sample, made_of: FloatFormat) -> list[int]:
    """What memory must hold after healing: what the view does not show stays as it is, bit by bit."""
    most = reference.rounded_by_torch(min(1e30, made_of.largest / 4), made_of)
    sign = 2 ** (made_of.bits - 1)
    largest = next(pattern for pattern in range(*search_range(most, made_of)) if made_of.decode(pattern) == most)
    shown = {*sample.layout.view(torch.arange(sample.layout.length())).flatten().tolist()}
    healed = [*sample.patterns]
    for position in shown:
        value = made_of.decode(healed[position])
        if not math.isfinite(value):
            healed[position] = largest if value == math.inf else largest | sign
    return healed


def search_range(number: float, made_of: FloatFormat) -> tuple[int, int]:
    """The one pattern of a positive normal number, as a range."""
    mantissa, exponent = math.frexp(number)
    pattern = exponent - 1 + made_of.bias << made_of.mantissa_bits
    pattern += round((2 * mantissa - 1) * 2**made_of.mantissa_bits)
    return pattern, pattern + 1


# ---------------------------------------------------------------------------------------------------------------------
# What must not depend on luck.


@each([*FLOATS, *COMPLEX])
def test_every_pattern_as_a_row(dtype: torch.dtype) -> None:
    """All 256 bytes of fp8, all 65536 patterns of 16 bits, the special ones of more: the rows found are those bad."""
    made_of = DTYPES[dtype]
    patterns = range(2**made_of.bits) if made_of.bits <= 16 else made_of.special_patterns()
    for start in range(0, len(patterns), STATE_ROWS):
        sample = sample_of(dtype, patterns[start : start + STATE_ROWS])
        rows = sample.rows()
        check_all(lambda x: multiassert.maybe_detect_nan(x, MESSAGE), sample, reference.nan(rows))
        for allow in (False, True):
            expected = reference.inf(rows, allow)
            call = functools.partial(multiassert.maybe_detect_inf, msg=MESSAGE, allow_neginf=allow)
            check_all(call, sample, expected)


@each([*FLOATS, *COMPLEX])
@pytest.mark.parametrize(
    ("shape", "rows"),
    [((), [0, 1, 2]), ((3, 1), [1]), ((2,), [0, 1, 2]), ((1, 2), [0, 1, 2]), ((3, 2), [1])],
    ids=str,
)
def test_a_mask_of_any_shape(dtype: torch.dtype, shape: tuple[int, ...], rows: list[int]) -> None:
    """NaN everywhere, and a mask that hides all of it, then all but one element or the row or column of one."""
    made_of = DTYPES[dtype]
    not_a_number = next(p for p in made_of.special_patterns() if reference.nan([[made_of.decode(p)]]))
    sample = sample_of(dtype, [not_a_number] * 6, Layout((3, 2), (0, 1), (0, 0), (1, 1), (False, False), 0))
    where = torch.zeros(shape, dtype=torch.bool)
    check_all(lambda x: multiassert.maybe_detect_nan(x, MESSAGE, where=where), sample, [])
    where.view(-1)[where.numel() // 2] = True
    expected = [Finding("nan", rows, math.nan, None)]
    check_all(lambda x: multiassert.maybe_detect_nan(x, MESSAGE, where=where), sample, expected)


def test_the_bytes_that_are_nan_and_inf_in_fp8() -> None:
    """The reference itself, against the tables of the format definitions."""
    nans, infs, largest = {}, {}, {}
    for dtype in FP8:
        made_of = DTYPES[dtype]
        assert isinstance(made_of, FloatFormat)
        numbers = [made_of.decode(byte) for byte in range(256)]
        largest[name_of(dtype)] = made_of.largest
        nans[name_of(dtype)] = {byte for byte, number in enumerate(numbers) if number != number}
        infs[name_of(dtype)] = {byte for byte, number in enumerate(numbers) if abs(number) == math.inf}
    assert nans == {
        "float8_e4m3fn": {0x7F, 0xFF},
        "float8_e5m2": {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF},
        "float8_e4m3fnuz": {0x80},
        "float8_e5m2fnuz": {0x80},
        "float8_e8m0fnu": {0xFF},
    }
    assert infs.pop("float8_e5m2") == {0x7C, 0xFC}
    assert {*map(frozenset, infs.values())} == {frozenset()}
    assert largest == {
        "float8_e4m3fn": 448.0,
        "float8_e5m2": 57344.0,
        "float8_e4m3fnuz": 240.0,
        "float8_e5m2fnuz": 57344.0,
        "float8_e8m0fnu": 2.0**127,
    }


@each(INTEGERS)
def test_every_pair_of_extreme_bounds(dtype: torch.dtype) -> None:
    """The values at both ends of a dtype and of int64, against all bounds at and beyond these ends."""
    made_of = DTYPES[dtype]
    assert isinstance(made_of, IntegerFormat)
    alone = [made_of.lowest, made_of.highest, made_of.highest - 1]
    every = [sample_of(dtype, [number % 2**made_of.bits]) for number in alone]
    together = sample_of(dtype, made_of.special_patterns())
    ends = {made_of.lowest, made_of.highest, -(2**63), 2**63 - 1, 0}
    for low, high in itertools.product(sorted(bounds_near(ends)), repeat=2):
        for call, reference_call in extreme_calls(low, high):
            check_recording("warn", call, together, reference_call(together))
            for sample in every:
                check_recording("auto", call, sample, reference_call(sample))


def bounds_near(ends: set[int]) -> set[int]:
    return {end + step for end in ends for step in (-1, 0, 1)} | {2**70, -(2**1100)}


def extreme_calls(low: int, high: int) -> list[tuple[Callable[[Tensor], None], Callable[[Sample], list[Finding]]]]:
    """The probes that take these bounds, as ints and as tensors where they fit, and the references for them."""

    def out_of(low_bound: int | Tensor, high_bound: int | Tensor) -> Callable[[Tensor], None]:
        return lambda x: multiassert.maybe_detect_oob(x, low_bound, high_bound, MESSAGE)

    def expected(low_bound: int | None, high_bound: int | None) -> Callable[[Sample], list[Finding]]:
        def findings(sample: Sample) -> list[Finding]:
            found = reference.out_of_bounds(sample.rows(), low, high)
            if low_bound is None or high_bound is None:
                found = as_told_with_tensor_bounds(found, sample.tensor.dtype)
            of_kind = {"low": low_bound, "high": high_bound}
            return [finding._replace(bound=of_kind[finding.kind]) for finding in found]

        return findings

    calls: list[tuple[Callable[[Tensor], None], Callable[[Sample], list[Finding]]]] = []
    if low <= high:
        calls.append((out_of(low, high), expected(low, high)))
        calls.append(
            (
                lambda x: multiassert.maybe_detect_in_closed_range(x, low, high, MESSAGE),
                lambda sample: reference.outside_closed_range(sample.rows(), low, high, None),
            )
        )
    if -(2**63) <= low < 2**63:
        calls.append((out_of(torch.tensor(low), high), expected(None, high)))
    if -(2**63) <= high < 2**63:
        calls.append((out_of(low, torch.tensor(high)), expected(low, None)))
    return calls


@pytest.mark.parametrize(
    ("value", "low", "is_fine"),
    [
        (2.0**60, 2**60 + 2**36 - 1, True),
        (2.0**60, 2**60 + 2**36, True),  # a tie, to even
        (2.0**60, 2**60 + 2**36 + 1, False),
        (2.0**60 + 2**37, 2**60 + 2**36 + 1, True),
    ],
)
def test_an_integer_bound_is_rounded_to_float32_once(value: float, low: int, is_fine: bool) -> None:
    """By way of float64 it would be rounded twice, which torch's own comparisons do not do."""
    tensor = torch.tensor([value])
    assert bool(tensor >= low) == is_fine
    with multiassert.override("auto"):
        violations = immediate(lambda: multiassert.maybe_detect_in_closed_range(tensor, low, math.inf))
    assert bool(violations) != is_fine


@each([torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sign", [-1, 1])
def test_no_sum_is_a_number_beyond_its_dtype(dtype: torch.dtype, sign: int) -> None:
    largest = sign * torch.finfo(dtype).max
    with multiassert.override("auto"), pytest.raises(AsyncAssertionError, match="sum is not"):
        multiassert.maybe_assert_sum(torch.tensor([largest], dtype=dtype), 2 * largest)


@pytest.mark.parametrize("rows", [257, 511, 1000])
def test_every_row_of_many_is_found(rows: int) -> None:
    """A single bad row, wherever it is: alone in its range, in the first, the last and the shorter last one."""
    tensor = torch.zeros(rows, 2)
    sample = Sample(tensor, tensor, Layout((rows, 2), (0, 1), (0, 0), (1, 1), (False, False), 0), ())
    for row in range(rows):
        tensor[row, 1] = math.nan
        finding = Finding("nan", [row], math.nan, None)
        check_recording("warn", lambda x: multiassert.maybe_detect_nan(x, MESSAGE), sample, [finding])
        tensor[row, 1] = 0


@each(COMPLEX)
@pytest.mark.parametrize("mode", [*RECORDING, "trap"])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_conjugate_view_is_seen_with_its_own_sign(dtype: torch.dtype, mode: str) -> None:
    conjugate = torch.tensor([complex(0, math.inf), 1, complex(0, math.nan)]).to(dtype).conj()
    sample = Sample(conjugate, conjugate, Layout((3,), (0,), (0,), (1,), (False,), 0), ())
    minus_inf, no_number = Finding("inf", [0], -math.inf, None), Finding("nan", [2], math.nan, None)
    if mode == "trap":
        check_trap(lambda x: multiassert.maybe_detect_inf(x, MESSAGE), sample, [minus_inf])
        check_trap(lambda x: multiassert.maybe_detect_nan(x, MESSAGE), sample, [no_number])
        return
    check_recording(mode, lambda x: multiassert.maybe_detect_inf(x, MESSAGE), sample, [minus_inf])
    check_recording(mode, lambda x: multiassert.maybe_detect_inf(x, MESSAGE, allow_neginf=True), sample, [])
    check_recording(mode, lambda x: multiassert.maybe_detect_nan(x, MESSAGE), sample, [no_number])
    # Its imaginary part is a real tensor whose sign torch flips only when it is read.
    part = dataclasses.replace(sample, tensor=conjugate.imag)
    assert part.tensor.is_neg()
    check_recording(mode, lambda x: multiassert.maybe_detect_inf(x, MESSAGE, allow_neginf=True), part, [])
    check_recording(mode, lambda x: multiassert.maybe_detect_nan(x, MESSAGE), part, [no_number])
    check_recording(
        mode,
        lambda x: multiassert.maybe_detect_in_closed_range(x, 0, 1, MESSAGE),
        part,
        [Finding("range", [0, 2], math.nan, 1)],
    )


@each([*FLOATS, *COMPLEX])
@pytest.mark.parametrize("mode", ["auto", "trap", "raise", "warn"])
@pytest.mark.parametrize("shape", [(), (3,), (300, 2)])
def test_indices_must_be_integers(dtype: torch.dtype, mode: str, shape: tuple[int, ...]) -> None:
    indices = torch.zeros(shape).to(dtype)
    with multiassert.override(mode):
        for call in (
            lambda: multiassert.maybe_detect_oob(indices, 0, 5),
            lambda: multiassert.maybe_detect_oob(indices, 0, torch.tensor(5)),
            lambda: multiassert.maybe_detect_page_aligned(indices, 4),
            lambda: multiassert.sanitize_oob(indices, 0, 5),
        ):
            with pytest.raises(TypeError, match="indices must be an integer tensor"):
                call()
    assert multiassert.drain() == []


@each(COMPLEX)
@pytest.mark.parametrize("mode", ["auto", "trap", "raise", "warn"])
def test_complex_numbers_have_no_order(dtype: torch.dtype, mode: str) -> None:
    tensor = torch.zeros(3).to(dtype)
    with multiassert.override(mode):
        with pytest.raises(TypeError, match="real numbers"):
            multiassert.maybe_detect_in_closed_range(tensor, 0, 1)
        with pytest.raises(TypeError, match="real numbers"):
            multiassert.maybe_assert_sum(tensor, 0)
    assert multiassert.drain() == []


@each([dtype for dtype in DTYPES if dtype not in LOGITS])
@pytest.mark.parametrize("mode", ["off", "auto", "trap", "raise", "warn"])
def test_logits_must_be_floats(dtype: torch.dtype, mode: str) -> None:
    logits = torch.ones(3).to(dtype)
    with multiassert.override(mode), pytest.raises(TypeError, match="logits must be floats"):
        multiassert.sanitize_nan_logits(logits)
    assert multiassert.drain() == []


@each([*DTYPES])
@pytest.mark.parametrize("mode", ["auto", "trap", "raise", "warn"])
def test_a_condition_has_one_element(dtype: torch.dtype, mode: str) -> None:
    with multiassert.override(mode):
        with pytest.raises(ValueError, match="cond must have exactly one element"):
            multiassert.maybe_assert_async(torch.ones(2).to(dtype))
        multiassert.maybe_assert_async(torch.ones(0).to(dtype))
    assert multiassert.drain() == []


@pytest.mark.parametrize("mode", ["off", "auto", "trap", "raise", "warn"])
def test_none_checks_nothing(mode: str) -> None:
    with multiassert.override(mode):
        multiassert.maybe_detect_nan(None)
        multiassert.maybe_warn_nan(None)
        multiassert.maybe_detect_inf(None)
        multiassert.maybe_detect_oob(None, 0, 1)
        multiassert.maybe_detect_page_aligned(None, 4)
        multiassert.maybe_detect_in_closed_range(None, 0, 1)
        multiassert.maybe_assert_async(None)
        multiassert.maybe_assert_sum(None, 1)
        multiassert.sanitize_nan_logits(None)
        assert multiassert.sanitize_oob(None, 0, 1) is None
    assert multiassert.drain() == []
