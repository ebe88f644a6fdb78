"""The agent: records the steps of a training script that nobody changed, from inside its process.

`zftune profile -- CMD` puts the folder `bootstrap` in front of the child's PYTHONPATH. Its `sitecustomize` waits for
torch to be imported and then arms the hooks; the records go to `$ZFTUNE_AGENT_DIR/agent-<pid>.jsonl`, a JSON object a
line, which `zftune.agent.records` describes. Nothing that fails here reaches the training.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zftune
from zftune.errors import BadInputError
from zftune.variables import DIR, STEPS, STOP, VERSION, WARMUP

PROTOCOL = 1
"""Of the records."""
BOOTSTRAP = Path(__file__).parent / "bootstrap"
"""Holds the `sitecustomize.py` that a child finds first."""

_MARK = "_zftune_shows_refusals"


def armed(base: Mapping[str, str]) -> dict[str, str]:
    """An environment in which every Python finds the bootstrap's `sitecustomize` first."""
    path = base.get("PYTHONPATH")
    if path and path.split(os.pathsep)[0] == str(BOOTSTRAP):
        return dict(base)
    # An empty part is the cwd.
    return {**base, "PYTHONPATH": f"{BOOTSTRAP}{os.pathsep}{path}" if path else str(BOOTSTRAP)}


def environment(
    folder: Path, *, warmup: int, steps: int, base: Mapping[str, str], stop: bool = False
) -> dict[str, str]:
    """The environment under which a command is recorded.

    Args:
        folder: where the agents write; exists, mode 0700.
        warmup: steps to discard; the process's first one never counts, since its beginning is not known.
        steps: steps to measure, after which the agent detaches.
        stop: whether it is ended by SIGTERM when all steps are measured.
    """
    return {
        **armed(base),
        DIR: str(folder),
        VERSION: zftune.__version__,
        WARMUP: str(warmup),
        STEPS: str(steps),
        **({STOP: "1"} if stop else {}),
    }


def is_first_rank() -> bool:
    """Whether this process speaks for the run."""
    return os.environ.get("RANK", "0") == "0"


def show_lines(*, quiet: bool = False) -> None:
    """Let what is logged be seen, of the first rank."""
    logger = logging.getLogger("zftune")
    if not is_first_rank():
        logger.setLevel(logging.ERROR)
        return
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    if not logging.getLogger().handlers and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def show_refusals() -> None:
    """What is refused while the script runs, and caught by nobody, ends the process: a sentence and 2."""
    others = sys.excepthook
    if hasattr(others, _MARK):
        return

    def show(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        from zenflow import CheckpointError  # not before: the import of zenflow comes by here

        if not isinstance(error, (BadInputError, CheckpointError)) or _has_another_behind(error):
            others(kind, error, traceback)
            return
        stream = sys.__stderr__ or sys.stderr  # torch.distributed's hook collects sys.stderr, and drops it at an exit
        stream.write(f"zftune: {error}\n")
        raise SystemExit(2)

    setattr(show, _MARK, True)
    sys.excepthook = show


def _has_another_behind(error: BaseException) -> bool:
    """Whether it came up while another error was handled, the script's perhaps; what it was made from is ours."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error.__context__ is not None and not error.__suppress_context__
