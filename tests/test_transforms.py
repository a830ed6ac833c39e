"""Probes under torch.func transforms, autograd, checkpointing, autocast, tracers and with wrapping tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import multiassert
from multiassert import AsyncAssertionError


def forward(hidden: torch.Tensor) -> torch.Tensor:
    hidden = hidden * 2
    multiassert.maybe_detect_nan(hidden, "hidden")
    multiassert.maybe_detect_inf(hidden, "hidden")
    return hidden.sum()


def bad(device: torch.device) -> torch.Tensor:
    hidden = torch.zeros(4, 8)
    hidden[2, 5] = math.nan
    return hidden.to(device)


def clean(device: torch.device) -> torch.Tensor:
    return torch.zeros(4, 8, device=device)


TRANSFORMS = {
    "grad": lambda x: torch.func.grad(forward)(x),
    "jvp": lambda x: torch.func.jvp(forward, (x,), (torch.ones_like(x),)),
    "vjp": lambda x: torch.func.vjp(forward, x)[1](torch.ones((), device=x.device)),
    "vmap": lambda x: torch.func.vmap(forward)(x),
    "vmap of grad": lambda x: torch.func.vmap(torch.func.grad(forward))(x),
    "jacrev": lambda x: torch.func.jacrev(forward)(x),
    "jacfwd": lambda x: torch.func.jacfwd(forward)(x),
    "hessian": lambda x: torch.func.hessian(forward)(x),
    "functionalize": lambda x: torch.func.functionalize(forward)(x),
    "checkpoint": lambda x: checkpoint(forward, x.requires_grad_(), use_reentrant=False).backward(),
    "autocast": lambda x: _in_autocast(x),
    "inference mode": lambda x: torch.inference_mode()(forward)(x),
    "deterministic": lambda x: _deterministic(x),
}


def _in_autocast(hidden: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return forward(hidden)


def _deterministic(hidden: torch.Tensor) -> torch.Tensor:
    torch.use_deterministic_algorithms(True)
    try:
        return forward(hidden)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_probe_under_a_transform_fires_once_and_names_its_row(name: str, device: torch.device) -> None:
    with multiassert.override("warn"):
        TRANSFORMS[name](clean(device))
        multiassert.step()
        assert multiassert.drain() == []
        TRANSFORMS[name](bad(device))
        multiassert.step()
        (violation,) = multiassert.drain()
    assert (violation.kind, violation.rows, violation.step) == ("nan", (2,), 1)
    assert (violation.site.file, violation.site.function) == (__file__, "forward")


@pytest.mark.parametrize("name", TRANSFORMS)
def test_mode_auto_under_a_transform(name: str, device: torch.device) -> None:
    with multiassert.override("auto"):
        TRANSFORMS[name](clean(device))
        with pytest.raises(AsyncAssertionError, match="NaN detected! hidden"):
            TRANSFORMS[name](bad(device)), multiassert.drain()


def test_a_mask_and_bounds_that_are_batched_too(device: torch.device) -> None:
    def look(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        multiassert.maybe_detect_oob(ids, 0, lengths, "ids")
        return ids

    ids, lengths = torch.tensor([[0, 1], [1, 5]], device=device), torch.tensor([[2, 2], [6, 5]], device=device)
    with multiassert.override("warn"):
        torch.func.vmap(look)(ids, lengths)
        assert [(v.kind, v.rows, v.value) for v in multiassert.drain()] == [("high", (1,), 5)]


@pytest.mark.parametrize("mode", ["auto", "warn", "raise"])
def test_tensors_without_data_are_not_checked(mode: str) -> None:
    with multiassert.override(mode):
        forward(torch.full((4, 8), math.nan, device="meta"))
        with FakeTensorMode():
            forward(torch.full((4, 8), math.nan))
        torch.jit.trace(forward, (torch.full((4, 8), math.nan),), check_trace=False)
        assert multiassert.drain() == []


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_has_no_probe_in_it(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return forward(hidden)

    with multiassert.override("warn"):
        program = torch.export.export(Model(), (torch.zeros(4, 8),), strict=strict)
        program.run_decompositions()
        assert program.module()(torch.zeros(4, 8)) == 0
        assert multiassert.drain() == []


class Wrapping(torch.Tensor):
    """A subclass that changes nothing."""


def test_subclasses_and_parameters(device: torch.device) -> None:
    with multiassert.override("warn"):
        multiassert.maybe_detect_nan(bad(device).as_subclass(Wrapping), "subclass")
        multiassert.maybe_detect_nan(torch.nn.Parameter(bad(device)), "parameter")
        assert [(v.message, v.rows) for v in multiassert.drain()] == [("subclass", (2,)), ("parameter", (2,))]


def test_a_jagged_nested_tensor_is_probed_by_its_values() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 4), torch.full((3, 4), math.nan)], layout=torch.jagged)
    with multiassert.override("warn"):
        multiassert.maybe_detect_nan(nested, "nested")
        assert [v.rows for v in multiassert.drain()] == [(2, 3, 4)]


def test_a_distributed_tensor_is_probed_by_its_local_shard(tmp_path: object) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(bad(torch.device("cpu")), init_device_mesh("cpu", (1,)), [Shard(0)])
        with multiassert.override("warn"):
            multiassert.maybe_detect_nan(sharded, "sharded")
            assert [(v.rows, v.rank) for v in multiassert.drain()] == [((2,), 0)]
    finally:
        torch.distributed.destroy_process_group()
