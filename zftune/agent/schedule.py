"""The (step, knobs) schedule of a run: what `zftune run --export-schedule` writes and `zftune run --schedule` replays.

    {
      "zftune_schedule": 1,
      "steps": [
        {"after_step": 0, "knobs": {"topk_ratio": 0.1, "update_interval": 4}},
        {"after_step": 24, "knobs": {"update_interval": 8}},
        {"after_step": 32, "flush": true}
      ]
    }

`after_step` counts the optimizer's steps: what is asked for is done between that step and the next one, which closes
its window under the old knobs; 0 is before the first step, which takes the new ones already. A flush is the tuner's own
(its staleness probe has one). The script's are not told of: a replay runs the script, which does them again.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zenflow import ConfigError, HostMemoryError, ZenFlowConfig
from zenflow.errors import HostThreadsError, RankError
from zenflow.optimizer import ZenFlowOptimizer
from zftune.agent.session import Patches
from zftune.errors import BadInputError, ZftuneError
from zftune.text import write_text

_logger = logging.getLogger("zftune")


class Replay:
    """Carries out a schedule with the one zenflow optimizer of a training; `zftune run` sees that nobody tunes it.

    Raises:
        BadInputError: the schedule cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._left = deque(read_schedule(path))
        self._count = len(self._left)
        self._optimizer: weakref.ref[ZenFlowOptimizer] | None = None
        self._steps = 0
        atexit.register(self.end)

    def begin(self, optimizer: ZenFlowOptimizer) -> None:
        """Do what comes before the first step; one that goes on from a checkpoint has done what comes before that.

        Raises:
            BadInputError: it is a second optimizer, or the schedule's knobs do not go with the training's.
        """
        if self._optimizer is not None:
            raise BadInputError(
                f"--schedule '{self._path}': a second zenflow optimizer takes steps; a schedule is of one"
            )
        self._optimizer = weakref.ref(optimizer)
        changes = "1 change" if self._count == 1 else f"{self._count} changes"
        _logger.info("zftune replays the settings of '%s' (%s).", self._path, changes)
        while self._left and self._left[0].after_step < optimizer.steps:
            self._left.popleft()
        self.after(optimizer)

    def before(self, optimizer: ZenFlowOptimizer) -> None:
        """Nothing."""

    def after(self, optimizer: ZenFlowOptimizer) -> None:
        """Do what comes after this step.

        Raises:
            BadInputError: the schedule's knobs do not go with the training's, or this machine cannot have them.
        """
        self._steps = optimizer.steps
        while self._left and self._left[0].after_step <= self._steps:
            self._do(self._left.popleft(), optimizer)

    def end(self) -> None:
        """Say at the exit what was not done."""
        if self._left and self._optimizer is not None:
            _logger.warning(
                "The training ended after step %d: of the %d changes in '%s' %d did not come.",
                self._steps,
                self._count,
                self._path,
                len(self._left),
            )

    def _do(self, entry: Entry, optimizer: ZenFlowOptimizer) -> None:
        if entry.knobs is None:
            optimizer.flush()
            return
        try:
            optimizer.set_knobs(**entry.knobs)
        except (ConfigError, HostMemoryError, HostThreadsError, RankError) as error:
            raise BadInputError(f"--schedule '{self._path}', after step {entry.after_step}: {error}") from error


BEGINNING = (
    "topk_ratio",
    "select_interval",
    "update_interval",
    "max_update_interval",
    "auto_ratio",
    "overlap_step",
    "apply_lag",
    "look_ahead",
    "window_phase",
    "deferred_update",
    "offload_ratio",
    "host_threads",
)
"""Knobs that a replay begins with, since a preset may have given them; clipping and its like are the script's own."""


