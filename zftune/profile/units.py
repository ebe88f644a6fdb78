"""Figures as a person reads them: two or three significant digits and a unit."""

from __future__ import annotations

import math


def number(value: float) -> str:
    """At most three significant digits, all digits before the point, never an exponent."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ms(value: float) -> str:
    """Milliseconds."""
    return f"{number(value)} ms"


def size(count: float) -> str:
    """Bytes, in decimal units."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{number(count / factor)} {unit}"
    return f"{count:.0f} bytes"


def amount(count: float) -> str:
    """A large count of things, such as parameters."""
    for unit, factor in (("billion", 1e9), ("million", 1e6)):
        if count >= factor / 10:
            return f"{number(count / factor)} {unit}"
    return f"{count:,.0f}"


def times(ratio: float) -> str:
    """How many times as much."""
    if abs(ratio - 1) < 0.005:
        return "1×"
    return f"{ratio:.0f}×" if ratio >= 10 else f"{ratio:.1f}×" if ratio >= 1.05 else f"{ratio:.2f}×"


def percent(share: float) -> str:
    """A share as percent: whole ones from 10 on, else one decimal; what is not 0 or 100 does not become it."""
    value = 100 * share
    if value and abs(value) < 0.05:
        return "< 0.1%"
    if 99 < value < 100:
        return f"{min(value, 99.9):.1f}%"
    return f"{value:.0f}%" if value >= 9.95 or value == 0 else f"{value:.1f}%"
