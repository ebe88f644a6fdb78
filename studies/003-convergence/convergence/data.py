"""Two kinds of text that every checkout has: Python's standard library, and the C headers that a native build needs."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from convergence.model import CONTEXT
from convergence.setting import Regime
from zftune.workload import ByteTokenizer, batches, load_text

CHUNK = 4096  # bytes that are held out together, so that few sequences cross a seam
HELD_OUT = 8  # every eighth chunk


@dataclass(frozen=True, slots=True)
class Text:
    """One kind of text, in two parts that have no byte in common."""

    name: str
    train: Tensor
    """[n], uint8."""
    held_out: Tensor
    """[m], uint8; about a seventh of `train`."""

    @property
    def digest(self) -> str:
        """Tells one text from another: figures on different texts do not compare."""
        both = self.train.numpy().tobytes() + self.held_out.numpy().tobytes()
        return hashlib.sha256(both).hexdigest()[:16]

    def batches(self, size: int, seed: int) -> Iterator[Tensor]:
        """Endless batches to train on: [size, CONTEXT + 1], int64."""
        return (batch.input_ids for batch in batches(self.train, micro_batch=size, sequence=CONTEXT + 1, seed=seed))

    def evaluation(self, sequences: int) -> Tensor:
        """The same evenly spaced sequences of the held-out part in every run: [sequences, CONTEXT + 1], int64."""
        starts = torch.linspace(0, self.held_out.numel() - CONTEXT - 1, sequences).long()
        return self.held_out[starts[:, None] + torch.arange(CONTEXT + 1)].long()


def split(name: str, data: bytes) -> Text:
    """Hold out every `HELD_OUT`-th chunk."""
    tokens = ByteTokenizer().encode(data)
    chunks = tokens.split(CHUNK)
    kept = [chunk for place, chunk in enumerate(chunks) if place % HELD_OUT]
    return Text(name, torch.cat(kept), torch.cat(list(chunks[::HELD_OUT])))


def texts() -> dict[Regime, Text]:
    """What each regime trains on. A fine-tuned model was pretrained on the other one's text."""
    headers = Path(sysconfig.get_path("include"))
    return {
        "from scratch": split("Python standard library", load_text().data),
        "fine-tuning": split("Python's C headers", load_text(headers).data),
    }
