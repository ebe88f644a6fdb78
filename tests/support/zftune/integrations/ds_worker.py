"""Trains a small model with a real DeepSpeed engine, by zftune's backends or without; run as a process of its own.

    python -m tests.support.zftune.integrations.ds_worker CASES.json OUT.pt

CASES.json holds {name: case}; OUT.pt then holds {name: what was seen}. Keys of a case, all but "config" optional:
"ours" (enable() first), "enable" (its arguments), "optimizer" (json, instance, callable, or a class's name),
"scheduler" (instance, callable), "steps", "passes" (backward passes of a step), "load" and "save" (folders),
"save_after", "die" (kill -9 after saving), "form" (of the config: dict, path, base64, args), "model" (plain, odd, ...),
"backward" (engine, scaled, direct), "twice" (initialize a second time, on the same model), "init" (the dtype in which
`deepspeed.zero.Init` makes the model), "visit" (before which step a script does what it may at its stage), "parts"
(calls those of a model of the kind "odd", and clips and decays the parameters that it listed before `initialize`),
"device_bytes" (of a small device's memory).
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support import upstream_ops
from tests.support.zftune.integrations import ds_stage2, ds_stage3
from zftune.agent.systems.deepspeed import describe
from zftune.integrations.fsdp2 import whole

LR = 1e-3
_ZFTUNE = logging.getLogger("zftune")
WIDTH = 24


class Odd(nn.Module):
    """Tied weights, a parameter that nothing uses, a frozen one, one of a single element, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 13)
        self.norm = nn.LayerNorm(13)
        self.outer = nn.Linear(13, WIDTH, bias=False)
        self.again = nn.Linear(WIDTH, 13, bias=False)
        self.again.weight = self.inner.weight
        self.unused = nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.inner(x) + self.again(x * self.frozen)))
        found: torch.Tensor = self.outer(hidden) * self.scale
        return found


class Late(nn.Module):
    """A layer that has no gradient before the ninth forward: its masters are read after a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.late = nn.Linear(WIDTH, WIDTH)
        self.forwards: torch.Tensor
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        hidden: torch.Tensor = self.first(x)
        return self.late(hidden) + hidden if self.forwards > 8 else hidden


class Scaled(nn.Linear):
    """With a trained parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Experts(nn.Module):
    """Each of two ranks uses one, and both another."""

    _no_split_modules = ("Experts",)

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.experts[2](self.experts[torch.distributed.get_rank()](x))
        return found


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(3)
    if kind == "experts":
        from deepspeed.utils import set_z3_leaf_modules

        model = nn.Sequential(Experts(), nn.Linear(WIDTH, WIDTH))
        set_z3_leaf_modules(model, [Experts])
        return model
    kinds: dict[str, type[nn.Module]] = {"odd": Odd, "late": Late, "scaled": Scaled}
    if kind in kinds:
        return kinds[kind]()
    if kind in ("scalar", "empty"):
        return nn.ParameterDict({"it": nn.Parameter(torch.ones(()) if kind == "scalar" else torch.ones(0, 3))})
    return nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.LayerNorm(40), nn.Linear(40, WIDTH))


def batch(step: int, part: slice | None = None) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 + step))
    return x if part is None else x[part]


def decay(step: int) -> float:
    return 1.0 / (1.0 + 0.3 * step)


