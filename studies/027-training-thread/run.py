"""How much of the training thread does a step take, a weight? See README.md beside this file."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Results, code_digest, parser, write_json  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from tests.support.zenflow.null_device import (  # noqa: E402
    KINDS,
    PARTS,
    SELECT_INTERVAL,
    NullDevice,
    autograds_thread,
    kind_of,
    null_kernels,
    optimizer_of,
    pieces,
    train_step,
)
from tests.support.zenflow.thread_calls import PythonCalls, TorchCalls  # noqa: E402
from zenflow import ZenFlowAdamW, ZenFlowConfig  # noqa: E402

CODE = ("runtime/zenflow", "studies/027-training-thread/run.py", "tests/support/zenflow/null_device.py")
RUNS, QUICK_RUNS = 3, 1
MATRICES, VECTORS = 142, 41
"""As in the decoder of 1.16B parameters that `studies/gpu` trains."""
SQUARES, WIDTH = 192, 32
COMPUTE_MS = 55.0
"""What forward and backward take a GPU in that training."""
GOALS = {"hooks": 2.5, "step": 1.5, "longest": 1.15, "plain CPU": 40.0}
SETTINGS: dict[str, ZenFlowConfig] = {
    "published": ZenFlowConfig(),
    "exact": ZenFlowConfig(update_interval=1, overlap_step=False),
    "zero_offload": ZenFlowConfig.zero_offload(),
}
COUNTED = 8
"""Steps whose calls are counted: a multiple of every interval."""
LISTED = 25
"""Functions in the table of calls."""
Times = dict[str, float]
"""Microseconds of the thread's processor time, by part of a step."""


def unit_us(other: Tensor | int) -> float:
    """What one `add_` to a small tensor takes."""
    x = torch.zeros(16)
    found = []
    for _ in range(5):
        began = time.thread_time()
        for _ in range(100):
            x.add_(other)
        found.append(1e4 * (time.thread_time() - began))
    return statistics.median(found)


def keep_garbage_short() -> None:
    """Leave all that exists so far out of later collections, each of which would walk what the process has imported."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def timed(into: Times) -> Callable[[str, Callable[[], Any]], None]:
    """Times the parts of a step."""

    def watch(part: str, function: Callable[[], Any]) -> None:
        began = time.thread_time()
        function()
        into[part] = 1e6 * (time.thread_time() - began)

    return watch


def null_steps(periods: int) -> tuple[list[Times], list[Times], float]:
    """Steps of the optimizer and of the model alone, in turns, on a device that does nothing; and the unit, us."""
    device, inputs = NullDevice(), torch.zeros(())
    model, plain = pieces(MATRICES, VECTORS), pieces(MATRICES, VECTORS)
    nothing = torch.optim.SGD(plain.parameters(), lr=0.0)
    ours, alone, units = [], [], []
    now: Times = {}
    with null_kernels(device) as sums, autograds_thread(timed(now)) as watch:
        optimizer = optimizer_of(model, device)
        for step in range(1, (1 + periods) * SELECT_INTERVAL + 1):
            if step == SELECT_INTERVAL:
                keep_garbage_short()
            sums.wanted = step % SELECT_INTERVAL in (0, 1)  # around a look at the selection
            train_step(model, optimizer, inputs, watch)
            ours.append(now.copy())
            train_step(plain, nothing, inputs, watch)
            alone.append(now.copy())
            units.append(unit_us(1))
        optimizer.abandon()
    return ours[SELECT_INTERVAL:], alone[SELECT_INTERVAL:], statistics.median(units[SELECT_INTERVAL:])


def null_figures(periods: int) -> dict[str, Any]:
    """One run on the null device: units a matrix, and whole steps with the compute of a GPU."""
    ours, alone, unit = null_steps(periods)
    figures: dict[str, Any] = {"unit_us": unit}
    for name, part, beyond in (("forward", "forward", True), ("hooks", "backward", True), ("step", "step", False)):
        times = [step[part] for step in ours]
        for how, middle in (("median", statistics.median), ("mean", statistics.fmean)):
            own = middle(times) - (middle([step[part] for step in alone]) if beyond else 0.0)
            figures[f"{name}_{how}"] = own / MATRICES / unit
    whole = [sum(step[part] for part in PARTS) / 1e3 + COMPUTE_MS for step in ours]
    middle_ms = statistics.median(whole)
    figures["whole_ms"] = middle_ms
    for kind in KINDS:
        of_kind = [ms for step, ms in enumerate(whole, SELECT_INTERVAL + 1) if kind_of(step) == kind]
        figures[f"longest_{kind}"] = max(of_kind) / middle_ms
        figures[f"thread_ms_{kind}"] = statistics.median(of_kind) - COMPUTE_MS
    figures["longest"] = max(whole) / middle_ms
    return figures


class Square(nn.Module):
    """A small square weight with a gradient that differs by column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.linear(x, self.weight)


