"""Agreement among ranks that do not always hear each other: their network is a table here, to lose words at will."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.support.tiers import repeated
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zftune.emulation import EmulatedAccelerator, Rig
from zftune.tuner.executor import Verdict
from zftune.tuner.ranks import KnobConsensus, LeaderMessage, RankMessage, UnheardError
from zftune.tuner.space import Setting

OWN = ZenFlowConfig(topk_ratio=0.1, update_interval=4, apply_lag=4, host_threads=1)


@dataclass
class Table:
    ranks: int
    said: dict[int, dict[int, tuple[RankMessage, LeaderMessage | None]]] = field(default_factory=dict)
    settled: dict[int, str] = field(default_factory=dict)


class Seat:
    """A rank's place at the table; `deaf` says in which rounds it does not hear the others."""

    def __init__(self, table: Table, rank: int) -> None:
        self.rank, self.size = rank, table.ranks
        self.deaf: Callable[[int], bool] = lambda _: False
        self._table = table
        self._round = 0

    def say(self, word: RankMessage, talk: LeaderMessage | None) -> None:
        self._round += 1
        self._table.said.setdefault(self._round, {})[self.rank] = (word, talk)

    def hear(self) -> tuple[list[RankMessage], LeaderMessage]:
        said = self._table.said[self._round]
        if self.deaf(self._round) or len(said) < self.size:
            raise UnheardError("it took too long")
        talk = said[0][1]
        assert talk is not None
        return [said[rank][0] for rank in range(self.size)], talk

    def settle(self, number: int, wish: str) -> str:
        return self._table.settled.setdefault(number, wish)

    def close(self, most_s: float) -> None:
        return


class Ranks:
    """Some optimizers that take their steps together."""

    def __init__(self, count: int) -> None:
        torch.manual_seed(3)
        table = Table(count)
        self.seats = [Seat(table, rank) for rank in range(count)]
        self.optimizers = [ZenFlowAdamW(nn.Linear(9, 5).parameters(), lr=1e-3, config=OWN) for _ in range(count)]
        self.changes: list[list[tuple[int, Mapping[str, Any]]]] = [[] for _ in range(count)]
        self.accords = [
            KnobConsensus(optimizer, cast("Any", seat), self._noting(seat.rank))
            for optimizer, seat in zip(self.optimizers, self.seats, strict=True)
        ]
        self.verdicts: list[Verdict] = []

    def _noting(self, rank: int) -> Callable[[int, Mapping[str, Any]], None]:
        return lambda step, knobs: self.changes[rank].append((step, knobs))

    def step(self) -> None:
        for optimizer in self.optimizers:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        for consensus in random.sample(self.accords, len(self.accords)):
            consensus.hear()
            consensus.say()
        verdict = self.accords[0].verdict()
        self.verdicts += [] if verdict is None else [verdict]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


@pytest.fixture
def make() -> Iterator[Callable[[int], Ranks]]:
    made: list[Ranks] = []

    def make(count: int) -> Ranks:
        made.append(Ranks(count))
        return made[-1]

    yield make
    for ranks in made:
        for optimizer in ranks.optimizers:
            optimizer.close()


Make = Callable[[int], Ranks]


def some_knobs() -> Mapping[str, Any]:
    window = random.randint(1, 6)
    return Setting(
        topk_ratio=round(random.random(), 3),
        update_interval=window,
        apply_lag=random.randint(1, window),
        host_threads=1,
    ).knobs()


