"""A daemon that follows runs does not fail for any request of its description. `ZFTUNE_FUZZ_S=600`: for longer."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.tiers import fast
from tests.support.zftune.daemon.in_process import Application, Client, following
from tests.support.zftune.daemon.runs.agents import Agent
from tests.unit.zftune.daemon.test_api import refusal
from zftune.daemon import PROTOCOL
from zftune.errors import DaemonError

FUZZ_S = float(os.environ.get("ZFTUNE_FUZZ_S", fast("0", all_of="5")))
EXAMPLES = fast(4, all_of=20)
SEED = int(os.environ.get("ZFTUNE_FUZZ_SEED", "8"))


@pytest.mark.timeout(300 + 4 * FUZZ_S)
@pytest.mark.filterwarnings("ignore:offload is ignored")
def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    import schemathesis  # late: 1 s
    from schemathesis.core.result import Ok

    statuses: dict[str, set[int]] = {}
    with following(tmp_path) as application, Client(application) as client:
        schema = schemathesis.openapi.from_dict(client.get("/v1/openapi.json"))
        operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
        assert len(operations) > 8
        ends_s, turn = time.monotonic() + FUZZ_S, 0
        while turn == 0 or time.monotonic() < ends_s:
            for operation in operations:
                agent = Agent(client, run=f"{turn % 50:032x}")
                ask_often(application, agent, operation, statuses.setdefault(operation.label, set()), turn)
                goodbye(agent)
            turn += 1
    assert 200 in statuses["GET /v1/health"]
    assert 200 in statuses["GET /v1/runs/{run}"]
    assert 422 in statuses["POST /v1/runs/{run}/report"]
    assert 422 in statuses["POST /v1/runs"]
    assert max(status for seen in statuses.values() for status in seen) < 500, statuses


def goodbye(agent: Agent) -> None:
    """End its run; one that a request has ended is not there any more."""
    try:
        agent.goodbye()
    except DaemonError as error:
        assert error.status in (404, 409)  # noqa: PT017 - others are not expected, nor is one at all


def ask_often(application: Application, agent: Agent, operation: Any, statuses: set[int], turn: int) -> None:
    """Ask a route with what its description allows, and what it does not, of this agent's run and of others."""
    from hypothesis import HealthCheck, given, seed, settings
    from hypothesis import strategies as st
    from schemathesis import GenerationMode

    allowed, wrong = (
        operation.as_strategy(generation_mode=mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    )
    asked = st.tuples(allowed, st.booleans()) | st.tuples(wrong, st.booleans()) | st.tuples(allowed, st.just(True))

    @seed(SEED + turn)
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
        answer = application.ask(case.method, target, text, {"content-type": "application/json"})
        statuses.add(answer.status_code)
        if answer.status_code >= 400:
            refusal(answer)

    ask()
