"""Runs that are simulated: what agents say to a daemon, without a training behind it. One thread for all of them."""

from __future__ import annotations

import json
import math
import random
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zftune.daemon import PROTOCOL
from zftune.daemon.client.session import SLOW_S, waiting_s
from zftune.daemon.protocol.messages import MOST_STEPS

STEP_S = 0.05
_HEADERS = "Host: localhost\r\nAccept-Encoding: identity\r\ncontent-type: application/json\r\n"  # as http.client
_PATIENCE_S = 30.0
_HEAD_END = b"\r\n\r\n"
_LENGTH = b"content-length: "


@dataclass(slots=True)
class Counts:
    """Of all runs."""

    latencies: list[tuple[float, float]] = field(default_factory=list)
    """When a report was due, and how much later its answer was there: s."""
    statistics: int = 0
    """That were sent and answered."""
    asked: int = 0
    """Decisions that a directive asked for."""
    taken: int = 0
    """Those whose outcome the daemon has taken."""
    withdrawn: int = 0
    """Those that the daemon let go of before they were carried out."""
    refused: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Asked:
    """What a directive asks for, and the steps that were taken for it."""

    decision: int
    knobs: dict[str, Any]
    discard: int
    steps: int
    times_ms: list[float] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Steps that are still to be taken."""
        return self.discard + self.steps - len(self.times_ms)

    def done(self) -> dict[str, Any]:
        """What came of it, as agents say it."""
        times = {"steps_ms": self.times_ms[self.discard :], "discarded_ms": self.times_ms[: self.discard]}
        return {"decision": self.decision, "outcome": {"status": "measured", **times}}


class Training:
    """Steps that are made up: one each 50 ms, whatever the knobs; their reported times follow the knobs.

    Args:
        name: seeds its noise.
    """

    def __init__(self, name: str) -> None:
        self.knobs: dict[str, Any] | None = None
        self.asked: Asked | None = None
        self.done: dict[str, Any] | None = None
        self.applied: dict[str, int] | None = None
        self.figures: list[dict[str, Any]] = []
        """Not yet reported."""
        self.changes: list[dict[str, Any]] = []
        """Of the knobs, not yet reported."""
        self.step = 0
        self._noise, self._name = random.Random(name), name
        self._usual_ms = 50.0

    def take_step(self) -> bool:
        """One more; whether a measurement has ended with it."""
        self.step += 1
        ms = self._usual_ms * (1 + 0.01 * self._noise.random())
        stall_ms = {"host": 0.3 * ms, "h2d": 0.08 * ms, "d2h": 0.04 * ms, "select": 0.01 * ms}
        self.figures.append({"step": self.step, "step_ms": ms, "stall_ms": stall_ms})
        if self.asked is None:
            return False
        self.asked.times_ms.append(ms)
        if self.asked.left:
            return False
        self.done, self.asked = self.asked.done(), None
        return True

    def apply(self, asked: Asked) -> None:
        """Begin to measure."""
        self.asked, self.applied = asked, {"decision": asked.decision, "step": self.step}
        self.hold(asked.knobs)

    def hold(self, knobs: dict[str, Any]) -> None:
        """Go on with some knobs."""
        if knobs != self.knobs:
            self.changes.append({"step": self.step, "knobs": knobs})
        self.knobs = knobs
        key = f"{self._name} {sorted(knobs.items())}"
        self._usual_ms = 50.0 * random.Random(key).uniform(0.7, 1.1)


class Run:
    """An agent: a connection, and a training whose directives it carries out.

    Args:
        path: of the daemon's socket.
        hello: its message.
        counts: of all.
        single: whether every statistic is a report of its own; else they are sent as the agent's session sends them.
    """

    def __init__(self, path: Path, hello: dict[str, Any], counts: Counts, *, single: bool) -> None:
        self.name: str = hello["run"]
        self.next_s = 0.0
        """When there is something to be done."""
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connection.settimeout(_PATIENCE_S)
        self._path = str(path)
        self._hello, self._counts, self._single = hello, counts, single
        self._training = Training(self.name)
        self._session, self._sequence, self._offered = "", 0, 0
        self._idle, self._waits_since_s, self._urgent = False, 0.0, False
        self._text = self._last = b""
        self._in_flight, self._sent = False, 0
        self._step_s = self._report_s = self._due_s = 0.0

    @property
    def measuring(self) -> bool:
        """Whether it has a decision whose outcome was not taken."""
        return self._training.asked is not None or self._training.done is not None

    def begin(self, now_s: float) -> None:
        """Say Hello; steps end from now on."""
        self._step_s = now_s + STEP_S
        self._waits_since_s = now_s
        self.connection.connect(self._path)
        self._send("/v1/runs", self._hello, now_s)

    def tick(self, now_s: float) -> None:
        """Take the steps that have ended, and report where it is time."""
        while self._step_s <= now_s:
            self._urgent |= self._training.take_step()
            if self._single or self._urgent:
                self._report_s = min(self._report_s, self._step_s)
            self._step_s += STEP_S
        if self._session and not self._in_flight and self._report_s <= now_s:
            self._report(self._report_s)
        self._plan()

    def hear(self, now_s: float) -> None:
        """Read what has come."""
        self._text += self.connection.recv(1 << 16)
        head, blank, body = self._text.partition(_HEAD_END)
        if not blank or len(body) < int(head.partition(_LENGTH)[2].partition(b"\r\n")[0]):
            return
        self._in_flight, self._text = False, b""
        self._counts.latencies.append((self._due_s, now_s - self._due_s))
        self._counts.statistics += self._sent
        if not head.startswith(b"HTTP/1.1 200"):
            self._counts.refused.append(body.decode())
        elif not self._session:
            self._session = json.loads(body)["session"]
        elif body != self._last:
            self._last = body
            self._obey(json.loads(body), now_s)
        self._report_s = self._next_report_s(now_s)
        self._urgent = False
        self._plan()

    def _next_report_s(self, now_s: float) -> float:
        unsent = self._training.figures
        if self._single:  # due since its step has ended
            return self._step_s - STEP_S * len(unsent) if unsent else math.inf
        if self._urgent:
            return now_s
        if self._idle or self._training.asked is not None:
            return now_s + SLOW_S
        return now_s + waiting_s(now_s - self._waits_since_s)

    def _plan(self) -> None:
        asked = self._training.asked
        if self._single:
            step_s = self._step_s
        else:  # steps need no attention of their own until a measurement ends with one
            step_s = math.inf if asked is None else self._step_s + STEP_S * (asked.left - 1)
        self.next_s = step_s if self._in_flight else min(step_s, self._report_s)

    def _obey(self, directive: dict[str, Any], now_s: float) -> None:
        training, counts = self._training, self._counts
        self._idle = directive["kind"] == "pause" or directive["state"] == "frozen"
        done = training.done
        if done is not None and max(directive["taken"], directive["decision"] - 1) >= done["decision"]:
            counts.taken += 1
            training.done, self._waits_since_s = None, now_s
        request = directive["request"]
        if request is not None and directive["decision"] != self._offered:
            self._offered = directive["decision"]
            counts.asked += 1
            if training.asked is not None:
                counts.withdrawn += 1
            training.apply(Asked(self._offered, request["setting"], request["discard"], request["steps"]))
            self._urgent = True  # the session says at once that knobs hold
        elif request is None and directive["incumbent"] is not None and training.asked is None:
            training.hold(directive["incumbent"])

    def _report(self, due_s: float) -> None:
        training = self._training
        self._sequence += 1
        most = 1 if self._single else MOST_STEPS
        steps, training.figures = training.figures[:most], training.figures[most:]
        changes, training.changes = training.changes, []
        message = {
            "protocol": PROTOCOL,
            "session": self._session,
            "sequence": self._sequence,
            "steps": steps,
            "losses": [[one["step"], 2.5] for one in steps],
            "done": training.done,
            "applied": training.applied,
            "changes": changes,
        }
        self._sent = len(steps)
        self._send(f"/v1/runs/{self.name}/report", message, due_s)

    def _send(self, route: str, message: dict[str, Any], due_s: float) -> None:
        body = json.dumps(message).encode()
        head = f"POST {route} HTTP/1.1\r\n{_HEADERS}Content-Length: {len(body)}\r\n\r\n"
        self.connection.sendall(head.encode() + body)
        self._in_flight, self._due_s = True, due_s


def train(runs: Sequence[Run], arrive_s: float, duration_s: float) -> None:
    """Let runs come one after the other, and train until the time is over.

    Args:
        runs: that have not begun.
        arrive_s: until all are there.
        duration_s: in all.
    """
    begin_s = time.perf_counter()
    with selectors.EpollSelector() as selector:
        for place, run in enumerate(runs):
            run.next_s = begin_s + arrive_s * place / len(runs)
        waiting = set(runs)
        while (now_s := time.perf_counter()) < begin_s + duration_s:
            for run in runs:
                if run.next_s > now_s:
                    continue
                if run in waiting:
                    waiting.discard(run)
                    run.begin(now_s)
                    selector.register(run.connection, selectors.EVENT_READ, run)
                run.tick(now_s)
            # Never, where all wait for answers.
            soon_s = min(begin_s + duration_s, *(run.next_s for run in runs)) - time.perf_counter()
            for key, _ in selector.select(max(0.0, soon_s)):
                key.data.hear(time.perf_counter())
