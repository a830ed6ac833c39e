"""The fused kernel, run with Triton's interpreter on the CPU, against plain Python.

Whether the interpreter is on is decided when Triton is imported, for the whole process. So the checks, whose names
begin with `check_`, are collected in a child process only, by `test_with_the_interpreter`.

Nothing here runs on a GPU. That the kernel compiles for one is tested, which needs none.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import multiassert
from conftest import ChildRun
from multiassert import backends, fused, predicates
from tests import reference
from tests.reference import Finding
from tests.test_exactness import (
    COMPLEX,
    DTYPES,
    FLOATS,
    INTEGERS,
    PAGE_SIZES,
    Counted,
    Sample,
    compared_as,
    countings,
    each,
    floats_near,
    integers_near,
    sample_of,
    samples,
    sentinels,
)

ROOT = pathlib.Path(__file__).parent.parent
CASES = [json.loads(line) for line in (pathlib.Path(__file__).parent / "cases.jsonl").read_text().splitlines()]

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

CELLS = 256
# Tiles of a few elements, so that small tensors have many; and few programs, so that each has several.
SMALL = fused.Tiling((1, 16), (4, 8), (16, 1), programs=3)
# For tensors of hundreds of rows: the interpreter takes a millisecond for each tile.
MEDIUM = fused.Tiling((1, 64), (256, 4), (256, 1), programs=3)
SIDE_BY_SIDE = fused.Tiling((1, 512), (64, 4), (64, 1))
LARGE = fused.Tiling((1, 2**16), (64, 64), (2**16, 1))

FLOAT_PLANES = [torch.float32, torch.float64]


# ---------------------------------------------------------------------------------------------------------------------
# What runs without the interpreter.


@needs_triton
def test_with_the_interpreter() -> None:
    child = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            __file__,
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-o",
            "python_functions=check_*",
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "MULTIASSERT_TEST_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert " passed" in child.stdout
    assert "skipped" not in child.stdout


def test_without_triton_there_is_no_kernel_and_no_error(run_child: ChildRun) -> None:
    child = run_child(
        """
        import sys
        sys.modules["triton"] = None
        import torch, multiassert
        from multiassert import backends, fused
        assert not fused.available(backends.named("cuda"), torch.device("cuda", 0))
        assert not fused.available(backends.named("cpu"), torch.device("cpu"))
        """,
        PYTHONPATH=str(ROOT),
    )
    assert child.returncode == 0, child.stderr
    assert child.stderr == ""


def test_triton_that_was_asked_for_and_is_missing_is_an_error(run_child: ChildRun) -> None:
    child = run_child(
        """
        import sys
        sys.modules["triton"] = None
        import torch, multiassert
        from multiassert import backends, dispatch
        with multiassert.override("raise", kernels="triton"):
            dispatch.route_of(torch.device("cpu"))  # has no choice, so there is nothing to refuse
            try:
                dispatch.route_of(torch.device("cuda", 0))
            except ValueError as error:
                print(error)
        """,
        PYTHONPATH=str(ROOT),
    )
    assert "kernels is set to triton, but Triton cannot be imported here for cuda:0" in child.stdout, child.stderr


def test_triton_is_not_imported_before_it_is_needed(run_child: ChildRun) -> None:
    child = run_child(
        """
        import sys
        import torch
        before = "triton" in sys.modules
        import multiassert, multiassert.fused
        from multiassert import backends, fused
        fused.available(backends.named("xpu"), torch.device("xpu", 0))
        fused.plan_of(fused.predicates.nan, torch.float32, ())
        assert before == ("triton" in sys.modules)
        """,
        PYTHONPATH=str(ROOT),
    )
    assert child.returncode == 0, child.stderr


@needs_triton
def test_who_may_take_the_kernel(run_child: ChildRun) -> None:
    child = run_child(
        """
        import torch
        from multiassert import backends, fused
        assert fused.available(backends.named("cuda"), torch.device("cuda", 0))
        assert fused.available(backends.named("rocm"), torch.device("cuda", 0))
        assert not fused.available(backends.named("cpu"), torch.device("cpu"))
        assert not fused.available(backends.named("xpu"), torch.device("xpu", 0))
        backends.named("xpu").launches_triton = True
        assert fused.available(backends.named("xpu"), torch.device("xpu", 0))
        """,
        PYTHONPATH=str(ROOT),
        TRITON_INTERPRET="0",
    )
    assert child.returncode == 0, child.stderr


@pytest.fixture(autouse=True, scope="module")
def quick_interpreter() -> Iterator[None]:
    """Half of the interpreter's time is spent on patching the language anew for every function that a kernel calls."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch, patched = interpreter._patch_lang, set()

    def patch_once(function: Any) -> Any:
        module = function.__module__
        if function.__name__ != "record_kernel" and module in patched:
            return None
        patched.add(module)
        return patch(function)

    interpreter._patch_lang = patch_once
    yield
    interpreter._patch_lang = patch


