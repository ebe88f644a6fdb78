"""What MkDocs does beside its own work: reference pages are made from the code, and linked files come along.

A page may link to any file of the checkout (`../../studies/012-planner/README.md`): such a link works in the checkout,
and in the site, which has a copy under the same path.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from tools.reference_pages import pages

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
_CODE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add what is generated and what is linked to."""
    for uri, text in pages().items():
        line = files.get_file_from_path(uri)  # what a checkout has in its place
        if line is not None:
            files.remove(line)
        files.append(File.generated(config, uri, content=text))
    waiting = [file for file in files if file.is_documentation_page()]
    while waiting:
        page = waiting.pop()
        for target in _targets(page.src_uri, page.content_string):
            if files.get_file_from_path(target) is None and not (ROOT / "docs" / target).exists():
                added = File(target, str(ROOT), config["site_dir"], config["use_directory_urls"])
                files.append(added)
                if added.is_documentation_page():
                    waiting.append(added)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave docs/ at the copies in the site."""
    own = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        path, hash_, anchor = match[2].partition("#")
        target = _in_checkout(page.file.src_uri, path)
        if target is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(target, own or '.')}{hash_}{anchor}{match[3]}"

    parts = _CODE.split(markdown)
    return "".join(part if place % 2 else _LINK.sub(moved, part) for place, part in enumerate(parts))


def _targets(source: str, markdown: str) -> list[str]:
    text = "".join(_CODE.split(markdown)[::2])
    found = (_in_checkout(source, match[2].partition("#")[0]) for match in _LINK.finditer(text))
    return [target for target in found if target is not None]


def _in_checkout(source: str, link: str) -> str | None:
    """The path in the checkout of a file outside docs/ that a page links to; None: it is something else."""
    if not link or ":" in link:
        return None
    in_docs = (ROOT / "docs" / source).is_file()
    path = posixpath.normpath(posixpath.join("docs" if in_docs else "", posixpath.dirname(source), link))
    if path.startswith(("docs/", "..")):
        return None
    path = f"{path}/README.md" if (ROOT / path).is_dir() else path
    return path if (ROOT / path).is_file() else None
