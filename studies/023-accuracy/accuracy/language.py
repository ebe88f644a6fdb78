"""A language model, pretrained here on Python's standard library and continued on a Debian's manual pages."""

from __future__ import annotations

import gzip
import hashlib
import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from zftune.workload import batches, load_text
from zftune.workload.model import Llama, LlamaConfig

_CHUNK = 4096  # tokens that are held out together, so that few sequences cross a seam
_HELD_OUT = 8  # every eighth chunk


@dataclass(frozen=True, slots=True)
class LanguageScale:
    """The model's sizes and how long it is pretrained."""

    width: int = 512
    inner: int = 1408
    heads: int = 8
    layers: int = 6
    vocabulary: int = 4096
    sequence: int = 128
    pretrain_steps: int = 500
    pretrain_batch: int = 8
    pretrain_lr: float = 1e-3
    text_bytes: int = 4 << 20
    """Of each corpus, at most."""
    sequences: int = 128
    """Held-out sequences."""
    second: Literal["manual pages", "C headers"] = "manual pages"
    """What it is continued on; Python's headers are on every machine that builds the native module."""


class LanguageModel(nn.Module):
    """`zftune.workload`'s Llama, as a module whose forward is the loss."""

    def __init__(self, scale: LanguageScale) -> None:
        super().__init__()
        self.llama = Llama(
            LlamaConfig(
                vocab_size=scale.vocabulary,
                hidden_size=scale.width,
                intermediate_size=scale.inner,
                num_attention_heads=scale.heads,
                num_key_value_heads=scale.heads,
                num_hidden_layers=scale.layers,
            )
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token; tokens: [batch, n], int64."""
        return cast(Tensor, self.llama(tokens, tokens).loss)


def manual_pages(most: int) -> bytes:
    """The text of the manual pages' sources, in an order that looks random, without comments.

    Args:
        most: bytes.

    Raises:
        RuntimeError: this machine has none.
    """
    pages = sorted(Path("/usr/share/man").glob("man[1-8]/*.gz"), key=lambda p: hashlib.sha256(p.name.encode()).digest())
    parts, seen, size = [], set(), 0
    for page in pages:
        if size >= most:
            break
        if page.is_symlink():
            continue
        text = b"\n".join(
            line for line in gzip.decompress(page.read_bytes()).splitlines() if not line.startswith(b'.\\"')
        )
        if len(text) > 500 and (digest := hashlib.sha256(text).digest()) not in seen:  # shorter ones name another page
            seen.add(digest)
            parts.append(text)
            size += len(text)
    if not parts:
        raise RuntimeError("this machine has no manual pages in /usr/share/man")
    return b"\n".join(parts)[:most]


def second_corpus(scale: LanguageScale) -> bytes:
    """What the model is continued on."""
    if scale.second == "manual pages":
        return manual_pages(scale.text_bytes)
    return load_text(Path(sysconfig.get_path("include")), max_bytes=scale.text_bytes).data


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A corpus as tokens, in two parts that have no token in common."""

    train: Tensor
    held_out: Tensor

    @classmethod
    def of(cls, tokens: Tensor) -> Text:
        """Hold out every `_HELD_OUT`-th chunk."""
        chunks = tokens.split(_CHUNK)
        kept = [chunk for place, chunk in enumerate(chunks) if place % _HELD_OUT]
        return cls(torch.cat(kept), torch.cat(list(chunks[::_HELD_OUT])))

    @property
    def digest(self) -> str:
        """Tells one text from another."""
        return hashlib.sha256(self.train.numpy().tobytes() + self.held_out.numpy().tobytes()).hexdigest()[:16]


def tokenized(corpora: tuple[bytes, bytes], vocabulary: int) -> tuple[Text, Text]:
    """Both corpora as tokens of one byte-level BPE, which is made of the first 2 MB of each."""
    from tokenizers import ByteLevelBPETokenizer

    texts = [data.decode("utf-8", errors="replace") for data in corpora]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text[: 2 << 20] for text in texts], vocab_size=vocabulary, show_progress=False)
    pages = [[text[i : i + 65536] for i in range(0, len(text), 65536)] for text in texts]
    tokens = [
        torch.tensor([t for one in tokenizer.encode_batch(page) for t in one.ids], dtype=torch.int32) for page in pages
    ]
    return Text.of(tokens[0]), Text.of(tokens[1])