def squares() -> nn.Sequential:
    """The model of a plain CPU."""
    torch.manual_seed(0)
    return nn.Sequential(*(Square() for _ in range(SQUARES)))


def cpu_figures(steps: int) -> dict[str, float]:
    """One run on a plain CPU: units a weight and step beyond torch's foreach AdamW, by setting, in turns."""
    models = {name: squares() for name in ("adamw", *SETTINGS)}
    optimizers: dict[str, torch.optim.Optimizer] = {
        "adamw": torch.optim.AdamW(models["adamw"].parameters(), lr=1e-5, foreach=True),
        **{name: cpu_optimizer(models[name], config) for name, config in SETTINGS.items()},
    }
    spent: dict[str, list[float]] = defaultdict(list)
    units = []
    for step in range(SELECT_INTERVAL + steps):
        if step == SELECT_INTERVAL:
            keep_garbage_short()
        inputs = torch.randn(4, WIDTH)
        for name, model in models.items():
            now: Times = {}
            train_step(model, optimizers[name], inputs, timed(now))
            if step >= SELECT_INTERVAL:
                spent[name].append(sum(now.values()))
        units.append(unit_us(torch.ones(16)))
    close(optimizers.values())
    unit = statistics.median(units)
    figures = {"unit_us": unit}
    for name in SETTINGS:
        for how, middle in (("median", statistics.median), ("mean", statistics.fmean)):
            figures[f"{name}_{how}"] = (middle(spent[name]) - middle(spent["adamw"])) / SQUARES / unit
    return figures


def cpu_optimizer(model: nn.Module, config: ZenFlowConfig) -> ZenFlowAdamW:
    return ZenFlowAdamW(model.parameters(), lr=1e-5, config=config, module=model)


def close(optimizers: Any) -> None:
    for optimizer in optimizers:
        if isinstance(optimizer, ZenFlowAdamW):
            optimizer.abandon()


def calls(name: str) -> dict[str, Counter[str]]:
    """Calls on a plain CPU of Python, of C and of torch, each counted over eight steps after the first eight."""
    found = {"python": Counter[str](), "builtins": Counter[str](), "torch": Counter[str]()}
    model = squares()
    optimizer = (
        cpu_optimizer(model, SETTINGS[name])
        if name in SETTINGS
        else torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
    )
    tools: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
        nullcontext,
        lambda: PythonCalls(found["python"], found["builtins"]),
        lambda: TorchCalls(found["torch"]),
    )
    for tool in tools:

        def watch(_part: str, function: Callable[[], Any], tool: Any = tool) -> None:
            with tool():
                function()

        for _ in range(COUNTED):
            train_step(model, optimizer, torch.randn(4, WIDTH), watch)
    close([optimizer])
    return found


def calls_left() -> dict[str, dict[str, dict[str, float]]]:
    """By kind and setting, calls a weight and step beyond those of torch's foreach AdamW."""
    alone = calls("adamw")
    left: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in alone}
    for name in SETTINGS:
        for kind, counts in calls(name).items():
            beyond = counts - alone[kind]
            left[kind][name] = {call: count / COUNTED / SQUARES for call, count in beyond.most_common()}
    return left


def measure(runs: int, periods: int) -> dict[str, Any]:
    """Every run, and the calls."""
    torch.set_num_threads(1)
    null, cpu = [], []
    for _ in range(runs):
        null.append(null_figures(periods))
        cpu.append(cpu_figures(periods * SELECT_INTERVAL))
    return {"null": null, "cpu": cpu, "calls": calls_left()}


