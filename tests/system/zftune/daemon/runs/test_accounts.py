"""The account of a run over random lives of its daemon and its training, beside a stopwatch in the training.

On a simulated clock, with a daemon's registry in this process: killed, frozen and ended daemons, trainings that freeze,
die, go on, or take another time, and commands by hand. `ZFTUNE_ACCOUNTS` is how many; they are others in every run.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.seeds import fresh_seeds
from tests.support.tiers import fast
from tests.support.zftune.daemon.runs.loops import Loop
from tests.support.zftune.daemon.runs.worlds import World
from zftune.daemon.client.driver import DaemonDriver
from zftune.daemon.client.session import SLOW_S
from zftune.daemon.runs.registry import Command
from zftune.daemon.runs.session import RunSession
from zftune.daemon.runs.states import NotAllowedError
from zftune.daemon.runs.views import run_view
from zftune.emulation import Rig
from zftune.errors import DaemonError
from zftune.explain.summary import RunSummary
from zftune.store import open_store
from zftune.store.types import TrialState

SEQUENCES = int(os.environ.get("ZFTUNE_ACCOUNTS", fast("1", all_of="8")))
EVENTS = 9
SHARE = 0.02
_RATES = dict.fromkeys(("link_d2h_gbps", "link_h2d_gbps", "host_gbps", "device_gbps"), 1.0)
RIG = Rig("steady", "", forward_ms=30.0, backward_ms=30.0, scale=1.0, **_RATES)


class Line:
    """To whichever daemon lives."""

    def __init__(self, world: World) -> None:
        self.world, self.is_cut = world, False

    def post(self, route: str, document: Any = None, *, timeout_s: float | None = None) -> Any:
        if self.is_cut:
            raise DaemonError("no daemon serves 'nowhere'")
        return self.world.transport.post(route, document, timeout_s=timeout_s)

    def close(self) -> None:
        return


class Life:
    """A training, a daemon, and what befalls them."""

    def __init__(self, path: Path, chance: random.Random) -> None:
        self.world, self.chance = World(path), chance
        self.watch_s = 0.0
        """Of trainings before, of the same run."""
        self.record: str | None = None
        self.died = False
        """Whether a training ended without goodbye."""
        self.slow_s = 0.0
        self.last = (0.0, 0.0, 0, 0)
        self.begin()

    def begin(self) -> None:
        self.line = Line(self.world)
        self.loop = Loop(self.line, emulated=True, thinking_s=0.05, most=24, fresh=self.record is None, rig=RIG)
        assert self.loop.device is not None
        self.began_s = self.loop.device.clock.now()

    @property
    def now_s(self) -> float:
        assert self.loop.device is not None
        return self.watch_s + self.loop.device.clock.now() - self.began_s

    def train(self, steps: int) -> None:
        assert self.loop.device is not None
        for _ in range(steps):
            if self.slow_s:
                self.loop.device.clock.sleep(self.slow_s)
            self.loop.step()

    # --- what befalls them -------------------------------------------------------------------------------------------

    def kill_daemon(self) -> None:
        self.line.is_cut = True
        self.world.kill()
        self.train(self.chance.choice((0, 40, 120)))
        self.look()
        self.world.begin()
        self.line.is_cut = False
        self.train(60)

    def end_daemon(self) -> None:
        self.world.registry.close()
        self.world.kill()
        self.train(self.chance.choice((0, 40)))
        self.look()
        self.world.begin()
        self.train(60)

    def freeze_daemon(self) -> None:
        self.line.is_cut = True
        self.train(self.chance.randint(5, 80))
        self.line.is_cut = False

    def freeze_training(self) -> None:
        assert self.loop.device is not None
        self.loop.device.clock.sleep(self.chance.uniform(1.0, 20.0))

    def drift(self) -> None:
        self.slow_s = 0.0 if self.slow_s else self.chance.uniform(0.01, 0.05)

    def command(self, name: Command) -> None:
        run = next((one.hello.run for one in self.world.registry.brains() if not one.over), None)
        if run is None:
            return
        try:
            self.world.registry.command(run, name)
        except NotAllowedError:
            return
        self.train(20)
        if name == "pause":
            self.world.registry.command(run, "resume")

    def resume(self) -> None:
        """The training ends, and another one goes on."""
        self.loop.close()
        self.go_on()

    def die(self) -> None:
        """Without goodbye: whatever it held ends, and nobody hears of it any more."""
        assert self.loop.tuner is not None
        counsel = self.loop.tuner.driver
        assert isinstance(counsel, DaemonDriver)
        self.line.is_cut = True
        counsel._worker.close()
        if counsel._daemon_session is not None:
            counsel._daemon_session._thread.join(10)
            if counsel._daemon_session._pulse is not None:
                counsel._daemon_session._pulse.close(remove=False)
        self.loop.close()
        self.died = True
        self.world.now_s += 60.0
        if self.chance.random() < 0.5:
            self.world.registry.look_after_leases()
        else:
            self.world.kill()
            self.world.begin()
        self.go_on()

    def go_on(self) -> None:
        self.watch_s = self.now_s
        before, self.slow_s = self.record, 0.0
        self.begin()
        self.train_until_recorded()
        if self.record != before:  # the search of that run was over
            self.watch_s, self.last = 0.0, (0.0, 0.0, 0, 0)

    def train_until_recorded(self) -> None:
        found = None
        while found is None:  # the test's own time limit ends it
            self.train(20)
            brains = [one for one in self.world.registry.brains() if not one.over]
            found = brains[-1].record if brains else None
        self.record = found
        self.train(40)

    # --- what holds whatever befell them -----------------------------------------------------------------------------

    def behind_s(self, brain: RunSession) -> float:
        """How far the time that the daemon shows is from the stopwatch's."""
        return abs(run_view(brain, 0.0).account.elapsed_s - self.now_s)

    def look(self, late_s: float = 2.0 * SLOW_S, *, lives: bool = True) -> None:
        """Read the account as `zftune explain` does, and as the daemon shows it."""
        if self.record is None:
            return
        with open_store(str(self.world.path)) as store:
            run = next(one for one in store.runs() if one.run_id == self.record)
            document = RunSummary.read(store, run).document()
            account = store.account(self.record)
        assert account is not None
        total = account.total
        now = (total.seconds, total.spent_s, total.steps, total.tokens)
        assert all(new >= old for new, old in zip(now, self.last, strict=True)), (self.last, now)
        self.last = now
        assert abs(total.seconds - self.now_s) <= SHARE * self.now_s + late_s, (total.seconds, self.now_s)
        cost = document["cost"]
        assert (cost["elapsed_s"], cost["spent_s"], cost["steps"]) == now[:3]
        times = [one["at_s"] for one in document["decisions"]]
        assert times == sorted(times)
        assert max(times, default=0.0) <= total.seconds + 1e-3
        notices = [notice for one in self.world.registry.brains() for notice in one.notices]
        assert not [one for one in notices if "cannot be gone on with" in one], notices
        if lives:
            assert document["run"]["state"] == "running"
        for brain in () if self.line.is_cut else self.world.registry.brains():
            if brain.record == self.record and not brain.over:
                # The thread that reports may not have had a processor: a few more steps give it time.
                for _ in range(100):
                    if self.behind_s(brain) <= SHARE * self.now_s + 2 * late_s:
                        break
                    self.train(1)
                    time.sleep(0.01)
                assert self.behind_s(brain) <= SHARE * self.now_s + 2 * late_s

    def end(self) -> None:
        self.line.is_cut = self.chance.random() < 0.3
        self.loop.close()
        self.look(late_s=0.2, lives=False)  # a step, and what the end takes
        with open_store(str(self.world.path)) as store:
            store.reap()
            self.look(late_s=0.2, lives=False)
            if not self.died:
                states = [trial.state for run in store.runs() for trial in store.trials(run.run_id)]
                kinds = {one.kind for run in store.runs() for one in store.decisions(run.run_id)}
                assert TrialState.CRASHED not in states
                assert "crash" not in kinds
            for preset in store.presets():
                assert preset.withdrawn_because in ("", "it was rolled back by hand", "it lost 2 later comparisons")

    def close(self) -> None:
        self.loop.close()
        self.world.end()


@pytest.mark.smoke
@pytest.mark.parametrize("seed", fresh_seeds("accounts", SEQUENCES))
def test_the_account_agrees_with_a_stopwatch_whatever_happens(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    life = Life(tmp_path / "zftune.db", chance)
    events: dict[str, Callable[[], None]] = {
        "daemon killed": life.kill_daemon,
        "daemon ended": life.end_daemon,
        "daemon frozen": life.freeze_daemon,
        "training frozen": life.freeze_training,
        "training killed": life.die,
        "resumed": life.resume,
        "drift": life.drift,
        "rolled back": lambda: life.command("rollback"),
        "paused": lambda: life.command("pause"),
    }
    happened = [chance.choice(list(events)) for _ in range(EVENTS)]
    print(f"seed {seed}: {', '.join(happened)}")
    try:
        life.train_until_recorded()
        life.look()
        for name in happened:
            events[name]()
            life.train(chance.randint(20, 150))
            life.look()
        life.end()
    finally:
        life.close()
