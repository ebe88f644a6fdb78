"""What choosing columns costs between ranks: bytes in collectives, counted on two to eight of them."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from studykit import Job, code_digest

from zenflow import ZenFlowAdamW, ZenFlowConfig
from zftune.planner.model import ModelFacts
from zftune.workload import batches, build_model, load_text

MODEL, SEQUENCE, WINDOW = "tiny", 16, 4
_COUNTED = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
_PATIENCE = timedelta(minutes=5)
CODE = (
    *(f"runtime/zenflow/{part}.py" for part in ("config", "layout", "rank_sums", "selection", "sharded", "training")),
    "zftune/workload/model.py",
    "studies/024-claims/claims/selection.py",
)


def job(ranks: int) -> Job:
    """Count it on so many ranks."""
    return Job(f"selection--{ranks}", {"ranks": ranks, "model": MODEL, "code": code_digest(*CODE)}, figures, (ranks,))


def figures(ranks: int) -> dict[str, Any]:
    """Bytes of a step's selection beside those of gathering its gradients, and what they should be."""
    torch.set_num_threads(1)
    context = get_context("fork")  # before anything that has threads
    ear, mouth = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        begun = [
            context.Process(target=_rank, args=(rank, ranks, folder, mouth if not rank else None))
            for rank in range(ranks)
        ]
        for process in begun:
            process.start()
        mouth.close()
        try:
            counted: dict[str, int] = ear.recv()
        finally:
            for process in begun:
                process.join()
    return told(counted)


def told(counted: dict[str, int]) -> dict[str, Any]:
    """Figures of what was counted in a step."""
    model = ModelFacts.from_name(MODEL)
    selection, gradients = counted["all_reduce"], model.element_bytes * model.trainable
    return {
        "selection_bytes": selection,
        "should_be_bytes": 4 * words(model),
        "gradient_bytes": gradients,
        "reduced_bytes": counted["reduce_scatter_tensor"],
        "gathered_weight_bytes": counted["all_gather_into_tensor"],
        "cheaper": gradients / selection,
    }


def words(model: ModelFacts) -> int:
    """Numbers that ranks add up in a step: an energy of each column (of a weight without columns, one), a flag of each
    weight, whether to skip, how many ranks failed, and how far the last step moved their weights.
    """
    columns = sum(shape[1] if len(shape) > 1 else 1 for shape in model.weights)
    return 4 + len(model.weights) + columns


def cheaper(model: ModelFacts) -> float:
    """How many times fewer bytes the energies have than the gradients."""
    return model.element_bytes * model.trainable / (4 * words(model))


def elements_a_column(model: ModelFacts) -> float:
    """How many times fewer numbers they are: what the claim counts."""
    return model.trainable / words(model)


def _rank(rank: int, ranks: int, folder: str, mouth: Connection | None) -> None:
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/ranks", rank=rank, world_size=ranks, timeout=_PATIENCE
    )
    workload = build_model(MODEL, dtype=torch.bfloat16, seed=0)
    workload.shard()
    config = ZenFlowConfig(topk_ratio=0.1, update_interval=WINDOW, select_interval=2 * WINDOW)
    optimizer = ZenFlowAdamW(workload.module.parameters(), lr=1e-4, config=config, module=workload.module)
    feed = batches(workload.encode(load_text(None)), micro_batch=1, sequence=SEQUENCE, seed=rank)

    def step() -> None:
        workload.loss(next(feed)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WINDOW):
        step()
    with counting() as counted:
        for _ in range(WINDOW):  # all steps send the same
            step()
    optimizer.close()
    if mouth is not None:
        mouth.send({name: counted[name] // WINDOW for name in _COUNTED})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Bytes of the whole tensor of every collective that this process begins, by its name."""
    counted: Counter[str] = Counter()
    originals = {name: getattr(torch.distributed, name) for name in _COUNTED}

    def counter(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
            counted[name] += max(one.nbytes for one in tensors)
            return original(*args, **kwargs)

        return called

    for name, original in originals.items():
        setattr(torch.distributed, name, counter(name, original))
    try:
        yield counted
    finally:
        for name, original in originals.items():
            setattr(torch.distributed, name, original)
