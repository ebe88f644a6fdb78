"""The page on a loopback port: one link, one cookie, and nobody else gets in. Requests are written by hand."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.zftune.daemon.daemons import (
    SOON_S,
    Daemon,
    answer_on,
    as_other_user,
    needs_root,
    serving,
    status_of,
    zftune,
)
from zftune.daemon.client.http import DaemonClient
from zftune.words import CAUSES, page_words

NO_COOKIE = "the cookie is missing or has expired; open the page with: zftune daemon open"
USED = "this link was used or has expired; get another one with: zftune daemon open"


@dataclass
class Browser:
    """Sends what a browser sends from the page, but for what a test changes."""

    port: int
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: str = "", **changed: str | None) -> bytes:
        usual = {"host": f"127.0.0.1:{self.port}", "connection": "close", "content-length": str(len(body))}
        if method != "GET":
            usual["origin"] = self.origin
        headers = {**usual, **self.headers, **{name.replace("_", "-"): value for name, value in changed.items()}}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items() if value)]
        with socket.create_connection(("127.0.0.1", self.port), SOON_S) as connection:
            connection.sendall("\r\n".join([*lines, "", body]).encode())
            return answer_on(connection)

    def refusal(self, method: str, path: str, body: str = "", **changed: str | None) -> tuple[int, str]:
        answer = self.ask(method, path, body, **changed)
        return status_of(answer), json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def link(daemon: Daemon) -> tuple[int, str]:
    """Port and path of a link that opens the page."""
    with DaemonClient(daemon.path) as client:
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/open\?token=[\w-]{43})", client.post("/v1/page")["url"])
    assert found is not None
    return int(found[1]), found[2]


def cookie_of(answer: bytes) -> str:
    found = re.search(rb"\r\nset-cookie: ([^;]+);", answer)
    assert found is not None, answer
    return found[1].decode()


@pytest.fixture
def stranger(served: Daemon) -> Browser:
    """Without a cookie."""
    return Browser(link(served)[0])


@pytest.fixture
def browser(served: Daemon) -> Browser:
    """With a cookie."""
    port, path = link(served)
    return Browser(port, {"cookie": cookie_of(Browser(port).ask("GET", path))})


def test_a_link_works_once_and_gives_a_cookie_that_no_script_and_no_other_site_has(served: Daemon) -> None:
    port, path = link(served)
    browser = Browser(port)
    answer = browser.ask("GET", path, sec_fetch_site="cross-site")  # from a terminal, a mail, a chat
    assert status_of(answer) == 200
    assert re.search(
        rb"\r\nset-cookie: zftune-%d=[\w-]{43}; HttpOnly; SameSite=Strict; Path=/; Max-Age=43200\r\n" % port, answer
    )
    assert b'http-equiv="refresh" content="0;url=/"' in answer
    assert browser.refusal("GET", path) == (403, USED)
    browser.headers["cookie"] = f"other=1; {cookie_of(answer)}; more=2"
    assert status_of(browser.ask("GET", "/")) == 200


def test_the_page_has_the_words_of_the_terminal(browser: Browser) -> None:
    text = browser.ask("GET", "/tables.js").partition(b"\r\n\r\n")[2].decode()
    found = dict(re.findall(r"export const (\w+) = (.+);", text))
    assert {name: json.loads(table) for name, table in found.items()} == page_words()
    assert page_words()["CAUSES"] == CAUSES


def test_links_and_cookies_are_different_each_time(served: Daemon) -> None:
    (port, first), (again, second) = link(served), link(served)
    assert port == again
    assert first != second
    cookies = {cookie_of(Browser(port).ask("GET", path)) for path in (first, second)}
    assert len(cookies) == 2
    for cookie in cookies:
        assert status_of(Browser(port, {"cookie": cookie}).ask("GET", "/v1/health")) == 200


@pytest.mark.parametrize("query", ["", "?token=", "?token=wrong", "?token=%ff", f"?token={'x' * 43}", "?other=1"])
def test_a_wrong_link_opens_nothing(stranger: Browser, query: str) -> None:
    assert stranger.refusal("GET", f"/open{query}") == (403, USED)


def test_a_link_is_not_spent_by_what_only_looks_at_it(served: Daemon) -> None:
    port, path = link(served)
    browser = Browser(port)
    assert status_of(browser.ask("HEAD", path)) == 403
    assert browser.refusal("POST", path) == (405, "this path answers GET only")
    assert browser.refusal("GET", path, host="evil.example:80")[0] == 421
    assert status_of(browser.ask("GET", path)) == 200


@pytest.mark.parametrize("path", ["/", "/page.js", "/metrics", "/v1/health", "/v1/openapi.json", "/v1/test/held"])
def test_without_a_cookie_there_is_nothing(stranger: Browser, path: str) -> None:
    assert stranger.refusal("GET", path) == (401, NO_COOKIE)
    name = f"zftune-{stranger.port}"
    for cookie in (f"{name}=", f"{name}={'x' * 43}", name, "\x01=;=", f"{name}x={'x' * 43}"):
        assert stranger.refusal("GET", path, cookie=cookie) == (401, NO_COOKIE)


def test_the_page_is_whole_and_loads_nothing_from_elsewhere(browser: Browser) -> None:
    answer = browser.ask("GET", "/")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\ncontent-type: text/html; charset=utf-8" in head
    for header in (
        b"cache-control: no-store",
        b"content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; ",
        b"frame-ancestors 'none'",
        b"x-content-type-options: nosniff",
        b"referrer-policy: no-referrer",
    ):
        assert header in head
    loaded = re.findall(r'(?:src|href)="([^"]+)"', body.decode())
    assert loaded
    for name in loaded:
        part = browser.ask("GET", f"/{name}")
        assert status_of(part) == 200, name
        assert b"\r\ncontent-type: text/" in part
        if not name.startswith("plotly"):  # names of XML have it; the policy above lets it load nothing
            assert b"://" not in part.partition(b"\r\n\r\n")[2]
    assert b"://" not in body
    assert b"<script>" not in body
    assert b"style=" not in body


def test_every_answer_forbids_to_keep_it(browser: Browser, stranger: Browser) -> None:
    for answer in (
        browser.ask("GET", "/v1/health"),
        browser.ask("GET", "/v1/nope"),
        stranger.ask("GET", "/"),
        stranger.ask("GET", "/", host="x"),
    ):
        assert b"\r\ncache-control: no-store" in answer
        assert b"\r\ncontent-security-policy: default-src 'none'" in answer


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "127.0.0.1:{port}.evil", "[::1]:{port}"]
)
def test_a_name_that_was_made_to_point_here_gets_nothing(browser: Browser, host: str) -> None:
    status, sentence = browser.refusal("GET", "/v1/health", host=host.format(port=browser.port))
    assert (status, sentence) == (421, "the Host is not this daemon's; open the page with: zftune daemon open")


def test_a_forwarded_port_may_be_called_localhost(browser: Browser) -> None:
    host = f"localhost:{browser.port}"
    assert status_of(browser.ask("GET", "/v1/health", host=host)) == 200
    assert status_of(browser.ask("POST", "/v1/test/runs/0", host=host, origin=f"http://{host}")) == 200
    assert browser.refusal("POST", "/v1/test/runs/0", host=host)[0] == 403


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1", "http://127.0.0.1:1", "https://127.0.0.1:{port}"]
)
def test_another_origin_gets_nothing(browser: Browser, origin: str) -> None:
    origin = origin.format(port=browser.port)
    for method, path in (("GET", "/v1/health"), ("POST", "/v1/test/runs/3"), ("OPTIONS", "/v1/health")):
        assert browser.refusal(method, path, origin=origin) == (403, "the Origin is not this page's")
    assert json.loads(browser.ask("GET", "/v1/health").partition(b"\r\n\r\n")[2])["runs"] == 0


def test_what_changes_something_needs_an_origin(browser: Browser) -> None:
    assert browser.refusal("POST", "/v1/test/runs/3", origin=None) == (403, "the Origin is not this page's")
    for count in (3, 0):
        assert status_of(browser.ask("POST", f"/v1/test/runs/{count}")) == 200
        assert json.loads(browser.ask("GET", "/v1/health").partition(b"\r\n\r\n")[2])["runs"] == count


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_fetch_of_another_site_gets_nothing(browser: Browser, site: str) -> None:
    assert browser.refusal("GET", "/v1/health", sec_fetch_site=site) == (403, "another site asks")
    assert status_of(browser.ask("GET", "/v1/health", sec_fetch_site="same-origin")) == 200


def test_a_header_that_comes_twice_is_nobodys(browser: Browser) -> None:
    twice = f"{browser.origin}\r\norigin: {browser.origin}"
    assert browser.refusal("POST", "/v1/test/runs/0", origin=twice)[0] == 403


@pytest.mark.parametrize("path", ["/v1/page", "/v1/expect", "/v1/stop"])
def test_the_page_can_neither_stop_the_daemon_nor_make_links(browser: Browser, path: str) -> None:
    assert browser.refusal("POST", path) == (403, "this can be asked only over the daemon's own socket")


@needs_root
def test_another_user_gets_nothing_with_a_cookie_either(browser: Browser, served: Daemon) -> None:
    script = """
