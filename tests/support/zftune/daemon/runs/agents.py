"""An agent without a training: it does what it is told, and its step times are made up."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from zenflow import ZenFlowAdamW, ZenFlowConfig
from zftune.daemon import PROTOCOL
from zftune.daemon.client.session import Transport
from zftune.daemon.protocol.codec import decode, encode
from zftune.daemon.protocol.messages import Applied, Directive, Done, Goodbye, Hello, Reattach, Report
from zftune.errors import DaemonError
from zftune.tuner.search import SearchOptions
from zftune.tuner.setup import Reader, TrainingFacts, TuneRequest, WarmupStats
from zftune.tuner.space import Setting
from zftune.tuner.states import Outcome, Request

RUN = "0" * 31 + "1"
START_MS = 100.0
SOON_S = 30.0


@cache
def facts() -> TrainingFacts:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 4, bias=False))
    config = ZenFlowConfig(topk_ratio=0.1, update_interval=4, host_threads=1)
    with closing(ZenFlowAdamW(module.parameters(), config=config, module=module)) as optimizer:
        wishes = TuneRequest(quality="published", search=SearchOptions(sampler="random", most_measurements=8))
        return Reader(optimizer, wishes).facts(WarmupStats(optimizer.config, (), has_loss=True))


def document(message: Any) -> Any:
    return json.loads(encode(message))


def hello(
    run: str = RUN,
    *,
    again: Reattach | None = None,
    fresh: bool = False,
    database: str = "sqlite://",
    **search: Any,
) -> Hello:
    found = facts()
    options = replace(found.wishes.search, **{"most_measurements": 9, **search})
    return Hello(
        protocol=PROTOCOL,
        run=run,
        training=replace(found, wishes=replace(found.wishes, fresh=fresh, search=options)),
        pid=1,
        began_unix_s=1.0,
        argv=("train.py",),
        database=database,
        again=again,
    )


def faster(setting: Setting) -> float:
    """Every setting but the first saves a fifth."""
    return START_MS if setting == Setting.of(facts().config) else 0.8 * START_MS


def same(setting: Setting) -> float:
    return START_MS


class Agent:
    """Says what an agent says. `step_ms` is that of a setting."""

    def __init__(
        self,
        transport: Transport,
        step_ms: Callable[[Setting], float] = faster,
        *,
        run: str = RUN,
        again: Reattach | None = None,
        fresh: bool = False,
        database: str = "sqlite://",
        **search: Any,
    ) -> None:
        self.transport, self.step_ms, self.run = transport, step_ms, run
        self.states: list[str] = []
        """One after the other."""
        self.requests: list[Request] = []
        self.knobs: Setting | None = None
        self.done: Done | None = None
        self._sequence = 0
        self._hello = hello(run, again=again, fresh=fresh, database=database, **search)
        self.session = ""
        self.last: Directive
        self.say_hello()

    def say_hello(self, again: Reattach | None = None) -> None:
        message = self._hello if again is None else replace(self._hello, again=again)
        welcome = self.transport.post("/v1/runs", encode(message))
        self.session, self.done = welcome["session"], None

    def report(self, **more: Any) -> Directive:
        self._sequence += 1
        message = {"sequence": self._sequence, "done": self.done, **more}
        report = Report(protocol=PROTOCOL, session=self.session, **message)
        self.last = decode(Directive, self.transport.post(f"/v1/runs/{self.run}/report", encode(report)))
        if self.done is not None and self.last.taken >= self.done.decision:
            self.done = None
        if not self.states or self.states[-1] != self.last.state:
            self.states.append(self.last.state)
        return self.last

    def asked(self) -> Request:
        self.until(lambda: self.last.kind == "apply" and self.done is None)
        assert self.last.request is not None
        return self.last.request

    def until(self, holds: Callable[[], bool]) -> Directive:
        ends = time.monotonic() + SOON_S
        self.report()
        while not holds():
            assert time.monotonic() < ends, f"still {self.last}"
            time.sleep(0.002)
            self.report()
        return self.last

    def measure(self, **more: Any) -> Request:
        """Carry out the next request to its end; the daemon has not heard of it yet."""
        request = self.asked()
        self.requests.append(request)
        self.knobs = request.setting
        ms = self.step_ms(request.setting)
        outcome = Outcome("measured", (ms,) * request.steps, (ms,) * request.discard)
        outcome = replace(outcome, **more)
        self.report(applied=Applied(self.last.decision, len(self.requests)))
        self.done = Done(self.last.decision, outcome)
        return request

    def run_until(self, state: str) -> None:
        """Measure whatever is asked for until the run is in a state."""
        while True:
            self.until(lambda: self.last.state == state or (self.last.kind == "apply" and self.done is None))
            if self.last.state == state:
                return
            self.measure()

    def goodbye(self, **more: Any) -> Any:
        message = Goodbye(protocol=PROTOCOL, session=self.session, steps=100, begins=8, **more)
        return self.transport.post(f"/v1/runs/{self.run}/goodbye", encode(message))

    def forgotten(self) -> bool:
        try:
            self.report()
        except DaemonError as error:
            return error.status == 404
        return False
