"""The GPU as the parts use it, or the simulated device in its place; the model that they train."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from zenflow.device import Device, device_for

ROOT = Path(__file__).resolve().parents[2]


class NoGpuError(Exception):
    """There is no NVIDIA GPU here."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is trained."""

    hidden: int
    layers: int
    vocabulary: int
    sequence: int
    batch: int
    steps: int
    """That are measured, at most."""
    warm: int = 8
    """Steps before them."""
    run: int = 12
    """Steps of a run whose weights are compared."""
    epoch: int = 6

    @property
    def intermediate(self) -> int:
        return self.hidden * 11 // 4

    @property
    def heads(self) -> int:
        return max(1, self.hidden // 64)


SIZES = {
    "1B": Size(2048, 20, 32000, 1024, 4, 24),
    "1B-16k": Size(2048, 20, 32000, 1024, 16, 16, warm=6),
    "3B": Size(3072, 26, 32000, 1024, 2, 16),
    "50M": Size(512, 12, 8192, 64, 2, 8),
    "stub": Size(32, 1, 64, 16, 2, steps=4, warm=4, run=6, epoch=2),
}


class Decoder(nn.Module):
    """A decoder of Llama's proportions; its forward gives the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.ModuleList(_Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)
        # What the planner reads of a model beside its shapes.
        self.config = SimpleNamespace(
            hidden_size=size.hidden,
            num_attention_heads=size.heads,
            intermediate_size=size.intermediate,
            vocab_size=size.vocabulary,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of [batch, sequence] tokens."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


class _Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden, inner = size.hidden, size.intermediate
        self.heads = size.heads
        self.norm_1, self.norm_2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        y = self.norm_1(x)
        q, k, v = (each(y).view(batch, length, self.heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, hidden))
        y = self.norm_2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Bench:
    """An NVIDIA GPU."""

    simulated = False

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise NoGpuError("there is no NVIDIA GPU here (torch sees none); --stub takes the simulated one")
        self.torch_device = torch.device("cuda", torch.cuda.current_device())

    def device(self) -> Device:
        """The runtime's own view of it, anew."""
        return device_for(self.torch_device)

    def model(self, size: Size, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0) -> Decoder:
        """The decoder on the device; the same weights for the same seed."""
        torch.manual_seed(seed)
        with torch.device(self.torch_device):
            return Decoder(size).to(dtype)

    def put(self, tensor: Tensor) -> Tensor:
        """A copy on the device."""
        return tensor.to(self.torch_device)

    def synchronize(self) -> None:
        """Wait for everything that the device was given."""
        torch.cuda.synchronize(self.torch_device)

    def reset_peaks(self) -> None:
        """Forget the most memory so far."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peaks(self) -> dict[str, int]:
        """The most memory since then, in bytes."""
        return {
            "allocated": torch.cuda.max_memory_allocated(self.torch_device),
            "reserved": torch.cuda.max_memory_reserved(self.torch_device),
        }

    def uuid(self) -> str | None:
        """Of the GPU, as NVML names it."""
        return str(getattr(torch.cuda.get_device_properties(self.torch_device), "uuid", None) or "") or None

    def counted_launches(self) -> Callable[[], int] | None:
        """How many launches the device counted so far; None: it does not count."""
        return None

    def problems(self) -> list[str]:
        """What a checker found that the program may not do."""
        return []

    def tokens(self, size: Size, step: int) -> Tensor:
        """[batch, sequence] tokens of a step."""
        generator = torch.Generator().manual_seed(1000 + step)
        return self.put(torch.randint(size.vocabulary, (size.batch, size.sequence), generator=generator))


def clones(parameters: Sequence[Tensor] | Any) -> list[Tensor]:
    """Parameters as they are now, on the CPU."""
    return [parameter.detach().cpu() for parameter in parameters]


def differing(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> int:
    """How many elements are not the same, bit by bit."""
    bits = {2: torch.int16, 4: torch.int32}
    pairs = zip(ours, theirs, strict=True)
    return sum(int((a.view(bits[a.itemsize]) != b.view(bits[b.itemsize])).sum()) for a, b in pairs)


class Stub(Bench):
    """The simulated device of the tests in the place of a GPU: what it shows is that this script works.

    Its checker watches what the runtime does; what it finds is in `problems`.
    """

    simulated = True

    def __init__(self) -> None:
        from tests.support.zenflow.simulated_cuda import simulated_cuda

        self._lasts = ExitStack()
        self.gpu: Any = self._lasts.enter_context(simulated_cuda())
        self.torch_device = self.gpu.device

    def model(self, size: Size, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0) -> Decoder:
        torch.manual_seed(seed)
        return Decoder(size).to(dtype).to(self.torch_device)

    def peaks(self) -> dict[str, int]:
        return {"allocated": torch.cuda.max_memory_allocated(self.torch_device)}

    def uuid(self) -> str | None:
        return None

    def counted_launches(self) -> Callable[[], int] | None:
        return lambda: sum(counts.launches.total() for counts in self.gpu.counted.values())

    def problems(self) -> list[str]:
        gc.collect()  # what ends with its last reference is looked at, too
        return sorted({f"{problem.kind}: {problem.text} @ {problem.where}" for problem in self.gpu.problems})


def bench_for(*, stub: bool) -> Bench:
    """The machine's GPU, or the simulated one.

    Raises:
        NoGpuError: there is none.
    """
    return Stub() if stub else Bench()
