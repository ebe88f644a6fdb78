"""What does the training thread pay for each weight?

See README.md beside this file.
"""

from __future__ import annotations

import gc
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Results, code_digest, parser, write_json  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from tests.support.zenflow.null_device import NullDevice, model_of, null_kernels  # noqa: E402
from zenflow import ZenFlowAdamW, ZenFlowConfig  # noqa: E402

MATRICES, VECTORS, COLUMNS = 142, 41, 2048
INTERVAL, SELECT_INTERVAL = 4, 16
WARM_UP = 16
STEPS, QUICK_STEPS = 64, 32
RUNS, QUICK_RUNS = 3, 1
SQUARES, SIDE = 192, 32
COMPUTE_MS = 55.0
"""Of a step of 1.16B parameters at 4,096 tokens on an H200: what thread time is added to."""
SETTINGS: Mapping[str, ZenFlowConfig] = {
    "published": ZenFlowConfig(),
    "exact": ZenFlowConfig(update_interval=1, overlap_step=False),
    "zero_offload": ZenFlowConfig.zero_offload(),
}
CODE = ("runtime/zenflow", "tests/support/zenflow/null_device.py", "studies/027-training-thread/run.py")
GOALS = {"hooks": 2.5, "step": 1.5, "longest": 1.15, "cpu": 40.0}


def thread_us(work: Callable[[], object]) -> float:
    """Thread time of a call in microseconds."""
    began = time.thread_time()
    work()
    return 1e6 * (time.thread_time() - began)


def unit_us() -> float:
    """Thread time of one `add_` of a small tensor, in microseconds."""
    x = torch.zeros(16, device="cpu")

    def hundred() -> None:
        for _ in range(100):
            x.add_(1)

    return statistics.median(thread_us(hundred) / 100 for _ in range(5))


def in_thread(work: Callable[[], float]) -> float:
    """A call in a thread of its own, as backward on a GPU is."""
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def kind_of(step: int) -> str:
    """What a step does beside updates; a new selection's columns move at the close after it."""
    if step % SELECT_INTERVAL == 1:
        return "selects"
    if step % SELECT_INTERVAL == INTERVAL:
        return "closes, columns move"
    return "closes" if step % INTERVAL == 0 else "plain"


def _forward(model: nn.Module, loss: list[torch.Tensor]) -> None:
    loss.append(model(torch.zeros((), device="cpu")))


def _backward(loss: Sequence[torch.Tensor]) -> None:
    torch.autograd.backward(loss)


def on_null_device(steps: int) -> dict[str, Any]:
    """Thread time on a device that does nothing, with an optimizer and without.

    Args:
        steps: that are measured, with each.
    """
    parts = ("forward", "backward", "step", "zero_grad")
    units: list[float] = []

    def trained(optimizer: ZenFlowAdamW | None, model: nn.Module) -> list[dict[str, float]]:
        rows = []
        for step in range(1, WARM_UP + steps + 1):
            if step % 8 == 0:
                units.append(unit_us())
            loss: list[torch.Tensor] = []
            times = {
                "forward": thread_us(partial(_forward, model, loss)),
                "backward": in_thread(partial(thread_us, partial(_backward, loss))),
                "step": 0.0 if optimizer is None else thread_us(optimizer.step),
                "zero_grad": thread_us(model.zero_grad if optimizer is None else optimizer.zero_grad),
            }
            if step > WARM_UP:
                rows.append({"number": step, **times})
        return rows

    device = NullDevice()
    alone = trained(None, model_of(MATRICES, VECTORS, COLUMNS))
    model = model_of(MATRICES, VECTORS, COLUMNS)
    config = ZenFlowConfig(
        topk_ratio=0.05, update_interval=INTERVAL, select_interval=SELECT_INTERVAL, host_threads=1, max_grad_norm=1.0
    )
    with null_kernels(device):
        optimizer = ZenFlowAdamW(model.parameters(), lr=1e-5, config=config, module=model, device=device)
        rows = trained(optimizer, model)
        optimizer.abandon()
    unit = statistics.median(units)

    def beyond(name: str, average: Callable[[Sequence[float]], float]) -> float:
        taken = average([row[name] for row in rows]) - average([row[name] for row in alone])
        return taken / unit / MATRICES

    whole = [sum(row[name] for name in parts) for row in rows]
    typical = statistics.median(whole) / 1000 + COMPUTE_MS
    longer = [
        (kind_of(int(row["number"])), (us / 1000 + COMPUTE_MS) / typical) for row, us in zip(rows, whole, strict=True)
    ]
    return {
        "unit_us": unit,
        "units_a_weight": {
            name: {"median": beyond(name, statistics.median), "mean": beyond(name, statistics.fmean)} for name in parts
        },
        "step_ms": statistics.median(whole) / 1000,
        "longest": {
            kind: max(longest for name, longest in longer if name == kind)
            for kind in ("plain", "selects", "closes", "closes, columns move")
        },
        "calls_a_weight": {
            name: round(count / (WARM_UP + steps) / MATRICES, 2) for name, count in device.calls.most_common()
        },
    }


def squares() -> nn.ParameterList:
    """Small square weights."""
    torch.manual_seed(0)
    return nn.ParameterList(nn.Parameter(torch.randn(SIDE, SIDE, device="cpu")) for _ in range(SQUARES))


