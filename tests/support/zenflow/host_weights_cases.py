"""Runs over FSDP2 whose weights lie on the host (`CPUOffloadPolicy`), and the same with weights on the device.

There is no GPU here: FSDP2 trains on the CPU, with that policy, and what it has sharded says that its mesh is of GPUs.
So the runtime does all that it does beside one; the copies that torch makes there and back have nothing to do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.zenflow.family_cases import OURS
from tests.support.zenflow.fsdp_cases import (
    STEPS,
    Case,
    Odd,
    Run,
    local,
    loss_of,
    model_of,
    my_part,
    sharded,
    tokens_of,
)
from zenflow import ConfigError, ZenFlowAdamW, ZenFlowConfig, distributed
from zenflow.device import HostSpan, HostWeights, Transfer

FOLDER = "TEST_HOST_WEIGHTS"
STOP = 5

EXACT = ZenFlowConfig.zero_offload(bucket_bytes=700, pipeline="bucket", max_grad_norm=0.5)
LATE = ZenFlowConfig(topk_ratio=0.0, update_interval=3, bucket_bytes=300, ledger=True)

CASES = {
    "exact": Case(EXACT),
    "one after the other": Case(replace(EXACT, pipeline="none")),
    "one step late": Case(replace(LATE, update_interval=1)),
    "late": Case(replace(LATE, max_grad_norm=0.5)),
    "early": Case(replace(LATE, apply_lag=1)),
    "twin flow": Case(replace(LATE, offload_ratio=0.5)),
    "mean": Case(replace(LATE, deferred_update="mean")),
    "clipped by torch": Case(LATE, clip=0.5),
    "accumulated": Case(replace(LATE, gradient_accumulation_steps=2), passes=2, to_none=False),
    "reduced once": Case(LATE, passes=2, reduces="last"),
    "scaled": Case(replace(LATE, max_grad_norm=0.5), scaler=True, infinite=4),
    "recomputed": Case(LATE, recompute=True),
    "knobs": Case(
        replace(LATE, max_grad_norm=0.5),
        knobs={3: {"update_interval": 2}, 5: {"host_threads": 2}, 7: {"offload_ratio": 0.5}},
    ),
    **{rule: Case(LATE, rule=rule) for rule in OURS if rule != "adamw"},
}


def on_host(model: Odd) -> Odd:
    """With rows on the host, for GPUs that compute with copies of them."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    made = sharded(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    mesh = _mesh_of_gpus()
    parameter: Any
    for parameter in made.parameters():
        parameter._spec = replace(parameter._spec, mesh=mesh)
    return made


def _mesh_of_gpus() -> Any:
    """Of all ranks; the CPU is reached through gloo, as in a process group of "cpu:gloo,cuda:nccl"."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    size = torch.distributed.get_world_size()
    mesh: Any = DeviceMesh("cuda", torch.arange(size), _init_backend=False)
    mesh._dim_group_names = init_device_mesh("cpu", (size,))._dim_group_names
    return mesh


def rows_of(run: Run) -> dict[str, Tensor]:
    """What this rank holds of each weight."""
    return {name: local(parameter.detach()).clone() for name, parameter in run.model.named_parameters()}


def found(run: Run, first: int = 1) -> dict[str, Any]:
    """What a run comes to; ends its optimizer."""
    run.steps(first, STEPS)
    before = rows_of(run)
    run.optimizer.flush()
    ledger = run.optimizer.ledger() if run.optimizer.config.ledger else {}
    unbalanced = [name for name, balance in ledger.items() if not balance.balanced or balance.pending]
    run.optimizer.abandon()
    return {"before": before, "rows": rows_of(run), "norms": run.norms, "unbalanced": unbalanced}


def both(case: Case, rank: int) -> dict[str, Any]:
    """The run with weights on the host, and with weights on the device."""
    return {kind: found(Run(case, make(model_of()), my_part(rank))) for kind, make in MAKERS.items()}


MAKERS: dict[str, Callable[[Odd], Odd]] = {"host": on_host, "device": sharded}


class SlowHost(HostWeights):
    """A host whose work takes longer, and not always as long."""

    def host_work(
        self, finish: Callable[[], HostSpan], nbytes: int, inputs: Sequence[Transfer], submitted: Any
    ) -> HostSpan:
        time.sleep(nbytes % 7 * 1e-3)
        return super().host_work(finish, nbytes, inputs, submitted)


def at_all_speeds(rank: int) -> dict[str, Any]:
    """The same run with other hosts."""
    case = CASES["late"]
    threads = replace(case, config=replace(case.config, host_threads=2))
    slow = Run(case, on_host(model_of()), my_part(rank), device=SlowHost(torch.device("cuda")))
    return {"runs": [found(run)["rows"] for run in (Run(threads, on_host(model_of()), my_part(rank)), slow)]}


class Asked(HostWeights):
    """Notes what the weights are whenever nothing reads them any more."""

    rows: Callable[[], dict[str, Tensor]]

    def __init__(self) -> None:
        super().__init__(torch.device("cuda"))
        self.then: dict[str, Tensor] = {}

    def let_go_of_weights(self) -> None:
        self.then = self.rows()


def waited_for(rank: int) -> dict[str, Any]:
    """Of each call that writes weights: whether readers were waited for before, and whether it wrote any."""
    device = Asked()
    run = Run(CASES["late"], on_host(model_of()), my_part(rank), device=device)
    device.rows = partial(rows_of, run)
    optimizer, weight = run.optimizer, run.model.embedding.weight
    assert isinstance(weight, torch.nn.Parameter)
    run.steps(1, 4)
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: run.step(5),
        "flush": optimizer.flush,
        "set_full_state": lambda: optimizer.set_full_state(weight, "master", torch.zeros(local(weight).shape)),
    }
    results = {}
    for name, call in calls.items():
        before = rows_of(run)
        device.then = {}
        call()
        results[name] = (_same(before, device.then), not _same(before, rows_of(run)))
    optimizer.abandon()
    return results


def _same(rows: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return rows.keys() == others.keys() and all(torch.equal(value, others[name]) for name, value in rows.items())


def as_torch(rank: int) -> dict[str, Any]:
    """Largest difference from torch's AdamW on the same FSDP2 model, after each step."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    case = Case(ZenFlowConfig.zero_offload(pipeline="bucket"))
    ours = Run(case, on_host(model_of()), my_part(rank))
    theirs = sharded(model_of(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    differences = []
    for number in range(1, STEPS + 1):
        ours.step(number)
        optimizer.zero_grad()
        loss_of(theirs, tokens_of(number, 0)[my_part(rank)], recompute=False).backward()
        optimizer.step()
        pairs = zip(rows_of(ours).values(), theirs.parameters(), strict=True)
        differences.append(max(float((one - local(other.detach())).abs().max()) for one, other in pairs if one.numel()))
    ours.optimizer.abandon()
    return {"differences": differences}


def rounded(rank: int) -> dict[str, Any]:
    """bf16 rows with the masters of fp32 ones."""
    results = {}
    for kind, make in MAKERS.items():
        model = make(model_of())
        masters = {one: one.detach().clone() for one in model.parameters() if one.requires_grad}
        run = Run(CASES["late"], model.to(torch.bfloat16), my_part(rank))
        run.optimizer.give_masters(masters)
        results[kind] = found(run)
    return results


def said(rank: int) -> dict[str, Any]:
    """About knobs that weights on the host leave no place for, and which they have where none are asked for."""
    model = on_host(model_of())
    sentences = [_refusal(lambda: ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(), module=model))]
    optimizer = ZenFlowAdamW(model.parameters(), module=model)
    sentences.append(_refusal(lambda: optimizer.set_knobs(topk_ratio=0.25)))
    hooks = [name for name, one in model.named_parameters() if getattr(one, "_post_accumulate_grad_hooks", None)]
    config, device = optimizer.config, type(optimizer.device).__name__
    optimizer.abandon()
    none = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(offload_ratio=0.0, host_threads=2), module=model)
    kernels = none._training.runtime.kernels
    threads = {"of torch": torch.get_num_threads(), "of kernels": getattr(kernels, "threads", None)}
    none.abandon()
    knobs = {"topk_ratio": config.topk_ratio, "update_interval": config.update_interval}
    return {"said": sentences, "knobs": knobs, "hooks": hooks, "device": device, "threads": threads}


