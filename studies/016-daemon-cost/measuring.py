"""One round: the same two trainings, both alone and with one of them under a daemon in each state of its run."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from served import Daemon
from trainee import Trainee

TURNS = 6
"""Of a block, which so lasts for more than a second: what comes once a second is in all of them."""
UNDER = 3
"""Steps of a turn that are under the daemon, beside a plain one."""
STATES = ("none", "frozen", "paused", "searching")
_REACHED = {"frozen": ("frozen",), "searching": ("searching", "confirming")}
_MEASUREMENTS = {"frozen": 1, "searching": 1000}
_WARM_UP = 16  # steps
_SHARES = 6  # steps in a row that nobody is held for, for each block
_SOON_S = 120.0


@dataclass(frozen=True, slots=True)
class Block:
    """Mean times of a step."""

    under_ms: float
    plain_ms: float
    counts: bool
    """Whether the knobs were those of the other training all the time."""


@dataclass(slots=True)
class Round:
    """Two trainings and a daemon: while one takes a step the other stands still, and the daemon with `under`."""

    daemon: Daemon
    under: Trainee
    plain: Trainee
    blocks: int

    def measure(self) -> dict[str, dict[str, Any]]:
        """The figures of each state. The control comes first or last, by chance: a machine's times drift."""
        for trainee in (self.under, self.plain):
            trainee.ask("train", _WARM_UP)
        order = random.choice((STATES, (*STATES[1:], STATES[0])))
        found = {state: self._measure(state) for state in order}
        return {state: found[state] for state in STATES}

    def _measure(self, state: str) -> dict[str, Any]:
        self._reach(state)
        for trainee in (self.under, self.plain):
            trainee.ask("pin", True)
        found = [self._block(alone=state == "none") for _ in range(self.blocks)]
        figures = {
            "under_ms": [round(block.under_ms, 4) for block in found if block.counts],
            "plain_ms": [round(block.plain_ms, 4) for block in found if block.counts],
            **self._shares(),
            "state_at_end": self.daemon.run.get("state", "none"),
        }
        for trainee in (self.under, self.plain):
            trainee.ask("pin", False)  # what is attached next starts threads, which would inherit it
        return figures

    def _reach(self, state: str) -> None:
        if state == "none":
            self.under.ask("detach")
        elif state == "paused":  # the run that was frozen
            self.daemon.client.post(f"/v1/runs/{self.daemon.run['run']}/pause")
        else:
            self.under.ask("detach")
            self.under.ask("attach", _MEASUREMENTS[state])
            ends_s = time.monotonic() + _SOON_S
            while self.daemon.run.get("state") not in _REACHED[state]:
                if time.monotonic() > ends_s:
                    raise TimeoutError(f"the run is {self.daemon.run.get('state')}, not {state}")
                self.under.ask("train", 4)
        self.under.ask("train", _WARM_UP)

    def _block(self, *, alone: bool) -> Block:
        """Turns of steps under the daemon and a plain one, in random order.

        Args:
            alone: whether the daemon stands still all the time.
        """
        took_ms = {"under": 0.0, "plain": 0.0}
        changes, own = self.under.ask("knobs")
        with self._in_turns(alone) as step_ms:
            for _ in range(TURNS):
                for which in random.sample(("plain", *["under"] * UNDER), UNDER + 1):
                    took_ms[which] += step_ms(which)
        counts = own and self.under.ask("knobs")[0] == changes
        return Block(took_ms["under"] / TURNS / UNDER, took_ms["plain"] / TURNS, counts)

    @contextmanager
    def _in_turns(self, alone: bool) -> Iterator[Any]:
        def step_ms(which: str) -> float:
            plain = which == "plain"
            self.plain.hold(not plain)
            self.daemon.hold(plain or alone)
            self.under.hold(plain)
            begin_s = time.perf_counter()
            (self.plain if plain else self.under).ask("train", 1)
            return 1e3 * (time.perf_counter() - begin_s)

        try:
            yield step_ms
        finally:
            for one in (self.plain, self.daemon, self.under):
                one.hold(False)

    def _shares(self) -> dict[str, float]:
        """Of a core, and of the time of the thread that trains, while nobody is held."""
        names = ("daemon_core", "thinkers_core", "agent_core", "thread_share", "changing_share")
        before = self._spent_s()
        self.under.ask("train", _SHARES * self.blocks)
        spent_s = [now - then for then, now in zip(before, self._spent_s(), strict=True)]
        # A process that thinks may have ended meanwhile.
        return {name: max(0.0, one) / spent_s[-1] for name, one in zip(names, spent_s[:-1], strict=True)}

    def _spent_s(self) -> tuple[float, ...]:
        agent_s, taken_s, changing_s = (self.under.ask(what) for what in ("agent_s", "taken_s", "changing_s"))
        return *self.daemon.processor_s(), agent_s, taken_s - changing_s, changing_s, time.perf_counter()


def measure(blocks: int) -> dict[str, dict[str, Any]]:
    """A round in fresh processes: where memory lies differs from one to the next."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zft-")))
        daemon = stack.enter_context(closing(Daemon(folder)))
        under, plain = (stack.enter_context(closing(Trainee())) for _ in range(2))
        return Round(daemon, under, plain, blocks).measure()
