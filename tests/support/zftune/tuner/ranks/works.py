"""Trainings of two gloo ranks that are tuned, each in processes of its own; what they saw is told in JSON."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zftune
from zenflow import HostMemoryError, ZenFlowAdamW, ZenFlowConfig, knobs
from zftune.attaching import attach_ranks
from zftune.errors import ZftuneError
from zftune.tuner import ranks
from zftune.tuner.drivers import LocalDriver
from zftune.tuner.messages import sentence
from zftune.tuner.ranks import KnobConsensus
from zftune.tuner.search import SearchOptions
from zftune.tuner.setup import TuneRequest, WorldInfo
from zftune.tuner.space import Setting
from zftune.tuner.tuner import Tuner

ENDS_S = 100.0
OWN = ZenFlowConfig(topk_ratio=0.1, update_interval=4, host_threads=1)


class Training:
    def __init__(self, rank: int, most: int = 5, config: ZenFlowConfig = OWN) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.module = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))
        self.optimizer = ZenFlowAdamW(self.module.parameters(), lr=1e-5, config=config, module=self.module)
        self.changes: list[tuple[int, Mapping[str, Any]]] = []
        self.consensus: KnobConsensus | None = None
        search = SearchOptions(sampler="random", most_measurements=most, hold=True)
        wishes = TuneRequest(quality="loose", sequence=16, fresh=True, search=search)

        def begin(company: WorldInfo, consensus: KnobConsensus) -> Tuner:
            assert company == WorldInfo(ranks=2, here=2)
            counsel = LocalDriver(self.optimizer, wishes, False, company)
            return Tuner(self.optimizer, counsel, tokens=16, consensus=consensus)

        self.tuner = attach_ranks(self.optimizer, begin, lambda step, made: self.changes.append((step, made)))
        self.seen: list[tuple[int, Any]] = []
        self._batches = torch.Generator().manual_seed(rank + random.randrange(1000) * 2)

    def step(self, scale: float = 1.0) -> None:
        # Never near zero, where any noise is a spike to the guard.
        loss = (self.module(torch.randn(16, 32, generator=self._batches)).square().mean() + 1) * scale
        zftune.log_loss(loss)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        config = self.optimizer.config
        if not self.seen or self.seen[-1][1] != config:
            self.seen.append((self.optimizer.steps, config))
        time.sleep(0.001)

    def run(self, until: Callable[[], bool]) -> None:
        """Train until something holds on rank 0; that is asked outside of what is tested."""
        ends = time.monotonic() + ENDS_S
        while True:
            asked = torch.tensor([int(self.rank == 0 and until())])
            torch.distributed.broadcast(asked, 0)
            if asked:
                return
            self.step()
            assert time.monotonic() < ends, "it takes too long"

    @property
    def tries(self) -> bool:
        return bool(self.changes) and Setting.of(self.optimizer.config) != self.tuner.incumbent

    def digest(self) -> str:
        """Of all weights, as the next forward would see them."""
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in self.module.parameters())).hexdigest()

    def told(self) -> dict[str, Any]:
        self.tuner.close()  # on all ranks
        for _ in range(3):  # the last words
            self.step()
        assert isinstance(self.tuner, Tuner)
        search = self.tuner.search
        told = {
            "changes": self.changes,
            "seen": [
                [step, config.topk_ratio, config.update_interval, config.longest_window] for step, config in self.seen
            ],
            "digest": self.digest(),
            "notices": self.tuner.notices,
            "incumbent": self.tuner.incumbent.knobs(),
            "knobs": Setting.of(self.optimizer.config).knobs(),
            "kept": self.optimizer.kept_knobs,
            "trials": None if search is None else [[str(t.state), t.reason] for t in search.book.trials],
            "notes": None if search is None else [[note.kind, sentence(note)] for note in search.notes],
        }
        self.optimizer.close()
        return told


def tuned(rank: int) -> dict[str, Any]:
    training = Training(rank)
    training.run(lambda: not training.tuner.searching)
    return training.told()


def zen_auto(rank: int) -> dict[str, Any]:
    """Windows have no known length before there is a search."""
    training = Training(rank, most=3, config=replace(OWN, update_interval="auto"))
    training.run(lambda: not training.tuner.searching)
    return training.told()


def silent(rank: int) -> dict[str, Any]:
    """Rank 1 never acknowledges."""
    training = Training(rank)
    ready = KnobConsensus._is_ready
    if rank == 1:
        KnobConsensus._is_ready = lambda *_: False  # type: ignore[method-assign]
    try:
        training.run(lambda: not training.tuner.searching or training.optimizer.steps >= 150)
        return training.told()
    finally:
        KnobConsensus._is_ready = ready  # type: ignore[method-assign]


def short_of_memory(rank: int) -> dict[str, Any]:
    """Rank 1 cannot have another split or another window."""
    training = Training(rank)
    original = knobs._get

    def refuse(runtime: Any, model: Any, change: Any, old: Any, split: Any, host_bytes: int) -> None:
        new = change.config
        if (new.topk_ratio, new.update_interval) != (OWN.topk_ratio, OWN.update_interval):
            raise HostMemoryError("the host has 3 bytes")
        original(runtime, model, change, old, split, host_bytes)

    if rank == 1:
        knobs._get = refuse
    try:
        training.run(lambda: not training.tuner.searching)
        return training.told()
    finally:
        knobs._get = original


def wrong_elsewhere(rank: int) -> dict[str, Any]:
    """Rank 1 has an odd loss; its gradient stays a number."""
    training = Training(rank, most=50)
    training.run(lambda: training.tries)
    if rank == 1:
        training.tuner.log_loss(float("nan"))
    training.run(lambda: not training.tuner.searching)
    return training.told()


def loaded(rank: int) -> dict[str, Any]:
    """A saved state is loaded while another setting is tried."""
    training = Training(rank, most=50)
    for _ in range(6):
        training.step()
    state = copy.deepcopy((training.module.state_dict(), training.optimizer.state_dict()))
    training.run(lambda: training.tries)
    training.module.load_state_dict(state[0])
    training.optimizer.load_state_dict(state[1])
    training.run(lambda: not training.tuner.searching)
    return training.told()


def loaded_tried(rank: int) -> dict[str, Any]:
    """A state is loaded that was saved while a setting was tried, before there is a search."""
    training = Training(rank, most=50)
    _load_tried(training)
    for _ in range(4):
        training.step()
    return training.told()


def loaded_and_closed(rank: int) -> dict[str, Any]:
    """The same, and rank 0 tunes no more."""
    training = Training(rank, most=50)
    _load_tried(training)
    if rank == 0:
        training.tuner.close()
    for _ in range(4):
        training.step()
    return training.told()


def loaded_and_deaf(rank: int) -> dict[str, Any]:
    """The same, and rank 1 does not hear the round in which they would go back."""
    training = Training(rank, most=50)
    _load_tried(training)
    hear = ranks.RankChannel.hear
    if rank == 1:
        ranks.RankChannel.hear = _deaf  # type: ignore[method-assign, assignment]
    try:
        training.step()
    finally:
        ranks.RankChannel.hear = hear  # type: ignore[method-assign]
    for _ in range(4):
        training.step()
    return training.told()


def _deaf(_: ranks.RankChannel) -> tuple[list[ranks.RankMessage], ranks.LeaderMessage]:
    raise ranks.UnheardError("it took too long")


def _load_tried(training: Training) -> None:
    optimizer = training.optimizer
    optimizer.set_knobs(topk_ratio=0.2)
    training.step()
    optimizer.kept_knobs = None
    best = Setting.of(optimizer.config).knobs()
    optimizer.set_knobs(topk_ratio=0.4)
    training.step()
    optimizer.kept_knobs = best
    state = copy.deepcopy((training.module.state_dict(), optimizer.state_dict()))
    optimizer.set_knobs(topk_ratio=OWN.topk_ratio)
    for _ in range(3):
        training.step()
    training.module.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])


def closed_elsewhere(rank: int) -> dict[str, Any]:
    """Rank 1 closes its tuner while a setting that is not the incumbent's runs."""
    training = Training(rank, most=50)
    training.run(lambda: training.tries)
    if rank == 1:
        training.tuner.close()
    training.run(lambda: not training.tuner.searching)
    return training.told()


