"""What does a step of many ranks cost, each with its rows, beside PyTorch's FSDP2 alone? See the README.md beside."""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Results, code_digest, parser, spread, write_json  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy  # noqa: E402

from zenflow import Partition, ZenFlowAdamW, ZenFlowConfig, ZenFlowOptimizer  # noqa: E402
from zenflow.device import Device, device_for  # noqa: E402
from zftune.emulation import EmulatedAccelerator, Rig  # noqa: E402
from zftune.planner.memory import host_bytes  # noqa: E402
from zftune.planner.model import ModelFacts  # noqa: E402
from zftune.planner.rates import Rates  # noqa: E402
from zftune.planner.simulate import simulate  # noqa: E402
from zftune.planner.split import split_of  # noqa: E402
from zftune.workload import ByteTokenizer, Workload, batches, load_text  # noqa: E402

METHOD = 1  # raise it when a change here changes what is measured
LR, TOKENS, WINDOW = 5e-5, 16, 4
CORES, PATIENCE = 2, timedelta(minutes=5)
FSDP2, OFFLOAD, EXACT, LATE, TURN = "FSDP2", "CPUOffloadPolicy", "exact", "published", "in turn"
ON_DEVICE = ZenFlowConfig.zero_offload(offload_ratio=0.0, pipeline="bucket")
OURS = {
    EXACT: ZenFlowConfig.zero_offload(pipeline="bucket"),
    LATE: ZenFlowConfig(topk_ratio=0.1, update_interval=WINDOW, select_interval=32),
}
ON_RIGS = {FSDP2: ON_DEVICE, TURN: ZenFlowConfig.zero_offload(), **OURS}
SYSTEMS = (FSDP2, OFFLOAD, EXACT, LATE)
NODE = Rig(
    "many ranks",
    "made up: compute of 60 ms, links of 6 GB/s, a network of 12 GB/s, one host of 40 GB/s for all ranks",
    forward_ms=20.0,
    backward_ms=40.0,
    link_d2h_gbps=6.0,
    link_h2d_gbps=6.0,
    host_gbps=40.0,
    device_gbps=1500.0,
    scale=1.0,
    comm_gbps=12.0,
    comm_latency_us=20.0,
)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    hidden: int
    layers: int
    turns: int
    rig_windows: int
    """Measured; two come before."""


FULL, QUICK = Size(768, 8, 5, 2), Size(128, 2, 2, 2)
PARTS = {"cpu": (1, 2, 4), "rigs": (1, 2, 4), "whole": (2, 4)}
"""What is measured, on how many ranks; on a processor four on two cores: wall ratios are also the scheduler's."""
QUICK_RANKS = (1, 2)


# --- what ranks do ----------------------------------------------------------------------------------------------------


def workload_of(size: Size) -> Workload:
    """A Llama over bytes in fp32, the same everywhere."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=ByteTokenizer.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=size.hidden // 64,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(0)
    module: nn.Module = LlamaForCausalLM(config)
    return Workload("study", module.train(), torch.float32, ByteTokenizer(), ByteTokenizer.vocabulary, TOKENS)


class Side:
    """A system: its model, its optimizer, and what they have done so far."""

    def __init__(self, name: str, size: Size, rank: int, rig: Rig | None, *, whole: bool = False) -> None:
        self.name = name
        self.workload = workload_of(size)
        self.elements = self.workload.parameters
        if torch.distributed.get_world_size() > 1 and not whole:
            self.workload.shard(**({"offload_policy": CPUOffloadPolicy(pin_memory=False)} if name == OFFLOAD else {}))
        module = self.workload.module
        parameters = list(module.parameters())
        self.device: Device | None = None
        self.ours: ZenFlowOptimizer | None = None
        self.optimizer: torch.optim.Optimizer
        if rig is None and name in (FSDP2, OFFLOAD):
            self.optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.01, fused=True)
        else:
            self.device = device_for(torch.device("cpu")) if rig is None else EmulatedAccelerator(rig)
            if isinstance(self.device, EmulatedAccelerator):
                self.device.attach(module)
            config = ON_RIGS[name] if rig is not None else OURS[name]
            self.optimizer = self.ours = ZenFlowAdamW(
                parameters,
                lr=LR,
                weight_decay=0.01,
                config=config,
                module=module,
                device=self.device,
                partition=Partition() if whole else None,
            )
        tokens = ByteTokenizer().encode(load_text(None).data)
        self._feed = batches(tokens, micro_batch=1, sequence=TOKENS, seed=rank)
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.workload.loss(next(self._feed))
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())

    def close(self) -> list[float]:
        """The losses, each the mean of all ranks."""
        means = torch.stack(self.losses).double()
        torch.distributed.all_reduce(means)
        if self.ours is not None and self.device is not None:
            self.ours.abandon()
            self.device.close()
        return list((means / torch.distributed.get_world_size()).tolist())


def on_cpu(rank: int, ranks: int, size: Size) -> dict[str, Any]:
    """All systems in turns, in an order that is drawn anew each time."""
    sides = {name: Side(name, size, rank, None) for name in SYSTEMS}
    draw = random.Random(ranks)
    seconds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    cpu: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for _ in range(WINDOW):  # makes the state, and splits it
        for side in sides.values():
            side.step()
    for _ in range(size.turns):
        for name in draw.sample(SYSTEMS, len(SYSTEMS)):
            for _ in range(WINDOW):  # as it is in a run without turns
                sides[name].step()
            torch.distributed.barrier()
            began, worked = time.perf_counter(), time.process_time()
            for _ in range(WINDOW):
                sides[name].step()
            torch.distributed.barrier()
            seconds[name].append((time.perf_counter() - began) / WINDOW)
            cpu[name].append(_sum((time.process_time() - worked) / WINDOW))
    found = {}
    for name, side in sides.items():
        counted = _counted(side)
        found[name] = {"step_s": seconds[name], "cpu_s": cpu[name], **counted, "losses": side.close()}
    return found


def on_rigs(rank: int, ranks: int, size: Size, name: str, *, whole: bool) -> dict[str, Any]:
    """One system on a rig of each rank, whose host is its part of the node's."""
    rig = _rig_of(ranks)
    side = Side(name, size, rank, rig, whole=whole)
    for _ in range((2 + size.rig_windows) * WINDOW):
        side.step()
    assert side.ours is not None
    steps = side.ours.history(wait=True)[2 * WINDOW :]
    step_ms = [one.step_ms for one in steps if one.step_ms is not None]
    stall = [sum(one.stall_ms.values()) for one in steps if one.stall_ms is not None]
    found = {"step_ms": step_ms, "stall_ms": statistics.fmean(stall), **_counted(side)}
    return {**found, "losses": side.close()}


