"""What a request over TCP has to show before the application sees it.

Any program and any web page on the machine can reach a loopback port. So the Host must be ours (else a name of somebody
else's was made to point here), the Origin too (else another page asks), and a cookie or a token has to be right.
"""

from __future__ import annotations

import logging
import time
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from zftune.daemon.access import SESSION_S, TOKEN_S, Secrets, same
from zftune.daemon.answers import App, Message, Receive, Scope, Send, refuse

OPEN_ROUTE = "/open"
_READING = frozenset({"GET", "HEAD"})
_SOCKET_ONLY = frozenset({"/v1/page", "/v1/stop"})
_OWN_FETCHES = frozenset({"", "same-origin", "none"})
_CONTENT = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SECURITY = [
    (b"content-security-policy", _CONTENT),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
]
"""On every answer: the page loads and asks nothing but what is served here, and nobody keeps it or frames it."""
_SILENT_S = 60.0

_log = logging.getLogger(__name__)

# Not a redirect: where another page's link led here, the browser would hold the new cookie back from it.
_GO_ON = b'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=/"><title>zftune</title>'


class Guarded:
    """An application on a loopback port, for who has the cookie.

    Args:
        app: gets what may pass.
        port: on which it is served.
        metrics_token: reads /metrics, and nothing else.
    """

    def __init__(self, app: App, port: int, metrics_token: str) -> None:
        self._app = app
        self._port = port
        self._hosts = frozenset({f"127.0.0.1:{port}", f"localhost:{port}"})
        self._metrics_token = metrics_token
        self._tokens = Secrets(TOKEN_S)
        self._sessions = Secrets(SESSION_S)
        self._told: dict[str, float] = {}

    @property
    def cookie(self) -> str:
        """Its name: cookies do not know ports, and another user's daemon may have another one."""
        return f"zftune-{self._port}"

    def new_url(self) -> str:
        """A URL that opens the page once."""
        return f"http://127.0.0.1:{self._port}{OPEN_ROUTE}?token={self._tokens.issue()}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websocket, and the application's life is the socket's
        send = _secured(send)
        headers = _Headers(scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            self._log(*refusal)
            await refuse(send, *refusal)
        elif scope["path"] == OPEN_ROUTE:
            await self._open(scope, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, headers: _Headers) -> tuple[int, str] | None:
        """Status and sentence, if it may not pass."""
        host = headers.one("host")
        if host not in self._hosts:
            return 421, "the Host is not this daemon's; open the page with: zftune daemon open"
        origin, reading = headers.one("origin"), scope["method"] in _READING
        if origin != f"http://{host}" and (origin or not reading):
            return 403, "the Origin is not this page's"
        path = scope["path"]
        if path == OPEN_ROUTE:
            return None if reading else (405, "allowed is GET")
        if headers.one("sec-fetch-site") not in _OWN_FETCHES:
            return 403, "another site asks"
        if path == "/metrics" and reading and same(headers.one("authorization"), f"Bearer {self._metrics_token}"):
            return None
        if not self._sessions.is_good(self._session(headers)):
            return 401, "the cookie is missing or has expired; open the page with: zftune daemon open"
        if path in _SOCKET_ONLY:
            return 403, "this can be asked only over the daemon's own socket"
        return None

    def _log(self, status: int, sentence: str) -> None:
        """Each reason once a while: whoever can ask could fill the log."""
        now_s = time.monotonic()
        if now_s - self._told.get(sentence, -_SILENT_S) >= _SILENT_S:
            self._told[sentence] = now_s
            _log.warning("refused a request on port %d with %d: %s", self._port, status, sentence)

    def _session(self, headers: _Headers) -> str:
        try:
            cookies = SimpleCookie(headers.one("cookie"))
        except CookieError:
            return ""
        return cookies[self.cookie].value if self.cookie in cookies else ""

    async def _open(self, scope: Scope, send: Send) -> None:
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["method"] != "GET" or not self._tokens.spend(token):
            refusal = 403, "this link was used or has expired; get another one with: zftune daemon open"
            self._log(*refusal)
            await refuse(send, *refusal)
            return
        cookie = f"{self.cookie}={self._sessions.issue()}; HttpOnly; SameSite=Strict; Path=/; Max-Age={SESSION_S:.0f}"
        headers = [
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-length", str(len(_GO_ON)).encode()),
            (b"set-cookie", cookie.encode("ascii")),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": _GO_ON})


def _secured(send: Send) -> Send:
    async def secured(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *_SECURITY]}
        await send(message)

    return secured


class _Headers:
    """Headers of a request by name; one that comes twice is none: nobody honest sends two."""

    def __init__(self, scope: Scope) -> None:
        self._values: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            self._values.setdefault(name, []).append(value)

    def one(self, name: str) -> str:
        values = self._values.get(name.encode(), [])
        return values[0].decode("latin-1") if len(values) == 1 else "" if not values else "twice"
