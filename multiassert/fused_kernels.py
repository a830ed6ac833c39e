# mypy: ignore-errors
"""The Triton kernel of `fused`: judge a tensor's values in one pass, and write only where one is outside.

This module imports Triton, so nothing but `fused` imports it, and only when it is needed. Functions marked with
`triton.jit` look like Python and are not: mypy has no business here.

Cells are merged by atomics on the bits of floats, since no device has atomics that know NaN. Read as integers, floats
of one sign are ordered by their bits: positive ones upwards, negative ones downwards. So for the largest value:

* a positive one takes the signed maximum, which also replaces any negative one, whose bits are negative integers;
* a negative one takes the unsigned minimum, which leaves any positive one, whose bits are the smaller ones.

The smallest value is the mirror image. A NaN is written as the positive one where the largest is kept, whose bits are
above those of +Inf, and as the negative one where the smallest is kept, whose bits are beyond those of -Inf. Every
update is then the maximum (or the minimum) of one total order in which NaN comes last, so neither the order of the
programs nor a value that is written twice makes a difference, and no number replaces a NaN.

Another kernel may have left a NaN of the other sign in a cell. Kernels of one stream do not overlap, so that NaN is
seen by the load before the atomic, and the cell is left alone. A NaN that comes during this kernel has the right sign.
"""

from __future__ import annotations

import triton
import triton.language as tl

INT32_MAX = tl.constexpr(2**31 - 1)
INT64_MIN = tl.constexpr(-(2**63))
INT64_MAX = tl.constexpr(2**63 - 1)

SIZES = (
    "rows",
    "columns",
    "row_stride",
    "column_stride",
    "where_row_stride",
    "where_column_stride",
    "rows_per_item",
    "rows_per_cell",
    "row_tiles_each",
    "column_tiles_each",
    "floor_bits",
    "ceiling_bits",
    "sentinel",
    "page_size",
)