def alone(rank: int) -> dict[str, Any]:
    """Only rank 0 attaches."""
    optimizer = ZenFlowAdamW(nn.Linear(5, 4).parameters(), lr=1e-5, config=OWN)
    told = {"error": ""}
    if rank == 0:
        _expect(told, lambda: ranks.RankChannel(patience_s=1.0))
    optimizer.close()
    return told


def unfit(rank: int) -> dict[str, Any]:
    """Rank 0 cannot begin."""
    optimizer = ZenFlowAdamW(nn.Linear(5, 4).parameters(), lr=1e-5, config=OWN)
    told = {"error": ""}

    def fail(company: WorldInfo, consensus: KnobConsensus) -> Tuner:
        raise OSError("no disk")

    _expect(told, lambda: attach_ranks(optimizer, fail, None))
    optimizer.close()
    return told


def probed(rank: int) -> dict[str, Any]:
    """A staleness probe is asked for."""
    optimizer = ZenFlowAdamW(nn.Linear(5, 4).parameters(), lr=1e-5, config=OWN)
    told = {"error": ""}
    _expect(told, lambda: zftune.attach(optimizer, store=False, eval_fn=lambda: 1.0))
    optimizer.close()
    return told


def _expect(told: dict[str, Any], call: Callable[[], Any]) -> None:
    try:
        call()
    except (OSError, ZftuneError) as error:
        told["error"] = f"{type(error).__name__}: {error}"


WORKS = {
    one.__name__: one
    for one in (
        tuned,
        zen_auto,
        silent,
        short_of_memory,
        wrong_elsewhere,
        closed_elsewhere,
        loaded,
        loaded_tried,
        loaded_and_closed,
        loaded_and_deaf,
        unfit,
        probed,
        alone,
    )
}


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    here = Path(folder)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{here / 'meet'}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    told: dict[str, Any] = {}
    for name, work in WORKS.items():
        try:
            told[name] = work(rank)
        except Exception as error:  # noqa: BLE001 - told to the test
            told[name] = {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        print(rank, name, flush=True)
    (here / f"rank{rank}.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