def on_all_rigs(rank: int, ranks: int, size: Size, whole: bool) -> dict[str, Any]:
    """Each system, one after the other; `whole`: each rank has all weights, and the state of its rows."""
    found = {}
    for name in ON_RIGS:
        found[name] = on_rigs(rank, ranks, size, name, whole=whole)
        gc.collect()  # the model
    return found


def _rig_of(ranks: int) -> Rig:
    return Rig(**{**asdict(NODE), "host_gbps": NODE.host_gbps / ranks})


def _counted(side: Side) -> dict[str, Any]:
    """Bytes of a rank, and its host's work."""
    own = side.elements / torch.distributed.get_world_size()
    if side.ours is None:
        # On a GPU the policy sends a gradient down, and the weights up for forward and for backward.
        moved = {"d2h": 4 * own, "h2d": 8 * own} if side.name == OFFLOAD else {"d2h": 0, "h2d": 0}
        return {"host_bytes": 0 if side.name == FSDP2 else 16 * own, **moved, "host_ms": None}
    steps = side.ours.history(wait=True)[-WINDOW:]
    mean = {
        name: statistics.fmean(getattr(one, name) for one in steps) for name in ("d2h_bytes", "h2d_bytes", "host_ms")
    }
    return {
        "host_bytes": side.ours.host_bytes()["peak"],
        "d2h": mean["d2h_bytes"],
        "h2d": mean["h2d_bytes"],
        "host_ms": mean["host_ms"],
    }


