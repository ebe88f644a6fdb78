"""Versions of installed distributions, read without importing them."""

from __future__ import annotations

import re
from importlib import metadata


def installed(distribution: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """The release as numbers: (2, 13, 0) of "2.13.0+cpu"."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def at_least(version: str, least: str) -> bool:
    """Whether a release is not before another: 2.10 is not before 2.4, nor 2 before 2.0."""
    a, b = numbers(version), numbers(least)
    length = max(len(a), len(b))
    return a + (0,) * (length - len(a)) >= b + (0,) * (length - len(b))


def requirements(distribution: str) -> dict[str, str | None]:
    """What a distribution always needs: names, and the least version of each or None."""
    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return {}
    found = {}
    for line in lines:
        requirement, _, marker = line.partition(";")
        if "extra" in marker:
            continue
        name = re.match(r"[\w.-]+", requirement)
        least = re.search(r">=\s*([\w.]+)", requirement)
        if name is not None:
            found[name[0]] = least[1] if least else None
    return found
