"""Whatever is asked of a daemon that follows runs, by its description or as raw bytes: it does not fail for it.

`ZFTUNE_FUZZ_S=600` asks for longer.
"""

from __future__ import annotations

import json
import random
import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.zftune.daemon.daemons import Daemon, exchange, get, serving, status_of
from tests.zftune.daemon.runs.agents import Agent
from tests.zftune.daemon.test_api import EXAMPLES, FUZZ_S, FUZZ_SEED, garbage, posted, refusal, to
from tests.zftune.daemon.test_page import Browser, cookie_of, link
from zftune.daemon import PROTOCOL
from zftune.daemon.client.http import DaemonClient
from zftune.daemon.protocol.codec import encode
from zftune.daemon.protocol.messages import Report
from zftune.errors import DaemonError

HOSTED = "tests.zftune.daemon.runs.hosted"
LEFT_OUT = ("/v1/stop",)  # it would
pytestmark = pytest.mark.timeout(300 + 4 * FUZZ_S)


@pytest.fixture
def daemon(folder: Path) -> Iterator[Daemon]:
    more = {"ZFTUNE_DB": str(folder / "zftune.db"), "HOME": str(folder)}
    with serving(folder, module=HOSTED, more=more) as daemon:
        yield daemon


def test_schemathesis_finds_nothing(daemon: Daemon) -> None:
    import schemathesis  # late: 1 s
    from schemathesis.core.result import Ok

    statuses: dict[str, set[int]] = {}
    with closing(DaemonClient(daemon.path, timeout_s=30.0)) as client:
        schema = schemathesis.openapi.from_dict(client.get("/v1/openapi.json"))
        operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
        assert len(operations) > 8
        ends_s, turn = time.monotonic() + FUZZ_S, 0
        while turn == 0 or time.monotonic() < ends_s:
            for operation in operations:
                if operation.path not in LEFT_OUT:
                    agent = Agent(client, run=f"{turn % 50:032x}")
                    ask_often(daemon, agent, operation, statuses.setdefault(operation.label, set()), turn)
                    goodbye(agent)
            turn += 1
    assert {200, 404} <= statuses["GET /v1/runs/{run}"]
    assert {200, 422} <= statuses["POST /v1/runs/{run}/report"]
    assert {200, 422} <= statuses["POST /v1/runs/{run}/goodbye"]
    assert 422 in statuses["POST /v1/runs"]
    assert 200 in statuses["GET /v1/health"]
    assert max(status for seen in statuses.values() for status in seen) < 500, (statuses, daemon.log.read_text())
    assert daemon.process.poll() is None


def goodbye(agent: Agent) -> None:
    """So that there is an end of runs; one that a request has ended knows of it."""
    try:
        agent.goodbye()
    except DaemonError as error:
        assert error.status in (404, 409)  # noqa: PT017 - others are not expected, nor is one at all


def test_garbage_harms_nobody(daemon: Daemon) -> None:
    """On the socket, and on the page's port with its cookie; among what is mutated are requests of a run that lives."""
    with closing(DaemonClient(daemon.path, timeout_s=30.0)) as client:
        agent, (port, path) = Agent(client), link(daemon)
        browser = Browser(port)
        cookie = cookie_of(browser.ask("GET", path))
        hello = encode(agent._hello)
        report = encode(Report(protocol=PROTOCOL, session=agent.session, sequence=1))
        asked = [
            posted(hello, "/v1/runs"),
            posted(report, f"/v1/runs/{agent.run}/report"),
            posted(b"", f"/v1/runs/{agent.run}/pause"),
            posted(b"", f"/v1/runs/{agent.run}/resume"),
            *(get(f"/v1/runs{name}") for name in ("", f"/{agent.run}", "/none")),
        ]
        of_page = f"host: 127.0.0.1:{port}\r\norigin: {browser.origin}\r\ncookie: {cookie}\r\n".encode()
        on_page = [one.replace(b"host: x\r\n", of_page) for one in (*asked, get("/"), get("/page.js"), get("/metrics"))]
        chance = random.Random(FUZZ_SEED)
        found = [garbage(lambda: to(daemon.path), chance, FUZZ_S * 3 / 8, asked)]
        found.append(garbage(lambda: socket.create_connection(("127.0.0.1", port)), chance, FUZZ_S * 3 / 8, on_page))
        assert all(statuses.get(400, 0) > 0 for statuses in found), found
        assert sum(statuses.get(200, 0) for statuses in found) > 0, found  # a busy machine asks less often of each
        assert daemon.process.poll() is None
        assert client.get("/v1/health")["pid"] == daemon.process.pid
        agent = Agent(client, run="f" * 32)
        assert agent.asked().role == "start"  # it still tunes


def ask_often(daemon: Daemon, agent: Agent, operation: Any, statuses: set[int], turn: int) -> None:
    """Ask a route with what its description allows, and what it does not, of this agent's run and of others."""
    from hypothesis import HealthCheck, given, seed, settings
    from hypothesis import strategies as st
    from schemathesis import GenerationMode

    allowed, wrong = (
        operation.as_strategy(generation_mode=mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    )
    asked = st.tuples(allowed, st.booleans()) | st.tuples(wrong, st.booleans()) | st.tuples(allowed, st.just(True))

    @seed(FUZZ_SEED + turn)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(asked)
    def ask(asking: tuple[Any, bool]) -> None:
        case, known = asking
        body, target = case.body, case.formatted_path
        if known:
            target = operation.path.replace("{run}", agent.run)
            body = {**body, "protocol": PROTOCOL, "session": agent.session} if isinstance(body, dict) else body
        text = b"" if not case.media_type else json.dumps(body, default=str).encode()
        target = re.sub(r"[^!-~]", lambda found: quote(found[0], errors="replace"), target)
        answer = exchange(daemon.path, posted(text, target).replace(b"POST", case.method.encode(), 1))
        statuses.add(status_of(answer))
        if status_of(answer) >= 400:
            refusal(answer)

    ask()
