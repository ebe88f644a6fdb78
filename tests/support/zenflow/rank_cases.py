"""What two ranks do in processes of their own, and how their results come back."""

from __future__ import annotations

import copy
import gc
import logging
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.zenflow.sharded_cases import what_is_said
from zenflow import CpuDevice, Partition, ZenFlowAdamW, ZenFlowConfig, ranks
from zenflow.errors import HostMemoryError, UnsupportedError
from zenflow.host import limits, memory
from zenflow.ranks import Ranks
from zftune.emulation import EmulatedAccelerator, Rig

STEPS, RANKS, BATCH = 11, 2, 6


def model_of(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(13, 20), nn.Tanh(), nn.LayerNorm(20), nn.Linear(20, 7), nn.Linear(7, 7)).to(dtype)


def batches_of(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(BATCH, 13, generator=generator).to(dtype), torch.randn(BATCH, 7, generator=generator).to(dtype))
        for _ in range(STEPS)
    ]


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], part: slice, step: int) -> torch.Tensor:
    x, y = batch[0][part], batch[1][part]
    last = model[4]  # type: ignore[index]
    features = model[:4](x)  # type: ignore[index]
    # Every third step the last layer has a gradient on no rank, every fifth on the first only.
    uses = step % 3 != 2 and (step % 5 != 4 or part.start == 0)
    loss: torch.Tensor = (((last(features) if uses else features) - y) ** 2).mean()
    return loss


def _train(
    config: ZenFlowConfig, dtype: torch.dtype, part: slice, seed: int, partition: Partition | None = None
) -> dict[str, Any]:
    model = model_of(seed, dtype)
    optimizer = ZenFlowAdamW(
        model.parameters(), lr=1e-2, weight_decay=0.1, config=config, module=model, partition=partition
    )
    norms = []
    for step, batch in enumerate(batches_of(dtype)):
        optimizer.zero_grad()
        loss_of(model, batch, part, step).backward()
        optimizer.step()
        if optimizer.grad_norm is not None:
            norms.append(float(optimizer.grad_norm))
    optimizer.close()
    return {"weights": model.state_dict(), "norms": norms}


COMPUTE_MS = (30.0, 45.0)
"""Of a step on the rig of each rank."""
COMM_GBPS, COMM_LATENCY_US = 1e-3, 250.0


def _on_rigs(rank: int) -> dict[str, Any]:
    """Two ranks on accelerators of which the second is slower, each in a process and a simulated time of its own."""
    fast = dict.fromkeys(("link_d2h_gbps", "link_h2d_gbps", "host_gbps"), 1e6)
    compute = {"forward_ms": COMPUTE_MS[rank] / 3, "backward_ms": COMPUTE_MS[rank] * 2 / 3}
    comm = {"comm_gbps": COMM_GBPS, "comm_latency_us": COMM_LATENCY_US}
    rig = Rig("ranks", "", device_gbps=None, scale=1.0, **fast, **compute, **comm)
    device = EmulatedAccelerator(rig)
    model = model_of(0)
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-2, config=EXACT, module=model, device=device)
    device.attach(model)
    for batch in batches_of(torch.float32):
        optimizer.zero_grad()
        model(batch[0][rank]).square().sum().backward()
        device.begin_step()
        optimizer.step()
    step_ms = [one.step_ms for one in optimizer.history(wait=True)]
    optimizer.close()
    buckets = [sum(one.nbytes for one in bucket) for bucket in ranks.buckets(model.parameters(), EXACT.bucket_bytes)]
    device.close()
    return {"step_ms": step_ms, "buckets": buckets, "weights": model.state_dict()}


NODE_BYTES = 20_000
"""Enough for one of two ranks with windows of three steps."""


EXACT = ZenFlowConfig.zero_offload(bucket_bytes=700, max_grad_norm=0.5)
OVERLAPPED = ZenFlowConfig(topk_ratio=0.3, update_interval=3, select_interval=4, bucket_bytes=700)
AUTO = ZenFlowConfig(topk_ratio=0.3, update_interval="auto", select_interval="auto", max_update_interval=5)


CONFIGS = {"exact": EXACT, "overlapped": OVERLAPPED, "auto": AUTO}
PARTITIONED = ("exact", "overlapped")


class _Half:
    """A rank's part of every batch; its own beginning, which must not count."""

    def __init__(self, config: ZenFlowConfig, dtype: torch.dtype, partition: Partition | None = None) -> None:
        self.config = config
        self.dtype = dtype
        self.partition = partition

    def __call__(self, rank: int) -> dict[str, Any]:
        half = BATCH // RANKS
        return _train(self.config, self.dtype, slice(rank * half, (rank + 1) * half), rank, self.partition)


