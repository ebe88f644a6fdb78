"""What a page holds, read without a browser, and documents that pages are made of."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

from tests.support.zftune.report.documents import cpu_profile, gpu_profile, rig_profile

BUILDERS: dict[str, Callable[[], dict[str, Any]]] = {"rig": rig_profile, "cpu": cpu_profile, "gpu": gpu_profile}
EVIL = "</script><img src=x onerror=alert(1)><b>&amp;"


class Page(HTMLParser):
    """What the page holds: scripts by id, the text that a reader sees, and where tags point to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: dict[str | None, list[str]] = defaultdict(list)
        self.text: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._inside: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside.append((tag, dict(attrs).get("id")))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.text.append(data)
        elif self._inside[-1][0] == "script":
            self.scripts[self._inside[-1][1]].append(data)

    def json(self, name: str) -> Any:
        return json.loads("".join(self.scripts[name]))
