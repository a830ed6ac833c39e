"""What is known of the batch while a model runs: its rows, its positions, and which of these are padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What makes the first two dimensions a batch and its positions, in the order of trust.
DECODER_IDS, DECODER_EMBEDS = "decoder_input_ids", "decoder_inputs_embeds"
SEQUENCES = (DECODER_IDS, DECODER_EMBEDS, "input_ids", "inputs_embeds")
MASK, ENCODER_MASK, DECODER_MASK = "attention_mask", "encoder_attention_mask", "decoder_attention_mask"
CACHE_POSITION = "cache_position"
INDEX_DTYPES = (torch.int64, torch.int32)


class Scope(NamedTuple):
    """The batch of a running call. All of it is tensors and constants, so that compiled code can keep it too."""

    batch: Tensor | None = None  # its first dimension is the batch, and its second one the positions if is_sequence
    is_sequence: bool = False
    mask: Tensor | None = None  # [batch, positions]: false where there is padding; None too where that is not known
    keys: int = 0  # that attention sees, where they are more than the positions of this call
    other_mask: Tensor | None = None  # of the encoder, while its decoder runs
    logits_kept: int = 0  # how many of the last positions get logits, where the caller wants fewer than all


# How a tensor lies in its scope: whether its dimension 0 is certainly the batch's; what counts in it, as a mask that
# broadcasts to it, or None for all; and whether it holds a score for each query and key, of which -Inf is a fine one.
# (A NamedTuple takes torch.compile long to trace.)
Layout = tuple[bool, Tensor | None, bool]

ARGUMENTS = frozenset((*SEQUENCES, MASK, ENCODER_MASK, DECODER_MASK, "logits_to_keep"))
CACHES_OF_POSITIONS = ("past_key_values", "past_key_value", "cache", "layer_past")


def scope_of(outer: Scope, given: Mapping[str, Any], is_outermost: bool) -> Scope:
    """The scope inside a call with these arguments."""
    sequence = next((given[name] for name in SEQUENCES if isinstance(given.get(name), Tensor)), None)
    scope = outer
    if sequence is not None and sequence.ndim >= 2:
        is_whole = sequence is given.get(DECODER_IDS) or sequence is given.get(DECODER_EMBEDS)
        own, other = (DECODER_MASK, MASK) if is_whole else (MASK, ENCODER_MASK)
        if _is_no_padding_mask(given.get(own)):
            # A mask of queries and keys was made from one of positions, and that one still holds.
            mask, keys = outer.mask, outer.keys
        else:
            of_all = _padding_mask(given.get(own))
            mask = None if of_all is None else _of_this_call(of_all, sequence.shape[1], given)
            keys = 0 if of_all is None else of_all.shape[1]
        other_mask = _padding_mask(given.get(other))
        scope = scope._replace(batch=sequence, is_sequence=True, mask=mask, keys=keys, other_mask=other_mask)
    elif is_outermost:
        mask = _padding_mask(given.get(MASK))
        scope = scope._replace(batch=_first_tensor(given), mask=mask, keys=0 if mask is None else mask.shape[1])
    kept = given.get("logits_to_keep")
    if isinstance(kept, int) and kept > 0:
        scope = scope._replace(logits_kept=kept)
    return scope


def _first_tensor(given: Mapping[str, Any]) -> Tensor | None:
    for value in given.values():
        if isinstance(value, Tensor) and value.ndim:
            return value
    return None


def _is_no_padding_mask(mask: object) -> bool:
    return mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2)


def _padding_mask(mask: object) -> Tensor | None:
    """A mask of positions, as bools."""
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    return mask if mask.dtype is torch.bool else mask != 0


def _of_this_call(mask: Tensor, positions: int, given: Mapping[str, Any]) -> Tensor | None:
    """The part of a mask that is about the positions of this call; None where that is not certain.

    A mask may be about the positions so far, or about all slots of a cache of fixed size, those of the future too.
    Taking padding for content is a false alarm; taking content for padding would be silence.
    """
    keys = mask.shape[1]
    if keys <= positions:
        return mask if keys == positions else None
    slots = given.get(CACHE_POSITION)
    if not (isinstance(slots, Tensor) and slots.dtype in INDEX_DTYPES and list(slots.shape) == [positions]):
        past = _length_of_cache(given)
        if isinstance(past, int):
            if past + positions > keys:
                return None
            return mask[:, past : past + positions]
        if not isinstance(past, Tensor) or past.numel() != 1 or past.device != mask.device:
            return None
        slots = past.reshape(1) + torch.arange(positions, device=mask.device)
    if slots.device != mask.device:
        return None
    # An index out of bounds would be the end of the device, and is the model's to tell.
    return mask.index_select(1, slots.clamp(0, keys - 1))


def _length_of_cache(given: Mapping[str, Any]) -> object:
    """How many positions a cache holds, as transformers' caches tell it: an int, or a tensor on the device."""
    cache = next((given[name] for name in CACHES_OF_POSITIONS if given.get(name) is not None), None)
    if isinstance(cache, tuple):  # of layers, each of keys and values
        first = cache[0][0] if cache and isinstance(cache[0], tuple) and cache[0] else None
        return first.shape[-2] if isinstance(first, Tensor) and first.ndim > 1 else None
    length = getattr(cache, "get_seq_length", None)
    if length is None:
        return None
    try:
        return length()
    except Exception:  # it is not one of those
        return None


