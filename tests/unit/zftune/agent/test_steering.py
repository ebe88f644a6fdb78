"""A run whose knobs changed is recorded, and replayed: the same weights, to the last bit."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zftune
from tests.support.zftune.tuner.scene import SyncWorker
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.errors import RankError
from zftune.agent import steering
from zftune.agent.schedule import BEGINNING, Entry, Recording, Replay, encode, read_schedule
from zftune.agent.steering import RunHook, hook
from zftune.daemon.client import autostart
from zftune.emulation import EmulatedAccelerator, Rig
from zftune.errors import BadInputError, DaemonError
from zftune.quality import assumed_coverage
from zftune.tuner.executor import Executor, TuningContext, live_search
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.setup import NoForecast
from zftune.tuner.space import Setting, space_for

OWN = ZenFlowConfig(topk_ratio=0.1, update_interval=4, host_threads=1)
RATES = dict.fromkeys(("link_d2h_gbps", "link_h2d_gbps", "host_gbps", "device_gbps"), 1.0)
Steer = Callable[..., None]


class Loop:
    def __init__(self, config: ZenFlowConfig = OWN) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))
        self.device = EmulatedAccelerator(Rig("fast", "", forward_ms=1.0, backward_ms=1.0, scale=1.0, **RATES))
        self.optimizer = ZenFlowAdamW(
            self.module.parameters(), lr=1e-5, config=config, module=self.module, device=self.device
        )
        self.device.attach(self.module)
        self.batches = torch.Generator().manual_seed(1)

    def train(self, steps: int, until: Callable[[], bool] = lambda: False) -> None:
        while self.optimizer.steps < steps and not until():
            batch = torch.randn(16, 32, generator=self.batches)
            self.module(batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def close(self) -> None:
        self.optimizer.close()
        self.device.close()

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.module.parameters()])


PROBES = (33, 70)
"""Steps after which a tuner's probe flushes."""


def tuned(loop: Loop, most: int = 6) -> Executor:
    """Search in the optimizer's own hook, as a tuner does, and flush there now and then, as its probe does."""
    optimizer = loop.optimizer
    optimizer.set_knobs(update_interval=4, apply_lag=None)
    loop.train(optimizer.steps + 1)
    start = Setting.of(optimizer.config)
    search = Search(
        space_for(start, "published", coverage=assumed_coverage),
        start,
        NoForecast(1.0, start, has_memory=False),
        [Setting(topk_ratio=0.2, update_interval=2, apply_lag=1, host_threads=1)],
        SearchOptions(sampler="random", most_measurements=most),
    )
    live = live_search(TuningContext(optimizer=optimizer, tokens=16), search, worker=SyncWorker)

    def after(*_: Any) -> None:
        live.on_step()
        if optimizer.steps in PROBES:
            optimizer.flush()

    optimizer.register_step_post_hook(after)
    return live


@pytest.fixture
def steer() -> Iterator[Steer]:
    """Hook parts as in a child; their hooks and patches are gone afterwards."""
    undo: list[Callable[[], None]] = []
    ends: list[Callable[[], None]] = []

    def steer(*parts: RunHook) -> None:
        undo.append(hook(list(parts)))
        undo.extend(part.patches.undo for part in parts if isinstance(part, Recording))
        ends.extend(part.end for part in parts if isinstance(part, Replay))

    yield steer
    for one in reversed(undo):
        one()
    for end in ends:
        atexit.unregister(end)


