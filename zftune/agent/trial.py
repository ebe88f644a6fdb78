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
import functools
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from zftune.agent.session import Patches, Session
from zftune.ds_config.reading import offloads, read_given

Wrapped = Callable[..., Any]

_SAVES: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "deepspeed.runtime.engine": (
        ("DeepSpeedEngine", ("save_checkpoint", "save_16bit_model", "save_fp16_model")),
    ),
    "transformers.trainer": (
        (
            "Trainer",
            ("_save_checkpoint", "save_model", "push_to_hub", "_push_from_checkpoint", "init_hf_repo",
             "create_model_card", "save_state"),
        ),
    ),
    "accelerate.accelerator": (("Accelerator", ("save_state", "save_model")),),
}  # fmt: skip
"""Module: class, and its methods that do nothing in a trial. Each returns whether it saved, or nothing."""
_RETURN_TRUE = ("save_checkpoint", "save_16bit_model", "save_fp16_model")


def install(trial: Trial, when_imported: Callable[[str, Callable[[Any], None]], None]) -> None:
    """Change what is there, and what will be once it is imported."""
    inside = _Inside()
    when_imported("deepspeed.runtime.config", lambda module: _hook_config(trial, inside, module))
    when_imported("deepspeed", functools.partial(_hook_initialize, trial, inside))
    when_imported("deepspeed.runtime.engine", lambda module: _hook_backward(trial, module))
    when_imported("torch.utils.file_baton", functools.partial(_hook_batons, trial))
    for name in _SAVES:
        when_imported(name, functools.partial(_silence, trial, name))


class _Inside:
    """Whether `deepspeed.initialize` runs: other readings of a configuration are nobody's business here."""

    def __init__(self) -> None:
        self.depth = 0

    def wrap(self, original: Wrapped) -> Wrapped:
        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self.depth -= 1

        return initialize


def _hook_initialize(trial: Trial, inside: _Inside, module: Any) -> None:
    trial.patches.replace(module, "initialize", inside.wrap)


def _hook_config(trial: Trial, inside: _Inside, module: Any) -> None:
    def make(original: Wrapped) -> Wrapped:
        @functools.wraps(original)
        def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it stands for one
            if inside.depth:
                read = read_given(config)
                if read is not None and offloads(read):
                    config = trial.config(read, str(getattr(sys.modules.get("deepspeed"), "__version__", "0")))
            original(self, config, *args, **kwargs)

        return __init__

    trial.patches.replace(module.DeepSpeedConfig, "__init__", make)


def _hook_backward(trial: Trial, module: Any) -> None:
    def make(original: Wrapped) -> Wrapped:
        @functools.wraps(original)
        def backward(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
            trial.loss(loss)
            return original(self, loss, *args, **kwargs)

        return backward

    trial.patches.replace(module.DeepSpeedEngine, "backward", make)


def _hook_batons(trial: Trial, module: Any) -> None:
    """The locks of torch's compilations are files that stay where a process is killed."""

    def acquire(original: Wrapped) -> Wrapped:
        @functools.wraps(original)
        def try_acquire(self: Any) -> Any:
            acquired = original(self)
            if acquired:
                trial.holds(self.lock_file_path)
            return acquired

        return try_acquire

    def let_go(original: Wrapped) -> Wrapped:
        @functools.wraps(original)
        def release(self: Any) -> Any:
            result = original(self)
            trial.released(self.lock_file_path)
            return result

        return release

    trial.patches.replace(module.FileBaton, "try_acquire", acquire)
    trial.patches.replace(module.FileBaton, "release", let_go)


def _silence(trial: Trial, name: str, module: Any) -> None:
    for owner_name, methods in _SAVES[name]:
        owner = getattr(module, owner_name, None)
        for method in methods if owner is not None else ():
            trial.patches.replace(owner, method, functools.partial(_nothing, result=method in _RETURN_TRUE or None))


def _nothing(original: Wrapped, *, result: bool | None) -> Wrapped:
    @functools.wraps(original)
    def nothing(*args: Any, **kwargs: Any) -> bool | None:  # noqa: ARG001 - whatever it is given
        return result

    return nothing


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
            from zftune.integrations.deepspeed.presets import apply

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
