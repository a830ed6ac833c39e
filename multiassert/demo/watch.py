"""Where the probes stand in a decoding run, each with the place just before it where a fault may be injected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from multiassert.delivery import current_step
from multiassert.demo.faults import Fault, step_tag
from multiassert.demo.probes import Probes

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

TARGET_LOGITS = "verify: target logits"
DRAFT_LOGITS = "draft: draft logits"
TARGET_TOKEN_IDS = "verify: token ids before the embedding"
DRAFT_TOKEN_IDS = "draft: token ids before the embedding"
ACCEPT_INDEX = "verify: accept_index"
SOURCE_SLOTS = "verify: source slots"
TARGET_SLOTS = "verify: target slots"
FREED_PAGES = "verify: first slot of the freed pages"


class Watch:
    """One decoding run under watch: probes on the model's tensors, a count of its steps, the tokens that came out.

    A step is one iteration of the engine: draft some tokens, verify them with the target, put out what was accepted.
    Everything here works the same with probes on or off; off, the probe calls return at once.
    """

    def __init__(
        self, model: LlamaForCausalLM, decoding: str, requests: int, probes: Probes, fault: Fault | None = None
    ) -> None:
        self.model = model
        self.decoding = decoding
        self.probes = probes
        self.fault = fault
        self.first_step = current_step()
        """The number of this run's first step, counted through the whole process as the records do."""
        self.step = 0
        self.emitted: list[list[int]] = [[] for _ in range(requests)]
        """The new tokens so far, a list for each request."""
        self.emitted_in_step: list[list[int]] = []
        """How many tokens came out in each step, for each request."""
        self._prompt_was_put = False

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Put the hooks on the model, and take them off again whatever happens inside."""
        layers = self.model.config.num_hidden_layers
        hooks = [
            self.model.model.embed_tokens.register_forward_pre_hook(self._before_embedding),
            self.model.lm_head.register_forward_hook(self._after_lm_head),
        ]
        try:
            yield
        except Exception:
            # The step that broke off is ended too: what its probes saw belongs to it, not to the next run. A device
            # that has failed says so again here.
            with suppress(RuntimeError):
                self.probes.step(self.tag)
            raise
        finally:
            for hook in hooks:
                hook.remove()
            # transformers does not put this back if the draft raises.
            self.model.config.num_hidden_layers = layers

    @property
    def tag(self) -> str:
        """What the records of the current step are labelled with."""
        return step_tag(self.decoding, self.step)

    @property
    def drafting(self) -> bool:
        """Whether the model is running as the draft.

        An early exit is made by lowering `config.num_hidden_layers` while the draft runs; the forward pass reads that
        same number to see where to stop. So it tells draft from target exactly, inside any hook of the pass.
        """
        return int(self.model.config.num_hidden_layers) < len(self.model.model.layers)

    def corrupt(self, place: str, rows: torch.Tensor) -> torch.Tensor:
        """`rows` as they are, or a copy with the fault in it where this is its place and step."""
        if self.fault is None or not self.fault.strikes(place, self.step):
            return rows
        return self.fault.put_into(rows)

    def _before_embedding(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        place = DRAFT_TOKEN_IDS if self.drafting else TARGET_TOKEN_IDS
        token_ids = arguments[0]
        rows = self.corrupt(place, token_ids.flatten())
        with self.probes.counted():
            self.probes.maybe_detect_oob(rows, 0, self.model.config.vocab_size, place)
        # An id outside the vocabulary crashes a device in the embedding, and what is sent after that never arrives.
        self.probes.poll()
        return (rows.view_as(token_ids), *arguments[1:])

    def _after_lm_head(self, module: torch.nn.Module, arguments: tuple[Any, ...], logits: torch.Tensor) -> torch.Tensor:
        # [batch, positions, vocabulary] becomes [batch * positions, vocabulary], so that a row names one position.
        place = DRAFT_LOGITS if self.drafting else TARGET_LOGITS
        rows = self.corrupt(place, logits.flatten(0, 1))
        with self.probes.counted():
            self.probes.maybe_detect_nan(rows, place)
        return rows.view_as(logits)

    def end_step(self, new_tokens: list[list[int]]) -> None:
        """End the step that put out `new_tokens`, a list for each request."""
        self.probes.step(self.tag)
        self.step += 1
        self.emitted_in_step.append([len(tokens) for tokens in new_tokens])
        for request, tokens in zip(self.emitted, new_tokens, strict=True):
            request.extend(tokens)

    def put(self, tokens: torch.Tensor) -> None:
        """Take what `generate` streams: first the prompt, then the accepted tokens of one step at a time."""
        if self._prompt_was_put:
            self.end_step([tokens.flatten().tolist()])
        self._prompt_was_put = True

    def end(self) -> None:
        """Take the end of the stream; there is nothing left to do."""
