"""The page on a loopback port, in process: one link, one cookie, and nobody else gets in."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest

from tests.support.zftune.daemon.in_process import PORT, Application, Client
from zftune.words import CAUSES, COLOURS, page_words

PAGE = Path(__file__).parents[4] / "zftune" / "daemon" / "page"
ORIGIN = f"http://127.0.0.1:{PORT}"
NO_COOKIE = "the cookie is missing or has expired; open the page with: zftune daemon open"
USED = "this link was used or has expired; get another one with: zftune daemon open"


@dataclass
class Browser:
    """Sends what a browser sends from the page, but for what a test changes."""

    application: Application
    headers: dict[str, str] = field(default_factory=dict)

    def ask(self, method: str, path: str, **changed: str | None) -> httpx2.Response:
        usual = {"host": f"127.0.0.1:{PORT}"} | ({} if method == "GET" else {"origin": ORIGIN}) | self.headers
        usual |= {name.replace("_", "-"): value for name, value in changed.items()}  # type: ignore[misc]
        return self.application.ask(method, path, headers=[one for one in usual.items() if one[1]], page=True)

    def refusal(self, method: str, path: str, **changed: str | None) -> tuple[int, str]:
        answer = self.ask(method, path, **changed)
        return answer.status_code, answer.json()["error"]


def link(application: Application) -> str:
    url = Client(application).post("/v1/page")["url"]
    assert re.fullmatch(rf"{ORIGIN}/open\?token=[\w-]{{43}}", url)
    return str(url.removeprefix(ORIGIN))


def cookie_of(answer: httpx2.Response) -> str:
    return str(answer.headers["set-cookie"].partition(";")[0])


@pytest.fixture
def stranger(application: Application) -> Browser:
    return Browser(application)


@pytest.fixture
def browser(application: Application) -> Browser:
    return Browser(application, {"cookie": cookie_of(Browser(application).ask("GET", link(application)))})


def test_a_link_works_once_and_gives_a_cookie_that_no_script_and_no_other_site_has(stranger: Browser) -> None:
    path = link(stranger.application)
    answer = stranger.ask("GET", path, sec_fetch_site="cross-site")  # from a terminal, a mail, a chat
    assert answer.status_code == 200
    assert re.fullmatch(
        rf"zftune-{PORT}=[\w-]{{43}}; HttpOnly; SameSite=Strict; Path=/; Max-Age=43200", answer.headers["set-cookie"]
    )
    assert 'http-equiv="refresh" content="0;url=/"' in answer.text
    assert stranger.refusal("GET", path) == (403, USED)
    stranger.headers["cookie"] = f"other=1; {cookie_of(answer)}; more=2"
    assert stranger.ask("GET", "/").status_code == 200


def test_links_and_cookies_are_different_each_time(application: Application) -> None:
    first, second = link(application), link(application)
    assert first != second
    cookies = {cookie_of(Browser(application).ask("GET", path)) for path in (first, second)}
    assert len(cookies) == 2


@pytest.mark.parametrize("query", ["", "?token=", "?token=wrong", "?token=%ff", f"?token={'x' * 43}", "?other=1"])
def test_a_wrong_link_opens_nothing(stranger: Browser, query: str) -> None:
    assert stranger.refusal("GET", f"/open{query}") == (403, USED)


def test_a_link_is_not_spent_by_what_only_looks_at_it(stranger: Browser) -> None:
    path = link(stranger.application)
    assert stranger.ask("HEAD", path).status_code == 403
    assert stranger.refusal("POST", path) == (405, "this path answers GET only")
    assert stranger.refusal("GET", path, host="evil.example:80")[0] == 421
    assert stranger.ask("GET", path).status_code == 200


@pytest.mark.parametrize("path", ["/", "/page.js", "/metrics", "/v1/health", "/v1/openapi.json", "/v1/test/held"])
def test_without_a_cookie_there_is_nothing(stranger: Browser, path: str) -> None:
    name = f"zftune-{PORT}"
    for cookie in (None, f"{name}=", f"{name}={'x' * 43}", name, "\x01=;=", f"{name}x={'x' * 43}"):
        assert stranger.refusal("GET", path, cookie=cookie) == (401, NO_COOKIE)


def test_the_page_is_whole_and_loads_nothing_from_elsewhere(browser: Browser) -> None:
    answer = browser.ask("GET", "/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    loaded = re.findall(r'(?:src|href)="([^"]+)"', answer.text)
    assert loaded
    for name in loaded:
        part = browser.ask("GET", f"/{name}")
        assert part.status_code == 200, name
        assert part.headers["content-type"].startswith("text/")
        if not name.startswith("plotly"):  # names of XML have it; the policy lets it load nothing
            assert "://" not in part.text
    for forbidden in ("://", "<script>", "style="):
        assert forbidden not in answer.text


def test_the_page_has_the_words_of_the_terminal(browser: Browser) -> None:
    found = dict(re.findall(r"export const (\w+) = (.+);", browser.ask("GET", "/tables.js").text))
    assert {name: json.loads(table) for name, table in found.items()} == page_words()
    assert page_words()["CAUSES"] == CAUSES


def test_every_answer_is_secured(browser: Browser, stranger: Browser) -> None:
    for answer in (
        browser.ask("GET", "/"),
        browser.ask("GET", "/v1/nope"),
        stranger.ask("GET", "/"),
        stranger.ask("GET", "/", host="x"),
    ):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:1", f"127.0.0.1:{PORT}.evil"]
)
def test_a_name_that_was_made_to_point_here_gets_nothing(browser: Browser, host: str) -> None:
    status, sentence = browser.refusal("GET", "/v1/health", host=host)
    assert (status, sentence) == (421, "the Host is not this daemon's; open the page with: zftune daemon open")


def test_a_forwarded_port_may_be_called_localhost(browser: Browser) -> None:
    host = f"localhost:{PORT}"
    assert browser.ask("GET", "/v1/health", host=host).status_code == 200
    assert browser.ask("POST", "/v1/test/runs/0", host=host, origin=f"http://{host}").status_code == 200
    assert browser.refusal("POST", "/v1/test/runs/0", host=host)[0] == 403


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1", "http://127.0.0.1:1", f"https://127.0.0.1:{PORT}"]
)
def test_another_origin_gets_nothing(browser: Browser, origin: str) -> None:
    for method, path in (("GET", "/v1/health"), ("POST", "/v1/test/runs/3"), ("OPTIONS", "/v1/health")):
        assert browser.refusal(method, path, origin=origin) == (403, "the Origin is not this page's")
    assert browser.ask("GET", "/v1/health").json()["runs"] == 0


def test_what_changes_something_needs_one_origin(browser: Browser) -> None:
    assert browser.refusal("POST", "/v1/test/runs/3", origin=None) == (403, "the Origin is not this page's")
    twice = [("host", f"127.0.0.1:{PORT}"), *browser.headers.items(), ("origin", ORIGIN), ("origin", ORIGIN)]
    assert browser.application.ask("POST", "/v1/test/runs/3", headers=twice, page=True).status_code == 403
    for count in (3, 0):
        assert browser.ask("POST", f"/v1/test/runs/{count}").status_code == 200
        assert browser.ask("GET", "/v1/health").json()["runs"] == count


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_fetch_of_another_site_gets_nothing(browser: Browser, site: str) -> None:
    assert browser.refusal("GET", "/v1/health", sec_fetch_site=site) == (403, "another site asks")
    assert browser.ask("GET", "/v1/health", sec_fetch_site="same-origin").status_code == 200


@pytest.mark.parametrize("path", ["/v1/page", "/v1/expect", "/v1/stop"])
def test_the_page_can_neither_stop_the_daemon_nor_make_links(browser: Browser, path: str) -> None:
    assert browser.refusal("POST", path) == (403, "this can be asked only over the daemon's own socket")


def test_nothing_reads_text_as_markup() -> None:
    for name in ("page.js", "plots.js", "words.js"):
        text = (PAGE / name).read_text()
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert way not in text


def test_colours_are_those_of_every_report() -> None:
    found = dict(re.findall(r"--(\w+): (#\w{6})", (PAGE / "page.css").read_text().partition("@media")[0]))
    for name in ("host", "h2d", "d2h", "select", "comm", "data", "other", "compute"):
        assert found[name] == COLOURS[name]
