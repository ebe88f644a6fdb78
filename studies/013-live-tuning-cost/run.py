"""What does a search cost the training outside its measurements? See README.md beside this file."""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from beside import ratios  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from studykit import Results, code_digest, parser, spread, write_json  # noqa: E402

from zenflow import ZenFlowAdamW, ZenFlowConfig  # noqa: E402
from zenflow.device import default_torch_device, device_for  # noqa: E402
from zftune.store import open_store  # noqa: E402
from zftune.tuner.live import LiveSearch  # noqa: E402
from zftune.tuner.preparing import Preparation, Prepared, Seen, Wishes  # noqa: E402
from zftune.tuner.search import SearchOptions  # noqa: E402
from zftune.tuner.states import Outcome  # noqa: E402
from zftune.tuner.thinker import Thinker, gentle_share  # noqa: E402
from zftune.tuner.thinking import Answer, ThreadDesk  # noqa: E402
from zftune.workload import batches, build_model, load_text  # noqa: E402

ALLOWED = 0.01
CODE = ("studies/013-live-tuning-cost", "zftune/tuner", "runtime/zenflow", "zftune/workload")
SEEDS, QUICK_SEEDS = 2, 1
MEASUREMENTS, QUICK_MEASUREMENTS = 16, 6
PAIRS, QUICK_PAIRS, PAIR_STEPS = 150, 10, 8
PLAIN_STEPS, SETTLING_STEPS = 24, 8  # before the thinking begins; of these, those after the change of knobs
CONFIG = ZenFlowConfig(topk_ratio=0.1, update_interval=4, select_interval=32, host_threads=1, ledger=True)
CPU_SIZE: dict[str, Any] = {
    "model": "tiny",
    "micro_batch": 4,
    "sequence": 128,
}  # about 50 ms a step of real work on one thread
GPU_SIZE: dict[str, Any] = {"model": "small", "micro_batch": 8, "sequence": 512}


class PatientDesk(ThreadDesk):
    """Begins to think only after some steps, which show what steps take while nobody thinks."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.resting = False
        self._outcome: Outcome | None = None
        self._left = 0

    def hand(self, outcome: Outcome | None) -> None:
        """Take what came of a request, and rest."""
        self._outcome, self._left, self.resting = outcome, PLAIN_STEPS, True

    def poll(self) -> Answer | None:
        """Begin to think, or look whether that is over."""
        if not self.resting:
            return super().poll()
        self._left -= 1
        if self._left <= 0:
            self.resting = False
            super().hand(self._outcome)
        return None


@dataclass(frozen=True, slots=True)
class Timed:
    """A step that belongs to no measurement, under the incumbent's knobs, ms."""

    step: int
    ms: float
    on_step_ms: float
    """What of it looking after the search takes in the training thread."""


@dataclass(slots=True)
class Gap:
    """Steps between two measurements."""

    thinking: list[Timed] = field(default_factory=list)
    plain: list[Timed] = field(default_factory=list)

    def extra(self, closes: Sequence[int]) -> dict[str, float] | None:
        """What thinking steps take beyond plain ones at the same place of a window, in all; None: there are none.

        Args:
            closes: the steps that closed a window.
        """
        usual: dict[int, list[float]] = defaultdict(list)
        for one in self.plain:
            usual[_place(one.step, closes)].append(one.ms)
        known = [one for one in self.thinking if _place(one.step, closes) in usual]
        if not known:
            return None
        expected = sum(statistics.fmean(usual[_place(one.step, closes)]) for one in known)
        return {
            "extra_ms": sum(one.ms for one in known) - expected,
            "expected_ms": expected,
            "on_step_ms": sum(one.on_step_ms for one in (*known, *self.plain)),
            "all_ms": sum(one.ms for one in (*known, *self.plain)),
        }


def _place(step: int, closes: Sequence[int]) -> int:
    """Steps since the last close."""
    return step - max((close for close in closes if close < step), default=0)


