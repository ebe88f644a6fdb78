"""Pages of other sites in a browser that has the page's cookie, and names that were made to point at this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.zftune.daemon.chromium import Chromium, chromium, needs_chromium
from tests.support.zftune.daemon.daemons import Daemon, serving, short_folder
from tests.support.zftune.daemon.scripted import Training
from zftune.daemon.client.http import DaemonClient

pytestmark = needs_chromium

HOSTED = "tests.support.zftune.daemon.runs.hosted"
EVIL = "evil.test"
ATTACKS = (Path(__file__).parents[3] / "support" / "zftune" / "daemon" / "attacks.js").read_text()


class Hostile(BaseHTTPRequestHandler):
    """Serves a page with attacks, and sends on whoever asks for that."""

    def do_GET(self) -> None:
        body = b'<!doctype html><meta charset="utf-8"><title>win a prize</title><body>' if self.path == "/" else b""
        self._send(200 if body else 404, body, "content-type", "text/html")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._send(307, b"", "location", unquote(self.path.partition("?")[2]))

    def log_message(self, *_: Any) -> None:
        return

    def _send(self, status: int, body: bytes, name: str, value: str) -> None:
        self.send_response(status)
        self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def hostile() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with short_folder() as made:
        yield made


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    more = {"ZFTUNE_DB": str(folder / "zftune.db"), "HOME": str(folder)}
    with serving(folder, module=HOSTED, more=more) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def training(daemon: Daemon) -> Iterator[Training]:
    with DaemonClient(daemon.path, timeout_s=30.0) as client:
        training = Training(client, run="a1" * 16, model="secret-model")
        training.report()
        training.train_until("frozen")
        yield training


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Chromium]:
    with chromium(folder, EVIL, "localhost") as browser:
        yield browser


def new_link(daemon: Daemon) -> str:
    with DaemonClient(daemon.path) as client:
        return str(client.post("/v1/page")["url"])


def opened(browser: Chromium, daemon: Daemon) -> str:
    url = new_link(daemon)
    browser.open(url)
    browser.until("document.querySelector('#run-title')?.textContent.includes('secret-model')")
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def arrived(browser: Chromium, url: str) -> str:
    browser.open(url)
    browser.until(f"location.href.startsWith({url.partition('?')[0]!r}) && document.readyState === 'complete'")
    return browser.text("body")


def seen(daemon: Daemon, training: Training) -> Any:
    """What a command would have changed."""
    training.report()  # it lives
    with DaemonClient(daemon.path, timeout_s=30.0) as client:
        details = client.get(f"/v1/runs/{training.run}")
    return details["run"]["state"], [one["kind"] for one in details["decisions"]]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", EVIL])
def test_another_site_gets_nothing_and_changes_nothing(
    browser: Chromium, daemon: Daemon, training: Training, host: str
) -> None:
    """From the same site (cookies do not know ports: the browser sends ours along), and from others."""
    target = opened(browser, daemon)
    before = seen(daemon, training)
    with hostile() as port:
        own = f"http://{host}:{port}"
        arrived(browser, f"{own}/")
        browser.run(ATTACKS)
        found = browser.run(f"attack({target!r}, {training.run!r}, {own!r})")
        assert found == dict.fromkeys(found, "nothing")
        assert len(found) == 22
        assert "secret-model" not in browser.run("document.documentElement.outerHTML")
        browser.run(f"location.href = {target + '/v1/runs'!r}")  # a link that is followed
        browser.until(f"location.href === {target + '/v1/runs'!r} && document.readyState === 'complete'")
        assert "secret-model" not in browser.text("body")
    assert seen(daemon, training) == before
    assert daemon.process.poll() is None
    log = daemon.log.read_text()
    assert "the Origin is not this page's" in log
    assert "another site asks" in log
    arrived(browser, f"{target}/")  # typed in: the cookie was there all the time
    browser.until("document.querySelector('#run-title')?.textContent.includes('secret-model')")


def test_the_attacks_would_be_seen(browser: Chromium, daemon: Daemon, training: Training) -> None:
    """The page itself may do what others may not."""
    target = opened(browser, daemon)
    ask = f"fetch('/v1/runs/{training.run}/pause', {{method: 'POST'}}).then(answer => answer.json())"
    assert browser.run(ask)["state"] == "paused"
    assert seen(daemon, training)[0] == "paused"
    assert browser.run(ask.replace("pause", "resume"))["state"] != "paused"
    assert browser.run(f"fetch('{target}/v1/runs').then(answer => answer.json())")[0]["model"] == "secret-model"
