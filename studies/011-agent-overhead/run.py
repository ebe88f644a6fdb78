"""What do the agent's hooks cost at steps of 50 ms of real work? See README.md beside this file."""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Results, code_digest, parser, spread, write_json  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

from zenflow.device import default_torch_device, device_for  # noqa: E402
from zftune.agent import arming, records  # noqa: E402
from zftune.agent.facts import Facts  # noqa: E402
from zftune.agent.session import Session  # noqa: E402
from zftune.agent.systems import runtime  # noqa: E402
from zftune.workload import batches, build_model, load_text  # noqa: E402

ALLOWED = 1.01
CODE = (
    "studies/011-agent-overhead/run.py",
    "zftune/agent",
    "zftune/frames.py",
    "zftune/integrations",
    "zftune/workload",
)
PAIRS, STEPS = 9, 30  # of each kind in a pair
QUICK_PAIRS, QUICK_STEPS = 3, 5
CPU_SIZE = {"model": "tiny", "micro_batch": 4, "sequence": 128}  # 50 ms on one thread of the machine in the README
GPU_SIZE = {"model": "small", "micro_batch": 8, "sequence": 512}


class Text(IterableDataset[Tensor]):
    """The workload's batches, for a DataLoader."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Tensor]:
        return (batch.input_ids for batch in self._make())


class Times(NamedTuple):
    """Milliseconds by the clock, and of the training thread's processor time."""

    wall: float
    processor: float

    @classmethod
    def now(cls) -> Times:
        return cls(1e3 * time.perf_counter(), 1e3 * time.thread_time())

    def since(self, begin: Times) -> Times:
        return Times(self.wall - begin.wall, self.processor - begin.processor)


