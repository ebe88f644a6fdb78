"""`zftune.profile/1`: the shape of a profile document, and its check.

The JSON Schema says which fields there are, of what type and unit, and which may be null. `validate` adds what
JSON Schema cannot say: numbers are finite, everything that is null has its reason, every figure has its source,
and figures that follow from each other agree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from zftune.errors import ProfileError

SCHEMA_NAME = "zftune.profile/1"
CAUSES = ("host", "h2d", "d2h", "select", "comm", "data")
PHASES = ("data", "forward", "backward", "optimizer", "other")

# Null has a meaning of its own there: no rig, an uncharged device, no command, a knob that is off.
_NULL_IS_A_VALUE = (
    "rig", "rig.device_gbps", "rig.comm_gbps", "rig.network_gbps", "rig.slack", "command", "command.script",
    "command.exit_code",
)  # fmt: skip
SOURCED = (
    "step_ms",
    "throughput",
    "phases_ms",
    "stall",
    "idle",
    "thread_lines",
    "hidden_ms_per_step",
    "waits_ms",
    "link",
    "host",
    "memory",
    "selection",
    "staleness",
    "movement",
    "loss",
    "practicality",
    "baselines",
    "nvml",
    "system",
    "ranks",
    "per_step",
    "timeline",
    "roofs",
    "overhead_fraction",
)
"""The fields that hold figures, each of which says where it comes from."""
# Sums and quotients may be rounded in the document.
_RELATIVE = 0.02
_ABSOLUTE_MS = 0.05


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a profile document. Do not change what is returned."""
    text = resources.files(__name__).joinpath("profile.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def validate(document: Mapping[str, Any]) -> None:
    """Check a profile document.

    Raises:
        ProfileError: the document is not a valid profile; names the path of the first fault.
    """
    fault = first_fault(document)
    if fault is not None:
        raise ProfileError(f"profile: {fault}")


def first_fault(document: Mapping[str, Any]) -> str | None:
    """What is wrong with a document, and where; None: it is a valid profile."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(schema()).iter_errors(document))
    if error is not None:
        path = ".".join(str(part) for part in error.absolute_path) or "the document"
        return f"{path}: {_short(error.message)}"
    return next(_faults(document), None)


def _faults(document: Mapping[str, Any]) -> Iterator[str]:
    for path, value in _leaves(document):
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{path}: {value} is not a finite number"
        if value is None and not _null_is_explained(document, path):
            yield f'{path}: is null, and "missing" gives no reason'
    yield from _unnamed_sources(document)
    yield from _disagreements(document)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        children: Any = value.items()
    elif isinstance(value, (list, tuple)):
        children = enumerate(value)
    else:
        yield path, value
        return
    for key, child in children:
        yield from _leaves(child, f"{path}.{key}" if path else str(key))


def _null_is_explained(document: Mapping[str, Any], path: str) -> bool:
    parts = path.split(".")
    if path in _NULL_IS_A_VALUE or "knobs" in parts[:-1]:
        return True
    if parts[0] == "series" and len(parts) > 2:  # a moment at which nothing was read
        return True
    if any(name in document["missing"] for name in _names(parts)):
        return True
    # hardware and software bring their own reasons, relative to themselves
    return parts[0] in ("hardware", "software") and ".".join(parts[1:]) in document[parts[0]]["missing"]


def _names(parts: list[str]) -> Iterator[str]:
    for path in (parts, [part for part in parts if not part.isdigit()]):
        yield from (".".join(path[:length]) for length in range(1, len(path) + 1))


def _unnamed_sources(document: Mapping[str, Any]) -> Iterator[str]:
    sources = document["sources"]
    for figure in SOURCED:
        named = any(name.partition(".")[0] == figure for name in sources)
        if not named and any(value is not None for _, value in _leaves(document.get(figure))):
            yield f'{figure}: "sources" does not say where it comes from'
    for name in sources:
        if name.partition(".")[0] not in document:
            yield f"sources.{name}: names no field of the profile"


def _disagreements(document: Mapping[str, Any]) -> Iterator[str]:
    runs = {"": document}
    for index, rank in enumerate(document["ranks"]):
        yield from _phases(rank, f"ranks.{index}.")
    yield from _phases(document, "")
    for name, baseline in (document["baselines"] or {}).items():
        if baseline is not None:
            runs[f"baselines.{name}."] = baseline
            if not _close(baseline["speedup"], baseline["step_ms"]["mean"] / document["step_ms"]["mean"]):
                yield f"baselines.{name}.speedup: is not the baseline's mean step over this run's"
    for prefix, run in runs.items():
        step, stall = run["step_ms"], run["stall"]
        if step["p50"] > step["p95"]:
            yield f"{prefix}step_ms: p50 is above p95"
        idle = run.get("idle")
        if idle is not None and not _close(sum(idle["by_cause"].values()), idle["ms_per_step"], _ABSOLUTE_MS):
            yield f"{prefix}idle.by_cause: does not add up to ms_per_step"
        if stall is None:
            continue
        if not _close(sum(stall["by_cause"].values()), stall["ms_per_step"], _ABSOLUTE_MS):
            yield f"{prefix}stall.by_cause: does not add up to ms_per_step"
        if not _close(stall["fraction"] * step["mean"], stall["ms_per_step"], _ABSOLUTE_MS + _RELATIVE * step["mean"]):
            yield f"{prefix}stall.fraction: is not ms_per_step over the mean step"


def _phases(run: Mapping[str, Any], prefix: str) -> Iterator[str]:
    values = list((run["phases_ms"] or {}).values())
    if values and None not in values and not _close(sum(values), run["step_ms"]["mean"], _ABSOLUTE_MS):
        yield f"{prefix}phases_ms: do not add up to the mean step"


def _close(value: float, other: float, absolute: float = 0.0) -> bool:
    return math.isclose(value, other, rel_tol=_RELATIVE, abs_tol=absolute)


def _short(message: str, limit: int = 200) -> str:
    return message if len(message) <= limit else message[: limit - 1] + "…"
