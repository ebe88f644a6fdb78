"""A search over ranks that share a model by rows (FSDP2), each on a rig of its own, beside one rank with all of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from tests.tiers import by_day
from tests.zenflow.rank_runs import results_of_ranks
from tests.zftune.thinkers import FORKING
from zenflow import EmulatedAccelerator, Rig, ZenFlowAdamW, ZenFlowConfig
from zftune.tuner import thinker
from zftune.tuner.disturbances import NoDisturbance
from zftune.tuner.facts import ALONE, Company, Reader, Seen, Wishes
from zftune.tuner.following import Tuner
from zftune.tuner.own_counsel import OwnCounsel
from zftune.tuner.ranks.accord import Accord
from zftune.tuner.ranks.attaching import attach_ranks
from zftune.tuner.scores import score
from zftune.tuner.search import SearchOptions
from zftune.tuner.settings import Setting

RANKS, WIDTH, ROWS = 2, 32, 4
MOST = by_day(5, all_of=12)
"""Measurements."""
MOST_STEPS = 1000
SEARCH = SearchOptions(sampler="random", most_measurements=MOST, hold=True, thinking_s=0.1)
WISHES = Wishes(quality="loose", micro_batch=ROWS, sequence=1, fresh=True, search=SEARCH)
OWN = ZenFlowConfig(topk_ratio=0.05, update_interval=2, select_interval=16, host_threads=1)


def rig_of(ranks: int) -> Rig:
    """On which a rank takes as long for its rows as one does for all on a rig that is so much faster."""
    times = 2 / ranks
    return Rig(
        "ranks",
        "",
        forward_ms=10.0,
        backward_ms=20.0,
        link_d2h_gbps=2e-2 * times,
        link_h2d_gbps=2e-2 * times,
        host_gbps=1e-3 * times,
        device_gbps=1.0 * times,
        scale=1.0,
    )


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Tanh(), nn.Linear(3 * WIDTH, WIDTH, bias=False)),
        nn.Linear(WIDTH, 16, bias=False),
    ]
    return nn.Sequential(*layers).to(torch.bfloat16)


class Training:
    """One rank of it, which is tuned."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks
        self.module = model_of()
        if ranks > 1:
            from torch.distributed.fsdp import fully_shard

            for unit in (self.module[0], self.module):
                fully_shard(unit)
        self.device = EmulatedAccelerator(rig_of(ranks))
        self.optimizer = ZenFlowAdamW(
            self.module.parameters(), lr=1e-3, config=OWN, module=self.module, device=self.device
        )
        self.device.attach(self.module)
        self.tuner = self._begin(ALONE) if ranks == 1 else attach_ranks(self.optimizer, self._begin, None)
        self._batches = torch.Generator().manual_seed(7)

    def _begin(self, company: Company, accord: Accord | None = None) -> Tuner:
        self.reader = Reader(self.optimizer, WISHES, remembered=False, company=company)
        counsel = OwnCounsel(self.optimizer, WISHES, False, company)
        return Tuner(self.optimizer, counsel, tokens=ROWS, disturbance=NoDisturbance(), accord=accord)

    def step(self) -> None:
        """Of the same batch, however many ranks have it."""
        batch = torch.randn(RANKS * ROWS, WIDTH, generator=self._batches).bfloat16()
        loss = self.module(batch.chunk(self.ranks)[self.rank]).float().square().mean() + 1
        self.tuner.log_loss(loss)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def search(self) -> dict[str, Any]:
        """Train until the search is over; what it found."""
        while not self._is_over():
            self.step()
            assert self.optimizer.steps < MOST_STEPS
        self.tuner.close()
        for _ in range(3):  # the last words
            self.step()
        found = {"knobs": Setting.of(self.optimizer.config).knobs()}
        if self.rank == 0:
            found |= self._found()
        self.optimizer.abandon()
        self.device.close()
        return found

    def _is_over(self) -> bool:
        over = torch.tensor([int(not self.tuner.searching)])
        if self.ranks > 1:
            torch.distributed.broadcast(over, 0)
        return bool(over)

    def _found(self) -> dict[str, Any]:
        search = self.tuner.search
        assert search is not None
        forecast = search.book.forecast(search.book.trials[0].setting)
        measured = [trial for trial in search.book.trials if trial.samples]
        return {
            "company": asdict(self.reader.facts(Seen(OWN, (), has_loss=True)).company),
            "notices": self.tuner.notices,
            "best": search.book.incumbent.setting.knobs(),
            "gain": None if search.book.gain is None else search.book.gain.share,
            "stopped": [note.reason for note in search.notes if note.kind == "stop"],
            "budget": search.book.space.budget,
            "host_bytes": [forecast.host_bytes, search.book.trials[0].host_bytes],
            "measured": [
                [one.number, one.setting.knobs(), score(one.samples), search.book.forecast(one.setting).step_ms]
                for one in measured
            ],
        }


def take_part(rank: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thinker, "subprocess", FORKING)
        return Training(rank, RANKS).search()


WORK = {"search": take_part}
"""What all ranks do together."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    module = "tests.zftune.tuner.ranks.test_sharded"
    found = [one["search"] for one in results_of_ranks(folder, module, list(WORK), RANKS, with_accelerate=True)]
    assert not any("error" in one for one in found), found
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thinker, "subprocess", FORKING)
        return Training().search()


def test_ranks_find_what_one_rank_finds(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    first, second = ranks
    assert first["best"] == first["knobs"] == second["knobs"] == alone["best"] != Setting.of(OWN).knobs()
    assert (first["stopped"], first["notices"]) == (alone["stopped"], [])
    assert first["gain"] == pytest.approx(alone["gain"], abs=0.01)
    assert first["budget"] == pytest.approx(alone["budget"], rel=1e-4)
    for (*what, score_, predicted_ms), (*other, score_alone, predicted_alone_ms) in zip(
        first["measured"], alone["measured"], strict=True
    ):
        assert what == other
        assert score_ == pytest.approx(score_alone, rel=0.03)
        assert predicted_ms == pytest.approx(predicted_alone_ms, rel=0.001)


def test_the_planner_knows_of_the_ranks(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    (predicted, taken), (all_predicted, all_taken) = ranks[0]["host_bytes"], alone["host_bytes"]
    assert predicted == taken < 0.51 * all_taken
    assert all_predicted == all_taken
    assert ranks[0]["company"] == {"ranks": 2, "here": 2, "nodes": 1, "shards": 2}
    assert alone["company"] == {"ranks": 1, "here": 1, "nodes": 1, "shards": 1}