def table_of(figures: Mapping[str, Any]) -> Table:
    """One row a figure, one column a run."""
    table = Table(title="The training thread, a weight and step, in units of one add_ to a small tensor")
    for column in ("", *(f"run {number + 1}" for number in range(len(figures["null"]))), "goal"):
        table.add_column(column, justify="right" if column else "left")

    def row(name: str, part: str, key: str, digits: int, goal: str = "") -> None:
        table.add_row(name, *(f"{run[key]:,.{digits}f}" for run in figures[part]), goal)

    row("unit of the null device: x.add_(1), µs", "null", "unit_us", 2)
    for part in ("forward", "hooks", "step"):
        goal = f"{GOALS[part]:g}" if part in GOALS else ""
        row(f"{part}, median", "null", f"{part}_median", 1, goal)
        row(f"{part}, mean", "null", f"{part}_mean", 1, goal)
    row("median step with 55 ms of compute, ms", "null", "whole_ms", 1)
    for kind in KINDS:
        row(f"longest {kind} step / median step", "null", f"longest_{kind}", 2, f"{GOALS['longest']:g}")
    row("unit of the plain CPU: x.add_(y), µs", "cpu", "unit_us", 2)
    for name in SETTINGS:
        row(f"{name} on a plain CPU, median", "cpu", f"{name}_median", 0, f"{GOALS['plain CPU']:g}")
        row(f"{name} on a plain CPU, mean", "cpu", f"{name}_mean", 0, f"{GOALS['plain CPU']:g}")
    for kind, title in (("python", "Python functions"), ("builtins", "C functions"), ("torch", "torch operations")):
        totals = (f"{sum(found.values()):.1f}" for found in figures["calls"][kind].values())
        table.add_row(f"{title} called: {', '.join(SETTINGS)}", " / ".join(totals))
    return table


def calls_page(left: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The calls of each kind, most first, in Markdown."""
    lines = ["# Calls a weight and step on a plain CPU, beyond torch's foreach AdamW"]
    for kind, title in (("python", "Python function"), ("torch", "operation of torch"), ("builtins", "function of C")):
        found = left[kind]
        every = sorted({call for one in found.values() for call in one}, key=lambda call: -_most(found, call))
        lines += ["", f"| {title} | {' | '.join(found)} |", "|---|" + "---:|" * len(found)]
        for call in every[:LISTED]:
            lines.append(f"| `{call}` | {' | '.join(f'{one.get(call, 0.0):.2f}' for one in found.values())} |")
        lines.append(f"| all | {' | '.join(f'{sum(one.values()):.1f}' for one in found.values())} |")
    return "\n".join(lines) + "\n"


def _most(found: Mapping[str, Mapping[str, float]], call: str) -> float:
    return max(one.get(call, 0.0) for one in found.values())


def write_figures(figures: Mapping[str, Any]) -> None:
    """Put the middle of the runs into figures.json, whose quotes stay."""
    path = HERE / "figures.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    every = {
        key: statistics.median(run[key] for run in figures[part])
        for part in ("null", "cpu")
        for key in figures[part][0]
        if key != "unit_us"
    }
    document["figures"] = {key: float(f"{every[key]:.6g}") for key in document["figures"]}
    write_json(path, document)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure unless it is done, and print the table."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("-v", "--verbose", action="store_true", help="also print the calls of a plain CPU")
    options = arguments.parse_args(argv)
    results = Results.of(HERE, options)
    runs, periods = (QUICK_RUNS, 1) if options.quick else (RUNS, 3)
    inputs = {"runs": runs, "periods": periods, "torch": torch.__version__, "code": code_digest(*CODE)}
    record = None if options.again else results.load("thread", inputs)
    if record is None:
        record = results.save("thread", inputs, measure(runs, periods))
        (results.folder / "calls.md").write_text(calls_page(record["figures"]["calls"]), encoding="utf-8")
        if not options.quick and options.results is None:
            write_figures(record["figures"])
    Console(width=None if sys.stdout.isatty() else 110).print(table_of(record["figures"]))
    if options.verbose:
        sys.stdout.write(calls_page(record["figures"]["calls"]))
    if options.json:
        write_json(options.json, {"study": HERE.name, "quick": options.quick, **record})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
