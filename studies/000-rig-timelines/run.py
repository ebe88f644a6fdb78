"""Does the emulated accelerator reproduce what a rig's rates imply? Measured step times against closed forms.

See README.md beside this file for the forms.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Results, code_digest, parser, spread, write_json  # noqa: E402

from zenflow import StepStats, ZenFlowConfig  # noqa: E402
from zenflow.layout import plan_model, plan_order  # noqa: E402
from zftune.emulation import Rig  # noqa: E402
from zftune.emulation.machines import load_rig  # noqa: E402
from zftune.errors import ProfileError  # noqa: E402
from zftune.profile.measure import Measurement, Task, measure  # noqa: E402
from zftune.workload import Workload, load_text  # noqa: E402

SYSTEMS: Mapping[str, ZenFlowConfig] = {
    "no-offload": ZenFlowConfig.zero_offload(offload_ratio=0.0, pipeline="bucket"),
    "zero-offload": ZenFlowConfig.zero_offload(stream=False),
    "zero-offload-pipelined": ZenFlowConfig.zero_offload(pipeline="bucket", stream=False),
    "zenflow": ZenFlowConfig(topk_ratio=0.05, update_interval=4, select_interval=16),
}
# Those that stand for a machine, and one whose link binds (the forms know nothing of a rig's effects).
RIGS = ("llama2-7b-4xa100", "llama3-8b-gh200", "qwen2.5-1.5b-2xa100", "slow-link")
QUICK_RIG = "qwen2.5-1.5b-2xa100"
SEQUENCE = 16
CODE = ("runtime/zenflow", "zftune/profile/measure.py", "zftune/workload")

# Bytes of device memory that the runtime charges for an element: AdamW on it, packing its gradient, scattering its
# new weight, its importance. All for 2-byte gradients and weights.
UPDATE, PACK, SCATTER, SCORE = 28, 4, 4, 2
LINK = 2  # bytes on the link, each way
HOST_STATE, HOST_GRADIENT = 26, 2  # bytes of host traffic: state and result once a window, each logged gradient


# --- what the rates imply ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bucket:
    """What moves as a unit."""

    elements: int
    stage: int
    """Layers whose forward ends before this bucket's weight is needed."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a model is split between the tiers, in elements."""

    buckets: tuple[Bucket, ...]
    """Deferred, in forward order."""
    resident: int
    """With the selected ones: updated on the device in every step."""
    scored: int
    """Of weights whose importance is measured in every step."""
    layers: int

    @property
    def deferred(self) -> int:
        """Deferred elements."""
        return sum(bucket.elements for bucket in self.buckets)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A steady step's time and stall (for windows: the mean of a window's steps), in ms."""

    step_ms: float
    stall_ms: float
    kind: Literal["exact", "lower bound"]
    limit: str
    """What the step waits for most."""


def split_of(workload: Workload, config: ZenFlowConfig) -> Split:
    """The split that the runtime makes of this model."""
    named = dict(workload.module.named_parameters())
    names = {id(parameter): name for name, parameter in named.items()}
    ordered = plan_order(list(named.values()), workload.module)
    plans = plan_model(ordered, config, set()).weights
    layers = 1 + max(_layer(name) for name in named)
    buckets: list[Bucket] = []
    resident = scored = reached = 0
    for parameter, plan in zip(ordered, plans, strict=True):
        layer = _layer(names[id(parameter)])
        reached = max(reached, layer)
        stage = layer if layer >= 0 else (layers if buckets and reached == layers - 1 else 0)
        for number, (low, high) in enumerate(plan.bucket_slots, plan.first_bucket):
            size = (high - low) * plan.rows
            if number < len(buckets):
                buckets[number] = replace(buckets[number], elements=buckets[number].elements + size)
            else:
                buckets.append(Bucket(size, stage))
        resident += parameter.numel() - plan.deferred * plan.rows
        scored += parameter.numel() if 0 < plan.selected < plan.offloaded else 0
    return Split(tuple(buckets), resident, scored, layers)


def _layer(name: str) -> int:
    """Number of the layer that a parameter belongs to; -1 if none."""
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else -1


def served(ready_ms: Sequence[float], service_ms: Sequence[float], start_ms: float = 0.0) -> list[float]:
    """When each piece leaves a server that takes them one after the other."""
    ends: list[float] = []
    free = start_ms
    for ready, service in zip(ready_ms, service_ms, strict=True):
        free = max(free, ready) + service
        ends.append(free)
    return ends


def predict(rig: Rig, split: Split, config: ZenFlowConfig) -> Prediction:
    """The closed form that belongs to a configuration."""
    if not split.buckets:
        return no_offload(rig, split)
    if config.update_interval == 1:
        return in_turn(rig, split) if config.pipeline == "none" else bucketwise(rig, split)
    assert isinstance(config.update_interval, int)
    return windowed(rig, split, config.update_interval)


def no_offload(rig: Rig, split: Split) -> Prediction:
    """Compute and the update of everything on the device."""
    return Prediction(_compute(rig) + _device(rig, UPDATE * split.resident), 0.0, "exact", "compute")


def in_turn(rig: Rig, split: Split) -> Prediction:
    """All gradients down, then the whole host update, then all weights up; nothing overlaps with compute.

    Times count from the end of backward.
    """
    n = [bucket.elements for bucket in split.buckets]
    packed, arrived = _down(rig, n)
    updated = max(packed[-1] + _device(rig, UPDATE * split.resident), arrived[-1]) + _host(rig, split.deferred, 1)
    up = served([updated] * len(n), [_up(rig, elements) for elements in n])
    end = served(up, [_device(rig, SCATTER * elements) for elements in n])[-1]
    busy = _compute(rig) + _device(rig, UPDATE * split.resident + (PACK + SCATTER) * split.deferred)
    step = _compute(rig) + end
    return Prediction(step, step - busy, "exact", "in turn")


def bucketwise(rig: Rig, split: Split) -> Prediction:
    """D2H, host and H2D follow each other bucket by bucket; a layer's forward waits for its own weights only.

    Times count from the end of backward; the forward that follows is part of the recursion, backward is added.
    """
    n = [bucket.elements for bucket in split.buckets]
    packed, arrived = _down(rig, n)
    stepped = packed[-1] + _device(rig, UPDATE * split.resident)
    updated = served([max(stepped, end) for end in arrived], [_host(rig, elements, 1) for elements in n])
    up = served(updated, [_up(rig, elements) for elements in n])
    now, passed = stepped, 0
    for bucket, there in zip(split.buckets, up, strict=True):
        now += (bucket.stage - passed) * rig.forward_ms / split.layers
        passed = bucket.stage
        now = max(now, there) + _device(rig, SCATTER * bucket.elements)
    step = now + (split.layers - passed) * rig.forward_ms / split.layers + rig.backward_ms
    busy = _compute(rig) + _device(rig, UPDATE * split.resident + (PACK + SCATTER) * split.deferred)
    return Prediction(step, step - busy, "exact", "pipeline")


def windowed(rig: Rig, split: Split, interval: int) -> Prediction:
    """The busiest of compute stream, links and host: in the long run no schedule beats it.

    A single window can, by what its neighbours wait for. What a reselection costs is left out.
    """
    n = split.deferred
    busy = _compute(rig) + _device(
        rig, UPDATE * split.resident + SCORE * split.scored + PACK * n + SCATTER * n / interval
    )
    loads = {
        "compute": busy,
        "d2h": LINK * n / rig.link_d2h_gbps / 1e6,
        "h2d": _up(rig, n) / interval,
        "host": _host(rig, n, interval) / interval,
    }
    limit = max(loads, key=lambda name: loads[name])
    return Prediction(loads[limit], loads[limit] - busy, "lower bound", limit)


def _compute(rig: Rig) -> float:
    return rig.forward_ms + rig.backward_ms


def _device(rig: Rig, nbytes: float) -> float:
    return 0.0 if rig.device_gbps is None else nbytes / rig.device_gbps / 1e6


def _host(rig: Rig, elements: int, interval: int) -> float:
    return elements * (HOST_STATE + HOST_GRADIENT * interval) / rig.host_gbps / 1e6


def _up(rig: Rig, elements: int) -> float:
    return LINK * elements / rig.link_h2d_gbps / 1e6


def _down(rig: Rig, n: Sequence[int]) -> tuple[list[float], list[float]]:
    """When each bucket is packed, and when it is on the host: the copies begin in step()."""
    packed = served([0.0] * len(n), [_device(rig, PACK * elements) for elements in n])
    return packed, served(packed, [LINK * elements / rig.link_d2h_gbps / 1e6 for elements in n])


# --- what was measured ---------------------------------------------------------------------------------------------


def figures_of(run: Measurement) -> dict[str, Any]:
    """Step time and stall over windows (each the mean of its steps), those with a reselection apart."""
    assert run.config is not None
    interval = run.config.update_interval
    assert isinstance(interval, int)
    assert run.slack is not None
    windows = [run.stats[i : i + interval] for i in range(0, len(run.stats), interval)]
    steady = [window for window in windows if not _reselects(window)]
    moving = [window for window in windows if _reselects(window)]
    return {
        "window_steps": interval,
        "step_ms": spread(map(_step_ms, steady)),
        "stall_ms": spread(map(_stall_ms, steady)),
        "reselection": None
        if not moving
        else {"step_ms": spread(map(_step_ms, moving)), "stall_ms": spread(map(_stall_ms, moving))},
        "mean_step_ms": _step_ms(run.stats),
        "real_work_ms_per_step": 1e3 * run.slack.worked_s / len(run.stats),
        "every_step_ms": [round(stats.step_ms or 0.0, 4) for stats in run.stats],
    }


def _reselects(window: Sequence[StepStats]) -> bool:
    return any(stats.churn is not None for stats in window)


def _step_ms(window: Sequence[StepStats]) -> float:
    return sum(stats.step_ms or 0.0 for stats in window) / len(window)


def _stall_ms(window: Sequence[StepStats]) -> float:
    return sum(sum((stats.stall_ms or {}).values()) for stats in window) / len(window)


def task_for(rig_name: str) -> Task:
    """The smallest workload on a rig."""
    return Task(
        model="tiny",
        corpus=load_text(None),
        dtype=torch.bfloat16,
        micro_batch=1,
        sequence=SEQUENCE,
        seed=0,
        torch_device=torch.device("cpu"),
        rig=load_rig(rig_name),
    )


def study_pair(results: Results, rig_name: str, system: str, *, quick: bool, again: bool, progress: Progress) -> Any:
    """A (rig, system) pair's row: measured now, unless a record of the same inputs is there."""
    config, task = SYSTEMS[system].resolved(), task_for(rig_name)
    windowed_steps, steps = (24, 4) if quick else (96, 8)
    assert task.rig is not None
    inputs = {
        "rig": {"name": task.rig.name, "table": task.rig.table, "values": dict(task.rig.values)},
        "clock": "simulated",
        "system": system,
        "knobs": dataclasses.asdict(config),
        "steps": windowed_steps if config.update_interval != 1 else steps,
        "workload": {"model": task.model, "dtype": "bfloat16", "micro_batch": 1, "sequence": SEQUENCE, "seed": 0},
        "code": code_digest(*CODE),
    }
    name = f"{rig_name}--{system}"
    record = None if again else results.load(name, inputs)
    workload = task.build()
    rig = task.rig_for(workload)
    assert rig is not None
    if record is None:
        bar = progress.add_task(f"{rig_name}: {system}")

        def on_step(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        run = measure(task, config, windowed_steps if config.update_interval != 1 else steps, on_step)
        record = results.save(name, inputs, figures_of(run))
        progress.remove_task(bar)
    prediction = predict(rig, split_of(workload, config), config)
    return {"rig": rig_name, "system": system, "predicted": dataclasses.asdict(prediction), **record}


COLUMNS = ("measured", "predicted", "ratio", "p5 - p95", "mean", "stall", "predicted", "reselecting")


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row's figures, in the order of `COLUMNS`."""
    predicted, figures = row["predicted"], row["figures"]
    step, implied, reselection = figures["step_ms"], predicted["step_ms"], figures["reselection"]
    return [
        f"{step['median']:.2f}",
        f"{'' if predicted['kind'] == 'exact' else '>= '}{implied:.2f}",
        f"{step['median'] / implied:.4f}",
        f"{step['p5'] / implied:.4f} - {step['p95'] / implied:.4f}",
        f"{figures['mean_step_ms'] / implied:.4f}",
        f"{figures['stall_ms']['median']:.2f}",
        f"{'' if predicted['kind'] == 'exact' else '>= '}{predicted['stall_ms']:.2f}",
        "" if reselection is None else f"{reselection['step_ms']['median']:.2f}",
    ]


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Measured against predicted, for a terminal."""
    table = Table(title="emulated accelerator against its rig's rates: ms a step, median over windows")
    for column in ("rig", "system", "limit"):
        table.add_column(column, overflow="fold")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row["rig"], row["system"], row["predicted"]["limit"], *cells(row))
    return table


def markdown_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The same table as a file."""
    head = ("rig", "system", "limit", *COLUMNS)
    lines = [head, ["---"] * len(head)]
    lines += [[row["rig"], row["system"], row["predicted"]["limit"], *cells(row)] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and print the table; 1 if a pair could not be measured."""
    arguments = parser(__doc__ or "").parse_args(argv)
    results = Results.of(HERE, arguments)
    console = Console(width=None if sys.stdout.isatty() else 180)
    rows, failed = [], False
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for rig_name in [QUICK_RIG] if arguments.quick else RIGS:
            for system in SYSTEMS:
                try:
                    rows.append(
                        study_pair(
                            results, rig_name, system, quick=arguments.quick, again=arguments.again, progress=progress
                        )
                    )
                except ProfileError as error:
                    failed = True
                    progress.console.print(f"{system}: {error}")
    console.print(table_of(rows))
    (results.folder / "table.md").write_text(markdown_of(rows), encoding="utf-8")
    if arguments.json:
        write_json(arguments.json, {"study": HERE.name, "quick": arguments.quick, "rows": rows})
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
