"""The agent: records the steps of a training script that nobody changed, from inside its process.

`zftune profile -- CMD` puts the folder `bootstrap` in front of the child's PYTHONPATH. Its `sitecustomize` waits for
torch to be imported and then arms the hooks; the records go to `$ZFTUNE_AGENT_DIR/agent-<pid>.jsonl`, a JSON object a
line, which `zftune.agent.records` describes. Nothing that fails here reaches the training.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import zftune

PROTOCOL = 1
"""Of the records."""
DIR, VERSION, WARMUP, STEPS, TRIAL, RUN, RUN_TOP, ONLINE, DISABLE = (
    "ZFTUNE_AGENT_DIR",
    "ZFTUNE_AGENT_VERSION",
    "ZFTUNE_AGENT_WARMUP",
    "ZFTUNE_AGENT_STEPS",
    "ZFTUNE_AGENT_TRIAL",
    "ZFTUNE_RUN",
    "ZFTUNE_RUN_TOP",
    "ZFTUNE_ONLINE",
    "ZFTUNE_DISABLE",
)
"""Environment variables that the agent reads."""
NOBODY = "nobody"
"""In ONLINE: knobs come from a schedule, and no tuner may change them."""
BOOTSTRAP = Path(__file__).parent / "bootstrap"
"""Holds the `sitecustomize.py` that a child finds first."""


def armed(base: Mapping[str, str]) -> dict[str, str]:
    """An environment in which every Python finds the bootstrap's `sitecustomize` first.

    Args:
        base: the environment that the command would have had.
    """
    path = base.get("PYTHONPATH")
    if path and path.split(os.pathsep)[0] == str(BOOTSTRAP):
        return dict(base)
    # An empty part is the cwd.
    return {**base, "PYTHONPATH": f"{BOOTSTRAP}{os.pathsep}{path}" if path else str(BOOTSTRAP)}


def environment(
    folder: Path, *, warmup: int, steps: int, base: Mapping[str, str], trial: bool = False
) -> dict[str, str]:
    """The environment under which a command is recorded.

    Args:
        folder: where the agents write; exists, mode 0700.
        warmup: steps to discard; the process's first one never counts, since its beginning is not known.
        steps: steps to measure, after which the agent detaches.
        base: the environment that the command would have had.
        trial: whether it is a trial (see `zftune.agent.trial`).
    """
    return {
        **armed(base),
        DIR: str(folder),
        VERSION: zftune.__version__,
        WARMUP: str(warmup),
        STEPS: str(steps),
        **({TRIAL: "1"} if trial else {}),
    }
