"""Scripts over FSDP2 that read and write weights as they like, with this optimizer and with `torch.optim.AdamW`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiers import everything, fast
from tests.support.zenflow.fsdp_cases import (
    EXACT,
    OVERLAPPED,
    Case,
    Odd,
    Run,
    local,
    loss_of,
    model_of,
    my_part,
    sharded,
    tokens_of,
    whole,
)
from zenflow import ZenFlowAdamW
from zenflow.device import in_backward
from zenflow.host.memory import HostMemory
from zenflow.late_weights import LateWeights, PendingUpdate
from zenflow.staging import Dispatcher

STEPS = fast(7, all_of=11)
HYPER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
Make = Callable[[nn.Module], torch.optim.Optimizer]
Script = Callable[[Odd, Make], Iterator[object]]
"""Trains; what it yields is compared."""


def _step(model: Odd, optimizer: torch.optim.Optimizer, number: int) -> None:
    rank = torch.distributed.get_rank()
    optimizer.zero_grad()
    loss_of(model, tokens_of(number, 0)[my_part(rank)], recompute=False).backward()
    optimizer.step()


def _trained(model: Odd, make: Make, between: Callable[[int], object] = lambda _: None) -> torch.optim.Optimizer:
    optimizer = make(model)
    for number in range(1, STEPS + 1):
        _step(model, optimizer, number)
        between(number)
    return optimizer


def _average(model: Odd, make: Make) -> Iterator[object]:
    """An average of the whole weights, read right after each step in all the ways that there are."""
    average: dict[str, Tensor] = {}

    def read(number: int) -> None:
        ways: list[Callable[[Any], Tensor]] = [
            lambda p: p.detach().full_tensor(),
            lambda p: whole(p.data),
            lambda p: whole(p.detach() * 1.0),
        ]
        for name, parameter in model.named_parameters():
            value = ways[number % len(ways)](parameter)
            average[name] = value.clone() if number == 1 else average[name].lerp(value, 0.3)

    _trained(model, make, read)
    yield average


def _clamped(model: Odd, make: Make) -> Iterator[object]:
    """Writes to the DTensor, to its rows, and to its data, between the steps."""

    @torch.no_grad()
    def write(number: int) -> None:
        for parameter in model.parameters():
            if number % 3 == 0:
                parameter.clamp_(-0.2, 0.2)
            elif number % 3 == 1:
                local(parameter).mul_(0.9)
            else:
                parameter.data.add_(0.01)

    _trained(model, make, write)
    yield {}


def _loaded(model: Odd, make: Make) -> Iterator[object]:
    """Saved weights are loaded in the middle of training, and the model gets other memory."""
    kept: dict[str, Tensor] = {}

    module: Any = model

    def load(number: int) -> None:
        if number == 2:
            kept.update({name: value.clone() for name, value in model.state_dict().items()})
        if number == 4:
            model.load_state_dict(kept)
        if number in (6, 9):  # as when it goes to another device and back
            model.zero_grad()
            module._apply(torch.clone)

    _trained(model, make, load)
    yield {name: whole(value) for name, value in kept.items()}


def _swapped(model: Odd, make: Make) -> Iterator[object]:
    """The optimizer is made first, and the model sharded then, as Accelerate does."""
    optimizer = make(model)
    before = [name for name, _ in model.named_parameters()]
    sharded(model)
    by_name = dict(model.named_parameters())
    optimizer.param_groups[0]["params"] = [by_name[name] for name in before]
    for number in range(1, STEPS + 1):
        _step(model, optimizer, number)
    yield sorted(len(optimizer.state[parameter]) > 0 for parameter in model.parameters() if parameter.requires_grad)


def _moved(model: Odd, make: Make) -> Iterator[object]:
    """The model gets other memory before the first step of an optimizer that has been made."""
    optimizer, module = make(model), cast(Any, model)
    module._apply(lambda values: values * 0.5)
    for number in range(1, STEPS + 1):
        _step(model, optimizer, number)
    yield {}


def _evaluated(model: Odd, make: Make) -> Iterator[object]:
    """A forward right after each step, which gathers what the step has made."""
    losses: list[float] = []

    def evaluate(number: int) -> None:
        with torch.no_grad():
            losses.append(float(loss_of(model, tokens_of(99, number), recompute=False)))

    _trained(model, make, evaluate)
    yield torch.tensor(losses)


def _gathered(model: Odd, make: Make) -> Iterator[object]:
    """Units are gathered by hand right after each step, and read."""
    average: dict[str, Tensor] = {}

    def gather(number: int) -> None:
        for part in cast(Any, (*model.blocks, model)):
            part.unshard()
            for name, parameter in part.named_parameters(recurse=part is not model):
                value = parameter.detach().clone()
                average[name] = value if number == 1 else average[name].lerp(value, 0.3)
            part.reshard()

    _trained(model, make, gather)
    yield average


def _handed_on(model: Odd, make: Make) -> Iterator[object]:
    """Rows go where nobody knows of torch functions; a state without weights is loaded, and none gets other memory."""
    read: list[Tensor] = []
    places: list[list[int]] = []

    def hand_on(number: int) -> None:
        if number % 2:
            rows = [cast(Any, parameter)._local_tensor for parameter in model.parameters()]
            read.extend(torch.empty(0).set_(one).clone() for one in rows)
        else:
            model.load_state_dict({}, strict=False)
            places.append([local(p.detach()).untyped_storage()._cdata for p in model.parameters()])

    _trained(model, make, hand_on)
    yield read
    yield [place == places[0] for place in places]


def _held(model: Odd, make: Make) -> Iterator[object]:
    """Storages of rows are held from one step to the next and read by themselves."""
    storages: list[Any] = []
    read: list[Tensor] = []

    def hold(number: int) -> None:
        if not storages and number % 3 == 0:
            storages.extend(local(parameter.detach()).untyped_storage() for parameter in model.parameters())
        elif storages:
            read.extend(torch.empty(0).set_(one).clone() for one in storages)
            storages.clear()

    _trained(model, make, hold)
    yield read


def _accelerated(model: Odd, make: Make) -> Iterator[object]:
    """Accelerate shards the model, swaps the optimizer's parameters, and clips."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, DistributedType

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    launched = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ.update({name: str(value) for name, value in launched.items()}, MASTER_PORT="1")  # the group is there
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # On a CPU it takes another way than FSDP, by a look at the devices; what comes then is what it does on GPUs.
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    accelerator.device_placement = False
    prepared, optimizer = accelerator.prepare(model, make(model))
    norms = []
    for number in range(1, STEPS + 1):
        optimizer.zero_grad()
        accelerator.backward(loss_of(prepared, tokens_of(number, 0)[my_part(rank)], recompute=False))
        norms.append(float(whole(accelerator.clip_grad_norm_(prepared.parameters(), 0.5))))
        optimizer.step()
    yield torch.tensor(norms)


