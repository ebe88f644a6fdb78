"""How long must a window be, and what does a shorter one cost? Measured stalls against the planner's formula.

See README.md beside this file.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Results, code_digest, parser, percentile, write_json  # noqa: E402

from zenflow import ZenFlowConfig  # noqa: E402
from zftune.emulation.machines import load_rig  # noqa: E402
from zftune.profile.measure import Measurement, Task, measure  # noqa: E402
from zftune.workload import load_text  # noqa: E402

CODE = ("runtime/zenflow", "zftune/profile/measure.py", "zftune/workload")
TOPK = 0.05
BUCKET_BYTES = 50_000
SEQUENCE = 16
STATE, GRADIENT = 26, 2  # bytes of host traffic an element: state and result once a window, each logged gradient
MOST_STALL, MOST_SPREAD = 0.02, 1.15  # of the default rig's step
MOST_STALL_AT_S_MIN, TOLERANCE = 0.05, 0.10


@dataclass(frozen=True, slots=True)
class Point:
    """One rig and window length."""

    rig: str
    update_interval: int
    steps: int


FULL = (
    Point("llama2-7b-4xa100", 4, 60),
    *(Point("host-bound", interval, 10 * interval) for interval in (4, 5, 7, 8, 9, 10, 12)),
)
QUICK = (Point("host-bound", 7, 14), Point("host-bound", 9, 18))


def host_s(interval: int, deferred: int, host_gbps: float) -> float:
    """T_host(S): seconds of host work for one window."""
    return deferred * (STATE + GRADIENT * interval) / (host_gbps * 1e9)


def least_interval(deferred: int, host_gbps: float, compute_s: float) -> int:
    """S_min: the least S with T_host(S) <= S * c.

    Raises:
        ValueError: no S does.
    """
    if GRADIENT * deferred / (host_gbps * 1e9) >= compute_s:
        raise ValueError("no window is long enough: the host falls behind with the logged gradients alone")
    return next(s for s in range(1, 10_000) if host_s(s, deferred, host_gbps) <= s * compute_s)


def predicted_stall_s(interval: int, deferred: int, host_gbps: float, compute_s: float) -> float:
    """Seconds that a step stalls."""
    return max(0.0, host_s(interval, deferred, host_gbps) / interval - compute_s)


def task_for(name: str) -> Task:
    """The tiny model in bf16 on a rig."""
    return Task(
        model="tiny",
        corpus=load_text(None),
        dtype=torch.bfloat16,
        micro_batch=1,
        sequence=SEQUENCE,
        seed=0,
        torch_device=torch.device("cpu"),
        rig=load_rig(name),
    )


def config_for(point: Point) -> ZenFlowConfig:
    """One selection for the whole run, so that every window is the same; as many buckets as a large model has."""
    knobs: dict[str, Any] = {"topk_ratio": TOPK, "select_interval": 1 << 20, "bucket_bytes": BUCKET_BYTES}
    return ZenFlowConfig(update_interval=point.update_interval, **knobs).resolved()


def figures_of(point: Point, task: Task, measured: Measurement) -> dict[str, Any]:
    """What was measured, and what the formula says."""
    rig = task.rig_for(task.build())
    assert rig is not None
    stats = measured.stats
    steps_ms = sorted(measured.step_ms)
    stall_ms = [sum((step.stall_ms or {}).values()) for step in stats]
    windows = len(stats) / point.update_interval
    deferred = round(sum(step.host_elements for step in stats) / windows)
    mean_ms, mean_stall_ms = statistics.fmean(measured.step_ms), statistics.fmean(stall_ms)
    assert measured.slack is not None
    return {
        "step_ms": {"p50": percentile(steps_ms, 0.5), "p95": percentile(steps_ms, 0.95), "mean": mean_ms},
        "stall_ms": mean_stall_ms,
        "stall_fraction": mean_stall_ms / mean_ms,
        "deferred_elements": deferred,
        "host_gbps": rig.host_gbps,
        "host_utilisation": sum(step.host_ms for step in stats) / sum(measured.step_ms),
        "real_work_ms_per_step": 1e3 * measured.slack.worked_s / len(stats),
    }


def with_formula(records: Mapping[Point, Mapping[str, Any]]) -> dict[Point, dict[str, Any]]:
    """The figures with what the formula says; c is the longest windows' step on the same rig, less its stall."""
    found = {}
    for point, figures in records.items():
        longest = max((p for p in records if p.rig == point.rig), key=lambda p: p.update_interval)
        compute_s = 1e-3 * (records[longest]["step_ms"]["mean"] - records[longest]["stall_ms"])
        deferred, host_gbps = figures["deferred_elements"], figures["host_gbps"]
        found[point] = {
            **figures,
            "compute_ms": 1e3 * compute_s,
            "predicted_stall_ms": 1e3 * predicted_stall_s(point.update_interval, deferred, host_gbps, compute_s),
            "least_update_interval": least_interval(deferred, host_gbps, compute_s),
        }
    return found


