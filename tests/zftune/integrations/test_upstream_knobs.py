"""Upstream's ZenFlow with knobs that change while it trains, beside AdamW by hand on the gradients of each window."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import upstream_ops, zygote
from tests.once import once
from tests.zftune.integrations.upstream_run import LR, ROWS, gradient, turned

ROOT = Path(__file__).parents[3]
SEQUENTIAL = {"topk_ratio": 0.25, "update_interval": 2, "select_interval": 32, "full_warm_up_rounds": 0}


def every(steps: int) -> dict[str, Any]:
    """The same with other windows."""
    return {**SEQUENTIAL, "update_interval": steps}


OVERLAPPED = {**SEQUENTIAL, "overlap_step": True, "full_warm_up_rounds": 2}
LONGER = {"3": [{"update_interval": 4}]}
MORE = {"3": [{"topk_ratio": 0.5}]}
ALL = {"5": [{"update_interval": 4}, {"topk_ratio": 0.5, "select_interval": 12}]}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"zenflow": SEQUENTIAL, "steps": 8},
    "longer": {"zenflow": SEQUENTIAL, "steps": 16, "changes": LONGER},
    "longer, stage 1": {"zenflow": SEQUENTIAL, "steps": 16, "changes": LONGER, "stage": 1},
    "shorter": {"zenflow": every(4), "steps": 14, "changes": {"2": [{"update_interval": 1}]}},
    "from one": {"zenflow": every(1), "steps": 13, "changes": {"3": [{"update_interval": 4}]}},
    "more": {"zenflow": SEQUENTIAL, "steps": 12, "changes": MORE},
    "more, stage 1": {"zenflow": SEQUENTIAL, "steps": 12, "changes": MORE, "stage": 1},
    "more, offload": {"zenflow": {**SEQUENTIAL, "offload": True}, "steps": 12, "changes": MORE},
    "more, bf16": {"zenflow": SEQUENTIAL, "steps": 12, "changes": MORE, "bf16": True},
    "fewer": {"zenflow": {**SEQUENTIAL, "topk_ratio": 0.5}, "steps": 12, "changes": {"4": [{"topk_ratio": 0.25}]}},
    "oftener": {"zenflow": SEQUENTIAL, "steps": 16, "turns_after": 5, "changes": {"3": [{"select_interval": 8}]}},
    "all": {"zenflow": SEQUENTIAL, "steps": 20, "changes": ALL},
    "in the warm-up": {"zenflow": {**SEQUENTIAL, "full_warm_up_rounds": 5}, "steps": 14, "changes": LONGER},
    "overlapped": {"zenflow": OVERLAPPED, "steps": 18, "changes": {**LONGER, "9": [{"topk_ratio": 0.5}]}},
    "refused": {
        "zenflow": SEQUENTIAL,
        "steps": 2,
        "asks_early": True,
        "refused": [
            {"version": "0.19.8", "topk_ratio": 0.5},
            {"ratio": 0.5},
            {"full_warm_up_rounds": 4},
            {"overlap_step": True},
            {"pt_reserved_cores_perc": 0.2},
            {"topk_ratio": 1.5},
            {"update_interval": 0},
            {"update_interval": 3},
            {"select_interval": 5},
            {"boundary": True, "topk_ratio": 0.5},
        ],
    },
    "no warm-up": {
        "zenflow": {**OVERLAPPED, "full_warm_up_rounds": 0},
        "steps": 1,
        "refused": [{"topk_ratio": 0.5}],
    },
}  # fmt: skip
Found = dict[str, Any]


def launch(folder: Path, cases: Mapping[str, Any], ranks: int = 1) -> list[dict[str, Found]]:
    """Run the cases in processes of their own; what each rank found."""
    upstream_ops.need()
    (folder / "cases.json").write_text(json.dumps(cases))
    command: list[str | Path] = [
        "-m",
        "tests.zftune.integrations.upstream_run",
        folder / "cases.json",
        folder / "found",
    ]
    env = {**os.environ, **upstream_ops.environment(), "OMP_NUM_THREADS": "1", "ZFTUNE_DISABLE": "1"}
    with contextlib.ExitStack() as stack:
        for child in [stack.enter_context(one) for one in zygote.ranks(ranks, command, env=env)]:
            assert child.wait(800) == 0, child.stderr[-3000:]
    return [json.loads((folder / f"found.{rank}").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    return once(tmp_path_factory, "upstream-knobs", lambda folder: launch(folder, CASES)[0])


class Adam:
    """DeepSpeed's arithmetic for one column: bias correction counts steps, an update takes its window's gradient."""

    def __init__(self) -> None:
        self.weight = [1.0] * ROWS
        self.moments = [[(0.0, 0.0)] * ROWS for _ in range(2)]

    def update(self, step: int, mean: Sequence[float], state: int = 0) -> None:
        for row, g in enumerate(mean):
            m, v = self.moments[state][row]
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            self.moments[state][row] = m, v
            m, v = m / (1 - 0.9**step), v / (1 - 0.999**step)
            self.weight[row] -= LR * m / (math.sqrt(v) + 1e-8)


def expected(number: int, steps: int, windows: Mapping[int, int]) -> list[list[float]]:
    """A column that is never selected, after each step.

    Args:
        number: of the column.
        steps: how many.
        windows: of each its last step, and the interval that its gradients are divided by.
    """
    adam, seen, begin = Adam(), [], 0
    for step in range(1, steps + 1):
        if step in windows:
            adam.update(step, mean(number, begin, step, windows[step]))
            begin = step
        seen.append(list(adam.weight))
    return seen


def expected_overlapped(
    number: int, steps: int, windows: Mapping[int, int], warm_up: int, drained: Sequence[int]
) -> list[list[float]]:
    """The same where an update shows when the next window ends, or in the step after one of `drained`."""
    adam, seen, begin, visible = Adam(), [], 0, [1.0] * ROWS
    for step in range(1, steps + 1):
        index = step - 1
        if index in drained:
            visible = list(adam.weight)
        if step in windows:
            visible = list(adam.weight)
            of_two = index if index < warm_up else index // windows[step]
            adam.update(step, mean(number, begin, step, windows[step]), of_two & 1)
            begin = step
            if index < warm_up:
                visible = list(adam.weight)
        seen.append(visible)
    return seen


def mean(number: int, begin: int, end: int, interval: int) -> list[float]:
    """A window's gradients of a column, added and divided; in the warm-up windows are shorter than the interval."""
    rows = [gradient(step)[:, number].tolist() for step in range(begin + 1, end + 1)]
    return [sum(row) / interval for row in zip(*rows, strict=True)]


