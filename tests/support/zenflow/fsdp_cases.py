"""Training runs over FSDP2, each rank with its rows, and the same of one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.tiers import fast
from tests.support.zenflow.family_cases import OURS
from zenflow import Partition, ZenFlowConfig, ZenFlowOptimizer
from zenflow.device import Device

STEPS = fast(9, all_of=11)
BATCH, LENGTH, VOCABULARY, WIDTH = 8, 6, 31, 10


class Block(nn.Module):
    """Weights of 7, 5, 3 and 10 rows: on 4 ranks uneven, and one of them has no row of the third."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.conv = nn.Conv1d(7, 5, 2, padding=1)
        self.down = nn.Linear(5, 3, bias=False)
        self.out = nn.Linear(3, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.gelu(self.up(x)).transpose(1, 2)
        inner = torch.tanh(self.conv(inner)[..., :-1].transpose(1, 2))
        rest: Tensor = x + self.out(torch.tanh(self.down(inner)))
        normed: Tensor = self.norm(rest)
        return normed


class Odd(nn.Module):
    """A language model with a tied head, a frozen layer, and parameters of every shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, *, recompute: bool = False) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        logits: Tensor = self.head(x + self.frozen(x) * self.scale)
        return logits


@dataclass(frozen=True)
class Case:
    """A script."""

    config: ZenFlowConfig
    rule: str = "adamw"
    passes: int = 1
    reduces: str = "always"
    """Whether each backward pass reduces the gradients over the ranks, or the "last" of a step only."""
    clip: float | None = None
    """The norm of torch's `clip_grad_norm_`."""
    to_none: bool = True
    scaler: bool = False
    infinite: int | None = None
    """The step whose loss is."""
    recompute: bool = False
    knobs: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """What is set before a step."""
    dtype: torch.dtype = torch.float32
    replicas: int = 1
    partitioned: bool = False
    """Each rank has all of the weights and the state of its rows; else FSDP2 has them."""


EXACT = ZenFlowConfig.zero_offload(bucket_bytes=700, max_grad_norm=0.5)
OVERLAPPED = ZenFlowConfig(topk_ratio=0.3, update_interval=3, select_interval=4, bucket_bytes=300, ledger=True)
CLIPPED = replace(OVERLAPPED, max_grad_norm=0.5)
AUTO = ZenFlowConfig(topk_ratio=0.3, update_interval="auto", select_interval="auto", max_update_interval=5)

CASES = {
    "exact": Case(EXACT),
    "exact with a selection": Case(replace(EXACT, topk_ratio=0.25)),
    "on the device": Case(replace(EXACT, offload_ratio=0.0)),
    "overlapped": Case(OVERLAPPED),
    "clipped": Case(CLIPPED),
    "clipped by torch": Case(OVERLAPPED, clip=0.5),
    "twin flow": Case(replace(OVERLAPPED, offload_ratio=0.5, update_interval=2)),
    "early": Case(replace(OVERLAPPED, apply_lag=1)),
    "coasting": Case(replace(CLIPPED, look_ahead="coast")),
    "staggered": Case(replace(CLIPPED, look_ahead="guess", window_phase="staggered", bucket_bytes=100)),
    "warm up": Case(replace(OVERLAPPED, full_warm_up_rounds=4)),
    "mean": Case(replace(OVERLAPPED, deferred_update="mean")),
    "not streamed": Case(replace(OVERLAPPED, stream=False)),
    "auto": Case(AUTO),
    "accumulated": Case(CLIPPED, passes=2),
    "accumulated and said": Case(replace(CLIPPED, gradient_accumulation_steps=2), passes=2),
    "reduced once": Case(CLIPPED, passes=3, reduces="last"),
    "zeroed": Case(CLIPPED, passes=2, to_none=False),
    "scaled": Case(CLIPPED, scaler=True, infinite=4),
    "recomputed": Case(OVERLAPPED, recompute=True),
    "knobs": Case(
        OVERLAPPED,
        knobs={
            3: {"topk_ratio": 0.6},
            5: {"update_interval": 2, "host_threads": 2},
            7: {"offload_ratio": 0.5},
            9: {"offload_ratio": 1.0, "topk_ratio": 0.1, "select_interval": 2},
        },
    ),
    **{rule: Case(CLIPPED, rule=rule) for rule in OURS if rule != "adamw"},
}
"""Those in which ranks are compared with one process."""
PARTITIONED = ", partitioned"
CASES |= {
    f"{name}{PARTITIONED}": replace(case, partitioned=True)
    for name, case in CASES.items()
    if name != "clipped by torch"
}


def tokens_of(step: int, number: int) -> Tensor:
    """A batch."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor, *, recompute: bool) -> Tensor:
    """Mean over a batch."""
    logits = model(tokens[:, :-1], recompute=recompute)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def model_of(dtype: torch.dtype = torch.float32) -> Odd:
    """The same everywhere."""
    torch.manual_seed(3)
    return Odd().to(dtype)


def sharded(model: Odd, *, replicas: int = 1, **policy: Any) -> Odd:
    """Over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = torch.distributed.get_world_size()
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (size,))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, **policy)
    return model


