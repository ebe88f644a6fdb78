"""The backend deepspeed: upstream's own ZenFlow and Twin-Flow, with settings that are known to work there."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zftune.ds_config import facts
from zftune.ds_config.reading import MISSING, Source, micro_batch_of, offload_device, shown, stage_of
from zftune.errors import BadInputError
from zftune.integrations.deepspeed import outcome, precision
from zftune.integrations.deepspeed.choosing import Training, choose
from zftune.integrations.deepspeed.outcome import quality_of
from zftune.integrations.deepspeed.precision import Precision
from zftune.integrations.deepspeed.section import NAME, Refusal, Section, require_none

_logger = logging.getLogger("zftune")


def refusals(config: Mapping[str, Any], *, online: bool) -> Iterator[Refusal]:
    """Each setting that this backend refuses, beside those that end DeepSpeed."""
    stage = stage_of(config)
    if stage not in (1, 2, 3):
        yield Refusal.of("zero_optimization.stage", stage, "1, 2 or 3 where DeepSpeed offloads")
    clipping = config.get("gradient_clipping", 0.0)
    if not isinstance(clipping, (int, float)):
        yield Refusal.of("gradient_clipping", clipping, f"{outcome.A_NUMBER} with DeepSpeed's own runtime")
    if online:
        yield Refusal("zftune.online", "True", 'false with the backend deepspeed; "zenflow" tunes')
    if offload_device(config) == "cpu":
        yield from precision.refusals(config, scales=False)


def changed(config: Mapping[str, Any], section: Section, module: nn.Module) -> dict[str, Any]:
    """A ds_config for upstream: with a preset's knobs, if one is asked for or is for this training.

    Raises:
        BadInputError: the preset cannot be used, or this DeepSpeed destroys weights with it.
    """
    from zftune.integrations.deepspeed.presets import apply

    version = str(getattr(sys.modules.get("deepspeed"), "__version__", "")).partition("+")[0]
    quality = quality_of(config, section)
    stage = stage_of(config)
    require_none(refusals(config, online=section.online))
    knobs: Mapping[str, Any] = {}
    sentence = "the settings are the ds_config's"
    if offload_device(config) == "cpu":
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        chosen = choose(
            Training(
                module=module,
                backend="deepspeed",
                stage=stage,
                dtype=Precision.of(config, scales=False).word,
                micro_batch=micro_batch_of(config, ranks),
                world_size=ranks,
                quality=quality,
            ),
            section,
        )
        knobs, sentence = chosen.knobs, chosen.sentence
    result = {name: value for name, value in config.items() if name != NAME}
    if knobs:
        applied = apply(config, knobs, stage=stage, backend="deepspeed")
        result = applied.config
        for note in applied.notes:
            _logger.info("zftune: %s", note)
    otherwise = require_works(result, version)
    if version not in facts.TESTED_UPSTREAM:
        _logger.warning(
            "DeepSpeed %s: the backend deepspeed was tested with %s", version, ", ".join(facts.TESTED_UPSTREAM)
        )
    if otherwise:
        what = ", ".join(otherwise)
        _logger.warning("DeepSpeed trains otherwise than the ds_config says (zftune check tells how): %s", what)
    _logger.info("zftune: backend deepspeed, quality %s; %s", quality, sentence)
    return result


def require_works(source: Source | Mapping[str, Any], version: str) -> list[str]:
    """Refuse what is known to end upstream's training or to destroy its weights.

    Args:
        version: of DeepSpeed; "": it is not known.

    Returns:
        The settings with which it trains otherwise than they say.

    Raises:
        BadInputError: something is.
    """
    from zftune.integrations.deepspeed.check.checking import check
    from zftune.integrations.deepspeed.check.findings import shown_path

    outcome.refuse_scrambling(source.config if isinstance(source, Source) else source, version)
    faults = [one for one in check(source, backend="deepspeed", version=version or None).findings if one.is_fault]
    for fault in faults:
        if fault.ends_deepspeed:
            what = "not there" if fault.value is MISSING else shown(fault.value)
            safe = f" (safe is {fault.safe})" if fault.safe else ""
            raise BadInputError(
                f"{shown_path(fault.path)} is {what}, which the backend deepspeed refuses{safe}: {fault.reason}"
            )
    return [shown_path(fault.path) for fault in faults]
