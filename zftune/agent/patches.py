"""Attributes of other packages that are replaced while the agent is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patches:
    """Remembers what was replaced, so that all of it can be undone."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any, bool]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
        """Put `make(original)` in an attribute's place.

        Args:
            owner: a module or a class.
            name: of the attribute; a class may inherit it.
            make: given the original, as `getattr` returns it.

        Returns:
            Whether there is such an attribute.
        """
        if not hasattr(owner, name):
            return False
        original = getattr(owner, name)
        replacement = make(original)
        self._undo.append((owner, name, original, replacement, name in vars(owner)))
        setattr(owner, name, replacement)
        return True

    def undo(self) -> None:
        """Put the originals back, except where somebody else has replaced an attribute since."""
        while self._undo:
            owner, name, original, replacement, own = self._undo.pop()
            if vars(owner).get(name) is not replacement:
                continue
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
