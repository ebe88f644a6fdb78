"""A scratch copy of the working directory, in which a trial runs: what it writes beside its script is thrown away.

Folders are real folders, in linked ones too, so that whatever is made, renamed or deleted in them stays in the copy.
Files are copied, the smallest first, up to 64 MiB in all; larger ones are links to the originals. Such a link can be
written through, which `changed` finds out afterwards. Folders that hold no outputs are links as a whole: version
control, virtual environments, installed packages. `__pycache__` is left out, and so are pipes and sockets. What is
above the working directory is there as links: it can be read by a relative path, and written too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zftune.errors import BadInputError

COPIED_BYTES = 64 << 20
MOST_ENTRIES = 100_000
_WHOLE = frozenset({".git", ".hg", ".svn", "node_modules", "site-packages"})
_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")
_LEFT_OUT = frozenset({"__pycache__"})
_ABOVE = 3  # folders above the copy that are there

Mark = tuple[int, int, int]
"""Size, time of the last change in nanoseconds, inode: of a file's content."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What is below a folder.

    Args:
        root: the folder.
    """

    root: Path
    folders: list[Path] = field(default_factory=list)
    """Relative, parents before children."""
    files: dict[Path, Mark] = field(default_factory=dict)
    """Relative."""
    whole: list[Path] = field(default_factory=list)
    """Relative: folders that are linked as they are."""
    left_out: tuple[Path, ...] = ()
    """Absolute: what is called so, or begins so (a database has files beside it)."""

    @classmethod
    def of(cls, root: Path, left_out: Sequence[Path] = ()) -> Tree:
        """Look at a folder.

        Args:
            root: the folder.
            left_out: paths that are not looked at, with what begins like them.

        Raises:
            BadInputError: there is too much in it.
        """
        tree = cls(root, left_out=tuple(left_out))
        tree._add(Path(), frozenset(_streams()))
        return tree

    def _add(self, folder: Path, above: frozenset[tuple[int, int]]) -> None:
        """Add what is in a folder; `above` are the folders that it is in, and files that are not to be looked at."""
        here = (self.root / folder).stat()
        above |= {(here.st_dev, here.st_ino)}
        for entry in sorted(_entries(self.root / folder), key=lambda one: one.name):
            path = folder / entry.name
            if len(self.folders) + len(self.files) + len(self.whole) >= MOST_ENTRIES:
                raise BadInputError(
                    f"working directory '{self.root}': has more than {MOST_ENTRIES} files, too many: "
                    "a trial runs in a copy of it"
                )
            try:
                found = entry.stat()
            except OSError:  # a link that leads nowhere: writing through it would make what it names
                continue
            known = (found.st_dev, found.st_ino) in above
            if any(str(self.root / path).startswith(str(left)) for left in self.left_out):
                continue
            if stat.S_ISREG(found.st_mode) and not known:
                self.files[path] = _mark(found)
            elif stat.S_ISDIR(found.st_mode) and entry.name not in _LEFT_OUT:
                if known or is_whole(self.root / path):
                    self.whole.append(path)
                else:
                    self.folders.append(path)
                    self._add(path, above)


def is_whole(folder: Path) -> bool:
    """Whether a folder is linked as a whole: nobody writes outputs there."""
    return (
        folder.name in _WHOLE
        or any((folder / name).exists() for name in _ENVIRONMENTS)
        or not os.access(folder, os.R_OK | os.X_OK)
    )


class Scratch:
    """A copy.

    Args:
        source: the working directory; absolute.
        target: the copy; does not exist.
        left_out: paths that are not copied, with what begins like them.

    Raises:
        BadInputError: there is too much in the working directory.
        OSError: there is no room for the copy.
    """

    def __init__(self, source: Path, target: Path, left_out: Sequence[Path] = ()) -> None:
        self.source, self.target = source, target
        self._before = Tree.of(source, left_out)
        self._linked: set[Path] = set()
        self._whole = frozenset(self._before.whole)
        target.mkdir(parents=True, exist_ok=True)
        for folder in self._before.folders:
            (target / folder).mkdir()
        for path in self._before.whole:
            (target / path).symlink_to((source / path).resolve())
        copied = 0
        for path, (size, _, _) in sorted(self._before.files.items(), key=lambda item: (item[1][0], item[0])):
            copied += size
            if copied <= COPIED_BYTES and os.access(source / path, os.R_OK):
                shutil.copy2(source / path, target / path)
            else:
                (target / path).symlink_to((source / path).resolve())
                self._linked.add(path)

    def command(self, command: list[str]) -> list[str]:
        """A command whose paths lead into the copy where they led into the working directory, else where they led."""
        return [self._argument(argument) for argument in command]

    def changed(self) -> tuple[list[str], list[str]]:
        """What is otherwise than before in the working directory itself: linked files, and whatever else."""
        now = Tree.of(self.source, self._before.left_out).files
        of_all = [path for path in {**self._before.files, **now} if self._before.files.get(path) != now.get(path)]
        linked = sorted(str(path) for path in of_all if path in self._linked)
        return linked, sorted(str(path) for path in of_all if path not in self._linked)

    def _argument(self, argument: str) -> str:
        name, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
        if "/" not in value or "\0" in value:
            return argument
        path = Path(os.path.normpath(self.source / value))
        if not path.is_relative_to(self.source):
            return f"{name}{equals}{path}" if path.exists() else argument
        inside = path.relative_to(self.source)
        if any(part in self._whole for part in (inside, *inside.parents)):
            return f"{name}{equals}{path}"  # an interpreter, say: what it compiles depends on where it is
        return f"{name}{equals}{self.target / inside}" if value.startswith("/") else argument


def surroundings(source: Path, root: Path) -> Path:
    """Make the folders above a copy, in which everything else that is there is a link: `../data` is what it was.

    Args:
        source: the working directory; absolute.
        root: an empty folder.

    Returns:
        Where the copy goes.
    """
    target = root
    for above in reversed(source.parents[: min(_ABOVE, len(source.parents) - 1)]):
        inside = source.relative_to(above).parts[0]
        for entry in _entries(above) if os.access(above, os.R_OK | os.X_OK) else ():
            if entry.name != inside and not root.is_relative_to(entry.path):
                (target / entry.name).symlink_to(entry.path)
        target /= inside
        if above != source.parent:
            target.mkdir()
    return target


class Outside:
    """Folders outside of the working directory that the command is told of.

    Args:
        command: with its arguments.
        source: the working directory.
    """

    def __init__(self, command: list[str], source: Path) -> None:
        found = _folders(command[1:], source)
        self._before = {path: _listing(path) for path in found if not path.is_relative_to(source)}

    def changed(self) -> list[str]:
        """Those in which something is otherwise than before."""
        return [str(path) for path, before in self._before.items() if _listing(path) != before]


def _folders(arguments: list[str], source: Path) -> Iterator[Path]:
    """Those that are named by an absolute path, or by one that leads upwards."""
    for argument in arguments:
        value = argument.partition("=")[2] if argument.startswith("-") else argument
        path = Path(os.path.normpath(source / value))
        if (value.startswith("/") or ".." in Path(value).parts) and not path.is_file() and path != Path("/"):
            yield path


def _listing(path: Path) -> dict[Path, Mark] | None:
    """The files below; None: it is not there, or holds too many for a look."""
    try:
        return dict(Tree.of(path).files) if path.is_dir() and not is_whole(path) else None
    except (BadInputError, OSError):
        return None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _streams() -> Iterator[tuple[int, int]]:
    """Files that this process itself writes to."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            found = os.fstat(descriptor)
            yield found.st_dev, found.st_ino


def _mark(found: os.stat_result) -> Mark:
    return found.st_size, found.st_mtime_ns, found.st_ino