def layout_of(tensor: Tensor, scope: Scope) -> Layout:
    """How a tensor lies in a scope: whether its rows are the batch's, and which of its elements are no padding.

    Padding is known for [batch, positions, ...], for attention's [batch, heads, positions, ...] and for tokens in one
    row, [batch * positions, ...]. Of any other tensor that may hold padding nobody knows where; it counts if there is
    none at all.
    """
    batch = scope.batch
    if batch is None or not tensor.ndim:
        return False, None, False
    rows = batch.shape[0]
    if not scope.is_sequence or batch.ndim < 2:
        return (True if tensor.shape[0] == rows else False), None, False  # noqa: SIM210 (a constant of a graph)
    positions = batch.shape[1]
    if tensor.ndim > 1 and tensor.shape[0] == rows:
        scores = _is_scores(tensor, scope, positions)
        if not scores and tensor.shape[1] == positions:
            where = _where(tensor, scope, positions, 1)
            if tensor.ndim == 4 and tensor.shape[2] == positions:
                # As many heads as positions: which dimension is which is not known, and content in either is content.
                by_heads = _where(tensor, scope, positions, 2)
                where = None if where is None or by_heads is None else where | by_heads
            return True, where, False
        if tensor.ndim > 3 and tensor.shape[2] == positions:
            return True, _where(tensor, scope, positions, 2), scores
        other = scope.other_mask
        if other is not None and tensor.shape[1] == other.shape[1]:
            return True, _shaped(other, tensor, 1), False
        if scope.logits_kept and tensor.ndim == 3 and tensor.shape[1] == scope.logits_kept:
            return True, _where(tensor, scope, scope.logits_kept, 1), False
    mask = _current(scope.mask, positions)
    if mask is None:
        return False, None, False
    if tensor.shape[0] == rows * positions:
        flat = mask.expand(rows, positions).reshape((rows * positions,) + (1,) * (tensor.ndim - 1))
        return False, flat, False
    return False, mask.all(), False


def _is_scores(tensor: Tensor, scope: Scope, positions: int) -> bool:
    """Whether it is [batch, heads, queries, keys]."""
    return tensor.ndim == 4 and tensor.shape[2] == positions and tensor.shape[3] == (scope.keys or positions)


def _current(mask: Tensor | None, positions: int) -> Tensor | None:
    """The mask of the last positions of this call; None where it is about others."""
    return None if mask is None or mask.shape[1] < positions else mask[:, -positions:]


def _where(tensor: Tensor, scope: Scope, positions: int, dimension: int) -> Tensor | None:
    mask = _current(scope.mask, positions)
    other = scope.other_mask
    if other is not None and other.shape[1] == positions and positions == tensor.shape[dimension]:
        mask = other if mask is None else mask & other  # encoder and decoder of one length: which of them is not known
    return None if mask is None else _shaped(mask, tensor, dimension)


def _shaped(mask: Tensor, tensor: Tensor, dimension: int) -> Tensor:
    """A [batch, positions] mask with the positions at `dimension` of the tensor."""
    before, after = (1,) * (dimension - 1), (1,) * (tensor.ndim - dimension - 1)
    return mask.reshape((mask.shape[0], *before, mask.shape[1], *after))