def arguments(case: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    kind, scheduler = case.get("optimizer", "json"), case.get("scheduler")
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": LR / 2},
        {"params": [], "weight_decay": 0.0},
    ]
    used = groups[:2] if scheduler else groups  # DeepSpeed drops the empty one, behind a scheduler's back
    if kind == "json":
        given: dict[str, Any] = {"model_parameters": [p for p in model.parameters() if p.requires_grad]}
    elif kind == "groups":
        given = {"model_parameters": groups[:2]}
    elif kind == "callable":
        given = {
            "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1),
            "model_parameters": list(model.parameters()),
        }
    else:
        given = {"optimizer": getattr(torch.optim, "AdamW" if kind == "instance" else kind)(used, lr=LR)}
    if scheduler == "callable":
        given["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    elif scheduler == "instance":
        given["lr_scheduler"] = torch.optim.lr_scheduler.LambdaLR(given["optimizer"], decay)
    return given


def config_in_form(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    config, form = case["config"], case.get("form", "dict")
    text = json.dumps(config)
    path = folder / "ds_config.json"
    path.write_text(text)
    if form == "args":
        return {"args": argparse.Namespace(deepspeed_config=str(path), local_rank=int(os.environ["LOCAL_RANK"]))}
    forms = {"dict": config, "path": str(path), "base64": base64.urlsafe_b64encode(text.encode()).decode()}
    return {"config": forms[form]}


def train(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    import deepspeed

    import zftune.integrations.deepspeed as zftune_deepspeed

    zftune_deepspeed.disable()
    if case.get("ours"):
        zftune_deepspeed.enable(**case.get("enable", {}))
    affinity, threads = os.sched_getaffinity(0), _threads()
    if case.get("init"):
        with deepspeed.zero.Init(config_dict_or_path=case["config"], dtype=getattr(torch, case["init"])):
            model = make_model(case.get("model", "plain"))
    else:
        model = make_model(case.get("model", "plain"))
        for parameter in model.parameters():  # every rank trains the weights of the first
            parameter.data += torch.distributed.get_rank()
    early = list(model.parameters()) if case.get("parts") else None
    lines = _Lines()
    with warnings.catch_warnings(record=True) as caught, _small_device(case.get("device_bytes")), lines:
        warnings.simplefilter("always")
        engine, optimizer, _, scheduler = deepspeed.initialize(
            model=model, **arguments(case, model), **config_in_form(case, folder)
        )
        if case.get("twice"):
            earlier = engine  # kept, as a notebook keeps it
            engine, optimizer, _, scheduler = deepspeed.initialize(
                model=model, **arguments(case, model), **config_in_form(case, folder)
            )
            assert earlier is not engine
        seen: dict[str, Any] = {"losses": [], "lrs": [], "scales": [], "norms": []}
        if case.get("load"):
            seen["client_state"] = engine.load_checkpoint(case["load"])[1]
        for number in range(case.get("steps", 12)):
            if number == case.get("visit"):
                seen["visit"] = _visited(engine, model, case, folder)
            _step(engine, model, case, seen, early)
    seen |= {
        "skipped": engine.skipped_steps,
        "weights": weights_of(model),
        "engine_dtypes": [str(dtype) for dtype in engine.get_data_types()],
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
        "optimizer": type(optimizer).__name__,
        "described": describe(engine),
        "lines": lines.said,
        "has_scheduler": scheduler is not None,
        "warnings": [str(one.message) for one in caught if "lr_scheduler" in str(one.message)],
    }
    if type(optimizer).__name__ == "EngineOptimizer":
        optimizer.flush()
        seen["flushed"] = weights_of(model)
        seen |= {name: getattr(optimizer.config, name) for name in ("topk_ratio", "update_interval")}
    engine.destroy()
    seen["affinity_kept"] = os.sched_getaffinity(0) == affinity
    until = time.monotonic() + 5
    while _threads() > threads and time.monotonic() < until:
        time.sleep(0.01)
    seen["threads"] = _threads() - threads
    return seen


def _visited(engine: Any, model: nn.Module, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    if case["config"]["zero_optimization"]["stage"] == 3:
        return ds_stage3.visited(engine, model, folder)
    return ds_stage2.visited(engine, model, batch(99, _part()), folder)


def _part() -> slice:
    rows = 4 // torch.distributed.get_world_size()
    return slice(torch.distributed.get_rank() * rows, (torch.distributed.get_rank() + 1) * rows)


@contextlib.contextmanager
def _small_device(nbytes: int | None) -> Iterator[None]:
    """One that has no more memory than that; None: the accelerator's own."""
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    if nbytes is not None:
        accelerator.available_memory = lambda *_: nbytes
    try:
        yield
    finally:
        vars(accelerator).pop("available_memory", None)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())

    def __enter__(self) -> None:
        self._level = _ZFTUNE.level
        _ZFTUNE.addHandler(self)
        _ZFTUNE.setLevel(logging.INFO)

    def __exit__(self, *_: object) -> None:
        _ZFTUNE.removeHandler(self)
        _ZFTUNE.setLevel(self._level)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(value).clone() for name, value in model.state_dict().items()}


def _step(
    engine: Any, model: nn.Module, case: dict[str, Any], seen: dict[str, Any], early: list[nn.Parameter] | None
) -> None:
    part, passes, loss_sum = _part(), case.get("passes", 1), 0.0
    for number in range(passes):
        x = batch(passes * engine.global_steps + number, part)
        loss = (engine(x.to(next(model.parameters()).dtype)).float() - x).square().mean()
        if early is not None:
            loss = loss + ds_stage3.loss_by_parts(model, early, x)
        _backward(engine, loss, case.get("backward", "engine"))
        if early is not None:
            nn.utils.clip_grad_norm_(early, 0.1)
        if number == passes - 1:
            seen["lrs"].append([group["lr"] for group in engine.optimizer.param_groups if group["params"]])
        engine.step()
        loss_sum += loss.item() / passes
    seen["losses"].append(loss_sum)
    norm = engine.get_global_grad_norm()
    seen["norms"].append(None if norm is None else float(norm))
    seen["scales"].append(float(getattr(engine.optimizer, "cur_scale", 1.0)))
    if case.get("save") and engine.global_steps == case["save_after"]:
        engine.save_checkpoint(case["save"], client_state={"mine": 7})
        if case.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)


def _threads() -> int:
    """Of this process by the names that the host engine gives its own; native ones too."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names.append((task / "comm").read_text())
    return sum(name.startswith("zenflow") for name in names)


def _backward(engine: Any, loss: torch.Tensor, how: str) -> None:
    if how == "engine":
        engine.backward(loss)
    elif how == "scaled":
        engine.scale(loss).backward()
    else:
        loss.backward()


def alone() -> None:
    """What a launcher would have set."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def main() -> None:
    cases, out = Path(sys.argv[1]), Path(sys.argv[2])
    alone()
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    upstream_ops.allow_fp16()
    found: dict[str, Any] = {}
    for name, case in json.loads(cases.read_text()).items():
        try:
            found[name] = train(case, out.parent)
        except Exception as error:  # noqa: BLE001 - told to the parent
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    rank = torch.distributed.get_rank()
    torch.save(found, out if rank == 0 else out.with_suffix(f".{rank}.pt"))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
