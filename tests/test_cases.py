"""The public failure cases, in every mechanism that a CPU tensor can take."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

import multiassert
from multiassert import AsyncAssertionError, Violation

CASES = [json.loads(line) for line in (pathlib.Path(__file__).parent / "cases.jsonl").read_text().splitlines()]


def call(case: dict[str, Any]) -> None:
    """Build the case's tensors and run its probe."""
    names: dict[str, Any] = {"torch": torch, **{name: getattr(multiassert, name) for name in multiassert.__all__}}
    exec(case["make"], names)
    exec(case["call"], names)


def kinds_expected(case: dict[str, Any]) -> set[str]:
    return set() if case["expect"] == "pass" else set(case["expect"].split("+"))


def check_record(case: dict[str, Any], violations: list[Violation] | tuple[Violation, ...]) -> None:
    assert {violation.kind for violation in violations} == kinds_expected(case)
    if "rows" in case:
        assert sorted({row for violation in violations for row in violation.rows}) == case["rows"]
    if "value" in case:
        assert case["value"] in [violation.value for violation in violations]


def raises_at_the_call(case: dict[str, Any]) -> bool:
    if not case["expect"].endswith("Error"):
        return False
    with pytest.raises(TypeError):
        call(case)
    return True


@pytest.fixture(params=CASES, ids=lambda case: case["id"])
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param  # type: ignore[no-any-return]


def test_auto_raises_in_the_call_with_the_whole_record(case: dict[str, Any]) -> None:
    with multiassert.override("auto"):
        if raises_at_the_call(case):
            return
        if case["expect"] == "pass":
            call(case)
        else:
            with pytest.raises(AsyncAssertionError) as raised:
                call(case)
            check_record(case, raised.value.violations)
    assert multiassert.drain() == []


def test_trap_is_torch_assert_async(case: dict[str, Any]) -> None:
    with multiassert.override("trap"):
        if raises_at_the_call(case):
            return
        if case["expect"] == "pass":
            call(case)
        else:
            with pytest.raises(RuntimeError) as raised:
                call(case)
            assert not isinstance(raised.value, AsyncAssertionError)


def test_warn_returns_the_record_from_drain(case: dict[str, Any]) -> None:
    with multiassert.override("warn"):
        if raises_at_the_call(case):
            return
        call(case)
    check_record(case, multiassert.drain())
    assert multiassert.drain() == []


def test_raise_raises_the_record_at_the_step(case: dict[str, Any]) -> None:
    with multiassert.override("raise"):
        if raises_at_the_call(case):
            return
        call(case)
        if case["expect"] == "pass":
            multiassert.step()
        else:
            with pytest.raises(AsyncAssertionError) as raised:
                multiassert.step()
            check_record(case, raised.value.violations)
    assert multiassert.drain() == []


def test_off_checks_nothing(case: dict[str, Any]) -> None:
    call(case)
    assert multiassert.drain() == []
