"""The simulated device itself: real tensors, work that runs late, every host wait counted, each vendor's operators.

pytest tests/test_simulate.py --platform npu        and so musa and generic
"""

from __future__ import annotations

import copy
import gc
import pathlib
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from conftest import ChildRun
from multiassert import backends, simulate
from multiassert.simulate import DeviceFault, HiddenSync, Simulator
from multiassert.simulate.memory import UNWRITTEN, host_view

THIS_FILE = str(pathlib.Path(__file__).resolve())

Run = Callable[[Tensor], object]


@pytest.fixture
def graph_class(simulator: Simulator) -> Any:
    operators = backends.named(simulator.name).operators
    return getattr(getattr(torch, simulator.name), "CUDAGraph" if operators is None else operators.graph_class)


@pytest.fixture
def module(simulator: Simulator) -> Any:
    """torch.npu, torch.musa, torch.generic."""
    return getattr(torch, simulator.name)


@pytest.fixture
def compiled_half(simulator: Simulator) -> None:
    if not simulator.compiled_half:
        pytest.skip("this takes the compiled half")


@pytest.fixture
def only_on(simulator: Simulator) -> Callable[[str], None]:
    def skip_elsewhere(name: str) -> None:
        if simulator.name != name:
            pytest.skip(f"this is about {name}")

    return skip_elsewhere


def bytes_of(tensor: Tensor) -> list[int]:
    """What is in a device tensor's memory right now."""
    return host_view(tensor).contiguous().view(-1).view(torch.uint8).tolist()


def upload(values: list[Any], device: torch.device) -> Tensor:
    """A device tensor, without a host wait."""
    return torch.tensor(values).pin_memory().to(device, non_blocking=True)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors.


def test_a_tensor_is_plain_and_really_on_the_device(simulator: Simulator, device: torch.device) -> None:
    x = torch.zeros(4, device=simulator.name)
    assert type(x) is torch.Tensor
    assert x.device == torch.device(simulator.name, 0) == device
    assert x.untyped_storage().device == device
    assert x.untyped_storage().nbytes() == 16
    assert x.data_ptr() == x.untyped_storage().data_ptr() != 0
    assert x[1:].data_ptr() == x.data_ptr() + 4
    assert getattr(x, f"is_{simulator.name}")
    assert torch.empty(0, device=f"{simulator.name}:0").device == device


def test_torch_knows_the_device(simulator: Simulator, device: torch.device, module: Any) -> None:
    assert torch.get_device_module(device) is module
    assert sys.modules[f"torch.{simulator.name}"] is module
    assert torch.accelerator.current_accelerator() == torch.device(simulator.name)
    assert module.is_available()
    assert module.current_device() == 0
    assert module.device_count() == (2 if simulator.compiled_half else 1)


def test_a_device_that_is_not_there_is_refused(simulator: Simulator, module: Any) -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(2, device=f"{simulator.name}:7")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(2).to(f"{simulator.name}:7")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        module.set_device(7)


