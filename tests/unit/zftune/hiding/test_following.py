"""What the line promises is what `--quality published` then wins, on rigs in simulated time."""

from __future__ import annotations

import logging
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zftune
from tests.support.tiers import fast
from zenflow import HostMemoryError, ZenFlowAdamW, ZenFlowConfig
from zftune import hiding
from zftune.emulation import EmulatedAccelerator, Rig
from zftune.emulation.machines import load_rig
from zftune.hiding import FIRST_STEPS, NOTHING_TO_HIDE_BEHIND, follow, waits_for_all
from zftune.profile.measure import Task, Training
from zftune.workload import load_text

EXACT = ZenFlowConfig.zero_offload(pipeline="bucket")
RIGS = ("host-bound", "llama2-7b-4xa100", "qwen2.5-1.5b-2xa100")
MORE = (
    "contended",
    "device-bound",
    "host-heavy",
    "link-bound",
    "llama3-8b-gh200",
    "long-run",
    "slow-core",
    "slow-link",
)
PROMISE = re.compile(
    r"zftune: the device waits (?P<waits>[\d.]+)% of a step for the host; `--quality published` hides it: about "
    r"[\d.]+× the speed, (?P<late>[\d.,]+) ms a step instead of (?P<now>[\d.,]+) ms \((?P<knobs>.*)\); "
    r"weights move (?P<moved>[\d.]+)% in a step"
)
FOUND = re.compile(r"zftune: (?P<knobs>.*) after step (?P<step>\d+), by the planner: about .* instead of .*")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="zftune")
    return lambda: [one for one in caplog.messages if one.startswith("zftune: ")]


def training_on(rig: str, model: Path) -> Training[ZenFlowAdamW]:
    return Training(
        Task(
            model=str(model),
            corpus=load_text(__file__),
            dtype=torch.bfloat16,
            micro_batch=1,
            sequence=16,
            seed=0,
            torch_device=torch.device("cpu"),
            rig=load_rig(rig),
            learning_rate=1e-5,
        ),
        EXACT,
    )


def step_ms(optimizer: ZenFlowAdamW, steps: int) -> float:
    return statistics.fmean(one.step_ms or 0.0 for one in optimizer.history(wait=True)[-steps:])


@pytest.mark.parametrize("rig", fast(RIGS[:1], all_of=(*RIGS, *MORE)))
def test_the_line_says_what_published_then_wins(rig: str, mini_model: Path, lines: Callable[[], list[str]]) -> None:
    with training_on(rig, mini_model) as training:
        follow(training.optimizer, "exact")
        for _ in range(FIRST_STEPS + 4):
            training.step()
        now_ms, config = step_ms(training.optimizer, 8), training.optimizer.config
        stall = statistics.fmean(sum((one.stall_ms or {}).values()) for one in training.optimizer.history()[-8:])
    (line,) = lines()
    promise = PROMISE.fullmatch(line)
    assert promise is not None, line
    promised = {name: float(promise[name].replace(",", "")) for name in ("waits", "late", "now")}
    assert config == EXACT.resolved()
    assert promised["now"] == pytest.approx(now_ms, rel=0.01)
    assert promised["waits"] / 100 == pytest.approx(stall / now_ms, abs=0.01)

    with training_on(rig, mini_model) as training:
        follow(training.optimizer, "published")
        for _ in range(FIRST_STEPS + 4):
            training.step()
        late = training.optimizer.config
        found = FOUND.fullmatch(lines()[-1])
        assert found is not None, lines()
        assert found["knobs"] == promise["knobs"]
        every = late.select_interval
        assert isinstance(every, int)
        for _ in range(2 * every):
            training.step()
        late_ms = step_ms(training.optimizer, every)  # with one selection in them
    assert not waits_for_all(late)
    assert late_ms < now_ms / 1.1
    assert promised["now"] / promised["late"] == pytest.approx(now_ms / late_ms, rel=0.05)