def verdicts(records: Mapping[Point, Mapping[str, Any]]) -> list[tuple[str, bool]]:
    """Each promise and whether it was kept."""
    found = []
    for point, figures in records.items():
        name, stall = f"{point.rig}, S = {point.update_interval}", figures["stall_fraction"]
        if point.rig != "host-bound":
            spread = figures["step_ms"]["p95"] / figures["step_ms"]["p50"]
            found += [
                (f"{name}: p95 / p50 {spread:.3f}, allowed {MOST_SPREAD}", spread <= MOST_SPREAD),
                (f"{name}: stall {stall:.2%}, allowed {MOST_STALL:.0%}", stall <= MOST_STALL),
            ]
        elif point.update_interval >= figures["least_update_interval"]:
            ok = stall <= MOST_STALL_AT_S_MIN
            found.append((f"{name}, S_min or more: stall {stall:.2%}, allowed {MOST_STALL_AT_S_MIN:.0%}", ok))
        else:
            off = figures["stall_ms"] / figures["predicted_stall_ms"] - 1
            found.append((f"{name}: stall {off:+.1%} off the formula, allowed {TOLERANCE:.0%}", abs(off) <= TOLERANCE))
    return found


HEADS = ("rig", "S", "S_min", "step p50", "p95 / p50", "stall", "formula", "share", "host busy")


def cells(point: Point, figures: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    step = figures["step_ms"]
    return (
        point.rig,
        str(point.update_interval),
        str(figures["least_update_interval"]),
        f"{step['p50']:.1f} ms",
        f"{step['p95'] / step['p50']:.3f}",
        f"{figures['stall_ms']:.2f} ms",
        f"{figures['predicted_stall_ms']:.2f} ms",
        f"{figures['stall_fraction']:.1%}",
        f"{figures['host_utilisation']:.0%}",
    )


def table_of(rows: Sequence[Sequence[str]]) -> Table:
    """All figures, for a terminal."""
    table = Table(title="k = 0.05, replay; stall by the formula and as measured")
    for head in HEADS:
        table.add_column(head, justify="left" if head == "rig" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_of(rows: Sequence[Sequence[str]], found: Sequence[tuple[str, bool]]) -> str:
    """All figures and verdicts, for `table.md`."""
    lines = [HEADS, ["---", *["---:"] * (len(HEADS) - 1)], *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return table + "\n\n" + "\n".join(f"- {'kept' if kept else 'BROKEN'}: {text}" for text, kept in found) + "\n"


def run(points: Sequence[Point], results: Results, *, again: bool) -> dict[Point, dict[str, Any]]:
    """Measure every point that is not there yet."""
    digest, records = code_digest(*CODE), {}
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("points", total=len(points))
        for point in points:
            name = f"{point.rig}-s{point.update_interval}"
            rig = load_rig(point.rig)
            workload = {"topk_ratio": TOPK, "bucket_bytes": BUCKET_BYTES, "sequence": SEQUENCE}
            inputs = {
                **dataclasses.asdict(point),
                **workload,
                "rig_values": {**rig.values, **rig.thread},
                "clock": "simulated",
                "code": digest,
            }
            record = None if again else results.load(name, inputs)
            if record is None:
                task = task_for(point.rig)
                measured = measure(task, config_for(point), point.steps, lambda _done, _all: None)
                record = results.save(name, inputs, figures_of(point, task, measured))
            records[point] = record["figures"]
            progress.advance(bar)
    return records


def main() -> int:
    """Command line; 1 where a promise was not kept."""
    arguments = parser("How long must a window be, and what does a shorter one cost?").parse_args()
    results = Results.of(HERE, arguments)
    records = with_formula(run(QUICK if arguments.quick else FULL, results, again=arguments.again))
    rows, found = [cells(point, figures) for point, figures in records.items()], verdicts(records)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table_of(rows))
    for sentence, kept in found:
        console.print(f"{'kept  ' if kept else 'BROKEN'} {sentence}", highlight=False)
    (results.folder / "table.md").write_text(markdown_of(rows, found), encoding="utf-8")
    if arguments.json:
        document = [{**dataclasses.asdict(point), **figures} for point, figures in records.items()]
        write_json(arguments.json, {"points": document, "verdicts": [[s, kept] for s, kept in found]})
    return 0 if all(kept for _, kept in found) else 1


if __name__ == "__main__":
    sys.exit(main())