FACTORIES: dict[str, tuple[Callable[[torch.device], Tensor], Any]] = {
    "zeros": (lambda device: torch.zeros(2, device=device), [0, 0]),
    "ones": (lambda device: torch.ones(2, device=device), [1, 1]),
    "full": (lambda device: torch.full((2,), 7, device=device), [7, 7]),
    "tensor": (lambda device: torch.tensor([1, 2], device=device), [1, 2]),
    "as_tensor": (lambda device: torch.as_tensor([1, 2], device=device), [1, 2]),
    "scalar": (lambda device: torch.tensor(2.5, device=device), 2.5),
    "arange": (lambda device: torch.arange(3, device=device), [0, 1, 2]),
    "linspace": (lambda device: torch.linspace(0, 1, 3, device=device), [0, 0.5, 1]),
    "eye": (lambda device: torch.eye(2, device=device), [[1, 0], [0, 1]]),
    "tril": (lambda device: torch.ones(2, 2, device=device).tril(), [[1, 0], [1, 1]]),
    "zeros_like": (lambda device: torch.zeros_like(torch.ones(2, device=device)), [0, 0]),
    "new_full": (lambda device: torch.ones(1, device=device).new_full((2,), 3), [3, 3]),
    "empty and fill_": (lambda device: torch.empty(2, device=device).fill_(4), [4, 4]),
    "nothing": (lambda device: torch.zeros(0, 3, device=device), []),
    "randperm, sorted": (lambda device: torch.randperm(4, device=device).sort().values, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories(simulator: Simulator, device: torch.device, name: str) -> None:
    make, values = FACTORIES[name]
    x = make(device)
    assert x.device == device
    assert x.tolist() == values


def test_a_device_scope_is_where_factories_go(simulator: Simulator, device: torch.device) -> None:
    with torch.device(simulator.name):
        assert torch.ones(2).device == device


def test_random_numbers_depend_on_the_seed_and_not_on_when_they_are_made(
    simulator: Simulator, device: torch.device, module: Any
) -> None:
    torch.manual_seed(1)
    host = torch.rand(4)
    torch.manual_seed(1)
    first = torch.rand(4, device=device)
    assert torch.rand(4).tolist() == host.tolist()  # the host's numbers are its own
    state = module.get_rng_state()
    second = torch.rand(4, device=device)
    torch.manual_seed(1)
    first_again = torch.rand(4, device=device)
    module.set_rng_state(state)
    second_again = torch.rand(4, device=device)
    simulator.run_all()
    assert first.tolist() == first_again.tolist()
    assert second.tolist() == second_again.tolist() != first.tolist()
    module.manual_seed(1)
    assert torch.rand(4, device=device).tolist() == first.tolist()


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(simulator: Simulator, device: torch.device, dtype: torch.dtype) -> None:
    bits = torch.arange(32 * dtype.itemsize, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    host = bits.view(dtype).view(4, 8)
    x = host.to(device)
    assert (x.dtype, x.shape, x.device) == (dtype, host.shape, device)
    moved = torch.empty(8, 4, dtype=dtype, device=device).t()  # strided, through a kernel
    moved.copy_(x)
    for back in (x.cpu(), x[1:3].cpu(), moved.cpu()):
        assert back.dtype is dtype
    assert x.cpu().view(torch.uint8).tolist() == host.view(torch.uint8).tolist()
    assert moved.cpu().contiguous().view(torch.uint8).tolist() == host.view(torch.uint8).tolist()
    assert x[1:3].cpu().view(torch.uint8).tolist() == host[1:3].view(torch.uint8).tolist()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_converted_on_the_device(simulator: Simulator, device: torch.device, dtype: torch.dtype) -> None:
    host = torch.tensor([0.0, 1.0, 1.0])
    assert host.to(device).to(dtype).cpu().to(torch.complex64).tolist() == [0, 1, 1]
    assert host.to(dtype).to(device).to(torch.complex64).cpu().tolist() == [0, 1, 1]


def test_the_default_dtype_of_the_call_decides(simulator: Simulator, device: torch.device) -> None:
    ones = torch.ones(2, dtype=torch.int32, device=device)
    assert (ones / ones).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (ones / ones).dtype is torch.float64
        assert torch.zeros(1, device=device).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_views_share_memory(simulator: Simulator, device: torch.device) -> None:
    def change(x: Tensor) -> Tensor:
        x[1].fill_(2)
        x[:, 0] = 5
        x.t()[3, 2] = 9
        x.view(-1)[1:3].add_(1)
        x.unsqueeze(0).squeeze(0).select(0, 2).narrow(0, 1, 1).sub_(4)
        x.unfold(1, 2, 2)[0, 1].neg_()
        x.flatten().view(4, 3).unbind(1)[2].mul_(2)
        x.split(2, dim=1)[1].diagonal().add_(0.5)
        torch.view_as_complex(x.view(3, 2, 2))[2, 1] = 8j
        return x

    assert change(torch.zeros(3, 4, device=device)).tolist() == change(torch.zeros(3, 4)).tolist()


def test_conjugate_and_negative_views(simulator: Simulator, device: torch.device) -> None:
    x = torch.tensor([1 + 2j, 3 - 1j], device=device)
    assert x.conj().is_conj()
    assert x.conj().cpu().tolist() == [1 - 2j, 3 + 1j]
    assert (x.conj() + 1).cpu().tolist() == [2 - 2j, 4 + 1j]
    assert x.conj().imag.cpu().tolist() == [-2, 1]
    x.conj()[0] = 5j
    assert x.cpu().tolist() == [-5j, 3 - 1j]


METADATA_CHANGES: dict[str, Run] = {
    "t_": lambda x: x.t_(),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "as_strided_": lambda x: x.as_strided_((2,), (2,), 1),
    "resize_ smaller": lambda x: x.resize_(1),
    "resize_ larger": lambda x: x.resize_(5000),
    "set_": lambda x: x.set_(torch.zeros(3, device=x.device)),
    "set_ to nothing": lambda x: x.set_(),
    "data": lambda x: setattr(x, "data", torch.zeros(3, device=x.device)),
}


@pytest.mark.parametrize("name", METADATA_CHANGES)
def test_queued_work_has_the_tensors_as_they_were(simulator: Simulator, device: torch.device, name: str) -> None:
    x = upload([[1.0, 2.0], [3.0, 4.0]], device)
    late, gone = torch.zeros(2, 2, pin_memory=True), torch.empty(2, 2, device=device)
    before = x + 1
    late.copy_(x, non_blocking=True)
    gone.copy_(x)
    METADATA_CHANGES[name](x)
    late.t_()
    again = gone.clone()
    METADATA_CHANGES[name](gone)
    simulator.run_all()
    assert before.tolist() == [[2, 3], [4, 5]]
    assert late.tolist() == [[1, 3], [2, 4]]
    assert again.tolist() == [[1, 2], [3, 4]]


def test_changes_of_metadata_are_seen(simulator: Simulator, device: torch.device) -> None:
    x = torch.arange(6, device=device).view(2, 3) + 1  # not run yet
    assert x.t_().tolist() == [[1, 4], [2, 5], [3, 6]]
    assert x.as_strided_((2,), (2,), 1).tolist() == [2, 4]
    assert x.resize_(3).tolist() == [2, 3, 4]
    assert x.resize_(2000).tolist()[:3] == [2, 3, 4]  # moved to larger memory
    assert x.set_().shape == (0,)


def test_in_place_and_out(simulator: Simulator, device: torch.device) -> None:
    a, b = torch.tensor([1.0, 5.0], device=device), torch.tensor([3.0, 2.0], device=device)
    out = torch.empty(2, device=device)
    assert torch.maximum(a, b, out=out) is out
    assert out.tolist() == [3, 5]
    assert a.add_(b) is a
    assert a.tolist() == [4, 7]
    cells = torch.zeros(4, device=device)
    torch.maximum(cells[1], torch.ones((), device=device), out=cells[1])
    torch.amax(torch.arange(4.0, device=device), dim=0, out=cells[2])
    assert cells.tolist() == [0, 1, 3, 0]


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_out_is_resized(simulator: Simulator, device: torch.device, size: int) -> None:
    out = torch.empty(size, device=device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.add(torch.ones(2000, device=device), 1, out=out)
    assert ["resized" in str(warning.message) for warning in caught] == [True] * (size != 0)
    assert out.tolist() == [2] * 2000


def test_a_host_scalar_is_taken_when_the_call_is_made(simulator: Simulator, device: torch.device) -> None:
    factor = torch.tensor(3.0)
    x = torch.ones(2, device=device)
    products = x * factor, factor * x, torch.mul(factor, x, out=torch.empty(2, device=device))
    factor.fill_(9)
    assert [product.tolist() for product in products] == [[3, 3]] * 3
    assert (torch.ones(2, dtype=torch.int32, device=device) * 2.5).tolist() == [2.5, 2.5]
    assert (torch.ones(2, dtype=torch.bool, device=device) + 1).tolist() == [2, 2]
    assert (x * 2j).tolist() == [2j, 2j]


def test_the_index_family(simulator: Simulator, device: torch.device) -> None:
    def run(device: Any) -> list[Any]:
        x = torch.zeros(6, dtype=torch.int32, device=device)
        i = torch.tensor([1, 4], device=device)
        two, eight = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([1, 2], [8]))
        x.index_fill_(0, i, 3)
        x.index_add_(0, i, two)
        x.index_copy_(0, torch.tensor([0], device=device), eight)
        x[torch.tensor([5], device=device)] = 2
        x.index_put_((i,), two, accumulate=True)
        x.scatter_(0, torch.tensor([2], device=device), 7)
        x.scatter_add_(0, i, two)
        y = torch.zeros(3, device=device)
        y.scatter_reduce_(0, torch.tensor([0, 0, 2], device=device), torch.tensor([1.0, 7, 3], device=device), "amax")
        y.masked_fill_(torch.tensor([False, True, False], device=device), -1)
        x[x == 0] = -3
        results = x, y, x.index_select(0, i), x[i], x.take(i), x.gather(0, i), x[x > 3], x[[0, -1]], y.nonzero()
        chosen = torch.where(y > 0, y, torch.zeros_like(y)), torch.searchsorted(y.sort().values, y)
        return [result.cpu().tolist() for result in (*results, *chosen)]

    assert run(device) == run("cpu")


def test_foreach(simulator: Simulator, device: torch.device) -> None:
    tensors = [torch.tensor([1.0, -9.0], device=device), torch.tensor([4.0], device=device)]
    assert [norm.item() for norm in torch._foreach_norm(tensors, float("inf"))] == [9, 4]
    torch._foreach_maximum_(tensors, 0.0)
    torch._foreach_add_(tensors, [torch.ones(2, device=device), torch.ones(1, device=device)])
    assert [tensor.tolist() for tensor in tensors] == [[2, 1], [5]]


FUNCTIONS: dict[str, Run] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.nn.functional.log_softmax(x, 0),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (6,)),
    "rms_norm": lambda x: torch.nn.functional.rms_norm(x, (6,)),
    "batch_norm in evaluation": lambda x: torch.nn.functional.batch_norm(x, x[0], x[1].abs()),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "embedding": lambda x: torch.nn.functional.embedding(torch.tensor([[3, 0]]).to(x.device), x),
    "embedding_bag": lambda x: torch.nn.functional.embedding_bag(torch.tensor([[3, 0]]).to(x.device), x),
    "matmul": lambda x: x @ x.t(),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "topk": lambda x: torch.topk(x, 2).values,
    "sort": lambda x: x.sort(dim=0).indices,
    "argmax": lambda x: x.argmax(-1),
    "cumsum": lambda x: x.cumsum(0),
    "cummax": lambda x: x.cummax(0).values,
    "aminmax": lambda x: torch.stack(torch.aminmax(x)),
    "any and all": lambda x: torch.stack([(x > 0).any(), (x > 0).all(), torch.isfinite(x).all(), x.isnan().any()]),
    "unique": lambda x: torch.unique(x.round()),
    "cat and stack": lambda x: torch.cat([torch.stack([x, x])[1], x]),
    "repeat and roll": lambda x: x.repeat(2, 1).roll(1, 0).flip(1),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2)),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "equal": lambda x: torch.tensor([torch.equal(x, x), torch.allclose(x, x + 1)]),
    "bitwise": lambda x: (x > 0) ^ (x < 1) | ~(x == 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_the_cpus(simulator: Simulator, device: torch.device, name: str) -> None:
    host = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    result, expected = FUNCTIONS[name](host.to(device)), FUNCTIONS[name](host)
    assert isinstance(result, Tensor)
    assert isinstance(expected, Tensor)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(result.cpu(), expected)


# ---------------------------------------------------------------------------------------------------------------------
# What torch builds on tensors.


def test_a_training_step_is_the_cpus_and_waits_for_nothing(simulator: Simulator, device: torch.device) -> None:
    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)
        return torch.nn.Sequential(*layers)

    inputs, targets = torch.randn(3, 4), torch.tensor([0, 1, 1])
    reference, model = build(), build().to(device)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (reference, model)]
    torch.nn.functional.cross_entropy(reference(inputs), targets).backward()
    optimizers[0].step()
    simulator.run_all()
    simulator.reset()
    with simulator.no_sync():
        on_device = [host.pin_memory().to(device, non_blocking=True) for host in (inputs, targets)]
        torch.nn.functional.cross_entropy(model(on_device[0]), on_device[1]).backward()
    assert simulator.waits == []
    optimizers[1].step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), atol=1e-4, rtol=1e-4)


