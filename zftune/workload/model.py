"""The model that a profile trains: a named size of the Llama architecture, which is here, or a local directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from zftune.errors import BadInputError, require
from zftune.integrations.fsdp2 import units_of
from zftune.text import one_of
from zftune.workload.text import Batch, ByteTokenizer, TextCorpus, Tokenizer

_EPSILON = 1e-6
_ROTARY_BASE = 10_000.0
_FIRST_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes, named as in a config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int


class Output(NamedTuple):
    """Of a forward pass."""

    loss: Tensor
    """The mean cross-entropy of the next token, a scalar."""
    logits: Tensor
    """[batch, sequence, vocabulary]."""


class Norm(nn.Module):
    """Root mean square normalisation, in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPSILON)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (each * cos + torch.cat((-each.chunk(2, -1)[1], each.chunk(2, -1)[0]), -1) * sin for each in (q, k))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """The gated multi-layer perceptron."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and perceptron, each behind a norm and beside a residual."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.self_attn = Attention(width, heads)
        self.mlp = FeedForward(width, inner)
        self.input_layernorm = Norm(width)
        self.post_attention_layernorm = Norm(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Trunk(nn.Module):
    """Everything before the output embedding."""

    frequencies: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(
            Layer(width, config.intermediate_size, heads) for _ in range(config.num_hidden_layers)
        )
        self.norm = Norm(width)
        head = width // heads
        frequencies = 1.0 / (_ROTARY_BASE ** (torch.arange(0, head, 2, dtype=torch.float) / head))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        with torch.no_grad():
            angles = torch.arange(tokens.shape[1], device=tokens.device).float()[:, None] * self.frequencies
            angles = torch.cat((angles, angles), -1)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)  # type: ignore[no-any-return]


class Llama(nn.Module):
    """A language model with random first weights, from the default generator; its two embeddings are separate."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.model.apply(_draw)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.apply(_draw)

    def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool = False) -> Output:
        """Loss and logits.

        `input_ids` and `labels` are [batch, sequence]: the same tokens, shifted here, and -100 does not count.
        `use_cache`: as models of transformers take it; there is none.
        """
        logits = self.lm_head(self.model(input_ids))
        following = functional.pad(labels, (0, 1), value=-100)[..., 1:]
        return Output(functional.cross_entropy(logits.float().flatten(0, 1), following.flatten()), logits)


def _draw(module: nn.Module) -> None:
    # In the order of the modules, after torch's own first weights were drawn: so seeds give transformers' weights.
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_FIRST_STD)


# Heads have 64 dimensions, the multi-layer perceptron 2.75 times the hidden size (Llama's 8/3, rounded), the input
# and output embeddings are separate (as in Llama). Parameters: 0.87, 26 and 402 million. "tiny" must be short enough
# for the emulated accelerator (its real forward pass runs inside a pad of a few milliseconds) and still have enough
# columns for a selection of 5% to mean something. SDPA beats eager attention at each of them, on a CPU too.
MODEL_SIZES: Mapping[str, tuple[int, int]] = {"tiny": (128, 4), "small": (512, 8), "medium": (1280, 20)}
"""Hidden size and layers."""
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
                f"its tokens must be below its vocabulary of {self.vocabulary}"
            )
        return tokens

    def loss(self, batch: Batch) -> Tensor:
        """Forward pass: the mean cross-entropy of the next token, a scalar on the module's device."""
        output = self.module(input_ids=batch.input_ids, labels=batch.labels, use_cache=False)
        loss: Tensor = output.loss
        return loss

    def shard(self, **policy: Any) -> None:
        """Leave each rank of torch.distributed's default group its rows of every weight: FSDP2, layer by layer.

        `policy`: as for `fully_shard`.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(next(self.module.parameters()).device.type, (torch.distributed.get_world_size(),))
        for unit in (*units_of(self.module), self.module):
            fully_shard(unit, mesh=mesh, **policy)

    def describe(self, *, micro_batch: int, sequence: int, text: str) -> dict[str, Any]:
        """What a document says of the model and its batches."""
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
        one_of("--model", str(name_or_dir), list(MODEL_SIZES), "a directory that holds a config.json")
    workload.module.train()
    # Only the parameters: `module.to(dtype)` would round the rotary frequencies too.
    for parameter in workload.module.parameters():
        parameter.data = parameter.data.to(dtype)
    return workload


def _named(name: str, dtype: torch.dtype, seed: int) -> Workload:
    width, layers = MODEL_SIZES[name]
    heads = width // _HEAD_DIM
    config = LlamaConfig(
        vocab_size=ByteTokenizer.vocabulary,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_hidden_layers=layers,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which reaches the GPUs' generators too
        module = Llama(config)
    return Workload(name, module, dtype, ByteTokenizer(), ByteTokenizer.vocabulary, _MAX_SEQUENCE)


def _from_directory(directory: Path, dtype: torch.dtype) -> Workload:
    require("transformers", f"--model '{directory}'")
    from transformers import AutoModelForCausalLM

    with _quiet(), torch.random.fork_rng(devices=[]):
        try:
            module: Any = AutoModelForCausalLM.from_pretrained(directory, **_LOCAL)
        except Exception as error:  # whatever config, weights and model code raise: all of it is the directory's fault
            raise BadInputError(
                f"--model '{directory}': cannot be loaded ({_first_line(error)}); "
                "give a directory with a causal language model as save_pretrained writes it"
            ) from error
    module.config.use_cache = False
    vocabulary = module.get_input_embeddings().num_embeddings
    tokenizer = _tokenizer(directory)
    if isinstance(tokenizer, ByteTokenizer) and vocabulary < ByteTokenizer.vocabulary:
        raise BadInputError(
            f"--model '{directory}': has no tokenizer and a vocabulary of {vocabulary}; bytes as tokens need 256"
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
            f"--model '{directory}': its tokenizer cannot be loaded ({_first_line(error)}); "
            "it must be as save_pretrained writes it, or there must be none"
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