def test_a_tuned_run_is_replayed_bit_for_bit(steer: Steer, tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    recording = Recording(str(path))
    steer(recording)
    first = Loop(ZenFlowConfig(topk_ratio=0.1, update_interval="auto", host_threads=1))
    first.train(9)
    live = tuned(first)
    first.train(2000, until=lambda: live.over)
    first.train(max(first.optimizer.steps, PROBES[-1]) + 7)  # a window is open at the end
    steps = first.optimizer.steps
    live.close()
    recording.patches.undo()

    entries = read_schedule(path)
    assert entries[0].after_step == 0
    assert set(entries[0].knobs or ()) == set(BEGINNING)
    assert entries[0].knobs["update_interval"] == "auto"  # type: ignore[index]
    assert (entries[1].after_step, entries[1].knobs["update_interval"]) == (9, 4)  # type: ignore[index]
    assert [one.after_step for one in entries if one.knobs is None] == list(PROBES)
    assert len({str(one.knobs) for one in entries}) > 3  # settings were tried

    plain = Loop()
    plain.train(steps)
    assert not torch.equal(plain.weights, first.weights)

    steer(Replay(str(path)))
    second = Loop(ZenFlowConfig(topk_ratio=0.5, update_interval=2, host_threads=1))  # such as a newer preset's
    second.train(steps)
    assert torch.equal(second.weights, first.weights)
    assert second.optimizer.config == first.optimizer.config
    for one in (first, second, plain):
        one.close()


def test_what_the_script_flushes_is_its_own(steer: Steer, tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    steer(Recording(str(path)))
    loop = Loop()
    loop.train(6)
    loop.optimizer.flush()
    assert loop.optimizer.set_knobs(topk_ratio=0.3) == 7
    loop.train(8)
    other = Loop()
    other.optimizer.set_knobs(topk_ratio=0.4)
    loop.close()
    assert read_schedule(path)[1:] == [Entry(6, {"topk_ratio": 0.3})]
    other.close()


def test_a_run_that_goes_on_from_a_checkpoint(steer: Steer, tmp_path: Path) -> None:
    """What comes before it has the checkpoint; the rest is done at its step."""
    path = tmp_path / "schedule.json"
    entries = [Entry(0, {"topk_ratio": 0.2}), Entry(5, {"topk_ratio": 0.6}), Entry(9, {"update_interval": 2})]
    path.write_text(encode(entries))
    saving = Loop()
    saving.train(7)
    state = saving.optimizer.state_dict()
    exported = tmp_path / "exported.json"
    steer(Recording(str(exported)), Replay(str(path)))
    loop = Loop()
    loop.module.load_state_dict(saving.module.state_dict())
    loop.optimizer.load_state_dict(state)
    loop.train(10)
    assert (loop.optimizer.config.topk_ratio, loop.optimizer.config.update_interval) == (0.1, 2)
    assert read_schedule(exported) == entries[2:]
    for one in (saving, loop):
        one.close()


def test_nobody_tunes_a_replayed_run(
    steer: Steer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZFTUNE_ONLINE", "nobody")
    caplog.set_level(logging.INFO, logger="zftune")
    path = tmp_path / "schedule.json"
    path.write_text(encode([Entry(2, {"topk_ratio": 0.3}), Entry(50, None)]))
    replay = Replay(str(path))
    steer(replay)
    loop = Loop()
    with zftune.attach(loop.optimizer, quality="published", store=False) as tuner:
        assert not tuner.searching
        loop.train(12)
        assert tuner.incumbent.topk_ratio == 0.3
    assert zftune.tuner.tuner.open_tuners() == []
    with pytest.raises(BadInputError, match=r"optimizer is a torch\.optim"):
        zftune.attach(torch.optim.AdamW(loop.module.parameters()))
    replay.end()
    assert caplog.messages == [
        "zftune.attach does nothing: the settings come from a schedule.",
        f"zftune replays the settings of '{path}' (2 changes).",
        f"The training ended after step 12: of the 2 changes in '{path}' 1 did not come.",
    ]
    other = Loop()
    with pytest.raises(BadInputError, match="a second zenflow optimizer takes steps; a schedule is of one"):
        other.train(1)
    for one in (loop, other):
        one.close()


def test_knobs_that_do_not_go_with_the_training_are_refused(steer: Steer, tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(encode([Entry(3, {"apply_lag": 9})]))
    steer(Replay(str(path)))
    loop = Loop()
    with pytest.raises(BadInputError, match="after step 3: apply_lag is 9; it must be an integer from 1 to"):
        loop.train(5)
    loop.close()


def test_what_another_rank_refuses_is_a_sentence_here_too(
    steer: Steer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(encode([Entry(3, {"topk_ratio": 0.2})]))
    steer(Replay(str(path)))
    loop = Loop()

    def refuse(**_: Any) -> int:
        raise RankError("another rank failed at this, see its own message")

    monkeypatch.setattr(loop.optimizer, "set_knobs", refuse)
    with pytest.raises(BadInputError, match="after step 3: another rank failed at this, see its own message"):
        loop.train(5)
    loop.close()


class Followed:
    """A tuner whose daemon is kept; `then` happens in the pauses between looks, and in the one after those it ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *then: Callable[[Followed], None]) -> None:
        self.searching, self.registered, self.driver = True, False, self
        self.answers: bool | Exception = True
        """Whether a daemon does; what keeps one from being started where none does."""
        self.asked: list[str] = []
        self.pauses_s: list[float] = []
        self.now_s = 0.0
        self._then = iter(then)
        monkeypatch.setattr(autostart, "ensure_daemon", self._ensure)
        monkeypatch.setattr(autostart, "revive_daemon", self._revive)
        monkeypatch.setattr(steering, "time", SimpleNamespace(sleep=self._sleep, monotonic=lambda: self.now_s))
        steering._keep_daemon(weakref.ref(self))  # type: ignore[arg-type]

    def _ensure(self) -> bool:
        self.asked.append("ensure")
        if isinstance(self.answers, Exception):
            raise self.answers
        started, self.answers = not self.answers, True
        return started

    def _revive(self) -> bool:
        self.asked.append("revive")
        return False

    def _sleep(self, pause_s: float) -> None:
        self.pauses_s.append(pause_s)
        self.now_s += pause_s
        happens = next(self._then, None)
        if happens is None:
            self.searching = False
        else:
            happens(self)

    def loses_daemon(self) -> None:
        self.answers = False

    def registers(self) -> None:
        self.registered = True

    def is_stopped(self) -> None:
        self.now_s += 90.0


def test_a_daemon_is_started_whenever_none_answers_until_the_training_is_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may end after the first look, and again: a training warms up before it is registered."""
    followed = Followed(
        monkeypatch, Followed.loses_daemon, lambda _: None, Followed.loses_daemon, Followed.registers, lambda _: None
    )
    assert followed.asked == ["ensure"] * 4 + ["revive"] * 2
    assert followed.pauses_s == [5.0, 10.0, 10.0, 20.0, 20.0, 20.0]


def test_a_daemon_that_ended_while_the_training_was_stopped_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended for want of runs, which nobody asked it to; where none can be started it is tried again."""

    def stopped_without(followed: Followed) -> None:
        followed.is_stopped()
        followed.answers = DaemonError("no daemon answers at 'x'")

    followed = Followed(
        monkeypatch, Followed.registers, Followed.is_stopped, lambda _: None, stopped_without, Followed.loses_daemon,
        lambda _: None,
    )  # fmt: skip
    assert followed.asked == ["ensure", "revive", "ensure", "revive", "ensure", "ensure", "revive"]


def test_who_cannot_have_a_daemon_looks_for_one_ever_more_rarely_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def cannot(error: Exception) -> Callable[[Followed], None]:
        return lambda followed: setattr(followed, "answers", error)

    slow = DaemonError("no daemon answers at 'x'")
    followed = Followed(
        monkeypatch, cannot(slow), cannot(slow), Followed.loses_daemon, *[cannot(slow)] * 8,
    )  # fmt: skip
    assert followed.asked == ["ensure"] * 12
    assert followed.pauses_s == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, *[300.0] * 6]
    assert caplog.messages == ["Tuning waits for a daemon: no daemon answers at 'x'."]


def test_a_schedule_that_cannot_be_written_stops_nothing(
    steer: Steer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    steer(Recording(str(folder / "schedule.json")))
    loop = Loop()
    loop.train(1)
    (folder / "schedule.json").unlink()
    folder.rmdir()
    for step in (2, 3):
        loop.optimizer.set_knobs(topk_ratio=0.1 * step)
        loop.train(step)
    assert [one.partition(":")[0] for one in caplog.messages] == ["The schedule is not written any more"]
    loop.close()