def a_step(weights: nn.ParameterList, optimizer: torch.optim.Optimizer) -> None:
    """Forward, backward, step and zero_grad with a loss that takes little time."""
    torch.stack([weight.sum() for weight in weights]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def on_cpu(steps: int) -> dict[str, Any]:
    """Thread time beyond torch's foreach AdamW on a plain CPU, in units a weight and step; all settings in turns.

    Args:
        steps: that are measured, of each.
    """
    models = {name: squares() for name in ("torch", *SETTINGS)}
    optimizers: dict[str, torch.optim.Optimizer] = {
        "torch": torch.optim.AdamW(models["torch"].parameters(), foreach=True),
        **{name: ZenFlowAdamW(models[name].parameters(), config=config) for name, config in SETTINGS.items()},
    }
    times: dict[str, list[float]] = {name: [] for name in models}
    units = []
    for step in range(WARM_UP + steps):
        if step % 4 == 0:
            units.append(unit_us())
        for name, weights in models.items():
            taken = thread_us(partial(a_step, weights, optimizers[name]))
            if step >= WARM_UP:
                times[name].append(taken)
    calls = {name: counted(models[name], optimizers[name]) for name in SETTINGS}
    for name in SETTINGS:
        optimizers[name].abandon()  # type: ignore[attr-defined]
    unit = statistics.median(units)
    return {
        "unit_us": unit,
        "units_a_weight": {
            name: {
                "median": (statistics.median(times[name]) - statistics.median(times["torch"])) / unit / SQUARES,
                "mean": (statistics.fmean(times[name]) - statistics.fmean(times["torch"])) / unit / SQUARES,
            }
            for name in SETTINGS
        },
        "calls_a_weight": calls,
    }


class _Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def counted(weights: nn.ParameterList, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, float]]:
    """Python functions and operations of torch that a step calls, a weight, on average over a window; the commonest.

    Backward's hooks run in the calling thread on a CPU.
    """
    python: Counter[str] = Counter()

    def profiled(frame: Any, event: str, _: object) -> None:
        if event == "call":
            code = frame.f_code
            python[f"{Path(code.co_filename).stem}.{code.co_qualname}"] += 1

    sys.setprofile(profiled)
    try:
        for _ in range(INTERVAL):
            a_step(weights, optimizer)
    finally:
        sys.setprofile(None)
    operations = _Operations()
    with operations:
        for _ in range(INTERVAL):
            a_step(weights, optimizer)

    def common(counts: Counter[str], most: int) -> dict[str, float]:
        rows = {name: round(count / INTERVAL / SQUARES, 2) for name, count in counts.most_common(most)}
        return {"all": round(counts.total() / INTERVAL / SQUARES, 2), **{n: c for n, c in rows.items() if c >= 0.1}}

    return {"python": common(python, 25), "torch": common(operations.counts, 15)}


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """Both parts; of each run one column."""
    null, plain = figures["null_device"], figures["cpu"]
    runs = [f"run {number}" for number in range(1, len(null) + 1)]
    one = Table(title=f"on a device that does nothing, {MATRICES} matrices: units of one add_")
    for column in ("", *runs, "goal"):
        one.add_column(column, justify="left" if not column else "right")
    for part, goal in (("backward", GOALS["hooks"]), ("step", GOALS["step"]), ("forward", None)):
        for average in ("median", "mean"):
            values = [f"{run['units_a_weight'][part][average]:.1f}" for run in null]
            one.add_row(f"{part}, a matrix, {average}", *values, "" if goal is None else f"{goal:g}")
    for kind in null[0]["longest"]:
        values = [f"{run['longest'][kind]:.2f}" for run in null]
        one.add_row(f"longest step ({kind}) / median", *values, f"{GOALS['longest']:g}")
    other = Table(title=f"on a CPU, {SQUARES} weights of {SIDE} x {SIDE}: units beyond foreach AdamW")
    for column in ("", *runs, "goal"):
        other.add_column(column, justify="left" if not column else "right")
    for name in SETTINGS:
        for average in ("median", "mean"):
            values = [f"{run['units_a_weight'][name][average]:.0f}" for run in plain]
            other.add_row(f"{name}, {average}", *values, f"{GOALS['cpu']:g}")
    calls = plain[-1]["calls_a_weight"]
    for name in SETTINGS:
        counts = f"{calls[name]['python']['all']:.0f} and {calls[name]['torch']['all']:.0f}"
        other.add_row(f"{name}: calls of Python and torch", *[""] * (len(runs) - 1), counts, "")
    return [one, other]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure unless it is done, and print the tables."""
    arguments = parser(__doc__ or "").parse_args(argv)
    results = Results.of(HERE, arguments)
    torch.set_num_threads(1)
    inputs: dict[str, Any] = {
        "runs": QUICK_RUNS if arguments.quick else RUNS,
        "steps": QUICK_STEPS if arguments.quick else STEPS,
        "code": code_digest(*CODE),
    }
    record = None if arguments.again else results.load("thread", inputs)
    if record is None:
        figures: dict[str, list[Any]] = {"null_device": [], "cpu": []}
        gc.collect()
        gc.freeze()  # else a step in forty is 170 ms longer: what was imported is looked through
        for _ in range(inputs["runs"]):
            figures["null_device"].append(on_null_device(inputs["steps"]))
            figures["cpu"].append(on_cpu(inputs["steps"]))
        record = results.save("thread", inputs, figures)
    console = Console(width=None if sys.stdout.isatty() else 100)
    for table in tables(record["figures"]):
        console.print(table)
    if arguments.json:
        write_json(arguments.json, {"study": HERE.name, "quick": arguments.quick, **record})
    return 0


if __name__ == "__main__":
    sys.exit(main())
