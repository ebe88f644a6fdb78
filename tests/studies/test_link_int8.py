"""Study 025: codes and their errors by hand, the runtime behind a coded link, and the planner's rates with one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.studies.test_studies import load
from zenflow import ZenFlowConfig
from zenflow.deferred import DeferredTier
from zftune.planner.model import Job, Machine, ModelFacts
from zftune.planner.rates import Rates

STUDIES = Path(__file__).parents[2] / "studies"


@pytest.fixture(scope="module")
def study() -> Any:
    before = list(sys.path)
    try:
        run = load(STUDIES / "025-link-int8" / "run.py")
        parts = ("coding", "numerics", "planning", "report", "trainings")
        yield SimpleNamespace(run=run, **{part: importlib.import_module(f"linkint8.{part}") for part in parts})
    finally:
        sys.path[:] = before


@pytest.fixture(scope="module")
def world(study: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return study.run.World(study.run.QUICK, study.run.texts(), tmp_path_factory.mktemp("pretrained"))


def test_codes_of_a_column_by_hand(study: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    column = torch.tensor([[127.0, 0.4, -0.6, 0.0, 3.0]])
    code = study.coding.Code(block=4)
    arrived, quantum = code.coded(column, generator)
    # The scale of four is 1, that of the short block 3 / 127 = 0.0236 rounded up to a power of two.
    assert arrived.tolist() == [[127.0, 0.0, -1.0, 0.0, 3.0]]
    assert quantum.tolist() == [[1.0, 1.0, 1.0, 1.0, 2.0**-5]]
    fine = study.coding.Code(block=5, power=False).coded(2 * column, generator)[1]
    assert fine.tolist() == [[2.0] * 5]
    floating, _ = study.coding.Code(block=5, element="e4m3").coded(column, generator)
    assert floating.tolist() == [[128.0, 0.40625, -0.625, 0.0, 3.0]]
    assert (code.bytes_of(5), study.coding.FINE.bytes_of(65)) == (5 + 2, 65 + 4)
    zeros, _ = code.coded(torch.zeros(2, 3), generator)
    assert not zeros.any()


def test_stochastic_rounding_is_right_on_average(study: Any) -> None:
    column = torch.full((1, 40_000), 0.25)
    column[0, 0] = 127.0
    code = study.coding.Code(block=40_000, rounding="stochastic")
    arrived, _ = code.coded(column, torch.Generator().manual_seed(0))
    assert set(arrived.unique().tolist()) == {0.0, 1.0, 127.0}
    assert arrived[0, 1:].mean() == pytest.approx(0.25, abs=0.01)


def test_feedback_loses_nothing_but_what_is_left(study: Any) -> None:
    link = study.numerics.Link(study.coding.Code(block=16, feedback=True), torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    steps = [torch.randn(6, 40).bfloat16() for _ in range(5)]
    columns = torch.tensor([0, 2, 5])
    arrived = torch.stack([link.send("w", columns, step).float() for step in steps]).sum(0)
    produced = torch.stack([step[columns].float() for step in steps]).sum(0)
    assert torch.allclose(arrived + link.left["w"][columns], produced, atol=1e-5)
    assert not torch.allclose(arrived, produced, atol=1e-3)
    assert not link.left["w"][[1, 3, 4]].any()


def test_a_small_entry_beside_a_large_one(study: Any) -> None:
    """AdamW should move both as far. An entry of a hundredth of a quantum never moves, or a tenth as far in pulses."""
    gradients, steps = torch.tensor([[127.0, 0.01]]), 400
    ways = {}
    for code in (None, *study.coding.FEW):
        moments = study.numerics.Moments.of(code, gradients)
        for number in range(1, steps + 1):
            moments.step(gradients, number)
        ways[code] = (moments.way / steps).flatten().tolist()
    true, feedback, nearest, float8 = ways.values()
    assert true == pytest.approx([1, 1], rel=0.01)
    assert nearest[1] == 0
    # The second moment is 1 in a hundred steps instead of 1e-4: ten times the root.
    assert feedback[1] == pytest.approx(0.1, rel=0.3)
    assert float8[1] == pytest.approx(1, rel=0.05)
    assert {nearest[0], feedback[0]} == {true[0]}


def test_the_runtime_trains_on_what_arrives(study: Any, world: Any) -> None:
    coding, numerics = study.coding, study.numerics
    send, losses = DeferredTier.send, []
    for code in (None, coding.Code(block=256, feedback=True)):
        setting = numerics.published("from scratch", 1e-2, 0, code)
        losses.append(numerics.run(world, setting, code)["held_out"])
    assert DeferredTier.send is send
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02)


def test_what_is_wanted_is_told_apart(study: Any) -> None:
    keys = [setting.key for setting, _ in study.trainings.wanted()]
    assert len(keys) == len(set(keys))
    assert len({code.name for _, code in study.trainings.wanted() if code}) == 3 * 2 * 2 + 2


def test_rates_of_two_bytes_are_the_planners_and_of_one_are_less(study: Any) -> None:
    model, machine = ModelFacts.from_name("tiny"), Machine.load("a100-80-pcie")
    plain = Rates.of(model, machine, Job(seq=2048))
    same, one = (study.planning.CodedRates.over(plain, nbytes, 0) for nbytes in (2, 1))
    for way in ("down_ms", "pack_ms", "up_ms"):
        assert getattr(same, way)(1e6) == getattr(plain, way)(1e6)
    assert same.host_ms(1e6, 4) == pytest.approx(plain.host_ms(1e6, 4))
    assert one.down_ms(1e6) == plain.down_ms(1e6) / 2
    # 24 bytes of state, 2 of the weight and 2 as it is sent, 4 entries that come and are read.
    assert one.host_ms(1e6, 4) / plain.host_ms(1e6, 4) == pytest.approx((28 + 8) / (28 + 16))
    residual = study.planning.CodedRates.over(plain, 1, 2)
    assert residual.pack_ms(1e6) / plain.pack_ms(1e6) == pytest.approx((2 + 1 + 4) / 4)


def test_link_bytes_by_hand(study: Any) -> None:
    model = ModelFacts.from_name("tiny")
    config = ZenFlowConfig(topk_ratio=0.1, update_interval=4)
    plain = study.planning.link_bytes(model, config, None)
    share = plain / 1.25
    assert 0.85 < share < 0.91
    coded = study.planning.link_bytes(model, config, study.coding.Code(block=64))
    assert coded == pytest.approx(share * ((1 + 1 / 64) / 2 + 0.25), rel=1e-3)  # blocks at a column's end are short


def test_gain_is_over_the_better_of_late_and_none(study: Any) -> None:
    ways = {"bf16": {"steps_ms": {"1": 300, "4": 120, "8": 50}}, "coded": {"steps_ms": {"1": 300, "4": 100}}}
    assert study.report.gain_of({"ways": ways, "no_offload_ms": None}) == 1.2
    assert study.report.gain_of({"ways": ways, "no_offload_ms": 80}) == 1
