"""Where the search of a training is made and thought about: in this process, or in the daemon."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from zenflow.optimizer import ZenFlowOptimizer
from zftune.tuner.changing import Change, Changes
from zftune.tuner.executor import Disturbance, Executor
from zftune.tuner.facts import Seen
from zftune.tuner.guard import LossGuard
from zftune.tuner.search import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a search is carried out in."""

    optimizer: ZenFlowOptimizer
    tokens: int
    """Of a step."""
    disturbance: Disturbance
    guard: LossGuard | None
    """None: no loss is known."""
    on_change: Change | None
    changes: Changes | None = None
    """How knobs change; None: at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a tuner has seen at its end."""

    steps: int
    """That were taken since it was attached."""
    begins: int
    """Steps before its search begins, at least."""
    over: bool
    """Whether the search came to its end."""
    given_up: bool
    """Whether it was given up, with a reason that was said."""
    remarks: tuple[str, ...]
    """What was found out beside the search."""


Said = tuple[int, str]
"""A sentence, and the level that it is logged with."""


class Counsel(ABC):
    """Prepares a search, thinks about it, and says what came of it. No method waits but the last two."""

    search: Search | None = None
    """What was found; None: it is not in this process, or there is none."""

    @abstractmethod
    def prepare(self, seen: Seen) -> None:
        """Make the search of a training that warmed up, in a thread."""

    @property
    @abstractmethod
    def begun(self) -> bool:
        """Whether it is being made, or is there."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether the search is there. Raises what making it raised."""

    @abstractmethod
    def live(self, scene: Scene) -> Executor | None:
        """The search in a training, once it is there; None: not yet. Raises what making it raised."""

    @abstractmethod
    def said(self) -> list[str]:
        """What is to be told since this was asked last."""

    @abstractmethod
    def end(self, ended: Ended) -> Iterator[Said]:
        """Say what came of it, and write it down; once nobody thinks any more."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""