def test_knobs_change_two_steps_after_they_were_proposed(make: Make) -> None:
    ranks, knobs = make(3), some_knobs()
    ranks.step()
    ranks.accords[0].ask(knobs)
    ranks.steps(4)
    assert ranks.changes == [[(5, knobs)]] * 3  # proposed after 2, acknowledged after 3, decided after 4
    assert ranks.verdicts == [Verdict(5)]
    assert [Setting.of(one.config).knobs() for one in ranks.optimizers] == [knobs] * 3


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_rank_that_does_not_acknowledge_voids_the_change(
    make: Make, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, knobs = make(3), some_knobs()
    with monkeypatch.context() as patch:
        patch.setattr(ranks.accords[silent], "_is_ready", lambda _: False)
        ranks.accords[0].ask(knobs)
        ranks.steps(5)
    assert ranks.changes == [[], [], []]
    assert ranks.verdicts == [Verdict(void=f"rank {silent} did not acknowledge the change")]
    ranks.accords[0].ask(knobs)
    ranks.steps(4)
    assert ranks.changes == [[(9, knobs)]] * 3  # the ranks have not parted


def test_knobs_that_no_rank_can_have_are_refused_with_the_reason(make: Make) -> None:
    ranks = make(2)
    ranks.accords[0].ask({**some_knobs(), "update_interval": 2, "apply_lag": 5})
    ranks.steps(4)
    (verdict,) = ranks.verdicts
    assert verdict.step is None
    assert verdict.refused or verdict.void == "rank 1 did not acknowledge the change"
    assert ranks.changes == [[], []]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_what_is_withdrawn_before_it_is_decided_changes_nothing(make: Make, steps: int) -> None:
    ranks = make(2)
    ranks.accords[0].ask(some_knobs())
    ranks.steps(steps)
    ranks.accords[0].withdraw()
    ranks.steps(4)
    if steps < 2:
        assert ranks.changes == [[], []]
    else:
        assert ranks.changes[0] == ranks.changes[1] != []  # rank 0 had acknowledged it
    assert len(ranks.verdicts) == 1


@pytest.mark.parametrize("leaver", [0, 1])
def test_who_leaves_ends_it_for_all_under_the_knobs_to_keep(make: Make, leaver: int) -> None:
    ranks, knobs, keeps = make(2), some_knobs(), Setting.of(OWN).knobs()
    ranks.accords[0].ask(knobs)
    ranks.steps(5)
    ranks.accords[0].keeps = keeps
    ranks.step()
    ranks.accords[leaver].leave()
    ranks.steps(4)
    assert ranks.changes == [[(4, knobs), (9, keeps)]] * 2
    assert all(consensus.over for consensus in ranks.accords)
    assert ranks.accords[1 - leaver].reason == f"Tuning ended: rank {leaver} tunes no more."
    assert ranks.accords[leaver].reason == ""


def test_ranks_hear_of_a_loss_that_goes_wrong(make: Make) -> None:
    ranks = make(3)
    ranks.steps(7)
    ranks.accords[2].wrong_at = 7
    ranks.steps(2)
    (wrong,) = {consensus.wrong for consensus in ranks.accords}
    assert "at step 7 the loss of rank 2 is not a number or a spike." in wrong


def test_all_hear_what_a_step_takes_each_rank() -> None:
    """On rigs that are not equally fast."""
    table = Table(2)
    with ExitStack() as closed:
        optimizers, accords = [], []
        for rank, forward_ms in enumerate((10.0, 16.0)):
            rates = dict.fromkeys(("link_d2h_gbps", "link_h2d_gbps", "host_gbps", "device_gbps"), 1.0)
            rig = Rig("rank", "", forward_ms=forward_ms, backward_ms=20.0, scale=1.0, **rates)
            device, module = EmulatedAccelerator(rig), nn.Linear(9, 5)
            optimizers.append(ZenFlowAdamW(module.parameters(), lr=1e-3, config=OWN, module=module, device=device))
            closed.callback(device.close)
            closed.callback(optimizers[-1].abandon)
            device.attach(module)
            accords.append((module, KnobConsensus(optimizers[-1], cast("Any", Seat(table, rank)))))
        for _ in range(12):
            for (module, _), optimizer in zip(accords, optimizers, strict=True):
                module(torch.ones(2, 9)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            for _, consensus in accords:
                consensus.hear()
                consensus.say()
        for _, consensus in accords:
            first, second = consensus.ranks_ms()
            assert second - first == pytest.approx(6.0, rel=0.01)
            assert first > 30.0


def test_ranks_that_are_not_at_the_same_step_are_not_tuned(make: Make) -> None:
    ranks = make(2)
    for parameter in ranks.optimizers[1].param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    ranks.optimizers[1].step()
    ranks.accords[0].ask(some_knobs())
    ranks.steps(5)
    assert ranks.changes == [[], []]
    assert {consensus.reason for consensus in ranks.accords} == {
        "Tuning ended: the ranks have not taken the same steps."
    }


@pytest.mark.parametrize("deaf", [[0], [1], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("number", range(1, 6))
def test_who_misses_a_round_changes_what_the_others_change(make: Make, deaf: list[int], number: int) -> None:
    ranks, knobs = make(3), some_knobs()
    for rank in deaf:
        ranks.seats[rank].deaf = lambda heard: heard == number
    ranks.accords[0].ask(knobs)
    ranks.steps(8)
    assert ranks.changes[0] == ranks.changes[1] == ranks.changes[2]
    others = {consensus.reason for rank, consensus in enumerate(ranks.accords) if rank not in deaf}
    assert others <= {f"Tuning ended: rank {deaf[0]} tunes no more."}  # they were told, and need not wait
    assert all(consensus.over for consensus in ranks.accords)


@pytest.mark.parametrize("_", range(repeated(40)))
def test_whatever_is_lost_no_rank_is_ever_at_other_knobs_than_another(make: Make, _: int) -> None:
    ranks = make(random.randint(2, 4))
    share = random.choice([0.0, 0.02, 0.1])
    for seat in ranks.seats:
        seat.deaf = lambda _: random.random() < share
    ends = random.randint(5, 35)
    for step in range(40):
        leader = ranks.accords[0]
        if not leader.over and not leader._asked and random.random() < 0.5:
            leader.ask(some_knobs())
        if random.random() < 0.05:
            leader.withdraw()
        leader.keeps = leader.keeps if random.random() < 0.8 else some_knobs()
        if step == ends:
            random.choice(ranks.accords).leave()
        ranks.step()
        assert all(changes == ranks.changes[0] for changes in ranks.changes)
    assert all(consensus.over for consensus in ranks.accords)
    assert ranks.verdicts or not ranks.changes[0]