def sharded_later(rank: int) -> dict[str, Any]:
    """Where the model is sharded after the optimizer was made, as Accelerate does it, and from the beginning."""
    later = Run(CASES["late"], model_of(), my_part(rank))
    later.optimizer.param_groups[0]["params"] = [*on_host(later.model).parameters()]
    return {"host": found(later), "device": found(Run(CASES["late"], sharded(model_of()), my_part(rank)))}


def exchanged(rank: int) -> dict[str, Any]:
    """How far weights are apart where torch's AdamW goes on from our state, and where we go on."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    run = Run(Case(ZenFlowConfig.zero_offload()), on_host(model_of()), my_part(rank)).steps(1, STOP)
    with run.optimizer.torch_state():
        state = get_optimizer_state_dict(run.model, run.optimizer)
    theirs = on_host(model_of())
    theirs.load_state_dict(run.model.state_dict())
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    set_optimizer_state_dict(theirs, optimizer, state)
    for number in range(STOP + 1, STEPS + 1):
        optimizer.zero_grad()
        loss_of(theirs, tokens_of(number, 0)[my_part(rank)], recompute=False).backward()
        optimizer.step()
    rows = found(run, STOP + 1)["rows"]
    pairs = [(rows[name], local(one.detach())) for name, one in theirs.named_parameters()]
    return {"differences": [float((one - other).abs().max()) for one, other in pairs if one.numel()]}


def _refusal(do: Callable[[], object]) -> str:
    try:
        do()
    except ConfigError as error:
        return str(error)
    return "nothing"


def saved(rank: int) -> dict[str, Any]:
    """A run that is saved in the middle of a window, and what goes on from there: on the host, and on the device."""
    folder = Path(os.environ[FOLDER]) / f"of {torch.distributed.get_world_size()}"
    run = Run(CASES["late"], on_host(model_of()), my_part(rank)).steps(1, STOP)
    distributed.save(run.model, run.optimizer, folder)
    results = {"uninterrupted": found(run, STOP + 1)}
    for kind, make in MAKERS.items():
        other = Run(CASES["late"], make(model_of()), my_part(rank))
        distributed.load(other.model, other.optimizer, folder)
        results[kind] = found(other, STOP + 1)
    return results


WORK: dict[str, Callable[[int], Any]] = {
    **{name: partial(both, case) for name, case in CASES.items()},
    "rounded": rounded,
    "waited for": waited_for,
    "at all speeds": at_all_speeds,
    "as torch": as_torch,
    "said": said,
    "saved": saved,
    "sharded later": sharded_later,
    "exchanged": exchanged,
}
