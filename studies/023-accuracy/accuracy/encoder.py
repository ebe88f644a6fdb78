"""A pretrained BERT, read from a folder as Hugging Face lays it out, and the part of it that is fine-tuned."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from accuracy.tasks import Example, Task

_NAMES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm2": "output.LayerNorm",
}
"""A layer's parts here, and in BERT's files."""


class Linear(nn.Linear):
    """Computes in its input's dtype, whatever that of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Norm(nn.LayerNorm):
    """Computes in its input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class Block(nn.Module):
    """A layer of BERT: attention and a perceptron, each followed by a LayerNorm of its sum with its input."""

    def __init__(self, width: int, inner: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (Linear(width, width) for _ in range(4))
        self.up, self.down = Linear(width, inner), Linear(inner, width)
        self.norm1, self.norm2 = Norm(width, eps=eps), Norm(width, eps=eps)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: [batch, n, width]; mask: [batch, 1, 1, n], true where a token is."""
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm1(x + self.out(mixed.transpose(1, 2).flatten(-2)))
        return cast(Tensor, self.norm2(x + self.down(functional.gelu(self.up(x)))))


class Classifier(nn.Module):
    """The last layers of an encoder, the mean over the tokens, and a new linear layer."""

    def __init__(self, layers: Sequence[Block], width: int, classes: int, seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = Linear(width, classes)
        nn.init.normal_(self.head.weight, std=0.02, generator=torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.head.bias)

    def logits(self, features: Tensor, lengths: Tensor) -> Tensor:
        """features: [batch, n, width], what the first of the layers reads; lengths: [batch], tokens of each."""
        there = torch.arange(features.shape[1]) < lengths[:, None]
        for layer in self.layers:
            features = layer(features, there[:, None, None, :])
        mean = (features * there[:, :, None]).sum(1) / lengths[:, None].to(features.dtype)
        return cast(Tensor, self.head(mean)).float()

    def forward(self, features: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy."""
        return functional.cross_entropy(self.logits(features, lengths), labels)


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """Its weights, its sizes and its tokenizer."""

    weights: Mapping[str, Tensor]
    """By BERT's names, fp32."""
    layers: int
    heads: int
    eps: float
    tokenizer: Any
    """Of the package tokenizers."""

    @classmethod
    def read(cls, folder: Path) -> Encoder:
        """A folder with config.json, tokenizer.json and model.safetensors."""
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = {
            name.removeprefix("bert."): tensor.float()
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return cls(
            weights, config["num_hidden_layers"], config["num_attention_heads"], config["layer_norm_eps"], tokenizer
        )

    @classmethod
    def drawn(cls, texts: Sequence[str], *, width: int = 32, layers: int = 2, vocabulary: int = 500) -> Encoder:
        """One that was never trained, for short runs, with a tokenizer made of these texts."""
        from tokenizers import BertWordPieceTokenizer

        tokenizer = BertWordPieceTokenizer()
        tokenizer.train_from_iterator(texts, vocab_size=vocabulary, show_progress=False)
        generator = torch.Generator().manual_seed(0)
        block = {
            f"encoder.layer.{i}.{name}": t
            for i in range(layers)
            for name, t in _named(Block(width, 2 * width, 2, 1e-12))
        }
        block |= {"embeddings.LayerNorm.weight": torch.ones(width), "embeddings.LayerNorm.bias": torch.zeros(width)}
        for name, rows in (("word", tokenizer.get_vocab_size()), ("position", 64), ("token_type", 2)):
            block[f"embeddings.{name}_embeddings.weight"] = torch.empty(rows, width)
        for tensor in block.values():
            if tensor.dim() == 2:
                tensor.normal_(std=0.1, generator=generator)
        return cls(block, layers, 2, 1e-12, tokenizer._tokenizer)

    @property
    def width(self) -> int:
        """Of its hidden states."""
        return self.weights["embeddings.word_embeddings.weight"].shape[1]

    def blocks(self, first: int, after: int) -> list[Block]:
        """Layers `first` to `after` - 1, with the pretrained weights."""
        inner = self.weights["encoder.layer.0.intermediate.dense.weight"].shape[0]
        made = []
        for number in range(first, after):
            block = Block(self.width, inner, self.heads, self.eps)
            block.load_state_dict(
                {
                    f"{own}.{kind}": self.weights[f"encoder.layer.{number}.{theirs}.{kind}"]
                    for own, theirs in _NAMES.items()
                    for kind in ("weight", "bias")
                }
            )
            made.append(block)
        return made

    def classifier(self, trained: int, classes: int, seed: int) -> Classifier:
        """Its last layers, to be trained, with a new head."""
        return Classifier(self.blocks(self.layers - trained, self.layers), self.width, classes, seed)

    def _embedded(self, tokens: Tensor, types: Tensor) -> Tensor:
        word, position, kind = (
            self.weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
        )
        weight, bias = (self.weights[f"embeddings.LayerNorm.{part}"] for part in ("weight", "bias"))
        x = word[tokens] + position[: tokens.shape[1]] + kind[types]
        return functional.layer_norm(x, (self.width,), weight, bias, self.eps)

    @torch.no_grad()
    def features(self, examples: Sequence[Example], length: int, trained: int) -> Encoded:
        """What the trained layers read of each example.

        Args:
            examples: of a task.
            length: most tokens.
            trained: how many of the last layers are.
        """
        self.tokenizer.enable_truncation(length)
        self.tokenizer.enable_padding(length=length)
        frozen, parts, lengths = self.blocks(0, self.layers - trained), [], []
        for start in range(0, len(examples), 64):
            texts = [(one.first, one.second) if one.second else one.first for one in examples[start : start + 64]]
            found = self.tokenizer.encode_batch(texts)
            tokens, types, there = (
                torch.tensor([getattr(one, name) for one in found]) for name in ("ids", "type_ids", "attention_mask")
            )
            x = self._embedded(tokens, types)
            for block in frozen:
                x = block(x, there[:, None, None, :].bool())
            parts.append(x)
            lengths.append(there.sum(1))
        return Encoded(torch.cat(parts), torch.cat(lengths), torch.tensor([one.label for one in examples]))


def _named(block: Block) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in block.state_dict().items():
        part, _, kind = name.partition(".")
        yield f"{_NAMES[part]}.{kind}", tensor


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A part of a task as the trained layers read it."""

    features: Tensor
    """[examples, length, width]."""
    lengths: Tensor
    """[examples], tokens that are there."""
    labels: Tensor
    """[examples]."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor | slice) -> tuple[Tensor, Tensor, Tensor]:
        """Some examples, as long as the longest of them."""
        lengths = self.lengths[rows]
        return self.features[rows, : int(lengths.max())], lengths, self.labels[rows]


@dataclass(frozen=True, slots=True, eq=False)
class Classification:
    """A task for an encoder: a model of each seed, its batches, and how right it is."""

    encoder: Encoder
    trained: int
    classes: int
    train: Encoded
    test: Encoded

    @classmethod
    def of(cls, task: Task, encoder: Encoder, length: int, trained: int, dtype: torch.dtype) -> Classification:
        """Encode a task's examples; the model computes in `dtype`."""
        train, test = (encoder.features(part, length, trained) for part in (task.train, task.test))
        parts = (Encoded(part.features.to(dtype), part.lengths, part.labels) for part in (train, test))
        return cls(encoder, trained, len(task.labels), *parts)

    def model(self, seed: int) -> Classifier:
        """In fp32; the seed is the head's."""
        return self.encoder.classifier(self.trained, self.classes, seed)

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Endless batches, every example once before any is seen again."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self.train), generator=generator)
            for start in range(0, len(order) - size + 1, size):
                yield self.train[order[start : start + size]]

    @torch.no_grad()
    def evaluate(self, model: Classifier) -> dict[str, float]:
        """Accuracy and loss on the test part; the shorter texts first, which spares padding."""
        order, right, loss = torch.argsort(self.test.lengths), 0, 0.0
        for rows in order.split(64):
            features, lengths, labels = self.test[rows]
            logits = model.logits(features, lengths)
            right += int((logits.argmax(1) == labels).sum())
            loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
        return {"accuracy": right / len(self.test), "loss": loss / len(self.test)}
