"""A training with a search in it, step by step: what each step belongs to, and what it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from zenflow import ZenFlowConfig
from zenflow.device import default_torch_device
from zftune.emulation.machines import load_rig
from zftune.profile.measure import Task, Training
from zftune.store import open_store
from zftune.tuner.executor import Executor, TuningContext, live_search
from zftune.tuner.record import StoreRecorder
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.setup import Prepared, Reader, TuneRequest, WarmupStats, prepare
from zftune.tuner.states import OF_INCUMBENT, Outcome
from zftune.tuner.worker import Answer, ThreadWorker
from zftune.workload import load_text

RIG = "host-heavy"
THINKING_S = 1.0
"""Simulated time that a thought takes: about what one takes in real time on 15% of a core."""
WARM_UP_STEPS = 34
PLAIN_STEPS, SETTLING_STEPS = 24, 12  # before the thinking begins; of these, those after the change of knobs
CONFIG = ZenFlowConfig(topk_ratio=0.1, update_interval=4, select_interval=32, host_threads=1, ledger=True)
RIG_CONFIG = ZenFlowConfig(topk_ratio=0.1, update_interval=4, select_interval=1 << 20, host_threads=1, ledger=True)
"""Selections stay as they are but for changes of knobs, so that a setting has one time."""

Kind = Literal["plain", "thinking", "settling", "trial"]


def task_of(seed: int, *, real_time: bool) -> Task:
    """What trains: on the rig, or for real on this machine."""
    device = default_torch_device() if real_time else torch.device("cpu")
    model, micro_batch, sequence = "tiny", 1, 32
    if real_time:  # about 50 ms a step of real work on one thread
        model, micro_batch, sequence = ("small", 8, 512) if device.type == "cuda" else ("tiny", 4, 128)
    return Task(
        model=model,
        corpus=load_text(None),
        dtype=torch.float32 if real_time else torch.bfloat16,
        micro_batch=micro_batch,
        sequence=sequence,
        seed=seed,
        torch_device=device,
        rig=None if real_time else load_rig(RIG),
        learning_rate=1e-5,  # with which weights move little enough for late updates
    )


def config_of(*, real_time: bool) -> ZenFlowConfig:
    """What it begins with."""
    return CONFIG if real_time else RIG_CONFIG


@dataclass(frozen=True, slots=True)
class Handed:
    """What came of a request."""

    of_incumbent: bool
    measured: Sequence[float]
    """Step times, ms."""
    discarded: Sequence[float]


class PatientDesk(ThreadWorker):
    """Begins to think only after some steps, which show what steps take while nobody thinks."""

    handed: list[Handed]
    resting = False
    _outcome: Outcome | None = None
    _left = 0

    def hand(self, outcome: Outcome | None) -> None:
        """Take what came of a request, and rest."""
        if outcome is not None and self._asked is not None:
            self.handed.append(
                Handed(self._asked.role in OF_INCUMBENT, tuple(outcome.steps_ms), tuple(outcome.discarded_ms))
            )
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


@dataclass(slots=True)
class Step:
    """One step of the training."""

    number: int
    kind: Kind
    ms: float
    on_step_ms: float
    """What of it looking after the search takes in the training thread; real time."""
    migrated_bytes: int = 0
    """Of columns that moved."""
    closed: bool = False


@dataclass(slots=True)
class Searched:
    """What a training with a search in it was like."""

    prepared: Prepared
    steps: list[Step]
    handed: list[Handed]
    changes: int
    """Of knobs."""
    weights: int
    balanced: int
    """Of the weights' ledgers."""


class Run:
    """A training, and a search in it with everything that `zftune.attach` uses; from entering to leaving.

    Args:
        seed: of the weights, the batches and the search.
        most: measurements.
        folder: for the store.
        real_time: whether it trains for real on this machine, and not on the rig.
    """

    def __init__(self, seed: int, most: int, folder: Path, *, real_time: bool) -> None:
        self._cleanup = ExitStack()
        self._real_time = real_time
        task = task_of(seed, real_time=real_time)
        self.training = self._cleanup.enter_context(Training(task, config_of(real_time=real_time)))
        self._store = open_store(f"sqlite:///{folder}/zftune.db")
        self._cleanup.callback(self._store.close)
        options = SearchOptions(seed=seed, most_measurements=most, thinking_s=None if real_time else THINKING_S)
        wishes = TuneRequest(quality="published", micro_batch=task.micro_batch, sequence=task.sequence, search=options)
        self._reader = Reader(self.training.optimizer, wishes)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def search(self, worker: type[PatientDesk] = PatientDesk) -> Searched:
        """Warm up, and search until the search is over."""
        optimizer = self.training.optimizer
        for _ in range(WARM_UP_STEPS):
            self.training.step()
        seen = WarmupStats(optimizer.config, tuple(optimizer.history()), has_loss=True)
        prepared = prepare(self._reader.facts(seen), self._store)
        desks: list[PatientDesk] = []
        changes: list[int] = []

        def make(search: Search, recorder: StoreRecorder | None) -> PatientDesk:
            desks.append(worker(search, recorder, optimizer.device.clock))
            desks[0].handed = []
            return desks[0]

        scene = TuningContext(
            optimizer=optimizer, tokens=self.training.tokens, on_change=lambda step, _: changes.append(step)
        )
        live = live_search(scene, prepared.search, recorder=prepared.recorder, worker=make)
        try:
            steps = self._train(live, desks[0])
        finally:
            live.close()
        optimizer.flush()
        balances = optimizer.ledger().values()
        balanced = sum(balance.balanced for balance in balances)
        return Searched(prepared, steps, desks[0].handed, len(changes), len(balances), balanced)

    def _train(self, live: Executor, worker: PatientDesk) -> list[Step]:
        steps: list[Step] = []
        optimizer, since, going = self.training.optimizer, 0, True
        while going:
            begin = time.perf_counter()
            between, resting = live.request is None, worker.resting
            loss = self.training.step()
            asked = time.perf_counter()
            going = live.on_step(loss)
            end = time.perf_counter()
            since = since + 1 if between else 0
            kind: Kind = "trial"
            if between and live.request is None:
                kind = "settling" if since <= SETTLING_STEPS else "plain" if resting else "thinking"
            steps.append(Step(optimizer.steps, kind, 1e3 * (end - begin), 1e3 * (end - asked)))
        stats = {one.step: one for one in optimizer.history(after=steps[0].number - 1, wait=True)}
        for step in steps:
            found = stats[step.number]
            step.migrated_bytes, step.closed = found.migrated_bytes, found.closed
            if not self._real_time:
                step.ms = found.step_ms or 0.0
        return steps
