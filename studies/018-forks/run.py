"""What do a data loader's workers, forked in every epoch, cost the process that trains? See the README.md beside."""

from __future__ import annotations

import ctypes
import mmap
import random
import re
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import psutil  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Results, code_digest, parser, spread, write_json  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from zenflow import ZenFlowAdamW, ZenFlowConfig  # noqa: E402
from zenflow.host import native  # noqa: E402

NONE, WORKERS, INHERITED = "none", "two workers", "two, memory inherited"
ALLOWED = 0.05  # of page faults and memory, above a run without workers
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    weights: int
    side: int
    """Rows and columns of each."""
    epochs: int
    steps: int
    """Of an epoch."""
    rounds: int


FULL, QUICK = Size(8, 4096, 3, 4, 5), Size(4, 512, 3, 3, 2)


class Numbers(Dataset[torch.Tensor]):
    """Data that costs nothing."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def advise(address: int, nbytes: int, advice: int) -> None:
    """Of the whole pages in a piece of memory."""
    page = mmap.PAGESIZE
    first, end = -(-address // page) * page, (address + nbytes) // page * page
    if end > first and LIBC.madvise(first, end - first, advice) != 0:
        raise OSError(ctypes.get_errno(), "madvise")


@contextmanager
def kept_from_children(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """While it lasts no child that is forked has the memory of tensors, which have to live as long.

    Afterwards malloc may use the memory again: a later child that lacked what lies there then would crash.
    """
    pieces = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    try:
        for piece in pieces:
            advise(*piece, mmap.MADV_DONTFORK)
        yield
    finally:
        for piece in pieces:
            advise(*piece, mmap.MADV_DOFORK)


class Inherited(native.NativeBackend):
    """Host memory as it was before it was kept from children."""

    def allocate(self, nbytes: int, interval_bytes: int) -> Any:
        array = super().allocate(nbytes, interval_bytes)
        advise(array.ctypes.data, nbytes, mmap.MADV_DOFORK)
        return array


class Training:
    """An optimizer whose host passes over all of its memory in every step, and gradients that are there already."""

    def __init__(self, size: Size) -> None:
        torch.manual_seed(0)
        shape = size.side, size.side
        self._weights = [nn.Parameter(torch.randn(shape).bfloat16()) for _ in range(size.weights)]
        self._gradients = [torch.randn(shape).bfloat16() for _ in self._weights]
        config = ZenFlowConfig(topk_ratio=0.0, update_interval=1, overlap_step=False, host_threads=2, stream=False)
        self.optimizer = ZenFlowAdamW(self._weights, lr=1e-4, config=config)

    @property
    def of_the_model(self) -> list[torch.Tensor]:
        """Its weights and gradients."""
        return [*self._weights, *self._gradients]

    def step(self) -> dict[str, float]:
        """Its seconds, and of all threads seconds of a processor and page faults."""
        for weight, gradient in zip(self._weights, self._gradients, strict=True):
            weight.grad = gradient
        before, begin_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        self.optimizer.step()
        step_s, after = time.perf_counter() - begin_s, resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"step_s": step_s, "cpu_s": cpu_s, "faults": after.ru_minflt - before.ru_minflt}


def kilobytes(path: str, name: str) -> int:
    """A figure of one of the kernel's files."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(path).read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(f"{path} has no {name}")
    return int(found[1])


def memory() -> dict[str, float]:
    """MiB: of this process, of it and its children together (shared memory once), and what the machine has left."""
    own, children = "/proc/self/smaps_rollup", psutil.Process().children(recursive=True)
    of_children = sum(kilobytes(f"/proc/{child.pid}/smaps_rollup", "Pss") for child in children)
    found = {
        "rss": kilobytes(own, "Rss"),
        "together": kilobytes(own, "Pss") + of_children,
        "huge": kilobytes(own, "AnonHugePages"),
        "available": kilobytes("/proc/meminfo", "MemAvailable"),
    }
    return {name: round(value / 1024, 1) for name, value in found.items()}


def train(side: str, size: Size, turns: Connection) -> None:
    """In a process of its own: a step when it is its turn, and memory after each epoch."""
    with mock.patch.object(native, "NativeBackend", Inherited if side == INHERITED else native.NativeBackend):
        training = Training(size)
    # On a GPU the model's memory is not the host's, so that no child has or copies it: here neither.
    with kept_from_children(training.of_the_model):
        take_turns(training, 0 if side == NONE else 2, size, turns)


def take_turns(training: Training, workers: int, size: Size, turns: Connection) -> None:
    """What `train` does once there is an optimizer."""
    for _ in range(2):
        training.step()
    context = "fork" if workers else None
    turns.send(memory())
    for _ in range(size.epochs):
        loader = DataLoader(Numbers(), batch_size=10, num_workers=workers, multiprocessing_context=context)
        batches = None
        for _ in range(size.steps):
            turns.recv()
            batches = batches or iter(loader)  # here the workers are forked
            next(batches)
            turns.send(training.step())
        turns.send(memory())  # while they live
        del batches
    training.optimizer.abandon()
    turns.send(memory())