class Loop:
    def __init__(
        self, config: ZenFlowConfig = EXACT, rates: Mapping[str, float] | None = None, lr: float = 1e-5
    ) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))
        self.device: EmulatedAccelerator | None = None
        if rates:
            self.device = EmulatedAccelerator(
                Rig("made up", "", forward_ms=1.0, backward_ms=1.0, scale=1.0, device_gbps=None, **rates)
            )
        self.optimizer = ZenFlowAdamW(
            self.module.parameters(), lr=lr, config=config, module=self.module, device=self.device
        )
        if self.device is not None:
            self.device.attach(self.module)
        self.batches = torch.Generator().manual_seed(1)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.module(torch.randn(16, 32, generator=self.batches)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def close(self) -> None:
        self.optimizer.close()
        if self.device is not None:
            self.device.close()


SLOW_HOST = {"link_d2h_gbps": 0.01, "link_h2d_gbps": 0.01, "host_gbps": 0.02}
FAST_HOST = {"link_d2h_gbps": 100.0, "link_h2d_gbps": 100.0, "host_gbps": 100.0}


@pytest.fixture
def loop() -> Iterator[Callable[..., Loop]]:
    made: list[Loop] = []

    def make(rates: Mapping[str, float] | None = None, config: ZenFlowConfig = EXACT, **more: float) -> Loop:
        made.append(Loop(config, rates, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_on_a_plain_cpu_there_is_nothing_to_hide_behind(
    loop: Callable[..., Loop], lines: Callable[[], list[str]]
) -> None:
    follow(loop().optimizer, "exact")
    assert lines() == [f"zftune: {NOTHING_TO_HIDE_BEHIND}"]


def test_a_small_win_is_not_praised(loop: Callable[..., Loop], lines: Callable[[], list[str]]) -> None:
    training = loop(FAST_HOST)
    follow(training.optimizer, "exact")
    training.train(FIRST_STEPS + 2)
    (line,) = lines()
    assert re.fullmatch(
        r"zftune: the device waits .*% of a step for the host: .* would win less than 5\.0%; "
        r"weights move [\d.]+% in a step",
        line,
    )


def test_weights_that_move_too_far_are_updated_in_time(
    loop: Callable[..., Loop], lines: Callable[[], list[str]]
) -> None:
    """At the rate that the other tests have, the same training wins by late updates."""
    far, near = loop(SLOW_HOST, lr=1e-2), loop(SLOW_HOST)
    for training in (far, near):
        follow(training.optimizer, "published")
        training.train(FIRST_STEPS + 2)
    assert waits_for_all(far.optimizer.config)
    late = near.optimizer.config
    assert late.overlap_step
    assert late.topk_ratio > 0
    asked = loop(SLOW_HOST, lr=1e-2)
    follow(asked.optimizer, "exact")
    asked.train(FIRST_STEPS + 2)
    moved = re.search(r"weights move ([\d.]+)% in a step$", lines()[-1])
    assert moved is not None
    assert float(moved[1]) > 1


def test_where_nothing_is_waited_for_nothing_is_said(loop: Callable[..., Loop], lines: Callable[[], list[str]]) -> None:
    late, whole = ZenFlowConfig(update_interval=4), ZenFlowConfig.zero_offload(offload_ratio=0.0)
    for config in (late, whole):
        training = loop(SLOW_HOST, config)
        follow(training.optimizer, "exact")
        training.train(FIRST_STEPS + 2)
    tuned, changed = loop(SLOW_HOST), loop(SLOW_HOST)
    follow(tuned.optimizer, "exact")
    with zftune.attach(tuned.optimizer, store=False):
        tuned.train(FIRST_STEPS + 2)
    follow(changed.optimizer, "published")
    changed.train(3)
    changed.optimizer.set_knobs(update_interval=2, overlap_step=True)
    changed.train(FIRST_STEPS + 2)
    assert lines() == []
    assert changed.optimizer.config.update_interval == 2


def test_knobs_that_are_known_are_forecast(loop: Callable[..., Loop], lines: Callable[[], list[str]]) -> None:
    section = ZenFlowConfig(topk_ratio=0.25, update_interval="auto", max_update_interval=8)
    training = loop(SLOW_HOST)
    follow(training.optimizer, "exact", section)
    training.train(FIRST_STEPS + 2)
    (line,) = lines()
    promise = PROMISE.fullmatch(line)
    assert promise is not None, line
    assert promise["knobs"] == "topk_ratio 0.25, update_interval auto, apply_lag 8, select_interval auto"


def test_what_cannot_be_planned_is_the_default(
    loop: Callable[..., Loop], lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hiding, "measured", lambda *_: 1 / 0)
    training = loop(SLOW_HOST)
    follow(training.optimizer, "loose")
    training.train(FIRST_STEPS)
    assert waits_for_all(training.optimizer.config)
    training.train(1)
    config = training.optimizer.config
    assert (config.topk_ratio, config.update_interval, config.lag, config.overlap_step) == (0.1, 8, 8, True)
    (line,) = lines()
    assert line.endswith("the default of this quality, since nothing could be planned: ZeroDivisionError")


def test_knobs_without_memory_are_passed_over(
    loop: Callable[..., Loop], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = loop(SLOW_HOST)
    tried: list[dict[str, Any]] = []

    def refuse(**knobs: Any) -> int:
        tried.append(knobs)
        raise HostMemoryError("the new split needs more memory than there is")

    monkeypatch.setattr(training.optimizer, "set_knobs", refuse)
    follow(training.optimizer, "published")
    training.train(FIRST_STEPS + 2)
    assert len(tried) == 3
    assert caplog.messages == [
        "zftune: every update is still waited for: the new split needs more memory than there is"
    ]


def test_a_run_that_is_gone_on_with_keeps_its_knobs(loop: Callable[..., Loop], lines: Callable[[], list[str]]) -> None:
    saving = loop(SLOW_HOST)
    follow(saving.optimizer, "published")
    saving.train(FIRST_STEPS + 5)
    assert len(lines()) == 1
    again = loop(SLOW_HOST)
    follow(again.optimizer, "published")
    again.module.load_state_dict(saving.module.state_dict())
    again.optimizer.load_state_dict(saving.optimizer.state_dict())
    again.batches.set_state(saving.batches.get_state())
    for one in (saving, again):
        one.train(FIRST_STEPS + 2)
    assert again.optimizer.config == saving.optimizer.config
    assert len(lines()) == 1
    for ours, theirs in zip(again.module.parameters(), saving.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
