"""The HTTP interface, in process: sentences for whatever is wrong, and limits of a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx2
import pytest

from tests.support.zftune.daemon.hosted import Hosted
from tests.support.zftune.daemon.in_process import Application, Body, Client, hosting
from zftune.daemon import PROTOCOL
from zftune.daemon.server.answers import error_body
from zftune.daemon.server.limits import Limits

ECHO = "/v1/test/echo/7"
GOOD = b'{"topk_ratio": 0.5, "name": "x"}'
SHORT_S = 0.05


def refusal(answer: httpx2.Response) -> tuple[int, str]:
    """Status and sentence; everything that refuses is JSON with one sentence, and names the protocol."""
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["zftune-protocol"] == str(PROTOCOL)
    found = answer.json()
    assert list(found) == ["error"]
    assert "\n" not in found["error"]
    return answer.status_code, found["error"]


def post(application: Application, body: Body, route: str = ECHO, kind: str = "application/json") -> tuple[int, str]:
    return refusal(application.ask("POST", route, body, {"content-type": kind}))


@pytest.mark.parametrize(
    ("route", "sentence"),
    [
        ("/v1/nope", "there is no '/v1/nope'"),
        ("/v1/health/", "there is no '/v1/health/'"),
        ("/docs", "there is no '/docs'"),
        ("/v1/" + "x" * 300, "there is no '/v1/" + "x" * 73 + "...'"),
    ],
)
def test_a_route_that_is_not_there(application: Application, route: str, sentence: str) -> None:
    assert refusal(application.ask("GET", route)) == (404, sentence)


@pytest.mark.parametrize(
    ("body", "route", "status", "sentence"),
    [
        (b"", "/v1/health", 405, "method POST on '/v1/health' is not allowed; it must be GET"),
        (GOOD, "/v1/test/echo/x", 422, "number is 'x': Input should be a valid integer"),
        (GOOD, "/v1/test/echo/-1", 422, "number is '-1': Input should be greater than or equal to 0"),
        (GOOD, f"/v1/test/echo/{'9' * 5000}", 422, "number is '999"),
        (b"", ECHO, 422, "body: Field required"),
        (b"{", ECHO, 422, "the body is not JSON (Expecting property name"),
        (b"[1]", ECHO, 422, "body is '[1]': Input should be a valid dictionary"),
        (b"{}", ECHO, 422, "topk_ratio: Field required (and 1 more)"),
        (b'{"topk_ratio": NaN, "name": "x"}', ECHO, 422, "topk_ratio is 'nan': "),
        (b'{"topk_ratio": 1e999, "name": "x"}', ECHO, 422, "topk_ratio is 'inf': "),
        (b'{"topk_ratio": 1, "name": "\\ud800"}', ECHO, 422, "name is '\\ud800'"),
        (b"\xff\xfe", ECHO, 422, "the body is not JSON ("),
        (b"\xff", ECHO, 400, "There was an error parsing the body"),
        (b"[" * 100_000, ECHO, 400, "There was an error parsing the body"),
        (b"9" * 10_000, ECHO, 400, "There was an error parsing the body"),
        (b" " * ((1 << 20) + 1), ECHO, 413, "the body is longer than 1048576 bytes"),
    ],
)
def test_a_wrong_request_is_refused_in_one_sentence(
    application: Application, body: bytes, route: str, status: int, sentence: str
) -> None:
    found_status, found = post(application, body, route)
    assert (found_status, found[: len(sentence)]) == (status, sentence)


def test_what_is_not_json_is_refused(application: Application) -> None:
    assert post(application, GOOD, kind="text/plain")[0] == 422


def test_an_error_of_a_route(application: Application) -> None:
    assert refusal(application.ask("GET", "/v1/test/refuses")) == (422, "name 'x': allowed is y")
    assert application.ask("GET", "/v1/test/fails").json() == {"error": "the daemon failed (RuntimeError); see its log"}
    assert json.loads(error_body("half \ud800\n").decode()) == {"error": "half \ud800\n"}


def test_a_body_of_unknown_length_is_limited_too(application: Application) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * (1 << 19)

    assert post(application, parts()) == (413, "the body is longer than 1048576 bytes")


def test_a_body_that_does_not_come_is_given_up() -> None:
    async def half() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    with hosting(Hosted(), limits=Limits(body_s=SHORT_S)) as application:
        assert post(application, half()) == (408, f"the body has not come within {SHORT_S:g} s")


def test_an_answer_has_to_begin_and_may_take_its_time_then() -> None:
    with hosting(Hosted(pause_s=2 * SHORT_S), limits=Limits(answer_s=SHORT_S)) as application:
        answer = application.ask("GET", "/v1/test/held")
        assert refusal(answer) == (503, f"no answer within {SHORT_S:g} s, try again later")
        assert application.ask("GET", "/v1/test/streams").content == b"one two"


def test_the_interface_describes_itself(application: Application) -> None:
    document = Client(application).get("/v1/openapi.json")
    assert document["openapi"].startswith("3.1")
    assert {"/v1/health", "/v1/page", "/v1/stop", "/v1/test/echo/{number}"} <= set(document["paths"])
    assert all(path.startswith("/v1/") for path in document["paths"])
    assert list(document["components"]["schemas"]["ErrorAnswer"]["properties"]) == ["error"]
    assert "HTTPValidationError" not in json.dumps(document)


def test_it_can_be_asked_to_stop(application: Application) -> None:
    assert Client(application).post("/v1/stop") == {"stopping": True}
    assert application.stopped.pop() == "asked to"
