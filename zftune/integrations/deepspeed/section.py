"""The "zftune" section of a ds_config: which backend, which preset, which promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from zftune.errors import BadInputError
from zftune.store.types import Backend, Quality

NAME = "zftune"
BEST = "best"
_FIELDS = ("preset", "online", "quality", "backend")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What is asked for; None: nothing is said about it."""

    preset: str | None = None
    """A name, a file, or "best"."""
    online: bool = False
    """Tune while it trains."""
    quality: Quality | None = None
    backend: Backend | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Section:
        """Read the section of a ds_config, which may have none.

        Raises:
            BadInputError: a field or its value is not allowed.
        """
        section = config.get(NAME)
        if section is None:
            return cls()
        if not isinstance(section, Mapping):
            raise BadInputError(f"{NAME} is {section!r}, allowed is a JSON object")
        for name, value in section.items():
            _check(str(name), value)
        return cls(**section)

    def over(self, other: Section) -> Section:
        """What this asks for, and what `other` does where this says nothing.

        Args:
            other: that comes after it.
        """
        said = {name: getattr(self, name) for name in _FIELDS if getattr(self, name)}
        return replace(other, **said)


def require_preset(section: Section) -> None:
    """Refuse a preset that is not there.

    Args:
        section: that may ask for one.

    Raises:
        BadInputError: it asks for a name that is not in the store, or for a file that is no preset.
        StoreError: the store could not be read.
    """
    if section.preset in (None, BEST):
        return
    from zftune.store import open_store
    from zftune.store.applying import is_file, named
    from zftune.store.document import read_preset

    if is_file(str(section.preset)):
        read_preset(str(section.preset))
        return
    with open_store() as store:
        named(store, str(section.preset))


def _check(name: str, value: object) -> None:
    shown = f"{NAME}.{name} is {value!r}"
    if name not in _FIELDS:
        raise BadInputError(f"{shown}, allowed are the fields {', '.join(_FIELDS)}")
    if value == "auto":
        raise BadInputError(f'{shown}, allowed is any other word: Hugging Face takes "auto" for its own')
    if name == "online" and not isinstance(value, bool):
        raise BadInputError(f"{shown}, allowed is true or false")
    if name == "preset" and not (isinstance(value, str) and value):
        raise BadInputError(f'{shown}, allowed is "{BEST}", a name or a file')
    for field, words in (("quality", get_args(Quality)), ("backend", get_args(Backend))):
        if name == field and value not in words:
            raise BadInputError(f"{shown}, allowed are {', '.join(words)}")
