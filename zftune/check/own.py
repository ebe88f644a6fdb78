"""What the backend zenflow, the runtime of `zftune run`, does not take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zftune.check.config import at
from zftune.check.findings import MISSING
from zftune.errors import ZftuneError

_ZENFLOW = "zero_optimization.zenflow."


def refusals(config: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each thing that it refuses, beginning with the setting.

    Args:
        config: a ds_config without "auto" where Hugging Face puts values in.
    """
    from zftune.integrations.deepspeed import support
    from zftune.integrations.deepspeed.reading import offload_device

    if offload_device(config) == "none":  # then it leaves DeepSpeed alone
        return
    found = False
    for sentence in support.refusals(config):
        found = True
        yield sentence
    if not found:
        yield from _values(config)


def _values(config: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with values, as the runtime itself says it."""
    from zenflow import ConfigError, ZenFlowConfig
    from zftune.integrations.deepspeed.optimizers import from_config
    from zftune.integrations.deepspeed.precision import Precision

    try:
        _quietly(ZenFlowConfig, config)
    except ConfigError as error:
        sentence = str(error)
        section = config["zero_optimization"].get("zenflow")
        name = sentence.partition(" is ")[0]
        yield _ZENFLOW + sentence if isinstance(section, Mapping) and name in section else sentence
    params = at(config, ("optimizer", "params"))
    if params not in (MISSING, None) and not isinstance(params, Mapping):
        yield f"optimizer.params is {params!r}, allowed is a JSON object"
        return
    for read in (from_config, Precision.of):
        try:
            read(config)
        except ZftuneError as error:
            yield str(error)


def _quietly(kind: Any, config: Mapping[str, Any]) -> None:
    """Without the warning about a setting that it ignores, which has a note of its own."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind.from_ds_config(config)
