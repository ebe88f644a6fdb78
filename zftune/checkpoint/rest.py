"""What else lies in a checkpoint's folder: a Trainer's state, random numbers, tokenizer, model weights, a script.

Files are copied, for a hard link would make the two folders one: most of what writes such files (`open(.., "w")`, and
safetensors) empties the file that is there, so that whatever goes on in one folder would change the other, which is the
way back, and whoever edits the script would edit the installed DeepSpeed. What a copy costs, the model's weights, is
little beside the masters and moments that are written anew.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from zftune.errors import BadInputError

LATEST = "latest"
_SCRIPT = "zero_to_fp32.py"
_STATES = "*_states.pt"


@dataclass(frozen=True, slots=True)
class Rest:
    """Files and links that go into a new folder as they are."""

    found: Mapping[str, Path] = field(default_factory=dict)
    """By their paths within it."""
    notes: tuple[str, ...] = ()
    """Sentences for the user: what is left out."""

    def copy_to(self, folder: Path) -> None:
        """Copy all of them; links stay links.

        Raises:
            OSError: one cannot be copied.
        """
        for name, path in self.found.items():
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place, follow_symlinks=False)
            if not place.is_symlink():
                with place.open("rb") as file:
                    os.fsync(file.fileno())


def rest_of(folder: Path | None, tag: str | None) -> Rest:
    """Everything in a folder but its checkpoints, and DeepSpeed's script for the masters, if it is installed.

    Args:
        folder: as DeepSpeed's engine saves; None: the source is a file, or the inner folder alone.
        tag: the inner folder that is converted.

    Raises:
        BadInputError: something in it cannot be read.
    """
    found: dict[str, Path] = {}
    left_out: dict[str, str] = {}
    if folder is not None:
        try:
            _sort(folder, found, left_out)
        except OSError as error:
            raise BadInputError(
                f"FROM '{error.filename}': cannot be read ({error.strerror}), allowed is a folder of which all can be"
            ) from error
    for written_anew in (LATEST, tag):
        found.pop(str(written_anew), None)
        left_out.pop(str(written_anew), None)
    script = _script()
    if script is not None:
        found.setdefault(_SCRIPT, script)  # the folder's own is of the version that saved it
    return Rest(found, tuple(f"{name} is left out: it is {reason}" for name, reason in left_out.items()))


def _sort(folder: Path, found: dict[str, Path], left_out: dict[str, str]) -> None:
    for path in _entries(folder):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() and not _stays_within(path, folder):
            left_out[name] = "a link that leads out of the folder"
        elif path.is_symlink():
            found[name] = path
        elif path.is_dir():
            left_out[name] = "another checkpoint"
        elif not path.is_file():
            left_out[name] = "no regular file"
        else:
            with path.open("rb"):  # to fail before minutes are spent
                found[name] = path


def _entries(folder: Path) -> Iterator[Path]:
    """Files, links, and folders that are not entered."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and not _is_checkpoint(path):
            yield from _entries(path)
        else:
            yield path


def _is_checkpoint(folder: Path) -> bool:
    return (folder / LATEST).is_file() or any(folder.glob(_STATES))


def _stays_within(link: Path, folder: Path) -> bool:
    """Whether a link means the same in a copy of the folder: by its words, and by where it leads."""
    words = link.readlink()
    by_words = Path(os.path.normpath(link.parent.relative_to(folder) / words))  # absolute where the words are
    leads_to = Path(os.path.realpath(link))
    return (
        not by_words.is_absolute()
        and os.pardir not in by_words.parts
        and leads_to.is_relative_to(os.path.realpath(folder))
    )


def _script() -> Path | None:
    spec = find_spec("deepspeed")  # which imports nothing
    if spec is None or spec.origin is None:
        return None
    script = Path(spec.origin).parent / "utils" / _SCRIPT
    return script if script.is_file() else None
