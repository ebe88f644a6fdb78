"""Does the profile find waits of known length and cause? See README.md beside this file."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402
from scenarios import EMULATED, Synchronous, scripted  # noqa: E402
from scripted import CAUSES, Scenario, play  # noqa: E402
from studykit import Results, code_digest, parser, write_json  # noqa: E402

from zenflow import ZenFlowConfig  # noqa: E402
from zftune.emulation import RigSpec  # noqa: E402
from zftune.profile.measure import Task, measure  # noqa: E402
from zftune.workload import load_text  # noqa: E402

CODE = ("zftune/agent", "zftune/profile/measure.py", "runtime/zenflow", "studies/010-attribution")
MOST_ERROR = 0.03  # of the step, for each cause
STEPS, SEEDS = 60, range(5)
EMULATED_STEPS = 4


def of_scripted(scenario: Scenario, steps: int) -> dict[str, Any]:
    """The worst error over the seeds, with its cause."""
    outcomes = [play(scenario, steps, seed) for seed in SEEDS]
    worst = max((abs(error), cause) for outcome in outcomes for cause, error in outcome.errors().items())
    return {
        "kind": scenario.kind,
        "step_ms": statistics.fmean(outcome.step_ms for outcome in outcomes),
        "truth_ms": {cause: statistics.fmean(o.truth_ms[cause] for o in outcomes) for cause in CAUSES},
        "found_ms": {cause: statistics.fmean(o.found_ms[cause] for o in outcomes) for cause in CAUSES},
        "error": worst[0],
        "error_cause": worst[1],
        "phases_off_ms": max(outcome.phases_off_ms for outcome in outcomes),
    }


def of_emulated(scenario: Synchronous, steps: int) -> dict[str, Any]:
    """ZeRO-Offload in DeepSpeed's order under the rig: the truth is the rig's own timeline."""
    timeline = {"d2h_ms": scenario.d2h_ms, "host_ms": scenario.host_ms, "h2d_ms": scenario.h2d_ms}
    rig = RigSpec("scripted", "", "timeline", {"forward_ms": 150.0, "backward_ms": 150.0, "scale": 1.0, **timeline})
    task = Task(
        model="tiny",
        corpus=load_text(None),
        dtype=torch.bfloat16,
        micro_batch=1,
        sequence=32,
        seed=0,
        torch_device=torch.device("cpu"),
        rig=rig,
    )
    config = ZenFlowConfig.zero_offload(stream=False).resolved()
    measured = measure(task, config, steps, lambda _done, _all: None)
    step_ms = statistics.fmean(measured.step_ms)
    found = {
        cause: statistics.fmean((step.stall_ms or {}).get(cause, 0.0) for step in measured.stats)  # type: ignore[call-overload]
        for cause in CAUSES
    }
    truth = {cause: timeline.get(f"{cause}_ms", 0.0) for cause in CAUSES}
    error, cause = max((abs(found[cause] - truth[cause]) / step_ms, cause) for cause in CAUSES)
    return {
        "kind": "emulated",
        "step_ms": step_ms,
        "truth_ms": truth,
        "found_ms": found,
        "error": error,
        "error_cause": cause,
    }


HEADS = ("scenario", "kind", "step ms", "truth, ms by cause", "found, ms by cause", "error, points", "in")


def cells(name: str, figures: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    return (
        name,
        figures["kind"],
        f"{figures['step_ms']:.1f}",
        _by_cause(figures["truth_ms"]),
        _by_cause(figures["found_ms"]),
        f"{100 * figures['error']:.2f}",
        figures["error_cause"],
    )


def _by_cause(milliseconds: dict[str, float]) -> str:
    return " ".join(f"{cause} {value:.1f}" for cause, value in milliseconds.items() if value >= 0.05) or "none"


def run(results: Results, *, quick: bool, again: bool) -> dict[str, dict[str, Any]]:
    """Every scenario that is not there yet."""
    digest, found = code_digest(*CODE), {}
    work: list[Scenario | Synchronous] = [*scripted(), *(EMULATED[:1] if quick else EMULATED)]
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("scenarios", total=len(work))
        for scenario in work:
            steps = STEPS if isinstance(scenario, Scenario) else EMULATED_STEPS
            name = scenario.name.translate(str.maketrans(" :,", "---")).replace("--", "-")
            inputs = {**dataclasses.asdict(scenario), "clock": "simulated", "steps": steps, "code": digest}
            record = None if again else results.load(name, inputs)
            if record is None:
                figures = (
                    of_scripted(scenario, steps) if isinstance(scenario, Scenario) else of_emulated(scenario, steps)
                )
                record = results.save(name, inputs, figures)
            found[scenario.name] = record["figures"]
            progress.advance(bar)
    return found


def markdown_of(rows: Sequence[Sequence[str]], sentence: str) -> str:
    """The table and its verdict."""
    lines = [HEADS, ["---", "---", "---:", "---", "---", "---:", "---"], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{sentence}\n"


def main() -> int:
    """Command line; 1 where a wait was not found."""
    arguments = parser("Does the profile find waits of known length and cause?").parse_args()
    results = Results.of(HERE, arguments)
    records = run(results, quick=arguments.quick, again=arguments.again)
    rows = [cells(name, figures) for name, figures in records.items()]
    worst = max(figures["error"] for figures in records.values())
    kept = worst <= MOST_ERROR
    sentence = (
        f"{'kept' if kept else 'BROKEN'}: {len(records)} scenarios, largest error of a cause {worst:.2%} of the step, "
        f"allowed {MOST_ERROR:.0%}"
    )
    console = Console()
    table = Table(title="stall by cause: the truth and what the profile found (mean per step)")
    for head in HEADS:
        table.add_column(head, justify="right" if head in ("step ms", "error, points") else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(sentence, highlight=False)
    (results.folder / "table.md").write_text(markdown_of(rows, sentence), encoding="utf-8")
    if arguments.json:
        write_json(arguments.json, {"scenarios": records, "worst": worst, "kept": kept})
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
