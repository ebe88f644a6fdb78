"""ds_configs as people have them: in a file, in an Accelerate configuration, in the arguments of a call; and back.

What the text of a ds_config means is `zftune.ds_config.text`'s alone: every command reads it through this module, as
DeepSpeed does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from zenflow import ConfigError
from zenflow.config import modernized
from zftune.ds_config.text import load, parse, read_file, refuse_duplicates
from zftune.errors import BadInputError

_WANTED = "give a ds_config (a JSON object) or an Accelerate configuration (YAML)"
_TRUE = ("true", "1", "1.0", "yes", "on", "t", "y")  # what pydantic takes for true
_FALSE = ("false", "0", "0.0", "no", "off", "f", "n")


class Missing(Enum):
    """The value of a setting that is not there, and of one that is to be left out."""

    MISSING = "left out"


MISSING = Missing.MISSING
SettingPath: TypeAlias = tuple[str, ...]

# What the Hugging Face Trainer or Accelerate puts a value in for, and a value that is as good as theirs.
FILLED: dict[str, Any] = {
    "train_batch_size": 1,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "steps_per_print": 2_000_000_000,
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
TELLTALES = tuple(name for name in FILLED if not name.startswith("zero_optimization."))


class Place(NamedTuple):
    """Where a setting of Accelerate's stands."""

    name: str
    """With dots, of its file; else an option of the command line."""
    value: Any
    """As it stands there; MISSING: it does not, and a default is taken."""


@dataclass(frozen=True, slots=True)
class Source:
    """A ds_config, and what is to be known of where it stands."""

    config: dict[str, Any]
    path: str | None = None
    """Of the file in which it stands: where an Accelerate configuration names a JSON, of that."""
    duplicates: tuple[str, ...] = ()
    flaw: str | None = None
    """Why it is not plain JSON, which is all that Hugging Face reads; None: it is."""
    text: str = ""
    through: str | None = None
    """By what it was found: an Accelerate or training configuration, or what stands on a command line."""
    places: Mapping[str, Place] | None = None
    """Of settings, by their names with dots, where Accelerate makes the ds_config of its own."""
    hugging_face: bool = False
    """Whether Accelerate or the Trainer hands it on, whatever it says."""


def read(path: str) -> Source:
    """A ds_config from a file: JSON or Hjson, or an Accelerate or training configuration that has one or names one.

    Raises:
        BadInputError: it cannot be read, or is something else.
    """
    if Path(path).suffix.lower() in (".yaml", ".yml"):
        return _from_yaml(path)
    try:
        parsed = read_file(path)
    except ConfigError as error:
        raise BadInputError(f"{error}; {_WANTED}") from error
    if parsed.flaw is None and names_another(parsed.value):
        return _through(path, parsed.value)
    _refuse_others(path, parsed.value)
    return Source(dict(parsed.value), path, parsed.duplicates, parsed.flaw, parsed.text)


def require_unique(source: Source) -> None:
    """Refuse a file in which a section holds a name twice, as DeepSpeed does; Hugging Face takes the last one.

    Raises:
        BadInputError: there is such a name.
    """
    if not (source.hugging_face or is_hugging_face(source.config)):
        try:
            refuse_duplicates(source.duplicates, str(source.path))
        except ConfigError as error:
            raise BadInputError(str(error)) from error


def read_given(config: Any) -> dict[str, Any] | None:
    """A ds_config in any form that `deepspeed.initialize` takes, as a copy; None: DeepSpeed will raise the error.

    Args:
        config: a dictionary, a path, or URL-safe base64 of (H)JSON.
    """
    if not isinstance(config, (dict, str)):
        return None
    try:
        return load(config)
    except ConfigError:
        return None


def read_inline(text: str) -> dict[str, Any] | None:
    """A ds_config that is itself an argument: JSON, which Hugging Face takes, or base64; None: it is neither."""
    if not text.startswith("{"):
        return read_given(text)
    try:
        found = parse(text).value
    except ConfigError:
        return None
    return dict(found) if isinstance(found, Mapping) else None


# Files by which a ds_config is found


def _from_yaml(path: str) -> Source:
    value = read_yaml(path)
    if not isinstance(value, Mapping) or not names_another(value):
        raise BadInputError(f'\'{path}\' is YAML without a "deepspeed_config" or "deepspeed"; {_WANTED}')
    return _through(path, value)


