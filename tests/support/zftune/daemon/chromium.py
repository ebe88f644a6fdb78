"""A headless Chromium, told by the DevTools protocol what to do. It goes over a pipe: no port, no package."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SOON_S = 30.0
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

_QUIET = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--disable-quic",
    *_QUIET,
)
# It reads from 3 and writes to 4. Both ends are moved away first: they may be 3 or 4 themselves.
_BECOME = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
    os.close(end)
os.execv(sys.argv[3], sys.argv[3:])
"""


class BrowserError(Exception):
    """What the browser answers when it cannot do what it is told."""


class Chromium:
    """One page; what it asks the network for and what goes wrong in it is kept."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number, self._unread, self._session = 0, b"", ""
        self.asked: list[str] = []
        """URLs."""
        self.complaints: list[str] = []
        """Errors and warnings of the console, and what a content policy has blocked."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{part}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        ends = time.monotonic() + SOON_S
        while True:
            answer = self._next(ends)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(answer["error"]["message"])
                return answer["result"]
            self._note(answer.get("method"), answer.get("params", {}))

    def run(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        ends = time.monotonic() + SOON_S
        while True:
            try:
                found = self.run(f"new Promise(go => setTimeout(() => go(Boolean({expression})), 20))")
            except BrowserError:  # the page is left for the next one just now
                found = False
            if found:
                return
            assert time.monotonic() < ends, (expression, self.text("main"), self.complaints)

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({selector!r})?.innerText ?? ''"))

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def size(self, width: int, height: int, scheme: str = "light") -> None:
        """Of the window, and which colours its user prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def key(self, key: str, code: int) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def _next(self, ends: float) -> Any:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0.0, ends - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._from, 1 << 16)
            assert part, "the browser has ended"
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _note(self, method: str | None, parameters: Any) -> None:
        if method == "Network.requestWillBeSent":
            self.asked.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(parameters["exceptionDetails"].get("exception", {}).get("description", "?"))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(f"{parameters['type']}: {parameters['args']}")
        elif method == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])


@contextmanager
def chromium(folder: Path, *names: str) -> Iterator[Chromium]:
    """A browser that nobody has used; it reaches this machine alone, which it also takes hosts called `names` for."""
    assert CHROMIUM is not None
    (read_to, write_to), (read_from, write_from) = os.pipe(), os.pipe()
    here = "".join(f"MAP {name} 127.0.0.1, " for name in names)
    where = (f"--host-resolver-rules={here}MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={folder / 'browser'}")
    command = [CHROMIUM, *_FLAGS, *where, "--remote-debugging-pipe", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _BECOME, str(read_to), str(write_from), *command],
        pass_fds=(read_to, write_from),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
    )
    os.close(read_to)
    os.close(write_from)
    try:
        yield Chromium(write_to, read_from)
    finally:
        os.close(write_to)  # the browser ends with its pipe
        try:
            process.wait(SOON_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(read_from)
