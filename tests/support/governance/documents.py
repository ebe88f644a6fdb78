"""README and docs/ as tests read them: their blocks of code, each with the mark above it, and their links.

A block is run, or a comment right above it gives the reason why not:

    <!-- not run: REASON -->       commands and Python that a test cannot run here
    <!-- output: COMMAND -->       what a command prints, which a test compares
    <!-- example: REASON -->       text that nothing is compared with

Python in a comment `<!-- python: ... -->` is run with that of its page, and not shown.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

_PART = re.compile(
    r"^<!-- python:\n(?P<hidden>.*?)^-->$"
    r"|(?:^<!-- (?P<mark>[a-z ]+): (?P<reason>[^\n]*) -->\n)?"
    r"^(?P<fence>```+)(?P<language>[^\n]*)\n(?P<text>.*?)^(?P=fence)$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, or Python that is not shown. `mark`: "not run", "output", "example", "hidden", or ""."""

    page: Path
    line: int
    language: str
    text: str
    mark: str
    reason: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _PART.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        if found["hidden"] is not None:
            yield Block(page, line, "python", found["hidden"], "hidden", "")
        else:
            yield Block(page, line, found["language"], found["text"], found["mark"] or "", found["reason"] or "")


def prose(page: Path) -> str:
    return _PART.sub("", page.read_text(encoding="utf-8"))


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of a shell block, without comments."""
    for line in block.text.replace("\\\n", " ").splitlines():
        for part in line.split(" && "):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words = words[1:]
            if words:
                yield words


def links(page: Path) -> list[str]:
    """Targets of links and pictures that are no addresses, without anchors."""
    found = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", prose(page))
    targets = (one.partition("#")[0] for pair in found for one in pair if one and ":" not in one)
    return [target for target in targets if target]
