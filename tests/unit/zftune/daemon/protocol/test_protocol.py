"""Messages there and back, and whatever else may arrive."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.zftune.daemon.runs.agents import facts, hello
from zftune.daemon import PROTOCOL
from zftune.daemon.protocol.codec import WireError, decode, encode
from zftune.daemon.protocol.messages import (
    Applied,
    Change,
    Directive,
    Done,
    Farewell,
    Goodbye,
    Hello,
    Reattach,
    Report,
    StepFigures,
    Welcome,
    masked,
)
from zftune.store.account import Count
from zftune.tuner.space import Setting
from zftune.tuner.states import Outcome, Remark, Request, UnmeasuredSteps

SESSION = "0123456789abcdef" * 2
REMARK = Remark("a note", 1.5, 1e9)
MESSAGES: list[Any] = [
    hello(),
    hello(again=Reattach(SESSION, 3)),
    Welcome(protocol=PROTOCOL, session=SESSION, lease_s=30.0),
    Report(
        protocol=PROTOCOL, session=SESSION, sequence=7,
        steps=(StepFigures(1, 2.5, {"host": 0.5}), StepFigures(2, None)), losses=((1, 0.25), (2, -3.0)), dropped=4,
        applied=Applied(2, 9), done=Done(2, Outcome("void")),
        guard="the loss is nan", changes=(Change(7, Setting()),), count=Count(steps=3, seconds=1.5),
    ),
    Directive(
        protocol=PROTOCOL, session=SESSION, decision=3, kind="apply", state="searching", reason="a look",
        request=Request(Setting(), "b", 1, 4, 8), incumbent=Setting(topk_ratio=0.2),
        start=Setting(), taken=2, record=SESSION, notices=("one",),
    ),
    Goodbye(protocol=PROTOCOL, session=SESSION, steps=10, begins=8, remarks=(REMARK,)),
    Farewell(protocol=PROTOCOL, sentence="done", warning=True, notices=("x",)),
]  # fmt: skip
PLAIN: list[Any] = [
    Outcome("measured", (1.0, 2.0), (3.0,), 5, device_bytes=7, between=UnmeasuredSteps(1.0, 2.0, 3)),
    facts(),
]


def there_and_back(message: Any) -> Any:
    return decode(type(message), json.loads(encode(message)))


@pytest.mark.parametrize("message", [*MESSAGES, *PLAIN], ids=lambda one: type(one).__name__)
def test_a_message_comes_out_as_it_went_in(message: Any) -> None:
    assert there_and_back(message) == message
    assert type(there_and_back(message)) is type(message)


def test_the_facts_of_a_training_come_out_as_the_types_they_were() -> None:
    found = there_and_back(facts())
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
    document = json.loads(encode(message))
    name = data.draw(st.sampled_from([one.name for one in fields(message)]))
    document[name] = data.draw(JSON)
    try:
        found = decode(type(message), document, "message")
    except WireError as error:
        sentence = str(error)
        assert sentence.startswith(("message", "directive", "protocol is"))
        assert len(sentence) < 3000
        assert "\n" not in sentence
    else:
        assert there_and_back(found) == found


@given(JSON)
@settings(max_examples=200, deadline=None)
def test_whatever_arrives_is_a_message_or_refused(document: Any) -> None:
    for kind in (Hello, Report, Goodbye, Directive):
        with pytest.raises(WireError):
            decode(kind, document)


def _knob(name: str, value: Any) -> dict[str, Any]:
    return {"changes": [{"step": 1, "knobs": {name: value}}]}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"protocol": 99}, f"^protocol is 99; it must be {PROTOCOL}: use one zftune on both sides$"),
        ({"protocol": True}, "report.protocol is True; it must be a valid integer"),
        ({"session": "short"}, r"report.session is 'short'; it must match pattern '\^\[0-9a-f\]\{32\}\$'"),
        ({"session": "../" * 10 + "ab"}, r"is '\.\./.*; it must match pattern"),
        ({"session": "A" * 32}, "is 'A+'; it must match pattern"),
        ({"session": "a" * 31 + "\n"}, "it must match pattern"),
        ({"session": "a" * 32 + "\n"}, "it must match pattern"),
        ({"guard": "half \udcff"}, r"report.guard is 'half \\udcff'; it must be a valid string"),
        (_knob("a\nb", 1), r"^report.changes\[0\].knobs has no field 'a\\nb'$"),
        (_knob("\ud800", 1), r"^report.changes\[0\].knobs is '\\ud800'; it must be a valid string"),
        (_knob("topk_ratio", True), r"changes\[0\].knobs.topk_ratio is True; it must be a valid number"),
        (_knob("topk_ratio", 1e301), r"changes\[0\].knobs.topk_ratio is 1e\+301; it must be less than or equal to 1e"),
        (_knob("host_threads", 2**63), r"changes\[0\].knobs.host_threads is an integer beyond 64 bits; it must be"),
        ({"losses": [[1, math.nan]]}, r"report.losses\[0\]\[1\] is nan; it must be a finite number"),
        ({"losses": [[1, -math.inf]]}, r"report.losses\[0\]\[1\] is -inf; it must be a finite number"),
        ({"sequence": -1}, "report.sequence is -1; it must be greater than or equal to 0"),
        ({"sequence": 1.0}, "report.sequence is 1.0; it must be a valid integer"),
        ({"sequence": "1"}, "report.sequence is '1'; it must be a valid integer"),
        ({"sequence": 10**30}, "report.sequence is an integer beyond 64 bits; it must be"),
        ({"steps": [[1, 2.0]]}, r"report.steps\[0\] is a list of 2; it must be a dictionary"),
        ({"steps": [{"step": 1, "step_ms": -1.0}]}, r"report.steps\[0\].step_ms is -1.0; it must be greater than or"),
        ({"steps": [{"step": 1}]}, r"report.steps\[0\].step_ms is missing"),
        ({"steps": [{"step": 1, "step_ms": None}] * 1025}, "report.steps is a list of 1025; it must have at most 1024"),
        ({"losses": [[1]]}, r"report.losses\[0\]\[1\] is missing"),
        ({"guard": "x" * 2001}, "report.guard is 'x+…; it must have at most 2000 characters"),
        ({"more": 1}, "^report has no field 'more'$"),
        ({"protocol": 99, "sequence": -1, "more": 1}, "^protocol is 99; it must be"),  # whatever else it may say
    ],
)  # fmt: skip
def test_what_is_not_allowed_is_said(change: dict[str, Any], sentence: str) -> None:
    document = {"protocol": PROTOCOL, "session": SESSION, "sequence": 1, **change}
    with pytest.raises(WireError, match=sentence):
        decode(Report, document, "report")


def test_what_cannot_be_sent_is_not_sent() -> None:
    with pytest.raises(WireError, match=r"message.losses\[0\]\[1\] is nan; it must be a finite number"):
        encode(Report(protocol=PROTOCOL, session=SESSION, sequence=1, losses=((1, math.nan),)))


def test_what_is_no_unicode_is_sent_as_question_marks() -> None:
    goodbye = Goodbye(
        protocol=PROTOCOL, session=SESSION, steps=1, begins=1, reason="a \udcff",
        remarks=(replace(REMARK, reason="\ud800"), replace(REMARK, reason="é")),
    )  # fmt: skip
    found = there_and_back(goodbye)
    assert (found.reason, [one.reason for one in found.remarks]) == ("a ?", ["?", "é"])


def test_a_request_is_the_tuners_own() -> None:
    setting = facts().wishes  # any dataclass of the tuner travels by its annotations
    assert there_and_back(setting) == setting
    with pytest.raises(WireError, match=r"request\.role is 'burn'; it must be 'start', 'explore', 'a1', 'b'"):
        decode(Request, {"setting": {}, "role": "burn", "trial": 1, "discard": 1, "steps": 1}, "request")
    with pytest.raises(WireError, match=r"request: apply_lag is 9; it must be an integer from 1 to 4"):
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


def names(kind: Any, above: str) -> set[str]:
    """Of all fields in a message, with those above them."""
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        return {path for one in fields(kind) for path in names(hints[one.name], f"{above}.{one.name}")}
    return {above}.union(*(names(one, above) for one in get_args(kind)))


def test_another_field_is_another_protocol() -> None:
    """Each side refuses fields that it does not have: a new zftune and an old daemon must see that they differ."""
    found = sorted(set().union(*(names(type(one), type(one).__name__) for one in MESSAGES)))
    digest = hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]
    assert (PROTOCOL, digest) == (7, "74f05fc262bb2a77"), f"fields have changed: count PROTOCOL up, note {digest}"