def _overflow_on_one(rank: int) -> dict[str, Any]:
    model = model_of(0)
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-2, config=EXACT, module=model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.tensor(float(rank == 1))  # type: ignore[attr-defined]
    optimizer.step()
    same = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    optimizer.step()
    moved = any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    optimizer.abandon()
    return {"same": same, "moved": moved}


def _no_room_on_one(rank: int) -> dict[str, Any]:
    model = model_of(0)
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-2, config=OVERLAPPED, module=model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    patch = pytest.MonkeyPatch()
    if rank == 1:

        def refuse(*_: object) -> None:
            raise HostMemoryError("no room here")

        patch.setattr(memory.HostMemory, "empty", refuse)
    try:
        optimizer.set_knobs(topk_ratio=0.6)
    except Exception as error:  # noqa: BLE001 - it is the result
        said = str(error)
    else:
        said = "nothing"
    patch.undo()
    optimizer.step()
    kept = optimizer.config.topk_ratio
    optimizer.abandon()
    return {"said": said, "kept": kept}


def _no_room_on_the_node(rank: int) -> dict[str, Any]:
    """What is said, and the longest window, where only the second rank sees how little its node has."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True):

        def leave(nbytes: int) -> None:
            bound = limits.Bound(nbytes if rank else 1 << 50, "what the test leaves", shared=True)
            patch.setattr(limits, "_bounds", lambda _: [bound])

        leave(NODE_BYTES)
        first = [_begun(config) for config in (OVERLAPPED, AUTO)]
        leave(1 << 50)
        optimizer, _ = _begun(OVERLAPPED)
        leave(1)
        added = [nn.Parameter(torch.zeros(400, 300))]
        later = [
            _refusal(lambda: optimizer.set_knobs(topk_ratio=0.1)),
            _refusal(lambda: optimizer.set_knobs(update_interval=9)),
            _refusal(lambda: optimizer.add_param_group({"params": added})),
        ]
        optimizer.step()
        optimizer.abandon()
    longest = [one.config.longest_window for one, _ in first]
    return {"first": [said for _, said in first], "longest": longest, "later": later}


def _begun(config: ZenFlowConfig) -> tuple[ZenFlowAdamW, str]:
    """What has tried a step, and what that said."""
    model = model_of(0)
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-2, config=config, module=model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return optimizer, _refusal(optimizer.step)


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except HostMemoryError as error:
        return str(error)
    return ""


def _given_masters(rank: int) -> dict[str, Any]:
    whole = model_of(rank)
    model = model_of(rank).to(torch.bfloat16)
    optimizer = ZenFlowAdamW(model.parameters(), lr=0.0, weight_decay=0.0, config=OVERLAPPED, module=model)
    optimizer.give_masters(dict(zip(model.parameters(), (p.detach() for p in whole.parameters()), strict=True)))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.flush()
    state = optimizer.state_dict()
    optimizer.abandon()
    return {"weights": model.state_dict(), "masters": [entry["master"] for entry in _columns(state)]}


def _columns(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in state["state"].values() if "master" in entry]


def _large_gradients(rank: int) -> dict[str, Any]:
    sizes = [(shape, dtype) for dtype in (torch.float16, torch.float32) for shape in ((3, 5), (7,))]
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in sizes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 40_000.0 + 8_000.0 * rank)
    found = Ranks.of(OVERLAPPED)
    assert found is not None
    found.reduce(parameters, CpuDevice())
    return {"gradients": [parameter.grad for parameter in parameters]}


def _frozen(rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    trained, base = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(3, 4), requires_grad=False)
    elsewhere = nn.Parameter(torch.empty(4, 4, device="meta"), requires_grad=False)
    packed = nn.Parameter(torch.full((3, 2), rank, dtype=torch.uint8), requires_grad=False)
    optimizer = ZenFlowAdamW([elsewhere, packed, base, trained], config=OVERLAPPED)
    for _ in range(3):
        trained.grad = torch.full_like(trained, rank - 3.0)
        optimizer.step()
    optimizer.close()
    return {"trained": trained.detach(), "base": base.detach(), "packed": packed.detach()}


def _sparse_on_one(rank: int) -> dict[str, Any]:
    """What each of two that share out the state is told of a gradient that is sparse on the second alone."""
    model = nn.Embedding(5, 4, sparse=rank == 1)
    optimizer = ZenFlowAdamW(model.parameters(), config=EXACT, module=model, partition=Partition())
    model(torch.tensor([1, 2])).sum().backward()
    said = ""
    try:
        optimizer.step()
    except UnsupportedError as error:
        said = str(error)
    optimizer.abandon()
    return {"said": said}


def _averaged_before_the_step(rank: int) -> dict[str, Any]:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 5), (7,), (40, 40))]
    optimizer = ZenFlowAdamW(parameters, config=EXACT)
    sent: list[int] = []
    whole = ranks._Sum

    def counted(bucket: list[torch.Tensor], size: int) -> Any:
        sent.append(len(bucket))
        return whole(bucket, size)

    patch = pytest.MonkeyPatch()
    patch.setattr(ranks, "_Sum", counted)
    seen = []

    def average(act: Callable[[], object]) -> None:
        act()
        sent.clear()
        optimizer.average_gradients()
        means = [parameter.grad.unique().tolist() for parameter in parameters if parameter.grad is not None]
        seen.append((sum(sent), means))

    def set_all() -> None:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1.0 + rank)

    average(set_all)
    average(lambda: None)
    average(lambda: parameters[0].backward(torch.full_like(parameters[0], float(rank))))
    average(lambda: parameters[1].grad.mul_(3.0) if rank == 1 else None)  # type: ignore[union-attr]
    sent.clear()
    optimizer.step()
    seen.append((sum(sent), []))
    optimizer.zero_grad()
    average(set_all)
    patch.undo()
    optimizer.abandon()
    return {"seen": seen}


def _under_ddp(rank: int) -> dict[str, Any]:
    """The model of which DDP averages, the same by hand, and how often this runtime has averaged."""
    half = BATCH // RANKS
    found: dict[str, Any] = {"sums": []}
    for name, partition in (("ours", None), ("ddp", None), ("ddp, partitioned", Partition())):
        model = nn.Linear(13, 7) if name == "ours" else nn.parallel.DistributedDataParallel(nn.Linear(13, 7))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        optimizer = ZenFlowAdamW(model.parameters(), lr=1e-2, config=OVERLAPPED, module=model, partition=partition)
        sums = 0
        with pytest.MonkeyPatch.context() as patch:
            whole = ranks._Sum

            def counted(*arguments: Any, whole: Any = whole) -> Any:
                nonlocal sums
                sums += 1
                return whole(*arguments)

            patch.setattr(ranks, "_Sum", counted)
            for x, y in batches_of(torch.float32):
                optimizer.zero_grad()
                part = slice(rank * half, (rank + 1) * half)
                (model(x[part]) - y[part]).square().mean().backward()
                optimizer.step()
        optimizer.close()
        found["sums"].append(sums)
        found[name] = [parameter.detach().clone() for parameter in model.parameters()]
    return found


def _saved_without_the_group(rank: int) -> dict[str, Any]:
    """What is said of a model that is saved when its ranks have parted, as scripts do after their last step."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    torch.distributed.broadcast_object_list(folder)
    model = model_of(0)
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-2, config=OVERLAPPED, module=model)
    for step, batch in enumerate(batches_of(torch.float32)[:5]):
        optimizer.zero_grad()
        loss_of(model, batch, slice(rank * BATCH // RANKS, (rank + 1) * BATCH // RANKS), step).backward()
        optimizer.step()
    torch.distributed.destroy_process_group()
    saved = copy.deepcopy(model.state_dict())
    said = _Said()
    logging.getLogger("zenflow").addHandler(said)
    del optimizer
    gc.collect()
    logging.getLogger("zenflow").removeHandler(said)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder[0]}/store", rank=rank, world_size=RANKS)
    lacks = any(not torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    return {"said": said.lines, "lacks": lacks}


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


WORK: dict[str, Callable[[int], Any]] = {
    **{name: _Half(config, torch.float32) for name, config in CONFIGS.items()},
    **{f"{name}, partitioned": _Half(CONFIGS[name], torch.float32, Partition()) for name in PARTITIONED},
    "bf16": _Half(OVERLAPPED, torch.bfloat16),
    "overflow": _overflow_on_one,
    "masters": _given_masters,
    "large": _large_gradients,
    "frozen": _frozen,
    "sparse": _sparse_on_one,
    "early": _averaged_before_the_step,
    "rigs": _on_rigs,
    "ddp": _under_ddp,
    "saved": _saved_without_the_group,
    "no room": _no_room_on_one,
    "no room on the node": _no_room_on_the_node,
    "sharded": lambda _: what_is_said(),
}
"""What all ranks do together; `sharded` has ranks of its own, since it imports much."""
