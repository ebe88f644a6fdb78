"""Which ds_config the command of a training names, under any of the usual launchers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zftune.ds_config.reading import Source, number_of, read, read_inline, read_yaml, through_accelerate
from zftune.errors import BadInputError

_FLAG = "--deepspeed"  # to DeepSpeed's own parser; others take a value after it
_OPTIONS = ("--deepspeed_config", "--deepspeed_config_file", "--ds_config")
_OF_ACCELERATE = (
    "deepspeed_config_file",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero3_save_16bit_model",
    "mixed_precision",
)
_OTHER_KINDS = ("--cpu", "--multi_gpu", "--tpu", "--tpu_use_cluster", "--use_fsdp", "--use_megatron_lm")
_JSON = (".json", ".hjson")
_SUFFIXES = (".json", ".yaml", ".yml")
_LARGEST_BYTES = 1 << 20  # of the arguments of a training; data in JSON is more


def named_by(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Source]:
    """Each ds_config that a command names: by an option of its script, in a file of arguments, else by Accelerate.

    What is not there, or is something else, is the training's own matter.

    Raises:
        BadInputError: a JSON that an option names is none, or Accelerate ends.
    """
    launch, words = _split(command)
    options = list(_options(words))
    values = [pair for pair in options if pair[0] in _OPTIONS] or [pair for pair in options if pair[0] == _FLAG]
    found = [source for option, value in values if (source := _given(option, value)) is not None]
    found = found or list(_recipes([*words[1:], *(value for _, value in options)]))
    yield from found
    if launch is not None and not found:
        yield from _through_accelerate(dict(_options(launch)), environment)


def _split(command: Sequence[str]) -> tuple[Sequence[str] | None, Sequence[str]]:
    names = [Path(word).name for word in command]
    for index, name in enumerate(names):
        if name in ("accelerate-launch", "accelerate.commands.launch"):
            rest = command[index + 1 :]
        elif name in ("accelerate", "accelerate.commands.accelerate_cli") and names[index + 1 : index + 2] == [
            "launch"
        ]:
            rest = command[index + 2 :]
        else:
            continue
        script = (index for index, word in enumerate(rest) if word.endswith(".py") or word in ("-m", "--module"))
        end = next(script, len(rest))
        return rest[:end], rest[end:]
    return None, command


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for option, value in zip(words, [*words[1:], ""], strict=True) if words else ():
        name, _, joined = option.partition("=")
        if name.startswith("--"):
            yield name.replace("-", "_").replace("__", "--", 1), joined or value


def _given(option: str, value: str) -> Source | None:
    """A file, or the ds_config itself: as JSON, which Hugging Face takes, or in base64, as DeepSpeed does."""
    if _is_file(value):
        try:
            return read(value)
        except BadInputError:
            if Path(value).suffix in _JSON:
                raise
            return None
    config = read_inline(value)
    return Source(config, through=option) if config is not None else None


def _recipes(words: Sequence[str]) -> Iterator[Source]:
    for word in dict.fromkeys(words):
        if Path(word).suffix in _SUFFIXES and _is_file(word) and Path(word).stat().st_size <= _LARGEST_BYTES:
            try:
                source = read(word)
            except BadInputError:
                continue
            if source.through is not None:
                yield source


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # too long for a name
        return False


def _through_accelerate(options: Mapping[str, str], environment: Mapping[str, str]) -> Iterator[Source]:
    """As `accelerate launch` puts it together: its file, or that of `accelerate config`, then its options."""
    path, whole = options.get("--config_file") or _default_file(environment), {}
    if _is_file(path):
        found = read_yaml(path)
        whole = found if isinstance(found, dict) else {}
    of_file = whole.get("distributed_type") == "DEEPSPEED" and not any(kind in options for kind in _OTHER_KINDS)
    if "--use_deepspeed" not in options and not of_file:
        return
    given: dict[str, Any] = {name: number_of(options[f"--{name}"]) for name in _OF_ACCELERATE if f"--{name}" in options}
    section = whole.get("deepspeed_config") or {}
    file = given.get("deepspeed_config_file", section.get("deepspeed_config_file"))
    if file in (None, "none") or _is_file(str(file)):
        yield through_accelerate(path if whole else "accelerate launch", whole, given)


def _default_file(environment: Mapping[str, str]) -> str:
    cache = environment.get("XDG_CACHE_HOME", "~/.cache")
    home = environment.get("HF_HOME", f"{cache}/huggingface")
    return os.path.expanduser(f"{home}/accelerate/default_config.yaml")  # noqa: PTH111
