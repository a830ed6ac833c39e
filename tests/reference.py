"""What the probes must say, in plain Python: numbers decoded from their bits and compared as Python numbers.

Nothing here uses torch or the project. Formats are written from their definitions: IEEE 754, bfloat16, the OCP 8-bit
formats (e4m3fn, e5m2, e8m0fnu) and the "fnuz" formats of Graphcore, AMD and Qualcomm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

Real = int | float
Value = int | float | complex
# The values of each row, rows being indices of dimension 0; None is a value that does not count.
Rows = Sequence[Sequence[Value | None]]
RealRows = Sequence[Sequence[Real | None]]


# ---------------------------------------------------------------------------------------------------------------------
# Formats.


@dataclasses.dataclass(frozen=True)
class IntegerFormat:
    """Two's complement, or unsigned."""

    bits: int
    signed: bool

    @property
    def lowest(self) -> int:
        return -(2 ** (self.bits - 1)) if self.signed else 0

    @property
    def highest(self) -> int:
        return int(2 ** (self.bits - self.signed)) - 1

    def decode(self, pattern: int) -> int:
        return pattern - 2**self.bits if pattern > self.highest else pattern

    def special_patterns(self) -> list[int]:
        """Zero, one, the extremes, and their neighbours."""
        top, every = 2 ** (self.bits - 1), 2**self.bits
        return sorted({pattern % every for near in (0, top) for pattern in range(near - 2, near + 3)})


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """Sign, exponent, mantissa. `specials` says which patterns are no finite numbers.

    "ieee": the highest exponent is Inf, or NaN with a mantissa. "fn": only all ones are NaN, with either sign.
    "fnuz": only minus zero is NaN. "e8m0": an exponent and nothing else, of which the highest is NaN.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str = "ieee"

    @property
    def bits(self) -> int:
        return self.exponent_bits + self.mantissa_bits + (self.specials != "e8m0")

    def decode(self, pattern: int) -> float:
        mantissa = pattern & (2**self.mantissa_bits - 1)
        exponent = pattern >> self.mantissa_bits & (2**self.exponent_bits - 1)
        negative = pattern >> (self.exponent_bits + self.mantissa_bits) & 1
        top_exponent = exponent == 2**self.exponent_bits - 1
        all_ones = top_exponent and mantissa == 2**self.mantissa_bits - 1
        sign = -1.0 if negative else 1.0
        if self.specials == "e8m0":
            return math.nan if top_exponent else math.ldexp(1.0, exponent - self.bias)
        if self.specials == "ieee" and top_exponent:
            return math.nan if mantissa else sign * math.inf
        if self.specials == "fn" and all_ones:
            return math.nan
        if self.specials == "fnuz" and negative and exponent == mantissa == 0:
            return math.nan
        if exponent == 0:
            return sign * math.ldexp(mantissa, 1 - self.bias - self.mantissa_bits)
        return sign * math.ldexp(2**self.mantissa_bits + mantissa, exponent - self.bias - self.mantissa_bits)

    def special_patterns(self) -> list[int]:
        """Zeros, denormals, the smallest normal, ones, the largest, Inf, NaN of many payloads; both signs of each."""
        sign, top = 2 ** (self.bits - 1), (2**self.exponent_bits - 1) << self.mantissa_bits
        normal, quiet = 2**self.mantissa_bits, 2**self.mantissa_bits >> 1
        one = self.bias << self.mantissa_bits
        positive = {0, 1, normal - 1, normal, normal + 1, one, one + 1, top - 1, top, top + 1, top | quiet}
        positive |= {top + quiet - 1, top + quiet + 1, top + normal - 2, top + normal - 1}
        if self.specials == "e8m0":
            return sorted({0, 1, 2, one - 1, one, one + 1, top - 2, top - 1, top})
        return sorted(pattern | negative for pattern in positive if pattern < sign for negative in (0, sign))

    @property
    def largest(self) -> float:
        """The largest finite number."""
        highest = {
            "ieee": (2**self.exponent_bits - 1 << self.mantissa_bits) - 1,
            "fn": 2 ** (self.bits - 1) - 2,
            "fnuz": 2 ** (self.bits - 1) - 1,
            "e8m0": 2**self.bits - 2,
        }
        return self.decode(highest[self.specials])

    def nearest(self, number: Real) -> float:
        """The nearest number of a format with Inf, ties to even; beyond the range it is Inf."""
        if isinstance(number, float) and not math.isfinite(number):
            return number
        exact = abs(Fraction(number))
        if not exact:
            return 0.0
        exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
        exponent -= exact < Fraction(2) ** exponent
        step = Fraction(2) ** (max(exponent, 1 - self.bias) - self.mantissa_bits)
        rounded = round(exact / step) * step
        magnitude = math.inf if rounded > Fraction(self.largest) else float(rounded)
        return -magnitude if number < 0 else magnitude


@dataclasses.dataclass(frozen=True)
class ComplexFormat:
    """Two floats, the real one in the lower bits."""

    part: FloatFormat

    @property
    def bits(self) -> int:
        return 2 * self.part.bits

    def decode(self, pattern: int) -> complex:
        return complex(self.part.decode(pattern % 2**self.part.bits), self.part.decode(pattern >> self.part.bits))

    def special_patterns(self) -> list[int]:
        """Each special part beside 0, beside the last special one (a NaN), and beside itself."""
        parts = self.part.special_patterns()
        pairs = {pair for part in parts for other in (0, parts[-1], part) for pair in ((part, other), (other, part))}
        return sorted(real | imaginary << self.part.bits for real, imaginary in pairs)


Format = IntegerFormat | FloatFormat | ComplexFormat

FLOAT16 = FloatFormat(5, 10, 15)
BFLOAT16 = FloatFormat(8, 7, 127)
FLOAT32 = FloatFormat(8, 23, 127)
FLOAT64 = FloatFormat(11, 52, 1023)

FORMATS: dict[str, Format] = {
    "float16": FLOAT16,
    "bfloat16": BFLOAT16,
    "float32": FLOAT32,
    "float64": FLOAT64,
    "float8_e4m3fn": FloatFormat(4, 3, 7, "fn"),
    "float8_e5m2": FloatFormat(5, 2, 15),
    "float8_e4m3fnuz": FloatFormat(4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": FloatFormat(5, 2, 16, "fnuz"),
    "float8_e8m0fnu": FloatFormat(8, 0, 127, "e8m0"),
    "complex32": ComplexFormat(FLOAT16),
    "complex64": ComplexFormat(FLOAT32),
    "complex128": ComplexFormat(FLOAT64),
    "int8": IntegerFormat(8, True),
    "int16": IntegerFormat(16, True),
    "int32": IntegerFormat(32, True),
    "int64": IntegerFormat(64, True),
    "uint8": IntegerFormat(8, False),
    "uint16": IntegerFormat(16, False),
    "uint32": IntegerFormat(32, False),
    "uint64": IntegerFormat(64, False),
}


def rounded_by_torch(number: Real, to: FloatFormat) -> float:
    """As torch makes a 16-bit float of a Python number: by way of float32, which can round twice."""
    return to.nearest(FLOAT32.nearest(number) if to.bits == 16 else number)


# ---------------------------------------------------------------------------------------------------------------------
# Predicates.


class Finding(NamedTuple):
    """One kind of violation: the rows that are bad, the worst value, the bound it broke."""

    kind: str
    rows: list[int] | None  # None where no row is to blame
    value: Real
    bound: Real | None


def parts(value: Value) -> tuple[Real, ...]:
    return (value.real, value.imag) if isinstance(value, complex) else (value,)


def _rows_with(rows: Sequence[Sequence[Value | None]], is_bad: Callable[[Real], bool]) -> dict[int, list[Real]]:
    """The bad numbers of each row that has any."""
    found = {}
    for index, row in enumerate(rows):
        bad = [number for value in row if value is not None for number in parts(value) if is_bad(number)]
        if bad:
            found[index] = bad
    return found


def _all(found: dict[int, list[Real]]) -> list[Real]:
    return [number for bad in found.values() for number in bad]


def nan(rows: Rows) -> list[Finding]:
    """A NaN, in any part."""
    found = _rows_with(rows, math.isnan)
    return [Finding("nan", list(found), math.nan, None)] if found else []


def inf(rows: Rows, allow_neginf: bool) -> list[Finding]:
    """An Inf, in any part; the positive one is told where there are both."""
    found = _rows_with(rows, lambda number: math.isinf(number) and (number > 0 or not allow_neginf))
    return [Finding("inf", list(found), max(_all(found)), None)] if found else []


def out_of_bounds(
    rows: RealRows, low: Real | RealRows, high: Real | RealRows, sentinel: int | None = None
) -> list[Finding]:
    """An index outside `[low, high)`. Bounds are numbers, or rows of them, one for each index."""
    below: dict[int, list[Real]] = {}
    above: dict[int, list[Real]] = {}
    for index, row in enumerate(rows):
        for column, value in enumerate(row):
            if value is None or value == sentinel:
                continue
            if value < _bound_at(low, index, column):
                below.setdefault(index, []).append(value)
            if value >= _bound_at(high, index, column):
                above.setdefault(index, []).append(value)
    findings = []
    if below:
        findings.append(Finding("low", list(below), min(_all(below)), low if isinstance(low, int) else None))
    if above:
        findings.append(Finding("high", list(above), max(_all(above)), high if isinstance(high, int) else None))
    return findings


def _bound_at(bound: Real | RealRows, row: int, column: int) -> Real:
    if isinstance(bound, (int, float)):
        return bound
    number = bound[row][column]
    if number is None:
        raise ValueError("every bound counts")
    return number


def page_misaligned(rows: RealRows, page_size: int, sentinel: int | None = None) -> list[Finding]:
    """An index that does not start a page; the largest distance from a start is told."""
    if page_size <= 1:
        return []
    distances = [[None if value is None or value == sentinel else value % page_size for value in row] for row in rows]
    found = _rows_with(distances, bool)
    return [Finding("misaligned", list(found), max(_all(found)), page_size)] if found else []


def outside_closed_range(rows: RealRows, low: Real, high: Real, rounded_to: FloatFormat | None) -> list[Finding]:
    """A value outside `[low, high]` or NaN; for floats after rounding the bounds, of which finite ones stay finite."""
    floor, ceiling = low, high
    if rounded_to is not None:
        floor, ceiling = (_rounded_finite(bound, rounded_to) for bound in (low, high))
    below = _rows_with(rows, lambda number: not number >= floor)
    above = _rows_with(rows, lambda number: not number <= ceiling)
    if not below and not above:
        return []
    bad = [*_all(below), *_all(above)]
    worst = math.nan if any(math.isnan(value) for value in bad) else max(bad) if above else min(bad)
    return [Finding("range", sorted({*below, *above}), worst, high if above else low)]


def _rounded_finite(bound: Real, to: FloatFormat) -> float:
    if isinstance(bound, float) and math.isinf(bound):
        return bound
    rounded = rounded_by_torch(bound, to)
    return max(min(rounded, to.largest), -to.largest)


def condition(rows: Rows) -> list[Finding]:
    """A condition that is zero; NaN is not."""
    (value,) = rows[0]
    return [Finding("cond", [0], 0, None)] if value == 0 else []


def sum_differs(rows: RealRows, expected: Real, rounded_to: FloatFormat | None) -> list[Finding]:
    """A sum other than `expected`: of integers in int64, of floats in their dtype, to which `expected` is rounded.

    Floats must be such that all their partial sums are exact.
    """
    values = [value for row in rows for value in row if value is not None]
    total: Real = sum(values)
    wanted = expected
    if rounded_to is None:
        total = (int(total) + 2**63) % 2**64 - 2**63
    else:
        total = float(total)
        wanted = rounded_by_torch(expected, rounded_to)
        if math.isinf(wanted) and expected not in (math.inf, -math.inf):
            wanted = math.nan  # beyond the range: no sum is it
    return [] if total == wanted else [Finding("cond", [0] if len(rows) == 1 else None, total, expected)]
