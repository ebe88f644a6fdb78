"""The installed DeepSpeed's own judgement of ds_configs.

Importing DeepSpeed takes seconds and prints, so it is done in a process of its own:
`python -m zftune.integrations.deepspeed.asking` reads a question (JSON) from each line of its input and writes the
answer to it on a line of its output. `Asker` starts that process and talks to it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, Self, TypeAlias, get_args

from zenflow.names import did_you_mean
from zftune.ds_config.facts import BATCH, NAMES
from zftune.ds_config.reading import SettingPath
from zftune.errors import ZftuneError

UNTESTED = "zero_allow_untested_optimizer"
_MOST = 20  # faults of a file that are reported
_TIMEOUT_S = 120
_POPPED = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")  # which DeepSpeed takes out of Adam's settings
_ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")
_MISSING = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: '(\w+)'")


class AskingError(ZftuneError):
    """DeepSpeed could not be asked."""


class Fault(NamedTuple):
    """A setting that DeepSpeed refuses."""

    path: SettingPath
    """Empty: of the file as a whole."""
    error: str
    """In DeepSpeed's own words."""
    unknown: bool = False
    """Whether there is no setting of that name."""
    near: str = ""
    """The word, or the name where that is unknown, that may have been meant: "did you mean cpu"."""


Ask: TypeAlias = Callable[[Mapping[str, Any], int], Iterable[Fault]]
"""The faults of a ds_config, without words that somebody else fills in, on a number of ranks."""


class Asker:
    """The installed DeepSpeed in a process of its own, which starts at once and ends with the context."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                __name__,
            ],  # -P: not from the folder that it is asked in, which may be anybody's
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def __call__(self, config: Mapping[str, Any], world_size: int) -> list[Fault]:
        """Put a ds_config to it.

        Raises:
            AskingError: DeepSpeed does not import, or its process ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        question = json.dumps({"config": config, "world_size": world_size}, default=str)
        timer = threading.Timer(_TIMEOUT_S, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(question + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
        except (OSError, ValueError) as error:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            raise AskingError(lines[-1] if lines else f"its process did not answer: {error}") from error
        finally:
            timer.cancel()
        return [Fault(tuple(one["path"]), one["error"], one["unknown"], one["near"]) for one in answer]


def ranks_that_fit(config: Mapping[str, Any]) -> int:
    """Ranks with which the batch sizes of a ds_config go together; DeepSpeed itself asks for their number.

    Where that does not follow, as many as share a sequence: one that counts.

    Args:
        config: without words that somebody else fills in.
    """
    size = config.get("sequence_parallel_size", 1)
    if not isinstance(size, int) or size < 1:
        return 1
    known: list[Any] = [config.get(name) for name in BATCH]
    if not all(isinstance(one, int) and one > 0 for one in known):
        return size
    whole, micro, passes = known
    return size * (whole // (micro * passes) if whole % (micro * passes) == 0 else 1)


# In the process that has imported DeepSpeed


def refusals(config: Mapping[str, Any], world_size: int) -> list[Fault]:
    """What DeepSpeed refuses, one setting after another."""
    left = copy.deepcopy(dict(config))
    found: list[Fault] = []
    for _ in range(_MOST):
        error = first_error(left, world_size)
        if error is None:
            break
        path = tuple(_blamed(left, world_size, error) or ())
        follows = path[:1] and path[0] in BATCH and not _has(left, path)  # from what was taken out
        same = any(path[-1:] == (name,) for one in found for name in one.near.split())
        if not found or not (follows or same):
            found.append(_fault(left, path, error))
        if not _has(left, path) or not path:
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
    real, module.dist = module.dist, ranks  # this process has no ranks of its own
    try:
        return module.DeepSpeedConfig(config)
    finally:
        module.dist = real


def _check_types(read: Any) -> None:
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
        raise ValueError("'max_grad_norm' is not supported as an optimizer parameter; use gradient_clipping")
    kind = _optimizer_class(read, name, settings)
    if kind is None:
        return
    engine = (None,) if name in _ONE_BIT else ()
    inspect.signature(kind).bind([], *engine, **settings)
    if kind.__module__.startswith("torch."):
        import torch

        kind([torch.nn.Parameter(torch.zeros(1))], **settings)
        return
    _require_numbers(settings)
    if read.zero_config.stage in (1, 2) and getattr(read.zero_config, "zenflow", None) is not None:
        import torch  # whose AdamW has ZenFlow's selected columns, and looks at the bounds

        known = {name: settings[name] for name in ("lr", "betas", "eps", "weight_decay") if name in settings}
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], **known)


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
        torchs, decoupled = settings.pop("torch_adam", False), settings.pop(_POPPED[1], True)
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
        raise AssertionError(f'an untested ZeRO optimizer: "{UNTESTED}": true allows it')
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
    """The setting without which DeepSpeed says something else, one that it names before others; None: there is none.

    It does too where a section is left without what it needs: so it has to without that section, too.
    """
    from pydantic import ValidationError

    words = _words(error)

    @functools.cache
    def matters(path: tuple[str, ...]) -> bool:
        without = copy.deepcopy(config)
        _remove(without, path)
        other = first_error(without, world_size)
        return other is None or _words(other) != words

    def turn(path: list[str]) -> tuple[int, int]:
        """The first that it names, and the deepest of those that it does not name."""
        is_section = isinstance(_value(config, path), Mapping)
        named = None if is_section else re.search(rf"\b{re.escape(path[-1])}\b", words)
        return len(words) if named is None else named.start(), -len(path)

    for path in sorted(_settings(config), key=turn):
        if all(matters(tuple(path[: depth + 1])) for depth in range(len(path))):
            names = error.errors()[0]["loc"] if isinstance(error, ValidationError) else ()
            deeper = [str(name) for name in names if str(name) not in path]
            if lacking := _MISSING.search(words):
                return [path[0], "params", lacking[1]]
            return [*path, *deeper] if _has(config, [*path, *deeper]) else path
    unsaid = [name for name in reversed(BATCH) if name in words and config.get(name) is None]
    return next(([name] for name in sorted(unsaid, key=lambda name: name not in config)), None)  # null before missing


def _fault(config: Mapping[str, Any], path: SettingPath, error: Exception) -> Fault:
    from pydantic import ValidationError

    words, unknown = _words(error), False
    known = _choices(path, words)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        unknown = first["type"] == "extra_forbidden"
        known = _fields(error.title, first["loc"]) if unknown else known
    elif "unexpected keyword argument" in words:
        unknown, known = True, _arguments(config, path)
    given = path[-1] if unknown and path else _value(config, path)
    elsewhere = unknown and given in (*NAMES[()], *_arguments_of_any(path))  # it is a name, but of another section
    is_known = isinstance(given, str) and given.lower() in [one.lower() for one in known]
    near = "" if elsewhere or is_known else did_you_mean(given, known)
    return Fault(path, words, unknown, near.removeprefix("; "))


def _fields(model: str, location: tuple[int | str, ...]) -> list[str]:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel
    from pydantic import BaseModel

    found: Any = next((one for one in _subclasses(DeepSpeedConfigModel) if one.__name__ == model), None)
    for name in location[:-1]:
        field = None if found is None else found.model_fields.get(name)
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        found = next((one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)), None)
    return [] if found is None else list(found.model_fields)