def _mixed(model: Odd, make: Make) -> Iterator[object]:
    """fp32 rows that are gathered in bf16, their gradients reduced in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    _trained(model, make)
    yield {}


SCRIPTS: dict[str, Script] = {
    "average": _average,
    "clamped": _clamped,
    "loaded": _loaded,
    "swapped": _swapped,
    "moved": _moved,
    "evaluated": _evaluated,
    "gathered": _gathered,
    "mixed": _mixed,
    "handed on": _handed_on,
    "held": _held,
    "accelerated": _accelerated,
}
TRIED = fast(["average", "swapped", "gathered"], all_of=list(SCRIPTS))
UNSHARDED = (_swapped, _mixed, _accelerated)
"""Those that shard the model themselves."""


def _both(script: Script, _: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    waits, late = replace(EXACT, max_grad_norm=None), replace(EXACT, max_grad_norm=None, pipeline="bucket")
    makes: dict[str, Make] = {
        "torch": lambda model: torch.optim.AdamW(model.parameters(), **HYPER),
        "ours": lambda model: ZenFlowAdamW(model.parameters(), **HYPER, config=waits, module=model),
        "late": lambda model: ZenFlowAdamW(model.parameters(), **HYPER, config=late, module=model),
    }
    if not everything():
        del makes["ours"]  # which is compared in test_fsdp
    with _noted_late() as count:
        for name, make in makes.items():
            model = model_of() if script in UNSHARDED else sharded(model_of())
            yielded = list(script(model, make))
            weights = {key: whole(value) for key, value in model.state_dict().items()}
            found[name] = {"yielded": yielded, "weights": weights}
    return {**found, "count": count}


@contextmanager
def _noted_late() -> Iterator[Counter[str]]:
    """Count weights whose updates were left to their use, and units that were gathered by a call."""
    from torch.distributed.fsdp import FSDPModule

    found: Counter[str] = Counter()
    leave, unshard = LateWeights.leave, FSDPModule.unshard

    def noted(waits: LateWeights, flight: PendingUpdate) -> bool:
        left = leave(waits, flight)
        found["left"] += left
        return left

    def called(unit: FSDPModule, async_op: bool = False) -> Any:
        found["gathered in order"] += 1
        return unshard(unit, async_op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LateWeights, "leave", noted)
        patch.setattr(FSDPModule, "unshard", called)
        yield found


def reserved(rank: int) -> dict[str, Any]:
    """In which steps gradients left, and host memory was allocated, during backward; and in which otherwise."""
    found: Counter[tuple[str, bool, int]] = Counter()
    number = 0

    def noted(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def do(*args: Any, **kwargs: Any) -> Any:
            found[what, in_backward(), number] += 1
            return call(*args, **kwargs)

        return do

    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "transient"):
            patch.setattr(HostMemory, name, noted("allocated", getattr(HostMemory, name)))
        patch.setattr(Dispatcher, "together", noted("left", Dispatcher.together))
        run = Run(Case(replace(OVERLAPPED, select_interval=1000, ledger=False)), sharded(model_of()), my_part(rank))
        for number in range(1, STEPS + 1):
            run.step(number)
    run.optimizer.abandon()
    return {
        f"{what} {'in' if inside else 'after'} backward": sorted(at for *key, at in found if key == [what, inside])
        for what in ("allocated", "left")
        for inside in (True, False)
    }


def collectives(rank: int) -> dict[str, Any]:
    """Bytes of this runtime's own collectives in each step, and of the gradients."""
    from torch.distributed.fsdp import fully_shard

    calls: list[list[int]] = []
    whole_call = torch.distributed.all_reduce

    def noted(values: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls[-1].append(values.nbytes)
        return whole_call(values, *args, **kwargs)

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a collective that nobody expects")

    model: Any = nn.Sequential(nn.Linear(16, 2100), nn.Tanh(), nn.Linear(2100, 2100, bias=False))
    fully_shard(model)
    optimizer = ZenFlowAdamW(model.parameters(), config=replace(OVERLAPPED, ledger=False), module=model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", noted)
        for _ in range(3):
            calls.append([])
            model(torch.randn(3, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for name in ("all_gather_object", "broadcast", "all_gather", "barrier"):
                patch.setattr(torch.distributed, name, refused)  # the first step has to agree on memory
    optimizer.abandon()
    return {"calls": calls, "gradient_bytes": 4 * sum(p.numel() for p in model.parameters())}


WORK: dict[str, Callable[[int], Any]] = {
    **{name: partial(_both, SCRIPTS[name]) for name in TRIED},
    "reserved": reserved,
    "collectives": collectives,
}
