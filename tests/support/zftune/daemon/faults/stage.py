"""A daemon and trainings that faults befall, and what has to hold afterwards whatever befell them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from tests.support.tiers import fast
from tests.support.zftune.daemon.daemons import environment
from tests.support.zftune.daemon.faults import lives
from zftune.daemon.client.http import DaemonClient
from zftune.errors import DaemonError
from zftune.store import open_store
from zftune.store.store import Store
from zftune.store.types import RunState, TrialState
from zftune.tuner.messages import sentence

FAULTS = int(os.environ.get("ZFTUNE_FAULTS", fast("1", all_of="3")))
"""How often each of them happens."""
SEED = int(os.environ.get("ZFTUNE_FAULTS_SEED", "5"))
SOON_S = 60.0


def until(holds: Callable[[], bool], what: Callable[[], object] = lambda: "") -> None:
    ends = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < ends, what()
        time.sleep(0.005)


class Training:
    def __init__(self, process: ForkServerProcess, path: Path) -> None:
        self.process, self._path = process, path
        self.result: dict[str, Any] = {}
        """What came of it, once it has ended."""

    def now(self) -> dict[str, Any]:
        try:
            text = self._path.with_suffix(".alive").read_text()
            return {"steps": 0, "role": None, "resting": False, **json.loads(text or "{}")}
        except (FileNotFoundError, ValueError):  # just now it is written
            return {"steps": 0, "role": None, "resting": False}

    @property
    def steps(self) -> int:
        return int(self.now()["steps"])

    @property
    def changes(self) -> list[tuple[int, dict[str, Any]]]:
        """Steps after which knobs hold, and these."""
        return [(step, knobs) for step, knobs in self._written() if knobs is not None]

    @property
    def is_through(self) -> bool:
        """Whether what runs was measured to its end and is about to go."""
        written = self._written()
        return bool(written) and written[-1][1] is None

    def _written(self) -> list[tuple[int, dict[str, Any] | None]]:
        """Line by line; one that was cut off is none."""
        path = self._path.with_suffix(".changes")
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [(step, knobs) for step, knobs in (json.loads(line) for line in lines if line.endswith("\n"))]

    def goes_on(self, steps: int = 30) -> None:
        enough = self.steps + steps
        self.until(lambda now: now["steps"] >= enough)

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        until(lambda: holds(self.now()) or not self.process.is_alive(), lambda: (self.now(), self.said()))
        assert self.process.is_alive(), self.said()

    def said(self) -> str:
        log = self._path.with_suffix(".log")
        return log.read_text() if log.exists() else ""

    def end(self) -> dict[str, Any]:
        self._path.with_suffix(".stop").touch()
        self.process.join(SOON_S)
        assert self.process.exitcode == 0, self.said()
        self.result = json.loads(self._path.with_suffix(".json").read_text())
        assert self.result["balanced"]
        weights = torch.load(self._path.with_suffix(".pt"), weights_only=True)
        for one, two in zip(weights, lives.replay(self.changes, self.result["steps"]), strict=True):
            assert torch.equal(one, two)
        assert self.result["knobs"] == self.result["incumbent"]
        return self.result

    def kill(self) -> None:
        self.process.kill()
        self.process.join(SOON_S)


@dataclass
class Life:
    process: ForkServerProcess

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(SOON_S)

    def end(self) -> None:
        self.signal(signal.SIGTERM)
        self.process.join(SOON_S)
        assert self.process.exitcode == 0


class Stage:
    """Where a fault happens. `context` forks from the fork_server."""

    def __init__(self, context: ForkServerContext, folder: Path, database: Path | None = None) -> None:
        self.folder, self.database = folder, database or folder / "zftune.db"
        self.socket = folder / "z.sock"
        self.client = DaemonClient(self.socket, timeout_s=20.0)
        self.acknowledged: dict[str, tuple[list[Any], list[Any]]] = {}
        """Decisions and measured trials of records, as the daemon showed them."""
        self._context = context
        self._processes: list[ForkServerProcess] = []
        self._trainings: list[Training] = []
        self._environment = environment(folder, ZFTUNE_DB=str(self.database), HOME=str(folder))

    def begin_daemon(self, *, lease_s: float = 30.0, busy_s: float = 60.0, most_bytes: int = 0) -> Life:
        arguments = (str(self.folder), self._environment, lease_s, busy_s, most_bytes)
        return Life(self._begin(lives.serve, *arguments))

    def daemon(self, **more: Any) -> Life:
        begun = self.begin_daemon(**more)
        until(lambda: self.pid() == begun.process.pid or not begun.process.is_alive(), self.log)
        assert begun.process.is_alive(), self.log()
        return begun

    def train(self, *, most: int = 6, fresh: bool = True) -> Training:
        """One that trains; its search needs no process to propose settings."""
        name = f"t{len(self._trainings)}"
        given = {"most": most, "fresh": fresh}
        process = self._begin(lives.train, str(self.folder), name, self._environment, given)
        self._trainings.append(Training(process, self.folder / name))
        return self._trainings[-1]

    def pid(self) -> int | None:
        try:
            return int(self.client.get("/v1/health", timeout_s=2.0)["pid"])
        except DaemonError:
            return None

    def log(self) -> str:
        path = self.folder / "daemon.log"
        return path.read_text() if path.exists() else ""

    def _begin(self, work: Callable[..., None], *arguments: Any) -> ForkServerProcess:
        process = self._context.Process(target=work, args=arguments)
        process.start()
        self._processes.append(process)
        return process

    def live_run(self) -> dict[str, Any] | None:
        try:
            found = [one for one in self.client.get("/v1/runs") if one["state"] != "ended"]
        except DaemonError:
            return None
        return found[-1] if found else None

    def state(self) -> str | None:
        found = self.live_run()
        return None if found is None else found["state"]

    def until_state(self, *wanted: str, training: Training) -> dict[str, Any]:
        until(lambda: self.state() in wanted or not training.process.is_alive(), lambda: (self.state(), self.log()))
        assert training.process.is_alive(), training.said()
        found = self.live_run()
        assert found is not None
        return found

    def acknowledge(self) -> dict[str, Any]:
        """Keep what the daemon says now of its run: from now on it must not be lost."""
        until(lambda: self.live_run() is not None, self.log)  # one that was silent for too long comes again
        run = self.live_run() or {}
        details: dict[str, Any] = self.client.get(f"/v1/runs/{run['run']}")
        if run["record"] is not None:
            decisions = [(one["kind"], one["reason"], one["at_unix_s"]) for one in details["decisions"]]
            measured = [(one["number"], one["knobs"], one["step_ms"]) for one in details["trials"]]
            self.acknowledged[run["record"]] = (decisions, measured)
        return details

    def look(self, *, accounts: bool = False) -> None:
        """Once all has ended: nothing is lost, nothing is left.

        A store that cannot be written has no accounts of the trainings, and two runs of one training have it both.
        """
        with open_store(str(self.database), environment={"HOME": str(self.folder)}) as store:
            assert store.notices == []
            store.reap()
            for record, (decisions, measured) in self.acknowledged.items():
                self._look_for(store, record, decisions, measured)
            runs = store.runs()
            assert {one.state for one in runs} <= {RunState.LOST, RunState.FINISHED}
            states = {trial.state for run in runs for trial in store.trials(run.run_id)}
            assert not states & {TrialState.IN_FLIGHT}
            if accounts:
                self._look_at_accounts(store, [one.run_id for one in runs])
        self.look_at_leftovers()

    def _look_at_accounts(self, store: Store, runs: list[str]) -> None:
        """All steps of the trainings are in the accounts of their runs, each once."""
        accounts = [one for one in map(store.account, runs) if one is not None]
        processes = sum(len(one.earlier) + 1 for one in accounts)
        if processes < len(self._trainings) or not all(one.result for one in self._trainings):
            return  # one was killed, or had no run
        assert sum(one.total.steps for one in accounts) == sum(one.result["tuned_steps"] for one in self._trainings)

    def look_at_leftovers(self) -> None:
        """No process, no socket, no lock."""
        sessions = {one.pid for one in self._processes}
        until(lambda: not alive_in(sessions), lambda: alive_in(sessions))
        assert not self.socket.exists()
        assert not self.socket.with_name("z.sock.lock").exists()
        runs = self.database.with_name(f"{self.database.name}.runs")
        files = list(runs.iterdir()) if runs.exists() else []
        assert not files

    def close(self) -> None:
        self.client.close()
        for one in self._processes:
            if one.is_alive():
                one.kill()
            one.join()
            one.close()

    def _look_for(self, store: Store, record: str, decisions: list[Any], measured: list[Any]) -> None:
        kept = [(one.kind, sentence(one), one.at_unix_s) for one in store.decisions(record)]
        assert kept[: len(decisions)] == decisions
        rows = {one.number: one for one in store.trials(record)}
        for number, knobs, step_ms in measured:
            assert dict(rows[number].knobs) == knobs
            assert step_ms is None or store.measurements(rows[number].trial_id)

    def crashed(self) -> list[dict[str, Any]]:
        return [knobs for state, knobs in self.trials() if state is TrialState.CRASHED]

    def adopted(self) -> list[dict[str, Any]]:
        with open_store(str(self.database), environment={"HOME": str(self.folder)}) as store:
            found = []
            for run in store.runs():
                knobs = {trial.number: dict(trial.knobs) for trial in store.trials(run.run_id)}
                kinds = [one for one in store.decisions(run.run_id) if one.kind == "adopt"]
                found += [knobs[one.trial] for one in kinds if one.trial is not None]
            return found

    def measured(self) -> list[dict[str, Any]]:
        """Settings that were measured to their end."""
        with open_store(str(self.database), environment={"HOME": str(self.folder)}) as store:
            trials = [trial for run in store.runs() for trial in store.trials(run.run_id)]
            whole = [one for one in trials if any(m.void_reason is None for m in store.measurements(one.trial_id))]
            return [dict(trial.knobs) for trial in whole]

    def trials(self) -> list[tuple[TrialState, dict[str, Any]]]:
        with open_store(str(self.database), environment={"HOME": str(self.folder)}) as store:
            return [(trial.state, dict(trial.knobs)) for run in store.runs() for trial in store.trials(run.run_id)]


def alive_in(sessions: set[int | None]) -> Mapping[int, str]:
    """Processes of some sessions that have not ended."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                name, _, rest = (folder / "stat").read_text().rpartition(")")
            except OSError:  # it has gone
                continue
            state, _, _, session = rest.split()[:4]
            if int(session) in sessions and state not in "ZX":
                found[int(folder.name)] = name
    return found