class Training:
    """A training loop as people write them: data loader, forward, backward, clipping, AdamW."""

    def __init__(self, size: dict[str, Any], torch_device: torch.device) -> None:
        self.workload = build_model(size["model"], dtype=torch.float32, seed=0)
        self.module = self.workload.module.to(torch_device)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4)
        self._device = device_for(torch_device)
        tokens = self.workload.encode(load_text(None))
        text = Text(lambda: batches(tokens, micro_batch=size["micro_batch"], sequence=size["sequence"], seed=0))
        self._feed = iter(DataLoader(text, batch_size=None))

    def train(self, steps: int) -> list[Times]:
        """What each step took."""
        device = self._device
        device.wait_for(device.mark())
        ends = [Times.now()]
        for _ in range(steps):
            ids = next(self._feed).to(device.torch_device)
            self.optimizer.zero_grad()
            self.module(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            self.optimizer.step()
            device.wait_for(device.mark())
            ends.append(Times.now())
        return [end.since(begin) for begin, end in itertools.pairwise(ends)]


class Agent:
    """The agent in this process, as in a child, whose hooks and sampler of frames come and go."""

    def __init__(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        self._folder = folder
        self._optimizer = optimizer
        settings = records.Settings(folder, warmup=1, steps=1_000_000)
        self._session = Session(settings, Facts(), arming.backend_for, runtime.rows_of, arming.capturing())

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """All of them."""
        session = self._session
        sampler = arming.sampler_for(arming.backend_for(self._optimizer), bool)
        arming.hook(session, lambda name, call: call(sys.modules[name]) if name in sys.modules else None)
        assert sampler is not None
        sampler.start()
        try:
            yield
        finally:
            sampler.stop()
            session.patches.undo()
            while session.undo:
                session.undo.pop()()

    def hooks_ms(self) -> list[float]:
        """The hooks' own time in each step that was timed."""
        self._session.close()
        (file,) = self._folder.glob("agent-*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        # Its first step has no row, and of the others every second one began without hooks.
        return [line["overhead_ms"] for line in lines if line["kind"] == "step" and line["index"] % 2]


@dataclass(frozen=True, slots=True)
class Pair:
    """Steps with hooks and steps without."""

    on: list[Times]
    off: list[Times]
    hooks_ms: list[float]

    @classmethod
    def of(cls, training: Training, steps: int) -> Pair:
        """By turns: two steps with hooks, two without, and of each two the second counts."""
        on: list[Times] = []
        off: list[Times] = []
        with tempfile.TemporaryDirectory() as folder:
            agent = Agent(Path(folder), training.optimizer)
            with agent.hooks():
                training.train(2)  # in the first one the agent looks at the model
            for _ in range(steps):
                for hooked in random.sample((True, False), 2):
                    with agent.hooks() if hooked else nullcontext():
                        (on if hooked else off).append(training.train(2)[1])
            return cls(on, off, agent.hooks_ms()[1:])

    def ratio(self, middle: Callable[[list[float]], float], clock: str) -> float:
        mine, theirs = (middle([getattr(step, clock) for step in steps]) for steps in (self.on, self.off))
        return mine / theirs


def measure(size: dict[str, Any], torch_device: torch.device, pairs: int, steps: int, say: Any) -> dict[str, Any]:
    """Every pair."""
    training = Training(size, torch_device)
    training.train(5)
    found = []
    for number in range(pairs):
        say(f"pair {number + 1} of {pairs}")
        found.append(Pair.of(training, steps))
    ratios = [pair.ratio(median, "wall") for pair in found]
    return {
        "step_ms": spread(median(step.wall for step in pair.off) for pair in found),
        "recorded_step_ms": spread(median(step.wall for step in pair.on) for pair in found),
        "ratio": spread(ratios),
        "ratio_of_means": spread(pair.ratio(fmean, "wall") for pair in found),
        "processor_time_ratio": spread(pair.ratio(median, "processor") for pair in found),
        "hooks_ms": spread(fmean(pair.hooks_ms) for pair in found),
        "hooks_fraction": spread(fmean(pair.hooks_ms) / fmean(step.wall for step in pair.on) for pair in found),
        "verdict": median(ratios) <= ALLOWED,
    }


def table_of(record: dict[str, Any]) -> Table:
    """The figures, with their 5th and 95th percentile over the pairs."""
    inputs, figures = record["inputs"], record["figures"]
    table = Table(title=f"{inputs['model']}, {inputs['micro_batch']} × {inputs['sequence']} tokens, {inputs['device']}")
    for name in ("", "median", "5 - 95%"):
        table.add_column(name, justify="right" if name else "left")
    for name, digits in {
        "step_ms": 2,
        "recorded_step_ms": 2,
        "ratio": 4,
        "ratio_of_means": 4,
        "processor_time_ratio": 4,
        "hooks_ms": 4,
        "hooks_fraction": 5,
    }.items():
        of = figures[name]
        table.add_row(
            name.replace("_", " "), f"{of['median']:.{digits}f}", f"{of['p5']:.{digits}f} - {of['p95']:.{digits}f}"
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and print it; 1 if the hooks cost more than they may."""
    arguments = parser(__doc__ or "").parse_args(argv)
    results = Results.of(HERE, arguments)
    device = default_torch_device()
    pairs, steps = (QUICK_PAIRS, QUICK_STEPS) if arguments.quick else (PAIRS, STEPS)
    size: dict[str, Any] = CPU_SIZE if device.type == "cpu" else GPU_SIZE
    if device.type == "cpu":
        torch.set_num_threads(1)  # torch's threads wait for each other in a busy loop, which any other process prolongs
    inputs = {
        **size,
        "pairs": pairs,
        "steps": steps,
        "device": str(device),
        "torch": torch.__version__,
    }
    inputs["code"] = code_digest(*CODE)
    name = f"overhead-{device.type}"
    record = None if arguments.again else results.load(name, inputs)
    if record is None:
        with Console(stderr=True).status("") as status:
            record = results.save(name, inputs, measure(size, device, pairs, steps, status.update))
    Console(width=None if sys.stdout.isatty() else 120).print(table_of(record))
    if arguments.json:
        write_json(arguments.json, {"study": HERE.name, "quick": arguments.quick, "records": {name: record}})
    return 0 if record["figures"]["verdict"] or arguments.quick else 1


if __name__ == "__main__":
    sys.exit(main())
