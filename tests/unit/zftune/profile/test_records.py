from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zftune.profile.command.document import Seen, nothing_recorded, remarks, waits_for
from zftune.profile.command.records import Rank, measured, read_records

Row = dict[str, Any]
HEADER: Row = {"kind": "header", "pid": 1, "rank": 0, "world_size": 1, "began_ns": 5}
STEP: Row = {
    "kind": "step",
    "index": 5,
    "measured": True,
    "begin_ns": 100,
    "end_ns": 200,
    "step_ms": 1e-4,
    "phases_ms": {"forward": 1e-4},
    "waits_ms": {},
    "stall_ms": None,
}


def write(folder: Path, *rows: Row | str, pid: int = 1) -> Path:
    file = folder / f"agent-{pid}.jsonl"
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return file


def read(folder: Path, *rows: Row | str) -> Rank:
    write(folder, *rows)
    (rank,) = read_records(folder)
    return rank


def test_a_whole_file(tmp_path: Path) -> None:
    missing = {"kind": "missing", "field": "stall", "reason": "no stream"}
    model = {"kind": "model", "model": "Net", "systems": ["DeepSpeed"], "knobs": None}
    first = {**STEP, "index": 4, "measured": False}
    rank = read(tmp_path, HEADER, model, missing, first, STEP, {"kind": "end", "reason": "measured"})
    assert (rank.rank, rank.discarded, len(rank.steps), rank.end) == (0, 5, 1, "measured")
    assert (rank.begin_ns, rank.end_ns) == (100, 200)
    assert rank.missing == {"stall": "no stream"}
    assert rank.model["systems"] == ["DeepSpeed"]
    assert rank.unreadable == 0


def test_a_torn_last_line_is_no_fault(tmp_path: Path) -> None:
    rank = read(tmp_path, HEADER, STEP, json.dumps(STEP)[:40])
    assert (len(rank.steps), rank.end, rank.unreadable) == (1, None, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"step_ms": 0}, {"step_ms": -1}, {"step_ms": "1"}, {"step_ms": True}, {"begin_ns": 1.5}, {"end_ns": None},
        {"phases_ms": {"sleep": 1}}, {"phases_ms": None}, {"waits_ms": {"data": -1}}, {"stall_ms": {"luck": 1}},
        {"measured": "yes"}, {"spans": [["forward", 1]]}, {"spans": [[1, 2, 3]]}, {"hidden_ms": "x"}, {"kind": "stop"},
        {"tokens": -1}, {"tokens": 1.5}, {"tokens": "many"}, {"loss": "low"}, {"loss_source": "a guess"},
        {"step_ms": float("nan")},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_step_is_counted_and_left_out(tmp_path: Path, change: Row) -> None:
    rank = read(tmp_path, HEADER, {**STEP, **change}, STEP)
    assert (len(rank.steps), rank.unreadable) == (1, 1)


PLACE: Row = {"file": "train.py", "line": 3, "function": "main"}
LINES: Row = {
    "kind": "lines", "of": "idle", "samples": 40, "fraction": 0.5, "cost": 0.001,
    "lines": [{**PLACE, "share": 1.0, "within": PLACE}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "is_read"),
    [
        ({}, True), ({"lines": []}, True), ({"of": "night"}, False), ({"samples": -1}, False), ({"fraction": 2}, False),
        ({"cost": None}, False), ({"lines": [PLACE]}, False), ({"lines": LINES["lines"] * 21}, False),
        ({"lines": [{**LINES["lines"][0], "line": "3"}]}, False), ({"lines": None}, False),
    ],
    ids=str,
)  # fmt: skip
def test_lines_of_the_thread_are_read_if_they_are_whole(tmp_path: Path, change: Row, is_read: bool) -> None:
    rank = read(tmp_path, HEADER, STEP, {**LINES, **change})
    assert (rank.lines is not None, rank.unreadable) == (is_read, not is_read)


def test_another_training_has_lines_of_its_own(tmp_path: Path) -> None:
    assert read(tmp_path, HEADER, LINES, {"kind": "restart"}, STEP).lines is None


def test_a_model_keeps_what_is_of_its_type(tmp_path: Path) -> None:
    model = {"kind": "model", "model": 7, "parameters": "many", "trainable": 0, "model_id": "../x", "systems": ["a", 1]}
    rank = read(tmp_path, HEADER, model)
    assert rank.model == {"trainable": 0, "systems": ["a"], "knobs": None}


@pytest.mark.parametrize("first", ["", "{", "[]\n", json.dumps({**HEADER, "rank": -1}) + "\n", json.dumps(STEP) + "\n"])
def test_a_process_that_has_not_told_who_it_is_is_left_out(tmp_path: Path, first: str) -> None:
    write(tmp_path, first)
    assert read_records(tmp_path) == []


def test_a_process_that_could_not_look_is_rank_0_of_1(tmp_path: Path) -> None:
    rank = read(tmp_path, {**HEADER, "rank": None, "world_size": None})
    assert (rank.rank, rank.header["world_size"]) == (0, 1)


