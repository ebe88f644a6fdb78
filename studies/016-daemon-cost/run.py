"""What do the agent and the daemon cost at steps of 50 ms of real work? See README.md beside this file."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import psutil  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Results, code_digest, parser, spread, write_json  # noqa: E402

import zftune  # noqa: E402
from zenflow import ZenFlowAdamW, ZenFlowConfig  # noqa: E402
from zftune.daemon.client import DaemonClient  # noqa: E402
from zftune.daemon.errors import DaemonError  # noqa: E402
from zftune.tuner.settings import Setting  # noqa: E402
from zftune.workload import batches, build_model, load_text  # noqa: E402

ALLOWED_RATIO, ALLOWED_CORE = 1.01, 0.02
CODE = ("studies/016-daemon-cost/run.py", "zftune/daemon", "zftune/tuner", "zftune/workload", "runtime/zenflow")
CONFIG = ZenFlowConfig(topk_ratio=0.1, update_interval=4, select_interval=32, host_threads=1)
SIZE: dict[str, Any] = {"model": "tiny", "micro_batch": 4, "sequence": 128}  # 50 ms a step of real work on one thread
BLOCK = 8  # steps: two windows
PAIRS, QUICK_PAIRS = 150, 8
STATES = ("none", "frozen", "paused", "searching")
_STEADY = STATES[1:3]
_SOON_S = 120.0


class Training:
    """A model that trains on one thread, under a tuner or not."""

    def __init__(self) -> None:
        workload = build_model(SIZE["model"], dtype=torch.float32, seed=0)
        self.module = workload.module
        self.optimizer = ZenFlowAdamW(self.module.parameters(), lr=1e-5, config=CONFIG, module=self.module)
        tokens = workload.encode(load_text(None))
        self._feed = batches(tokens, micro_batch=SIZE["micro_batch"], sequence=SIZE["sequence"], seed=0)
        self.changes = 0
        self.own = True
        """Whether the knobs are those that it began with."""

    def attach(self, most_measurements: int) -> zftune.Tuner:
        """Let the daemon tune it."""
        first = Setting.of(CONFIG).knobs()

        def changed(_: int, knobs: Mapping[str, Any]) -> None:
            self.changes += 1
            self.own = all(first[name] == value for name, value in knobs.items() if name in first)

        return zftune.attach(
            self.optimizer, daemon=True, fresh=True, most_measurements=most_measurements, on_change=changed
        )

    def train(self, steps: int) -> list[float]:
        """What each step took, ms."""
        times = []
        for _ in range(steps):
            begin_s = time.perf_counter()
            ids = next(self._feed).input_ids
            loss = self.module(input_ids=ids, labels=ids).loss
            loss.backward()
            zftune.log_loss(loss)  # to whatever tuner is there
            self.optimizer.step()
            self.optimizer.zero_grad()
            times.append(1e3 * (time.perf_counter() - begin_s))
        return times


class Daemon:
    """A daemon as users start it, with a store on disk, that can be held still."""

    def __init__(self, folder: Path) -> None:
        os.environ["ZFTUNE_SOCKET"] = str(folder / "z.sock")
        os.environ["ZFTUNE_DB"] = f"sqlite:///{folder / 'z.db'}"
        command = [sys.executable, "-c", "from zftune.cli import main; main()", "daemon"]
        with (folder / "log").open("wb") as log:
            self._popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.process = psutil.Process(self._popen.pid)
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
        for process in (self.process, *self.process.children()):
            process.send_signal(signal.SIGSTOP if still else signal.SIGCONT)

    def processor_s(self) -> tuple[float, float]:
        """Of its own, and of what thinks for it."""
        own, thinks = self.process.cpu_times(), [child.cpu_times() for child in self.process.children()]
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


def agent_s() -> float:
    """Processor time of the agent's thread so far."""
    found = [thread for thread in threading.enumerate() if thread.name == "zftune-agent" and thread.ident]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in found)


@contextmanager
def attached(state: str, training: Training, daemon: Daemon) -> Iterator[None]:
    """A training under the daemon, in a state."""
    if state == "none":
        yield
        return
    with closing(training.attach(1 if state == "frozen" else 1000)):
        ends_s = time.monotonic() + _SOON_S
        wanted = {"frozen": ("frozen",), "paused": ("baseline", "searching"), "searching": ("searching", "confirming")}
        while daemon.run.get("state") not in wanted[state]:
            if time.monotonic() > ends_s:
                raise TimeoutError(f"the run is {daemon.run.get('state')}, not {state}")
            training.train(4)
        if state == "paused":
            daemon.client.post(f"/v1/runs/{daemon.run['run']}/pause")
        training.train(2 * BLOCK)
        yield


