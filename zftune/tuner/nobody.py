"""A tuner that does nothing, for scripts that ask for one where knobs come from a schedule, and what it consists of."""

from __future__ import annotations

from collections.abc import Iterator

from zenflow.optimizer import ZenFlowOptimizer
from zftune.tuner.counsel import Counsel, Ended, Said, Scene
from zftune.tuner.facts import Seen
from zftune.tuner.following import Tuner


def closed_tuner(optimizer: ZenFlowOptimizer) -> Tuner:
    """A tuner of an optimizer, closed: it knows the knobs, and nothing else.

    Args:
        optimizer: that trains.
    """
    tuner = Tuner(optimizer, Nobody(), tokens=1, disturbance=Nothing())
    tuner.close()
    return tuner


class Nobody(Counsel):
    """Never begins a search."""

    def prepare(self, seen: Seen) -> None:
        pass

    @property
    def begun(self) -> bool:
        return False

    @property
    def ready(self) -> bool:
        return False

    def live(self, scene: Scene) -> None:
        return None

    def said(self) -> list[str]:
        return []

    def end(self, ended: Ended) -> Iterator[Said]:
        return iter(())

    def close(self) -> None:
        pass


class Nothing:
    """Disturbs nothing."""

    def __call__(self) -> None:
        return None

    def close(self) -> None:
        pass
