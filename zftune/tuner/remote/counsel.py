"""What a tuner holds where the search is in the daemon."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator

from zenflow.optimizer import ZenFlowOptimizer
from zftune.daemon.wire import PROTOCOL, Goodbye, encode
from zftune.tuner.counsel import Counsel, Ended, Said, Scene
from zftune.tuner.disturbances import gpu_uuid
from zftune.tuner.executor import Executor
from zftune.tuner.facts import ALONE, Company, Reader, Seen, Wishes
from zftune.tuner.guard import Losses
from zftune.tuner.remote.courier import Courier, Transport
from zftune.tuner.remote.desk import RemoteDesk
from zftune.tuner.settings import Setting

_MOST_REMARKS = 64
_MOST_SENTENCE = 2000


class DaemonCounsel(Counsel):
    """Lets the daemon think.

    Args:
        optimizer: that trains.
        wishes: of the user.
        tokens: of a step.
        transport: asks the daemon; None: over its socket.
        company: ranks that it trains with.
    """

    def __init__(
        self,
        optimizer: ZenFlowOptimizer,
        wishes: Wishes,
        tokens: int,
        transport: Transport | None = None,
        company: Company = ALONE,
    ) -> None:
        self._reader = Reader(optimizer, wishes, company=company)
        self._transport = transport or _client()
        self._tokens = tokens
        self._uuid = gpu_uuid(optimizer.device.torch_device)
        self._clock, self._thinking_s = optimizer.device.clock, wishes.search.thinking_s
        self._desk = RemoteDesk(tokens, self._clock)
        self._courier: Courier | None = None
        self._told = 0

    def prepare(self, seen: Seen) -> None:
        reader = self._reader  # not this, or its thread would keep it
        self._courier = Courier(
            self._transport, self._desk, lambda: reader.facts(seen), tokens=self._tokens, gpu_uuid=self._uuid,
            clock=self._clock, thinking_s=self._thinking_s,
        )  # fmt: skip
        self._courier.start()
        weakref.finalize(self, self._courier.abandon).atexit = False

    @property
    def begun(self) -> bool:
        return self._courier is not None

    @property
    def ready(self) -> bool:
        return self._desk.given

    def live(self, scene: Scene) -> Executor:
        own = self._desk.own = Setting.of(scene.optimizer.config)
        heard = None if scene.guard is None else Losses(scene.optimizer.device, scene.guard, self._desk.hear_loss)
        return Executor(
            scene.optimizer,
            self._desk,
            start=own,
            incumbent=own,
            tokens=scene.tokens,
            disturbance=scene.disturbance,
            losses=heard,
            on_change=scene.on_change,
            changes=scene.changes,
        )

    def said(self) -> list[str]:
        found = [*self._reader.notices, *(() if self._courier is None else self._courier.notices)]
        new, self._told = found[self._told :], len(found)
        return new

    def end(self, ended: Ended) -> Iterator[Said]:
        wrong = self._desk.wrong
        if wrong is not None:
            yield logging.WARNING, wrong  # whatever the daemon says of it
        farewell = (
            None if self._courier is None else self._courier.goodbye(lambda session: self._goodbye(session, ended))
        )
        if farewell is not None:
            yield logging.WARNING if farewell.warning else logging.INFO, farewell.sentence
        elif ended.steps and not ended.given_up and wrong is None:
            why = "the search had not begun" if self._courier is None else "the daemon does not answer any more"
            yield logging.WARNING, f"The training ends with the best knobs so far: {why}."

    def close(self) -> None:
        self._desk.close()
        self._transport.close()

    def _goodbye(self, session: str, ended: Ended) -> Goodbye:
        between = self._desk.between
        return Goodbye(
            protocol=PROTOCOL,
            session=session,
            steps=ended.steps,
            begins=ended.begins,
            over=ended.over or ended.given_up,
            reason=(self._desk.wrong or self._desk.reason)[:_MOST_SENTENCE],
            remarks=tuple(one[:_MOST_SENTENCE] for one in ended.remarks[-_MOST_REMARKS:]),
            idle=None if between is None else encode(between),
        )


def _client() -> Transport:
    from zftune.daemon.client import DaemonClient

    return DaemonClient()