def _subclasses(kind: Any) -> Iterator[Any]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _arguments(config: Mapping[str, Any], path: SettingPath) -> list[str]:
    if path[:1] == ("scheduler",):
        from deepspeed.runtime import lr_schedules

        kind = getattr(lr_schedules, str(config["scheduler"].get("type")), None)
        return [] if kind is None else list(inspect.signature(kind).parameters)[1:]
    return sorted(NAMES[("optimizer", "params")])


def _arguments_of_any(path: SettingPath) -> list[str]:
    from deepspeed.runtime import lr_schedules

    kinds = lr_schedules.VALID_LR_SCHEDULES if path[:1] == ("scheduler",) else ()
    return [name for kind in kinds for name in inspect.signature(getattr(lr_schedules, kind)).parameters]


def _choices(path: SettingPath, words: str) -> list[str]:
    if path[1:] == ("type",):
        import torch
        from deepspeed.runtime import config, lr_schedules

        ours, theirs = {
            "optimizer": (config.DEEPSPEED_OPTIMIZERS, torch.optim),
            "scheduler": (lr_schedules.VALID_LR_SCHEDULES, torch.optim.lr_scheduler),
        }.get(path[0], ((), SimpleNamespace()))
        return [*ours, *(name for name, one in vars(theirs).items() if inspect.isclass(one))]
    return [one for one in re.findall(r"['\"](\w+)['\"]", words) if one not in path]


def _settings(section: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[list[str]]:
    for name, value in section.items():
        yield [*path, name]
        if isinstance(value, Mapping):
            yield from _settings(value, (*path, name))


def _has(config: Any, path: Iterable[str]) -> bool:
    for name in path:
        if not isinstance(config, Mapping) or name not in config:
            return False
        config = config[name]
    return True


def _value(config: Any, path: Iterable[str]) -> Any:
    for name in path:
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def _remove(config: Any, path: Iterable[str]) -> None:
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
    """Answer questions until there are none."""
    logging.disable(logging.CRITICAL)
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints
        import deepspeed  # noqa: F401

        for line in sys.stdin:
            question = json.loads(line)
            found = refusals(question["config"], question["world_size"])
            answers.write(json.dumps([one._asdict() for one in found]) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
