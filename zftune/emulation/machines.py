"""The rigs that come with zftune or a user has, and a rig's part of a profile."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from zenflow import ConfigError
from zftune.emulation.emulator import Slack
from zftune.emulation.rig import Rig, RigSpec
from zftune.errors import BadInputError
from zftune.text import one_of

MAX_LATE_SHARE = 0.01
"""Share of segments (or of host time) that may be late before a run on a rig in real time is refused."""
DEFAULT_RIG = "llama2-7b-4xa100"


def rig_names() -> list[str]:
    """Names of the rigs that come with the package."""
    return sorted(file.name.removesuffix(".toml") for file in _folder().iterdir() if file.name.endswith(".toml"))


def load_rig(name_or_file: str) -> RigSpec:
    """A rig that comes with the package, or one from a file.

    Raises:
        BadInputError: there is no such rig, or its file is not a valid rig.
    """
    names = rig_names()
    if name_or_file not in names and not _exists(Path(name_or_file)):
        one_of("--rig", name_or_file, [*names, "none"], "a TOML file")
    try:
        if name_or_file in names:
            with resources.as_file(_folder() / f"{name_or_file}.toml") as path:
                return RigSpec.load(path)
        return RigSpec.load(Path(name_or_file))
    except ConfigError as error:
        raise BadInputError(f"--rig: {error}") from error


def _exists(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # a name that is too long
        return False


def _folder() -> Traversable:
    return resources.files("zftune") / "rigs"


def rig_document(rig: Rig, slacks: Sequence[Slack], *, attempts: int) -> dict[str, Any]:
    """The emulated accelerator, what the real work took, and in real time how far it stayed ahead of its pads.

    `slacks` are those of all runs, the profiled one first, `attempts` the times that a run was measured until it was
    accepted.
    """
    margins_ms = [1e3 * margin for slack in slacks for margin in slack.margins_s]
    in_real_time = (
        {
            "min_ms": min(margins_ms),
            "p50_ms": statistics.median(margins_ms),
            "fraction_used_p50": statistics.median(used for slack in slacks for used in slack.used),
        }
        if margins_ms
        else None
    )
    profiled = slacks[0]
    return {
        **dataclasses.asdict(rig),
        "thread_busy_ms": 1e3 * profiled.thread_s / max(1, profiled.steps),
        "thread_idle_ms": 1e3 * profiled.thread_idle_s / max(1, profiled.steps),
        "segments": sum(slack.segments for slack in slacks),
        "late_segments": sum(slack.late for slack in slacks),
        "attempts": attempts,
        "clock": "simulated" if in_real_time is None else "real",
        "real_work_s": sum(slack.worked_s for slack in slacks),
        "slack": in_real_time,
    }
