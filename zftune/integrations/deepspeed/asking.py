"""What the installed DeepSpeed itself makes of ds_configs.

`python -m zftune.integrations.deepspeed.asking` reads questions as JSON from its input and answers on its output. It
imports DeepSpeed, which takes seconds, and is asked only for versions and sections that no table is about.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

_MOST = 20  # faults of a file that are told
_TIMEOUT_S = 120
_POPPED = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")  # which DeepSpeed takes out of Adam's settings
_ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")


class AskingError(Exception):
    """DeepSpeed could not be asked."""


def ask(configs: list[Mapping[str, Any]], world_size: int) -> list[list[dict[str, Any]]]:
    """Put ds_configs to the installed DeepSpeed, in a process of its own.

    Args:
        configs: without words that somebody else fills in.
        world_size: number of ranks.

    Returns:
        For each the settings that it refuses: `{"path": names or None, "error": its words}`.

    Raises:
        AskingError: there is no DeepSpeed, or it does not import.
    """
    question = json.dumps({"configs": configs, "world_size": world_size})
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-P", "-m", __name__]  # not from the folder that it is asked in, which may be anybody's
    try:
        done = subprocess.run(
            words, input=question, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_S, check=False
        )
        answers: list[list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise AskingError(str(error)) from error
    return answers


def refusals(config: Mapping[str, Any], world_size: int) -> list[dict[str, Any]]:
    """What DeepSpeed refuses, one setting after another, in the process that has imported it."""
    left, found = copy.deepcopy(dict(config)), []
    for _ in range(_MOST):
        error = first_error(left, world_size)
        if error is None:
            break
        path = _blamed(left, world_size, error)
        found.append({"path": path, "error": _words(error)})
        if path is None:
            break
        _remove(left, path)
    return found


def first_error(config: Mapping[str, Any], world_size: int) -> Exception | None:
    """What DeepSpeed raises for a ds_config; None: it takes it."""
    try:
        read = _read(copy.deepcopy(dict(config)), world_size)
        _check_types(read)
        _check_optimizer(read)
        _check_scheduler(read)
    except Exception as error:  # noqa: BLE001 - whatever it is, the run would end with it
        return error
    return None


def _read(config: dict[str, Any], world_size: int) -> Any:
    from deepspeed.runtime import config as module

    ranks = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda *_: world_size)
    module.dist = ranks  # this process has no ranks of its own
    return module.DeepSpeedConfig(config)


def _check_types(read: Any) -> None:
    """The engine looks at these when it is made."""
    from deepspeed.runtime.config import DtypeEnum

    for name in ("grad_accum_dtype", "param_dtype", "buffer_dtype"):
        value = getattr(read, name, None)
        if value is not None:
            DtypeEnum(value)


def _check_optimizer(read: Any) -> None:
    name, settings = read.optimizer_name, dict(read.optimizer_params or {})
    if name is None:
        return
    if "max_grad_norm" in settings:
        raise ValueError("'max_grad_norm' is not supported as an optimizer parameter")
    kind = _optimizer_class(read, name, settings)
    if kind is None:
        return
    engine = (None,) if name in _ONE_BIT else ()
    inspect.signature(kind).bind([], *engine, **settings)
    if kind.__module__.startswith("torch."):
        import torch

        kind([torch.nn.Parameter(torch.zeros(1))], **settings)
    else:
        _require_numbers(settings)


def _require_numbers(settings: Mapping[str, Any]) -> None:
    """What DeepSpeed's own optimizers do with these in C++, without compiling it."""
    first, second = settings.get("betas", (0, 0))
    for value in (first, second, *(settings.get(name, 0) for name in ("lr", "eps", "weight_decay"))):
        value + 0.0


def _optimizer_class(read: Any, name: str, settings: dict[str, Any]) -> Any:
    """Which class the engine makes; None: one that is not installed, or that is not made from the settings as given."""
    import deepspeed
    import torch

    zero = read.zero_config
    offloads = zero.offload_optimizer is not None and zero.offload_optimizer.device in ("cpu", "nvme")
    if name in ("adam", "adamw"):
        torchs, decoupled = (
            settings.pop(word, default) for word, default in (("torch_adam", False), (_POPPED[1], True))
        )
        if torchs:
            return torch.optim.AdamW if name == "adamw" or decoupled else torch.optim.Adam
        if offloads:
            settings.pop("fp32_optimizer_states", None)
            return deepspeed.ops.adam.DeepSpeedCPUAdam
        return deepspeed.ops.adam.FusedAdam
    if name == "adagrad":
        return deepspeed.ops.adagrad.DeepSpeedCPUAdagrad if offloads else torch.optim.Adagrad
    if name == "lion":
        return deepspeed.ops.lion.DeepSpeedCPULion if offloads else deepspeed.ops.lion.FusedLion
    if name == "lamb":
        return deepspeed.ops.lamb.FusedLamb
    if name in _ONE_BIT:
        if read.zero_enabled:
            raise AssertionError(f"{name} is not compatible with ZeRO")
        from deepspeed.runtime.fp16.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam

        return dict(zip(_ONE_BIT, (OnebitAdam, ZeroOneAdam, OnebitLamb), strict=True))[name]
    if name.startswith("mu"):
        return None
    kind = getattr(torch.optim, name)
    if read.zero_enabled and not read.zero_allow_untested_optimizer and kind is not torch.optim.Adam:
        raise AssertionError('an untested ZeRO optimizer: "zero_allow_untested_optimizer": true allows it')
    return kind


def _check_scheduler(read: Any) -> None:
    if read.scheduler_name is None:
        return
    import torch
    from deepspeed.runtime import lr_schedules

    where = lr_schedules if hasattr(lr_schedules, read.scheduler_name) else torch.optim.lr_scheduler
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    getattr(where, read.scheduler_name)(optimizer, **read.scheduler_params)


def _blamed(config: dict[str, Any], world_size: int, error: Exception) -> list[str] | None:
    """The setting without which DeepSpeed says something else; None: there is none.

    It does too where a section is left without what it needs: so it has to without that section, too.
    """
    from pydantic import ValidationError

    @functools.cache
    def matters(path: tuple[str, ...]) -> bool:
        without = copy.deepcopy(config)
        _remove(without, [*path])
        other = first_error(without, world_size)
        return other is None or _words(other) != _words(error)

    for path in sorted(_settings(config), key=len, reverse=True):
        if all(matters(tuple(path[: depth + 1])) for depth in range(len(path))):
            names = error.errors()[0]["loc"] if isinstance(error, ValidationError) else ()
            deeper = [str(name) for name in names if str(name) not in path]
            return [*path, *deeper] if _has(config, [*path, *deeper]) else path
    return None


def _settings(section: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[list[str]]:
    for name, value in section.items():
        yield [*path, name]
        if isinstance(value, Mapping):
            yield from _settings(value, (*path, name))


def _has(config: Any, path: list[str]) -> bool:
    for name in path:
        if not isinstance(config, Mapping) or name not in config:
            return False
        config = config[name]
    return True


def _remove(config: Any, path: list[str]) -> None:
    *sections, name = path
    for section in sections:
        config = config[section]
    del config[name]


def _words(error: Exception) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(one["msg"] for one in error.errors())
    return f"{type(error).__name__}: {error}"


def main() -> None:
    """Answer the questions."""
    question = json.load(sys.stdin)
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints
        import deepspeed  # noqa: F401

        answers = [refusals(config, question["world_size"]) for config in question["configs"]]
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
