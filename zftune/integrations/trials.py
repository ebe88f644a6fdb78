"""What a trial changes in the packages that train: DeepSpeed's configuration, and everything that saves or uploads.

Never imports them. What an installed version does not have is left as it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zftune.integrations.deepspeed.ds_config import offloads, read_given

if TYPE_CHECKING:
    from zftune.agent.trial import Trial

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
