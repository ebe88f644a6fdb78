"""Figures, units and choices as a person reads them, and the files that commands write."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from zftune.errors import BadInputError, ZftuneError, require

UNEVEN = 0.05
"""Ranks that differ by less, as a share, are about equal."""

_UNITS = {"bytes": 1.0, "b": 1.0}
_UNITS |= {f"{prefix}b": 1e3**power for power, prefix in enumerate("kmgt", 1)}
_UNITS |= {f"{prefix}ib": 1024.0**power for power, prefix in enumerate("kmgt", 1)}
_BYTES = re.compile(r"(?P<number>(\d+\.?\d*|\.\d+)(e\+?\d\d?)?)\s*(?P<unit>bytes|[kmgt]?b|[kmgt]ib|)", re.IGNORECASE)
_MOST_BYTES = 1e18
_Name = TypeVar("_Name", bound=str)


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


def size_up(count: float) -> str:
    """Bytes that are needed, in decimal units: rounded up, so that as many are enough."""
    step = 10.0 ** max(0, math.floor(math.log10(max(count, 1))) - 2)
    return size(step * math.ceil(count / step))


def byte_count(option: str, value: str, *, unit: str = "bytes") -> int:
    """The bytes that an option asks for: a number in its own unit, or with another one, such as 64GB or 64 GiB.

    Args:
        unit: of a number alone: "bytes" or "GB".

    Raises:
        BadInputError: it is no such number, or not one above 0.
    """
    found = _BYTES.fullmatch(value.strip())
    count = float(found["number"]) * _UNITS[found["unit"].lower() or unit.lower()] if found else 0.0
    if not 1 <= count < _MOST_BYTES:
        raise BadInputError.of(
            option, value, f"a number of {unit} above 0, or one with its unit, such as 64GB or 64GiB"
        )
    return round(count)


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


def time_left(usual_s: float, most_s: float) -> str:
    """How long a search still takes, no more precisely than one can know: minutes, and many of them in fives.

    Args:
        usual_s: where nothing faster turns up.
        most_s: where as much is measured as may be.
    """
    usual, most = _about(usual_s), _about(most_s)
    return f"{usual} left" if most == usual else f"{usual} left ({most} where faster settings keep turning up)"


def _about(time_s: float) -> str:
    minutes = time_s / 60
    if minutes < 0.75:
        return "less than a minute"
    if minutes < 9.5:
        return f"about {max(1, round(minutes))} min"
    return f"about {5 * round(minutes / 5)} min" if minutes < 100 else f"about {round(minutes / 60)} h"


def slowest_rank(own: Mapping[int, float]) -> str | None:
    """The rank that has most to do itself: where ranks meet in each step, all of them take as long.

    Args:
        own: time of a step of each rank without its waits in collectives, ms.

    Returns:
        A sentence; None where ranks are about equal, or there is none.
    """
    if not own:
        return None
    slowest, least = max(own, key=lambda rank: own[rank]), min(own.values())
    if own[slowest] <= (1 + UNEVEN) * least:
        return None
    return (
        f"Rank {slowest} is the slowest: its step takes {ms(own[slowest])} without collectives, that of the fastest "
        f"rank {ms(least)}; the other ranks wait for it."
    )


def either(names: Sequence[object]) -> str:
    """Names as a choice: "a, b or c"."""
    *most, last = map(str, names)
    return f"{', '.join(most)} or {last}" if most else last


def near(value: object, names: Sequence[str]) -> str:
    """The end of a sentence about a value that is none of some names: "; did you mean bf16", or nothing."""
    from zenflow.names import did_you_mean  # loads torch: after an error alone

    return did_you_mean(value, names)


def one_of(field: str, value: object, names: Sequence[_Name], more: str = "") -> _Name:
    """The one of some names that was given.

    Args:
        more: what else it may be, such as "a file", which somebody else has looked at.

    Raises:
        BadInputError: it is none of them; names the near one.
    """
    for name in names:
        if value == name:
            return name
    allowed = f"{', '.join(names)}, or {more}" if more else either(names)
    raise BadInputError.of(field, value, f"{allowed}{near(value, names)}")


STANDARD_OUTPUT = "-"


def check_output_path(path: str | None, option: str = "--json", *, standard_output: bool = True) -> None:
    """Refuse a path that cannot be written.

    Args:
        standard_output: whether "-" is allowed and means standard output.

    Raises:
        BadInputError: it is a folder, or lies in a folder that is missing or cannot be written.
        MissingPackageError: a page needs plotly.
    """
    if path is None:
        return
    if option == "--html":
        require("plotly", option)
    if path == STANDARD_OUTPUT and standard_output:
        return
    target = Path(path)
    try:
        ok = os.access(target if _is_special(target) else target.parent, os.W_OK) and not target.is_dir()
        ok = ok and target.parent.is_dir()
    except OSError:  # a name that is too long
        ok = False
    if not ok or path == STANDARD_OUTPUT:
        also = ", or -" if standard_output else ""
        raise BadInputError(f"{option} '{path}' cannot be written: give a file in a folder that exists{also}")


def write_json(document: Mapping[str, Any], path: str | None) -> None:
    """Write `document` to a file, replacing what was there at once, or to standard output; None: nowhere.

    Raises:
        ZftuneError: the file cannot be written; what was there is left as it was.
    """
    if path is None:
        return
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
    else:
        write_text(text, path, option="--json")


def write_text(text: str, path: str | Path, *, option: str) -> None:
    """Write a file, replacing what was there at once.

    Raises:
        ZftuneError: the file cannot be written; what was there is left as it was.
    """
    target = Path(path)
    try:
        if _is_special(target):
            target.write_text(text, encoding="utf-8")
        else:
            _replace(target.resolve(), text)
    except OSError as error:
        raise ZftuneError(f"{option} '{path}': cannot be written ({error.strerror})") from error


def _replace(target: Path, text: str) -> None:
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)  # a reader never sees half a file
    finally:
        partial.unlink(missing_ok=True)


def _is_special(path: Path) -> bool:
    """Whether it is a pipe or a device, which is written to and must not be replaced by a file."""
    return path.exists() and not path.is_file() and not path.is_dir()
