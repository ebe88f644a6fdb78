"""A search over ranks that share a model, or its state, by rows, each on a rig of its own, beside one rank with all.

By this process, and by a real daemon, of which what it shows of the ranks is looked at.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.zenflow.rank_runs import results_of_ranks
from tests.support.zftune.daemon.daemons import COMMAND, serving, short_folder, zftune
from zenflow import Partition, ZenFlowAdamW, ZenFlowConfig
from zftune.attaching import attach_ranks
from zftune.daemon.client.driver import DaemonDriver
from zftune.daemon.client.http import DaemonClient
from zftune.emulation import EmulatedAccelerator, Rig
from zftune.explain.summary import RunSummary
from zftune.planner.machine import rig_machine
from zftune.planner.model import Job, ModelFacts
from zftune.planner.rates import Rates
from zftune.planner.simulate import simulate
from zftune.planner.split import split_of
from zftune.store import open_store
from zftune.store.store import Store
from zftune.tuner.drivers import LocalDriver, SearchDriver
from zftune.tuner.messages import sentence
from zftune.tuner.ranks import KnobConsensus
from zftune.tuner.search import SearchOptions
from zftune.tuner.setup import SINGLE_RANK, Reader, TuneRequest, WarmupStats, WorldInfo, forecast_for
from zftune.tuner.space import Setting
from zftune.tuner.tuner import Tuner

RANKS, WIDTH, ROWS = 2, 32, 4
MOST = 12
"""Measurements."""
MOST_STEPS = 1000
LOOKS = 20
"""Steps between two looks at what a daemon does."""
SEARCH = SearchOptions(sampler="random", most_measurements=MOST, hold=True, thinking_s=0.1)
WISHES = TuneRequest(quality="loose", micro_batch=ROWS, sequence=1, fresh=True, search=SEARCH)
OWN = ZenFlowConfig(topk_ratio=0.05, update_interval=2, select_interval=16, host_threads=1)


WAYS = [(shared, searches) for shared in ("FSDP2", "whole weights") for searches in ("process", "daemon")]
"""How ranks share the model, and who searches."""


OfRanks = Callable[[str, str], list[dict[str, Any]]]


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
    """One rank of it, which is tuned by this process or a daemon. Where each has whole weights, no gradient leaves
    during backward.
    """

    def __init__(self, shared: str, searches: str, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks, self.searches = rank, ranks, searches
        self.folder = TemporaryDirectory()
        self.store: Store | None = None
        self.module = model_of()
        whole = shared == "whole weights"
        if ranks > 1 and not whole:
            from torch.distributed.fsdp import fully_shard

            for unit in (self.module[0], self.module):
                fully_shard(unit)
        self.device = EmulatedAccelerator(rig_of(ranks))
        self.optimizer = ZenFlowAdamW(
            self.module.parameters(),
            lr=1e-3,
            config=replace(OWN, stream=not whole),
            module=self.module,
            device=self.device,
            partition=Partition() if whole else None,
        )
        self.device.attach(self.module)
        self.tuner = self._begin(SINGLE_RANK) if ranks == 1 else attach_ranks(self.optimizer, self._begin, None)
        self._batches = torch.Generator().manual_seed(7)

    def _begin(self, company: WorldInfo, consensus: KnobConsensus | None = None) -> Tuner:
        self.reader = Reader(self.optimizer, WISHES, remembered=False, company=company)
        driver: SearchDriver
        if self.searches == "daemon":
            driver = DaemonDriver(self.optimizer, WISHES, ROWS, DaemonClient(), company)
        else:
            # Alone it is told nothing of ranks, and keeps nothing.
            self.store = open_store(str(Path(self.folder.name) / "z.db")) if company.ranks > 1 else None
            driver = LocalDriver(self.optimizer, WISHES, self.store or False, company)
        return Tuner(self.optimizer, driver, tokens=ROWS, consensus=consensus)

    def step(self) -> None:
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
            if self.optimizer.steps == 60:  # of the settings at the start, which are measured
                self.host_bytes = self.optimizer.host_bytes()
        self.tuner.close()
        for _ in range(3):  # the last words
            self.step()
        found = {"knobs": Setting.of(self.optimizer.config).knobs()}
        if self.rank == 0:
            found |= self._found()
        if self.store is not None:
            self.store.close()
        self.folder.cleanup()
        self.optimizer.abandon()
        self.device.close()
        return found

    def _is_over(self) -> bool:
        over = torch.tensor([int(self.rank == 0 and self._has_found())])
        if self.ranks > 1:
            torch.distributed.broadcast(over, 0)
        return bool(over)

    def _has_found(self) -> bool:
        """Whether the search is over; a daemon holds what it has found, and stays."""
        if self.searches != "daemon":
            return not self.tuner.searching
        if self.optimizer.steps % LOOKS:
            return False
        with DaemonClient() as client:
            own = [run for run in client.get("/v1/runs") if run["pid"] == os.getpid() and run["state"] != "ended"]
        return any(run["state"] == "frozen" for run in own)

    def _found(self) -> dict[str, Any]:
        if self.searches == "daemon":
            return {"notices": self.tuner.notices, "best": self.tuner.incumbent.knobs()}
        search = self.tuner.search
        assert search is not None
        forecast, taken = search.forecast(search.book.trials[0].setting), self.host_bytes
        measured = [trial for trial in search.book.trials if trial.blocks]
        return {
            "company": asdict(self.reader.facts(WarmupStats(OWN, (), has_loss=True)).company),
            "notices": self.tuner.notices,
            "ranks_ms": None
            if self.store is None
            else RunSummary.read(self.store, self.store.runs()[0]).document()["ranks_ms"],
            "best": search.book.incumbent.setting.knobs(),
            "gain": None if search.book.gain is None else search.book.gain.share,
            "stopped": [sentence(note) for note in search.notes if note.kind == "stop"],
            "budget": search.space.budget,
            "host_bytes": [forecast.host_bytes, sum(n for use, n in taken.items() if use not in ("spare", "peak"))],
            "measured": [
                [one.number, one.setting.knobs(), math.exp(one.log_us), search.forecast(one.setting).step_ms]
                for one in measured
            ],
        }


def take_part(shared: str, searches: str, rank: int) -> dict[str, Any]:
    return Training(shared, searches, rank, RANKS).search()


WORK = {f"{shared}, {searches}": partial(take_part, shared, searches) for shared, searches in WAYS}
"""What all ranks do together."""


@pytest.fixture(scope="module")
def served() -> Iterator[Path]:
    """The folder of a real daemon, with its store."""
    with short_folder() as folder, serving(folder, module=COMMAND, more={"ZFTUNE_DB": str(folder / "z.db")}):
        yield folder


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory, served: Path) -> OfRanks:
    @cache
    def found(shared: str, searches: str) -> list[dict[str, Any]]:
        name = f"{shared}, {searches}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ZFTUNE_SOCKET", str(served / "z.sock"))
            patch.setenv("ZFTUNE_DB", str(served / "z.db"))
            folder = tmp_path_factory.mktemp("ranks")
            patience_s = 600.0 if searches == "daemon" else 60.0  # it thinks when nobody else wants a processor
            each = results_of_ranks(folder, __name__, [name], RANKS, with_accelerate=True, patience_s=patience_s)
        results = [one[name] for one in each]
        assert not any("error" in one for one in results), results
        return results

    return found


@cache
def found_alone(shared: str) -> dict[str, Any]:
    """What a rank that is alone has found, whose gradients leave as those of ranks do."""
    return Training(shared, "process").search()


def without_movement(notices: list[str]) -> tuple[list[str], list[float]]:
    """Notices, and apart from them how far they say that weights move, in percent."""
    pattern = r"(?<=weights would move )[\d.]+(?=%)"
    return [re.sub(pattern, "?", one) for one in notices], [float(one) for one in re.findall(pattern, str(notices))]


@pytest.mark.parametrize(("shared", "searches"), WAYS)
def test_ranks_find_what_one_rank_finds(of_ranks: OfRanks, shared: str, searches: str) -> None:
    (first, second), alone = of_ranks(shared, searches), found_alone(shared)
    assert first["best"] == first["knobs"] == second["knobs"] == alone["best"] != Setting.of(OWN).knobs()
    (said, moved), (said_alone, moved_alone) = (without_movement(one["notices"]) for one in (first, alone))
    assert said == said_alone
    # A window's movement is seen in the step that has its weights first: a step later where the host is late for them.
    assert moved == pytest.approx(moved_alone, rel=0.1)
    if searches == "daemon":
        return
    assert first["stopped"] == alone["stopped"]
    assert first["gain"] == pytest.approx(alone["gain"], abs=0.02)  # as exact as the times below
    assert first["budget"] == pytest.approx(alone["budget"], rel=0.1)
    for (*what, score_, predicted_ms), (*other, score_alone, predicted_alone_ms) in zip(
        first["measured"], alone["measured"], strict=True
    ):
        assert what == other
        assert score_ == pytest.approx(score_alone, rel=0.03)
        assert predicted_ms == pytest.approx(predicted_alone_ms, rel=0.002)


@pytest.mark.parametrize("shared", ["FSDP2", "whole weights"])
def test_what_steps_take_each_rank_is_written_down(of_ranks: OfRanks, shared: str) -> None:
    own, other = of_ranks(shared, "process")[0]["ranks_ms"]
    assert other == pytest.approx(own, rel=0.01)
    assert own > 30.0  # its forward and backward


@pytest.mark.parametrize("shared", ["FSDP2", "whole weights"])
def test_the_planner_knows_of_the_ranks(of_ranks: OfRanks, shared: str) -> None:
    (first, _), alone = of_ranks(shared, "process"), found_alone(shared)
    (predicted, taken), (all_predicted, all_taken) = first["host_bytes"], alone["host_bytes"]
    assert predicted == taken < 0.51 * all_taken
    assert all_predicted == all_taken
    whole = shared == "whole weights"
    assert first["company"] == {"ranks": 2, "here": 2, "nodes": 1, "shards": 2, "keeps_whole": whole}
    assert alone["company"] == {"ranks": 1, "here": 1, "nodes": 1, "shards": 1, "keeps_whole": False}


@pytest.mark.parametrize("shared", ["FSDP2", "whole weights"])
def test_the_daemon_and_explain_show_the_ranks(of_ranks: OfRanks, served: Path, shared: str) -> None:
    """A run is all ranks' together, by the first one's figures."""
    of_ranks(shared, "daemon")
    with DaemonClient(served / "z.sock") as client:
        runs = client.get("/v1/runs")
    assert {run["ranks"] for run in runs} == {"2 ranks, state sharded"}
    told = zftune(served, "explain", ZFTUNE_DB=str(served / "z.db"))
    assert told.returncode == 0, told.stderr
    assert "2 ranks, state sharded; measured on rank 0, since ranks wait for each other in each step" in told.stdout


@pytest.mark.parametrize("keeps_whole", [False, True])
def test_a_search_is_predicted_as_its_ranks_share_the_model(keeps_whole: bool) -> None:
    model, rig = ModelFacts.from_module("model", model_of()), replace(rig_of(RANKS), comm_gbps=2e-4)
    company = WorldInfo(ranks=2, here=2, shards=2, keeps_whole=keeps_whole)
    found = forecast_for(model, rig_machine(rig), Job(), OWN, company=company, rig=rig)
    rates = Rates.of_rig(rig, ranks=2, keeps_whole=keeps_whole)
    assert found(Setting.of(OWN)).step_ms == simulate(rates, split_of(model, OWN), OWN).step_ms
