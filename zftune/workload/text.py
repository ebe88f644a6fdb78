"""Real text to train on: a file, a folder, or Python's own standard library."""

from __future__ import annotations

import codecs
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zftune.errors import BadInputError


class Batch(NamedTuple):
    """One micro-batch on the CPU; a causal language model shifts the labels by itself."""

    input_ids: Tensor  # [micro_batch, sequence], int64
    labels: Tensor  # [micro_batch, sequence], int64, equal to input_ids


def batches(tokens: Tensor, *, micro_batch: int, sequence: int, seed: int) -> Iterator[Batch]:
    """Endless batches of sequences that start at random places of `tokens`.

    Args:
        tokens: [n], any integer dtype, on the CPU.
        micro_batch: sequences in a batch, >= 1.
        sequence: tokens in a sequence, from 2 to n.
        seed: of the places; equal seeds give equal batches.

    Raises:
        BadInputError: a size is out of its range; raised here, not at the first batch.
    """
    if micro_batch < 1:
        raise BadInputError(f"--micro-batch is {micro_batch}; it must be an integer >= 1")
    if not 2 <= sequence <= tokens.numel():
        raise BadInputError(
            f"--sequence is {sequence}; it must be an integer from 2 to the text's length of {tokens.numel()} tokens"
        )
    return _draw(tokens, micro_batch, sequence, torch.Generator().manual_seed(seed))


def _draw(tokens: Tensor, micro_batch: int, sequence: int, generator: torch.Generator) -> Iterator[Batch]:
    within = torch.arange(sequence)
    while True:
        starts = torch.randint(tokens.numel() - sequence + 1, (micro_batch, 1), generator=generator)
        input_ids = tokens[starts + within].to(torch.int64)
        yield Batch(input_ids, input_ids.clone())


DEFAULT_TEXT = "Python standard library"
MAX_TEXT_BYTES = 8 << 20  # far more than a profile reads, and quickly read
_SNIFF_BYTES = 8192
_SKIPPED_STDLIB_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


class Tokenizer(Protocol):
    """Text to token numbers."""

    def encode(self, text: bytes) -> Tensor:
        """The tokens of UTF-8 `text`: [n], an integer dtype, on the CPU."""


class ByteTokenizer:
    """Every byte is a token: no vocabulary file, no unknown words."""

    vocabulary = 256

    def encode(self, text: bytes) -> Tensor:
        """The bytes of `text`: [len(text)], uint8 (an eighth of the memory of int64)."""
        return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class TextCorpus:
    """Text that was read, with files one after the other."""

    name: str
    """What a report calls it: the last part of the path, never the whole of it."""
    data: bytes
    files: int
    truncated: bool
    """More text was there than was read."""


def load_text(path: str | Path | None = None, *, max_bytes: int = MAX_TEXT_BYTES) -> TextCorpus:
    """Read text from a file or, recursively, from a folder; by default the standard library's sources.

    A folder's files are read in the order of their names. Hidden files, links to folders and files that are
    not UTF-8 text are passed over.

    Raises:
        BadInputError: the path is missing, unreadable, or holds no text.
    """
    if path is None:
        return _load_stdlib(max_bytes)
    source = Path(path)
    if os.path.isdir(source):  # noqa: PTH112 - Path.is_dir() raises where a name is too long
        corpus = _collect(_walk(source), _name(source), max_bytes)
    elif os.path.isfile(source):  # noqa: PTH113
        corpus = _collect(iter([source]), _name(source), max_bytes)
    else:
        raise BadInputError(f"--text '{path}' is neither a file nor a folder")
    if not corpus.data.strip():
        raise BadInputError(f"--text '{path}': no text in it; give a readable file or folder with UTF-8 text")
    return corpus


def _load_stdlib(max_bytes: int) -> TextCorpus:
    root = Path(sysconfig.get_path("stdlib"))
    sources = (file for file in _walk(root, _SKIPPED_STDLIB_FOLDERS) if file.suffix == ".py")
    corpus = _collect(sources, DEFAULT_TEXT, max_bytes)
    if not corpus.data:  # an interpreter that was shipped without sources
        raise BadInputError("this Python has no sources to train on: give a file or folder of text by --text")
    return corpus


def _name(path: Path) -> str:
    return path.resolve().name or "text"


def _walk(root: Path, skipped: set[str] | frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files below `root` in one order on every machine, without following links to folders."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in skipped and not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _collect(files: Iterator[Path], name: str, max_bytes: int) -> TextCorpus:
    parts: list[bytes] = []
    left = max_bytes
    for file in files:
        text = _read(file, left + 1)  # one byte more tells whether the file goes on
        if not text:
            continue
        if len(text) > left:
            if left > 0:
                parts.append(text[:left])
            return TextCorpus(name, b"".join(parts), len(parts), truncated=True)
        parts.append(text)
        left -= len(text)
    return TextCorpus(name, b"".join(parts), len(parts), truncated=False)


def _read(file: Path, limit: int) -> bytes | None:
    """Up to `limit` bytes of a text file; None if it is not a regular file, cannot be read or is not text."""
    try:
        if not file.is_file():
            return None
        with file.open("rb") as stream:
            head = stream.read(min(_SNIFF_BYTES, limit))
            return head + stream.read(limit - len(head)) if _is_text(head) else None
    except OSError:
        return None


def _is_text(head: bytes) -> bool:
    if b"\0" in head:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # the head may end inside a character
    except UnicodeDecodeError:
        return False
    return True
