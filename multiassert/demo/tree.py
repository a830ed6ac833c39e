"""Speculative decoding with a draft tree over a paged KV pool, the way EAGLE verifies one.

What is real: the model, its logits and its keys and values, which live in the pool and are read back from it at every
step. The draft tree is made of what the model itself thinks likely when it leaves early, the full model verifies the
whole tree in one pass, and the accepted keys and values are moved with `get_src_tgt_cache_loc`. A wrong slot
therefore ends in wrong text. What is modelled: EAGLE trains a separate draft head where an early exit stands here,
and a serving engine has a fused attention kernel where the prefix is gathered here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

import multiassert
from multiassert.demo.model import Subject
from multiassert.demo.pool import PAGE_SIZE, PagedPool
from multiassert.demo.watch import ACCEPT_INDEX, FREED_PAGES, SOURCE_SLOTS, TARGET_SLOTS, Watch

TOP_K = 5
DEPTH = 3
NODES = 1 + TOP_K * DEPTH
"""Tokens in a tree: the root, which is the last token put out, and five at each depth."""
PATH = 1 + DEPTH
"""The most nodes that can be accepted from one tree."""

# Page 0 for padding, two for each of two requests, and one that nobody gets, so that the pool's last slot is nobody's.
POOL_PAGES = 6


def warm_up(device: torch.device) -> None:
    """Let `get_src_tgt_cache_loc` be compiled, as an engine does before it serves.

    The compiler itself moves small tensors to the device and reads them back; that is not what a step costs.
    """
    numbers = torch.zeros(2 * NODES, dtype=torch.long, device=device)
    with multiassert.suspend():
        multiassert.get_src_tgt_cache_loc(numbers[:2], numbers, numbers[: 2 * PATH], numbers[:2], NODES, PAGE_SIZE)


@dataclasses.dataclass
class Tree:
    """Draft trees, one for each request: node 0 is the root, then `TOP_K` nodes for each depth drafted so far."""

    tokens: torch.Tensor
    """[requests, nodes]"""
    parents: torch.Tensor
    """[requests, nodes], the root's parent is itself."""
    sees: torch.Tensor
    """[requests, nodes, nodes], true where a node sees another: its ancestors and itself."""
    scores: torch.Tensor
    """[requests, nodes of the last depth], the log probability of the path down to each."""

    @classmethod
    def rooted_in(cls, tokens: torch.Tensor) -> Tree:
        root = tokens.unsqueeze(1)
        sees_itself = torch.ones_like(root, dtype=torch.bool).unsqueeze(2)
        return cls(root, torch.zeros_like(root), sees_itself, torch.zeros_like(root, dtype=torch.float32))

    def depths(self) -> torch.Tensor:
        """The depth of each node, the same for all requests."""
        nodes = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (nodes + TOP_K - 1) // TOP_K

    def grow(self, logits: torch.Tensor) -> Tree:
        """The tree with one more depth: the `TOP_K` likeliest paths that go on from the last depth's `logits`."""
        requests, nodes = self.tokens.shape
        last = self.scores.shape[1]
        likeliest = logits[:, -last:].log_softmax(dim=-1).topk(TOP_K, dim=-1)
        paths = (self.scores.unsqueeze(2) + likeliest.values).flatten(1)
        chosen = paths.topk(TOP_K, dim=-1)
        parents = nodes - last + chosen.indices // TOP_K
        tokens = likeliest.indices.flatten(1).gather(1, chosen.indices)
        seen_by_parents = self.sees.gather(1, parents.unsqueeze(2).expand(-1, -1, nodes))
        sees = torch.zeros(requests, nodes + TOP_K, nodes + TOP_K, dtype=torch.bool, device=self.tokens.device)
        sees[:, :nodes, :nodes] = self.sees
        sees[:, nodes:, :nodes] = seen_by_parents
        sees[:, nodes:, nodes:] = torch.eye(TOP_K, dtype=torch.bool, device=self.tokens.device)
        return Tree(
            torch.cat((self.tokens, tokens), dim=1), torch.cat((self.parents, parents), dim=1), sees, chosen.values
        )


