"""A store and a daemon's registry that a test drives, and may kill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.zftune.daemon.brain.agents import RUN, Agent, facts, faster
from tests.zftune.daemon.brain.loops import Direct
from zftune.daemon.brain.registry import Registry
from zftune.store import TrialState, open_store
from zftune.store.store import Store
from zftune.tuner.settings import Setting

START = Setting.of(facts().config)


class World:
    """A store in a file, and a daemon's registry; both can be ended like a process that is killed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.now_s = 0.0
        self.disturbed: str | None = None
        self.begin()

    def begin(self) -> None:
        self.store: Store = open_store(str(self._path))
        self.registry = Registry(
            self.store, lease_s=30.0, clock=lambda: self.now_s, disturbance=lambda _: lambda: self.disturbed
        )
        self.transport = Direct(self.registry)

    def kill(self) -> None:
        """No goodbye is written; the locks end as they do with a process."""
        self.store.close()
        self.registry._thinkers.close()

    def agent(self, step_ms: Callable[[Setting], float] = faster, **more: Any) -> Agent:
        return Agent(self.transport, step_ms, **more)

    @property
    def state(self) -> str:
        return self.registry.brain(RUN).state.name

    def trial_states(self, record: str | None) -> list[TrialState]:
        assert record is not None
        return [one.state for one in self.store.trials(record)]

    def kinds(self, record: str | None) -> list[str]:
        assert record is not None
        return [one.kind for one in self.store.decisions(record)]
