"""A paged pool of KV slots, as serving engines keep one.

A slot holds the keys and values of one token, in all layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import LlamaConfig

PAGE_SIZE = 256


class PagedPool:
    """KV slots in pages, handed to requests page by page.

    Page 0 is never handed out: slot 0 is where padding and fillers may be written and read without harm.
    """

    def __init__(self, config: LlamaConfig, pages: int, requests: int, device: torch.device) -> None:
        self.slots = pages * PAGE_SIZE
        heads = config.num_key_value_heads or config.num_attention_heads
        head_size = config.hidden_size // config.num_attention_heads
        # Zeros, not garbage: a masked slot that holds NaN still spoils the attention over it.
        self.storage = torch.zeros(self.slots, config.num_hidden_layers, 2, heads, head_size, device=device)
        self.free_pages = list(range(1, pages))
        self.pages_of: list[list[int]] = [[] for _ in range(requests)]

    def reserve(self, request: int, length: int) -> None:
        """Make sure that `request` has slots for `length` tokens."""
        while len(self.pages_of[request]) * PAGE_SIZE < length:
            self.pages_of[request].append(self.free_pages.pop(0))

    def release_tail(self, request: int, length: int) -> None:
        """Take back the pages of `request` that `length` tokens do not need."""
        while (len(self.pages_of[request]) - 1) * PAGE_SIZE >= length:
            self.free_pages.insert(0, self.pages_of[request].pop())

    def slots_of(self, request: int, start: int, stop: int) -> torch.Tensor:
        """The slots of the positions `start` to `stop` of `request`; int64, on the pool's device."""
        positions = torch.arange(start, stop, device=self.storage.device)
        pages = torch.tensor(self.pages_of[request], device=self.storage.device)
        return pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """The keys and values in `slots`. A negative slot counts from the end, in silence."""
        return self.storage[slots]

    def write(self, slots: torch.Tensor, keys_and_values: torch.Tensor) -> None:
        """Put keys and values into `slots`. A negative slot counts from the end, in silence."""
        self.storage[slots] = keys_and_values

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slots onto slots. All are read before any is written, so they may overlap."""
        self.write(target, self.read(source))
