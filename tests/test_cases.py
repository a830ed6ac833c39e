"""The public failure cases, on every platform, in every mechanism that it has."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import multiassert
from conftest import to_device
from multiassert import AsyncAssertionError, Violation

CASES = [json.loads(line) for line in (pathlib.Path(__file__).parent / "cases.jsonl").read_text().splitlines()]


@pytest.fixture(params=CASES, ids=lambda case: case["id"])
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param  # type: ignore[no-any-return]


def call(case: dict[str, Any], device: torch.device) -> None:
    """Build the case's tensors on the CPU, move them, and run its probe."""
    made: dict[str, Any] = {"torch": torch}
    exec(case["make"], made)
    names = {name: to_device(value, device) for name, value in made.items()}
    exec(case["call"], {**names, **{name: getattr(multiassert, name) for name in multiassert.__all__}})


def check_record(case: dict[str, Any], violations: Iterable[Violation], device: torch.device) -> None:
    violations = list(violations)
    assert {violation.kind for violation in violations} == set(case["expect"].split("+"))
    assert {violation.device for violation in violations} == {device}
    if "rows" in case:
        assert sorted({row for violation in violations for row in violation.rows}) == case["rows"]
    if "value" in case:
        assert case["value"] in [violation.value for violation in violations]


def raises_at_the_call(case: dict[str, Any], device: torch.device) -> bool:
    if not case["expect"].endswith("Error"):
        return False
    with pytest.raises(TypeError):
        call(case, device)
    return True


def call_and_step(case: dict[str, Any], device: torch.device) -> None:
    call(case, device)
    multiassert.step()
    multiassert.drain()


def test_auto_raises_the_whole_record(case: dict[str, Any], device: torch.device, platform: str) -> None:
    """On CPU in the call itself, elsewhere once the device has got there."""
    act = call if platform == "cpu" else call_and_step
    with multiassert.override("auto"):
        if raises_at_the_call(case, device):
            return
        if case["expect"] == "pass":
            act(case, device)
        else:
            with pytest.raises(AsyncAssertionError) as raised:
                act(case, device)
            check_record(case, raised.value.violations, device)
    assert multiassert.drain() == []


def test_trap_is_torch_assert_async_or_refused(case: dict[str, Any], device: torch.device, traps: bool) -> None:
    with multiassert.override("trap"):
        if not traps and case["make"] != "x = None":
            with pytest.raises(ValueError, match="trap is refused"):
                call(case, device)
        elif raises_at_the_call(case, device):
            pass
        elif case["expect"] == "pass":
            call(case, device)
        else:
            with pytest.raises(RuntimeError) as raised:
                call(case, device)
            assert not isinstance(raised.value, AsyncAssertionError)


def test_warn_returns_the_record_from_drain(case: dict[str, Any], device: torch.device) -> None:
    with multiassert.override("warn"):
        if raises_at_the_call(case, device):
            return
        call(case, device)
    violations = multiassert.drain()
    if case["expect"] == "pass":
        assert violations == []
    else:
        check_record(case, violations, device)
    assert multiassert.drain() == []


def test_raise_raises_the_record_once_it_is_known(case: dict[str, Any], device: torch.device) -> None:
    with multiassert.override("raise"):
        if raises_at_the_call(case, device):
            return
        if case["expect"] == "pass":
            call_and_step(case, device)
        else:
            with pytest.raises(AsyncAssertionError) as raised:
                call_and_step(case, device)
            check_record(case, raised.value.violations, device)
    assert multiassert.drain() == []


def test_off_checks_nothing(case: dict[str, Any], device: torch.device) -> None:
    call(case, device)
    assert multiassert.drain() == []
