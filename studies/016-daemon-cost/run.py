"""What do the agent and the daemon cost at steps of 50 ms of real work? See README.md beside this file."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import psutil  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from studykit import Results, code_digest, parser, spread, write_json  # noqa: E402
from summary import costs_of, table_of  # noqa: E402
from trainee import SIZE, Trainee  # noqa: E402

from zftune.daemon.client import DaemonClient  # noqa: E402
from zftune.daemon.errors import DaemonError  # noqa: E402

CODE = (
    *(f"studies/{HERE.name}/{name}.py" for name in ("run", "trainee")),
    "zftune/agent",
    "zftune/daemon",
    "zftune/tuner",
    "zftune/workload",
    "runtime/zenflow",
)
BLOCK = 4  # turns: a window of plain steps
UNDER = 3  # steps of a turn that are under the daemon, beside a plain one
ROUNDS = {"none": 8, "frozen": 8, "paused": 4, "searching": 3}
BLOCKS, QUICK_BLOCKS = 48, 2
REACHED = {"frozen": ("frozen",), "paused": ("baseline", "searching"), "searching": ("searching", "confirming")}
_WARM_UP = 16  # steps
_SOON_S = 120.0


class Daemon:
    """A daemon as users start it, with a store on disk, that can be held still."""

    def __init__(self, folder: Path) -> None:
        os.environ["ZFTUNE_SOCKET"] = str(folder / "z.sock")
        os.environ["ZFTUNE_DB"] = f"sqlite:///{folder / 'z.db'}"
        command = [sys.executable, "-c", "from zftune.cli import main; main()", "daemon"]
        with (folder / "log").open("wb") as log:  # a session of its own, so that a signal finds all that it starts
            self._popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._process = psutil.Process(self._popen.pid)
        self.client = DaemonClient(timeout_s=_SOON_S)
        ends_s = time.monotonic() + _SOON_S
        while True:
            try:
                self.client.get("/v1/health")
            except DaemonError:
                if time.monotonic() > ends_s:
                    raise
                time.sleep(0.1)
            else:
                break

    def hold(self, still: bool) -> None:
        """Hold it and what thinks for it still, or let them go on."""
        os.killpg(self._popen.pid, signal.SIGSTOP if still else signal.SIGCONT)

    def processor_s(self) -> tuple[float, float]:
        """Of its own, and of what thinks for it."""
        own, thinks = self._process.cpu_times(), [child.cpu_times() for child in self._process.children()]
        return own.user + own.system, sum(one.user + one.system for one in thinks)

    def close(self) -> None:
        """End it."""
        self.hold(still=False)
        self.client.close()
        self._popen.terminate()
        self._popen.wait(_SOON_S)

    @property
    def run(self) -> dict[str, Any]:
        """The one that it follows; {}: none yet."""
        runs: list[dict[str, Any]] = self.client.get("/v1/runs")
        return runs[-1] if runs else {}


@dataclass(slots=True)
class Block:
    """Steps under the daemon and steps without one by turns: the mean times."""

    under_ms: float
    plain_ms: float
    counts: bool
    """Whether the knobs were those of the other training all the time."""


@dataclass(slots=True)
class Spent:
    """Processor time, and the time in which it could be spent, s."""

    daemon_s: float = 0.0
    thinkers_s: float = 0.0
    agent_s: float = 0.0
    wall_s: float = 0.0

    def add(self, before: Sequence[float], after: Sequence[float], wall_s: float) -> None:
        """What a block has spent; a process that thinks may have ended in it."""
        daemon_s, thinkers_s, agent_s = (max(0.0, now - then) for then, now in zip(before, after, strict=True))
        self.daemon_s += daemon_s
        self.thinkers_s += thinkers_s
        self.agent_s += agent_s
        self.wall_s += wall_s


@dataclass(slots=True)
class Round:
    """A daemon and two processes that train, one of them under it; each stands still while the other takes a step."""

    daemon: Daemon
    under: Trainee
    plain: Trainee
    state: str

    def prepare(self) -> None:
        """Come to its state, and let both trainings warm up."""
        state = self.state
        self.plain.ask("train", _WARM_UP)
        if state != "none":
            self.under.ask("attach", 1 if state == "frozen" else 1000)
        ends_s = time.monotonic() + _SOON_S
        while state != "none" and self.daemon.run.get("state") not in REACHED[state]:
            if time.monotonic() > ends_s:
                raise TimeoutError(f"the run is {self.daemon.run.get('state')}, not {state}")
            self.under.ask("train", 4)
        if state == "paused":
            self.daemon.client.post(f"/v1/runs/{self.daemon.run['run']}/pause")
        self.under.ask("train", _WARM_UP)
        for trainee in (self.under, self.plain):
            trainee.ask("pin")  # not sooner: the agent's threads would inherit it

    def block(self, spent: Spent) -> Block:
        """Turns of steps under the daemon and a plain one, in random order."""
        took_ms = {"under": 0.0, "plain": 0.0}
        changes, own = self.under.ask("knobs")
        before = (*self.daemon.processor_s(), self.under.ask("agent_s"))
        for _ in range(BLOCK):
            for which in random.sample(("plain", *["under"] * UNDER), UNDER + 1):
                took_ms[which] += self._step(which)
        self._hold(under=False, plain=False)
        spent.add(before, (*self.daemon.processor_s(), self.under.ask("agent_s")), took_ms["under"] / 1e3)
        means_ms = took_ms["under"] / BLOCK / UNDER, took_ms["plain"] / BLOCK
        return Block(*means_ms, own and self.under.ask("knobs")[0] == changes)

    def _step(self, which: str) -> float:
        self._hold(under=which == "plain", plain=which == "under")
        trainee = self.under if which == "under" else self.plain
        begin_s = time.perf_counter()
        trainee.ask("train", 1)
        return 1e3 * (time.perf_counter() - begin_s)

    def _hold(self, *, under: bool, plain: bool) -> None:
        self.plain.hold(plain)
        self.daemon.hold(under or self.state == "none")
        self.under.hold(under)


def measure(state: str, rounds: int, blocks: int) -> dict[str, Any]:
    """Blocks of a state, in several rounds of fresh processes: where memory lies differs from one to the next."""
    found: list[list[Block]] = []
    spent, ended = Spent(), []
    for _ in range(rounds):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zft-")))
            daemon = stack.enter_context(closing(Daemon(folder)))
            under, plain = random.sample([stack.enter_context(closing(Trainee())) for _ in range(2)], 2)
            this = Round(daemon, under, plain, state)
            this.prepare()
            found.append([this.block(spent) for _ in range(blocks)])
            daemon.hold(still=False)
            ended.append(daemon.run.get("state", "none"))
    return _figures(found, spent, ended)


def ratio_of(blocks: Sequence[Block]) -> float:
    """All time under the daemon to all time without."""
    return sum(block.under_ms for block in blocks) / sum(block.plain_ms for block in blocks)


def _figures(found: Sequence[Sequence[Block]], spent: Spent, ended: Sequence[str]) -> dict[str, Any]:
    kept = [[block for block in blocks if block.counts] for blocks in found]
    return {
        "step_ms": spread(block.plain_ms for blocks in found for block in blocks),
        "ratio_of_rounds": [ratio_of(blocks) for blocks in kept if blocks],
        "blocks_counted": [len(blocks) for blocks in kept],
        "daemon_core": spent.daemon_s / spent.wall_s,
        "agent_core": spent.agent_s / spent.wall_s,
        "thinkers_core": spent.thinkers_s / spent.wall_s,
        "states_at_end": list(ended),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and print it; 1 if a steady run costs more than it may."""
    arguments = parser(__doc__ or "").parse_args(argv)
    results = Results.of(HERE, arguments)
    records = {}
    for state, most in ROUNDS.items():
        rounds, blocks = (2, QUICK_BLOCKS) if arguments.quick else (most, BLOCKS)
        inputs = {**SIZE, "state": state, "rounds": rounds, "blocks": blocks, "turns": BLOCK, "under": UNDER}
        inputs |= {"torch": torch.__version__, "code": code_digest(*CODE)}
        record = None if arguments.again else results.load(state, inputs)
        if record is None:
            with Console(stderr=True).status(f"{state}: {rounds} rounds of {blocks} blocks"):
                record = results.save(state, inputs, measure(state, rounds, blocks))
        records[state] = record
    costs = costs_of({state: record["figures"] for state, record in records.items()})
    Console(width=None if sys.stdout.isatty() else 120).print(table_of(costs))
    if arguments.json:
        write_json(arguments.json, {"study": HERE.name, "quick": arguments.quick, "records": records, "costs": costs})
    return 0 if all(costs[state]["holds"] for state in ("frozen", "paused")) or arguments.quick else 1


if __name__ == "__main__":
    sys.exit(main())