def test_ranks_are_in_order_and_of_each_the_longest_counts(tmp_path: Path) -> None:
    write(tmp_path, {**HEADER, "rank": 1}, STEP, pid=1)
    write(tmp_path, {**HEADER, "began_ns": 1}, STEP, pid=2)
    write(tmp_path, {**HEADER, "began_ns": 2}, STEP, STEP, pid=3)
    write(tmp_path, {**HEADER, "rank": 2}, pid=4)
    ranks = read_records(tmp_path)
    chosen = measured(ranks)
    assert [(rank.rank, len(rank.steps)) for rank in chosen] == [(0, 2), (1, 1)]
    assert "1 more training process of the same rank left out of the profile" in remarks(ranks, chosen, 2, Seen())


def test_the_mean_of_a_figure_that_a_step_lacks_is_not_known(tmp_path: Path) -> None:
    rank = read(tmp_path, HEADER, {**STEP, "hidden_ms": 1.0}, {**STEP, "hidden_ms": 2.0})
    assert rank.mean("hidden_ms") == 1.5
    assert read(tmp_path, HEADER, {**STEP, "hidden_ms": 1.0}, STEP).mean("hidden_ms") is None


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (["python", "-I", "x.py"], 0, "python -I isolates"),
        (["python3", "-bE", "x.py"], 0, "python -E ignores PYTHONPATH"),
        (["python3", "-W", "ignore::ImportWarning", "x.py"], 0, "no optimizer of torch took a step"),
        (["python3", "-WIgnore", "-S", "x.py"], 0, "python -S leaves the site module out"),
        (["python3", "x.py", "-I"], 0, "no optimizer of torch"),
        (["python3", "-m", "train", "-E"], 0, "no optimizer of torch"),
        (["bash", "-I"], 0, "no optimizer of torch"),
        (["bash"], 3, "exit code 3"),
        (["bash"], -9, "killed by signal 9"),
        (["bash"], None, "was killed before"),
    ],
)
def test_why_nothing_was_recorded(
    monkeypatch: pytest.MonkeyPatch, command: list[str], status: int | None, said: str
) -> None:
    monkeypatch.delenv("ZFTUNE_DISABLE", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert said in nothing_recorded(command, [], status, 5, Seen())


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (Seen(), "no optimizer of torch took a step in a Python that takes up zftune's agent"),
        (Seen(left=2), "the command ended and left 2 processes in the background, which were ended with it"),
        (Seen(full=Path("/dev/shm")), "'/dev/shm', where the records are, is full"),
    ],
)
def test_what_was_seen_is_told_apart(tmp_path: Path, seen: Seen, said: str) -> None:
    assert nothing_recorded(["bash"], [], 0, 5, seen).startswith(f"nothing was recorded: {said}")
    rank = read(tmp_path, HEADER, STEP)
    (short,) = remarks([rank], [rank], 3, seen)
    assert short.startswith("1 of 3 steps were measured: ")
    assert ("full" in short, "background" in short) == (seen.full is not None, seen.left > 0)


def test_what_an_agent_says_comes_first(tmp_path: Path) -> None:
    failed = read(tmp_path, HEADER, {"kind": "end", "reason": "failed", "error": "ValueError: x"})
    assert nothing_recorded(["python", "-I"], [failed], 1, 5, Seen()).endswith(": the agent failed: ValueError: x")
    idle = read(tmp_path, HEADER, {"kind": "missing", "field": "step_ms", "reason": "no optimizer stepped"})
    assert "no optimizer stepped" in nothing_recorded(["x"], [idle], 0, 5, Seen())
    short = read(tmp_path, HEADER, {**STEP, "index": 1, "measured": False})
    assert "the training ended after 2 steps" in nothing_recorded(["x"], [short], 0, 5, Seen())


def test_remarks(tmp_path: Path) -> None:
    rank = read(
        tmp_path,
        {**HEADER, "world_size": 4},
        STEP,
        "x\n",
        {"kind": "end", "reason": "failed", "error": "OSError: full"},
    )
    assert list(remarks([rank], [rank], 60, Seen())) == [
        "rank 0: the agent failed: OSError: full",
        "1 of 60 steps were measured: the training ended before",
        "1 of 4 ranks were recorded here",
        "1 line of the records could not be read",
    ]


def test_another_trainings_optimizer_takes_over(tmp_path: Path) -> None:
    first = {"kind": "model", "model": "Small", "parameters": 72}
    reason = {"kind": "missing", "field": "workload.dtype", "reason": "mixed"}
    early = {**STEP, "index": 1, "measured": False}
    device = {"device": "NVIDIA H200", "device_uuid": "GPU-a", "has_stream": True, "source": "event"}
    before = (first, reason, early, STEP, {"kind": "restart", **device})
    assert read(tmp_path, HEADER, *before).model == {}
    rank = read(tmp_path, HEADER, *before, {"kind": "model", "model": "Large"}, {**STEP, "index": 90})
    assert (rank.model["model"], rank.missing, rank.discarded) == ("Large", {}, 90)
    assert [step["index"] for step in rank.steps] == [90]
    assert "parameters" not in rank.model
    assert (rank.seen, rank.unreadable) == (0, 0)
    assert rank.header == {**HEADER, **device}
    assert read(tmp_path, HEADER, {"kind": "restart", "device": 7}, STEP).unreadable == 1


@pytest.mark.parametrize(
    ("lines", "waits"),
    [([], "a Python that zftune's agent can enter"), ([HEADER], "1 so far, of which --warmup discards 5")],
)
def test_what_a_profile_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[Row], waits: str
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    if lines:
        write(tmp_path, *lines)
    assert str(waits_for(tmp_path, 5)).endswith(waits)