class Run:
    """A training, and a search in it.

    Args:
        seed: of the weights, the batches and the search.
        most: measurements.
        folder: for the store.
    """

    def __init__(self, seed: int, most: int, folder: Path) -> None:
        torch_device = default_torch_device()
        size = GPU_SIZE if torch_device.type == "cuda" else CPU_SIZE
        self._device = device_for(torch_device)
        workload = build_model(str(size["model"]), dtype=torch.float32, seed=seed)
        self.module = workload.module.to(torch_device)
        tokens = workload.encode(load_text(None))
        micro_batch, sequence = int(size["micro_batch"]), int(size["sequence"])
        self._feed = batches(tokens, micro_batch=micro_batch, sequence=sequence, seed=seed)
        self.optimizer = ZenFlowAdamW(self.module.parameters(), lr=1e-4, config=CONFIG, module=self.module)
        self._tokens = micro_batch * sequence
        self._store = open_store(f"sqlite:///{folder}/zftune.db")
        self._thinker = Thinker(share=gentle_share())  # as zftune.attach does
        options = SearchOptions(seed=seed, most_measurements=most)
        wishes = Wishes(quality="published", micro_batch=micro_batch, sequence=sequence, search=options)
        self._preparation = Preparation(self.optimizer, wishes, self._store, self._thinker)
        self.gaps: list[Gap] = []
        self.steps_ms: list[float] = []
        self.closes: list[int] = []

    def step(self) -> torch.Tensor:
        """One step of training."""
        ids = next(self._feed).input_ids.to(self._device.torch_device)
        loss: torch.Tensor = self.module(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def search(self) -> Prepared:
        """Warm up, and search until the search is over."""
        for _ in range(CONFIG.select_interval + 2):  # type: ignore[operator] # a number above
            self.step()
        seen = Seen(self.optimizer.config, tuple(self.optimizer.history()), has_loss=True)
        prepared = self._preparation.prepare(seen)
        desks: list[PatientDesk] = []

        def desk(*arguments: Any) -> PatientDesk:
            desks.append(PatientDesk(*arguments, self._thinker))
            return desks[0]

        live = LiveSearch(self.optimizer, prepared.search, tokens=self._tokens, recorder=prepared.recorder, desk=desk)
        try:
            self._train(live, desks[0])
        finally:
            live.close()
            self._store.close()
        return prepared

    def _train(self, live: LiveSearch, desk: PatientDesk) -> None:
        gap, since, going = Gap(), 0, True
        while going:
            begin = time.perf_counter()
            between, resting = live.request is None, desk.resting
            loss = self.step()
            asked = time.perf_counter()
            going = live.on_step(loss)
            end = time.perf_counter()
            self.steps_ms.append(1e3 * (end - begin))
            self.closes += [one.step for one in self.optimizer.history()[-1:] if one.closed]
            since = since + 1 if between else 0
            if between and live.request is None and since > SETTLING_STEPS:
                step = Timed(self.optimizer.steps, 1e3 * (end - begin), 1e3 * (end - asked))
                (gap.plain if resting else gap.thinking).append(step)
            elif not between and (gap.thinking or gap.plain):
                self.gaps.append(gap)
                gap = Gap()


def figures_of(run: Run, prepared: Prepared) -> dict[str, Any]:
    """What a run showed."""
    closes = sorted(set(run.closes))
    extras = [found for gap in run.gaps if (found := gap.extra(closes)) is not None]
    run.optimizer.flush()
    balances = run.optimizer.ledger()
    return {
        "step_ms": statistics.median(run.steps_ms),
        "gaps": extras,
        "thinking_steps": sum(len(gap.thinking) for gap in run.gaps),
        "steps": len(run.steps_ms),
        "measurements": prepared.search.measurements,
        "settings_measured": sum(bool(trial.samples) for trial in prepared.search.book.trials),
        "weights": len(balances),
        "balanced": sum(balance.balanced for balance in balances.values()),
        "stopped": prepared.search.notes[-1].reason,
    }


def searched(seed: int, most: int) -> dict[str, Any]:
    """One run."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(seed, most, Path(folder))
        return figures_of(run, run.search())


def beside(pairs: int) -> list[float]:
    """Ratios of steps beside thinking to steps without."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(0, MEASUREMENTS, Path(folder))

        def train(steps: int) -> float:
            begin = time.perf_counter()
            for _ in range(steps):
                run.step()
            return 1e3 * (time.perf_counter() - begin)

        train(CONFIG.select_interval + 2)  # type: ignore[operator] # a number above
        return ratios(train, CONFIG, pairs, PAIR_STEPS)


def verdicts(runs: Sequence[dict[str, Any]], pairs: Sequence[float]) -> tuple[dict[str, Any], list[tuple[str, bool]]]:
    """The figures together, and each promise."""
    gaps = list(itertools.chain.from_iterable(run["gaps"] for run in runs))
    while_thinking = spread(ratio - 1 for ratio in pairs)
    hooks = spread(gap["on_step_ms"] / gap["all_ms"] for gap in gaps)
    figures = {"beside thinking": while_thinking, "of a step, in the training thread": hooks}
    balanced, weights = sum(run["balanced"] for run in runs), sum(run["weights"] for run in runs)
    return figures, [
        (
            f"a step outside a measurement takes {while_thinking['median']:+.2%} while somebody thinks",
            while_thinking["median"] <= ALLOWED,
        ),
        (f"{hooks['median']:.2%} of such a step is spent in the training thread", hooks["median"] <= ALLOWED),
        (f"{balanced} of {weights} ledgers are balanced after the search", balanced == weights),
    ]


def main() -> int:
    """Command line; 1 where a promise was not kept."""
    arguments = parser(__doc__ or "").parse_args()
    results = Results.of(HERE, arguments)
    seeds, most = (QUICK_SEEDS, QUICK_MEASUREMENTS) if arguments.quick else (SEEDS, MEASUREMENTS)
    runs = []
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("searches", total=seeds)
        for seed in range(seeds):
            inputs = {"seed": seed, "measurements": most, "config": asdict(CONFIG), "code": code_digest(*CODE)}
            record = None if arguments.again else results.load(f"search-{seed}", inputs)
            if record is None:
                record = results.save(f"search-{seed}", inputs, searched(seed, most))
            runs.append(record["figures"])
            progress.update(bar, completed=seed + 1)
        count = QUICK_PAIRS if arguments.quick else PAIRS
        inputs = {"pairs": count, "steps": PAIR_STEPS, "config": asdict(CONFIG), "code": code_digest(*CODE)}
        record = None if arguments.again else results.load("beside", inputs)
        if record is None:
            record = results.save("beside", inputs, {"ratios": beside(count)})
    figures, verdict = verdicts(runs, record["figures"]["ratios"])
    step_ms, steps = statistics.median(run["step_ms"] for run in runs), sum(run["steps"] for run in runs)
    gaps = [gap for run in runs for gap in run["gaps"]]
    pooled = sum(gap["extra_ms"] for gap in gaps) / sum(gap["expected_ms"] for gap in gaps)
    lines = [
        f"in the searches' own {len(gaps)} gaps: {pooled:+.1%}, with errors of several percent",
        f"{steps} steps of {step_ms:.1f} ms, {sum(run['measurements'] for run in runs)} measurements",
        *(
            f"{name}: {one['median']:.4f} [{one['p5']:.4f} - {one['p95']:.4f}], n = {one['n']}"
            for name, one in figures.items()
        ),
        *(f"{'kept' if kept else 'BROKEN'}: {text}" for text, kept in verdict),
    ]
    Console(width=None if sys.stdout.isatty() else 140).print("\n".join(lines))
    (results.folder / "table.md").write_text("".join(f"- {line}\n" for line in lines), encoding="utf-8")
    if arguments.json:
        checked = [{"text": text, "kept": kept} for text, kept in verdict]
        write_json(arguments.json, {"figures": figures, "runs": runs, "verdicts": checked})
    return 0 if all(kept for _, kept in verdict) else 1


if __name__ == "__main__":
    sys.exit(main())
