"""The answer of one check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_NAME = "zftune.doctor/1"

Status = Literal["ok", "note", "broken", "absent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What one check found."""

    name: str
    status: Status
    """In a word. "ok": works. "note": works, with something to know. "broken": is there and does not work, or harms.
    "absent": is not there."""
    finding: str
    """A sentence."""
    fix: str | None = None
    """What to do about it; None where there is nothing to do."""
    required: bool = False
    """Whether zftune cannot do without it."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the sentence, with their units in their names."""

    @property
    def is_fault(self) -> bool:
        """Whether something that is required does not work."""
        return self.required and self.status in ("broken", "absent")


@dataclass(frozen=True, slots=True)
class Area:
    """Checks that belong together."""

    name: str
    checks: tuple[Check, ...]


def document(areas: Iterable[Area], version: str) -> dict[str, Any]:
    """The checks as JSON: no host name, no user and no path.

    Args:
        areas: in the order in which they are shown.
        version: of zftune.

    Returns:
        {"schema", "zftune", "ok", "checks": [{"area", "name", "status", "finding", "fix", "required", "figures"}]}.
    """
    checks = [
        {
            "area": area.name,
            "name": check.name,
            "status": check.status,
            "finding": check.finding,
            "fix": check.fix,
            "required": check.required,
            "figures": dict(check.figures),
        }
        for area in areas
        for check in area.checks
    ]
    ok = not any(check.is_fault for area in areas for check in area.checks)
    return {"schema": SCHEMA_NAME, "zftune": version, "ok": ok, "checks": checks}
