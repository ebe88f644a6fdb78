"""A trial of `zftune tune --restartable`: the training runs a moment with other knobs, saves nothing, stops on time.

The parent and the ranks agree by files in the agent's folder, each of which appears whole:

    trial.json        parent   {"knobs": {..} | null, "stage": n}: null leaves the ds_config as it is
    asked-PID.json    rank     what it passes to DeepSpeed, before anything is built of it; it waits for
    apply             parent   the setting is written down as in flight: go on
    stop              parent   the step after which every rank stops; each then writes its last record and waits for
    exit              parent   all have: end the process
    lock-PID-..       rank     a lock that torch holds while it compiles, to be removed where the process was ended

So every rank stops between the same two steps, where none waits for another one, and nothing of the script runs after
that: no handler, no `finally`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zftune.agent.patches import Patches

if TYPE_CHECKING:
    from zftune.agent.session import Session

TRIAL, APPLY, STOP, EXIT = "trial.json", "apply", "stop", "exit"
MOST_LOSSES = 4096
_MONITORS = ("tensorboard", "wandb", "comet", "csv_monitor")
"""Sections of a ds_config by which DeepSpeed writes or sends what it monitors."""
_POLL_S = 0.01


def write_whole(path: Path, text: str) -> None:
    """Write a file that a reader sees either not at all or to its end."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


class Trial:
    """This process's part in it.

    Args:
        folder: the agent's.
        session: records the steps.
    """

    def __init__(self, folder: Path, session: Session) -> None:
        self.patches = Patches()
        """Stay in force until the process ends, unlike those of the recording."""
        spec = json.loads((folder / TRIAL).read_text(encoding="utf-8"))
        self._knobs: Mapping[str, Any] | None = spec["knobs"]
        self._stage: int = spec["stage"]
        self._folder = folder
        self._session = session
        self._losses: list[torch.Tensor] = []
        self._after: int | None = None
        self._told = False
        session.after_step = self.after_step

    def config(self, config: Mapping[str, Any], version: str) -> dict[str, Any]:
        """What DeepSpeed is to be given in place of a ds_config; returns once the parent lets it.

        Args:
            config: as the script has it.
            version: of DeepSpeed.
        """
        asked = self._folder / f"asked-{os.getpid()}.json"
        if not asked.exists():
            text = json.dumps({**_ranks(), "version": version, "config": config}, default=str)
            write_whole(asked, text)
        self._wait_for(APPLY)
        changed = dict(config)
        if self._knobs is not None:
            from zftune.store.apply import apply

            changed = apply(config, self._knobs, stage=self._stage, backend="deepspeed").config
        for name in _MONITORS:
            if isinstance(changed.get(name), Mapping):
                changed[name] = {**changed[name], "enabled": False}
        return changed

    def loss(self, loss: object) -> None:
        """Keep the loss of a backward pass; nobody waits for its value before the end."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and len(self._losses) < MOST_LOSSES:
            self._losses.append(loss.detach())

    def holds(self, lock: str) -> None:
        """A lock of torch's, which somebody has to remove should this process be ended while it compiles."""
        with contextlib.suppress(OSError):  # a full disk: the compilation goes on
            write_whole(self._note_of(lock), os.path.realpath(lock))

    def released(self, lock: str) -> None:
        """It is gone."""
        with contextlib.suppress(OSError):
            self._note_of(lock).unlink(missing_ok=True)

    def after_step(self, index: int) -> None:
        """A step is over.

        Args:
            index: its number.
        """
        if not self._told:
            self._told = True
            self._session.tell("trial", has_loss=bool(self._losses))
        if self._after is None and (self._folder / STOP).exists():
            self._after = int((self._folder / STOP).read_text(encoding="utf-8"))
        if self._after is not None and index >= self._after:
            self._session.tell("trial", losses=self._values(), device_bytes=_peak_bytes())
            self._session.finish()
            self._wait_for(EXIT)
            _end_process()

    def _values(self) -> list[float | None]:
        """Losses in order; None: one that is no number."""
        if not self._losses:
            return []
        values = torch.stack([loss.reshape(()).float() for loss in self._losses]).tolist()
        return [value if value - value == 0 else None for value in values]

    def _note_of(self, lock: str) -> Path:
        digest = hashlib.sha256(os.path.realpath(lock).encode()).hexdigest()[:16]
        return self._folder / f"lock-{os.getpid()}-{digest}"

    def _wait_for(self, name: str) -> None:
        """The parent's keeper ends this process where the parent is no more."""
        while not (self._folder / name).exists():
            time.sleep(_POLL_S)


def install(trial: Trial, when_imported: Callable[[str, Callable[[Any], None]], None]) -> None:
    """Change what a trial must not do, in the packages that are there and in those that will be imported."""
    from zftune.integrations import trials

    trials.install(trial, when_imported)


def _ranks() -> dict[str, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}
    return {"rank": 0, "world_size": 1}


def _peak_bytes() -> int | None:
    device = torch.get_device_module()
    ask, begun = (getattr(device, name, None) for name in ("max_memory_allocated", "is_initialized"))
    return int(ask()) if ask is not None and begun is not None and begun() else None


def _end_process() -> None:
    """At once: neither `finally` nor `atexit` may save anything."""
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or a pipe that nobody reads: the process ends in any case
            stream.flush()
    os._exit(0)
