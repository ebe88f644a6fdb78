"""Messages there and back, and whatever else may arrive."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zftune.daemon.brain.agents import facts, hello, training
from zftune.daemon import wire
from zftune.daemon.wire import (
    PROTOCOL,
    Again,
    Applied,
    Directive,
    Done,
    Farewell,
    Goodbye,
    Hello,
    Report,
    StepFigures,
    Welcome,
    WireError,
    decode,
    encode,
    masked,
    parse,
)
from zftune.daemon.wire.codec import Limit
from zftune.daemon.wire.schema import schema
from zftune.tuner.facts import TrainingFacts
from zftune.tuner.states import Between, Outcome, Request

SESSION = "0123456789abcdef" * 2
MESSAGES: list[Any] = [
    hello(),
    hello(again=Again(SESSION, 3)),
    Welcome(protocol=PROTOCOL, session=SESSION, lease_s=30.0),
    Report(
        protocol=PROTOCOL, session=SESSION, sequence=7,
        steps=(StepFigures(1, 2.5, {"host": 0.5}), StepFigures(2, None)), losses=((1, 0.25), (2, -3.0)), dropped=4,
        applied=Applied(2, 9), done=Done(2, {"status": "void"}),
        guard="the loss is nan", knobs={"topk_ratio": 0.1},
    ),
    Directive(
        protocol=PROTOCOL, session=SESSION, decision=3, kind="apply", state="searching", reason="a look",
        request={"trial": 1}, incumbent={"topk_ratio": 0.1}, start={}, taken=2, record=SESSION, notices=("one",),
    ),
    Goodbye(protocol=PROTOCOL, session=SESSION, steps=10, begins=8, remarks=("a", "b"), idle={"seconds": 1.0}),
    Farewell(protocol=PROTOCOL, sentence="done", warning=True, notices=("x",)),
]  # fmt: skip
PLAIN: list[Any] = [
    Outcome("measured", (1.0, 2.0), (3.0,), 5, device_bytes=7, between=Between(1.0, 2.0, 3)),
    facts(),
]


def there_and_back(message: Any) -> Any:
    text = json.dumps(encode(message), allow_nan=False).encode()
    return decode(type(message), parse(text, most_bytes=wire.MOST_BYTES))


@pytest.mark.parametrize("message", [*MESSAGES, *PLAIN], ids=lambda one: type(one).__name__)
def test_a_message_comes_out_as_it_went_in(message: Any) -> None:
    assert there_and_back(message) == message
    assert type(there_and_back(message)) is type(message)


def test_the_facts_of_a_training_come_out_as_the_types_they_were() -> None:
    found = decode(TrainingFacts, training(seed=3))
    assert found == replace(facts(), wishes=replace(facts().wishes, search=replace(facts().wishes.search, seed=3)))
    assert isinstance(found.model.transposed, frozenset)
    assert isinstance(found.model.weights[0], tuple)


TEXT = st.text(st.characters(exclude_categories=()), max_size=40)  # halves of characters too
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from([*MESSAGES, *PLAIN]), st.data())
@settings(max_examples=300, deadline=None)
def test_whatever_a_field_is_it_is_taken_whole_or_refused_in_a_sentence(message: Any, data: st.DataObject) -> None:
    document = encode(message)
    name = data.draw(st.sampled_from([one.name for one in fields(message)]))
    document[name] = data.draw(JSON)
    try:
        found = decode(type(message), document, "message")
    except WireError as error:
        sentence = str(error)
        assert "allowed" in sentence or ":" in sentence
        assert len(sentence) < 3000
        assert "\n" not in sentence
    else:
        assert there_and_back(found) == found


@given(st.binary(max_size=200) | JSON.map(lambda one: json.dumps(one).encode()))
@settings(max_examples=200, deadline=None)
def test_whatever_bytes_arrive_they_are_a_message_or_refused(body: bytes) -> None:
    for kind in (Hello, Report, Goodbye, Directive):
        with pytest.raises(WireError):
            decode(kind, parse(body, most_bytes=1000))


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"a": NaN}', "the message has the number NaN, allowed are finite numbers"),
        (b"[Infinity]", "the number Infinity"),
        (b'{"a": 1, "a": 2}', "the field 'a' twice, allowed is once"),
        (b"[" * 200_000, "nested too deep"),
        (b"\xff\xfe", "the message is no JSON"),
        (b"", "the message is no JSON"),
        (b" " * 300_000, "allowed are at most 262144"),
    ],
)
def test_what_is_no_json_is_refused(body: bytes, sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        parse(body, most_bytes=1 << 18)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"protocol": 99}, f"protocol is 99, allowed is {PROTOCOL}"),
        ({"protocol": True}, "report.protocol is True, allowed is an integer"),
        ({"session": "short"}, "report.session is 'short', allowed is a text with a length of 32 to 32"),
        ({"session": "../" * 10 + "ab"}, r"is '\.\./.*, allowed is a text with .* of the form \[0-9a-f\]\*$"),
        ({"session": "A" * 32}, r"is 'A+', allowed is a text with a length of 32 to 32 of the form"),
        ({"session": "a" * 31 + "\n"}, "allowed is a text with a length of 32 to 32 of the form"),
        ({"guard": "half \udcff"}, r"report.guard is 'half \\udcff', allowed is a text without surrogates"),
        ({"knobs": {"a": ["\ud800"]}}, r"report.knobs.a\[0\] is '\\ud800', allowed is a text without surrogates"),
        ({"knobs": {"a\nb": "\ud800"}}, r"^report.knobs.a\\nb is '\\ud800', allowed"),
        ({"knobs": {"\ud800": 1}}, r"report.knobs has the name '\\ud800', allowed are names without surrogates"),
        ({"sequence": -1}, "report.sequence is -1, allowed is an integer of 0 to"),
        ({"sequence": 1.0}, "report.sequence is 1.0, allowed is an integer"),
        ({"sequence": 10**30}, "report.sequence is an integer beyond 64 bits, allowed"),
        ({"steps": [[1, 2.0]]}, r"report.steps\[0\] is a list of 2, allowed is an object"),
        ({"steps": [{"step": 1, "step_ms": -1.0}]}, r"report.steps\[0\].step_ms is -1.0, allowed is a number of 0 to"),
        ({"steps": [{"step": 1}]}, r"report.steps\[0\].step_ms is missing"),
        ({"steps": [{"step": 1, "step_ms": None}] * 1025}, "report.steps is a list of 1025, allowed is a length"),
        ({"losses": [[1]]}, r"report.losses\[0\] is a list of 1, allowed is a list of 2"),
        ({"guard": "x" * 2001}, "report.guard is 'x+…, allowed is a text with a length of 0 to 2000"),
        ({"more": 1}, "report has the field 'more', allowed are protocol, session"),
        ({"done": {"decision": 1, "outcome": {"a": [[[[[[[[[[[[[1]]]]]]]]]]]]]}}}, "nested too deep"),
    ],
)  # fmt: skip
def test_what_is_not_allowed_is_said(change: dict[str, Any], sentence: str) -> None:
    document = {"protocol": PROTOCOL, "session": SESSION, "sequence": 1, **change}
    with pytest.raises(WireError, match=sentence):
        decode(Report, document, "report")


def test_what_cannot_be_sent_is_not_sent() -> None:
    with pytest.raises(WireError, match=r"message.losses\[0\]\[1\] is nan, allowed is a finite number"):
        encode(Report(protocol=PROTOCOL, session=SESSION, sequence=1, losses=((1, math.nan),)))
    with pytest.raises(WireError, match="allowed is data that JSON has"):
        encode(object())


def test_what_is_no_unicode_is_sent_as_question_marks() -> None:
    goodbye = Goodbye(
        protocol=PROTOCOL, session=SESSION, steps=1, begins=1, reason="a \udcff", remarks=("\ud800", "é"),
        idle={"\udcff": "\udcff"},
    )  # fmt: skip
    found = there_and_back(goodbye)
    assert (found.reason, found.remarks, found.idle) == ("a ?", ("?", "é"), {"?": "?"})


def test_a_directive_applies_a_request_or_none() -> None:
    for kind, request in (("apply", None), ("hold", {})):
        with pytest.raises(WireError, match=f"kind is {kind}, allowed is apply with a request"):
            Directive(
                protocol=PROTOCOL, session=SESSION, decision=0, kind=kind,  # type: ignore[arg-type]
                state="warming", request=request,
            )  # fmt: skip


def test_an_optional_number_with_a_limit() -> None:
    @dataclass(frozen=True)
    class Message:
        share: Annotated[float | None, Limit(0, 1)] = None

    globals()["Annotated"], globals()["Limit"] = Annotated, Limit
    assert decode(Message, {"share": 1}) == Message(1.0)
    with pytest.raises(WireError, match=r"message.share is 1.5, allowed is a number of 0 to 1"):
        decode(Message, {"share": 1.5})


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_the_schema_says_the_same(message: Any) -> None:
    document = encode(message)
    described = schema(type(message))
    jsonschema.validate(document, described)
    for wrong in ({**document, "more": 1}, {**document, "protocol": "1"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, described)
    if "session" in document:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**document, "session": "g" * 32}, described)


def test_a_request_is_the_tuners_own() -> None:
    setting = facts().wishes  # any dataclass of the tuner travels by its annotations
    assert decode(type(setting), encode(setting)) == setting
    with pytest.raises(WireError, match=r"request\.role is 'burn', allowed is one of start, explore, a1, b, a2, hold"):
        decode(Request, {"setting": {}, "role": "burn", "trial": 1, "discard": 1, "steps": 1}, "request")
    with pytest.raises(WireError, match=r"setting: apply_lag is 9, allowed is an integer from 1 to 4"):
        decode(Request, {"setting": {"apply_lag": 9}, "role": "b", "trial": 1, "discard": 1, "steps": 1}, "request")


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--lr", "1"], ("--lr", "1")),
        (["--hf-token", "abc"], ("--hf-token", "***")),
        (["--hf-token", "--next"], ("--hf-token", "--next")),
        (["--api_key=abc"], ("--api_key=***",)),
        (["DB_PASSWORD=abc"], ("DB_PASSWORD=***",)),
        (["postgres://me:abc@host/db"], ("postgres://me:***@host/db",)),
        (["x" * 300], ("x" * 200,)),
        (["x"] * 100, ("x",) * 64),
        (["data/\udcff", "--key\udcff=\udcff"], ("data/?", "--key?=?")),
    ],
)
def test_secrets_are_masked(argv: list[str], shown: tuple[str, ...]) -> None:
    assert masked(argv) == shown
