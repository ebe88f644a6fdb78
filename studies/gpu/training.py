"""Those that train the decoder, in one form, and the loop that times them."""

from __future__ import annotations

import os
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu.bench import ROOT, Bench, Size
from gpu.parts import KNOBS, LIKE
from gpu.record import UnavailableError
from torch import Tensor

from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.device import Mark

_LEARNING_RATE = 1e-5
_BATCHES = 4


def config_of(system: str) -> ZenFlowConfig:
    """The knobs that the planner is asked about."""
    return ZenFlowConfig(**KNOBS[LIKE.get(system, system)])


class Trainee(ABC):
    """A model and what trains it."""

    optimizer: ZenFlowAdamW | None = None
    """Where it is ours."""

    def __init__(self, bench: Bench, size: Size) -> None:
        self.bench, self.size = bench, size
        self.model = bench.model(size)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss."""
        loss: Tensor = self.model(tokens)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Gradients, and what goes on beside them."""
        loss.backward()

    @abstractmethod
    def step(self) -> None:
        """The rest of a step."""

    @abstractmethod
    def close(self) -> None:
        """End what was started."""


class Fused(Trainee):
    """`torch.optim.AdamW(fused=True)` on the weights as they are: no offloading, and state in 16 bits."""

    def __init__(self, bench: Bench, size: Size) -> None:
        super().__init__(bench, size)
        fused = not bench.simulated  # whose backend torch has no fused form for
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE, fused=fused)

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> None:
        """Nothing was started."""


class Ours(Trainee):
    """`zenflow.ZenFlowAdamW`."""

    def __init__(
        self, bench: Bench, size: Size, knobs: Mapping[str, Any], *, learning_rate: float = _LEARNING_RATE
    ) -> None:
        super().__init__(bench, size)
        device = bench.device()
        self.pins = Pins(device)
        self.optimizer: ZenFlowAdamW = ZenFlowAdamW(
            self.model.parameters(),
            lr=learning_rate,
            config=ZenFlowConfig(**knobs),
            module=self.model,
            device=device,
        )

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        self.optimizer.abandon()


class Pins:
    """How much host memory a device was asked to reach, and how long that took, in all threads together."""

    def __init__(self, device: Any) -> None:
        self.nbytes, self.seconds = 0, 0.0
        self._lock = threading.Lock()
        self._pin = device.pin
        device.pin = self._timed  # of this object alone

    def _timed(self, array: Any, *more: Any, **others: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._pin(array, *more, **others)
        finally:
            with self._lock:
                self.seconds += time.perf_counter() - began
                self.nbytes += array.nbytes


class DeepSpeed(Trainee):
    """DeepSpeed's engine at stage 2 with its optimizer on the host."""

    def __init__(self, bench: Bench, size: Size, section: Mapping[str, Any] | None) -> None:
        if bench.simulated:
            raise UnavailableError("DeepSpeed does not know the simulated device")
        try:
            import deepspeed
        except ImportError as error:
            raise UnavailableError(f"DeepSpeed cannot be imported: {error}") from error
        super().__init__(bench, size)
        alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update(alone)
        compiled = extensions_folder()
        os.environ["TORCH_EXTENSIONS_DIR"] = str(compiled)
        for lock in compiled.glob("**/lock"):  # of a part that was killed while it compiled; others would wait for ever
            lock.unlink()
        zero: dict[str, Any] = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
        if section is not None:
            zero["zenflow"] = {**section, "select_strategy": "step", "full_warm_up_rounds": 0, "overlap_step": True}
        self._engine, *_ = deepspeed.initialize(
            model=self.model,
            model_parameters=list(self.model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": size.batch,
                "gradient_clipping": 0.0,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": _LEARNING_RATE}},
                "zero_optimization": zero,
            },
        )

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self._engine(tokens)
        return loss

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def step(self) -> None:
        self._engine.step()

    def close(self) -> None:
        worker = getattr(self._engine.optimizer, "process", None)
        if worker is not None and worker.is_alive():
            worker.terminate()
            worker.join(10)


def extensions_folder() -> Path:
    """Where DeepSpeed keeps what it compiles."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or ROOT / "build" / "gpu-torch-extensions")


def trainee_of(system: str, bench: Bench, size: Size) -> Trainee:
    """By its name.

    Raises:
        UnavailableError: what it needs is not here.
    """
    if system == "adamw":
        return Fused(bench, size)
    if system.startswith("deepspeed-"):
        return DeepSpeed(bench, size, KNOBS["zenflow"] if system == "deepspeed-zenflow" else None)
    return Ours(bench, size, KNOBS[system])


@dataclass
class Times:
    """Of each step, in ms: on the device's timeline, and of the training thread's calls."""

    marks: list[tuple[Mark, Mark, Mark, Mark]] = field(default_factory=list)
    """Begin, end of forward, end of backward, end."""
    cpu: list[tuple[float, float, float]] = field(default_factory=list)
    """Seconds of the calls of forward, backward and step."""


class Loop:
    """Trains, and times every step.

    Args:
        trainee: what is trained.
        wait_for_loss: whether to read the loss after backward, as many trainers do.
    """

    def __init__(self, trainee: Trainee, *, wait_for_loss: bool = False) -> None:
        self._trainee = trainee
        self._wait = wait_for_loss
        self._device = trainee.bench.device()
        # On the device beforehand: a copy of pageable memory would wait for it in every step.
        self._batches = [trainee.bench.tokens(trainee.size, number) for number in range(_BATCHES)]
        self.taken = 0

    def step(self, times: Times | None = None, tokens: Tensor | None = None) -> Tensor:
        """One step; its loss, on the device."""
        trainee, device, clock = self._trainee, self._device, time.perf_counter
        if tokens is None:
            tokens = self._batches[self.taken % _BATCHES]
        began, begin = clock(), device.mark()
        loss = trainee.forward(tokens)
        passed, forward = clock(), device.mark()
        trainee.backward(loss)
        if self._wait:
            loss.item()
        back, backward = clock(), device.mark()
        trainee.step()
        ended, end = clock(), device.mark()
        self.taken += 1
        if times is not None:
            times.marks.append((begin, forward, backward, end))
            times.cpu.append((passed - began, back - passed, ended - back))
        return loss.detach()

    def steps(self, count: int) -> Times:
        """Some steps, until the device has done them."""
        times = Times()
        for _ in range(count):
            self.step(times)
        self._trainee.bench.synchronize()
        return times

    def figures(self, times: Times) -> dict[str, Any]:
        """What a table wants of them; after `synchronize`."""
        between = self._device.elapsed_s
        whole = [
            1e3 * between(first[0], second[0]) for first, second in zip(times.marks, times.marks[1:], strict=False)
        ]
        whole.append(1e3 * between(times.marks[-1][0], times.marks[-1][3]))
        parts = {
            name: statistics.median(1e3 * between(mark[at], mark[at + 1]) for mark in times.marks)
            for at, name in enumerate(("forward", "backward", "step"))
        }
        calls = {
            name: statistics.median(1e3 * call[at] for call in times.cpu)
            for at, name in enumerate(("forward", "backward", "step"))
        }
        each = [round(one, 2) for one in whole]
        return {**spread(whole), "steps": len(whole), "each": each, "device_ms": parts, "thread_ms": calls}


def spread(values: Sequence[float]) -> dict[str, float]:
    """p50 and p95 of some milliseconds."""
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p95": ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]}


def timed(work: Callable[[], Any]) -> float:
    """Seconds of a call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
