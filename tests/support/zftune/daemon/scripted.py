"""Scripted trainings for a daemon that runs: steps and stalls are made up, everything else is as agents do it.

`python -m tests.support.zftune.daemon.scripted` trains until a signal, for looking at what is shown of it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.zftune.daemon.daemons import COMMAND, Daemon, serving
from tests.support.zftune.daemon.runs.agents import SOON_S, Agent, facts, faster
from zftune.daemon.client.http import DaemonClient
from zftune.daemon.protocol.messages import Applied, Change, Done, Reattach, StepFigures
from zftune.tuner.space import Setting
from zftune.tuner.states import Outcome

EVIL = "</script><img src=x onerror=alert(1)>[red]\x1b[2J"
START = Setting.of(facts().config)


class Training(Agent):
    def __init__(self, client: DaemonClient, *, run: str, model: str = "gpt2", **more: Any) -> None:
        self.step, self._model, self._noise = 0, model, random.Random(run)
        super().__init__(client, **{"step_ms": faster, **more}, run=run)

    def say_hello(self, again: Reattach | None = None) -> None:
        training = replace(self._hello.training, model=replace(self._hello.training.model, name=self._model))
        argv = ("train.py", "--name", self._model)
        self._hello = replace(self._hello, training=training, argv=argv, began_unix_s=time.time())
        super().say_hello(again)

    @property
    def called(self) -> str:
        assert self.last.record is not None
        return self.last.record[:8]

    def go_on(self, steps: int = 20) -> None:
        self.report()
        request = self.asked() if self.last.kind == "apply" and self.done is None else None
        setting = self._resting() if request is None else request.setting
        count = steps if request is None else request.discard + request.steps
        times = tuple(self.step_ms(setting) * (1 + 0.01 * self._noise.random()) for _ in range(count))
        decision = self.last.decision
        if request is None:
            self.report(changes=(Change(self.step, setting),))
        applied = None if request is None else Applied(decision, self.step)
        figures = tuple(StepFigures(self.step + place + 1, ms, _stalls(ms)) for place, ms in enumerate(times))
        began = self.step
        self.step += count
        self.report(
            steps=figures,
            losses=((self.step, 2.5 + 1 / (1 + self.step / 200)),),
            changes=(Change(began, setting),),
            applied=applied,
        )
        if request is not None:
            outcome = Outcome("measured", times[request.discard :], times[: request.discard])
            self.done = Done(decision, outcome)

    def train_until(self, state: str) -> None:
        ends = time.monotonic() + SOON_S
        while self.last.state != state:
            assert time.monotonic() < ends, f"still {self.last}"
            self.go_on()
            time.sleep(0.002)  # the daemon thinks
        for _ in range(2):
            self.go_on()  # with the knobs that were found

    def _resting(self) -> Setting:
        return self.last.incumbent or START


@contextmanager
def training_under(folder: Path, *models: str, until: str = "frozen") -> Iterator[tuple[Daemon, list[Training]]]:
    """A daemon, and a run for each model that is in a state; the runs are a1a1.., a2a2.. and so on."""
    with serving(folder, module=COMMAND) as daemon, ExitStack() as stack:
        runs = []
        for number, model in enumerate(models):
            client = stack.enter_context(DaemonClient(daemon.path, timeout_s=SOON_S))
            runs.append(Training(client, run=f"{0xA1 + number:02x}" * 16, model=model))
            runs[-1].report()
            runs[-1].train_until(until)
        yield daemon, runs


def _stalls(ms: float) -> dict[str, float]:
    """Where a step is faster it waits less for the host."""
    return {"host": max(0.0, 0.31 * ms - 15), "h2d": 0.08 * ms, "d2h": 0.04 * ms, "select": 0.01 * ms}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=["meta-llama/Llama-2-7b-hf"])
    parser.add_argument("--period-s", type=float, default=0.3)
    given = parser.parse_args()
    runs = [
        Training(DaemonClient(), run=f"{0xA1 + place:02x}" * 16, model=name) for place, name in enumerate(given.models)
    ]
    while True:
        for training in runs:
            training.go_on()
        time.sleep(given.period_s)


if __name__ == "__main__":
    main()
