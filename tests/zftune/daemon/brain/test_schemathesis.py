"""Whatever is asked of the runs' routes, with a run that lives and without: no daemon fails because of it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.zftune.daemon.brain.agents import Agent
from tests.zftune.daemon.daemons import Daemon, exchange, serving, status_of
from tests.zftune.daemon.test_api import posted, refusal
from zftune.daemon import PROTOCOL
from zftune.daemon.client import DaemonClient

HOSTED = "tests.zftune.daemon.brain.hosted"
EXAMPLES = 20


@pytest.fixture
def daemon(folder: Path) -> Iterator[Daemon]:
    more = {"ZFTUNE_DB": str(folder / "zftune.db"), "HOME": str(folder)}
    with serving(folder, module=HOSTED, more=more) as daemon:
        yield daemon


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="zft-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def test_schemathesis_finds_nothing_in_the_runs(daemon: Daemon) -> None:
    schemathesis: Any = pytest.importorskip("schemathesis")
    statuses: dict[str, set[int]] = {}
    with closing(DaemonClient(daemon.path)) as client:
        schema = schemathesis.openapi.from_dict(client.get("/v1/openapi.json"))
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.path.startswith("/v1/runs"):
                ask_often(daemon, Agent(client), operation, statuses.setdefault(operation.label, set()))
    assert {200, 404} <= statuses["GET /v1/runs/{run}"]
    assert {200, 422} <= statuses["POST /v1/runs/{run}/report"]
    assert {200, 422} <= statuses["POST /v1/runs/{run}/goodbye"]
    assert 422 in statuses["POST /v1/runs"]
    assert max(status for seen in statuses.values() for status in seen) < 500, (statuses, daemon.log.read_text())
    assert daemon.process.poll() is None


def ask_often(daemon: Daemon, agent: Agent, operation: Any, statuses: set[int]) -> None:
    """Ask a route with what its description allows, and what it does not, of this agent's run and of others."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
    from schemathesis import GenerationMode

    allowed, wrong = (
        operation.as_strategy(generation_mode=mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    )
    asked = st.tuples(allowed, st.booleans()) | st.tuples(wrong, st.booleans()) | st.tuples(allowed, st.just(True))

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
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
