"""The schedule's file: what is read is what was written, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zftune.agent.schedule import Entry, decode, encode, read_schedule
from zftune.errors import BadInputError

ENTRIES = [
    Entry(0, {"topk_ratio": 0.1, "update_interval": "auto", "apply_lag": None, "host_threads": None}),
    Entry(24, {"update_interval": 8, "apply_lag": 8}),
    Entry(24, None),
    Entry(24, {"apply_lag": 5}),
    Entry(40, {"overlap_step": False}),
]


def test_what_is_read_is_what_was_written() -> None:
    text = encode(ENTRIES)
    assert decode(text) == ENTRIES
    assert json.loads(text)["steps"][1] == {"after_step": 24, "knobs": {"update_interval": 8, "apply_lag": 8}}
    assert decode(encode([])) == []


def document(*steps: Any, version: Any = 1) -> str:
    return json.dumps({"zftune_schedule": version, "steps": list(steps)})


def knobs(**of: Any) -> dict[str, Any]:
    return {"after_step": 3, "knobs": of}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not JSON (Expecting property name"),
        ("[1]", "holds [1]; it must be an object with zftune_schedule and steps"),
        ('{"steps": []}', "holds steps; it must be an object with zftune_schedule and steps"),
        ('{"zftune_schedule": 1, "steps": [], "more": 1}', "holds zftune_schedule, steps, more; it must be"),
        ('{"zftune_schedule": 1, "steps": [], "steps": []}', "steps stands there twice"),
        (document(version=2), "zftune_schedule is 2; it must be 1"),
        (document(version=True), "zftune_schedule is true; it must be 1"),
        ('{"zftune_schedule": 1, "steps": {}}', "steps is {}; it must be a list"),
        (document(7), "steps[0] holds 7; it must hold after_step and either knobs or flush"),
        (document({"after_step": 1}), "steps[0] holds after_step; it must hold after_step and either knobs or flush"),
        (document({"after_step": 1, "flush": True, "knobs": {}}), "holds after_step, flush, knobs; it must hold"),
        (document({"after_step": 1, "flush": False}), "steps[0].flush is false; it must be true"),
        (document({"after_step": -1, "flush": True}), "steps[0].after_step is -1; it must be an integer >= 0"),
        (document({"after_step": True, "flush": True}), "steps[0].after_step is true; it must be an integer >= 0"),
        (document({"after_step": 1.0, "flush": True}), "steps[0].after_step is 1.0; it must be an integer >= 0"),
        (document(knobs(topk_ratio=0.5), {**knobs(topk_ratio=0.5), "after_step": 2}),
         "steps[1].after_step is 2; it must be an integer >= 3"),
        (document(knobs()), "steps[0].knobs is {}; it must be an object with a knob or more"),
        (document({"after_step": 1, "knobs": [1]}), "steps[0].knobs is [1]; it must be an object"),
        (document(knobs(topk_ratio=2)), "steps[0].knobs.topk_ratio is 2; it must be a number from 0 to 1"),
        (document(knobs(bucket_bytes=2)), "steps[0].knobs.bucket_bytes cannot be changed while it trains: topk_ratio"),
        (document(knobs(update_interval=2, apply_lag=3)), "steps[0].knobs.apply_lag is 3; it must be an integer"),
        ('{"zftune_schedule": 1, "steps": [{"after_step": 1, "knobs": {"topk_ratio": NaN}}]}', "holds NaN; numbers"),
        ('{"zftune_schedule": 1, "steps": [' + 5000 * "9" + "]}", "is not JSON (Exceeds the limit"),
        (document({"after_step, knobs": 1}), "steps[0] holds after_step, knobs; it must hold after_step and"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(BadInputError) as raised:
        decode(text)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"^--schedule '.*none': cannot be read \(No such file or directory\)$"):
        read_schedule(tmp_path / "none")
    (tmp_path / "s").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInputError, match=r"^--schedule '.*s': is not JSON: it is no text in UTF-8$"):
        read_schedule(tmp_path / "s")
    (tmp_path / "s").write_text("[]")
    with pytest.raises(BadInputError, match=r"^--schedule '.*s': holds \[\]; it must be an object"):
        read_schedule(tmp_path / "s")
