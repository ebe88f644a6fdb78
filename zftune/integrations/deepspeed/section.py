"""The "zftune" section of a ds_config (which backend, which preset, which promise), and refusals of settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

from zenflow.names import LIKENESS, did_you_mean, nearest
from zftune.ds_config.facts import NAMES, OTHER_WORDS
from zftune.ds_config.reading import SettingPath
from zftune.errors import BadInputError
from zftune.store.types import Backend, Quality
from zftune.text import either, near

NAME = "zftune"

BEST, NO_PRESET = "best", "none"

FIELDS = ("preset", "online", "quality", "backend")


INSTEAD = 'set "zftune": {"backend": "deepspeed"}'
"""What else to do where the other backend takes a setting."""

INSTEAD_OF_A_SECTION = "use zftune run --backend deepspeed"
"""The same where the ds_config is Accelerate's own, which has no such section."""


class Refusal(NamedTuple):
    """A setting that is refused, and what is allowed."""

    field: str
    """Where it stands in the ds_config, with dots."""
    value: str
    allowed: str
    """What it must be: "a number >= 0", or "left out"."""
    instead: str = ""
    near: str = ""
    """The name that may have been meant: "; did you mean AdamW"."""

    @classmethod
    def of(cls, field: str, value: Any, allowed: str, instead: str = "", names: Sequence[str] = ()) -> Refusal:
        """With a value as Python writes it, and the near one of the names that it might be."""
        return cls(field, repr(value), allowed, instead, near(value, names))

    @property
    def wanted(self) -> str:
        return f"it must be {self.allowed}{f', or {self.instead}' if self.instead else ''}{self.near}"

    @property
    def reason(self) -> str:
        return f"zftune run refuses it: {self.wanted}."

    def __str__(self) -> str:
        return f"{self.field} is {self.value}; {self.wanted}"


def require_none(refusals: Iterable[Refusal]) -> None:
    """Let the first one end what is being done.

    Raises:
        BadInputError: there is one.
    """
    for refusal in refusals:
        error = BadInputError(str(refusal))
        error.field, error.value, error.allowed = refusal.field, refusal.value, refusal.allowed
        raise error


_TYPO = 0.85
"""Likeness from which a name is near where any name is allowed, as at the top level: a letter or two differ."""


def meant(path: SettingPath) -> str:
    """The question about an unknown name that is near a known one: "did you mean lr"; "" elsewhere."""
    section, name = path[:-1], path[-1]
    others = OTHER_WORDS if section == ("optimizer", "params") else {}
    known = frozenset(FIELDS) if section == (NAME,) else NAMES.get(section, frozenset())
    if name in others:
        return f"did you mean {others[name]}"
    if name in known or name in NAMES[()]:  # of another version, or in another place
        return ""
    if not section and (name.startswith("_") or name.endswith("_")):  # switched off so, by habit
        return ""
    near = nearest(name, {*known, *others}, LIKENESS if section in ((NAME,), ("optimizer", "params")) else _TYPO)
    names = dict.fromkeys(others.get(one, one) for one in near.split(" or "))
    return f"did you mean {' or '.join(names)}" if near else ""


def mistyped(value: Any, near: str) -> str:
    """The one word that a value differs from in a letter or two; "" where there is none, or several."""
    found = re.search(r"\bdid you mean (\S+)$", near)
    return nearest(value, (found[1],), _TYPO) if found is not None and isinstance(value, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What is asked for; None: nothing is said about it."""

    preset: str | None = None
    """A name, a file, "best", or "none": none is taken, also not one that was measured for exactly this training."""
    online: bool = False
    quality: Quality | None = None
    """Which updates may come late: "exact", "published" or "loose"."""
    backend: Backend | None = None
    """"zenflow", or "deepspeed" for DeepSpeed's own ZenFlow."""

    @classmethod
    def of(cls, config: Mapping[str, Any], *, given_as: str = f"{NAME}.") -> Section:
        """Read the section of a ds_config, which may have none.

        Args:
            given_as: what stands before a field's name where the user gave it.

        Raises:
            BadInputError: a field or its value is not allowed.
        """
        require_none(one._replace(field=one.field.replace(f"{NAME}.", given_as)) for one in refusals(config))
        return cls(**(config.get(NAME) or {}))

    @property
    def named_preset(self) -> str | None:
        """The name or the file; None: it says none."""
        return None if self.preset in (BEST, NO_PRESET) else self.preset

    def over(self, other: Section) -> Section:
        """What this asks for, and what `other` does where this says nothing."""
        said = {name: getattr(self, name) for name in FIELDS if getattr(self, name)}
        return replace(other, **said)


def require_preset(section: Section) -> None:
    """Refuse a preset that is not there.

    Raises:
        BadInputError: it asks for a name that is not in the store, or for a file that is no preset.
        StoreError: the store could not be read.
    """
    preset = section.named_preset
    if preset is None:
        return
    from zftune.integrations.deepspeed.presets import is_file, named
    from zftune.store import open_store
    from zftune.store.preset_file import read_preset

    if is_file(preset):
        read_preset(preset)
        return
    with open_store() as store:
        named(store, preset)


def refusals(config: Mapping[str, Any]) -> Iterator[Refusal]:
    """What is wrong with the section of a ds_config, and where it stands."""
    zero, section = config.get("zero_optimization"), config.get(NAME)
    if isinstance(zero, Mapping) and NAME in zero:
        yield Refusal(f"zero_optimization.{NAME}", "there", f'"{NAME}" at the top level')
    if section is not None and not isinstance(section, Mapping):
        yield Refusal.of(NAME, section, "a JSON object")
    for name, value in section.items() if isinstance(section, Mapping) else ():
        allowed = _allowed(name, value)
        if allowed is not None:
            yield Refusal.of(f"{NAME}.{name}", value, allowed)


def _allowed(name: str, value: object) -> str | None:
    if name not in FIELDS:
        return f"left out: the fields are {', '.join(FIELDS)}{did_you_mean(name, FIELDS)}"
    if value == "auto":
        return 'another word: Hugging Face takes "auto" for its own'
    if name == "online":
        return None if isinstance(value, bool) else "true or false"
    if name == "preset":
        return None if isinstance(value, str) and value else f'"{BEST}", "{NO_PRESET}", a name or a file'
    words = get_args(Quality if name == "quality" else Backend)
    return None if value in words else f"{either(words)}{near(value, words)}"
