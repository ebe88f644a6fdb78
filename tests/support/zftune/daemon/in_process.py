"""The daemon's application in this process, asked by ASGI: no socket, no process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest

from tests.support.zftune.daemon.runs.agents import SOON_S
from tests.support.zftune.daemon.scripted import Training
from zftune.cli.main import app
from zftune.daemon import PROTOCOL_HEADER
from zftune.daemon.client.http import DaemonClient
from zftune.daemon.runs.api import Runs
from zftune.daemon.runs.registry import Registry
from zftune.daemon.server.answers import DaemonState, Service
from zftune.daemon.server.app import create_app
from zftune.daemon.server.guard import Guarded
from zftune.daemon.server.limits import Limits
from zftune.daemon.server.sampling import Metrics
from zftune.store import open_store

PORT = 8765
"""Of the page, as its Host and Origin have to name it."""
TOKEN = "t" * 43
"""Reads /metrics on the page's port."""

Body = bytes | AsyncIterator[bytes]
T = TypeVar("T")


class Application:
    """Services behind the daemon's routes, in an event loop of their own thread, until `close`."""

    def __init__(self, services: Sequence[Service] = (), limits: Limits | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.services = services
        self.stopped: list[str] = []
        """Reasons for which it was asked to stop."""
        self.state = DaemonState(services=services, stop=self.stopped.append, open_page=self._open_page)
        self.metrics = Metrics(self.state)
        for service in services:
            self.run(service.start())
        self.app = create_app(self.state, self.metrics, limits)
        self._page = Guarded(self.app, PORT, TOKEN)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SOON_S)

    def ask(
        self,
        method: str,
        route: str,
        body: Body = b"",
        headers: Mapping[str, str] | Sequence[tuple[str, str]] = (),
        *,
        page: bool = False,
    ) -> httpx2.Response:
        """The answer to a request; parts of a body come without its length. `page`: by the page's port."""
        return self.run(self._ask(method, route, body, headers, page))

    def close(self) -> None:
        for service in self.services:
            self.run(service.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SOON_S)
        self._loop.close()

    async def _open_page(self) -> str:
        return self._page.new_url()

    async def _ask(self, method: str, route: str, body: Body, headers: Any, page: bool) -> httpx2.Response:
        app: Any = self._page if page else self.app
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:{PORT}") as client:
            return await client.request(method, route, content=body, headers=headers)


class Client(DaemonClient):
    def __init__(self, application: Application) -> None:
        super().__init__(Path("/in-process"))
        self.application = application

    def _exchange(
        self, path: Path, method: str, route: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, str, bytes]:
        headers = {} if body is None else {"content-type": "application/json"}
        answer = self.application.ask(method, route, body or b"", headers)
        return answer.status_code, answer.headers.get(PROTOCOL_HEADER, ""), answer.content


Tell = Callable[..., tuple[int, str, str]]


def teller(capsys: pytest.CaptureFixture[str]) -> Tell:
    def tell(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            app(list(arguments))
        assert isinstance(ended.value.code, int)
        return (ended.value.code, *capsys.readouterr())

    return tell


def answers(application: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every client in this process, such as a command's, ask this application."""
    client = Client(application)
    monkeypatch.setenv("ZFTUNE_SOCKET", str(client.path))
    monkeypatch.setattr(DaemonClient, "_exchange", lambda _, *given: client._exchange(*given))


@contextmanager
def hosting(*services: Service, limits: Limits | None = None) -> Iterator[Application]:
    application = Application(services, limits)
    try:
        yield application
    finally:
        application.close()


@contextmanager
def following(folder: Path, *, lease_s: float = 30.0) -> Iterator[Application]:
    """An application that follows runs, with its store in a folder."""
    with (
        open_store(str(folder / "zftune.db")) as store,
        hosting(Runs(Registry(lambda _: store, lease_s=lease_s))) as application,
    ):
        yield application


@contextmanager
def trainings(folder: Path, *models: str, until: str = "frozen") -> Iterator[tuple[Application, list[Training]]]:
    """An application, and a run of each model that is in a state; the runs are a1a1.., a2a2.. and so on."""
    with following(folder) as application, ExitStack() as stack:
        runs = []
        for number, model in enumerate(models):
            client = stack.enter_context(Client(application))
            runs.append(Training(client, run=f"{0xA1 + number:02x}" * 16, model=model))
            runs[-1].report()
            runs[-1].train_until(until)
        yield application, runs
