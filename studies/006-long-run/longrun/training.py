"""What trains: a small model on an emulated accelerator whose rates and whose need of memory change between steps."""

from __future__ import annotations

import gc
from types import TracebackType

import torch
from torch import nn

from longrun.scene import ACTIVATION_BYTES, BASE, ELEMENTS, LAYERS, MEMORY_BYTES, PHASES, ROWS, WIDTH, Phase, spec
from zenflow import StepStats, ZenFlowAdamW
from zftune.emulation import EmulatedAccelerator, EmulatedMemory

_POWER = 0.75
_BATCHES = 8
_WEIGHTS_AND_GRADIENTS = 4  # bytes of an element, bf16
_STATE = 12


class Model(nn.Module):
    """Layers whose input channels are scaled by a power law: few columns have most of the gradient's energy."""

    scales: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        ranks = torch.stack([torch.randperm(WIDTH) for _ in range(LAYERS)]) + 1
        self.register_buffer("scales", ranks.float() ** -_POWER)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, width] to the same."""
        for layer, scale in zip(self.layers, self.scales, strict=True):
            hidden = torch.tanh(hidden + layer(hidden * scale))
        return hidden


class Training:
    """A training in the first phase, from entering to leaving.

    Args:
        seed: of weights and batches.
    """

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.module = Model().to(torch.bfloat16)
        self._batches = torch.randn(_BATCHES, 2 * ROWS, WIDTH, dtype=torch.bfloat16)
        self._targets = torch.tanh(self._batches.roll(1, dims=-1))
        self._rig = spec().for_elements(ELEMENTS)
        self._memory = EmulatedMemory(MEMORY_BYTES, ACTIVATION_BYTES, self._held)
        self.device = EmulatedAccelerator(self._rig, self._memory)
        self.optimizer = ZenFlowAdamW(
            self.module.parameters(), lr=1e-5, config=BASE, module=self.module, device=self.device
        )
        self.device.attach(self.module)
        self.phase = PHASES[0]
        self._threads = torch.get_num_threads()

    def _held(self) -> int:
        """Bytes on the emulated device: what of the state is not on the host is there."""
        return (_WEIGHTS_AND_GRADIENTS + _STATE) * ELEMENTS - self.optimizer.host_bytes().get("state", 0)

    def __enter__(self) -> Training:
        gc.collect()
        gc.freeze()
        torch.set_num_threads(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.optimizer.abandon()
        self.device.close()
        torch.set_num_threads(self._threads)
        gc.unfreeze()

    def enter(self, phase: Phase) -> None:
        """Go on in another phase; between two steps."""
        self.phase = phase
        self._memory.activation_bytes = ACTIVATION_BYTES * phase.sequences
        self.device.set_rig(phase.rig(self._rig))

    def step(self) -> torch.Tensor:
        """One step; its loss."""
        batch = self.optimizer.steps % _BATCHES
        # As the output of an embedding, so that the first layer has its pad in backward.
        inputs = self._batches[batch, : self.phase.tokens].detach().requires_grad_()
        output: torch.Tensor = self.module(inputs)
        loss = (output - self._targets[batch, : self.phase.tokens]).float().square().mean() + 1  # never near zero
        loss.backward()
        self.device.begin_step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def since(self, step: int, *, wait: bool = False) -> list[StepStats]:
        """Statistics of the steps after one, as far as they are there."""
        return self.optimizer.history(wait=wait, after=step)