@dataclass(slots=True)
class Pair:
    """Steps under the daemon, and steps while it is held still, without a tuner."""

    under_ms: list[float]
    plain_ms: list[float]
    counts: bool
    """Whether the knobs were those of the other training all the time."""


def measure(state: str, pairs: int) -> dict[str, Any]:
    """Pairs of blocks, in random order.

    Args:
        state: of the run.
        pairs: how many.
    """
    with tempfile.TemporaryDirectory(prefix="zft-") as folder, closing(Daemon(Path(folder))) as daemon:
        under, plain = Training(), Training()
        under.train(BLOCK)
        plain.train(2 * BLOCK)
        found, spent = [], [0.0, 0.0, 0.0, 0.0]
        with attached(state, under, daemon):
            for _ in range(pairs):
                blocks = {}
                changes, own = under.changes, under.own
                for which in random.sample(("under", "plain"), 2):
                    daemon.hold(still=which == "plain")
                    if which == "plain":
                        blocks[which] = plain.train(BLOCK)
                        continue
                    before = (*daemon.processor_s(), agent_s(), time.perf_counter())
                    blocks[which] = under.train(BLOCK)
                    after = (*daemon.processor_s(), agent_s(), time.perf_counter())
                    spent = [one + max(0.0, now - then) for one, now, then in zip(spent, after, before, strict=True)]
                daemon.hold(still=False)
                found.append(Pair(blocks["under"], blocks["plain"], own and changes == under.changes))
            ended = daemon.run.get("state", "none")
    return _figures(found, spent, ended)


def _figures(found: Sequence[Pair], spent: Sequence[float], ended: str) -> dict[str, Any]:
    counted = [pair for pair in found if pair.counts]
    ratios = [statistics.fmean(pair.under_ms) / statistics.fmean(pair.plain_ms) for pair in counted]
    own_s, thinkers_s, agent, wall_s = spent
    deviation = statistics.median(abs(one - statistics.median(ratios)) for one in ratios)
    core = (own_s + agent) / wall_s
    return {
        "step_ms": spread(statistics.median(pair.plain_ms) for pair in counted),
        "ratio": spread(ratios),
        "ratio_error": 1.4826 * deviation * 1.2533 / len(ratios) ** 0.5,
        "pairs_left_out": len(found) - len(counted),
        "daemon_core": own_s / wall_s,
        "agent_core": agent / wall_s,
        "thinkers_core": thinkers_s / wall_s,
        "state_at_end": ended,
        "verdict": {"ratio": statistics.median(ratios) <= ALLOWED_RATIO, "core": core <= ALLOWED_CORE},
    }


def table_of(records: dict[str, dict[str, Any]]) -> Table:
    """The figures of every state."""
    table = Table(title="steps under a daemon to steps without one, real work on one thread")
    for name in ("run", "step", "ratio", "5 - 95%", "±", "daemon", "agent", "both", "thinking"):
        table.add_column(name, justify="right" if name != "run" else "left")
    for state, record in records.items():
        one = record["figures"]
        ratio, both = one["ratio"], one["daemon_core"] + one["agent_core"]
        table.add_row(
            state,
            f"{one['step_ms']['median']:.1f} ms",
            f"{ratio['median']:.4f}",
            f"{ratio['p5']:.3f} - {ratio['p95']:.3f}",
            f"{2 * one['ratio_error']:.4f}",
            *(f"{share:.2%}" for share in (one["daemon_core"], one["agent_core"], both, one["thinkers_core"])),
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and print it; 1 if a steady run costs more than it may."""
    arguments = parser(__doc__ or "").parse_args(argv)
    results = Results.of(HERE, arguments)
    torch.set_num_threads(1)
    pairs = QUICK_PAIRS if arguments.quick else PAIRS
    records = {}
    for state in STATES:
        inputs = {**SIZE, "state": state, "pairs": pairs, "block": BLOCK, "torch": torch.__version__}
        inputs["code"] = code_digest(*CODE)
        record = None if arguments.again else results.load(state, inputs)
        if record is None:
            with Console(stderr=True).status(f"{state}: {pairs} pairs"):
                record = results.save(state, inputs, measure(state, pairs))
        records[state] = record
    Console(width=None if sys.stdout.isatty() else 120).print(table_of(records))
    if arguments.json:
        write_json(arguments.json, {"study": HERE.name, "quick": arguments.quick, "records": records})
    steady = [records[state]["figures"]["verdict"] for state in _STEADY]
    return 0 if all(all(one.values()) for one in steady) or arguments.quick else 1


if __name__ == "__main__":
    sys.exit(main())
