"""Why nothing was recorded, and what is worth a remark: sentences for a person."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from zftune.agent import DISABLE
from zftune.profile.command.records import Rank

_WITHOUT_SITE = {"I": "isolates the interpreter", "E": "ignores PYTHONPATH", "S": "leaves the site module out"}
_NO_TORCH_SENTENCE = (
    "nothing was recorded: no process of the command imported torch with zftune's agent and took an optimizer step "
    "(another Python without zftune, or not a training script)"
)


def nothing_recorded(command: Sequence[str], ranks: Sequence[Rank], status: int | None, warmup: int) -> str:
    """The likely reason why no step was measured.

    Args:
        command: the program and its arguments.
        ranks: the processes that wrote something.
        status: the command's exit status; None if it is not known.
        warmup: steps that were to be discarded.
    """
    if os.environ.get(DISABLE) == "1":
        return f"nothing was recorded: {DISABLE}=1 turns the agent off"
    failed = [rank.end for rank in ranks if rank.end is not None and rank.end.startswith("failed")]
    if failed:
        return f"nothing was recorded: the agent {failed[0]}"
    steps = max((rank.discarded for rank in ranks if rank.seen), default=0)
    if steps:
        return (
            f"nothing was measured: the training ended after {steps} step{'s' if steps > 1 else ''}, all of them "
            f"discarded as warm-up (--warmup {warmup}; the first step never counts)"
        )
    reasons = [rank.missing["step_ms"] for rank in ranks if "step_ms" in rank.missing]
    if reasons:
        return f"nothing was recorded: {reasons[0]}"
    if any(rank.end == "exit" for rank in ranks):
        return "nothing was measured: the training ended after its first step, whose beginning is not known"
    flag = _interpreter_flag(command)
    if flag is not None:
        return (
            f"nothing was recorded: python -{flag} {_WITHOUT_SITE[flag]}, so zftune's agent cannot start; "
            "run the script without it"
        )
    if status is None or status < 0:
        signal = "" if status is None else f" by signal {-status}"
        return f"nothing was recorded: the command was killed{signal} before a training step ended"
    if status > 0:
        return f"nothing was recorded: the command ended with exit code {status} before a training step ended"
    return _NO_TORCH_SENTENCE


def remarks(ranks: Sequence[Rank], chosen: Sequence[Rank], steps: int) -> list[str]:
    """What else a person should know about the records."""
    return list(_remarks(ranks, chosen, steps))


def _remarks(ranks: Sequence[Rank], chosen: Sequence[Rank], steps: int) -> Iterator[str]:
    for rank in chosen:
        if rank.end is not None and rank.end.startswith("failed"):
            yield f"rank {rank.rank}: the agent {rank.end}"
    short = [rank for rank in chosen if len(rank.steps) < steps]
    if short:
        yield f"{len(short[0].steps)} of {steps} steps were measured: the training ended before"
    world = max((rank.header["world_size"] for rank in chosen), default=0)
    if 0 < len(chosen) < world:
        yield f"{len(chosen)} of {world} ranks were recorded here"
    left_out = sum(bool(rank.steps) for rank in ranks) - len(chosen)
    if left_out > 0:
        yield f"{left_out} more training process{'es' if left_out > 1 else ''} of the same rank left out of the profile"
    unreadable = sum(rank.unreadable for rank in ranks)
    if unreadable:
        yield f"{unreadable} line{'s' if unreadable > 1 else ''} of the records could not be read"


def _interpreter_flag(command: Sequence[str]) -> str | None:
    """The flag of a Python interpreter that keeps the agent out; looks at the command itself only."""
    program = Path(command[0]).name
    if not program.startswith("python") or shutil.which(command[0]) is None:
        return None
    for argument in command[1:]:
        if not argument.startswith("-") or argument in ("-c", "-m", "-"):
            return None
        letters = re.split("[WXcm]", argument[1:], maxsplit=1)[0]  # what follows these is their value
        found = next((flag for flag in letters if flag in _WITHOUT_SITE), None)
        if not argument.startswith("--") and found is not None:
            return found
    return None