def _sum(value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return float(total)


def together(ranks: int, work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What rank 0 found of work that so many ranks have done."""
    context = get_context("spawn")
    ear, mouth = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        begun = [
            context.Process(target=_rank, args=(rank, ranks, folder, mouth if not rank else None, work, arguments))
            for rank in range(ranks)
        ]
        for process in begun:
            process.start()
        mouth.close()
        try:
            found: dict[str, Any] = ear.recv()
        finally:
            for process in begun:
                process.join()
    return found


def _rank(
    rank: int, ranks: int, folder: str, mouth: Connection | None, work: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    torch.set_num_threads(max(1, CORES // ranks))
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/ranks", rank=rank, world_size=ranks, timeout=PATIENCE
    )
    found = work(rank, ranks, *arguments)
    if mouth is not None:
        mouth.send(found)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


# --- what is told -----------------------------------------------------------------------------------------------------


def predicted(ranks: int, size: Size, name: str, *, whole: bool = False) -> dict[str, float]:
    """By the planner, which knows the rig and the shapes."""
    config = ON_RIGS[name]
    facts = ModelFacts.from_module("study", workload_of(size).module)
    rates = Rates.of_rig(_rig_of(ranks), facts.element_bytes, ranks=ranks, keeps_whole=whole)
    steady = simulate(rates, split_of(facts, config), config)
    of_host = sum(host_bytes(facts, config, ranks=ranks).values()) / ranks
    return {"planned_ms": steady.step_ms, "planned_host_bytes": of_host}


def cpu_figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """Medians, and ratios of the turns that followed each other."""
    plain = found[FSDP2]
    figures = {}
    for name, side in found.items():
        apart = max(abs(a / b - 1) for a, b in zip(side["losses"], plain["losses"], strict=True))
        figures[name] = {
            **{key: side[key] for key in ("host_bytes", "d2h", "h2d", "host_ms", "losses")},
            "step_s": spread(side["step_s"]),
            "cpu_s": spread(side["cpu_s"]),
            "step_ratio": spread(a / b for a, b in zip(side["step_s"], plain["step_s"], strict=True)),
            "cpu_ratio": spread(a / b for a, b in zip(side["cpu_s"], plain["cpu_s"], strict=True)),
            "losses_apart": apart,
        }
    return figures


def table_of_cpu(of_ranks: Mapping[int, Mapping[str, Any]]) -> Table:
    """A row for each system and number of ranks."""
    table = Table(title="plain CPU, a micro-batch of 16 tokens a rank")
    for column in (
        "ranks",
        "system",
        "step s",
        "over FSDP2",
        "CPU s, all",
        "over FSDP2",
        "host MB a rank",
        "losses apart",
    ):
        table.add_column(column, justify="left" if column == "system" else "right")
    for ranks, figures in of_ranks.items():
        for name, one in figures.items():
            table.add_row(
                str(ranks),
                name,
                f"{one['step_s']['median']:.2f}",
                _said(one["step_ratio"]),
                f"{one['cpu_s']['median']:.2f}",
                _said(one["cpu_ratio"]),
                f"{one['host_bytes'] / 1e6:,.0f}",
                "-" if name == LATE else f"{one['losses_apart']:.1e}",  # from scratch, late is another path
            )
    return table


def table_of_rigs(of_ranks: Mapping[int, Mapping[str, Any]], title: str) -> Table:
    """The same of rigs."""
    table = Table(title=title)
    for column in (
        "ranks",
        "system",
        "step ms",
        "planned ms",
        "stall ms",
        "host ms",
        "D2H MB",
        "H2D MB",
        "host MB a rank",
        "planned MB",
    ):
        table.add_column(column, justify="left" if column == "system" else "right")
    for ranks, figures in of_ranks.items():
        for name, one in figures.items():
            cells = [statistics.fmean(one["step_ms"]), one["planned_ms"], one["stall_ms"], one["host_ms"]]
            cells += [one[key] / 1e6 for key in ("d2h", "h2d", "host_bytes", "planned_host_bytes")]
            table.add_row(str(ranks), name, *(f"{cell:,.1f}" for cell in cells))
    return table


def _said(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['p5']:.2f} - {ratio['p95']:.2f})"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is not there yet, and print; 1 where exact losses are not those of FSDP2."""
    options = parser(__doc__ or "")
    options.add_argument("--part", choices=list(PARTS), action="append", help="only this one; may be given again")
    arguments = options.parse_args(argv)
    results = Results.of(HERE, arguments)
    size = QUICK if arguments.quick else FULL
    code = code_digest("runtime/zenflow", "zftune/workload")
    found: dict[str, dict[int, Any]] = {part: {} for part in arguments.part or PARTS}
    for part, of_ranks in found.items():
        for ranks in [one for one in PARTS[part] if one in QUICK_RANKS or not arguments.quick]:
            inputs = {**asdict(size), "ranks": ranks, "method": METHOD, "code": code}
            record = None if arguments.again else results.load(f"{part}-{ranks}", inputs)
            if record is None:
                record = results.save(f"{part}-{ranks}", inputs, measured(part, ranks, size))
            of_ranks[ranks] = record["figures"]
            for name, one in of_ranks[ranks].items() if part != "cpu" else ():
                one.update(predicted(ranks, size, name, whole=part == "whole"))
    return told(found, arguments)


def measured(part: str, ranks: int, size: Size) -> dict[str, Any]:
    """The figures of a part of the study, on so many ranks."""
    if part == "cpu":
        return cpu_figures(together(ranks, on_cpu, size))
    return together(ranks, on_all_rigs, size, part == "whole")


def told(found: Mapping[str, Mapping[int, Any]], arguments: argparse.Namespace) -> int:
    """Print it; the exit status."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    apart = 0.0
    if cpu := found.get("cpu"):
        console.print(table_of_cpu(cpu))
        apart = max(figures[EXACT]["losses_apart"] for figures in cpu.values())
        console.print(f"losses of exact are within {apart:.1e} of those of FSDP2 with torch's AdamW")
    for part, title in (("rigs", "emulated ranks"), ("whole", "emulated ranks, each with all weights")):
        if of_ranks := found.get(part):
            console.print(table_of_rigs(of_ranks, title))
    if arguments.json:
        write_json(arguments.json, {"study": HERE.name, "quick": arguments.quick, **found})
    return int(apart > 1e-5)


if __name__ == "__main__":
    raise SystemExit(main())
