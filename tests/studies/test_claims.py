"""Study 024 by hand: what it counts, whom it lets win; and that its short form makes the committed figures again."""

from __future__ import annotations

import importlib
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tiers import by_day
from zftune.emulation import Rig
from zftune.planner.model import ModelFacts
from zftune.planner.rates import Rates
from zftune.tuner.space import Setting

STUDY = Path(__file__).parents[2] / "studies" / "024-claims"
# On which an element costs 1 ms on either link, and a byte 1 ms on the host.
RIG = Rig("hand", "", 20.0, 30.0, 2e-6, 2e-6, 1e-6, None, 1.0)


@pytest.fixture(scope="module")
def claims() -> Iterator[Any]:
    """Its parts; they are not importable from anywhere else."""
    before = list(sys.path)
    sys.path[:0] = [str(STUDY), str(STUDY.parent)]
    for part in ("both", "page", "rigs", "selection", "shapes", "tables", "traffic", "tuned", "twinflow", "upstream"):
        importlib.import_module(f"claims.{part}")
    yield importlib.import_module("claims")
    sys.path[:] = before


def record(name: str) -> Any:
    return json.loads((STUDY / "results" / f"{name}.json").read_text(encoding="utf-8"))["figures"]


def test_copies_count_where_one_side_lies_on_the_host(claims: Any) -> None:
    host, device, wide = torch.zeros(8, dtype=torch.float32), torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8)
    with claims.upstream.LinkBytes(lambda: [host]) as link:
        host.copy_(device)  # the device's dtype crosses, and the host casts
        host.view(2, 4)[0].copy_(wide[:4])
        device.copy_(wide)  # on the device
        host.copy_(host.clone())  # a new tensor is the device's
        assert (link.down_bytes, link.up_bytes) == (2 * 8 + 4 * 4 + 4 * 8, 0)
        device.copy_(host)
        (device[:4] * 2).add_(1)
    assert link.up_bytes == 2 * 8


def test_upstreams_step_is_of_the_bytes_that_were_counted(claims: Any) -> None:
    counted = record("upstream")
    upstream = claims.upstream
    zero, zen = counted["ZeRO-Offload"], counted["ZenFlow, overlapped"]
    assert (zero["down"], zero["up"]) == (upstream.ZERO_DOWN, upstream.ZERO_UP)
    assert (zen["down"], zen["up"]) == (upstream.ZEN_DOWN, upstream.ZEN_UP)
    # 10 elements: down 2 ms a 4 bytes each, up 1 ms, host 28; ZenFlow casts 6 bytes in one of four steps.
    found = upstream.steps_ms(Rates.of_rig(RIG), 10)
    assert found["ZeRO-Offload"] == pytest.approx(50 + 20 + 10 + 280)
    shown = 50 + 10 * (upstream.ZEN_DOWN + upstream.ZEN_UP) / 2 + 15
    assert found["ZenFlow"] == pytest.approx(shown)
    # A host that is too slow to hide 36 bytes in four steps is what a step takes.
    slow = replace(RIG, host_gbps=0.5e-6)
    assert upstream.steps_ms(Rates.of_rig(slow), 10)["ZenFlow"] == pytest.approx(max(shown + 15, 180))
    # Of two ranks each has half of it, and waits for the other.
    assert upstream.steps_ms(Rates.of_rig(RIG), 5, 7.0)["ZeRO-Offload"] == pytest.approx(50 + 7 + 155)


def test_deepspeed_keeps_whole_sub_groups(claims: Any) -> None:
    shares = {ratio: claims.twinflow.offloaded_by_sub_groups(ratio, 2) for ratio in (0.0, 0.3, 0.5, 0.7, 1.0)}
    assert shares == {0.0: 0.0, 0.3: 0.5, 0.5: 0.5, 0.7: 1.0, 1.0: 1.0}
    assert [claims.twinflow.offloaded_by_sub_groups(ratio, 1) for ratio in (0.05, 1.0)] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ({"Twin-Flow": 100.0, "ZenFlow": 100.5, "both": 99.5}, "Twin-Flow"),
        ({"Twin-Flow": 120.0, "ZenFlow": 100.5, "both": 99.6}, "ZenFlow"),
        ({"Twin-Flow": 120.0, "ZenFlow": 110.0, "both": 99.5}, "both"),
        ({"Twin-Flow": 120.0}, "Twin-Flow"),
    ],
)
def test_alone_wins_where_both_together_are_no_faster(claims: Any, steps: dict[str, float], expected: str) -> None:
    assert claims.both.winner(steps) == expected


def test_the_best_is_within_the_limit_and_the_smallest_of_equals(claims: Any) -> None:
    point = claims.both.Point
    found = [point("both", None, ms, share) for ms, share in ((90.0, 0.6), (100.0, 0.4), (100.5, 0.2), (102.0, 0.1))]
    assert claims.both.best(found, "both", 0.5).share == 0.2
    assert claims.both.best(found, "both", 1.0).share == 0.6
    assert claims.both.best(found, "ZenFlow", 1.0) is None


