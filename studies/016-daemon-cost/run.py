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
from rich.table import Table  # noqa: E402
from studykit import Results, code_digest, parser, percentile, spread, write_json  # noqa: E402
from trainee import SIZE, Trainee  # noqa: E402

from zftune.daemon.client import DaemonClient  # noqa: E402
from zftune.daemon.errors import DaemonError  # noqa: E402

ALLOWED_RATIO, ALLOWED_CORE = 1.01, 0.02
CODE = (f"studies/{HERE.name}", "zftune/agent", "zftune/daemon", "zftune/tuner", "zftune/workload", "runtime/zenflow")
BLOCK = 8  # pairs of steps: two windows
ROUNDS, BLOCKS, QUICK_BLOCKS = 4, 120, 4
STATES = ("none", "frozen", "paused", "searching")
REACHED = {"frozen": ("frozen",), "paused": ("baseline", "searching"), "searching": ("searching", "confirming")}
_STEADY = STATES[1:3]
_SOON_S = 120.0
_RESAMPLES = 2000


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
    """Steps under the daemon and steps without one, one of each in turn."""

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

    def prepare(self, state: str) -> None:
        """Come to a state, and let both trainings warm up."""
        self.plain.ask("train", 2 * BLOCK)
        if state != "none":
            self.under.ask("attach", 1 if state == "frozen" else 1000)
        ends_s = time.monotonic() + _SOON_S
        while state != "none" and self.daemon.run.get("state") not in REACHED[state]:
            if time.monotonic() > ends_s:
                raise TimeoutError(f"the run is {self.daemon.run.get('state')}, not {state}")
            self.under.ask("train", 4)
        if state == "paused":
            self.daemon.client.post(f"/v1/runs/{self.daemon.run['run']}/pause")
        self.under.ask("train", 2 * BLOCK)

    def block(self, spent: Spent) -> Block:
        """Steps in pairs, in random order."""
        took_ms = {"under": 0.0, "plain": 0.0}
        changes, own = self.under.ask("knobs")
        before = (*self.daemon.processor_s(), self.under.ask("agent_s"))
        for _ in range(BLOCK):
            for which in random.sample(("under", "plain"), 2):
                took_ms[which] += self._step(which)
        self._hold(under=False, plain=False)
        spent.add(before, (*self.daemon.processor_s(), self.under.ask("agent_s")), took_ms["under"] / 1e3)
        return Block(took_ms["under"], took_ms["plain"], own and self.under.ask("knobs")[0] == changes)

    def _step(self, which: str) -> float:
        self._hold(under=which == "plain", plain=which == "under")
        trainee = self.under if which == "under" else self.plain
        begin_s = time.perf_counter()
        trainee.ask("train", 1)
        return 1e3 * (time.perf_counter() - begin_s)

    def _hold(self, *, under: bool, plain: bool) -> None:
        self.plain.hold(plain)
        self.daemon.hold(under)
        self.under.hold(under)


def measure(state: str, rounds: int, blocks: int) -> dict[str, Any]:
    """Blocks of a state, in several rounds of fresh processes: where memory lies differs from one to the next."""
    found: list[list[Block]] = []
    spent, ended = Spent(), []
    for _ in range(rounds):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zft-")))
            daemon = stack.enter_context(closing(Daemon(folder)))
            trainees = [stack.enter_context(closing(Trainee())) for _ in range(2)]
            this = Round(daemon, *random.sample(trainees, 2))
            this.prepare(state)
            found.append([this.block(spent) for _ in range(blocks)])
            ended.append(daemon.run.get("state", "none"))
    return _figures(found, spent, ended)


def ratio_of(blocks: Sequence[Block]) -> float:
    """All time under the daemon to all time without."""
    return sum(block.under_ms for block in blocks) / sum(block.plain_ms for block in blocks)


def interval(blocks: Sequence[Block]) -> dict[str, float]:
    """95% of the ratio, by drawing blocks anew."""
    draws = sorted(ratio_of(random.choices(blocks, k=len(blocks))) for _ in range(_RESAMPLES))
    return {"low": percentile(draws, 0.025), "high": percentile(draws, 0.975)}


def _figures(found: Sequence[Sequence[Block]], spent: Spent, ended: Sequence[str]) -> dict[str, Any]:
    kept = [[block for block in blocks if block.counts] for blocks in found]
    counted = [block for blocks in kept for block in blocks]
    within = interval(counted)
    core = (spent.daemon_s + spent.agent_s) / spent.wall_s
    return {
        "step_ms": spread(block.plain_ms / BLOCK for block in counted),
        "ratio": ratio_of(counted),
        "ratio_95": within,
        "ratio_of_rounds": [ratio_of(blocks) for blocks in kept if blocks],
        "ratio_of_blocks": spread(block.under_ms / block.plain_ms for block in counted),
        "blocks_left_out": sum(len(blocks) for blocks in found) - len(counted),
        "daemon_core": spent.daemon_s / spent.wall_s,
        "agent_core": spent.agent_s / spent.wall_s,
        "thinkers_core": spent.thinkers_s / spent.wall_s,
        "states_at_end": list(ended),
        "verdict": {"ratio": within["high"] <= ALLOWED_RATIO, "core": core <= ALLOWED_CORE},
    }


def table_of(records: dict[str, dict[str, Any]]) -> Table:
    """The figures of every state."""
    table = Table(title="steps under a daemon to steps without one, real work on one thread")
    for name in ("run", "step", "ratio", "95%", "rounds", "daemon", "agent", "both", "thinking"):
        table.add_column(name, justify="right" if name != "run" else "left")
    for state, record in records.items():
        one = record["figures"]
        within, rounds, both = one["ratio_95"], one["ratio_of_rounds"], one["daemon_core"] + one["agent_core"]
        table.add_row(
            state,
            f"{one['step_ms']['median']:.1f} ms",
            f"{one['ratio']:.4f}",
            f"{within['low']:.4f} - {within['high']:.4f}",
            f"{min(rounds):.3f} - {max(rounds):.3f}",
            *(f"{share:.2%}" for share in (one["daemon_core"], one["agent_core"], both, one["thinkers_core"])),
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and print it; 1 if a steady run costs more than it may."""
    arguments = parser(__doc__ or "").parse_args(argv)
    results = Results.of(HERE, arguments)
    rounds, blocks = (1, QUICK_BLOCKS) if arguments.quick else (ROUNDS, BLOCKS)
    records = {}
    for state in STATES:
        inputs = {**SIZE, "state": state, "rounds": rounds, "blocks": blocks, "pairs": BLOCK}
        inputs |= {"torch": torch.__version__, "code": code_digest(*CODE)}
        record = None if arguments.again else results.load(state, inputs)
        if record is None:
            with Console(stderr=True).status(f"{state}: {rounds} rounds of {blocks} blocks"):
                record = results.save(state, inputs, measure(state, rounds, blocks))
        records[state] = record
    Console(width=None if sys.stdout.isatty() else 120).print(table_of(records))
    if arguments.json:
        write_json(arguments.json, {"study": HERE.name, "quick": arguments.quick, "records": records})
    steady = [records[state]["figures"]["verdict"] for state in _STEADY]
    return 0 if all(all(one.values()) for one in steady) or arguments.quick else 1


if __name__ == "__main__":
    sys.exit(main())
