"""get_src_tgt_cache_loc against the arithmetic done by hand."""

from __future__ import annotations

import pytest
import torch

import multiassert
from multiassert import get_src_tgt_cache_loc, speculative

DRAFT = 8


def by_hand(seq_lens, out_cache_loc, accept_index, num_correct, page_size):  # type: ignore[no-untyped-def]
    source = [out_cache_loc[i] if 0 <= i < len(out_cache_loc) else 0 for i in accept_index]
    to_free = []
    for seq, correct in zip(seq_lens, num_correct, strict=True):
        pages = -(-(seq + correct + 1) // page_size)
        to_free.append(seq + DRAFT - min(pages * page_size, seq + DRAFT))
    return source, [0] * len(source), to_free


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("batch", [0, 1, 2, 5])
@pytest.mark.parametrize("page_size", [1, 48, 64, 256])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_arithmetic(page_size: int, batch: int, dtype: torch.dtype, compiled: bool) -> None:
    seq_lens = [(37 * i + 60) % 300 for i in range(batch)]
    num_correct = [i % (DRAFT - 1) for i in range(batch)]
    out_cache_loc = [1000 + 3 * i for i in range(batch * DRAFT)]
    accept_index = [i * DRAFT + k for i in range(batch) for k in range(num_correct[i] + 1)] + [-1] * batch
    tensors = [torch.tensor(v, dtype=dtype) for v in (seq_lens, out_cache_loc, accept_index, num_correct)]
    call = get_src_tgt_cache_loc if compiled else speculative._cache_locations
    source, target, to_free = call(*tensors, DRAFT, page_size)
    expected = by_hand(seq_lens, out_cache_loc, accept_index, num_correct, page_size)
    assert (source.tolist(), target.tolist(), to_free.tolist()) == expected
    assert source.dtype == target.dtype == dtype


def test_the_shape_of_accept_index_is_kept() -> None:
    accept_index = torch.tensor([[0, 2, -1], [9, -1, -1]], dtype=torch.int32)
    source, target, _ = get_src_tgt_cache_loc(
        torch.tensor([5, 6]), torch.arange(100, 116), accept_index, torch.tensor([1, 0]), DRAFT, 64
    )
    assert source.tolist() == [[100, 102, 0], [109, 0, 0]]
    assert target.shape == accept_index.shape


def test_the_filler_is_fine_and_anything_else_out_of_range_is_named() -> None:
    arguments = torch.tensor([5]), torch.arange(100, 108)
    with multiassert.override("raise"):
        get_src_tgt_cache_loc(*arguments, torch.tensor([0, -1]), torch.tensor([0]), DRAFT, 1)
        multiassert.step()
        source, _, _ = get_src_tgt_cache_loc(*arguments, torch.tensor([0, -2, 8]), torch.tensor([0]), DRAFT, 1)
        assert source.tolist() == [100, 0, 0]
        with pytest.raises(multiassert.AsyncAssertionError, match="get_src_tgt_cache_loc: accept_index") as raised:
            multiassert.step()
    assert [(v.kind, v.rows, v.value) for v in raised.value.violations] == [("low", (1,), -2), ("high", (2,), 8)]
    assert {v.site.file for v in raised.value.violations} == {__file__}


def test_it_is_part_of_compiled_code() -> None:
    def verify(accept_index: torch.Tensor) -> torch.Tensor:
        return get_src_tgt_cache_loc(
            torch.tensor([5]), torch.arange(100, 108), accept_index, torch.tensor([0]), DRAFT, 1
        )[0]

    torch._dynamo.reset()
    compiled = torch.compile(verify, backend="aot_eager", fullgraph=True)
    with multiassert.override("warn"):
        assert compiled(torch.tensor([0, 3, -1])).tolist() == [100, 103, 0]
        assert multiassert.drain() == []
        assert compiled(torch.tensor([0, 3, 9])).tolist() == [100, 103, 0]
        assert [(v.kind, v.value, v.site.file) for v in multiassert.drain()] == [("high", 9, __file__)]


def test_it_is_compiled_except_on_npu() -> None:
    compiles: list[int] = []

    def counting_backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        compiles.append(1)
        return graph.forward

    torch._dynamo.reset()
    speculative._compiled_cache_locations.cache_clear()
    compiled = torch.compile(speculative._cache_locations, dynamic=True, backend=counting_backend)
    for batch in (2, 3, 7):
        compiled(
            torch.full((batch,), 9),
            torch.arange(batch * DRAFT),
            torch.arange(batch),
            torch.ones(batch).long(),
            DRAFT,
            64,
        )
    assert len(compiles) == 1


def test_a_machine_that_cannot_compile_runs_eager_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(graph: torch.fx.GraphModule, inputs: object) -> object:
        raise RuntimeError("no compiler on this machine")

    real_compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: real_compile(f, dynamic=dynamic, backend=no_compiler))
    speculative._compiled_cache_locations.cache_clear()
    arguments = torch.tensor([5]), torch.arange(100, 108), torch.tensor([3]), torch.tensor([0]), DRAFT, 1
    with pytest.warns(UserWarning, match="runs eager from now on.*no compiler on this machine"):
        assert get_src_tgt_cache_loc(*arguments)[0].tolist() == [103]
    assert get_src_tgt_cache_loc(*arguments)[0].tolist() == [103]
    speculative._compiled_cache_locations.cache_clear()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"page_size": 0}, ValueError, "page_size must be at least 1, got 0"),
        ({"draft_token_num": -1}, ValueError, "draft_token_num must be at least 0"),
        ({"page_size": 2.0}, TypeError, "float"),
        ({"out_cache_loc": torch.zeros(2, 2)}, ValueError, r"out_cache_loc must be 1-dimensional.*\(2, 2\)"),
        ({"accept_index": torch.zeros(2)}, TypeError, "accept_index must be an integer tensor"),
    ],
)
def test_bad_input(change: dict[str, object], error: type[Exception], text: str) -> None:
    arguments = {
        "seq_lens": torch.tensor([5]), "out_cache_loc": torch.arange(8), "accept_index": torch.tensor([0]),
        "num_correct_drafts": torch.tensor([0]), "draft_token_num": DRAFT, "page_size": 64, **change,
    }  # fmt: skip
    with pytest.raises(error, match=text):
        get_src_tgt_cache_loc(**arguments)  # type: ignore[arg-type]