class Run:
    """A model and its optimizer, and what has been seen of them."""

    def __init__(self, case: Case, model: Odd, part: slice, device: Device | None = None) -> None:
        self.case, self.model, self._part = case, model, part
        self._fsdp: Any = model if hasattr(model, "set_requires_gradient_sync") else None
        self.optimizer: ZenFlowOptimizer = OURS[case.rule](
            model.parameters(),
            lr=1e-2,
            weight_decay=0.1,
            config=case.config,
            module=model,
            device=device,
            partition=Partition() if case.partitioned else None,
        )
        self._scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=case.scaler)
        self.norms: list[float] = []
        self.selected: list[dict[str, list[int]]] = []
        """By weight, after each step."""
        self.factor = 1.0
        """Of the loss."""

    def step(self, number: int) -> None:
        case, model, optimizer = self.case, self.model, self.optimizer
        if number in case.knobs:
            optimizer.set_knobs(**case.knobs[number])
        optimizer.zero_grad(set_to_none=case.to_none)
        for index in range(case.passes):
            if case.reduces == "last" and self._fsdp is not None:
                self._fsdp.set_requires_gradient_sync(index == case.passes - 1)
            loss = loss_of(model, tokens_of(number, index)[self._part], recompute=case.recompute) / case.passes
            factor = torch.inf if number == case.infinite else self.factor
            self._scaler.scale(loss * factor).backward()
        if case.clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            self.norms.append(float(whole(norm)))
        self._scaler.step(optimizer)
        self._scaler.update()
        if optimizer.grad_norm is not None:
            self.norms.append(float(optimizer.grad_norm))
        self.selected.append(self._selection())

    def _selection(self) -> dict[str, list[int]]:
        weights = self.optimizer._training.model.weights
        return {
            weight.name: sorted(weight.split.selected_columns.tolist())
            for weight in weights
            if weight.started and weight.split.selected is not None
        }

    def steps(self, first: int, last: int) -> Run:
        for number in range(first, last + 1):
            self.step(number)
        return self

    def weights(self) -> dict[str, Tensor]:
        """Whole ones, on all ranks."""
        return {name: whole(value).clone() for name, value in self.model.state_dict().items()}

    def found(self) -> dict[str, Any]:
        """All that is compared, after a flush; ends the optimizer."""
        steps = self.optimizer.history(wait=True)
        self.optimizer.flush()
        ledger = self.optimizer.ledger() if self.optimizer.config.ledger else {}
        found = {
            "weights": self.weights(),
            "norms": self.norms,
            "selected": self.selected,
            "d2h_bytes": [one.d2h_bytes for one in steps],
            "h2d_bytes": sum(one.h2d_bytes for one in steps) + self.optimizer._training.runtime.traffic.h2d_bytes,
            "moved": [(one.change_norm or 0.0, one.weight_norm or 0.0) for one in steps],
            "state_bytes": self.optimizer.host_bytes()["state"],
            "unbalanced": [name for name, balance in ledger.items() if not balance.balanced or balance.pending],
        }
        self.optimizer.abandon()
        return found


def whole(value: Tensor) -> Tensor:
    """A tensor of all ranks."""
    found: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


def alone(case: Case) -> dict[str, Any]:
    """One process with the whole batch."""
    return Run(case, model_of(case.dtype), slice(None)).steps(1, STEPS).found()


def my_part(rank: int) -> slice:
    """Of each batch."""
    share = BATCH // torch.distributed.get_world_size()
    return slice(rank * share, (rank + 1) * share)


def together(case: Case, rank: int) -> dict[str, Any]:
    """One rank of several."""
    model = model_of(case.dtype) if case.partitioned else sharded(model_of(case.dtype), replicas=case.replicas)
    return Run(case, model, my_part(rank)).steps(1, STEPS).found()


REPEATED = replace(CLIPPED, update_interval=2, offload_ratio=0.8)


def repeated(rank: int) -> dict[str, Any]:
    """The weights of runs that differ in nothing that may count."""
    configs = {threads: replace(REPEATED, host_threads=threads) for threads in (1, 2)}
    runs = [together(Case(configs[threads]), rank) for threads in (1, 1, 2)]
    return {"weights": [run["weights"] for run in runs]}


def with_replicas(rank: int) -> dict[str, Any]:
    """Two by half of the ranks; and what this rank holds, to be compared with its replica's."""
    run = Run(Case(CLIPPED, replicas=2), sharded(model_of(), replicas=2), my_part(rank)).steps(1, STEPS)
    run.optimizer.flush()
    rows = [local(value).clone() for value in run.model.state_dict().values()]
    return {"rows": rows, **run.found()}


def rounded(rank: int) -> dict[str, Any]:
    """bf16 weights with the masters of fp32 rows; gradients are reduced in fp32, or in bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    found: dict[str, Any] = {}
    for name, reduce_dtype in (("fp32", torch.float32), ("bf16", None)):
        model = sharded(model_of(), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        masters = {parameter: parameter.detach().clone() for parameter in trained}
        model.to(torch.bfloat16)
        run = Run(Case(replace(OVERLAPPED, max_grad_norm=1.0)), model, my_part(rank))
        run.optimizer.give_masters(masters)
        run.optimizer.param_groups[0]["lr"] = 0.0
        run.step(1)
        given = [torch.equal(_master(run, parameter), local(masters[parameter])) for parameter in trained]
        run.optimizer.param_groups[0]["lr"] = 1e-2
        run.steps(2, STEPS)
        run.optimizer.flush()
        kept = [torch.equal(_master(run, parameter).bfloat16(), local(parameter.detach())) for parameter in trained]
        dtypes = {str(parameter.dtype) for parameter in model.parameters()}
        found[name] = {"dtypes": sorted(dtypes), "given": given, "kept": kept, **run.found()}
    return found


def _master(run: Run, parameter: nn.Parameter) -> Tensor:
    return local(run.optimizer.full_state(parameter)["master"])


def local(value: Tensor) -> Tensor:
    """A tensor of this rank."""
    found: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return found


WORK: dict[str, Callable[[int], Any]] = {
    **{name: partial(together, case) for name, case in CASES.items()},
    "repeated": repeated,
    "with replicas": with_replicas,
    "rounded": rounded,
}
