"""The "zftune" section of a ds_config: which backend, which preset, which promise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from zftune.integrations.deepspeed.refusal import Refusal, require_none
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
        require_none(refusals(config))
        return cls(**(config.get(NAME) or {}))

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


def refusals(config: Mapping[str, Any]) -> Iterator[Refusal]:
    """What is wrong with the section of a ds_config, and where it stands.

    Args:
        config: a ds_config.
    """
    zero, section = config.get("zero_optimization"), config.get(NAME)
    if isinstance(zero, Mapping) and NAME in zero:
        yield Refusal(f"zero_optimization.{NAME}", "there", f'is "{NAME}" at the top level')
    if section is not None and not isinstance(section, Mapping):
        yield Refusal.of(NAME, section, "is a JSON object")
    for name, value in section.items() if isinstance(section, Mapping) else ():
        allowed = _allowed(name, value)
        if allowed is not None:
            yield Refusal.of(f"{NAME}.{name}", value, allowed)


def _allowed(name: str, value: object) -> str | None:
    """What is allowed where a value is not."""
    if name not in _FIELDS:
        return f"are the fields {', '.join(_FIELDS)}"
    if value == "auto":
        return 'is any other word: Hugging Face takes "auto" for its own'
    if name == "online":
        return None if isinstance(value, bool) else "is true or false"
    if name == "preset":
        return None if isinstance(value, str) and value else f'is "{BEST}", a name or a file'
    words = get_args(Quality if name == "quality" else Backend)
    return None if value in words else f"are {', '.join(words)}"
