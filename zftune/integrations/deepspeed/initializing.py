"""`deepspeed.initialize`, wrapped: each call goes to the backend that its ds_config asks for."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from zenflow.config import modernized
from zftune.ds_config.facts import TESTED
from zftune.ds_config.reading import TELLTALES, at, offload_device, path_of, read_given
from zftune.errors import BadInputError
from zftune.integrations.deepspeed.outcome import outcome, require_known_names
from zftune.integrations.deepspeed.section import INSTEAD, Section
from zftune.integrations.deepspeed.spawning import refuse_second_reading

Wrapped = Callable[..., Any]
_logger = logging.getLogger("zftune")
_MARK = "__zftune_original__"
_FIELDS = ("deepspeed_config", "deepscale_config")
_listeners: list[Callable[[], None]] = []


def wrap(module: Any, asked: Section, *, ends_process: bool = False) -> None:
    """Wrap `initialize` of DeepSpeed, once.

    Args:
        asked: comes before what a ds_config says.
        ends_process: whether what is not allowed ends the process with one sentence and exit code 2; else it raises.
    """
    original = getattr(module.initialize, _MARK, module.initialize)
    wrapped = _wrapped(original, asked, ends_process=ends_process)
    setattr(wrapped, _MARK, original)
    module.initialize = wrapped


def when_called(listener: Callable[[], None]) -> None:
    """Be told of each call of what was wrapped, before anything else; of `unwrap` too, since none follows."""
    _listeners.append(listener)


def _tell() -> None:
    for listener in _listeners:
        listener()


def unwrap(module: Any) -> None:
    """Undo it."""
    _tell()
    module.initialize = getattr(module.initialize, _MARK, module.initialize)


def _wrapped(original: Wrapped, asked: Section, *, ends_process: bool) -> Wrapped:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        _tell()
        try:
            call = signature.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)  # which says what is wrong
        call.apply_defaults()
        try:
            return _initialize(original, dict(call.arguments), asked)
        except BadInputError as error:
            if not ends_process:
                raise
            if os.environ.get("LOCAL_RANK", "0") == "0":  # all ranks have the same ds_config
                sys.stderr.write(f"zftune: {error}\n")
            raise SystemExit(2) from error

    return initialize


def _initialize(original: Wrapped, given: dict[str, Any], asked: Section) -> Any:
    config = _config_of(given)
    if config is None or given.get("model") is None:
        return original(**given)
    refuse_second_reading()
    section = asked.over(Section.of(config))
    config = modernized(config)
    if not _has_optimizer(given, config):
        return original(**given)  # there is nothing to train
    if offload_device(config) == "none":
        _logger.info("zftune: this training %s", outcome(config, section))
        return original(**given)
    _require_filled(config, given)
    _join_ranks(given)
    if section.backend == "deepspeed":
        from zftune.integrations.deepspeed import upstream

        return _call(original, given, upstream.changed(config, section, given["model"]))
    return _with_zenflow(original, given, config, section)


def _with_zenflow(original: Wrapped, given: dict[str, Any], config: dict[str, Any], section: Section) -> Any:
    from zftune.integrations.deepspeed import backend

    if given.get("mpu") is not None or given.get("mesh_param") is not None:
        raise BadInputError(
            f"mpu or mesh_param is given; the backend zenflow trains data parallel only: leave it out, or {INSTEAD}"
        )
    _about_version()
    require_known_names(config)
    plan = backend.plan(config, section)
    module, optimizer, scheduler = given["model"], given.get("optimizer"), given.get("lr_scheduler")
    backend.require_plain(module, plan.stage)
    recipe = backend.recipe_of(config, optimizer)
    sharded = backend.shard(plan, module)
    making = backend.Making(plan, recipe, optimizer, module, sharded)
    if plan.reduced_in is not None and torch.distributed.get_world_size() > 1 and not making.reduces_by_rows:
        _logger.warning("communication_data_type is ignored: gradients are averaged in their own dtype")
    changed = {**given, "optimizer": making}
    if recipe is not None and recipe.client is not None and given.get("model_parameters") is None:
        changed["model_parameters"] = list(module.parameters())
    if scheduler is not None and not inspect.isfunction(scheduler) and hasattr(scheduler, "step"):
        changed["lr_scheduler"] = lambda _: scheduler  # it drives the groups that were adopted
    with contextlib.nullcontext() if sharded is None else backend.staying(module):
        result = _call(original, changed, plan.config)
    assert making.optimizer is not None
    result[0].config = config  # scripts look up there what they have asked for
    backend.take_over(result[0], making.optimizer, plan)
    if section.online and sharded is not None and sharded.on_host:
        _logger.warning("nothing is tuned online: no column of weights on the host can be selected")
    elif section.online:
        backend.attach(result[0], making.optimizer, plan)
    elif making.follows:
        from zftune.hiding import follow

        follow(making.optimizer, plan.quality, making.late)
    return result


def _config_of(given: dict[str, Any]) -> dict[str, Any] | None:
    found = [given.get("config"), given.get("config_params")]
    found += [getattr(given.get("args"), name, None) for name in _FIELDS]
    asked = next((one for one in found if one is not None), None)
    if isinstance(asked, str) and asked.endswith((".json", ".hjson")) and not os.path.exists(asked):  # noqa: PTH110
        raise BadInputError(f"ds_config '{asked}': there is no such file")  # DeepSpeed takes it for base64
    return None if asked is None else read_given(asked)


def _has_optimizer(given: dict[str, Any], config: dict[str, Any]) -> bool:
    section = config.get("optimizer")
    return given.get("optimizer") is not None or (isinstance(section, dict) and section.get("type") is not None)


_SWITCHES = ("bf16.enabled", "fp16.enabled")
"""DeepSpeed takes "auto" for false there."""
_PASSED_INSTEAD = {"optimizer": "optimizer", "scheduler": "lr_scheduler"}
"""Sections that DeepSpeed does not read where the script passes this."""


def _require_filled(config: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse a ds_config with which DeepSpeed would end at the word "auto"."""
    unread = tuple(f"{section}." for section, by in _PASSED_INSTEAD.items() if given.get(by) is not None)
    for name in TELLTALES:
        if at(config, path_of(name)) == "auto" and name not in _SWITCHES and not name.startswith(unread):
            raise BadInputError(
                f'{name} is "auto"; it must be a value of your own: only Hugging Face\'s Trainer and Accelerate put a '
                'value in for "auto", and neither did'
            )


def _call(original: Wrapped, given: dict[str, Any], config: dict[str, Any]) -> Any:
    """Call DeepSpeed with another ds_config; the script's arguments are as they were afterwards."""
    args = given.get("args")
    said = {name: getattr(args, name) for name in _FIELDS if getattr(args, name, None) is not None}
    try:
        for name in said:
            setattr(args, name, None)
        return original(**{**given, "config": config, "config_params": None})
    finally:
        for name, value in said.items():
            setattr(args, name, value)


def _join_ranks(given: dict[str, Any]) -> None:
    """Do what DeepSpeed begins with, so that all ranks choose the same knobs."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    deepspeed.comm.init_distributed(
        dist_backend=accelerator.communication_backend_name(),
        distributed_port=given["distributed_port"],
        dist_init_required=given["dist_init_required"],
    )
    if accelerator.device_name() != "cpu" and "LOCAL_RANK" in os.environ:
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))


def _about_version() -> None:
    version = str(getattr(sys.modules.get("deepspeed"), "__version__", ""))
    if version.partition("+")[0] not in TESTED:
        _logger.warning(
            "DeepSpeed %s: the backend zenflow was tested with %s",
            version or "of unknown version",
            ", ".join(TESTED),
        )
