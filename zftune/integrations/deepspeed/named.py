"""Which ds_config the command of a training names, under any of the usual launchers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zftune.errors import BadInputError
from zftune.integrations.deepspeed.ds_config import Source, of_accelerate, read

_OPTIONS = (
    "--deepspeed",
    "--deepspeed_config",
    "--deepspeed-config",
    "--deepspeed_config_file",
    "--deepspeed-config-file",
    "--ds_config",
    "--ds-config",
)
_ACCELERATE_OPTIONS = (
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero3_save_16bit_model",
)
_SUFFIXES = (".json", ".yaml", ".yml")
_LARGEST_BYTES = 1 << 20  # of the arguments of a training; data in JSON is more


def named_by(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Source]:
    """Each ds_config that a command names: after an option, in an Accelerate configuration, in a file of arguments.

    Files that are not there, or hold something else, are the training's own matter.

    Args:
        command: a program and its arguments.
        environment: in which it is run.
    """
    options = list(_options(command))
    values = [value for name, value in options if name in _OPTIONS]
    for value in values:
        if Path(value).suffix in _SUFFIXES and Path(value).is_file():
            yield from _read(value, hugging_face=False)
    if values:
        return
    if _is_accelerate(command):
        yield from _through_accelerate(dict(options), environment)
        return
    for word in command[1:]:
        if Path(word).suffix in _SUFFIXES and _may_be_arguments(word):
            yield from (source for source in _read(word, hugging_face=True) if source.through is not None)


def _options(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    for option, value in zip(command, [*command[1:], ""], strict=True):
        name, _, joined = option.partition("=")
        if name.startswith("--"):
            yield name, joined or value


def _read(path: str, *, hugging_face: bool) -> Iterator[Source]:
    try:
        yield read(path)
    except BadInputError:
        if not hugging_face:
            raise


def _may_be_arguments(word: str) -> bool:
    try:
        return Path(word).is_file() and Path(word).stat().st_size <= _LARGEST_BYTES
    except OSError:
        return False


def _is_accelerate(command: Sequence[str]) -> bool:
    words = [Path(word).name for word in command]
    at = next((at for at, word in enumerate(words) if word in ("accelerate", "accelerate.commands.launch")), None)
    return at is not None and (words[at] != "accelerate" or "launch" in words[at + 1 : at + 2])


def _through_accelerate(options: dict[str, str], environment: Mapping[str, str]) -> Iterator[Source]:
    """As `accelerate launch` puts it together: its file, or that of `accelerate config`, then its options."""
    path = options.get("--config_file", options.get("--config-file", _default_file(environment)))
    found: Source | None = None
    if Path(path).is_file():
        try:
            found = read(path)
        except BadInputError:
            if "--use_deepspeed" not in options:
                return  # it is of something else than DeepSpeed
    given = {name: options[f"--{name}"] for name in _ACCELERATE_OPTIONS if f"--{name}" in options}
    if found is not None and (found.places is None or not given):
        yield found
    elif found is not None or "--use_deepspeed" in options:
        section, whole = _section_of(path) if found is not None else ({}, {})
        if "--mixed_precision" in options:
            whole = {**whole, "mixed_precision": options["--mixed_precision"]}
        config = of_accelerate({**section, **{name: _number(value) for name, value in given.items()}}, whole)
        yield Source(config, through="accelerate launch", hugging_face=True)


def _section_of(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    import yaml

    whole = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    return dict(whole["deepspeed_config"]), dict(whole)


def _default_file(environment: Mapping[str, str]) -> str:
    cache = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME", ""), ".cache")  # noqa: PTH118
    home = environment.get("HF_HOME") or f"{cache}/huggingface"
    return f"{home}/accelerate/default_config.yaml"


def _number(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(word.lower(), word)