@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """The pretrained model, to be continued on the second corpus."""

    scale: LanguageScale
    dtype: torch.dtype
    weights: dict[str, Tensor]
    """Of the pretrained model, fp32."""
    text: Text
    pretraining: dict[str, Any]
    """How far it got."""

    def model(self, seed: int) -> LanguageModel:
        """In fp32, and the same for every seed: seeds differ in the order of the batches."""
        model = LanguageModel(self.scale)
        model.load_state_dict(self.weights)
        return model

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Endless batches of sequences from random places."""
        feed = batches(self.text.train, micro_batch=size, sequence=self.scale.sequence, seed=seed)
        return ((batch.input_ids,) for batch in feed)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Held-out loss in nats a token."""
        return {"loss": held_out_loss(model, self.text, self.scale)}


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Text, scale: LanguageScale) -> float:
    """Mean loss on evenly spaced sequences of the held-out part."""
    starts = torch.linspace(0, text.held_out.numel() - scale.sequence, scale.sequences).long()
    sequences = text.held_out[starts[:, None] + torch.arange(scale.sequence)].long()
    return math.fsum(float(model(part)) * len(part) for part in sequences.split(16)) / len(sequences)


def continuation(scale: LanguageScale, dtype: torch.dtype, cache: Path, say: Callable[[str], None]) -> Continuation:
    """The pretrained model: trained now, unless it is in the cache."""
    corpora = (load_text(max_bytes=scale.text_bytes).data, second_corpus(scale))
    key = hashlib.sha256(repr((asdict(scale), str(dtype))).encode() + b"|".join(corpora)).hexdigest()[:16]
    file = cache / f"language-{key}.pt"
    if not file.exists():
        first, second = tokenized(corpora, scale.vocabulary)
        weights, pretraining = _pretrained(scale, dtype, first, second, say)
        cache.mkdir(parents=True, exist_ok=True)
        kept = {"weights": weights, "pretraining": pretraining, "train": second.train, "held_out": second.held_out}
        torch.save(kept, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)
    kept = torch.load(file, weights_only=True)
    return Continuation(scale, dtype, kept["weights"], Text(kept["train"], kept["held_out"]), kept["pretraining"])


def _pretrained(
    scale: LanguageScale, dtype: torch.dtype, first: Text, second: Text, say: Callable[[str], None]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """AdamW on fp32 weights: a warm-up over a twentieth of the steps, then a cosine down to 0."""
    torch.manual_seed(0)
    model, steps = LanguageModel(scale), scale.pretrain_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=scale.pretrain_lr, weight_decay=0.01)
    feed = batches(first.train, micro_batch=scale.pretrain_batch, sequence=scale.sequence, seed=1000)
    began, losses = time.perf_counter(), []
    for step in range(steps):
        share = min((step + 1) / (0.05 * steps), 0.5 + 0.5 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = scale.pretrain_lr * share
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = model(next(feed).input_ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % 20 == 19:
            passed = time.perf_counter() - began
            say(f"pretraining {step + 1} of {steps}: {sum(losses[-20:]) / 20:.3f} nats, {passed:.0f} s")
    figures = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": steps * scale.pretrain_batch * scale.sequence,
        "seconds": time.perf_counter() - began,
        "held_out": held_out_loss(model, first, scale),
        "other_corpus": held_out_loss(model, second, scale),
        "corpora": [first.digest, second.digest],
        "corpus_tokens": [first.train.numel(), second.train.numel()],
    }
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, figures