def pair(side: str, size: Size, draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run without workers and one of a side: each step of one beside one of the other, in random order."""
    context = get_context("spawn")
    pipes, processes = [], []
    for of in (NONE, side):
        here, there = context.Pipe()
        processes.append(context.Process(target=train, args=(of, size, there), daemon=False))
        pipes.append(here)
        processes[-1].start()
        there.close()  # whose end is then seen
    runs: list[dict[str, Any]] = [{"before": pipe.recv(), "epochs": []} for pipe in pipes]
    for _ in range(size.epochs):
        steps: list[list[Any]] = [[], []]
        for _ in range(size.steps):
            for one in draw.sample((0, 1), 2):
                pipes[one].send(None)
                steps[one].append(pipes[one].recv())
        for run, pipe, of_run in zip(runs, pipes, steps, strict=True):
            run["epochs"].append({"steps": of_run, "memory": pipe.recv()})
    for run, pipe, process in zip(runs, pipes, processes, strict=True):
        run["after"] = pipe.recv()
        process.join()
    return runs[0], runs[1]


def measure(size: Size) -> dict[str, Any]:
    """Pairs of runs, one after the other, in random order in each round."""
    draw = random.Random(0)
    pairs: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {WORKERS: [], INHERITED: []}
    order = [side for _ in range(size.rounds) for side in draw.sample(list(pairs), len(pairs))]
    for side in track(order, "forks", console=Console(stderr=True), transient=True):
        pairs[side].append(pair(side, size, draw))
    without = [before for before, _ in pairs[WORKERS]]
    sides = {NONE: side_of([(run, run) for run in without])}
    return {"pairs": pairs, "sides": sides | {side: side_of(of_side) for side, of_side in pairs.items()}}


def side_of(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    """Figures of a side, and beside those of the runs without workers."""
    runs = [run for _, run in pairs]
    steps = [pair for a, b in pairs for pair in zip(_steps(a), _steps(b), strict=True)]
    firsts = [pair for a, b in pairs for pair in zip(_firsts(a), _firsts(b), strict=True)]
    return {
        "step_s": spread(step["step_s"] for run in runs for step in _steps(run)),
        "first_step_s": spread(step["step_s"] for run in runs for step in _firsts(run)),
        "cpu_s": spread(_mean(run, "cpu_s") for run in runs),
        "faults": spread(_mean(run, "faults") for run in runs),
        "together_mib": spread(_most(run) for run in runs),
        "large_mib": spread(run["after"]["huge"] for run in runs),
        "large_kept": spread(run["after"]["huge"] / max(1.0, run["before"]["huge"]) for run in runs),
        "ratios": {
            "step_s": spread(b["step_s"] / a["step_s"] for a, b in steps),
            "first_step_s": spread(b["step_s"] / a["step_s"] for a, b in firsts),
            "cpu_s": spread(_mean(b, "cpu_s") / _mean(a, "cpu_s") for a, b in pairs),
            "faults": spread(_mean(b, "faults") / max(1.0, _mean(a, "faults")) for a, b in pairs),
            "together_mib": spread(_most(b) / _most(a) for a, b in pairs),
        },
    }


def _steps(run: Mapping[str, Any]) -> list[dict[str, float]]:
    return [step for epoch in run["epochs"] for step in epoch["steps"]]


def _firsts(run: Mapping[str, Any]) -> list[dict[str, float]]:
    """Of the epochs."""
    return [epoch["steps"][0] for epoch in run["epochs"]]


def _mean(run: Mapping[str, Any], name: str) -> float:
    return statistics.fmean(step[name] for step in _steps(run))


def _most(run: Mapping[str, Any]) -> float:
    return max(float(epoch["memory"]["together"]) for epoch in run["epochs"])


def done(sides: Mapping[str, Any]) -> dict[str, bool]:
    """What was promised of workers, beside a run without."""
    ratios, kept = sides[WORKERS]["ratios"], sides[WORKERS]["large_kept"]["median"]
    return {
        "large pages stay whole": kept >= sides[NONE]["large_kept"]["median"] - 0.001,
        "page faults within 5%": ratios["faults"]["median"] <= 1 + ALLOWED,
        "memory within 5%": ratios["together_mib"]["median"] <= 1 + ALLOWED,
    }


def table_of(sides: Mapping[str, Any]) -> Table:
    """A row for each side."""
    table = Table(title="the process that trains, and its data loader's workers")
    for column in ("", "step s", "first s", "CPU s a step", "faults a step", "MiB with workers", "large pages kept"):
        table.add_column(column, justify="right" if column else "left")
    for side, figures in sides.items():
        cells = [f"{figures[name]['median']:.2f}" for name in ("step_s", "first_step_s", "cpu_s")]
        cells += [f"{figures['faults']['median']:,.0f}", f"{figures['together_mib']['median']:,.0f}"]
        table.add_row(side, *cells, f"{figures['large_kept']['median']:.0%}")
    for name in ("step_s", "first_step_s", "cpu_s"):
        ratio = sides[WORKERS]["ratios"][name]
        table.caption = f"{table.caption or ''}{name}, two workers over none: {_said(ratio)}. "
    return table


def _said(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['p5']:.3f} - {ratio['p95']:.3f})"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure unless it is done, and print; 1 where a promise is not kept (small sizes make none)."""
    arguments = parser(__doc__ or "").parse_args(argv)
    results = Results.of(HERE, arguments)
    size = QUICK if arguments.quick else FULL
    inputs = {**asdict(size), "code": code_digest("studies/018-forks/run.py", "runtime/zenflow/host")}
    record = None if arguments.again else results.load("forks", inputs)
    if record is None:
        record = results.save("forks", inputs, measure(size))
    sides = record["figures"]["sides"]
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table_of(sides))
    kept = done(sides)
    for promise, is_kept in kept.items():
        console.print(f"{promise}: {'yes' if is_kept else 'no'}")
    if arguments.json:
        write_json(arguments.json, {"study": HERE.name, "quick": arguments.quick, **record})
    return int(not arguments.quick and not all(kept.values()))


if __name__ == "__main__":
    raise SystemExit(main())