def column(found: Found, number: int) -> list[Any]:
    return [[row[number] for row in matrix] for matrix in found["matrix"]]


def agree(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> None:
    for step, (a, b) in enumerate(zip(one, other, strict=True), start=1):
        assert a == pytest.approx(b, abs=2e-6), f"step {step}"


def ends(*spans: tuple[int, int, int]) -> dict[int, int]:
    """Windows' ends: from, to, interval of each span."""
    return {end: interval for first, last, interval in spans for end in range(first + interval, last + 1, interval)}


WINDOWS = {
    "plain": ends((0, 8, 2)),
    "longer": ends((0, 4, 2), (4, 16, 4)),
    "longer, stage 1": ends((0, 4, 2), (4, 16, 4)),
    "shorter": ends((0, 4, 4), (4, 14, 1)),
    "from one": ends((0, 4, 1), (4, 13, 4)),
    "more": ends((0, 12, 2)),
    "more, stage 1": ends((0, 12, 2)),
    "more, offload": ends((0, 12, 2)),
    "fewer": ends((0, 12, 2)),
    "all": ends((0, 8, 2), (8, 20, 4)),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_deferred_columns_get_each_windows_mean(found: dict[str, Found], name: str) -> None:
    """Nothing is lost, applied twice, or divided by another window's interval."""
    of, case = found[name], CASES[name]
    windows = {end: interval for end, interval in WINDOWS[name].items() if end <= case["steps"]}
    for number in (5, 7):
        agree(column(of, number), expected(number, case["steps"], windows))
    assert of["updates"] == sorted(windows)


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("longer", [4]),
        ("shorter", [4]),
        ("from one", [4]),
        ("more", [4]),
        ("fewer", [4]),
        ("oftener", [4]),
        ("all", [8, 8]),
        ("in the warm-up", [5]),
        ("overlapped", [6, 10]),
    ],
)
def test_it_says_when_they_hold(found: dict[str, Found], name: str, holds: list[int]) -> None:
    assert found[name]["holds"] == holds


