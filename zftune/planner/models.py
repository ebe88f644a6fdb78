"""Shapes of the trainable weights of public models, their usual names, and models that are only sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from zftune.errors import BadInputError

_OF_TUNED = re.compile(r"hf|instruct|chat|base|it|v[\d.]+")
MODELS = {
    # Later versions of the same shapes.
    "llama318b": "Llama-3-8B",
    "llama3170b": "Llama-3-70B",
    "llama3370b": "Llama-3-70B",
}
"""By `key` of a name, what the library calls it."""
MACHINES = {
    "a100": "a100-80-sxm",
    "a10040": "a100-40-sxm",
    "a10080": "a100-80-sxm",
    "h100": "h100-sxm",
    "h200": "h200-sxm",
    "3090": "rtx3090",
    "4090": "rtx4090",
    "5090": "rtx5090",
}
"""The same of machines: those with NVLink, where there are others."""


def key(name: str) -> str:
    """Letters and digits of a name in lower case, without its owner on a hub."""
    return re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower())


def model_key(name: str) -> str:
    """The same of a model, without what tells how it was tuned: "meta-llama/Meta-Llama-3-8B-Instruct" is "llama38b"."""
    words = re.sub(r"^meta-", "", name.rpartition("/")[2].lower())
    kept = [word for word in re.split(r"[-_ ]", words) if not _OF_TUNED.fullmatch(word)]
    return key("-".join(kept))


def machine_key(name: str) -> str:
    """The same of a machine or a GPU: "NVIDIA A100-80GB" is "a10080"."""
    return re.sub(r"^(nvidia)?(geforce)?", "", key(name)).replace("gb", "")


@dataclass(frozen=True, slots=True)
class Weight:
    """One trainable parameter."""

    shape: tuple[int, ...]
    stage: int
    """Layers whose forward ends before this weight is needed: 0 for the first layer and what precedes it."""
    transposed: bool = False
    """Whether it is stored [in, out] (a transformers Conv1D)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What a published configuration says, as far as shapes follow from it."""

    kind: Literal["llama", "qwen2", "opt"]
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    vocabulary: int
    tied: bool
    positions: int = 0
    """Rows of a learnt position embedding."""

    @property
    def key_value_width(self) -> int:
        """Outputs of the key (and the value) projection."""
        return self.hidden // self.heads * self.key_value_heads

    @property
    def before_layers(self) -> int:
        """Weights that precede all layers."""
        return (2 if self.kind == "opt" else 1) if self.vocabulary else 0

    def weights(self) -> tuple[Weight, ...]:
        """Every parameter once, in forward order."""
        return tuple(self._opt() if self.kind == "opt" else self._llama())

    def _llama(self) -> Iterator[Weight]:
        h, narrow, wide = self.hidden, self.key_value_width, self.intermediate
        yield Weight((self.vocabulary, h), 0)
        for layer in range(self.layers):
            shapes: list[tuple[int, ...]] = [(h, h), (narrow, h), (narrow, h), (h, h)]
            if self.kind == "qwen2":  # its projections to query, key and value have a bias
                shapes = [(h, h), (h,), (narrow, h), (narrow,), (narrow, h), (narrow,), (h, h)]
            for shape in (*shapes, (wide, h), (wide, h), (h, wide), (h,), (h,)):
                yield Weight(shape, layer)
        yield Weight((h,), self.layers)
        if not self.tied:
            yield Weight((self.vocabulary, h), self.layers)

    def _opt(self) -> Iterator[Weight]:
        h, wide = self.hidden, self.intermediate
        yield Weight((self.vocabulary, h), 0)
        yield Weight((self.positions, h), 0)
        for layer in range(self.layers):
            for shape in [(h, h), (h,)] * 4 + [(h,), (h,), (wide, h), (wide,), (h, wide), (h,), (h,), (h,)]:
                yield Weight(shape, layer)
        yield Weight((h,), self.layers)
        yield Weight((h,), self.layers)


def _llama(
    layers: int, hidden: int, intermediate: int, heads: int, kv: int, vocabulary: int, *, tied: bool = False
) -> Architecture:
    return Architecture(
        kind="llama",
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        key_value_heads=kv,
        vocabulary=vocabulary,
        tied=tied,
    )


def _qwen2(layers: int, hidden: int, intermediate: int, heads: int, kv: int, *, tied: bool = True) -> Architecture:
    return Architecture(
        kind="qwen2",
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        key_value_heads=kv,
        vocabulary=151_936 if tied else 152_064,
        tied=tied,
    )


def _opt(layers: int, hidden: int, heads: int) -> Architecture:
    return Architecture(
        kind="opt",
        layers=layers,
        hidden=hidden,
        intermediate=4 * hidden,
        heads=heads,
        key_value_heads=heads,
        vocabulary=50_272,
        tied=True,
        positions=2_050,
    )


def _own(layers: int, hidden: int) -> Architecture:
    """As `zftune.workload` builds them."""
    return _llama(layers, hidden, hidden * 11 // 4, hidden // 64, hidden // 64, 256)


# From each model's published config.json; the sizes of zftune from zftune/workload/model.py.
ARCHITECTURES: Mapping[str, Architecture] = {
    "tiny": _own(4, 128),
    "small": _own(8, 512),
    "medium": _own(20, 1280),
    "Llama-2-7B": _llama(32, 4096, 11008, 32, 32, 32_000),
    "Llama-2-13B": _llama(40, 5120, 13824, 40, 40, 32_000),
    "Llama-2-70B": _llama(80, 8192, 28672, 64, 8, 32_000),
    "Llama-3-8B": _llama(32, 4096, 14336, 32, 8, 128_256),
    "Llama-3-70B": _llama(80, 8192, 28672, 64, 8, 128_256),
    "Llama-3.2-1B": _llama(16, 2048, 8192, 32, 8, 128_256, tied=True),
    "Llama-3.2-3B": _llama(28, 3072, 8192, 24, 8, 128_256, tied=True),
    "Mistral-7B": _llama(32, 4096, 14336, 32, 8, 32_000),
    "Qwen2.5-0.5B": _qwen2(24, 896, 4864, 14, 2),
    "Qwen2.5-1.5B": _qwen2(28, 1536, 8960, 12, 2),
    "Qwen2.5-3B": _qwen2(36, 2048, 11008, 16, 2),
    "Qwen2.5-7B": _qwen2(28, 3584, 18944, 28, 4, tied=False),
    "Qwen2.5-14B": _qwen2(48, 5120, 13824, 40, 8, tied=False),
    "Qwen2.5-32B": _qwen2(64, 5120, 27648, 40, 8, tied=False),
    "Qwen2.5-72B": _qwen2(80, 8192, 29568, 64, 8, tied=False),
    "OPT-13B": _opt(40, 5120, 40),
    "OPT-30B": _opt(48, 7168, 56),
}


def from_size(parameters: int, layers: int, hidden: int) -> tuple[Architecture, tuple[Weight, ...]]:
    """A model of which only the size is known: Llama's layers, wide enough for all parameters, without embeddings.

    Raises:
        BadInputError: so few parameters do not make so many layers.
    """
    wide = round((parameters / layers - 4 * hidden**2) / (3 * hidden))
    if wide < 1:
        least = layers * (4 * hidden**2 + 3 * hidden)
        raise BadInputError(
            f"--model '{parameters},{layers},{hidden}': it must have at least {least} parameters "
            f"for {layers} layers of hidden size {hidden}"
        )
    heads = max(1, hidden // 128)
    architecture = _llama(layers, hidden, wide, heads, heads, 0)
    weights = tuple(weight for weight in architecture.weights() if len(weight.shape) > 1 and weight.shape[0])
    return architecture, weights
