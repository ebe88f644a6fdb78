"""A ds_config in any form that DeepSpeed takes."""

from __future__ import annotations

import base64
import copy
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TRUE = ("true", "1", "1.0", "yes", "on", "t", "y")  # what pydantic takes for true
_FALSE = ("false", "0", "0.0", "no", "off", "f", "n")


def read_config(config: Any) -> dict[str, Any] | None:
    """A ds_config in any form that DeepSpeed takes, as a copy; None: DeepSpeed will say what is wrong with it.

    Args:
        config: a dictionary, a path, or URL-safe base64 of (H)JSON.
    """
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    loads = getattr(sys.modules.get("hjson"), "loads", json.loads)  # what DeepSpeed itself reads with
    try:
        found = loads(Path(config).read_text(encoding="utf-8") if _is_path(config) else _decoded(config))
    except (OSError, ValueError, TypeError):
        return None
    return dict(found) if isinstance(found, Mapping) else None


def offload_device(config: Mapping[str, Any]) -> str:
    """Where a ds_config has the optimizer's state: "none", "cpu" or "nvme"."""
    zero = config.get("zero_optimization")
    offload = zero.get("offload_optimizer") if isinstance(zero, Mapping) else None
    return str(offload.get("device", "none")) if isinstance(offload, Mapping) else "none"


def offloads(config: Mapping[str, Any]) -> bool:
    """Whether it is of a training whose optimizer is on the CPU: a reference model's has nothing to tune."""
    return offload_device(config) == "cpu"


def stage_of(config: Mapping[str, Any]) -> Any:
    """The ZeRO stage that a ds_config says, whatever it is."""
    zero = config.get("zero_optimization")
    return zero.get("stage", 0) if isinstance(zero, Mapping) else 0


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


def _is_path(config: Any) -> bool:
    try:
        return Path(config).exists()
    except OSError:  # too long for a name: base64
        return False


def _decoded(config: str) -> str:
    return base64.urlsafe_b64decode(config).decode("utf-8")
