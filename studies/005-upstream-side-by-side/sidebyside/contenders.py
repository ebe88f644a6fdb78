"""A model and one system that trains it, in the process that is the system's own."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import deepspeedkit
import torch
from torch import Tensor, nn

from sidebyside import setting, world
from sidebyside.setting import System

_DISTINCT_BYTES = 128 << 20  # nothing else that a process with torch maps is as large

# Upstream's tensors that lie on the GPU where there is one: the model, gradients on their way, the selected columns.
_ON_DEVICE = {
    "bit16_groups",
    "bit16_groups_flat",
    "round_robin_bit16_groups",
    "parallel_partitioned_bit16_groups",
    "params_in_partition",
    "params_not_in_partition",
    "param_dict",
    "ipg_buckets",
    "temp_grad_buffer_for_gpu_offload",
    "selective_optimizer",
    "grads_in_partition",
    "averaged_gradients",
    "all_grad_tensors",
    "index_buffer",
    "grad_buffer",
}


class Contender(ABC):
    """Trains step by step and says how long each part of a step took."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.workload = world.load(folder)
        _, train, self._held_out = world.texts()
        self._feed = world.feed(train, seed)

    @abstractmethod
    def forward(self, batch: Any) -> Tensor:
        """The loss."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Gradients, and what the system does with them on the way."""

    @abstractmethod
    def step(self) -> None:
        """The rest of a training step."""

    @abstractmethod
    def host_bytes(self) -> dict[str, int]:
        """Host memory by use."""

    @abstractmethod
    def close(self) -> None:
        """End what was started."""

    def train(self, steps: int) -> dict[str, Any]:
        """Some steps: milliseconds of forward, backward and the rest of each, and the losses."""
        times, losses = [], []
        for _ in range(steps):
            batch = next(self._feed)
            began = time.perf_counter()
            loss = self.forward(batch)
            forward = time.perf_counter()
            self.backward(loss)
            backward = time.perf_counter()
            self.step()
            losses.append(float(loss.detach()))
            ended = time.perf_counter()
            times.append([round(1e3 * s, 3) for s in (forward - began, backward - forward, ended - backward)])
        return {"ms": times, "losses": losses}

    def evaluate(self, sequences: int) -> float:
        """Held-out loss of the weights that training sees; nothing that is pending is applied for it."""
        return world.held_out_loss(self.workload.module, self._held_out, sequences)


class Plain(Contender):
    """No offloading: torch's fused AdamW on fp32 masters of the bf16 weights."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self._weights = list(self.workload.module.parameters())
        self._masters = [weight.detach().float() for weight in self._weights]
        self._optimizer = torch.optim.AdamW(
            self._masters,
            lr=setting.LR,
            betas=setting.BETAS,
            eps=setting.EPS,
            weight_decay=setting.WEIGHT_DECAY,
            fused=True,
        )

    def forward(self, batch: Any) -> Tensor:
        return self.workload.loss(batch)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        for master, weight in zip(self._masters, self._weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        self._optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self._masters, self._weights, strict=True):
                weight.copy_(master)

    def host_bytes(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing was started."""


class Ours(Contender):
    """`zenflow.ZenFlowAdamW`."""

    def __init__(self, system: System, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        from zenflow import ZenFlowAdamW, ZenFlowConfig

        module = self.workload.module
        self.optimizer = ZenFlowAdamW(
            module.parameters(),
            lr=setting.LR,
            betas=setting.BETAS,
            eps=setting.EPS,
            weight_decay=setting.WEIGHT_DECAY,
            config=ZenFlowConfig(**system.knobs),
            module=module,
        )
        self._threads = system.host_threads

    def forward(self, batch: Any) -> Tensor:
        return self.workload.loss(batch)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def host_bytes(self) -> dict[str, int]:
        found = self.optimizer.host_bytes()
        if self.optimizer.host_engine != ("native", self._threads):
            raise RuntimeError(f"the host engine is {self.optimizer.host_engine}, not native with {self._threads}")
        return {name: size for name, size in found.items() if name != "peak" and size}

    def close(self) -> None:
        self.optimizer.abandon()


class Upstream(Contender):
    """DeepSpeed's engine, as its tutorial drives it."""

    def __init__(self, system: System, folder: Path, seed: int, port: int) -> None:
        super().__init__(folder, seed)
        deepspeedkit.prepare(port)
        import deepspeed

        module = self.workload.module
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=module, model_parameters=list(module.parameters()), config=setting.document(system)
        )

    def forward(self, batch: Any) -> Tensor:
        loss: Tensor = self.engine(input_ids=batch.input_ids, labels=batch.labels, use_cache=False).loss
        return loss

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def host_bytes(self) -> dict[str, int]:
        model = {parameter.untyped_storage().data_ptr() for parameter in self.workload.module.parameters()}
        found: dict[str, int] = {}
        seen = set(model)
        for name, value in vars(self.optimizer).items():
            if name not in _ON_DEVICE:
                _walk(name, value, seen, found, set())
        worker = getattr(self.optimizer, "process", None)
        if worker is not None:
            found["in the other process"] = _private_buffers(worker.pid, 4 * self.workload.parameters)
        return found

    def close(self) -> None:
        worker = getattr(self.optimizer, "process", None)
        if worker is not None and worker.is_alive():
            worker.terminate()
            worker.join(10)


def _walk(name: str, value: Any, seen: set[int], found: dict[str, int], visited: set[int]) -> None:
    """Add every tensor's storage that is reachable from `value`, once, to `found[name]`."""
    if id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        if value.device.type != "meta" and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found[name] = found.get(name, 0) + storage.nbytes()
        inside: list[Any] = [value.grad if value.is_leaf else None, *vars(value).values()]
    elif isinstance(value, dict):
        inside = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set)):
        inside = list(value)
    elif isinstance(value, torch.optim.Optimizer):
        inside = [value.param_groups, value.state]
    else:
        inside = []
    for part in inside:
        if isinstance(part, nn.Module):
            continue
        _walk(name, part, seen, found, visited)


def _private_buffers(pid: int, buffer_bytes: int) -> int:
    """Resident bytes of a process's own buffers, each as long as the fp32 masters, by the system's count.

    Small ones cannot be told from what Python and its libraries have mapped; then it is the four moments (two streams
    of two) that upstream's code allocates. At larger sizes they are counted.
    """
    if buffer_bytes < _DISTINCT_BYTES:
        return 4 * buffer_bytes
    total = size = 0
    private = False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.split()
        if not words[0].endswith(":"):  # a mapping's first line: addresses, rights, offset, device, inode, path
            private = words[4] == "0" and len(words) == 5
        elif words[0] == "Size:":
            size = int(words[1]) << 10
        elif words[0] == "Rss:" and private and size >= buffer_bytes:
            total += int(words[1]) << 10
    return total
