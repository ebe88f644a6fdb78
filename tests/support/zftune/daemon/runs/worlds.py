"""A store and a daemon's registry that a test drives, and may kill."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.zftune.daemon.runs.agents import RUN, SOON_S, Agent, facts, faster
from tests.support.zftune.daemon.runs.loops import Direct
from zftune.daemon.runs.registry import Registry
from zftune.errors import StoreError
from zftune.store import open_store
from zftune.store.store import Store
from zftune.store.types import TrialState
from zftune.tuner.space import Setting

START = Setting.of(facts().config)


class World:
    """A store in a file, and a daemon's registry; both can be ended like a process that is killed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_s = 0.0
        self.disturbed: Callable[[], str | None] = lambda: None
        self._killed: list[Registry] = []
        self._over = threading.Event()
        self.begin()

    def begin(self) -> None:
        self.store: Store = open_store(str(self.path))
        self.registry = Registry(
            lambda _: self.store,
            lease_s=30.0,
            clock=lambda: self.now_s,
            disturbance=lambda _: lambda: self.disturbed(),
        )
        self.transport = Direct(self.registry)

    def kill(self) -> None:
        """No goodbye is written; the locks end as they do with a process."""
        self.store.close()
        self._killed.append(self.registry)

    def end(self) -> None:
        """Whoever waits in `stop_at` goes on, and finds that there is nothing to write to."""
        self._over.set()
        for registry in (*self._killed, self.registry):
            registry.close()
        self.store.close()

    def stop_at(self, name: str, *, after: bool = False) -> threading.Event:
        """Let a method of the store wait until it all ends, before or after its work; set as soon as one waits."""
        work, reached = getattr(self.store, name), threading.Event()

        def wait(*given: Any, **more: Any) -> Any:
            if after:
                work(*given, **more)
            reached.set()
            self._over.wait(SOON_S)
            raise StoreError("it was killed here")

        setattr(self.store, name, wait)
        return reached

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