def test_autocast_checkpoint_and_vmap(simulator: Simulator, device: torch.device) -> None:
    with torch.autocast(simulator.name, dtype=torch.bfloat16):
        assert (torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device)).tolist() == [[2, 2], [2, 2]]
    x = torch.ones(2, device=device, requires_grad=True)
    torch.utils.checkpoint.checkpoint(lambda y: (y * 2).sum(), x, use_reentrant=False).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]
    assert torch.func.vmap(torch.amax)(torch.arange(6.0, device=device).view(2, 3)).tolist() == [2, 5]
    gradient = torch.func.grad(lambda y: (y * y).sum())(torch.arange(3.0, device=device))
    assert gradient.tolist() == [0, 2, 4]


def test_inference_mode(simulator: Simulator, device: torch.device) -> None:
    with torch.inference_mode():
        x = torch.zeros(3, device=device)
        x[0] = 1
        late = torch.zeros((), pin_memory=True).copy_(x.amax(), non_blocking=True)
    simulator.run_all()  # outside, where torch lets nobody write to a tensor of inference mode
    assert late.item() == 1
    assert x.tolist() == [1, 0, 0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code(simulator: Simulator, device: torch.device, backend: str) -> None:
    def step(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.nn.functional.gelu(x @ weights)
        flags = torch.zeros(2, dtype=torch.int32, device=x.device)
        flags[1].logical_or_((y > 0).any())
        return y.amax(), flags

    x, weights = torch.ones(3, 4, device=device), torch.ones(4, 5, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    compiled(x, weights)
    with simulator.no_sync():
        largest, flags = compiled(x, weights)
    torch.testing.assert_close(largest.cpu(), step(x, weights)[0].cpu())
    assert flags.tolist() == [0, 1]


def test_fake_tensors(simulator: Simulator, device: torch.device) -> None:
    with FakeTensorMode():
        result = (torch.empty(3, device=device) + 1).amax()
    assert (result.device, result.shape) == (device, ())
    assert simulator.kernels == []


def test_save_and_load(simulator: Simulator, device: torch.device, tmp_path: pathlib.Path) -> None:
    torch.save(torch.arange(3.0, device=device), tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", map_location="cpu").tolist() == [0, 1, 2]


def test_threads(simulator: Simulator, device: torch.device, module: Any) -> None:
    sums: dict[int, float] = {}

    def work(number: int) -> None:
        with module.stream(module.Stream()):
            x = torch.full((4,), float(number), device=device)
            for _ in range(20):
                x = x + 1
            sums[number] = x.sum().item()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {number: 4.0 * (number + 20) for number in range(6)}
    assert module.current_stream() == module.default_stream()


def test_memory_is_freed_once_its_work_has_run(simulator: Simulator, device: torch.device) -> None:
    x = torch.ones(100, device=device)
    y = x + 1
    storage = StorageWeakRef(x.untyped_storage())
    del x
    gc.collect()
    assert not storage.expired()  # the queue needs it
    simulator.run_all()
    gc.collect()
    assert storage.expired()
    assert y.tolist() == [2] * 100


# ---------------------------------------------------------------------------------------------------------------------
# Time.


def test_nothing_is_there_before_the_work_has_run(simulator: Simulator, device: torch.device) -> None:
    with simulator.no_sync():
        x = torch.ones(2, device=device)
        y = x * 2
        assert bytes_of(x) == bytes_of(y) == [UNWRITTEN] * 8
        assert simulator.pending == 2
        assert simulator.advance() == 1
        assert host_view(x).tolist() == [1, 1]
        assert bytes_of(y) == [UNWRITTEN] * 8
        assert simulator.advance(5) == 1
        assert host_view(y).tolist() == [2, 2]
        assert simulator.pending == 0
        x.zero_()
        assert host_view(x).tolist() == [1, 1]
        simulator.run_all()
        assert host_view(x).tolist() == [0, 0]
    assert simulator.waits == []


def test_a_wait_runs_the_work(simulator: Simulator, device: torch.device) -> None:
    x = (torch.zeros(3, device=device) + 1).amax()
    assert simulator.pending == 3
    assert x.item() == 1
    assert simulator.pending == 0
    assert [wait.kind for wait in simulator.waits] == ["item"]


def test_copies_to_pinned_memory_are_late(simulator: Simulator, device: torch.device) -> None:
    x = torch.ones(3, device=device)
    written = torch.zeros(3, pin_memory=True)
    narrower = torch.zeros(3, dtype=torch.int8).pin_memory()
    with simulator.no_sync():
        assert written.copy_(x, non_blocking=True) is written
        narrower.copy_(x, non_blocking=True)
        simulator.advance(1)
        assert written.tolist() == narrower.tolist() == [0, 0, 0]
        simulator.run_all()
    assert written.tolist() == narrower.tolist() == [1, 1, 1]
    assert simulator.waits == []


def test_copies_from_pinned_memory_are_late(simulator: Simulator, device: torch.device) -> None:
    host = torch.zeros(2).pin_memory()
    with simulator.no_sync():
        x = host.to(device, non_blocking=True)
    host.fill_(7)  # too early: a race on hardware, here the device always loses it
    assert x.tolist() == [7, 7]


def test_pinned_memory_is_known(simulator: Simulator, device: torch.device) -> None:
    assert torch.zeros(3, pin_memory=True).is_pinned()
    assert torch.zeros(3).pin_memory()[1:].is_pinned()
    assert not torch.zeros(3).is_pinned()
    assert not torch.zeros(3, device=device).is_pinned()


@pytest.mark.parametrize("name", ["empty", "zeros", "ones", "rand"])
def test_pinned_factories(simulator: Simulator, name: str) -> None:
    assert getattr(torch, name)(3, pin_memory=True).is_pinned()


UNPINNED: dict[str, Callable[[], Tensor]] = {
    "not pinned": lambda: torch.zeros(3),
    "strided": lambda: torch.zeros(3, 2).pin_memory()[:, 0],
}


@pytest.mark.parametrize("name", UNPINNED)
def test_copies_to_other_host_memory_wait(simulator: Simulator, device: torch.device, name: str) -> None:
    x = torch.ones(3, device=device)
    written = UNPINNED[name]()
    written.copy_(x, non_blocking=True)
    (wait,) = simulator.waits
    assert wait.kind == "copy to host"
    assert "although non_blocking" in wait.what
    assert written.tolist() == [1, 1, 1]


def test_copies_from_unpinned_memory_wait_where_the_vendor_waits(simulator: Simulator, device: torch.device) -> None:
    host = torch.ones(3)
    x = host.to(device, non_blocking=True)
    host.fill_(7)  # no race: the memory was staged, or the host has waited
    assert [wait.kind for wait in simulator.waits] == ["copy to device"] * (simulator.name == "npu")
    assert x.tolist() == [1, 1, 1]


READS: dict[str, tuple[str, Run]] = {
    "item": ("item", lambda x: x.amax().item()),
    "bool": ("item", lambda x: bool(x.any())),
    "if": ("item", lambda x: 1 if x.any() else 2),
    "int": ("item", lambda x: int(x.sum())),
    "float in a format": ("item", lambda x: f"{x.sum():.1f}"),
    "equal": ("item", lambda x: torch.equal(x, x)),
    "allclose": ("item", lambda x: torch.allclose(x, x)),
    "iteration": ("item", lambda x: [float(value) for value in x]),
    "in": ("item", lambda x: 1.0 in x),
    "tolist": ("copy to host", lambda x: x.tolist()),
    "cpu": ("copy to host", lambda x: x.cpu()),
    "to cpu": ("copy to host", lambda x: x.to("cpu")),
    "numpy": ("copy to host", lambda x: x.numpy(force=True)),
    "copy_": ("copy to host", lambda x: torch.empty(3).copy_(x)),
    "print": ("copy to host", lambda x: repr(x)),
    "tensor from host data": ("copy to device", lambda x: torch.tensor([1.0], device=x.device)),
    "copy_ from the host": ("copy to device", lambda x: x.copy_(torch.ones(3))),
    "host index": ("copy to device", lambda x: x[torch.tensor([0, 2])]),
    "list index": ("copy to device", lambda x: x[[0, 2]]),
    "nonzero": ("data dependent", lambda x: x.nonzero()),
    "mask index": ("data dependent", lambda x: x[x > 0]),
    "masked_select": ("data dependent", lambda x: x.masked_select(x > 0)),
    "unique": ("data dependent", lambda x: torch.unique(x)),
    "repeat_interleave": ("data dependent", lambda x: x.repeat_interleave(torch.ones_like(x, dtype=torch.int64))),
    "synchronize": ("device", lambda x: torch.get_device_module(x.device).synchronize()),
    "stream": ("stream", lambda x: torch.get_device_module(x.device).current_stream().synchronize()),
    "event": ("event", lambda x: torch.get_device_module(x.device).current_stream().record_event().synchronize()),
}


@pytest.mark.parametrize("name", READS)
def test_a_host_read_is_counted_and_refused_at_its_line(simulator: Simulator, device: torch.device, name: str) -> None:
    kind, read = READS[name]
    x = torch.ones(3, device=device)
    read(x)
    assert kind in [wait.kind for wait in simulator.waits]
    assert simulator.pending == 0 or kind in ("copy to device", "data dependent")
    line = read.__code__.co_firstlineno
    assert {wait.place.rpartition(" in ")[0] for wait in simulator.waits} == {f"{THIS_FILE}:{line}"}
    assert simulator.waits[0].stack[-1].filename != THIS_FILE  # all of the stack is kept
    x = torch.ones(3, device=device)
    with simulator.no_sync(), pytest.raises(HiddenSync, match="the host would wait") as refused:
        read(x)
    assert f"{THIS_FILE}:{line}" in str(refused.value)
    # Where torch prints a tensor, a frame holds a guard that switches torch.func off, for as long as the frame lives.
    traceback.clear_frames(refused.tb)


def test_no_sync_ends_with_its_scope(simulator: Simulator, device: torch.device, module: Any) -> None:
    x = torch.ones((), device=device)
    with simulator.no_sync():
        with simulator.no_sync(), pytest.raises(HiddenSync):
            x.item()
        with pytest.raises(HiddenSync):
            x.item()
        simulator.run_all()
        simulator.reset()
    assert x.item() == 1
    module.set_sync_debug_mode("error")
    with pytest.raises(HiddenSync):
        x.item()
    module.set_sync_debug_mode(0)
    assert x.item() == 1


def test_ordinary_work_waits_for_nothing(simulator: Simulator, device: torch.device) -> None:
    with simulator.no_sync():
        x = torch.randn(8, 8, device=device)
        y = torch.softmax(x @ x.t(), -1)
        bad = ~torch.isfinite(y)
        cells = torch.zeros(4, dtype=torch.int32, device=device)
        cells[2] |= 1
        cells[1].logical_or_(bad.any())
        cells[0] = 5
        cells[3].copy_(bad.sum())
        cells.masked_fill_(cells > 3, 2)
        torch.cat([y, x]).reshape(-1)[::2].unsqueeze(0).expand(2, -1).contiguous()
        (y.amax() - y.amin()).clamp_(max=1).ne(0).all()
        torch.where(y > 0, y, 0.0).max(dim=0)
        x[torch.zeros(3, dtype=torch.int64, device=device)].index_select(0, torch.arange(2, device=device))
        torch.full((), 3.0, device=device)
        x.to(torch.bfloat16).float().topk(3)
        _ = x.shape, x.device, x.is_contiguous(), x.data_ptr()
    assert simulator.waits == []
    assert simulator.fallbacks == []
    assert simulator.pending > 20


def test_record_is_the_ledger_of_its_scope(simulator: Simulator, device: torch.device) -> None:
    x = torch.ones(3, device=device)
    x.sum().item()
    with simulator.record() as ledger:
        x.mul_(2)
        x.cpu()
    x.add_(1)
    assert ledger.kernels == ["aten::mul_.Tensor", "copy to host"]
    assert [wait.kind for wait in ledger.waits] == ["copy to host"]
    assert ledger.fallbacks == []
    assert simulator.kernels[-1] == "aten::add_.Tensor"
    assert len(simulator.waits) == 2
    simulator.reset()
    assert (simulator.kernels, simulator.waits, simulator.pending) == ([], [], 0)


def test_in_eager_mode_work_runs_at_once(simulator: Simulator, device: torch.device) -> None:
    simulator.reset(eager=True)
    x = torch.ones(2, device=device).add_(1)
    late = torch.zeros(2, pin_memory=True).copy_(x, non_blocking=True)
    assert late.tolist() == [2, 2]
    assert (simulator.pending, simulator.waits) == (0, [])
    simulator.reset()
    torch.ones(2, device=device)
    assert simulator.pending == 1


# ---------------------------------------------------------------------------------------------------------------------
# Streams, events, graphs.


def test_streams_run_apart_and_events_order_them(simulator: Simulator, device: torch.device, module: Any) -> None:
    one, other = module.Stream(), module.Stream()
    assert len({one, other, module.current_stream()}) == 3
    x = torch.zeros(2, device=device)
    simulator.run_all()
    with module.stream(one):
        assert module.current_stream() == one
        x.add_(1)
        event = one.record_event()
    assert module.current_stream() == module.default_stream()
    with module.stream(other):
        other.wait_event(event)
        y = x * 10
        independent = torch.ones(1, device=device)
    assert (one.query(), other.query(), event.query()) == (False, False, False)
    assert module.current_stream().query()
    assert (
        simulator.advance(2, stream=other.stream_id) == 2
    )  # the wait, which brings `one` to the event, and the product
    assert (event.query(), one.query(), other.query()) == (True, True, False)
    assert host_view(y).tolist() == [10, 10]
    other.synchronize()
    assert other.query()
    assert host_view(independent).tolist() == [1]
    assert [wait.kind for wait in simulator.waits] == ["stream"]


def test_a_wait_is_for_its_own_stream_and_up_to_its_event(
    simulator: Simulator, device: torch.device, module: Any
) -> None:
    stream = module.Stream()
    with module.stream(stream):
        x = torch.ones(1, device=device)
        event = module.Event()
        event.record()
        x.add_(1)
    assert torch.zeros(1, device=device).item() == 0  # a wait for the default stream
    assert simulator.pending == 3
    event.synchronize()
    assert (event.query(), simulator.pending) == (True, 1)
    event.record(stream)
    assert not event.query()
    module.current_stream().wait_stream(stream)
    assert x.item() == 2
    assert module.Event().query()  # never recorded


def test_an_event_that_a_reset_has_forgotten_holds_nobody_up(
    simulator: Simulator, device: torch.device, module: Any
) -> None:
    torch.ones(1, device=device)
    event = module.current_stream().record_event()
    assert not event.query()
    simulator.reset()
    stream = module.Stream()
    stream.wait_event(event)
    assert (event.query(), simulator.pending) == (True, 0)


def test_a_graph_replays_its_work_over_the_same_memory(
    simulator: Simulator, device: torch.device, module: Any, graph_class: Any
) -> None:
    x, flag = torch.zeros(3, device=device), torch.zeros((), device=device)
    late = torch.zeros((), pin_memory=True)
    graph = graph_class()
    assert not module.is_current_stream_capturing()
    with module.graph(graph):
        assert module.is_current_stream_capturing()
        bad = (x < 0).any()
        torch.maximum(flag, bad.to(flag.dtype), out=flag)
        late.copy_(flag, non_blocking=True)
        assert simulator.pending == 0
    assert not module.is_current_stream_capturing()
    assert "aten::maximum.out" not in simulator.kernels
    x[1] = -2
    simulator.run_all()
    assert (flag.item(), late.item()) == (0, 0)  # nothing of the capture has run
    with simulator.no_sync():
        graph.replay()
        assert late.item() == 0
        simulator.run_all()
        assert late.item() == 1
        late.zero_()
        x.fill_(1)
        graph.replay()
        simulator.run_all()
    assert late.item() == 1  # the flag stays, as a running maximum
    assert simulator.kernels.count("aten::maximum.out") == 2


@pytest.mark.parametrize("name", ["item", "cpu", "nonzero", "synchronize", "stream", "event"])
def test_a_host_wait_inside_a_capture_raises(
    simulator: Simulator, device: torch.device, module: Any, graph_class: Any, name: str
) -> None:
    x = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), module.graph(graph_class()):
        READS[name][1](x)
    assert not module.is_current_stream_capturing()
    assert x.amax().item() == 1


def test_what_cannot_be_captured_is_refused(
    simulator: Simulator, device: torch.device, module: Any, graph_class: Any
) -> None:
    x = torch.ones(3, device=device)
    event = module.current_stream().record_event()
    stream = module.Stream()
    with module.graph(graph_class()):
        for ask in (event.query, stream.query, module.synchronize):
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                ask()
        with pytest.raises(NotImplementedError, match="second stream is not simulated"):
            stream.wait_event(module.current_stream().record_event())
        with pytest.raises(NotImplementedError, match="no meta kernel for aten::_cummax_helper"):
            x.cummax(0)
    with pytest.raises(RuntimeError, match="a stream that is not the default one"):
        graph_class().capture_begin()


def test_nested_captures_are_refused(simulator: Simulator, module: Any, graph_class: Any) -> None:
    outer, inner = graph_class(), graph_class()
    with module.stream(module.Stream()):
        outer.capture_begin()
        with pytest.raises(RuntimeError, match="a capture is already under way"):
            inner.capture_begin()
        outer.capture_end()
        inner.capture_begin()
        inner.capture_end()
    assert not module.is_current_stream_capturing()


# ---------------------------------------------------------------------------------------------------------------------
# Failures.


def test_a_bad_index_is_found_late_and_stays(simulator: Simulator, device: torch.device, module: Any) -> None:
    x, index = torch.zeros(3, device=device), upload([7], device)
    stream = module.Stream()
    with simulator.no_sync():
        x.index_select(0, index)
        event = module.current_stream().record_event()
        later = torch.ones(2, device=device)
        simulator.run_all()
    assert bytes_of(later) == [UNWRITTEN] * 8  # a device that has failed does no more work
    for ask in (later.cpu, module.synchronize, event.query, event.synchronize, stream.query, stream.synchronize):
        with pytest.raises(DeviceFault, match="out of range"):
            ask()
    simulator.reset()
    assert torch.ones((), device=device).item() == 1


def test_shape_errors_are_found_at_once(simulator: Simulator, device: torch.device) -> None:
    x, y = torch.ones(3, device=device), torch.ones(2, device=device)
    for call in (
        lambda: x + y,
        lambda: x.copy_(y),
        lambda: x.copy_(torch.ones(2)),
        lambda: torch.ones(3).copy_(y),
        lambda: x.view(2),
        lambda: x @ y,
        lambda: x.index_select(1, torch.zeros(1, dtype=torch.int64, device=device)),
        lambda: torch.cat([x, y.view(1, 2)]),
    ):
        with pytest.raises((RuntimeError, IndexError)) as raised:
            call()
        assert not isinstance(raised.value, DeviceFault)
    simulator.run_all()
    assert simulator.fault is None


def test_devices_do_not_mix(simulator: Simulator, device: torch.device) -> None:
    x, index = torch.ones(2, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    assert (x * torch.tensor(3.0)).tolist() == [3, 3]  # but for host scalars
    for call in (
        lambda: x + torch.ones(2),
        lambda: torch.ones(2) + x,
        lambda: torch.cat([x, torch.ones(2)]),
        lambda: torch.maximum(x, x, out=torch.ones(2)),
        lambda: x.index_put_((index,), torch.ones(2)),
        lambda: x.gather(0, index.cpu()),
        lambda: torch.equal(x, torch.ones(2)),
    ):
        with pytest.raises(RuntimeError, match="same device|different devices"):
            call()


# ---------------------------------------------------------------------------------------------------------------------
# The vendors' operators.


def test_the_device_has_the_listed_operators_and_no_others(simulator: Simulator) -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    in_torch = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    operators = backends.named(simulator.name).operators
    of_the_cpu = {name for name in in_torch if has_kernel(name, "CPU")}
    listed = of_the_cpu if operators is None else operators.native() & in_torch
    there = {name for name in in_torch if has_kernel(name, "PrivateUse1")}
    composites = "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"
    by_torch = {name for name in in_torch if any(has_kernel(name, composite) for composite in composites)}
    assert len(there) > 1000
    # What only devices have, and not the CPU. Nothing calls the second copy where the first is there.
    assert there - listed <= {"aten::_copy_from", "aten::record_stream"}
    assert listed - there - by_torch <= {"aten::_copy_from_and_resize"}


def test_npu_asserts_on_the_cpu_and_waits(
    simulator: Simulator, device: torch.device, only_on: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_on("npu")
    monkeypatch.delenv("TORCH_NPU_FALLBACK_CPU_DISABLE", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._assert_async(torch.ones((), device=device), "holds")
        assert simulator.fallbacks == ["aten::_assert_async.msg"]
        assert [wait.kind for wait in simulator.waits] == ["cpu fallback"]
        with pytest.raises(RuntimeError, match="does not hold"):
            torch._assert_async(torch.zeros((), device=device), "does not hold")
        with simulator.no_sync(), pytest.raises(HiddenSync, match="cpu fallback: aten::_assert_async"):
            torch._assert_async(torch.ones((), device=device), "holds")


def test_npu_falls_back_with_the_right_result_and_one_warning(
    simulator: Simulator, device: torch.device, only_on: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_on("npu")
    monkeypatch.delenv("TORCH_NPU_FALLBACK_CPU_DISABLE", raising=False)
    x, y = torch.tensor([1.0, float("nan")], device=device), torch.tensor([0.0, 2.0], device=device)
    with pytest.warns(UserWarning, match="The operator 'aten::fmin.out' is not currently supported on the NPU backend"):
        assert torch.fmin(x, y).tolist() == [0, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = torch.zeros(4, device=device)
        torch.fmin(x, y, out=out[1:3])
    assert out.tolist() == [0, 0, 2, 0]
    assert simulator.fallbacks == ["aten::fmin.out"] * 2


def test_npu_fallbacks_can_be_forbidden(
    simulator: Simulator, device: torch.device, only_on: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_on("npu")
    monkeypatch.setenv("TORCH_NPU_FALLBACK_CPU_DISABLE", "1")
    x = torch.ones(2, device=device)
    for call in (lambda: torch.fmin(x, x), lambda: torch._assert_async(x[0], "holds")):
        with pytest.raises(RuntimeError, match="TORCH_NPU_FALLBACK_CPU_DISABLE=1"):
            call()
    assert (simulator.fallbacks, simulator.waits) == ([], [])


def test_musa_asserts_by_reading_and_raises_at_the_call(
    simulator: Simulator, device: torch.device, only_on: Callable[[str], None]
) -> None:
    only_on("musa")
    torch._assert_async(torch.ones((), device=device))
    assert [wait.kind for wait in simulator.waits] == ["item"]
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value, but got zero"):
        torch._assert_async(torch.zeros((), device=device))
    with pytest.raises(RuntimeError, match="does not hold"):
        torch._assert_async(torch.zeros((), device=device), "does not hold")
    with pytest.raises(RuntimeError, match="more than one value is ambiguous"):
        torch._assert_async(torch.ones(2, device=device))


@pytest.mark.parametrize("name", ["_logcumsumexp", "_functional_assert_async"])
def test_musa_has_no_fallback(
    simulator: Simulator, device: torch.device, only_on: Callable[[str], None], name: str
) -> None:
    only_on("musa")
    x = torch.ones((), device=device)
    with pytest.raises(NotImplementedError, match=f"Could not run 'aten::{name}"):
        x.logcumsumexp(0) if name == "_logcumsumexp" else torch.ops.aten._functional_assert_async.msg(x, "holds", x)


def test_generic_asserts_on_the_device(
    simulator: Simulator, device: torch.device, module: Any, graph_class: Any, only_on: Callable[[str], None]
) -> None:
    only_on("generic")
    x = torch.ones((), device=device)
    with simulator.no_sync():
        torch._assert_async(x, "holds")
        simulator.run_all()
        assert simulator.fault is None
    graph = graph_class()
    with module.graph(graph):
        torch._assert_async(x, "does not hold")
    x.zero_()
    with simulator.no_sync():
        torch._assert_async(x, "does not hold")
        torch._assert_async(x, "comes too late")
    for _ in range(2):
        with pytest.raises(DeviceFault, match="device-side assert triggered: does not hold"):
            module.synchronize()
    simulator.reset()
    graph.replay()
    with pytest.raises(DeviceFault, match="does not hold"):
        x.item()


# Operators that the vendors list and whose kernels wait all the same, and near relatives that do not: how many waits.
VENDORS_WAITS: dict[str, tuple[dict[str, int], Callable[[Tensor, Tensor, Tensor, Tensor], object]]] = {
    "scatter_reduce_ amax": ({"npu": 4}, lambda x, i, m, v: x.scatter_reduce_(0, i, x[:2], "amax")),
    "scatter_reduce amax": ({"npu": 4}, lambda x, i, m, v: x.scatter_reduce(0, i, x[:2], "amax")),
    "scatter_reduce_ sum": ({}, lambda x, i, m, v: x.scatter_reduce_(0, i, x[:2], "sum")),
    "scatter_reduce_ sum, without self": (
        {"npu": 4},
        lambda x, i, m, v: x.scatter_reduce_(0, i, x[:2], "sum", include_self=False),
    ),
    "scatter_ number": ({}, lambda x, i, m, v: x.scatter_(0, i, 1.0)),
    "fill_ number": ({}, lambda x, i, m, v: x.fill_(1.0)),
    "fill_ device scalar": ({"musa": 1}, lambda x, i, m, v: x.fill_(v)),
    "masked_fill_ number": ({}, lambda x, i, m, v: x.masked_fill_(m, 2.0)),
    "masked_fill_ device scalar": ({"musa": 1}, lambda x, i, m, v: x.masked_fill_(m, v)),
    "index_fill_ number": ({"npu": 2}, lambda x, i, m, v: x.index_fill_(0, i, 1.0)),
    "index_fill_ device scalar": ({"npu": 3, "musa": 1}, lambda x, i, m, v: x.index_fill_(0, i, v)),
    "where device scalar": ({}, lambda x, i, m, v: torch.where(m, x, v)),
    "where number": ({}, lambda x, i, m, v: torch.where(m, x, 0.0)),
    "where host scalar": ({"musa": 1}, lambda x, i, m, v: torch.where(m, x, torch.tensor(0.0))),
    "clamp numbers": ({}, lambda x, i, m, v: x.clamp(0, 1)),
    "clamp device scalars": ({"musa": 2}, lambda x, i, m, v: x.clamp(v, v)),
    "clamp one device scalar": ({}, lambda x, i, m, v: x.clamp(min=v)),
    "x[mask] = number": ({"npu": 1, "musa": 1, "generic": 1}, lambda x, i, m, v: x.__setitem__(m, 3.0)),
    "x[index] = device values": ({}, lambda x, i, m, v: x.__setitem__(i, x[:2])),
    "x[0] = number": ({}, lambda x, i, m, v: x.__setitem__(0, 3.0)),
    "copy_ into a cell": ({}, lambda x, i, m, v: x[1].copy_(v)),
    "maximum into a cell": ({}, lambda x, i, m, v: torch.maximum(x[1], v, out=x[1])),
    "amax into a cell": ({}, lambda x, i, m, v: torch.amax(x, 0, out=x[2])),
    "logical_or_": ({}, lambda x, i, m, v: x[3].logical_or_(v)),
    "add_": ({}, lambda x, i, m, v: x[3].add_(v)),
}


@pytest.mark.parametrize("name", VENDORS_WAITS)
def test_kernels_that_wait_are_counted(simulator: Simulator, device: torch.device, name: str) -> None:
    waits, call = VENDORS_WAITS[name]
    arguments = torch.zeros(4, device=device), upload([0, 2], device), upload([True, False] * 2, device)
    call(*arguments, torch.ones((), device=device))
    assert len(simulator.waits) == waits.get(simulator.name, 0), list(map(str, simulator.waits))
    assert {wait.place.rpartition(":")[0] for wait in simulator.waits} <= {THIS_FILE}


def test_operators_without_a_meta_kernel_run_at_once_and_count_no_wait(
    simulator: Simulator, device: torch.device
) -> None:
    x = torch.zeros(3, device=device) + 1
    with simulator.no_sync():
        values = x.cummax(0).values
    assert host_view(values).tolist() == [1, 1, 1]
    assert "aten::_cummax_helper" in simulator.kernels


# ---------------------------------------------------------------------------------------------------------------------
# With the compiled half.


def test_to_cpu_without_blocking_is_pinned_and_late(
    simulator: Simulator, device: torch.device, compiled_half: None
) -> None:
    x = torch.ones(3, device=device)
    simulator.run_all()
    with simulator.no_sync():
        host = x.to("cpu", non_blocking=True)
        assert host.is_pinned()
        host.zero_()
        simulator.run_all()
    assert host.tolist() == [1, 1, 1]


def test_torchs_own_events_and_streams(simulator: Simulator, device: torch.device, compiled_half: None) -> None:
    event = torch.Event(device=device)
    x = torch.ones(2, device=device)
    event.record()
    assert not event.query()
    with simulator.no_sync(), pytest.raises(HiddenSync):  # through C++, unchanged
        event.synchronize()
    event.synchronize()
    assert event.query()
    stream = torch.Stream(device=device)
    with stream:
        assert torch.accelerator.current_stream() == stream
        x.add_(1)
        later = stream.record_event()
    assert (stream.query(), later.query()) == (False, False)
    stream.synchronize()
    assert (stream.query(), later.query()) == (True, True)
    x.mul_(2)
    torch.accelerator.current_stream().wait_event(later)
    torch.accelerator.synchronize()
    assert host_view(x).tolist() == [4, 4]
    assert [wait.kind for wait in simulator.waits] == ["event", "event", "stream", "device"]


def test_two_devices(simulator: Simulator, module: Any, compiled_half: None) -> None:
    first, second = torch.device(simulator.name, 0), torch.device(simulator.name, 1)
    assert torch.accelerator.device_count() == module.device_count() == 2
    x = torch.ones(2, device=second)
    with simulator.no_sync():
        y = x.to(first)
        x.zero_()  # after the copy, although on another device's stream
        z = y + 1
        assert simulator.advance(3, index=1) == 3
    with pytest.raises(RuntimeError, match="same device"):
        x + y
    assert (z.device, z.tolist()) == (first, [2, 2])
    assert x.tolist() == [0, 0]
    with torch.accelerator.device_index(1):
        assert torch.empty(1, device=simulator.name).device == second
    with module.device(1):
        assert module.current_device() == 1
        assert torch.empty(1, device=simulator.name).device == second
        assert module.current_stream().device_index == 1
    assert module.current_device() == 0


def test_generators(simulator: Simulator, device: torch.device, compiled_half: None) -> None:
    generator = torch.Generator(device=simulator.name).manual_seed(3)
    assert generator.device == device
    first, second = (torch.rand(4, generator=generator, device=device) for _ in range(2))
    generator.manual_seed(3)
    again = torch.rand(4, generator=generator, device=device)
    assert first.tolist() == again.tolist() != second.tolist()


def test_storages_and_deep_copies(simulator: Simulator, device: torch.device, compiled_half: None) -> None:
    storage = torch.UntypedStorage(8, device=device)
    assert (storage.device, storage.nbytes()) == (device, 8)
    model = torch.nn.Linear(2, 2).to(device)
    twin = copy.deepcopy(model)
    assert twin.weight.data_ptr() != model.weight.data_ptr()
    assert twin.weight.tolist() == model.weight.tolist()


def test_loading_on_to_the_device(
    simulator: Simulator, device: torch.device, tmp_path: pathlib.Path, compiled_half: None
) -> None:
    torch.save(torch.arange(3.0), tmp_path / "x.pt")
    x = torch.load(tmp_path / "x.pt", map_location=device)
    assert (x.device, x.tolist()) == (device, [0, 1, 2])


# ---------------------------------------------------------------------------------------------------------------------
# Installing it, in processes of their own.


def test_installing_twice_returns_the_same(simulator: Simulator) -> None:
    assert simulate.install(simulator.name) is simulate.installed() is simulator
    with pytest.raises(RuntimeError, match=f"simulates {simulator.name} already, and can simulate one vendor only"):
        simulate.install("musa" if simulator.name == "npu" else "npu")


@pytest.mark.parametrize("name", ["cpu", "cuda", "NPU", "banana", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"cannot simulate {name!r}: good names are npu, musa and generic"):
        simulate.install(name)


def test_a_taken_slot_is_refused(run_child: ChildRun) -> None:
    child = run_child(
        """
        import torch
        torch.utils.rename_privateuse1_backend("taken")
        from multiassert import simulate
        try:
            simulate.install("npu")
        except RuntimeError as error:
            print(error, simulate.installed())
        """
    )
    assert child.stdout == "torch's slot for an out-of-tree device is taken in this process, by taken None\n", (
        child.stderr
    )


def test_without_a_compiler_the_warning_says_what_is_missing(run_child: ChildRun) -> None:
    child = run_child(
        """
        import warnings
        from multiassert import simulate
        try:
            simulate.install("npu", use_compiler=True)
        except RuntimeError as error:
            print(error)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            simulator = simulate.install("npu")
        print(*(warning.message for warning in caught if warning.category is UserWarning))
        print(simulator.compiled_half)
        """,
        PATH="",
        CXX="",
    )
    assert child.returncode == 0, child.stderr
    error, warning, compiled_half = child.stdout.splitlines()
    for text in (error, warning):
        assert text.startswith("no C++ compiler was found. Without the compiled half there is one device, torch.Event")
        assert text.endswith("c++ or g++ on PATH, or what CXX names.")
    assert compiled_half == "False"


def test_a_compiler_that_fails_says_so(run_child: ChildRun) -> None:
    failing = f"{sys.executable} -c 'raise SystemExit(1)'"
    child = run_child("from multiassert import simulate; simulate.install('npu')", CXX=failing)
    assert child.returncode == 1
    assert "RuntimeError: the compiled half of the simulated device does not build" in child.stderr


def test_these_tests_pass_without_the_compiled_half(simulator: Simulator, run_child: ChildRun) -> None:
    if not simulator.compiled_half:
        pytest.skip("they are run without it right now")
    child = run_child(
        f"""
        import pytest
        from multiassert import simulate
        simulate.install({simulator.name!r}, use_compiler=False)
        options = "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--platform", {simulator.name!r}
        raise SystemExit(pytest.main([*options, {THIS_FILE!r}]))
        """,
        PYTEST_ADDOPTS="",
    )
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-3000:]
    assert "this takes the compiled half" not in child.stdout
