"""DeepSpeed's own overlapped update: it runs in a spawned process, which reads the training's script again."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from typing import Any

from zftune.ds_config.reading import at, offload_device, stage_of
from zftune.errors import BadInputError

OVERLAP = "zero_optimization.zenflow.overlap_step"
GUARD = 'if __name__ == "__main__":'
ASKS = f"; what trains in the script has to stand under `{GUARD}`, since its optimizer process reads that again"


def overlaps(config: Mapping[str, Any]) -> bool:
    """Whether upstream updates in a process of its own with a ds_config."""
    overlap = at(config, ("zero_optimization", "zenflow", "overlap_step"))
    return overlap is True and stage_of(config) in (1, 2, 3) and offload_device(config) != "none"


def refuse_second_reading() -> None:
    """Refuse to train in a process that only reads the script again: the training would wait for it in vain.

    Raises:
        BadInputError: this is such a process.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise BadInputError(
            f"deepspeed.initialize is called in a spawned process that only reads the script again: what trains must "
            f"stand under `{GUARD}`; stop the training, which waits for this process"
        )