with socket.socket() as connection:
    connection.settimeout(20)
    connection.connect(("127.0.0.1", int(sys.argv[1])))
    print(connection.recv(4096).decode())  # before it has asked
    try:
        connection.sendall(sys.argv[2].encode())
        print(connection.recv(4096).decode())
    except OSError as error:
        print(type(error).__name__)
"""
    head = f"host: 127.0.0.1:{browser.port}\r\ncookie: {browser.headers['cookie']}\r\n\r\n"
    request = f"GET /v1/health HTTP/1.1\r\n{head}"
    answer = as_other_user(script, str(browser.port), request).communicate(timeout=SOON_S)[0]
    assert answer.startswith("HTTP/1.1 403 ")
    assert "may not connect; only the daemon's own user may" in answer
    assert "uptime_s" not in answer
    assert status_of(browser.ask("GET", "/v1/health")) == 200


def test_the_command_prints_a_link(folder: Path) -> None:
    with serving(folder) as daemon:
        ended = zftune(folder, "daemon", "open")
        assert (ended.returncode, ended.stderr) == (0, "")
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/open\?token=.+)\n", ended.stdout)
        assert found is not None
        assert status_of(Browser(int(found[1])).ask("GET", found[2])) == 200
        assert found[2] not in daemon.log.read_text()
        daemon.signal()
        assert daemon.ends() == 0
    with pytest.raises(ConnectionRefusedError):
        Browser(int(found[1])).ask("GET", "/")
