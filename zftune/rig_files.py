"""The rigs that come with zftune, and those of a user, by name or path."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING

from zftune.errors import BadInputError

if TYPE_CHECKING:
    from zenflow import RigSpec

DEFAULT_RIG = "llama2-7b-4xa100"


def rig_names() -> list[str]:
    """Names of the rigs that come with the package."""
    return sorted(file.name.removesuffix(".toml") for file in _folder().iterdir() if file.name.endswith(".toml"))


def load_rig(name_or_file: str) -> RigSpec:
    """A rig that comes with the package, or one from a file.

    Raises:
        BadInputError: there is no such rig, or its file is not a valid rig.
    """
    from zenflow import ConfigError, RigSpec

    names = rig_names()
    if name_or_file not in names and not _exists(Path(name_or_file)):
        raise BadInputError(f"--rig '{name_or_file}': allowed are {', '.join(names)}, none, or a TOML file")
    try:
        if name_or_file in names:
            with resources.as_file(_folder() / f"{name_or_file}.toml") as path:
                return RigSpec.load(path)
        return RigSpec.load(Path(name_or_file))
    except ConfigError as error:
        raise BadInputError(f"--rig: {error}") from error


def _exists(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # a name that is too long
        return False


def _folder() -> Traversable:
    return resources.files("zftune") / "rigs"