def compile_for(target: str) -> None:
    """Compile kernels for a GPU that need not be there, and look at how they load."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from multiassert import fused_kernels

    gpu = GPUTarget("cuda", 90, 32) if target == "cuda" else GPUTarget("hip", "gfx942", 64)
    names = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.int64: "i64"}
    names |= {torch.uint8: "u8", torch.int32: "i32"}
    kernel = fused_kernels.record_kernel
    for dtype, plan, shape in [
        (torch.bfloat16, fused.plan_of(predicates.nan, torch.bfloat16, ()), (1, 151936)),
        (torch.float64, fused.plan_of(predicates.outside_closed_range, torch.float64, (0, 1)), (7, 32)),
        (torch.int32, fused.plan_of(predicates.out_of_bounds, torch.int32, (0, 9, -5)), (4096,)),
    ]:
        assert plan is not None
        values = torch.zeros(shape, dtype=torch.uint8).to(dtype)
        with_masks = dtype is torch.int32
        where = torch.ones(shape, dtype=torch.bool) if with_masks else None
        count = torch.tensor(1) if with_masks else None
        launch = fused.make_launch(plan, values, CELLS, where, count)
        assert launch is not None
        arguments = dict(zip(kernel.arg_names, launch.all_arguments(None, None, None), strict=False))
        cells = SimpleNamespace(dtype=plan.check.plane)
        arguments.update(lower_cells=cells, upper_cells=cells, hits=SimpleNamespace(dtype=torch.int64))
        constants = {**launch.constants, **{name: None for name, value in arguments.items() if value is None}}
        signature = dict.fromkeys(constants, "constexpr")
        aligned = {}
        for position, name in enumerate(kernel.arg_names):
            if name not in constants:
                is_pointer = hasattr(arguments[name], "dtype")
                signature[name] = "*" + names[arguments[name].dtype] if is_pointer else "i64"
                aligned[(position,)] = [["tt.divisibility", 16]] if is_pointer else []
        signature = {name: signature[name] for name in kernel.arg_names}
        compiled = triton.compile(ASTSource(kernel, signature, constants, aligned), target=gpu)
        code = compiled.asm["ptx" if target == "cuda" else "amdgcn"]
        wide = "ld.global.v4.b32" in code or "ld.global.v2.b64" in code or "global_load_dwordx4" in code
        assert wide, f"{dtype} is not loaded 16 bytes at a time"


@needs_triton
@pytest.mark.parametrize("target", ["cuda", "rocm"])
def test_it_compiles_for_a_real_device(target: str, run_child: ChildRun, tmp_path: pathlib.Path) -> None:
    """For sm_90 and gfx942; it says nothing of what the device then does."""
    child = run_child(
        f"from tests import test_fused; test_fused.compile_for({target!r})",
        PYTHONPATH=str(ROOT),
        TRITON_INTERPRET="0",
        TRITON_CACHE_DIR=str(tmp_path),
    )
    assert child.returncode == 0, child.stderr


# ---------------------------------------------------------------------------------------------------------------------
# A slot between two others, and what a launch made of it.


class Slot:
    """Cells and hits as a page holds them, between those of two other slots that nothing may touch."""

    def __init__(self, plane: torch.dtype) -> None:
        self.plane = plane
        lowest, highest = predicates.identities(plane)
        self.cells = torch.empty((2, 3, CELLS), dtype=plane)
        self.cells[0].fill_(highest)
        self.cells[1].fill_(lowest)
        self.hits = torch.tensor([fused.NO_HITS] * 3)
        self.lower, self.upper, self.own_hits = self.cells[0, 1], self.cells[1, 1], self.hits[1]
        self.fresh = self.bytes()

    def bytes(self) -> Tensor:
        return torch.cat([part.flatten().view(torch.uint8) for part in (self.cells, self.hits)])

    def run(self, launch: fused.Launch) -> None:
        launch.run(self.lower[: launch.cells], self.upper[: launch.cells], self.own_hits)
        lowest, highest = predicates.identities(self.plane)
        others = [0, 2]
        assert (self.cells[0, others] == highest).all()
        assert (self.cells[1, others] == lowest).all()
        assert self.hits[others].tolist() == [[*fused.NO_HITS]] * 2

    def findings(self, check: predicates.Check) -> list[predicates.Finding]:
        """As a snapshot judges cells."""
        above_floor, below_ceiling = check.above_floor(self.lower), check.below_ceiling(self.upper)
        low, high = (
            [] if fine is None else (~fine).nonzero().flatten().tolist() for fine in (above_floor, below_ceiling)
        )
        return check.findings(low, high, self.lower.amin().item(), self.upper.amax().item())


def launch_of(
    predicate: Callable[..., Any],
    tensor: Tensor,
    arguments: tuple[Any, ...] = (),
    where: Tensor | None = None,
    num_valid: int | Tensor | None = None,
    tiling: fused.Tiling = SMALL,
) -> tuple[fused.Plan, fused.Launch]:
    plan = fused.plan_of(predicate, tensor.dtype, arguments)
    assert plan is not None
    launch = fused.prepare(plan, tensor, CELLS, where, num_valid, tiling=tiling)
    assert launch is not None
    return plan, launch


def look(predicate: Callable[..., Any], tensor: Tensor, *arguments: Any, **keywords: Any) -> tuple[Slot, Any]:
    """One launch on a fresh slot: the slot, and what a snapshot would find in it."""
    plan, launch = launch_of(predicate, tensor, arguments, **keywords)
    slot = Slot(plan.check.plane)
    slot.run(launch)
    return slot, slot.findings(plan.check)


# ---------------------------------------------------------------------------------------------------------------------
# The public failure cases.

PREDICATES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "maybe_detect_nan": (predicates.nan, ()),
    "maybe_detect_inf": (predicates.inf, ("allow_neginf",)),
    "maybe_detect_oob": (predicates.out_of_bounds, ("low", "high", "sentinel")),
    "maybe_detect_page_aligned": (predicates.page_misaligned, ("page_size", "sentinel")),
    "maybe_detect_in_closed_range": (predicates.outside_closed_range, ("low", "high")),
}
DEFAULTS = {"allow_neginf": False, "sentinel": None}


class Call(NamedTuple):
    """A probe's call, taken apart."""

    predicate: Callable[..., Any]
    tensor: Tensor | None
    arguments: tuple[Any, ...]
    where: Tensor | None
    num_valid: int | Tensor | None


