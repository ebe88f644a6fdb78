"""The runs' routes of a real daemon, over its socket."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import jsonschema
import pytest

from tests.zftune.daemon.brain.agents import RUN, Agent, hello
from tests.zftune.daemon.daemons import exchange, serving, short_folder, status_of
from zftune.daemon import PROTOCOL
from zftune.daemon.client import DaemonClient
from zftune.daemon.errors import DaemonError
from zftune.daemon.wire import encode

HOSTED = "tests.zftune.daemon.brain.hosted"


@pytest.fixture(scope="module")
def client() -> Iterator[DaemonClient]:
    with short_folder() as folder:
        more = {"ZFTUNE_DB": str(folder / "zftune.db"), "HOME": str(folder)}
        with serving(folder, "2", module=HOSTED, more=more), closing(DaemonClient(folder / "z.sock")) as client:
            yield client


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
    assert details["run"]["incumbent"] == agent.last.incumbent
    adopted = [one for one in details["decisions"] if one["kind"] == "adopt"]
    assert adopted[0]["reason"].startswith("Adopted: ")
    trial = details["trials"][adopted[0]["trial"]]
    assert trial["state"] == "measured"
    assert trial["step_ms"] == pytest.approx(80.0)
    assert client.post(f"/v1/runs/{RUN}/rollback")["reason"].startswith("Rolled back by hand: ")
    assert agent.report().incumbent == agent.last.start
    assert "zftune keeps" in agent.goodbye()["sentence"]
    assert client.get(f"/v1/runs/{RUN}")["run"]["state"] == "ended"


def test_what_is_refused_and_how(client: DaemonClient) -> None:
    good = encode(hello("3" * 32))
    assert refused(client, "/v1/runs", {**good, "protocol": 99}) == (
        422, f"protocol is 99, allowed is {PROTOCOL}: use one zftune on both sides",
    )  # fmt: skip
    assert refused(client, "/v1/runs", {**good, "training": {}})[0] == 422
    assert refused(client, "/v1/runs", {**good, "training": {**good["training"], "has_loss": "yes"}}) == (
        422, "hello.training.has_loss is 'yes', allowed is true or false",
    )  # fmt: skip
    assert refused(client, "/v1/runs", [])[1] == "hello is a list of 0, allowed is an object"
    assert refused(client, "/v1/runs/nobody/pause") == (
        404, "run is 'nobody', allowed is one that this daemon follows",
    )  # fmt: skip
    report = {"protocol": PROTOCOL, "session": "a" * 32, "sequence": 1}
    assert refused(client, f"/v1/runs/{'9' * 32}/report", report)[0] == 404
    agent = Agent(client, run="4" * 32)
    assert refused(client, f"/v1/runs/{agent.run}/resume")[0] == 409
    assert refused(client, f"/v1/runs/{agent.run}/report", {**report, "steps": 1})[0] == 422
    agent.goodbye()
    raw = b"POST /v1/runs HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 3\r\n\r\n\xff\xfe["
    assert status_of(exchange(client.path, raw)) == 422


def test_a_run_without_an_agent_ends_with_its_lease(client: DaemonClient) -> None:
    agent = Agent(client, run="5" * 32)
    agent.measure()
    request = agent.asked()
    while client.get(f"/v1/runs/{agent.run}")["run"]["state"] != "ended":
        time.sleep(0.05)
    details = client.get(f"/v1/runs/{agent.run}")
    assert details["trials"][request.trial]["state"] == "crashed"
    assert "was not heard of for" in details["run"]["reason"]


def test_the_ranks_of_a_run_are_told(client: DaemonClient) -> None:
    message = encode(hello("5" * 32))
    message["training"]["company"] = {"ranks": 8, "here": 4, "nodes": 2, "shards": 8}
    client.post("/v1/runs", message)
    assert client.get(f"/v1/runs/{'5' * 32}")["run"]["ranks"] == "8 ranks on 2 nodes, weights sharded"


def test_the_interface_is_described(client: DaemonClient) -> None:
    document = client.get("/v1/openapi.json")
    paths = document["paths"]
    assert {"/v1/runs", "/v1/runs/{run}", "/v1/runs/{run}/report", "/v1/runs/{run}/rollback"} <= set(paths)
    described = paths["/v1/runs"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.validate(encode(hello()), described)
    assert described["properties"]["tokens"] == {"type": "integer", "minimum": 1, "maximum": 2**40}