@triton.jit(do_not_specialize=SIZES)  # what differs from call to call must not compile anew
def record_kernel(
    values,
    where,
    num_valid,
    lower_cells,
    upper_cells,
    hits,
    rows: tl.int64,
    columns: tl.int64,
    row_stride: tl.int64,
    column_stride: tl.int64,
    where_row_stride: tl.int64,
    where_column_stride: tl.int64,
    rows_per_item: tl.int64,
    rows_per_cell: tl.int64,
    row_tiles_each: tl.int64,
    column_tiles_each: tl.int64,
    floor_bits: tl.int64,
    ceiling_bits: tl.int64,
    sentinel: tl.int64,
    page_size: tl.int64,
    reads: tl.constexpr,
    observes: tl.constexpr,
    parts: tl.constexpr,
    has_floor: tl.constexpr,
    has_ceiling: tl.constexpr,
    has_sentinel: tl.constexpr,
    nan_is_outside: tl.constexpr,
    adjoining: tl.constexpr,
    unit: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Look at the tiles of this program; where any value is outside, look again and record it.

    Sizes of the adjoining dimension come in units, so that the compiler knows what they are multiples of.
    """
    rows = rows.to(tl.int64)
    columns = columns.to(tl.int64)
    row_stride = row_stride.to(tl.int64)
    column_stride = column_stride.to(tl.int64)
    if adjoining == "columns":
        columns = columns * unit
        row_stride = row_stride * unit
        column_stride = parts
    if adjoining == "rows":
        rows = rows * unit
        column_stride = column_stride * unit
        row_stride = parts
    # A count is no multiple of anything, so it is kept out of the mask of the loads.
    valid_rows = rows
    if num_valid is not None:
        valid_rows = tl.minimum(rows, tl.load(num_valid).to(tl.int64) * rows_per_item.to(tl.int64))

    first_row_tile = tl.program_id(0).to(tl.int64) * row_tiles_each.to(tl.int64)
    last_row_tile = tl.minimum(first_row_tile + row_tiles_each.to(tl.int64), tl.cdiv(valid_rows, tile_rows))
    first_column_tile = tl.program_id(1).to(tl.int64) * column_tiles_each.to(tl.int64)
    last_column_tile = tl.minimum(first_column_tile + column_tiles_each.to(tl.int64), tl.cdiv(columns, tile_columns))
    floor = _limit(floor_bits, lower_cells)
    ceiling = _limit(ceiling_bits, lower_cells)

    # Loops are written with `while`: the interpreter cannot make a `range` of its own numbers with numpy 2.4.
    is_outside = tl.zeros([tile_rows, tile_columns], tl.int32)
    row_tile = first_row_tile
    while row_tile < last_row_tile:
        column_tile = first_column_tile
        while column_tile < last_column_tile:
            row, column = _tile(row_tile, column_tile, tile_rows, tile_columns)
            exists = (row < rows) & (column < columns)
            counts = _counts(exists & (row < valid_rows), where, row, column, where_row_stride, where_column_stride)
            places = values + (row * row_stride + column * column_stride)
            for part in tl.static_range(parts):
                value, part_counts = _observe(
                    places + part, exists, counts, floor, reads, observes, has_sentinel, sentinel, page_size
                )
                below, above = _outside(value, part_counts, floor, ceiling, has_floor, has_ceiling, nan_is_outside)
                is_outside |= (below | above).to(tl.int32)
            column_tile += 1
        row_tile += 1
    if tl.max(tl.max(is_outside, 1), 0) == 0:
        return

    row_tile = first_row_tile
    while row_tile < last_row_tile:
        column_tile = first_column_tile
        while column_tile < last_column_tile:
            row, column = _tile(row_tile, column_tile, tile_rows, tile_columns)
            exists = (row < rows) & (column < columns)
            counts = _counts(exists & (row < valid_rows), where, row, column, where_row_stride, where_column_stride)
            places = values + (row * row_stride + column * column_stride)
            cell = (row_tile * tile_rows + tl.arange(0, tile_rows)) // rows_per_cell.to(tl.int64)
            outside = exists & (row < 0)  # none of them, so far
            for part in tl.static_range(parts):
                value, part_counts = _observe(
                    places + part, exists, counts, floor, reads, observes, has_sentinel, sentinel, page_size
                )
                below, above = _outside(value, part_counts, floor, ceiling, has_floor, has_ceiling, nan_is_outside)
                if has_ceiling:
                    _raise_cells(upper_cells + cell, value, above)
                if has_floor:
                    _lower_cells(lower_cells + cell, value, below)
                outside = outside | below | above
            number = tl.sum(tl.sum(outside.to(tl.int32), 1), 0)
            if number > 0:
                index = tl.where(outside, row * columns + column, INT64_MAX)
                tl.atomic_add(hits, number.to(tl.int64), sem="relaxed")
                tl.atomic_min(hits + 1, tl.min(tl.min(index, 1), 0), sem="relaxed")
            column_tile += 1
        row_tile += 1


@triton.jit
def _tile(row_tile, column_tile, tile_rows: tl.constexpr, tile_columns: tl.constexpr):
    """The rows and the columns of a tile, in int64: no tensor is too long."""
    row = row_tile * tile_rows + tl.arange(0, tile_rows)[:, None]
    return row, column_tile * tile_columns + tl.arange(0, tile_columns)[None, :]


@triton.jit
def _limit(bits, cells):
    """A limit in the dtype of the cells, from its bits: as a float argument it would be rounded to float32."""
    limit = bits.to(tl.int64)
    if cells.dtype.element_ty == tl.float64:
        limit = limit.to(tl.float64, bitcast=True)
    elif cells.dtype.element_ty == tl.float32:
        limit = limit.to(tl.int32).to(tl.float32, bitcast=True)
    return limit


@triton.jit
def _counts(counts, where, row, column, where_row_stride, where_column_stride):
    """Which elements of a tile count, by the mask too."""
    if where is not None:
        offset = row * where_row_stride.to(tl.int64) + column * where_column_stride.to(tl.int64)
        counts = counts & (tl.load(where + offset, mask=counts, other=0) != 0)
    return counts


@triton.jit
def _observe(
    places,
    exists,
    counts,
    limit,
    reads: tl.constexpr,
    observes: tl.constexpr,
    has_sentinel: tl.constexpr,
    sentinel,
    page_size,
):
    """The values to compare, in the dtype of the limits, and which of them count."""
    stored = tl.load(places, mask=exists, other=0)
    if reads == "float" and stored.dtype == tl.bfloat16:
        # The upper half of a float32; the interpreter's own conversion loses the smallest numbers.
        value = (stored.to(tl.uint16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif reads == "float":
        value = stored.to(limit.dtype)
    elif reads == "integer":
        value = stored.to(tl.int64)
        if has_sentinel:
            counts = counts & (value != sentinel.to(tl.int64))
        if observes == "distance from page":
            if stored.dtype == tl.uint64:
                value = (stored % page_size.to(tl.uint64)).to(tl.int64)
            else:
                value = value % page_size.to(tl.int64)
                value = tl.where(value < 0, value + page_size.to(tl.int64), value)  # as in Python
        elif observes == "distance from power of two":
            value = value & (page_size.to(tl.int64) - 1)
        elif stored.dtype == tl.uint64:
            value = value ^ INT64_MIN  # shifted by -2**63, so that the order is kept
    elif observes == "nan flag":
        value = _fp8_is_nan(stored.to(tl.int32), reads).to(tl.int64)
    else:
        value = _fp8_value(stored.to(tl.int32), reads)
    return value, counts


@triton.jit
def _fp8_is_nan(byte, reads: tl.constexpr):
    if reads == "float8_e4m3fn":
        is_nan = (byte & 0x7F) == 0x7F
    elif reads == "float8_e5m2":
        is_nan = (byte & 0x7F) > 0x7C
    elif reads == "float8_e8m0fnu":
        is_nan = byte == 0xFF
    else:
        is_nan = byte == 0x80  # the "fnuz" formats: minus zero
    return is_nan


@triton.jit
def _fp8_value(byte, reads: tl.constexpr):
    """The float32 of the same value, from its bits: hardware and compilers know some of the formats only."""
    if reads == "float8_e8m0fnu":
        bits = tl.where(byte == 0, 1 << 22, byte << 23)  # 2**-127 is below the normal numbers of float32
    else:
        mantissa_bits: tl.constexpr = 2 if reads == "float8_e5m2" or reads == "float8_e5m2fnuz" else 3
        usual_bias: tl.constexpr = 15 if mantissa_bits == 2 else 7
        bias: tl.constexpr = usual_bias if reads == "float8_e5m2" or reads == "float8_e4m3fn" else usual_bias + 1
        magnitude = byte & 0x7F
        normal = (magnitude << (23 - mantissa_bits)) + ((127 - bias) << 23)
        # Below the normal numbers: so many of the smallest one.
        smallest = tl.full(byte.shape, (128 - bias - mantissa_bits) << 23, tl.int32).to(tl.float32, bitcast=True)
        small = (magnitude.to(tl.float32) * smallest).to(tl.int32, bitcast=True)
        bits = tl.where((magnitude >> mantissa_bits) == 0, small, normal)
        if reads == "float8_e5m2":
            bits = tl.where(magnitude == 0x7C, 0x7F800000, bits)
        bits = bits | ((byte & 0x80) << 24)
    bits = tl.where(_fp8_is_nan(byte, reads), 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _outside(
    value,
    counts,
    floor,
    ceiling,
    has_floor: tl.constexpr,
    has_ceiling: tl.constexpr,
    nan_is_outside: tl.constexpr,
):
    """Which values are below the floor, and which are above the ceiling."""
    below = counts & (counts != counts)
    above = below
    if has_floor:
        below = counts & (~(value >= floor) if nan_is_outside else value < floor)
    if has_ceiling:
        above = counts & (~(value <= ceiling) if nan_is_outside else value > ceiling)
    return below, above


@triton.jit
def _raise_cells(cells, value, above):
    """Merge the largest of the values marked in each row into the row's cell."""
    touched = tl.max(above.to(tl.int32), 1) > 0
    if value.dtype == tl.int64:
        tl.atomic_max(cells, tl.max(tl.where(above, value, INT64_MIN), 1), mask=touched, sem="relaxed")
    else:
        if value.dtype == tl.float64:
            bits = tl.where(value != value, 0x7FF8000000000000, value.to(tl.int64, bitcast=True))
            largest = _in_order(tl.max(tl.where(above, _in_order(bits), INT64_MIN), 1))
            signed = cells.to(tl.pointer_type(tl.int64), bitcast=True)
            unsigned = cells.to(tl.pointer_type(tl.uint64), bitcast=True)
        else:
            bits = tl.where(value != value, 0x7FC00000, value.to(tl.int32, bitcast=True))
            largest = _in_order(tl.max(tl.where(above, _in_order(bits), -INT32_MAX - 1), 1))
            signed = cells.to(tl.pointer_type(tl.int32), bitcast=True)
            unsigned = cells.to(tl.pointer_type(tl.uint32), bitcast=True)
        held = tl.load(cells, mask=touched, other=0)
        touched = touched & (held == held)
        tl.atomic_max(signed, largest, mask=touched & (largest >= 0), sem="relaxed")
        tl.atomic_min(
            unsigned, largest.to(unsigned.dtype.element_ty, bitcast=True), mask=touched & (largest < 0), sem="relaxed"
        )


@triton.jit
def _lower_cells(cells, value, below):
    """Merge the smallest of the values marked in each row into the row's cell."""
    touched = tl.max(below.to(tl.int32), 1) > 0
    if value.dtype == tl.int64:
        tl.atomic_min(cells, tl.min(tl.where(below, value, INT64_MAX), 1), mask=touched, sem="relaxed")
    else:
        if value.dtype == tl.float64:
            bits = tl.where(value != value, -0x8000000000000, value.to(tl.int64, bitcast=True))
            smallest = _in_order(tl.min(tl.where(below, _in_order(bits), INT64_MAX), 1))
            signed = cells.to(tl.pointer_type(tl.int64), bitcast=True)
            unsigned = cells.to(tl.pointer_type(tl.uint64), bitcast=True)
        else:
            bits = tl.where(value != value, -0x400000, value.to(tl.int32, bitcast=True))
            smallest = _in_order(tl.min(tl.where(below, _in_order(bits), INT32_MAX), 1))
            signed = cells.to(tl.pointer_type(tl.int32), bitcast=True)
            unsigned = cells.to(tl.pointer_type(tl.uint32), bitcast=True)
        held = tl.load(cells, mask=touched, other=0)
        touched = touched & (held == held)
        tl.atomic_min(signed, smallest, mask=touched & (smallest >= 0), sem="relaxed")
        tl.atomic_max(
            unsigned, smallest.to(unsigned.dtype.element_ty, bitcast=True), mask=touched & (smallest < 0), sem="relaxed"
        )


@triton.jit
def _in_order(bits):
    """Integers in the order of the floats that have these bits, and back: it is its own inverse."""
    return bits ^ ((bits >> 63) & INT64_MAX if bits.dtype == tl.int64 else (bits >> 31) & INT32_MAX)
