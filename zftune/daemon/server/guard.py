"""What a request over TCP has to show before the application sees it.

Any program and any web page on the machine can reach a loopback port. So the Host must be ours (else a name of somebody
else's was made to point here), the Origin too (else another page asks), and a cookie or a token has to be right.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs

from zftune.daemon.server.answers import App, Message, Receive, Scope, Send, refuse
from zftune.daemon.server.limits import LoopbackProtocol
from zftune.daemon.server.serving import Listener, loopback_socket
from zftune.errors import BadInputError

_log = logging.getLogger(__name__)


class PageServer:
    """An application that is served on 127.0.0.1, guarded."""

    def __init__(self, guarded: Guarded, listener: Listener) -> None:
        self._guarded = guarded
        self._listener = listener

    @classmethod
    async def serve(cls, app: App, port: int, token_path: Path) -> PageServer:
        """Serve from now on; port 0 takes a free one, the token in the file reads /metrics. Raises BadInputError: the
        port is taken, or the token's file cannot be trusted.
        """
        token = kept_token(token_path)
        try:
            listening = loopback_socket(port)
        except OSError as error:
            raise BadInputError(f"--port {port} cannot be used ({error.strerror}); give a free one") from error
        taken = listening.getsockname()[1]
        guarded = Guarded(app, taken, token)
        listener = Listener(guarded, LoopbackProtocol, listening)
        await listener.start()
        _log.info("the page and /metrics are on http://127.0.0.1:%d; %s reads the latter", taken, token_path)
        return cls(guarded, listener)

    def new_url(self) -> str:
        """A URL that opens the page once."""
        return self._guarded.new_url()

    async def stop(self) -> None:
        """Serve no more."""
        await self._listener.stop()


TOKEN_S = 60.0
"""How long the URL works that opens the page."""

SESSION_S = 12 * 3600.0
"""How long its cookie works."""

_MOST = 32
_TOKEN_BYTES = 32
_MAX_FILE_BYTES = 4096


class Secrets:
    """Secrets that end after `life_s`; the oldest go where there are too many. `clock` is monotonic, s."""

    def __init__(self, life_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._life_s = life_s
        self._clock = clock
        self._ends_s: dict[bytes, float] = {}

    def issue(self) -> str:
        """A new one."""
        self._forget_old()
        while len(self._ends_s) >= _MOST:
            del self._ends_s[next(iter(self._ends_s))]
        secret = secrets.token_urlsafe(_TOKEN_BYTES)
        self._ends_s[_digest(secret)] = self._clock() + self._life_s
        return secret

    def is_good(self, secret: str) -> bool:
        """Whether it was issued and has not ended."""
        self._forget_old()
        return _digest(secret) in self._ends_s  # by hash: how long a look-up takes tells nothing of the secret

    def spend(self, secret: str) -> bool:
        """Whether it was good; from now on it is not."""
        self._forget_old()
        return self._ends_s.pop(_digest(secret), None) is not None

    def _forget_old(self) -> None:
        now_s = self._clock()
        for digest in [digest for digest, end_s in self._ends_s.items() if end_s <= now_s]:
            del self._ends_s[digest]


def kept_token(path: Path) -> str:
    """The token of a file that only this user can read; made where it is missing. Raises BadInputError: the file is not
    this user's own, others can read it, or it cannot be made.
    """
    try:
        return _made_token(path)
    except FileExistsError:
        pass
    except OSError as error:
        raise BadInputError(f"the token '{path}' cannot be written ({error.strerror})") from error
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BadInputError(f"the token '{path}' cannot be read ({error.strerror})") from error
    try:
        found = os.fstat(descriptor)
        own = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        token = os.read(descriptor, _MAX_FILE_BYTES).decode("ascii", "replace").strip() if own else ""
    finally:
        os.close(descriptor)
    if len(token) < _TOKEN_BYTES:
        raise BadInputError(
            f"the token '{path}' is not a file of your own with mode 0600 that holds a token; remove it"
        )
    return token


def _made_token(path: Path) -> str:
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token


def same(given: str, wanted: str) -> bool:
    """Whether two secrets are equal; takes as long for any."""
    return secrets.compare_digest(_digest(given), _digest(wanted))


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


OPEN_ROUTE = "/open"
_READING = frozenset({"GET", "HEAD"})
_SOCKET_ONLY = frozenset({"/v1/page", "/v1/expect", "/v1/stop"})
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


# Not a redirect: where another page's link led here, the browser would hold the new cookie back from it.
_GO_ON = b'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=/"><title>zftune</title>'


class Guarded:
    """An application on a loopback port, for holders of the cookie; the token reads /metrics, and nothing else."""

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
            return None if reading else (405, "this path answers GET only")
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