def calls_in(case: dict[str, Any]) -> list[Call]:
    """The probe calls of a case that have a predicate which the kernel knows."""
    calls: list[Call] = []

    def taking_apart(name: str) -> Callable[..., None]:
        predicate, names = PREDICATES[name]
        positional = [known for known in names if known not in DEFAULTS]

        def probe(tensor: Tensor | None, *given: Any, where: Any = None, num_valid: Any = None, **named: Any) -> None:
            bound = {**DEFAULTS, **dict(zip(positional, given, strict=False)), **named}
            tensor = tensor.detach().reshape(tensor.shape or (1,)) if tensor is not None else None
            calls.append(Call(predicate, tensor, tuple(bound[known] for known in names), where, num_valid))

        return probe

    names: dict[str, Any] = {"torch": torch}
    exec(case["make"], names)
    others = {name: lambda *_, **__: None for name in ("maybe_assert_async", "maybe_assert_sum", "maybe_warn_nan")}
    exec(case["call"], {**names, **others, **{name: taking_apart(name) for name in PREDICATES}})
    return calls


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def check_case(case: dict[str, Any]) -> None:
    for predicate, tensor, arguments, where, num_valid in calls_in(case):
        if tensor is None:
            assert case["expect"] == "pass"
            continue
        if case["expect"].endswith("Error"):
            with pytest.raises(TypeError):
                fused.plan_of(predicate, tensor.dtype, arguments)
            continue
        plan = fused.plan_of(predicate, tensor.dtype, arguments)
        if plan is None or not tensor.numel() or (isinstance(num_valid, int) and not num_valid):
            # Bounds that are tensors are torch's.
            assert case["expect"] == "pass" or any(isinstance(argument, Tensor) for argument in arguments)
            continue
        slot, findings = look(
            predicate, tensor, *arguments, where=where, num_valid=num_valid, tiling=fused.USUAL_TILING
        )
        if case["expect"] == "pass":
            assert torch.equal(slot.bytes(), slot.fresh)
            continue
        assert {finding.kind for finding in findings} == set(case["expect"].split("+"))
        assert slot.own_hits[fused.COUNT] > 0
        if "rows" in case:
            assert sorted({row for finding in findings for row in finding.cells}) == case["rows"]
        if "value" in case:
            assert case["value"] in [finding.value for finding in findings]


# ---------------------------------------------------------------------------------------------------------------------
# Properties, against the reference.