class Recording:
    """The schedule of the first zenflow optimizer that takes a step; its file is whole after every change."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._entries: list[Entry] = []
        self._optimizer: weakref.ref[ZenFlowOptimizer] | None = None
        self._step_begun_at: int | None = None
        self._broken = False
        self.patches = Patches()
        self.patches.replace(ZenFlowOptimizer, "set_knobs", self._set_knobs)
        self.patches.replace(ZenFlowOptimizer, "flush", self._flush)

    def begin(self, optimizer: ZenFlowOptimizer) -> None:
        """Note the knobs that it begins with; one that goes on from a checkpoint has them from there."""
        if self._optimizer is not None:
            _logger.warning(
                "A second zenflow optimizer takes steps: its settings are not in '%s', which holds the first one's.",
                self._path,
            )
            return
        self._optimizer = weakref.ref(optimizer)
        if optimizer.steps == 0:
            knobs = {name: getattr(optimizer.config, name) for name in BEGINNING}
            self._entries.append(Entry(0, knobs))
        self._write()

    def before(self, optimizer: ZenFlowOptimizer) -> None:
        if self._is_ours(optimizer):
            self._step_begun_at = optimizer.steps

    def after(self, optimizer: ZenFlowOptimizer) -> None:
        """The step is over, and the tuner's hook with it: the optimizer's own come before this one."""
        if self._is_ours(optimizer):
            self._step_begun_at = None

    def _is_ours(self, optimizer: ZenFlowOptimizer) -> bool:
        return self._optimizer is not None and self._optimizer() is optimizer

    def _set_knobs(self, original: Callable[..., int]) -> Callable[..., int]:
        def set_knobs(optimizer: ZenFlowOptimizer, **knobs: Any) -> int:
            step = original(optimizer, **knobs)
            if self._is_ours(optimizer):
                self._add(Entry(step - 1, knobs))
            return step

        return set_knobs

    def _flush(self, original: Callable[..., None]) -> Callable[..., None]:
        def flush(optimizer: ZenFlowOptimizer) -> None:
            original(optimizer)
            if self._is_ours(optimizer) and self._step_begun_at not in (None, optimizer.steps):
                self._add(Entry(optimizer.steps, None))

        return flush

    def _add(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._write()

    def _write(self) -> None:
        """Once it cannot be written it is given up: the training is not concerned."""
        if self._broken:
            return
        try:
            write_text(encode(self._entries), self._path, option="--export-schedule")
        except (ZftuneError, TypeError, ValueError) as error:
            self._broken = True
            _logger.warning("The schedule is not written any more: %s.", error)


VERSION = 1
_FIELDS = ("zftune_schedule", "steps")
_LONG = 1 << 30


@dataclass(frozen=True, slots=True)
class Entry:
    """What is done after a step."""

    after_step: int
    knobs: Mapping[str, Any] | None
    """What `set_knobs` is given; None: it is a flush."""


def encode(entries: Sequence[Entry]) -> str:
    """The text of a schedule."""
    steps = [
        {"after_step": one.after_step, **({"flush": True} if one.knobs is None else {"knobs": dict(one.knobs)})}
        for one in entries
    ]
    return json.dumps({"zftune_schedule": VERSION, "steps": steps}, indent=2, allow_nan=False) + "\n"


def read_schedule(path: str | os.PathLike[str]) -> list[Entry]:
    """The schedule in a file.

    Raises:
        BadInputError: it cannot be read, or is none; one sentence.
    """
    try:
        return decode(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"--schedule '{path}': cannot be read ({error.strerror})") from error
    except BadInputError as error:
        raise BadInputError(f"--schedule '{path}': {error}") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"--schedule '{path}': is not JSON: it is no text in UTF-8") from error


def decode(text: str) -> list[Entry]:
    """Read a schedule's text; whatever is not as it has to be is refused.

    Raises:
        BadInputError: the field, its value, and what is allowed.
    """
    try:
        document = json.loads(text, parse_constant=_no_number, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError, too
        raise BadInputError(f"is not JSON ({error})") from error
    if not isinstance(document, dict) or set(document) != set(_FIELDS):
        found = ", ".join(map(str, document)) if isinstance(document, dict) else _shown(document)
        raise BadInputError(f"holds {found or 'nothing'}; it must be an object with {' and '.join(_FIELDS)}")
    if document["zftune_schedule"] != VERSION or isinstance(document["zftune_schedule"], bool):
        raise BadInputError(f"zftune_schedule is {_shown(document['zftune_schedule'])}; it must be {VERSION}")
    steps = document["steps"]
    if not isinstance(steps, list):
        raise BadInputError(f"steps is {_shown(steps)}; it must be a list")
    entries: list[Entry] = []
    for number, step in enumerate(steps):
        entries.append(_entry(step, f"steps[{number}]", entries[-1].after_step if entries else 0))
    return entries


def _entry(step: object, where: str, before: int) -> Entry:
    names = ({"after_step", "knobs"}, {"after_step", "flush"})
    if not isinstance(step, dict) or set(step) not in names:
        found = ", ".join(step) if isinstance(step, dict) else _shown(step)
        raise BadInputError(f"{where} holds {found or 'nothing'}; it must hold after_step and either knobs or flush")
    after = step["after_step"]
    if isinstance(after, bool) or not isinstance(after, int) or after < before:
        raise BadInputError(f"{where}.after_step is {_shown(after)}; it must be an integer >= {before}")
    if "flush" in step:
        if step["flush"] is not True:
            raise BadInputError(f"{where}.flush is {_shown(step['flush'])}; it must be true")
        return Entry(after, None)
    knobs = step["knobs"]
    if not isinstance(knobs, dict) or not knobs:
        raise BadInputError(f"{where}.knobs is {_shown(knobs)}; it must be an object with a knob or more")
    _check_knobs(knobs, where)
    return Entry(after, knobs)


def _check_knobs(knobs: Mapping[str, Any], where: str) -> None:
    """Refuse what no optimizer takes; whether they go together with the others is known where it trains."""
    window = {"max_update_interval": _LONG, "update_interval": _LONG}
    try:
        ZenFlowConfig().changed({**window, **knobs})
    except ConfigError as error:
        raise BadInputError(f"{where}.knobs.{error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadInputError(f"{twice} stands there twice")
    return found


def _no_number(text: str) -> float:
    raise BadInputError(f"holds {text}; numbers must be finite")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
