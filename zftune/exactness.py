"""Quality exact: no update is late, whatever settings an optimizer was made with and whatever state it loads."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from zenflow import ZenFlowConfig
from zenflow.optimizer import ZenFlowOptimizer

EXACT: Mapping[str, Any] = {"update_interval": 1, "overlap_step": False, "apply_lag": None}
_logger = logging.getLogger("zftune")


def is_exact(config: ZenFlowConfig) -> bool:
    """Whether no update is late under these knobs."""
    return config.update_interval == 1 and not config.overlap_step


def keep_exact(optimizer: ZenFlowOptimizer) -> bool:
    """Have no update come late from here on, also where a state is loaded that was saved with late ones.

    Returns:
        Whether late settings had to end now.

    Raises:
        HostEngineError: host work failed.
    """
    if _loaded not in optimizer._optimizer_load_state_dict_post_hooks.values():
        optimizer.register_load_state_dict_post_hook(_loaded)
    return bool(_end_lateness(optimizer))


def _loaded(optimizer: Any) -> None:
    late = _end_lateness(optimizer)
    if late:
        _logger.warning(
            "zftune: updates would be late after what was loaded (%s): quality exact closes the open window with the "
            "next step, after which its last updates arrive, and waits for every update from then on.",
            late,
        )


def _end_lateness(optimizer: ZenFlowOptimizer) -> str:
    """Settings under which updates would be late, in force or about to be, and are no longer; in words."""
    # What was loaded may be followed by what the optimizer was made with, where that is something else.
    late = [one for one in (optimizer.config, optimizer.asked_config) if not is_exact(one)]
    if not late:
        return ""
    optimizer.set_knobs(**EXACT)
    found = {name: getattr(late[0], name) for name in EXACT}
    return ", ".join(f"{name} {value}" for name, value in found.items() if value != EXACT[name])
