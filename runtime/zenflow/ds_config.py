"""Old forms of a ds_config's fields."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

_TRUE = ("true", "1", "1.0", "yes", "on", "t", "y")  # what pydantic takes for true


def modernized(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which old names are replaced as DeepSpeed replaces them.

    `zero_optimization: true` is stage 1; `cpu_offload: true` and `cpu_offload_param: true` are the sections
    `offload_optimizer` and `offload_param` with device "cpu". Beside those sections DeepSpeed refuses them: they stay.
    """
    changed = copy.deepcopy(dict(config))
    zero = changed.get("zero_optimization")
    if isinstance(zero, bool):
        changed["zero_optimization"] = {"stage": int(zero)}
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if isinstance(zero, Mapping) and str(zero.get(old)).lower() in _TRUE and new not in zero:
            section = changed["zero_optimization"]
            del section[old]
            section[new] = {"device": "cpu"}
    return changed
