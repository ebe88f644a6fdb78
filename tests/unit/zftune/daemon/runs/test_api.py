"""The runs' routes in process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.support.zftune.daemon.in_process import Application, Client, following
from tests.support.zftune.daemon.runs.agents import RUN, Agent, document, hello
from tests.unit.zftune.daemon.test_api import refusal
from zftune.daemon import PROTOCOL
from zftune.daemon.client.http import DaemonClient, called
from zftune.errors import DaemonError


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    with following(tmp_path_factory.mktemp("store")) as made:
        yield made


@pytest.fixture
def client(application: Application) -> DaemonClient:
    return Client(application)


def refused(client: DaemonClient, route: str, document: Any = None) -> tuple[int | None, str]:
    with pytest.raises(DaemonError) as caught:
        client.post(route, document)
    return caught.value.status, str(caught.value)


def test_a_run_from_hello_to_goodbye(client: DaemonClient) -> None:
    agent = Agent(client)
    agent.run_until("frozen")
    (run,) = [one for one in client.get("/v1/runs") if one["run"] == RUN]
    assert (run["state"], run["model"], run["argv"]) == ("frozen", "Sequential", ["train.py"])
    assert run["record"] == agent.last.record
    assert run["ranks"] == "1 rank"
    assert client.get("/v1/health")["runs"] >= 1
    details = client.get(f"/v1/runs/{RUN}")
    assert agent.last.incumbent is not None
    assert details["run"]["incumbent"] == agent.last.incumbent.knobs()
    adopted = [one for one in details["decisions"] if one["kind"] == "adopt"]
    assert adopted[0]["reason"].startswith("Adopted: ")
    trial = details["trials"][adopted[0]["trial"]]
    assert trial["state"] == "measured"
    assert trial["step_ms"] == pytest.approx(80.0)
    assert client.get(f"/v1/runs/{called(run)}")["run"]["run"] == RUN  # as screens call it
    assert refused(client, f"/v1/runs/{called(run)[:-1]}/pause")[0] == 404
    assert client.post(f"/v1/runs/{RUN}/rollback")["reason"].startswith("Rolled back by hand: ")
    assert agent.report().incumbent == agent.last.start
    assert "zftune keeps" in agent.goodbye()["sentence"]
    assert client.get(f"/v1/runs/{RUN}")["run"]["state"] == "ended"


def test_what_is_refused_and_how(application: Application, client: DaemonClient) -> None:
    good = document(hello("3" * 32))
    assert refused(client, "/v1/runs", {**good, "protocol": 99}) == (
        422, f"protocol is 99; it must be {PROTOCOL}: use one zftune on both sides",
    )  # fmt: skip
    assert refused(client, "/v1/runs", {**good, "training": {}})[0] == 422
    assert refused(client, "/v1/runs", {**good, "training": {**good["training"], "has_loss": "yes"}}) == (
        422, "hello.training.has_loss is 'yes'; it must be a valid boolean",
    )  # fmt: skip
    assert refused(client, "/v1/runs", [])[1] == "hello is a list of 0; it must be a dictionary or an instance of Hello"
    assert refused(client, "/v1/runs/nobody/pause") == (
        404, "this daemon follows no run 'nobody'",
    )  # fmt: skip
    report = {"protocol": PROTOCOL, "session": "a" * 32, "sequence": 1}
    assert refused(client, f"/v1/runs/{'9' * 32}/report", report)[0] == 404
    agent = Agent(client, run="4" * 32)
    assert refused(client, f"/v1/runs/{agent.run}/resume")[0] == 409
    assert refused(client, f"/v1/runs/{agent.run}/report", {**report, "steps": 1})[0] == 422
    agent.goodbye()
    report_route = f"/v1/runs/{'9' * 32}/report"
    for body in (b"\xff\xfe[", b"", b"[" * 200_000, b'{"sequence": NaN}', b"9" * 5000):
        answer = application.ask("POST", report_route, body, {"content-type": "application/json"})
        assert refusal(answer)[0] in (400, 422), body[:9]


def test_the_ranks_of_a_run_are_told(client: DaemonClient) -> None:
    message = document(hello("5" * 32))
    message["training"]["company"] = {"ranks": 8, "here": 4, "nodes": 2, "shards": 8}
    client.post("/v1/runs", message)
    assert client.get(f"/v1/runs/{'5' * 32}")["run"]["ranks"] == "8 ranks on 2 nodes, state sharded"


def test_the_interface_is_described(client: DaemonClient) -> None:
    description = client.get("/v1/openapi.json")
    paths = description["paths"]
    assert {"/v1/runs", "/v1/runs/{run}", "/v1/runs/{run}/report", "/v1/runs/{run}/rollback"} <= set(paths)
    described = paths["/v1/runs"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    described = {**description, **described}  # where its references lead to
    jsonschema.validate(document(hello()), described)
    tokens = description["components"]["schemas"]["Hello"]["properties"]["tokens"]
    assert {"type": "integer", "minimum": 1, "maximum": 2**40}.items() <= tokens.items()
