"""Colours and names: a cause has the same colour wherever it appears, and so does the resource it is named after.

After Okabe and Ito, whose colours people with any colour vision tell apart, the blue a little lighter, so that all are
legible on white and on black.
"""

from __future__ import annotations

CAUSES = ("host", "h2d", "d2h", "select", "comm", "data")
PHASES = ("data", "forward", "backward", "optimizer", "other")

COLOURS = {
    "host": "#D55E00",
    "h2d": "#E69F00",
    "d2h": "#CC79A7",
    "select": "#56B4E9",
    "comm": "#1B7FC4",
    "data": "#8C8C8C",
    "forward": "#5DC9A5",
    "backward": "#009E73",
    "optimizer": "#006B4E",
    "other": "#BDBDBD",
    "compute": "#009E73",
}
CAUSE_NAMES = {
    "host": "waiting for the host's update",
    "h2d": "waiting for weights up (H2D)",
    "d2h": "waiting for gradients down (D2H)",
    "select": "selection",
    "comm": "communication",
    "data": "waiting for the next batch",
}
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