def read_yaml(path: str) -> Any:
    """What a YAML file, or a JSON file, holds.

    Raises:
        BadInputError: it cannot be read, or is neither.
    """
    import yaml

    try:
        return yaml.safe_load(Path(path).read_bytes().decode("utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else reason
        raise BadInputError(f"'{path}' cannot be read: {reason}; {_WANTED}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark is not None else "its first line"
        raise BadInputError(f"'{path}' is not YAML ({where}); {_WANTED}") from error


def names_another(value: Mapping[str, Any]) -> bool:
    """Whether it is of Accelerate, or the arguments of a training: a ds_config has none of these."""
    return "deepspeed_config" in value or "distributed_type" in value or value.get("deepspeed") is not None


def _through(path: str, value: Mapping[str, Any]) -> Source:
    """What an Accelerate configuration, or the arguments of a Trainer, axolotl or another, make DeepSpeed read."""
    if "deepspeed_config" in value or "distributed_type" in value:
        return through_accelerate(path, value)
    found = value["deepspeed"]
    if isinstance(found, Mapping):
        return Source(dict(found), path, through=path, hugging_face=True)
    return _pointed_at(path, found, "deepspeed")


def through_accelerate(path: str, whole: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Source:
    """What Accelerate makes DeepSpeed read.

    Args:
        options: of `accelerate launch`, which come before it; None: it is not known how it is launched.

    Raises:
        BadInputError: Accelerate does without DeepSpeed, or ends.
    """
    section, given = whole.get("deepspeed_config"), dict(options or {})
    if options is None and (str(whole.get("distributed_type")).upper() != "DEEPSPEED" or not isinstance(section, dict)):
        kind = whole.get("distributed_type")
        raise BadInputError(
            f"'{path}': is an Accelerate configuration {'with' if kind is not None else 'without'} distributed_type"
            f'{"" if kind is None else f" {kind}"}, where it must be DEEPSPEED with a "deepspeed_config" section'
        )
    section = section if isinstance(section, dict) else {}
    file = given.get("deepspeed_config_file", section.get("deepspeed_config_file"))
    if file in (None, "none"):
        settings = {**section, **given}
        precision = given.get("mixed_precision", whole.get("mixed_precision"))
        places = {name: _place(dotted, whole, given) for name, dotted in _PLACES.items()}
        config = of_accelerate(settings, {"mixed_precision": precision})
        return Source(config, path, through=path, places=places, hugging_face=True)
    beside = [f"deepspeed_config.{name}" for name in _NOT_BESIDE if section.get(name) is not None]
    if whole.get("mixed_precision") is not None and "mixed_precision" not in given:
        beside.append("mixed_precision")
    if beside:
        raise BadInputError(
            f"'{path}': {beside[0]} stands beside a deepspeed_config_file: Accelerate takes the file alone"
        )
    return _pointed_at(path, file, "deepspeed_config.deepspeed_config_file")


def _place(dotted: str, whole: Mapping[str, Any], options: Mapping[str, Any]) -> Place:
    name = path_of(dotted)[-1]
    return Place(f"--{name}", options[name]) if name in options else Place(dotted, at(whole, path_of(dotted)))


def _pointed_at(path: str, target: Any, field: str) -> Source:
    if not isinstance(target, str):
        raise BadInputError(f"'{path}': {field} is {target!r}; it must be the path of a ds_config")
    places = (Path(target), Path(path).parent / target)  # from where the training is started; else beside the file
    there = next((str(place) for place in places if place.is_file()), None)
    if there is None:
        raise BadInputError(f"'{path}': {field} is {target!r}, which does not exist")
    if Path(there).suffix.lower() in (".yaml", ".yml"):
        raise BadInputError(f"'{path}': {field} is {target!r}; it must be the path of a JSON file")
    found = read(there)
    return Source(found.config, there, found.duplicates, found.flaw, found.text, through=path, hugging_face=True)


_PLACES = {
    "zero_optimization.stage": "deepspeed_config.zero_stage",
    "zero_optimization.offload_optimizer.device": "deepspeed_config.offload_optimizer_device",
    "zero_optimization.offload_optimizer.nvme_path": "deepspeed_config.offload_optimizer_nvme_path",
    "zero_optimization.offload_param": "deepspeed_config.offload_param_device",
    "zero_optimization.offload_param.device": "deepspeed_config.offload_param_device",
    "zero_optimization.offload_param.nvme_path": "deepspeed_config.offload_param_nvme_path",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "deepspeed_config.zero3_save_16bit_model",
    "gradient_accumulation_steps": "deepspeed_config.gradient_accumulation_steps",
    "gradient_clipping": "deepspeed_config.gradient_clipping",
    **dict.fromkeys(("bf16", "bf16.enabled", "fp16", "fp16.enabled", "fp16.auto_cast"), "mixed_precision"),
}
_NOT_BESIDE = (
    "zero_stage",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
)
"""Settings that Accelerate refuses beside a file."""


def of_accelerate(section: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """The ds_config that Accelerate's plugin makes of the section "deepspeed_config", which names no file."""
    said = {name: number_of(value) for name, value in section.items() if value is not None}
    zero: dict[str, Any] = {"stage": said.get("zero_stage", 2)}
    for name in ("optimizer", "param"):
        device = str(said.get(f"offload_{name}_device", "none")).lower()
        # `accelerate launch` does not hand a path on: the plugin's default is a folder of this name.
        zero[f"offload_{name}"] = {"device": device, "nvme_path": "none" if device == "nvme" else None}
    zero["stage3_gather_16bit_weights_on_model_save"] = str(said.get("zero3_save_16bit_model")).lower() == "true"
    precision = str(whole.get("mixed_precision")).lower()
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": said.get("gradient_accumulation_steps", "auto"),
        "zero_optimization": zero,
        "steps_per_print": float("inf"),
        "bf16": {"enabled": precision in ("bf16", "fp8")},
        "fp16": {"enabled": True, "auto_cast": True} if precision == "fp16" else {"enabled": False},
    }
    if said.get("gradient_clipping", "auto"):
        config["gradient_clipping"] = said.get("gradient_clipping", "auto")
    return config


def number_of(value: Any) -> Any:
    """A number that stands as a word in a file or on a command line."""
    for kind in (int, float) if isinstance(value, str) else ():
        try:
            return kind(value)
        except ValueError:
            continue
    return value


_OTHERS = {
    "a model's config.json": (("model_type",), ("architectures",)),
    "a package.json": (("name", "version"), ("dependencies",), ("devDependencies",)),
    "a tokenizer's file": (("tokenizer_class",), ("added_tokens_decoder",)),
    "a model's generation_config.json": (("bos_token_id",), ("eos_token_id",)),
    "an index of weights": (("weight_map",),),
}


def _refuse_others(path: str, value: Mapping[str, Any]) -> None:
    for what, signs in _OTHERS.items():
        if any(all(name in value for name in sign) for sign in signs) and "zero_optimization" not in value:
            raise BadInputError(f"'{path}' is {what}; {_WANTED}")


# The text of a file, changed


_SPACE = re.compile(r"[ \t\r\n]*")
_JSON = json.JSONDecoder()


def rewritten(source: Source, config: Mapping[str, Any]) -> str:
    """The text of a file with other settings: what is not changed stays as it stands there.

    A file that is not plain JSON, or is of Accelerate, is written anew.
    """
    text = source.text
    if not text or source.through is not None or source.flaw is not None or source.duplicates:
        return json.dumps(config, indent=2) + "\n"
    start = _next(text, 0)
    changed, end = _object(text, start, source.config, config, "\r\n" if "\r\n" in text else "\n")
    return text[:start] + changed + text[end:]


def _next(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _object(text: str, start: int, old: Mapping[str, Any], new: Mapping[str, Any], line: str) -> tuple[str, int]:
    end, at = start + 1, _next(text, start + 1)
    lead = text[end:at] if old else line and f"{line}  "
    unit = lead.removeprefix(line) if line and lead.startswith(line) else None
    parts: list[str] = []
    for name in old:
        separator, begin = text[end:at] if parts else "", at
        at = _next(text, _next(text, _JSON.raw_decode(text, at)[1]) + 1)
        end = _JSON.raw_decode(text, at)[1]
        if name in new:
            parts.append(f"{separator}{text[begin:at]}{_value(text[at:end], old[name], new[name], lead, unit)}")
        at = _next(text, end)
        at = _next(text, at + 1) if text[at] == "," else at
    for name in (one for one in new if one not in old):
        separator = f",{lead or ' '}" if parts else ""
        parts.append(f"{separator}{json.dumps(name)}: {_dumped(new[name], lead, unit)}")
    tail = text[end:at] if old else line
    return "{" + f"{lead}{''.join(parts)}{tail}" * bool(parts) + "}", at + 1


def _value(text: str, old: Any, new: Any, line: str, unit: str | None) -> str:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return _object(text, 0, old, new, line if unit else "")[0]
    return text if json.dumps(old) == json.dumps(new) else _dumped(new, line, unit)


def _dumped(value: Any, line: str, unit: str | None) -> str:
    """On lines of its own, where the section that it is in has such."""
    return json.dumps(value, indent=unit).replace("\n", line) if unit else json.dumps(value)


# What a ds_config says


def at(config: Mapping[str, Any], path: SettingPath) -> Any:
    """A setting's value; MISSING where it is not there."""
    value: Any = config
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return MISSING
        value = value[name]
    return value


def path_of(dotted: str) -> SettingPath:
    """The names on the way to a setting."""
    return tuple(dotted.split("."))


_LARGE = 1e6


def shown(value: Any, *, whole: bool = False) -> str:
    """A value as it stands in a file, cut short."""
    if isinstance(value, Mapping) and value and not whole:
        return "{...}"
    if isinstance(value, float) and value.is_integer() and value >= _LARGE:
        value = int(value)  # "500000000.0" is hard to read
    text = json.dumps(value, default=str)
    return text if len(text) <= 48 else text[:45] + "..."


def put(config: dict[str, Any], path: SettingPath, value: Any) -> None:
    """Set a setting, or take it out; sections on the way are made where they are not there.

    Args:
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


def leaves(value: Any, path: SettingPath = ()) -> Iterator[tuple[SettingPath, Any]]:
    """Every setting that is no section, and its path."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from leaves(inner, (*path, str(name)))
    else:
        yield path, value


def is_hugging_face(config: Mapping[str, Any]) -> bool:
    """Whether it is of the Trainer or Accelerate: they put values in where it says "auto"."""
    return any(at(config, path_of(name)) == "auto" for name in TELLTALES)


def filled(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with a value wherever Hugging Face puts one in."""
    changed: dict[str, Any] = json.loads(json.dumps(config, default=str))
    for dotted, value in FILLED.items():
        if at(changed, path_of(dotted)) == "auto":
            put(changed, path_of(dotted), value)
    return changed


def given(source: Source) -> dict[str, Any]:
    """What DeepSpeed is given: with the values that Hugging Face puts in, among them batch sizes that fit."""
    if not source.hugging_face and not is_hugging_face(source.config):
        return dict(source.config)
    changed = filled(source.config)
    whole, micro = "train_batch_size", "train_micro_batch_size_per_gpu"
    if source.config.get(whole) == "auto":
        del changed[whole]
    elif whole in changed and source.config.get(micro) == "auto":
        del changed[micro if changed[whole] is not None else whole]
    return changed


def offload_device(config: Mapping[str, Any]) -> str:
    """Where a ds_config has the optimizer's state: "none", "cpu" or "nvme"."""
    zero = modernized({"zero_optimization": config.get("zero_optimization")})["zero_optimization"]
    offload = zero.get("offload_optimizer") if isinstance(zero, Mapping) else None
    return str(offload.get("device", "none")) if isinstance(offload, Mapping) else "none"


def offloads(config: Mapping[str, Any]) -> bool:
    """Whether it is of a training whose optimizer is on the CPU: a reference model's has nothing to tune."""
    return offload_device(config) == "cpu"


def stage_of(config: Mapping[str, Any]) -> Any:
    """The ZeRO stage of a ds_config, whatever it is; "2" and 2.0 are 2, as they are for DeepSpeed."""
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        return int(zero)
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if isinstance(stage, str) and stage.strip().isdecimal():
        return int(stage)
    return int(stage) if isinstance(stage, float) and stage.is_integer() else stage


def enabled(config: Mapping[str, Any], *names: str) -> bool:
    """Whether a section of one of these names is switched on."""
    sections = [config.get(name) for name in names]
    return any(truth(section.get("enabled")) for section in sections if isinstance(section, Mapping))


def truth(value: Any) -> bool | None:
    """A truth value in any form that DeepSpeed takes; None: it is none."""
    word = str(value).lower()
    return True if word in _TRUE else False if word in _FALSE else None


def micro_batch_of(config: Mapping[str, Any], ranks: int) -> int:
    """Sequences of a backward pass on each rank, from what DeepSpeed finds them from; 1 where that is not said."""
    given = config.get("train_micro_batch_size_per_gpu")
    if isinstance(given, int):
        return max(1, given)
    whole, passes = config.get("train_batch_size"), config.get("gradient_accumulation_steps", 1)
    if isinstance(whole, int) and isinstance(passes, int) and passes > 0:
        return max(1, whole // (passes * ranks))
    return 1
