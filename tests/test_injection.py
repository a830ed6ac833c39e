"""Injection coverage: poison makes every probe fire where it stands, and coverage knows which ones have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import multiassert
from conftest import finish
from multiassert import AsyncAssertionError, dispatch, injection, simulate, sites

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)

# A name, the probe, a clean tensor of that dtype, and the kind that its poison must be reported as.
Case = tuple[str, Callable[[Tensor, str], None], Callable[[torch.dtype], Tensor], str, tuple[torch.dtype, ...]]
CASES: list[Case] = [
    ("nan", multiassert.maybe_detect_nan, lambda dtype: torch.zeros(4, 3).to(dtype), "nan", (*FLOATS, torch.complex64)),
    (
        "nan in fp8",
        multiassert.maybe_detect_nan,
        lambda dtype: torch.zeros(4, 3).to(dtype),
        "nan",
        (torch.float8_e5m2,),
    ),
    ("inf", multiassert.maybe_detect_inf, lambda dtype: torch.zeros(4, 3).to(dtype), "inf", FLOATS),
    (
        "high",
        lambda t, m: multiassert.maybe_detect_oob(t, 0, 100, m),
        lambda d: torch.ones(4, 3).to(d),
        "high",
        INTEGERS,
    ),
    (
        "low, for there is no higher one",
        lambda t, m: multiassert.maybe_detect_oob(t, 1, 256, m),
        lambda d: torch.ones(4, 3).to(d),
        "low",
        (torch.uint8,),
    ),
    (
        "a sentinel is no poison",
        lambda t, m: multiassert.maybe_detect_oob(t, 0, 100, m, sentinel=100),
        lambda d: torch.ones(4, 3).to(d),
        "high",
        (torch.uint8,),
    ),
    (
        "bounds of its row",
        lambda t, m: multiassert.maybe_detect_oob(t, 0, (torch.arange(4) + 5).view(4, 1).to(t.device), m),
        lambda d: torch.ones(4, 3).to(d),
        "high",
        (torch.int64,),
    ),
    (
        "page",
        lambda t, m: multiassert.maybe_detect_page_aligned(t, 2, m),
        lambda d: torch.zeros(4, 3).to(d),
        "misaligned",
        INTEGERS[:5],
    ),
    (
        "a sentinel on no page is no poison",
        lambda t, m: multiassert.maybe_detect_page_aligned(t, 64, m, sentinel=1),
        lambda d: torch.zeros(4, 3).to(d),
        "misaligned",
        (torch.int64,),
    ),
    (
        "range",
        lambda t, m: multiassert.maybe_detect_in_closed_range(t, 0.5, 1e30, m),
        lambda d: torch.ones(4, 3).to(d),
        "range",
        (*FLOATS, torch.int64),
    ),
    (
        "sum",
        lambda t, m: multiassert.maybe_assert_sum(t, 4, m),
        lambda d: torch.ones(4).to(d),
        "cond",
        (*FLOATS, torch.int64),
    ),
    ("condition", multiassert.maybe_assert_async, lambda d: torch.ones(()).to(d), "cond", (torch.bool, torch.float32)),
]


@pytest.mark.parametrize(
    ("probe", "make", "kind", "dtype"),
    [(probe, make, kind, dtype) for _, probe, make, kind, dtypes in CASES for dtype in dtypes],
    ids=[f"{name}, {str(dtype).removeprefix('torch.')}" for name, *_, dtypes in CASES for dtype in dtypes],
)
def test_a_poison_is_reported_and_the_tensor_stays(
    probe: Callable[[Tensor, str], None],
    make: Callable[[torch.dtype], Tensor],
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    tensor = make(dtype).to(device)
    has_rows = tensor.ndim > 1
    with multiassert.override("warn"):
        probe(tensor, "clean")
        assert multiassert.drain() == []
        with injection.poison("poisoned", row=2 if has_rows else None) as poison:
            for _ in range(3):
                probe(tensor, "poisoned")
            probe(tensor, "another one")
        (found,) = multiassert.drain()
    assert (poison.calls, poison.poisoned) == (1, 1)
    assert (found.message, found.kind) == ("poisoned", kind)
    assert found.rows == ((2,) if has_rows else () if tensor.ndim == 0 else (0,))
    assert torch.equal(tensor.cpu(), make(dtype))


def test_only_what_counts_is_poisoned(device: torch.device) -> None:
    tensor, mask = torch.zeros(4, 3, device=device), torch.zeros(4, 3, dtype=torch.bool, device=device)
    mask[1, 0] = True
    count = torch.tensor(3, device=device)
    with multiassert.override("warn"):
        with injection.poison("masked"):
            multiassert.maybe_detect_nan(tensor, "masked", where=mask)
        with injection.poison("counted"):
            multiassert.maybe_detect_nan(tensor, "counted", num_valid=2)
        with injection.poison("counted on the device"):
            multiassert.maybe_detect_nan(tensor, "counted on the device", num_valid=count)
        assert [(v.message, v.rows) for v in multiassert.drain()] == [
            ("masked", (1,)),
            ("counted", (1,)),
            ("counted on the device", (2,)),
        ]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: None, "no such probe was called"),
        (
            lambda t: multiassert.maybe_detect_nan(t.int(), "x"),
            "1 calls of such a probe, to which no value of torch.int32",
        ),
        (lambda t: multiassert.maybe_detect_oob(t.byte(), 0, 256, "x"), "to which no value of torch.uint8 is bad"),
        (lambda t: multiassert.maybe_detect_nan(t, "x", num_valid=0), "in which no value of row 1 counts"),
        (lambda t: multiassert.maybe_detect_nan(t[:1], "x"), "in which no value of row 1 counts"),
        (lambda t: multiassert.maybe_detect_nan(t, "another"), "no such probe was called"),
    ],
)
def test_a_poison_that_reached_no_probe_is_an_error(call: Callable[[Tensor], None], words: str) -> None:
    with (
        multiassert.override("warn"),
        pytest.raises(AssertionError, match=words),
        injection.poison("x", row=1),
    ):
        call(torch.zeros(2, 3))
    assert multiassert.drain() == []


def test_a_site_and_a_place_can_be_named(device: torch.device) -> None:
    tensor, site = torch.zeros(2, 3, device=device), multiassert.site("made beforehand")
    with multiassert.override("raise"):
        for target in (site, "made before", "test_injection.py"):
            with injection.poison(target, value=torch.nan):
                multiassert.maybe_detect_nan(tensor, site)
            finish(device)
            with pytest.raises(AsyncAssertionError, match="made beforehand"):
                multiassert.drain()


def test_in_mode_auto_on_the_cpu_it_raises_at_the_call() -> None:
    logits = torch.zeros(4, 3)
    with (
        multiassert.override(cpu="auto"),
        pytest.raises(AsyncAssertionError) as raised,
        injection.poison("logits", row=3),
    ):
        multiassert.sanitize_nan_logits(logits, "logits")
    assert raised.value.violations[0].rows == (3,)


def test_a_poison_does_not_get_into_a_graph(simulator: simulate.Simulator, device: torch.device) -> None:
    module: Any = torch.get_device_module(device)
    tensor, graph, stream = torch.zeros(2, 3, device=device), simulate.Graph(simulator), module.Stream()
    with multiassert.override("warn"), module.stream(stream):
        multiassert.prewarm(device)
        with pytest.raises(AssertionError, match="while a graph was captured"), injection.poison("captured"):
            graph.capture_begin()
            multiassert.maybe_detect_nan(tensor, "captured")
            graph.capture_end()
        graph.replay()
        assert multiassert.drain() == []


def under_vmap(row: Tensor) -> Tensor:
    multiassert.maybe_detect_inf(row, "under vmap")
    return row


def test_coverage_lists_what_was_called_and_what_has_fired(device: torch.device) -> None:
    clean, bad = torch.zeros(2, 3, device=device), torch.full((2, 3), torch.nan, device=device)
    own = multiassert.site("made beforehand")

    def run(tensor: Tensor) -> None:
        multiassert.maybe_detect_nan(tensor, "fires")
        multiassert.maybe_detect_inf(tensor, "does not")
        multiassert.maybe_detect_nan(tensor, lambda: "computed")
        torch.func.vmap(under_vmap)(tensor)

    with multiassert.override("warn"), injection.coverage() as coverage:
        run(clean)
        run(bad)
        multiassert.drain()
        here = {each.message: each for each in coverage.sites if each.site.file == __file__}
        assert here["fires"].calls == here["does not"].calls == here["under vmap"].calls == 2
        assert here["fires"].violations == 1
        assert here[""].violations == 1, "the site of a message that is a callable has none"
        assert {each.message for each in coverage.never_fired} >= {"does not", "under vmap", own.message}
        with pytest.raises(AssertionError, match=r"does not \(inf\) at .*test_injection\.py:\d+ in run"):
            coverage.require_all_fired()
        with injection.poison("does not"), injection.poison("under vmap"), injection.poison(own, row=1):
            run(clean)
            multiassert.maybe_detect_nan(clean, own)
        assert len(multiassert.drain()) == 3
        of_other_tests = {str(each) for each in coverage.sites if each.message not in {*here, own.message}}
        coverage.require_all_fired(*of_other_tests, "test_a_site_and_a_place_can_be_named")


def test_two_kinds_of_probe_at_one_site_are_two(device: torch.device) -> None:
    clean, site = torch.zeros(2, 3, device=device), multiassert.site("shared by two probes")
    with multiassert.override("warn"), injection.coverage() as coverage:
        with injection.poison(site):
            multiassert.maybe_detect_nan(clean, site)
        multiassert.maybe_detect_inf(clean, site)
        assert [v.kind for v in multiassert.drain()] == ["nan"]
        assert [each.kind for each in coverage.never_fired if each.site is site] == ["inf"]


def test_without_a_probe_nothing_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "_made_beforehand", {})
    with injection.coverage() as coverage:
        multiassert.maybe_detect_nan(torch.zeros(2), "off")
        with pytest.raises(AssertionError, match="were they on"):
            coverage.require_all_fired()


def test_scopes_may_end_in_any_order_and_leave_nothing_behind(device: torch.device) -> None:
    before = dispatch.probe, dispatch.is_clean_at_a_glance
    tensor = torch.zeros(2, 3, device=device)
    first, second = injection.poison("first"), injection.poison("second")
    with multiassert.override("warn"):
        first.__enter__()
        second.__enter__()
        multiassert.maybe_detect_nan(tensor, "first")
        first.__exit__(None, None, None)
        multiassert.maybe_detect_nan(tensor, "second")
        second.__exit__(None, None, None)
        assert [v.message for v in multiassert.drain()] == ["first", "second"]
        multiassert.maybe_detect_nan(tensor, "first")
        assert multiassert.drain() == []
    assert (dispatch.probe, dispatch.is_clean_at_a_glance) == before


@pytest.mark.parametrize(
    ("scope", "words"),
    [
        (lambda: multiassert.override(cpu="off", npu="warn"), "while the probes of cpu were off"),
        (multiassert.suspend, r"within suspend\(\)"),
    ],
)
def test_a_probe_that_looks_at_nothing_is_not_poisoned(scope: Callable[[], Any], words: str) -> None:
    with (
        multiassert.override("warn"),
        scope(),
        pytest.raises(AssertionError, match=words),
        injection.poison("here"),
    ):
        multiassert.maybe_detect_nan(torch.zeros(2), "here")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: multiassert.maybe_detect_nan([1.0], "x"), TypeError),  # type: ignore[arg-type]
        (lambda: multiassert.maybe_detect_nan(torch.zeros(2).to_sparse(), "x"), TypeError),
        (lambda: multiassert.maybe_detect_nan(torch.zeros(2), "x", where=torch.ones(3).bool()), ValueError),
        (lambda: multiassert.maybe_detect_page_aligned(torch.zeros(2).cfloat(), 2, "x"), TypeError),
    ],
)
def test_what_a_probe_refuses_it_refuses_in_its_own_words(call: Callable[[], None], error: type[Exception]) -> None:
    with multiassert.override("warn"):
        with pytest.raises(error) as without:
            call()
        with pytest.raises(error) as poisoned, injection.poison("x"):
            call()
    assert str(poisoned.value) == str(without.value)


def test_what_has_no_values_is_left_alone() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with (
        multiassert.override("warn"),
        pytest.raises(AssertionError, match="while the probes of meta were off"),
        injection.poison("x"),
    ):
        with FakeTensorMode():
            multiassert.maybe_detect_nan(torch.zeros(2), "x")
        multiassert.maybe_detect_nan(torch.zeros(2, device="meta"), "x")


def test_the_places_of_a_watched_model_are_no_probes_that_somebody_wrote() -> None:
    linear = torch.nn.Linear(2, 2)
    with multiassert.override("warn"), injection.coverage() as coverage, multiassert.watch(linear) as watch:
        linear(torch.zeros(1, 2))
        linear(torch.full((1, 2), torch.nan))
        multiassert.drain()
        assert watch.violations
        assert [each for each in coverage.sites if "Linear" in str(each)] == []
