"""A run in words that fit into a line."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from zftune.daemon.runs_asked import called
from zftune.store.document import escaped

Run = Mapping[str, Any]
NONE = "-"
_SHORT = {"topk_ratio": "k", "update_interval": "S", "apply_lag": "L", "offload_ratio": "r"}
_AT_REST = {
    "select_interval": "auto",
    "deferred_update": "replay",
    "host_threads": None,
    "overlap_step": True,
}


def name(run: Run) -> str:
    """How a run is called on the command line."""
    return escaped(called(run))


def model(run: Run) -> str:
    """Of a run."""
    return escaped(run["model"]) or NONE


def count(steps: int) -> str:
    """Steps in at most six characters."""
    if steps < 1_000_000:
        return str(steps)
    return f"{steps / 1e6:.4g}M" if steps < 1_000_000_000 else f"{steps / 1e9:.3g}G"


def step_ms(ms: float | None) -> str:
    """A step time without its unit, three figures and more."""
    if ms is None:
        return NONE
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 1000 else f"{ms:.0f}"


def knobs(found: Mapping[str, Any] | None, *, few: bool = False) -> str:
    """Knobs in short: k, S, L, r (the offload ratio), and unless they are to be few, what else is not as usual."""
    if found is None:
        return NONE
    space = "" if few else " "
    short = [f"{letter}{space}{_value(found[knob])}" for knob, letter in _SHORT.items() if knob in found]
    if few:
        return " ".join(short)
    others = (knob for knob in found if knob not in _SHORT and (knob not in _AT_REST or found[knob] != _AT_REST[knob]))
    return " ".join([*short, *(f"{escaped(knob)} {_value(found[knob])}" for knob in others)])


def gain(found: Mapping[str, float] | None) -> str:
    """With two standard errors."""
    return NONE if found is None else f"{100 * found['share']:.1f} ± {100 * found['error']:.1f}%"


def stalls(run: Run) -> tuple[tuple[str, float], ...]:
    """Causes with their share of the step, most first; none where nothing is known."""
    ms = run["step_ms"]
    if not ms:
        return ()
    shares = ((escaped(cause), stall / ms) for cause, stall in run["stall_ms"].items() if stall > 0)
    return tuple(sorted(shares, key=lambda one: -one[1]))


def state(run: Run) -> str:
    """Where a run stands, as a sentence."""
    reason = escaped(run["reason"]).rstrip(".")
    return f"Run {name(run)} is {run['state']}" + (f": {reason}." if reason else ".")


def line(run: Run) -> str:
    """A run at a glance."""
    ms = run["step_ms"]
    waits = "".join(f", {100 * share:.0f}% {cause}" for cause, share in stalls(run)[:2])
    time_taken = "no step yet" if ms is None else f"{step_ms(ms)} ms a step{waits}"
    best = "" if run["incumbent"] is None else f", {knobs(run['incumbent'])}"
    return f"{name(run)}  {run['state']:<10}  step {run['step']}, {time_taken}{best}  ({model(run)})"


def decision(one: Mapping[str, Any]) -> str:
    """A decision with its time."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["at_unix_s"]))
    return f"{at}  {escaped(one['kind']):<8}  {escaped(one['reason'])}"


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else escaped(str(value))
