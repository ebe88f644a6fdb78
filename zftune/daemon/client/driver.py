"""What a tuner holds where the search is in the daemon."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace

from zenflow.optimizer import ZenFlowOptimizer
from zftune.daemon import PROTOCOL
from zftune.daemon.client.session import DaemonSession, Transport
from zftune.daemon.client.worker import RemoteWorker
from zftune.daemon.protocol.messages import Goodbye
from zftune.store.account import Counter
from zftune.tuner import messages
from zftune.tuner.drivers import Ended, Said, SearchDriver
from zftune.tuner.executor import Executor, TuningContext, counted, gpu_uuid
from zftune.tuner.setup import SINGLE_RANK, Reader, TuneRequest, WarmupStats, WorldInfo
from zftune.tuner.space import Setting

_MOST_REMARKS = 64
_MOST_SENTENCE = 2000


class DaemonDriver(SearchDriver):
    """Searches in the daemon; `transport` None: over its socket. `patience_s`: see `DaemonSession`."""

    asks_daemon = True

    def __init__(
        self,
        optimizer: ZenFlowOptimizer,
        wishes: TuneRequest,
        tokens: int,
        transport: Transport | None = None,
        company: WorldInfo = SINGLE_RANK,
        *,
        patience_s: float = 0.0,
    ) -> None:
        self._reader = Reader(optimizer, wishes, company=company)
        self._transport = transport or _client()
        self._tokens, self._patience_s = tokens, patience_s
        self._uuid = gpu_uuid(optimizer.device.torch_device)
        self._clock, self._thinking_s = optimizer.device.clock, wishes.search.thinking_s
        self._worker = RemoteWorker(tokens, self._clock)
        self._daemon_session: DaemonSession | None = None
        self._told = 0

    def prepare(self, seen: WarmupStats, counter: Counter) -> None:
        self._worker.counter, self.begun = counter, True
        reader = self._reader  # not this, or its thread would keep it
        self._daemon_session = DaemonSession(
            self._transport, self._worker, lambda: reader.facts(seen), tokens=self._tokens, gpu_uuid=self._uuid,
            clock=self._clock, thinking_s=self._thinking_s, patience_s=self._patience_s,
        )  # fmt: skip
        self._daemon_session.start()
        weakref.finalize(self, self._daemon_session.abandon).atexit = False

    @property
    def registered(self) -> bool:  # type: ignore[override]
        return self._daemon_session is not None and self._daemon_session.met

    def live(self, scene: TuningContext) -> Executor | None:
        config = scene.optimizer.config
        if config.update_interval == "auto" and not self._worker.given:
            return None  # until there is a search the knobs are the user's
        own = self._worker.own = Setting.of(counted(config))
        return Executor(scene, self._worker, start=own, incumbent=own)

    def said(self) -> list[Said]:
        found = [*self._reader.notices, *(() if self._daemon_session is None else self._daemon_session.notices)]
        new, self._told = found[self._told :], len(found)
        return [(logging.INFO, one) for one in new]

    def end(self, ended: Ended) -> Iterator[Said]:
        wrong = self._worker.wrong
        farewell = (
            None
            if self._daemon_session is None
            else self._daemon_session.goodbye(lambda session: self._goodbye(session, ended))
        )
        if farewell is not None:
            yield logging.WARNING if farewell.warning else logging.INFO, farewell.sentence
        elif wrong is not None:
            yield logging.WARNING, wrong
        elif ended.steps and not ended.given_up:
            yield logging.WARNING, self._counted_alone(ended)

    def close(self) -> None:
        self._worker.close()
        self._transport.close()

    def _counted_alone(self, ended: Ended) -> str:
        """The last words where the daemon has none."""
        if self._daemon_session is None:
            return "The training ends with the best settings so far: the search had not begun."
        if not self.registered:
            return "zftune tuned nothing: no daemon has answered."
        return messages.counted_alone(ended.incumbent, ended.gain, ended.count, self._daemon_session.record)

    def _goodbye(self, session: str, ended: Ended) -> Goodbye:
        return Goodbye(
            protocol=PROTOCOL,
            session=session,
            steps=ended.steps,
            begins=ended.begins,
            over=ended.over or ended.given_up,
            reason=(self._worker.wrong or self._worker.reason)[:_MOST_SENTENCE],
            remarks=tuple(replace(one, reason=one.reason[:_MOST_SENTENCE]) for one in ended.remarks[-_MOST_REMARKS:]),
            count=ended.count,
        )


def _client() -> Transport:
    from zftune.daemon.client.http import DaemonClient

    return DaemonClient()
