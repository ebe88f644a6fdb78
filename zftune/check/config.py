"""A ds_config as DeepSpeed, and as Hugging Face, would read it."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, NoReturn

from zftune.check.findings import MISSING, Path
from zftune.errors import BadInputError

_ALLOWED = "allowed is a ds_config: a JSON object in a file"

# What the Hugging Face Trainer or Accelerate puts a value in for, and a value that is as good as theirs.
FILLED: dict[str, Any] = {
    "train_batch_size": 1,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 1e-3,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0.0,
    "scheduler.params.warmup_max_lr": 1e-3,
    "scheduler.params.warmup_num_steps": 10,
    "scheduler.params.total_num_steps": 100,
    "bf16.enabled": False,
    "fp16.enabled": False,
    "zero_optimization.stage": 2,
    "zero_optimization.reduce_bucket_size": 500_000_000,
    "zero_optimization.stage3_prefetch_bucket_size": 50_000_000,
    "zero_optimization.stage3_param_persistence_threshold": 100_000,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.offload_optimizer.nvme_path": None,
    "zero_optimization.offload_param.device": "none",
    "zero_optimization.offload_param.nvme_path": None,
}
# These are nothing to DeepSpeed itself, which ends or takes a default: whoever writes them uses Hugging Face.
_TELLTALES = tuple(name for name in FILLED if not name.startswith("zero_optimization."))


@dataclass(frozen=True, slots=True)
class Source:
    """A ds_config, and what its text tells beside it."""

    config: dict[str, Any]
    duplicates: tuple[str, ...] = ()
    """Names that stand twice in one object."""
    is_json: bool = True
    """Whether it is plain JSON, which is all that Hugging Face reads."""
    text: str = ""
    """As it stands in the file."""


def read(path: str) -> Source:
    """A ds_config from a file.

    DeepSpeed reads Hjson, with comments and without quotes; so does this where the package `hjson` is installed.

    Raises:
        BadInputError: it cannot be read, or holds no JSON object.
    """
    try:
        text = FilePath(path).read_bytes().decode("utf-8")  # its line ends as they are
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInputError(f"'{path}': cannot be read ({reason}), {_ALLOWED}") from error
    duplicates: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        duplicates.extend(name for name in found if sum(name == other for other, _ in pairs) > 1)
        return found

    is_json, config = True, None
    try:
        config = json.loads(text, object_pairs_hook=collect, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        is_json = False
        duplicates.clear()
        config = _hjson(path, text, collect, error)
    if not isinstance(config, dict) or not text.strip():  # to Hjson an empty file is an object
        raise BadInputError(f"'{path}': holds no JSON object, {_ALLOWED}")
    return Source(config, tuple(duplicates), is_json, text)


def _refuse_constant(name: str) -> NoReturn:
    """NaN and Infinity are no JSON; Hjson takes them for words."""
    raise ValueError(name)


def _hjson(path: str, text: str, hook: Any, error: Exception) -> Any:
    try:
        hjson = importlib.import_module("hjson")
    except ImportError:
        return _loosely(path, text, hook, error)
    try:
        return hjson.loads(text, object_pairs_hook=hook)
    except (ValueError, RecursionError) as worse:
        raise BadInputError(f"'{path}': is neither JSON nor Hjson ({_first_line(worse)}), {_ALLOWED}") from worse


def _loosely(path: str, text: str, hook: Any, error: Exception) -> Any:
    """With NaN and Infinity, as Python's own reader takes them."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text, object_pairs_hook=hook)
    raise BadInputError(f"'{path}': is not JSON ({_first_line(error)}), {_ALLOWED}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:120]


def at(config: Mapping[str, Any], path: Path) -> Any:
    """A setting's value; MISSING where it is not there."""
    value: Any = config
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return MISSING
        value = value[name]
    return value


def put(config: dict[str, Any], path: Path, value: Any) -> None:
    """Set a setting, or take it out; sections on the way are made where they are not there.

    Args:
        config: is changed.
        path: of the setting.
        value: MISSING takes it out.
    """
    *sections, name = path
    for section in sections:
        inner = config.get(section)
        if not isinstance(inner, dict):
            if value is MISSING:
                return
            inner = config[section] = {}
        config = inner
    if value is MISSING:
        config.pop(name, None)
    else:
        config[name] = value


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every setting that is no section, and its path."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from leaves(inner, (*path, str(name)))
    else:
        yield path, value


def is_hugging_face(config: Mapping[str, Any]) -> bool:
    """Whether it is of the Trainer or Accelerate: they put values in where it says "auto"."""
    return any(at(config, tuple(name.split("."))) == "auto" for name in _TELLTALES)


def filled(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with a value wherever Hugging Face puts one in."""
    copy: dict[str, Any] = json.loads(json.dumps(config, default=str))
    for dotted, value in FILLED.items():
        if at(copy, tuple(dotted.split("."))) == "auto":
            put(copy, tuple(dotted.split(".")), value)
    return copy
