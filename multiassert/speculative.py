"""The slot arithmetic of speculative decoding with a paged KV pool."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable
from typing import SupportsIndex

import torch
from torch import Tensor

from multiassert import predicates
from multiassert.probes import maybe_detect_oob

CacheLocations = tuple[Tensor, Tensor, Tensor]


def get_src_tgt_cache_loc(
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    accept_index: Tensor,
    num_correct_drafts: Tensor,
    draft_token_num: SupportsIndex,
    page_size: SupportsIndex,
) -> CacheLocations:
    """Compute, on the device and without a host wait, where accepted tokens' KV lies, and how many slots to free.

    `seq_lens` [batch] are the lengths before this step, `out_cache_loc` [batch * draft_token_num] the slots of all
    drafted tokens, `accept_index` (any shape) the accepted ones as indices into it, -1 being a filler,
    `num_correct_drafts` [batch] how many drafts of each request were right.

    Returns `src_cache_loc` and `tgt_cache_loc`, both of `accept_index`'s shape, and `to_free_num_slots` [batch].
    Sources are `out_cache_loc[accept_index]`; a filler maps to slot 0, the reserved padding slot. Any other index that
    is out of range is a violation of the probe in here, and also maps to slot 0. Targets are zeros for the caller to
    fill, so that a tail that is left over lands on slot 0. What is kept of each request is rounded up to whole pages,
    `keep = min(round_up(seq + correct + 1, page), seq + draft)`, and the rest of its slots is to be freed.

    Compiled with `torch.compile(dynamic=True)`, except on NPU, where it runs eager; also where this machine cannot
    compile, after one warning. Raises TypeError or ValueError for sizes that are no positive integers, for indices that
    are no integers and for an `out_cache_loc` that is not 1-dimensional.
    """
    __tracebackhide__ = True
    draft, page = operator.index(draft_token_num), operator.index(page_size)
    if draft < 0:
        raise ValueError(f"draft_token_num must be at least 0, got {draft}")
    if page < 1:
        raise ValueError(f"page_size must be at least 1, got {page}")
    if out_cache_loc.ndim != 1:
        raise ValueError(f"out_cache_loc must be 1-dimensional, got shape {tuple(out_cache_loc.shape)}")
    predicates.require_integers(accept_index, "accept_index")
    maybe_detect_oob(accept_index, -1, out_cache_loc.shape[0], "get_src_tgt_cache_loc: accept_index")
    if accept_index.device.type == "npu" or torch.compiler.is_compiling():
        return _cache_locations(seq_lens, out_cache_loc, accept_index, num_correct_drafts, draft, page)
    compute = _compiled_cache_locations()
    return compute(seq_lens, out_cache_loc, accept_index, num_correct_drafts, draft, page)


def _cache_locations(
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    accept_index: Tensor,
    num_correct_drafts: Tensor,
    draft_token_num: int,
    page_size: int,
) -> CacheLocations:
    if out_cache_loc.shape[0] == 0:
        src_cache_loc = out_cache_loc.new_zeros(accept_index.shape)
    else:
        # A negative index would read from the end, and a masked one would make the host wait for its count.
        is_slot = (accept_index >= 0) & (accept_index < out_cache_loc.shape[0])
        src_cache_loc = torch.where(is_slot, out_cache_loc[torch.where(is_slot, accept_index, 0)], 0)
    tgt_cache_loc = torch.zeros_like(src_cache_loc)
    extended = seq_lens + draft_token_num
    whole_pages = (seq_lens + num_correct_drafts + 1 + page_size - 1) // page_size * page_size
    to_free_num_slots = extended - torch.minimum(whole_pages, extended)
    return src_cache_loc, tgt_cache_loc, to_free_num_slots


@functools.cache
def _compiled_cache_locations() -> Callable[..., CacheLocations]:
    """The compiled function; it turns into the eager one for good when compiling fails."""
    compiled = torch.compile(_cache_locations, dynamic=True)
    compute: list[Callable[..., CacheLocations]] = [compiled]

    def call(*arguments: object) -> CacheLocations:
        if compute[0] is _cache_locations:
            return _cache_locations(*arguments)  # type: ignore[arg-type]
        try:
            return compute[0](*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            warnings.warn(
                "get_src_tgt_cache_loc runs eager from now on, since torch.compile failed here: "
                + " ".join(str(error).split())[:300],
                stacklevel=3,
            )
            compute[0] = _cache_locations
            return _cache_locations(*arguments)  # type: ignore[arg-type]

    return call
