"""Accelerate with FSDP2 on several ranks: a loop that saves and goes on, with torch's AdamW and with ours."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState, DistributedType
from torch import nn

from tests.support.tiers import fast
from tests.support.zenflow.rank_runs import TIMEOUT
from tests.support.zftune.integrations.trainers import EXACT, LATE, Tokens, tiny_model
from zenflow.sharded import local_rows
from zftune.integrations.huggingface import AccelerateAdamW

STEPS, SAVED_AFTER = fast((12, 5), all_of=(20, 9))
ROWS = 12
"""Of a batch, which all ranks share."""
FOLDER = "ZFTUNE_TEST_ACCELERATE"
"""The environment's: where the checkpoints are."""
CONFIGS = {"exact": EXACT, "late": LATE}


def accelerator_of(precision: str) -> Accelerator:
    AcceleratorState._reset_state(True)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in launched.items()}, MASTER_ADDR="127.0.0.1")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU  # else Accelerate does not shard on CPUs
    # A scheduler else takes as many steps at once as there are ranks.
    return Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=precision, step_scheduler_with_optimizer=False)


class Run:
    """A training that has begun. `who` makes the optimizer: "torch", or "exact" or "late" of ours."""

    def __init__(self, who: str, precision: str = "no", dtype: torch.dtype = torch.float32) -> None:
        self.accelerator = accelerator_of(precision)
        model = tiny_model(dtype)
        hyper: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
        if who == "torch":
            self.inner: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **hyper)
        else:
            self.inner = AccelerateAdamW(model.parameters(), **hyper, config=CONFIGS[who], module=model)
        scheduler = torch.optim.lr_scheduler.LinearLR(self.inner, 1.0, 0.1, STEPS)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, self.inner, scheduler)
        assert self.accelerator.is_fsdp2
        self.losses: list[float] = []
        self.norms: list[float] = []

    def step(self, number: int) -> None:
        begin = ROWS * number % 60
        ids = Tokens().ids[begin : begin + ROWS].chunk(self.accelerator.num_processes)[self.accelerator.process_index]
        loss = self.model(input_ids=ids, labels=ids).loss
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.losses.append(float(self.accelerator.reduce(loss.detach(), "mean")))
        assert norm is not None
        self.norms.append(float(norm))

    def saved(self, folder: Path) -> None:
        if isinstance(self.inner, AccelerateAdamW):
            self.inner.flush()
        self.accelerator.save_state(str(folder))


def run(
    who: str, source: str | None, name: str, _: int, *, precision: str = "no", dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """What a rank has seen: from the beginning, saved in the middle; or from what another run has saved."""
    folder, made, first = Path(os.environ[FOLDER]), Run(who, precision, dtype), 0
    if source is not None:
        made.accelerator.load_state(str(folder / source))
        first = SAVED_AFTER
    for number in range(first, STEPS):
        if number == SAVED_AFTER and source is None:
            made.saved(folder / name)
        made.step(number)
    seen: dict[str, Any] = {"losses": made.losses, "norms": made.norms, "dtypes": rows_and_masters(made)}
    if isinstance(made.inner, AccelerateAdamW):
        made.inner.close()
    weights = {name: value.full_tensor().clone() for name, value in made.model.state_dict().items()}
    return {**seen, "weights": weights}


def rows_and_masters(made: Run) -> list[str]:
    """The dtypes of the model's rows and of what is trained for them, each of which rounds to its row."""
    found = {str(parameter.dtype) for parameter in made.model.parameters()}
    if isinstance(made.inner, AccelerateAdamW) and made.inner.config.update_interval == 1:
        for parameter in made.model.parameters():
            master = local_rows(made.inner.full_state(parameter)["master"])
            assert torch.equal(master.to(parameter.dtype), local_rows(parameter.detach()))
            found.add(str(master.dtype))
    return sorted(found)


def pending(_: int) -> dict[str, str]:
    """What is said where nobody has flushed."""
    made = Run("late")
    for number in range(2):
        made.step(number)
    try:
        made.accelerator.save_state(os.environ[FOLDER] + "/pending")
    except Exception as error:  # noqa: BLE001 - looked at by the test
        return {"said": f"{type(error).__name__}: {error}"}
    finally:
        made.inner.close()  # type: ignore[attr-defined]
    return {"said": "nothing"}


def prepared(_: int) -> dict[str, Any]:
    """What Accelerate saves, moves and loads again while it prepares the optimizer: of the whole model, still."""
    accelerator_of("no")
    model = nn.Linear(300, 300)
    optimizer = AccelerateAdamW(model.parameters(), lr=1e-2, module=model)
    state = optimizer.state_dict()["state"]
    return {"elements": sum(value.numel() for one in state.values() for value in one.values())}


def killed() -> None:
    """The life of a rank that a launcher has begun; the second is killed in the midst of the training."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=TIMEOUT)
    made = Run("exact")
    for number in range(STEPS):
        if number == SAVED_AFTER:
            made.saved(Path(os.environ[FOLDER]) / "killed")
        if number == SAVED_AFTER + 3 and made.accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        made.step(number)


BF16: dict[str, Any] = {"precision": "bf16", "dtype": torch.bfloat16}
RUNS: dict[str, Callable[[int], Any]] = {
    "torch": partial(run, "torch", None, "torch"),
    "ours": partial(run, "exact", None, "ours"),
    "ours again": partial(run, "exact", "ours", "ours again"),
    "torch from ours": partial(run, "torch", "ours", "torch from ours"),
    "ours from torch": partial(run, "exact", "torch", "ours from torch"),
    "ours from a killed one": partial(run, "exact", "killed", "ours from a killed one"),
    "torch in bf16": partial(run, "torch", None, "torch in bf16", **BF16),
    "ours in bf16": partial(run, "exact", None, "ours in bf16", **BF16),
    "ours in bf16 again": partial(run, "exact", "ours in bf16", "ours in bf16 again", **BF16),
    "bf16 rows": partial(run, "exact", None, "bf16 rows", dtype=torch.bfloat16),
    "late": partial(run, "late", None, "late"),
    "late again": partial(run, "late", "late", "late again"),
}
WORK = {**RUNS, "pending": pending, "prepared": prepared}
