"""What states, decisions, causes and figures are called, on every screen and page and in every sentence; their colours.

The interface's own names (JSON, HTTP, the store) stay as they are; these are for people. The daemon's page gets the
tables from here too (`page_words`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zftune.text import number

NONE = "–"
"""In place of a figure that is not known."""
CAUSES: Mapping[str, str] = {
    "host": "host update",
    "h2d": "weights up (H2D)",
    "d2h": "gradients down (D2H)",
    "select": "selection",
    "comm": "communication",
    "data": "next batch",
    "thread": "training thread",
}
"""What a step waits for."""
DECISIONS: Mapping[str, str] = {
    "start": "start",
    "adopt": "adopted",
    "keep": "not adopted",
    "void": "not counted",
    "crash": "crashed",
    "stop": "stopped",
    "hold": "waiting",
    "reopen": "changed machine",
    "guard": "guard",
    "resume": "continued",
    "remark": "note",
    "rollback": "rolled back",
    "memory": "memory",
    "movement": "made earlier",
    "pause": "paused",
    "unpause": "resumed",
}
TRIALS: Mapping[str, str] = {
    "planned": "not measured",
    "in_flight": "being measured",
    "measured": "measured",
    "rejected": "rejected unseen",
    "crashed": "crashed",
    "void": "not counted",
}
LIVE_STATES: Mapping[str, str] = {
    "warming": "preparing",
    "baseline": "measuring",
    "searching": "searching",
    "confirming": "comparing",
    "frozen": "settled",
    "drifted": "measuring",
    "paused": "paused",
    "ended": "ended",
}
"""States of a run that the daemon follows."""
NO_LONGER_TUNED = "not tuned"
"""In place of "ended" where the training went on."""
TRAINED_ON = "no longer tuned, the training went on"
"""In place of "search finished" where the tuning ended before the training did."""
RUN_STATES: Mapping[str, str] = {
    "running": "still running",
    "finished": "search finished",
    "ended": "search unfinished",
}
"""States of a run: its search came to its end, or the training ended, or was killed, before it did."""
ROLES: Mapping[str, str] = {
    "start": "the starting point",
    "explore": "first comparison",
    "a1": "the best so far, before it",
    "b": "compared again",
    "a2": "the best so far, after it",
    "hold": "the best so far, while waiting",
}
"""What a measurement is for."""
TRENDS: Mapping[str, str] = {
    "falling": "falling",
    "rising": "rising",
    "level": "no trend beyond noise",
    "unknown": "too few to see a trend",
}
LETTERS: Mapping[str, str] = {"topk_ratio": "k", "update_interval": "S", "apply_lag": "L", "offload_ratio": "r"}
_USUAL = {"select_interval": "auto", "deferred_update": "replay", "host_threads": None, "overlap_step": True}


def page_words() -> dict[str, Any]:
    """The tables that the daemon's page needs."""
    return {
        "CAUSES": dict(CAUSES),
        "TRENDS": dict(TRENDS),
        "LETTERS": dict(LETTERS),
        "USUAL": _USUAL,
        "NONE": NONE,
    }


def value(one: object) -> str:
    """A setting's value."""
    if isinstance(one, bool):
        return "on" if one else "off"
    return f"{one:g}" if isinstance(one, float) else "default" if one is None else str(one)


def short_setting(knobs: Mapping[str, Any], *, few: bool = False) -> str:
    """A setting in short: k, S, L, r, and unless they are to be few, what else is not as usual.

    Args:
        few: only those that have a letter, without blanks, and "sync" where overlap_step is off.
    """
    space = "" if few else " "
    shown = {name: f"{one:.4g}" if isinstance(one, float) else value(one) for name, one in knobs.items()}
    short = [f"{letter}{space}{shown[name]}" for name, letter in LETTERS.items() if name in knobs]
    if few:
        return " ".join([*short, *(["sync"] if knobs.get("overlap_step") is False else [])])
    others = (name for name in knobs if name not in LETTERS and (name not in _USUAL or knobs[name] != _USUAL[name]))
    return " ".join([*short, *(f"{name} {shown[name]}" for name in others)])


def shares(share: float, error: float, sign: str = "+/-") -> str:
    """A share and its error as percent, with as many digits as the error leaves sense in."""
    digits = 0 if 100 * error >= 0.95 else 1
    return f"{100 * share:.{digits}f} {sign} {100 * error:.{digits}f}%"


def seconds(time_s: float) -> str:
    """A time in seconds, three digits."""
    return f"{number(time_s) if time_s >= 0.01 else f'{time_s:.3f}'} s"


COLOURS: Mapping[str, str] = {
    "host": "#D55E00",
    "h2d": "#E69F00",
    "d2h": "#CC79A7",
    "select": "#56B4E9",
    "comm": "#1B7FC4",
    "data": "#8C8C8C",
    "thread": "#7B61A8",
    "forward": "#5DC9A5",
    "backward": "#009E73",
    "optimizer": "#006B4E",
    "other": "#BDBDBD",
    "compute": "#009E73",
}
"""Of a cause, the same wherever it appears, and of the resource that it is named after.

After Okabe and Ito, whose colours people with any colour vision tell apart, the blue a little lighter, so that all are
legible on white and on black.
"""
CAUSE_NAMES = {cause: f"wait: {name}" for cause, name in CAUSES.items()}
LANE_NAMES = {
    "compute": "compute",
    "d2h": "D2H",
    "h2d": "H2D",
    "host": "host",
    "data": "data",
    "comm": "comm",
    "stall": "stall",
}


def colour(name: str) -> str:
    """Of a cause, phase, lane or label; grey for one that is not known."""
    return COLOURS.get(name, COLOURS["other"])
