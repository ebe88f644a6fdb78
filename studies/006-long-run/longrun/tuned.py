"""The scripted run with a real daemon: a process of its own that tunes over its socket, as it would a user's run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longrun.scene import PHASES
from longrun.training import Training
from zftune.daemon.client.driver import DaemonDriver
from zftune.daemon.client.http import DaemonClient
from zftune.emulation.emulator import Slack
from zftune.errors import DaemonError
from zftune.store import open_store
from zftune.tuner.executor import disturbance_of
from zftune.tuner.messages import sentence
from zftune.tuner.search import SearchOptions
from zftune.tuner.setup import TuneRequest
from zftune.tuner.tuner import Tuner

COMPRESSION = 100
"""A step of the run stands for one of so many times its length: some 50 ms for 5 s."""
GRANT_S = SearchOptions().cost_floor_s / COMPRESSION
COST_SHARE = 0.01
THINKING_S = 1.0
"""Simulated time that a thought takes: about what one took in real time, on 15% of a core."""
_READY_S, _ENDS_S = 60.0, 30.0


@dataclass(slots=True)
class Run:
    """What was seen of it, step by step."""

    step_ms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    changes: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    """Steps after which other knobs held."""
    begins: list[int] = field(default_factory=list)
    """The first step of each phase."""
    peaks: list[tuple[int, int]] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


@contextmanager
def daemon(folder: Path) -> Iterator[Path]:
    """A daemon whose socket and store are in a folder; its socket."""
    path = folder / "z.sock"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("ZFTUNE_", "XDG_"))},
        "ZFTUNE_SOCKET": str(path),
        "ZFTUNE_DB": f"sqlite:///{folder}/zftune.db",
    }
    command = [sys.executable, "-c", "from zftune.cli.main import main; main()", "daemon", "start"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait_for(path, process, folder / "log")
            yield path
        finally:
            process.terminate()
            try:
                process.wait(_ENDS_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(path: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    ends = time.monotonic() + _READY_S
    while process.poll() is None and time.monotonic() < ends:
        client = DaemonClient(path)
        try:
            client.get("/v1/health")
            return
        except DaemonError:
            time.sleep(0.1)
        finally:
            client.close()
    raise RuntimeError(f"the daemon did not get ready: {log.read_text(errors='replace')[-500:]}")


def tuned(seed: int, first_steps: int) -> dict[str, Any]:
    """The whole scripted run; its figures.

    Args:
        seed: of weights, batches and search.
        first_steps: of the first phase.
    """
    run = Run()
    with tempfile.TemporaryDirectory() as name, daemon(Path(name)) as path, Training(seed) as training:
        os.environ["ZFTUNE_DB"] = f"sqlite:///{name}/zftune.db"  # the run names its store; this process is its own
        with ExitStack() as cleanup:
            tuner = _attached(training, seed, DaemonClient(path), run)
            cleanup.callback(tuner.close)
            for phase in PHASES:
                training.enter(phase)
                run.begins.append(training.optimizer.steps + 1)
                tuner.log_tokens(phase.tokens)
                for _ in range(phase.steps(first_steps)):
                    _step(training, tuner, run)
        run.notices += tuner.notices
        found = list(training.since(0, wait=True))
        run.step_ms = [round(one.step_ms or 0.0, 4) for one in found]
        slack = training.device.slack
        run.decisions = _decisions(f"sqlite:///{name}/zftune.db")
    return _figures(run, slack)


def _attached(training: Training, seed: int, client: DaemonClient, run: Run) -> Tuner:
    """What `zftune.attach(optimizer, daemon=True, tune_memory=True, ...)` makes, but with the grant compressed."""
    search = SearchOptions(
        seed=seed,
        hold=True,
        cost_floor_s=GRANT_S,
        cost_share=COST_SHARE,
        thinking_s=THINKING_S,
    )
    tokens = PHASES[0].tokens
    wishes = TuneRequest(quality="published", sequence=tokens, tune_memory=True, fresh=True, search=search)
    return Tuner(
        training.optimizer,
        DaemonDriver(training.optimizer, wishes, tokens, client),
        tokens=tokens,
        disturbance=disturbance_of(training.device),
        on_change=lambda step, knobs: run.changes.append((step, dict(knobs))),
    )


def _step(training: Training, tuner: Tuner, run: Run) -> None:
    tuner.log_loss(training.step())
    run.tokens.append(training.phase.tokens)
    peak = training.device.peak_bytes() or 0
    if not run.peaks or run.peaks[-1][1] != peak:
        run.peaks.append((training.optimizer.steps, peak))


def _decisions(url: str) -> list[dict[str, Any]]:
    """Of the run, as the daemon's store has them."""
    store = open_store(url)
    try:
        found = [one for run in store.runs() for one in store.decisions(run.run_id)]
    finally:
        store.close()
    return [{"kind": one.kind, "reason": sentence(one), "details": dict(one.details)} for one in found]


def _figures(run: Run, slack: Slack) -> dict[str, Any]:
    return {
        "step_ms": run.step_ms,
        "tokens": run.tokens,
        "begins": run.begins,
        "changes": run.changes,
        "peaks": run.peaks,
        "decisions": run.decisions,
        "notices": run.notices,
        "real_work_s": slack.worked_s,
    }


def spent(decisions: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Seconds that exploring cost and that had passed, by the search's own book at its last decision."""
    known = [one["details"] for one in decisions if "spent_s" in one["details"]]
    return (known[-1]["spent_s"], known[-1]["elapsed_s"]) if known else (0.0, 0.0)
