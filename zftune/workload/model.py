"""The model that a profile trains: a named size of the Llama architecture, or a local model directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zftune.errors import BadInputError
from zftune.integrations.fsdp2 import units_of
from zftune.workload.batches import Batch
from zftune.workload.text import ByteTokenizer, TextCorpus, Tokenizer

# Heads have 64 dimensions, the multi-layer perceptron 2.75 times the hidden size (Llama's 8/3, rounded), the input
# and output embeddings are separate (as in Llama). Parameters: 0.87, 26 and 402 million. "tiny" must be short enough
# for the emulated accelerator (its real forward pass runs inside a pad of a few milliseconds) and still have enough
# columns for a selection of 5% to mean something. SDPA beats eager attention at each of them, on a CPU too.
MODEL_SIZES: Mapping[str, Mapping[str, int]] = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 4},
    "small": {"hidden_size": 512, "num_hidden_layers": 8},
    "medium": {"hidden_size": 1280, "num_hidden_layers": 20},
}
_HEAD_DIM = 64
_MAX_SEQUENCE = 4096
# A tokenizer of a model directory is much slower than bytes, and a profile reads a few thousand sequences at most.
_MAX_TOKENIZED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A model in training mode on the CPU, and how to feed it. Move `module` to a device before use."""

    name: str
    """What a report calls it: the size, or the directory's last part."""
    module: nn.Module
    dtype: torch.dtype
    tokenizer: Tokenizer
    vocabulary: int
    """Rows of the input embedding: tokens are below it."""
    max_sequence: int
    """Longest sequence, in tokens, that the model has positions for."""

    @property
    def parameters(self) -> int:
        """Number of parameter elements, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def trainable(self) -> int:
        """Number of parameter elements that require a gradient."""
        return sum(parameter.numel() for parameter in self.module.parameters() if parameter.requires_grad)

    def encode(self, corpus: TextCorpus) -> Tensor:
        """The text as tokens of this model: [n], an integer dtype, on the CPU.

        Raises:
            BadInputError: the tokenizer makes tokens that the model has no embedding for.
        """
        tokens = self.tokenizer.encode(corpus.data)
        if tokens.numel() and int(tokens.max()) >= self.vocabulary:
            raise BadInputError(
                f"--model '{self.name}': its tokenizer makes token {int(tokens.max())}, "
                f"allowed are tokens below its vocabulary of {self.vocabulary}"
            )
        return tokens

    def loss(self, batch: Batch) -> Tensor:
        """Forward pass: the mean cross-entropy of the next token, a scalar on the module's device."""
        output = self.module(input_ids=batch.input_ids, labels=batch.labels, use_cache=False)
        loss: Tensor = output.loss
        return loss

    def shard(self, **policy: Any) -> None:
        """Leave each rank of torch.distributed's default group its rows of every weight: FSDP2, layer by layer.

        Args:
            policy: as for `fully_shard`.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(next(self.module.parameters()).device.type, (torch.distributed.get_world_size(),))
        for unit in (*units_of(self.module), self.module):
            fully_shard(unit, mesh=mesh, **policy)

    def describe(self, *, micro_batch: int, sequence: int, text: str) -> dict[str, Any]:
        """The "workload" of a profile document."""
        return {
            "model": self.name,
            "parameters": self.parameters,
            "trainable": self.trainable,
            "dtype": str(self.dtype).removeprefix("torch."),
            "micro_batch": micro_batch,
            "sequence": sequence,
            "text": text,
        }


def build_model(name_or_dir: str | Path, *, dtype: torch.dtype, seed: int) -> Workload:
    """A model to train: a size by name with random weights, or a local directory with its own.

    A directory's tokenizer is used if it has one, else bytes are the tokens. Nothing is downloaded and no code
    from the directory is run. The global random state is left as it was.

    Args:
        name_or_dir: "tiny", "small", "medium", or a directory as `save_pretrained` writes it.
        dtype: of the parameters; buffers (the rotary frequencies) keep their precision.
        seed: of the random weights.

    Raises:
        BadInputError: the name is unknown, or the directory holds no causal language model that can be loaded.
    """
    directory = Path(name_or_dir)
    if str(name_or_dir) in MODEL_SIZES:
        workload = _named(str(name_or_dir), dtype, seed)
    elif os.path.isfile(directory / "config.json"):  # noqa: PTH113 - Path.is_file() raises where a name is too long
        workload = _from_directory(directory, dtype)
    else:
        raise BadInputError(
            f"--model '{name_or_dir}': allowed are {', '.join(MODEL_SIZES)} or a directory that holds a config.json"
        )
    workload.module.train()
    # Only the parameters: `module.to(dtype)` would round the rotary frequencies too.
    for parameter in workload.module.parameters():
        parameter.data = parameter.data.to(dtype)
    return workload


def _named(name: str, dtype: torch.dtype, seed: int) -> Workload:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = MODEL_SIZES[name]
    heads = size["hidden_size"] // _HEAD_DIM
    config = LlamaConfig(
        vocab_size=ByteTokenizer.vocabulary,
        intermediate_size=size["hidden_size"] * 11 // 4,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=_MAX_SEQUENCE,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        **size,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which reaches the GPUs' generators too
        module = LlamaForCausalLM(config)
    return Workload(name, module, dtype, ByteTokenizer(), ByteTokenizer.vocabulary, _MAX_SEQUENCE)


def _from_directory(directory: Path, dtype: torch.dtype) -> Workload:
    from transformers import AutoModelForCausalLM

    with _quiet(), torch.random.fork_rng(devices=[]):
        try:
            module: Any = AutoModelForCausalLM.from_pretrained(directory, **_LOCAL)
        except Exception as error:  # whatever config, weights and model code raise: all of it is the directory's fault
            raise BadInputError(
                f"--model '{directory}': cannot be loaded ({_first_line(error)}), "
                "allowed is a directory with a causal language model as save_pretrained writes it"
            ) from error
    module.config.use_cache = False
    vocabulary = module.get_input_embeddings().num_embeddings
    tokenizer = _tokenizer(directory)
    if isinstance(tokenizer, ByteTokenizer) and vocabulary < ByteTokenizer.vocabulary:
        raise BadInputError(
            f"--model '{directory}': has no tokenizer and a vocabulary of {vocabulary}, allowed is one of at least 256"
        )
    longest = getattr(module.config, "max_position_embeddings", None) or _MAX_SEQUENCE
    return Workload(directory.resolve().name, module, dtype, tokenizer, vocabulary, longest)


_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


class _DirectoryTokenizer:
    """A transformers tokenizer on the first part of a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: bytes) -> Tensor:
        """The tokens of `text` without special ones: [n], int64."""
        part = text[:_MAX_TOKENIZED_BYTES].decode("utf-8", errors="replace")
        ids = self._tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)


def _tokenizer(directory: Path) -> Tokenizer:
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return ByteTokenizer()
    from transformers import AutoTokenizer

    try:
        return _DirectoryTokenizer(AutoTokenizer.from_pretrained(directory, **_LOCAL))
    except Exception as error:
        raise BadInputError(
            f"--model '{directory}': its tokenizer cannot be loaded ({_first_line(error)}), "
            "allowed is a tokenizer as save_pretrained writes it, or none"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar of transformers' own: the command line has one."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
