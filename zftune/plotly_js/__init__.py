"""The basic bundle of plotly.js (scatter, bar and pie traces), unchanged, under the MIT licence beside it.

The Python package `plotly` carries only the full library, four times the size. The version here is the one that the
pinned `plotly` makes figures for.
"""

from __future__ import annotations

from importlib import resources


def plotly_js() -> str:
    """The script, which defines the global `Plotly`."""
    return resources.files(__name__).joinpath("plotly-basic.min.js").read_text(encoding="utf-8")