def a_few(count: int) -> settings:
    factor = float(os.environ.get("MULTIASSERT_TEST_EXAMPLES", "1"))
    return settings(
        max_examples=max(1, round(count * factor)),
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def compare(
    sample: Sample,
    counted: Counted,
    predicate: Callable[..., Any],
    arguments: tuple[Any, ...],
    expect: Callable[[Any], list[Finding]],
) -> None:
    """Run a probe; what a snapshot finds, the count and the first index must be what the reference says."""
    plan = fused.plan_of(predicate, sample.tensor.dtype, arguments)
    tensor = sample.tensor.reshape(1) if sample.tensor.ndim == 0 else sample.tensor
    where = None if counted.where is None else counted.where.tensor
    num_valid = counted.keywords.get("num_valid")
    rows = counted.of(sample)
    expected = expect(rows)
    if plan is None:
        assert expected == []
        return
    if not tensor.numel() or (num_valid is not None and not isinstance(num_valid, Tensor) and not num_valid):
        return
    tiling = SMALL if tensor.numel() <= 100 else MEDIUM
    launch = fused.prepare(plan, tensor, CELLS, where, num_valid, tiling=tiling)
    if launch is None:
        views = [tensor if not isinstance(num_valid, int) else tensor[:num_valid]]
        if where is not None:
            views.append(where.expand(tensor.shape)[: len(views[0])])
        assert not have_common_view(views)
        return
    memory = sample.bits().clone()
    slot = Slot(plan.check.plane)
    slot.run(launch)
    assert torch.equal(sample.bits(), memory)
    bad = [index for index, value in enumerate(itertools.chain(*rows)) if value is not None and expect([[value]])]
    if not bad:
        assert torch.equal(slot.bytes(), slot.fresh)
    else:
        assert slot.own_hits.tolist() == [len(bad), bad[0]]
    found = slot.findings(plan.check)
    assert len(found) == len(expected), f"{found}, not {expected}"
    for one, other in zip(found, expected, strict=True):
        assert other.rows is not None
        assert one.cells == sorted({row // launch.block for row in other.rows})
        assert (one.kind, one.bound) == (other.kind, other.bound)
        assert same(one.value, other.value), f"{one}, not {other}"
        assert isinstance(one.value, type(other.value))


def same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def have_common_view(tensors: Sequence[Tensor]) -> bool:
    """Whether torch itself can view all of them as rows and columns in the same way."""
    shape = tensors[0].shape
    for split in range(1, len(shape) + 1):
        try:
            for tensor in tensors:
                tensor.view(math.prod(shape[:split]), math.prod(shape[split:]))
        except RuntimeError:
            continue
        return True
    return False


@each([*FLOATS, *COMPLEX, torch.int32])
@a_few(5)
@given(data=st.data())
def check_nan(dtype: torch.dtype, data: st.DataObject) -> None:
    sample = data.draw(samples(dtype))
    compare(sample, data.draw(countings(sample)), predicates.nan, (), reference.nan)


@each([*FLOATS, *COMPLEX])
@a_few(5)
@given(data=st.data(), allow=st.booleans())
def check_inf(dtype: torch.dtype, data: st.DataObject, allow: bool) -> None:
    sample = data.draw(samples(dtype))
    compare(sample, data.draw(countings(sample)), predicates.inf, (allow,), lambda rows: reference.inf(rows, allow))


@each(INTEGERS)
@a_few(10)
@given(data=st.data())
def check_out_of_bounds(dtype: torch.dtype, data: st.DataObject) -> None:
    sample = data.draw(samples(dtype))
    counted = data.draw(countings(sample))
    low, high = sorted(data.draw(st.tuples(integers_near(sample), integers_near(sample))))
    sentinel = data.draw(sentinels(sample, (low, high)))
    compare(
        sample,
        counted,
        predicates.out_of_bounds,
        (low, high, sentinel),
        lambda rows: reference.out_of_bounds(rows, low, high, sentinel),
    )


@each(INTEGERS)
@a_few(8)
@given(data=st.data(), page_size=PAGE_SIZES)
def check_page_misaligned(dtype: torch.dtype, data: st.DataObject, page_size: int) -> None:
    sample = data.draw(samples(dtype))
    counted = data.draw(countings(sample))
    sentinel = data.draw(sentinels(sample))
    compare(
        sample,
        counted,
        predicates.page_misaligned,
        (page_size, sentinel),
        lambda rows: reference.page_misaligned(rows, page_size, sentinel),
    )


@each([*INTEGERS, *FLOATS])
@a_few(8)
@given(data=st.data())
def check_closed_range(dtype: torch.dtype, data: st.DataObject) -> None:
    sample = data.draw(samples(dtype))
    counted = data.draw(countings(sample))
    rounded_to = compared_as(dtype)
    bound = integers_near(sample) if rounded_to is None else floats_near(sample, rounded_to)
    low, high = sorted(data.draw(st.tuples(bound, bound)))
    compare(
        sample,
        counted,
        predicates.outside_closed_range,
        (low, high),
        lambda rows: reference.outside_closed_range(rows, low, high, rounded_to),
    )


@each([dtype for dtype in FLOATS if dtype.itemsize <= 2])
def check_every_pattern(dtype: torch.dtype) -> None:
    """All bit patterns of 8 and 16 bits at once: how many are NaN, Inf, and above each of some bounds."""
    made_of = DTYPES[dtype]
    numbers = [made_of.decode(pattern) for pattern in range(2**made_of.bits)]
    sample = sample_of(dtype, range(2**made_of.bits))
    for predicate, arguments, is_bad in [
        (predicates.nan, (), math.isnan),
        (predicates.inf, (False,), math.isinf),
        (predicates.outside_closed_range, (0.0, 0.0), lambda x: x != 0),
        (predicates.outside_closed_range, (-1.5, 2.0**-9), lambda x: not -1.5 <= x <= 2.0**-9),
        (predicates.outside_closed_range, (-(2.0**-8), 40.0), lambda x: not -(2.0**-8) <= x <= 40.0),
    ]:
        bad = [pattern for pattern, number in enumerate(numbers) if is_bad(number)]
        if fused.plan_of(predicate, dtype, arguments) is None:
            assert not bad
            continue
        slot, _ = look(predicate, sample.tensor, *arguments, tiling=LARGE)
        assert slot.own_hits.tolist() == ([len(bad), bad[0]] if bad else [*fused.NO_HITS])


@each([dtype for dtype in FLOATS if dtype.itemsize == 1])
def check_every_fp8_number(dtype: torch.dtype) -> None:
    """Each byte that is a number becomes the float32 of the same value, to the bit."""
    numbers = [DTYPES[dtype].decode(byte) for byte in range(256)]
    slot, _ = look(predicates.outside_closed_range, sample_of(dtype, range(256)).tensor, 3e38, 3e38, tiling=LARGE)
    assert all(map(same, slot.lower.tolist(), numbers))


# ---------------------------------------------------------------------------------------------------------------------
# What must not depend on luck.


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((1, 35), (35, 1)), ((3, 33), (40, 1)), ((9, 7), (7, 1)), ((9, 7), (1, 9)), ((35,), (1,)), ((19,), (3,))],
    ids=str,
)
def check_a_nan_at_the_boundaries_of_tiles(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """At both sides of the boundaries of tiles; and beside the tensor, where nothing may be seen."""
    memory = torch.full((400,), math.nan, dtype=torch.bfloat16)
    tensor = memory.as_strided(shape, strides, 3)
    tensor.zero_()
    plan, launch = launch_of(predicates.nan, tensor)
    slot = Slot(plan.check.plane)
    slot.run(launch)
    assert torch.equal(slot.bytes(), slot.fresh)
    places = [*itertools.product(*(sorted(at_boundaries(size)) for size in shape))]
    for place in places[:: max(1, len(places) // 7)] + places[-1:]:
        tensor[place] = math.nan
        slot = Slot(plan.check.plane)
        slot.run(launch)
        assert [finding.cells for finding in slot.findings(plan.check)] == [[place[0]]]
        assert slot.own_hits.tolist() == [1, torch.arange(tensor.numel()).view(shape)[place]]
        tensor[place] = 0


def at_boundaries(size: int) -> set[int]:
    """The first and the last index, and those beside a boundary of a small tile."""
    beside = {place for tile in (4, 8, 16) for start in range(0, size, tile) for place in (start - 1, start)}
    return {0, size - 1, *(place for place in beside if place >= 0)}


@pytest.mark.parametrize("side", ["low", "high"])
@each(FLOAT_PLANES)
def check_cells_take_the_worst_in_any_order(dtype: torch.dtype, side: str) -> None:
    """Two values one after the other, and both from programs of one launch: a NaN stays, whatever its sign."""
    largest = torch.finfo(dtype).max
    bound = largest if side == "low" else -largest
    smallest = math.ulp(0.0) if dtype is torch.float64 else 2.0**-149
    values = [-(2.0**99), -smallest, 0.0, 3.0, math.nan, -math.nan, -math.inf if side == "low" else math.inf]
    worst = min if side == "low" else max
    pairs = [*itertools.product(values, repeat=2)]
    expected = [math.nan if math.isnan(one) or math.isnan(other) else worst(one, other) for one, other in pairs]
    one_by_one, at_once = Slot(dtype), Slot(dtype)
    for numbers in zip(*pairs, strict=True):
        tensor = torch.tensor(numbers, dtype=dtype)
        one_by_one.run(launch_of(predicates.outside_closed_range, tensor, (bound, bound), tiling=SIDE_BY_SIDE)[1])
    tensor = torch.full((len(pairs), 9), bound, dtype=dtype)  # of which three programs look at four columns each
    tensor[:, 0], tensor[:, -1] = torch.tensor(pairs, dtype=dtype).unbind(1)
    at_once.run(launch_of(predicates.outside_closed_range, tensor, (bound, bound), tiling=SIDE_BY_SIDE)[1])
    for slot in (one_by_one, at_once):
        cells = slot.lower if side == "low" else slot.upper
        assert all(map(same, cells.tolist(), expected))
        assert slot.own_hits.tolist() == [2 * len(pairs), 0]


@each(FLOAT_PLANES)
@pytest.mark.parametrize("sign", [1, -1])
def check_a_nan_of_either_sign_that_torch_left_stays(dtype: torch.dtype, sign: int) -> None:
    not_a_number = torch.copysign(torch.tensor(math.nan, dtype=dtype), torch.tensor(sign, dtype=dtype))
    for value in (-5.0, 5.0, -math.inf, math.inf):
        slot = Slot(dtype)
        slot.lower[0] = slot.upper[0] = not_a_number
        tensor = torch.tensor([value], dtype=dtype)
        slot.run(launch_of(predicates.outside_closed_range, tensor, (-1, 1))[1])
        assert slot.lower[0].isnan()
        assert slot.upper[0].isnan()


@pytest.mark.parametrize("rows", [256, 257, 511, 512, 1000])
@pytest.mark.parametrize("columns", [None, 3])
def check_many_rows_share_cells(rows: int, columns: int | None) -> None:
    tensor = torch.zeros(rows if columns is None else (rows, columns), dtype=torch.int64)
    block = math.ceil(rows / CELLS)
    for row in (0, block - 1, block, rows - 1):
        tensor.view(rows, -1)[row, -1] = 100 + row
        slot, (finding,) = look(predicates.out_of_bounds, tensor, 0, 100, None, tiling=MEDIUM)
        assert (finding.kind, finding.cells, finding.value) == ("high", [row // block], 100 + row)
        assert slot.own_hits.tolist() == [1, (row + 1) * (columns or 1) - 1]
        tensor.zero_()


def check_long_rows_have_many_programs_and_small_tensors_one() -> None:
    for shape, programs in [((1, 151936), (1, 38)), ((64, 151936), (64, 19)), ((1, 5), (1, 1)), ((8, 4), (1, 1))]:
        launch = launch_of(predicates.nan, torch.zeros(shape), tiling=fused.USUAL_TILING)[1]
        assert launch.grid == programs
        assert math.prod(launch.grid) <= fused.USUAL_TILING.programs


def check_rows_of_a_vocabulary() -> None:
    tensor = torch.zeros(3, 151936, dtype=torch.bfloat16)
    tensor[1, 151935] = tensor[2, 4096] = math.nan
    slot, (finding,) = look(predicates.nan, tensor, tiling=fused.USUAL_TILING)
    assert finding.cells == [1, 2]
    assert slot.own_hits.tolist() == [2, 2 * 151936 - 1]


def check_inner_dimensions_that_are_cut() -> None:
    """Logits without their padding, of several positions of several requests: nothing is copied."""
    padded = torch.full((300, 2, 10), math.nan)  # of which each request makes two rows of the kernel
    logits = padded[:, :, :7]
    logits.zero_()
    logits[299, 1, 6] = math.nan
    slot, (finding,) = look(predicates.nan, logits, tiling=MEDIUM)
    assert finding.cells == [149]
    assert slot.own_hits.tolist() == [1, 300 * 2 * 7 - 1]
    slot, findings = look(predicates.nan, logits, num_valid=299, tiling=MEDIUM)
    assert findings == []
    slot, findings = look(predicates.nan, logits, num_valid=torch.tensor(299), tiling=MEDIUM)
    assert findings == []


def check_offsets_beyond_int32() -> None:
    memory = torch.empty(2**31 + 64, dtype=torch.uint8)  # only the pages that are looked at exist
    tensor = memory.as_strided((2, 4), (2**31 + 16, 1))
    tensor.zero_()
    tensor[1, 3] = 9
    slot, (finding,) = look(predicates.out_of_bounds, tensor, 0, 9, None)
    assert (finding.cells, slot.own_hits.tolist()) == ([1], [1, 7])
    slot, (finding,) = look(predicates.out_of_bounds, tensor.t(), 0, 9, None)
    assert (finding.cells, slot.own_hits.tolist()) == ([3], [1, 7])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def check_a_count_on_the_device_is_read_by_each_run(dtype: torch.dtype) -> None:
    """As a captured graph replays it: the same launch, and a count that has changed."""
    tensor = torch.full((20, 3), math.nan)
    count = torch.tensor(0, dtype=dtype)
    plan, launch = launch_of(predicates.nan, tensor, num_valid=count)
    for rows in (0, 7, 25, 3):
        count.fill_(rows)
        slot = Slot(plan.check.plane)
        slot.run(launch)
        seen = min(rows, 20)
        assert slot.own_hits.tolist() == ([3 * seen, 0] if seen else [*fused.NO_HITS])
        assert [finding.cells for finding in slot.findings(plan.check)] == ([[*range(seen)]] if seen else [])
    if dtype.is_signed:
        count.fill_(-1)
        slot.run(launch)
        assert slot.own_hits.tolist() == [9, 0]


def check_hits_add_up_and_keep_the_first() -> None:
    tensor = torch.tensor([[0, 9, 0, 9]])
    plan, launch = launch_of(predicates.out_of_bounds, tensor, (0, 5, None))
    slot = Slot(plan.check.plane)
    slot.run(launch)
    tensor[0, 0] = 7
    slot.run(launch)
    assert slot.own_hits.tolist() == [5, 0]
    tensor[0, :3] = 0
    slot.run(launch)
    assert slot.own_hits.tolist() == [6, 0]
    assert slot.upper[0] == 9


def check_what_varies_from_call_to_call_compiles_nothing_new() -> None:
    launch_of(predicates.out_of_bounds, torch.zeros(5, 40, dtype=torch.int64), (1, 7, -5))
    launch_of(predicates.page_misaligned, torch.zeros(5, 40, dtype=torch.int64), (3, 1))
    known = len(fused._tried)
    for low, high, sentinel, rows in [(0, 1, 2**40, 1), (-(2**63), 16, 2**62, 17), (2**31, 2**80, 5, 300)]:
        launch_of(predicates.out_of_bounds, torch.zeros(rows, 40, dtype=torch.int64), (low, high, sentinel))
    for size, sentinel in [(17, 1), (2**40 + 1, 2**50 + 3)]:
        launch_of(predicates.page_misaligned, torch.zeros(5, 8 * 5, dtype=torch.int64), (size, sentinel))
    assert len(fused._tried) == known


def check_nothing_is_compiled_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_tried", {})
    plan, tensor = fused.plan_of(predicates.nan, torch.float32, ()), torch.zeros(2, 2)
    assert plan is not None
    assert fused.prepare(plan, tensor, CELLS, capturing=True) is None
    assert fused._tried == {}
    assert fused.prepare(plan, tensor, CELLS) is not None
    assert fused.prepare(plan, tensor, CELLS, capturing=True) is not None


def check_a_triton_that_fails_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def __getitem__(self, grid: object) -> object:
            raise RuntimeError("no C compiler")

    monkeypatch.setattr(fused, "_tried", {})
    monkeypatch.setattr(fused, "_kernels", lambda: SimpleNamespace(record_kernel=Broken()))
    plan, tensor = fused.plan_of(predicates.nan, torch.float32, ()), torch.zeros(2, 2)
    assert plan is not None
    for _ in range(2):
        assert fused.prepare(plan, tensor, CELLS) is None
    assert [record.message for record in caplog.records if "no C compiler" in record.message] == [
        "Triton fails on cpu, so probes there do without it: RuntimeError: no C compiler"
    ]


def check_what_the_kernel_does_not_cover() -> None:
    int64, float32 = torch.int64, torch.float32
    assert fused.plan_of(predicates.out_of_bounds, int64, (torch.tensor(0), 5, None)) is None
    assert fused.plan_of(predicates.condition, torch.bool, ()) is None
    assert fused.plan_of(predicates.sum_differs, float32, (1,)) is None
    plan = fused.plan_of(predicates.inf, torch.complex64, (False,))
    assert plan is not None
    conjugate = torch.zeros(3, dtype=torch.complex64).conj()
    assert fused.prepare(plan, conjugate, CELLS) is None
    plan = fused.plan_of(predicates.inf, float32, (False,))
    assert plan is not None
    assert fused.prepare(plan, conjugate.imag, CELLS) is None
    assert fused.prepare(plan, torch.zeros(2, 3, 4, 5).transpose(1, 3)[:, :, ::2], CELLS) is None


def check_arguments_that_are_equal_but_not_the_same() -> None:
    assert fused.plan_of(predicates.out_of_bounds, torch.int64, (0, 5, None)) is not None
    with pytest.raises(TypeError, match="high must be an integer"):
        fused.plan_of(predicates.out_of_bounds, torch.int64, (0, 5.0, None))


def check_the_interpreter_is_for_the_cpu() -> None:
    assert fused.available(backends.named("cpu"), torch.device("cpu"))
    assert not fused.available(backends.named("cuda"), torch.device("cuda", 0))
    assert not fused.available(backends.named("xpu"), torch.device("xpu", 0))


class Mutated:
    """The kernel, with one part of what it writes changed."""

    def __init__(self, kernel: Any, change: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        self.kernel, self.change = kernel, change

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def run(*arguments: Any, **constants: Any) -> None:
            before = [cells.clone() for cells in arguments[3:6]]
            self.kernel[grid](*arguments, **constants)
            if any(not torch.equal(old, new) for old, new in zip(before, arguments[3:6], strict=True)):
                self.change(*arguments[3:6])

        return run


def silent(lower: Tensor, upper: Tensor, hits: Tensor) -> None:
    lower.fill_(math.inf), upper.fill_(-math.inf), hits.copy_(torch.tensor(fused.NO_HITS))


MUTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {
    "silent": silent,
    "the wrong row": lambda lower, upper, hits: upper.copy_(upper.roll(1)),
    "one row more": lambda lower, upper, hits: upper[:1].fill_(math.nan),
    "counts twice": lambda lower, upper, hits: hits[0].mul_(2),
    "the wrong index": lambda lower, upper, hits: hits[1].add_(1),
}


@pytest.mark.parametrize("change", MUTATIONS)
def check_a_kernel_that_does_not_fire_as_it_has_to_is_not_used(
    change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = fused._kernels().record_kernel
    monkeypatch.setattr(fused, "_tried", {})
    plan, tensor = fused.plan_of(predicates.nan, torch.float32, ()), torch.zeros(3, 5)
    assert plan is not None
    monkeypatch.setattr(fused, "_kernels", lambda: SimpleNamespace(record_kernel=Mutated(kernel, MUTATIONS[change])))
    assert fused.prepare(plan, tensor, CELLS) is None
    assert "its kernel did not report a bad value as it has to" in caplog.text


def check_a_kernel_that_is_loud_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loud:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *arguments, **constants: arguments[4].fill_(math.nan)

    monkeypatch.setattr(fused, "_tried", {})
    monkeypatch.setattr(fused, "_kernels", lambda: SimpleNamespace(record_kernel=Loud()))
    plan = fused.plan_of(predicates.nan, torch.float32, ())
    assert plan is not None
    assert fused.prepare(plan, torch.zeros(3, 5), CELLS) is None


@pytest.fixture
def no_glance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiassert.glance, "is_clean", lambda *_: False)


def check_a_probe_counts_and_a_step_starts_anew(no_glance: None) -> None:
    clean, bad = torch.zeros(4, 8), torch.zeros(4, 8)
    bad[2, 5:7] = math.nan
    with multiassert.override("warn"):
        for tensor in (clean, bad, clean, bad):
            multiassert.maybe_detect_nan(tensor, "logits")
            multiassert.step()
        found = multiassert.drain()
    assert [(v.step, v.rows, v.count, v.index) for v in found] == [(1, (2,), 2, 21), (3, (2,), 2, 21)]
    assert "value nan (2 of them, the first at 21), rows 2" in found[0].description
    assert " count=2 index=21 " in found[0].log_line


def check_several_calls_of_a_step_are_counted_together(no_glance: None) -> None:
    site = multiassert.site("ids")
    with multiassert.override("warn"):
        multiassert.maybe_detect_oob(torch.tensor([0, 1, 9]), 0, 5, site)
        multiassert.maybe_detect_oob(torch.tensor([0, 7]), 0, 5, site)
        (violation,) = multiassert.drain()
        assert (violation.kind, violation.value, violation.count, violation.index) == ("high", 9, 2, 1)
        multiassert.maybe_detect_oob(torch.tensor([-1, 9]), 0, 5, site)
        low, high = multiassert.drain()
    assert [(v.kind, v.count) for v in (low, high)] == [("low", None), ("high", None)], "not told apart, so not claimed"


def check_what_torch_reduced_is_not_counted(no_glance: None) -> None:
    bad, site = torch.full((2, 2), math.nan), multiassert.site("both ways")
    with multiassert.override("warn"):
        multiassert.maybe_detect_nan(bad, site)
        with multiassert.override(kernels="torch"):
            multiassert.maybe_detect_nan(bad, site)
        (violation,) = multiassert.drain()
    assert (violation.rows, violation.count, violation.index) == ((0, 1), None, None)


def check_the_setting_chooses(no_glance: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[object] = []
    run = fused.Launch.run
    monkeypatch.setattr(fused.Launch, "run", lambda *arguments: (launches.append(1), run(*arguments))[1])
    tensor = torch.zeros(3, 5)
    for kernels, used in (("torch", False), ("triton", True), ("auto", True)):
        launches.clear()
        with multiassert.override("raise", kernels=kernels):
            multiassert.maybe_detect_nan(tensor, "logits")
            multiassert.drain()
        assert bool(launches) is used, kernels