def test_settings_are_of_their_kind_and_within_the_quality(claims: Any) -> None:
    found = list(claims.both.settings())
    assert {kind for kind, _ in found} == {"Twin-Flow", "ZenFlow", "both"}
    for kind, config in found:
        assert config.overlap_step == (kind != "Twin-Flow")
        assert kind != "ZenFlow" or config.offload_ratio == 1
        assert kind != "both" or config.offload_ratio < 1
    longest = {config.topk_ratio: config.longest_window for kind, config in found if kind == "ZenFlow"}
    assert longest == {0.02: 2, 0.05: 3, 0.1: 4, 0.2: 4, 0.3: 6}
    # At k = 0 all of the gradient would be late, and nothing is allowed; the published setting itself is.


def test_energies_are_counted_by_hand(claims: Any) -> None:
    model = ModelFacts.from_text("1000,1,4")
    assert all(len(shape) == 2 for shape in model.weights)
    columns = sum(shape[1] for shape in model.weights)
    assert claims.selection.words(model) == 4 + len(model.weights) + columns
    assert claims.selection.cheaper(model) == pytest.approx(claims.selection.elements_a_column(model) / 2)
    for ranks in (2, 4, 8):
        counted = record(f"selection--{ranks}")
        assert counted["selection_bytes"] == counted["should_be_bytes"]


def test_five_times_is_asked_of_every_number_of_tokens(claims: Any) -> None:
    def cell(ms: float) -> dict[str, Any]:
        return {"systems": {"ZeRO-Offload": {"step_ms": 500.0}, "published": {"step_ms": ms}}}

    cells = {"128": cell(100.0), "512": cell(101.0), "2048": cell(90.0)}
    assert claims.tables.reaching(cells, "published") == [128, 2048]


def test_what_a_search_found_and_cost(claims: Any) -> None:
    knobs = {**Setting().knobs(), "topk_ratio": 0.3, "update_interval": 6, "apply_lag": 6, "select_interval": 1_000_000}
    document = {
        "decisions": [{"kind": "adopt", "at_s": 5.0}, {"kind": "adopt", "at_s": 9.5}, {"kind": "keep", "at_s": 11.0}],
        "best": {"knobs": knobs, "staleness_steps": 6.0},
        "start": {"staleness_steps": 4.0},
        "cost": {"elapsed_s": 12.0, "steps": 200, "spent_s": 2.5},
        "measurements": 7,
        "stopped": "enough",
    }
    found = claims.tuned.outcome(document)
    assert (found["adopted"], found["reached_s"], found["ended_s"], found["spent_s"]) == (2, 9.5, 12.0, 2.5)
    assert found["chosen"] == "topk_ratio 0.3, update_interval 6, apply_lag 6"
    chosen = claims.tuned.chosen_in(document)
    assert (chosen.topk_ratio, chosen.update_interval, chosen.lag) == (0.3, 6, 6)
    document["decisions"] = [{"kind": "keep", "at_s": 11.0}]
    assert claims.tuned.outcome(document)["reached_s"] == 0


def test_turns_are_of_whole_windows_and_compared_in_pairs(claims: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now, taken = [0.0], Counter[str]()

    class Training:
        def __init__(self, name: str, window: int, seconds: float) -> None:
            self.name, self.seconds = name, seconds
            self.optimizer = SimpleNamespace(config=SimpleNamespace(longest_window=window))

        def step(self) -> None:
            now[0] += self.seconds
            taken[self.name] += 1

    monkeypatch.setattr(claims.tuned.time, "perf_counter", lambda: now[0])
    trainings = {"published": Training("published", 4, 0.010), "tuned": Training("tuned", 6, 0.008)}
    pairs = claims.tuned.in_turns(trainings, random.Random(0))
    assert taken == {"published": 12 * claims.tuned.PAIRS, "tuned": 18 * claims.tuned.PAIRS}
    assert claims.tuned.compared(pairs)["ratio"] == pytest.approx(0.8)
    # A load that lies on one turn of many is no difference; one that is as often on either is in the interval.
    uneven = [{"published": 10.0, "tuned": 10.0 * (1 + (place - 50) / 100)} for place in range(101)]
    found = claims.tuned.compared(uneven)
    assert (found["ratio"], found["published_ms"]) == (pytest.approx(1.0), 10.0)
    assert found["ratio_error"] == pytest.approx(0.10)


QUICK: dict[str, Callable[[Any], Any]] = {
    "rig--llama2-7b-4xa100": lambda claims: claims.rigs.figures("llama2-7b-4xa100"),
    "shape--Qwen2.5-1.5B--gh200": lambda claims: claims.shapes.figures("Qwen2.5-1.5B", "gh200"),
    "traffic": lambda claims: claims.traffic.figures(),
}


def numbers(figures: Any) -> Iterator[tuple[str, float]]:
    if isinstance(figures, dict):
        for key, one in figures.items():
            yield from ((f"{key}.{path}", value) for path, value in numbers(one))
    elif isinstance(figures, list):
        for place, one in enumerate(figures):
            yield from ((f"{place}.{path}", value) for path, value in numbers(one))
    elif isinstance(figures, int | float):
        yield "", float(figures)


@pytest.mark.parametrize("name", by_day(["shape--Qwen2.5-1.5B--gh200"], all_of=list(QUICK)))
def test_the_committed_figures_are_made_again(claims: Any, name: str) -> None:
    threads = torch.get_num_threads()
    try:
        again = json.loads(json.dumps(QUICK[name](claims)))
    finally:
        torch.set_num_threads(threads)
    kept, made = dict(numbers(record(name))), dict(numbers(again))
    assert kept.keys() == made.keys()
    assert [path for path in kept if not math.isclose(kept[path], made[path], rel_tol=1e-6)] == []