class TreeDecoder:
    """Decodes a few requests together, a tree a step, over one pool."""

    def __init__(self, subject: Subject, watch: Watch, prompts: list[list[int]]) -> None:
        self.subject = subject
        self.watch = watch
        self.prompts = prompts
        self.pool = PagedPool(subject.model.config, POOL_PAGES, len(prompts), subject.device)
        self.lengths = [len(prompt) for prompt in prompts]
        """How many tokens of each request have their keys and values in the pool."""
        self.moves_were_right = True

    @torch.no_grad()
    def decode(self, max_new_tokens: int) -> None:
        """Run steps until every request has `max_new_tokens`; the tokens go to the watch."""
        last_tokens = self._prefill()
        while min(map(len, self.watch.emitted)) < max_new_tokens:
            last_tokens = self._step(last_tokens)

    def _prefill(self) -> torch.Tensor:
        """Fill the pool with the prompts, as step 0, and return the first new token of each request."""
        first_tokens = []
        for request, prompt in enumerate(self.prompts):
            cache = DynamicCache()
            token_ids = torch.tensor([prompt], device=self.subject.device)
            logits = self.subject.model(token_ids, None, None, cache, logits_to_keep=1).logits
            self.pool.reserve(request, len(prompt))
            self.pool.write(self.pool.slots_of(request, 0, len(prompt)), _newest(cache, len(prompt))[0])
            first_tokens.append(logits[0, -1].argmax())
        tokens = torch.stack(first_tokens)
        self.watch.end_step([[token] for token in tokens.tolist()])
        return tokens

    def _step(self, last_tokens: torch.Tensor) -> torch.Tensor:
        """Draft a tree for each request, verify it, keep what was accepted; returns the last new tokens."""
        prefix = self._read_prefix()
        tree = Tree.rooted_in(last_tokens)
        with self._early_exit() as layers:
            for _ in range(DEPTH):
                tree = tree.grow(self._forward(tree, prefix, layers)[0])

        # The target's keys and values go into fresh slots behind the prefix, one for each node of the tree.
        logits, keys_and_values = self._forward(tree, prefix, self.subject.model.config.num_hidden_layers)
        for request, length in enumerate(self.lengths):
            self.pool.reserve(request, length + NODES)
        out_cache_loc = torch.stack(
            [self.pool.slots_of(request, length, length + NODES) for request, length in enumerate(self.lengths)]
        )
        self.pool.write(out_cache_loc, keys_and_values)

        accept_index, new_tokens = _accept(tree, logits.argmax(dim=-1))
        to_free = self._keep_accepted(accept_index, out_cache_loc, keys_and_values)

        for request, freed in enumerate(to_free.tolist()):
            self.pool.release_tail(request, self.lengths[request] + NODES - freed)
        accepted = (accept_index >= 0).sum(dim=1)
        counts = accepted.tolist()
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.watch.end_step([tokens[:count] for tokens, count in zip(new_tokens.tolist(), counts, strict=True)])
        return new_tokens.gather(1, (accepted - 1).unsqueeze(1)).squeeze(1)

    def _keep_accepted(
        self, accept_index: torch.Tensor, out_cache_loc: torch.Tensor, keys_and_values: torch.Tensor
    ) -> torch.Tensor:
        """Move the keys and values of the accepted nodes to the front of their request's new slots.

        Returns how many slots at the end of each request's new ones are no longer needed.
        """
        nodes = accept_index.numel() // PATH * NODES
        rows = self.watch.corrupt(ACCEPT_INDEX, accept_index.flatten())
        probes = self.watch.probes
        with probes.counted():
            probes.maybe_detect_oob(rows, 0, nodes, ACCEPT_INDEX, sentinel=-1)
        correct_drafts = (accept_index >= 0).sum(dim=1) - 1
        seq_lens = torch.tensor(self.lengths, device=accept_index.device)
        with probes.watched_for_waits():  # it has a probe of its own inside
            source, target, to_free = multiassert.get_src_tgt_cache_loc(
                seq_lens, out_cache_loc.flatten(), rows, correct_drafts, NODES, PAGE_SIZE
            )
        # Where nothing was accepted, source and target both stay at the padding slot 0.
        is_accepted = torch.arange(PATH, device=rows.device) <= correct_drafts.unsqueeze(1)
        target = torch.where(is_accepted, out_cache_loc[:, :PATH], target.view(-1, PATH)).flatten()

        source = self.watch.corrupt(SOURCE_SLOTS, source)
        target = self.watch.corrupt(TARGET_SLOTS, target)
        with probes.counted():
            probes.maybe_detect_oob(source, 0, self.pool.slots, SOURCE_SLOTS)
        with probes.counted():
            probes.maybe_detect_oob(target, 0, self.pool.slots, TARGET_SLOTS)
        # A slot behind the end of the pool crashes a device, too.
        probes.poll()
        self.pool.move(source, target)

        # What is freed is whole pages, so it starts at the first slot of one.
        first_freed = out_cache_loc.gather(1, (NODES - to_free).clamp(max=NODES - 1).unsqueeze(1)).squeeze(1)
        first_freed = self.watch.corrupt(FREED_PAGES, first_freed)
        with probes.counted():
            probes.maybe_detect_page_aligned(first_freed, PAGE_SIZE, FREED_PAGES, where=to_free > 0)

        verified = keys_and_values.flatten(0, 1)[accept_index[is_accepted]]
        moved = self.pool.read(out_cache_loc[:, :PATH][is_accepted])
        self.moves_were_right = self.moves_were_right and torch.equal(moved, verified)
        return to_free

    def _read_prefix(self) -> torch.Tensor:
        """The keys and values of all requests so far, filled up with the padding slot to one length."""
        slots = torch.zeros(len(self.lengths), max(self.lengths), dtype=torch.long, device=self.subject.device)
        for request, length in enumerate(self.lengths):
            slots[request, :length] = self.pool.slots_of(request, 0, length)
        return self.pool.read(slots)

    def _forward(self, tree: Tree, prefix: torch.Tensor, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all nodes of the trees behind the prefix; returns their logits, and their keys and values."""
        cache = DynamicCache()
        for layer in range(layers):
            keys, values = prefix[:, :, layer].permute(2, 0, 3, 1, 4)
            cache.update(keys, values, layer)
        lengths = torch.tensor(self.lengths, device=prefix.device).unsqueeze(1)
        sees_prefix = torch.arange(prefix.shape[1], device=prefix.device) < lengths
        nodes = tree.tokens.shape[1]
        sees = torch.cat((sees_prefix.unsqueeze(1).expand(-1, nodes, -1), tree.sees), dim=2).unsqueeze(1)
        mask = torch.zeros(sees.shape, dtype=prefix.dtype, device=prefix.device)
        mask = mask.masked_fill(~sees, torch.finfo(prefix.dtype).min)
        logits = self.subject.model(tree.tokens, mask, lengths + tree.depths(), cache).logits
        return logits, _newest(cache, nodes)

    @contextmanager
    def _early_exit(self) -> Iterator[int]:
        """Let the model stop after its first layers, as transformers' assistant by early exit does."""
        config = self.subject.model.config
        layers = config.num_hidden_layers
        config.num_hidden_layers = self.subject.early_exit_layers
        try:
            yield self.subject.early_exit_layers
        finally:
            config.num_hidden_layers = layers


def _newest(cache: Any, tokens: int) -> torch.Tensor:
    """The keys and values of the last `tokens` of a cache: [requests, tokens, layers, 2, heads, head size]."""
    layers = [torch.stack((layer.keys, layer.values)) for layer in cache.layers]
    return torch.stack(layers)[:, :, :, :, -tokens:].permute(2, 4, 0, 1, 3, 5)


def _accept(tree: Tree, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk down each tree as long as a child holds the token that the target wanted after its parent.

    Returns `accept_index` [requests, PATH], the accepted nodes counted over all trees with -1 as filler, and the new
    tokens [requests, PATH]: what the target wanted after each accepted node.
    """
    requests = wanted.shape[0]
    first_node = torch.arange(requests, device=wanted.device) * NODES
    node = torch.zeros_like(first_node)
    alive = torch.ones_like(node, dtype=torch.bool)
    accept_index, new_tokens = [first_node], [wanted[:, 0]]
    for depth in range(DEPTH):
        children = slice(1 + depth * TOP_K, 1 + (depth + 1) * TOP_K)
        fits = (tree.parents[:, children] == node.unsqueeze(1)) & (
            tree.tokens[:, children] == new_tokens[-1].unsqueeze(1)
        )
        alive = alive & fits.any(dim=1)
        node = torch.where(alive, 1 + depth * TOP_K + fits.int().argmax(dim=1), node)
        accept_index.append(torch.where(alive, first_node + node, -1))
        new_tokens.append(wanted.gather(1, node.unsqueeze(1)).squeeze(1))
    return torch.stack(accept_index, dim=1), torch.stack(new_tokens, dim=1)
