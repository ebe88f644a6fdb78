"""The (step, knobs) schedule of a run: what `zftune run --export-schedule` writes and `zftune run --schedule` replays.

    {
      "zftune_schedule": 1,
      "steps": [
        {"after_step": 0, "knobs": {"topk_ratio": 0.1, "update_interval": 4}},
        {"after_step": 24, "knobs": {"update_interval": 8}},
        {"after_step": 32, "flush": true}
      ]
    }

`after_step` counts the optimizer's steps: what is asked for is done between that step and the next one, which closes
its window under the old knobs; 0 is before the first step, which takes the new ones already. A flush is the tuner's own
(its staleness probe has one). The script's are not told of: a replay runs the script, which does them again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zftune.errors import BadInputError

VERSION = 1
_FIELDS = ("zftune_schedule", "steps")
_LONG = 1 << 30


@dataclass(frozen=True, slots=True)
class Entry:
    """What is done after a step."""

    after_step: int
    knobs: Mapping[str, Any] | None
    """What `set_knobs` is given; None: it is a flush."""


def encode(entries: Sequence[Entry]) -> str:
    """The text of a schedule.

    Args:
        entries: in their order.
    """
    steps = [
        {"after_step": one.after_step, **({"flush": True} if one.knobs is None else {"knobs": dict(one.knobs)})}
        for one in entries
    ]
    return json.dumps({"zftune_schedule": VERSION, "steps": steps}, indent=2, allow_nan=False) + "\n"


def read_schedule(path: str | os.PathLike[str]) -> list[Entry]:
    """The schedule in a file.

    Raises:
        BadInputError: it cannot be read, or is none; one sentence.
    """
    try:
        return decode(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"--schedule '{path}': cannot be read ({error.strerror})") from error
    except BadInputError as error:
        raise BadInputError(f"--schedule '{path}': {error}") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"--schedule '{path}': is no text in UTF-8, allowed is JSON") from error


def decode(text: str) -> list[Entry]:
    """Read a schedule's text; whatever is not as it has to be is refused.

    Raises:
        BadInputError: the field, its value, and what is allowed.
    """
    try:
        document = json.loads(text, parse_constant=_no_number, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError, too
        raise BadInputError(f"is not JSON ({error})") from error
    if not isinstance(document, dict) or set(document) != set(_FIELDS):
        found = ", ".join(map(str, document)) if isinstance(document, dict) else _shown(document)
        raise BadInputError(f"holds {found or 'nothing'}, allowed is an object with {' and '.join(_FIELDS)}")
    if document["zftune_schedule"] != VERSION or isinstance(document["zftune_schedule"], bool):
        raise BadInputError(f"zftune_schedule is {_shown(document['zftune_schedule'])}, allowed is {VERSION}")
    steps = document["steps"]
    if not isinstance(steps, list):
        raise BadInputError(f"steps is {_shown(steps)}, allowed is a list")
    entries: list[Entry] = []
    for number, step in enumerate(steps):
        entries.append(_entry(step, f"steps[{number}]", entries[-1].after_step if entries else 0))
    return entries


def _entry(step: object, where: str, before: int) -> Entry:
    names = ({"after_step", "knobs"}, {"after_step", "flush"})
    if not isinstance(step, dict) or set(step) not in names:
        found = ", ".join(step) if isinstance(step, dict) else _shown(step)
        raise BadInputError(f"{where} holds {found or 'nothing'}, allowed are after_step and knobs, or flush")
    after = step["after_step"]
    if isinstance(after, bool) or not isinstance(after, int) or after < before:
        raise BadInputError(f"{where}.after_step is {_shown(after)}, allowed is an integer >= {before}")
    if "flush" in step:
        if step["flush"] is not True:
            raise BadInputError(f"{where}.flush is {_shown(step['flush'])}, allowed is true")
        return Entry(after, None)
    knobs = step["knobs"]
    if not isinstance(knobs, dict) or not knobs:
        raise BadInputError(f"{where}.knobs is {_shown(knobs)}, allowed is an object with a knob or more")
    _check_knobs(knobs, where)
    return Entry(after, knobs)


def _check_knobs(knobs: Mapping[str, Any], where: str) -> None:
    """Refuse what no optimizer takes; whether they go together with the others is known where it trains."""
    from zenflow import ConfigError, ZenFlowConfig

    window = {"max_update_interval": _LONG, "update_interval": _LONG}
    try:
        ZenFlowConfig().changed({**window, **knobs})
    except ConfigError as error:
        raise BadInputError(f"{where}.knobs.{error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadInputError(f"{twice} stands there twice, allowed is once")
    return found


def _no_number(text: str) -> float:
    raise BadInputError(f"holds {text}, allowed are finite numbers")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