@pytest.mark.parametrize("name", ["more", "more, stage 1", "more, offload", "more, bf16", "all", "overlapped"])
def test_another_share_is_selected_at_once(found: dict[str, Found], name: str) -> None:
    """The first step of what is newly selected is Adam's first: the learning rate, against the gradient's sign."""
    of = found[name]
    holds = of["holds"][-1]
    assert [len(selected) for selected in of["selected"][holds - 1 : holds + 2]] == [2, 4, 4]
    assert of["selected"][holds] == [0, 1, 2, 3]
    assert of["selected"][-1] == [0, 1, 2, 3]
    near = 2**-7 if name.endswith("bf16") else 1e-5
    for number in range(2 if name == "overlapped" else 4):  # of the others an update shows that was under way
        before, after = column(of, number)[holds - 1 : holds + 1]
        assert [a - b for a, b in zip(after, before, strict=True)] == pytest.approx([-LR] * ROWS, abs=near)
    assert all(math.isfinite(weight) for matrix in of["matrix"] for row in matrix for weight in row)
    assert of["config"]["topk_ratio"] == 0.5


def test_ranks_change_together(tmp_path: Path) -> None:
    """Each selects of its own part; what they do not agree on is refused on both."""
    disagreed = {"refused": [[{"topk_ratio": 0.5}, {"topk_ratio": 0.25}]]}
    cases = {"more": {"zenflow": SEQUENTIAL, "steps": 8, "changes": MORE, **disagreed}}
    one, other = (found["more"] for found in launch(tmp_path, cases, ranks=2))
    assert one["matrix"] == other["matrix"]
    assert one["selected"] == other["selected"]
    assert [len(selected) for selected in one["selected"]] == [2] * 4 + [3] * 4
    assert one["holds"] == other["holds"] == [4]
    assert "allowed are the same on all of them" in one["refused"][0]
    assert one["refused"] == other["refused"]


def test_fewer_are_selected_and_the_others_go_on_on_the_host(found: dict[str, Found]) -> None:
    of = found["fewer"]
    assert [len(selected) for selected in of["selected"]] == [4] * 4 + [2] * 8
    for number in (2, 3):  # still after the odd steps, where only what is selected moves
        steps = column(of, number)
        assert [steps[at] == steps[at - 1] for at in range(5, 12)] == [False, True] * 3 + [False]


def test_another_interval_of_selection(found: dict[str, Found]) -> None:
    """Importance turns after step 5; the next selection is after step 8 instead of 32."""
    of = found["oftener"]
    assert of["selected"] == [[0, 1]] * 8 + [[6, 7]] * 8
    assert turned(6)[0].argmax() == 7


def test_a_change_waits_for_the_warm_up(found: dict[str, Found]) -> None:
    of = found["in the warm-up"]
    assert of["updates"] == [1, 2, 3, 4, 5, 9, 13]
    assert [len(selected or []) for selected in of["selected"]] == [0] * 5 + [2] * 9


def test_an_update_under_way_is_waited_for(found: dict[str, Found]) -> None:
    """Then it shows at once, and the new selection, which reads the weights, loses nothing."""
    windows = {1: 2, 2: 2, 4: 2, 6: 2, 10: 4, 14: 4, 18: 4}
    for number in (5, 7):
        agree(column(found["overlapped"], number), expected_overlapped(number, 18, windows, 2, drained=(6, 10)))
    assert found["overlapped"]["updates"] == sorted(windows)


def test_what_is_not_safe_is_a_sentence(found: dict[str, Found]) -> None:
    sentences = found["refused"]["refused"]
    words = [
        "deepspeed is 0.19.8, allowed is 0.19.6",
        "ratio is 0.5, allowed are changes of topk_ratio, update_interval, select_interval: this needs a restart",
        "full_warm_up_rounds is 4",
        "overlap_step is True",
        "pt_reserved_cores_perc is 0.2",
        "topk_ratio is 1.5, allowed is a number from 0 to 1",
        "update_interval is 0, allowed is an integer >= 1",
        "select_interval is 32, allowed is a multiple of update_interval, which is 3",
        "select_interval is 5, allowed is a multiple of update_interval, which is 2",
        "set_gradient_accumulation_boundary() was called",
        "the engine is between backward() and step()",
    ]
    assert len(sentences) == len(words)
    for sentence, word in zip(sentences, words, strict=True):
        assert word in sentence
    for sentence in sentences[1:5]:
        assert "needs a restart" in sentence
    assert found["refused"]["selected"] == [[0, 1]] * 2
    assert "full_warm_up_rounds is 0, allowed is at least 1" in found["no warm-up"]["refused"][0]
