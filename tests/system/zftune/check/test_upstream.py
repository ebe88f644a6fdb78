"""What the rules say is true of the installed DeepSpeed, and the safe values mend it."""

from __future__ import annotations

from importlib import metadata
from itertools import pairwise

import pytest

from tests.support import fork_server
from tests.support.tiers import fast
from tests.support.zftune.check.cases import CASES, INTERVALS, SAFE, Bad
from tests.support.zftune.check.fixtures import PUT, TRAINED, Outcomes
from zftune.integrations.deepspeed.check.rules import RULES

# Not proven here, and why.
NOT_TRIED = {
    "not-json": "about the text, test_reading.py",
    "select-interval-zero": "about the backend zenflow, test_rules.py",
    "warm-up-negative": "about the backend zenflow, test_rules.py",
    "own-offload": "a note",
    "offload-param-stage": "a note",
    "offload-param-topk": "a note, about the backend zenflow",
    "nvme-op": "a note, about libaio",
    "nvme-path": "about Accelerate, test_accelerate.py",
    "zenflow-guard": "a note, test_spawning.py",
    "never-selects-again": "a note",
    "selects-rarely": "a note",
    "ratio-second-optimizer": "a note",
    "not-pinned": "costs time only",
    "no-overlap": "costs time only",
    "client-optimizer": "a note",
    "zenflow-checkpoints": "a note, study 002",
    "zenflow-model": "a note, study 002",
    "zenflow-mean": "a note, study 002",
    "zenflow-overlap": "a note, study 002",
    "zenflow-selection": "a note, test_zenflow_selects_other_columns_behind_a_bias",
    "zenflow-ranks": "a note, test_upstream_ranks.py",
    "loss-scale-doubles": "a note, test_gradients_are_halved_where_the_loss_scale_doubles",
}

# Which crash where there is a GPU, several ranks or Accelerate; NaN does not raise.
NOT_HERE = {"offload-stage-0", "nvme-folder", "not-a-number", "zftune-section", "zftune-auto", "zftune-misplaced"}

RAISING = [case for case in CASES if case.proof in ("parse", "train", "accelerate")]


def case_of(rule: str, number: int = 0) -> Bad:
    return [case for case in CASES if case.rule == rule][number]


@pytest.mark.smoke
def test_every_rule_has_a_case_or_a_reason_for_none() -> None:
    names = {rule.name for rule in RULES}
    cases = {case.rule for case in CASES}
    assert names == (cases & names) | set(NOT_TRIED)
    assert len(names) > 50


@pytest.mark.smoke
@pytest.mark.parametrize("name", PUT)
def test_check_agrees_with_initialize(upstream: Outcomes, name: str) -> None:
    """What is found to crash raises where the engine is made, or in the first steps; nothing else raises there."""
    result = upstream.of(f"put {name}")
    if set(result["crashes"]) & NOT_HERE:
        return
    raised = result["made"]["raised"] or (result["trained"] or {}).get("raised")
    assert bool(result["crashes"]) == bool(raised), result


@pytest.mark.smoke
def test_the_installed_version_is_the_one_that_is_known() -> None:
    assert metadata.version("deepspeed") in ("0.19.6", "0.19.7", "0.19.8")


@pytest.mark.parametrize("case", RAISING, ids=str)
def test_it_raises(upstream: Outcomes, case: Bad) -> None:
    expected = case.error or "ValueError"
    assert upstream.bad(case)["raised"] == expected, upstream.bad(case)["message"]


@pytest.mark.parametrize("case", [case for case in RAISING if case.mended], ids=str)
def test_what_is_mended_does_not(upstream: Outcomes, case: Bad) -> None:
    assert upstream.mended(case)["raised"] is None, upstream.mended(case)["message"]


@pytest.mark.parametrize("name", sorted(path.stem for path in SAFE.glob("*.json")))
def test_safe_ds_configs_are_read(upstream: Outcomes, name: str) -> None:
    assert upstream.of(f"parsed {name}")["raised"] is None


@pytest.mark.parametrize("name", TRAINED)
def test_safe_ds_configs_train(upstream: Outcomes, name: str) -> None:
    result = upstream.of(f"safe {name}")
    assert result["raised"] is None, result["message"]
    assert result["finite"]


SCHEDULES = """
import sys, torch
from deepspeed.runtime.lr_schedules import WarmupCosineLR, WarmupDecayLR

for kind in (WarmupDecayLR, WarmupCosineLR):
    for total in (2, 99):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        schedule = kind(optimizer, total_num_steps=total, warmup_num_steps=3)
        for _ in range(5):
            schedule.step()
        print(f"rate {optimizer.param_groups[0]['lr']:g}")
"""


def test_a_schedule_that_ends_within_its_warm_up_leaves_no_learning_rate() -> None:
    said = fork_server.run(["-c", SCHEDULES], check=True).stdout
    rates = [float(line.split()[1]) for line in said.splitlines() if line.startswith("rate ")]
    assert rates[0] == 0 < rates[1]
    assert rates[2] == 1e-4 < rates[3]  # the floor of what the rate was


@pytest.mark.parametrize("case", [case for case in INTERVALS if case.rule == "update-interval-auto"], ids=str)
def test_update_interval_auto_is_nan(upstream: Outcomes, case: Bad) -> None:
    assert not upstream.bad(case)["finite"]
    assert upstream.mended(case)["finite"]


def test_nan_trains_to_nan(upstream: Outcomes) -> None:
    assert not upstream.bad(case_of("not-a-number")).get("finite", False)


def test_the_word_auto_is_dropped(upstream: Outcomes) -> None:
    assert upstream.bad(case_of("topk-auto"))["topk_ratio"] == 0.1


def test_an_optimizer_of_another_kind_is_adamw_for_selected_columns(upstream: Outcomes) -> None:
    result = upstream.bad(case_of("zenflow-not-adam"))
    # DeepSpeed asks first whether the optimizer is meant, zero_allow_untested_optimizer
    assert result["raised"] == "AssertionError" or "AdamW" in result["selected_is"]


def test_there_has_to_be_an_optimizer(upstream: Outcomes) -> None:
    assert upstream.bad(case_of("zenflow-client-optimizer"))["raised"] is not None


def test_zenflow_at_stage_3_names_cuda(upstream: Outcomes) -> None:
    assert upstream.bad(case_of("zenflow-stage-3"))["raised"] is not None


def test_weight_decay_has_two_defaults(upstream: Outcomes) -> None:
    case = case_of("weight-decay-default")
    assert (upstream.bad(case)["selected_decay"], upstream.bad(case)["decay"]) == (0.01, 0)
    assert (upstream.mended(case)["selected_decay"], upstream.mended(case)["decay"]) == (0, 0)


def test_clipping_is_on_by_default(upstream: Outcomes) -> None:
    case = case_of("zenflow-clipping", 1)
    assert upstream.bad(case)["clipping"] == 1.0
    assert upstream.mended(case)["clipping"] == 0


@pytest.mark.parametrize("number", [0, 1])
def test_accumulation_is_overwritten(upstream: Outcomes, number: int) -> None:
    case = case_of("zenflow-accumulation", number)
    assert upstream.bad(case)["accumulation"] == 4
    assert upstream.mended(case)["raised"] is None


def test_selected_columns_have_state_in_bf16(upstream: Outcomes) -> None:
    assert upstream.bad(case_of("zenflow-bf16"))["selected_dtypes"] == ["torch.bfloat16"]


def test_a_ratio_splits_whole_sub_groups(upstream: Outcomes) -> None:
    assert upstream.bad(case_of("ratio-inert"))["splits"] == 1


def test_no_scheduler_reaches_the_share_on_the_gpu(upstream: Outcomes) -> None:
    case = case_of("ratio-scheduler")
    assert upstream.bad(case)["second_lr"] != upstream.bad(case)["lr"]
    assert upstream.mended(case)["second_lr"] is None


def test_nvme_below_stage_3_is_memory(upstream: Outcomes) -> None:
    assert upstream.bad(case_of("nvme-stage"))["masters_on"] == ["cpu"]


@pytest.mark.parametrize("case", [case for case in CASES if case.proof == "moves"], ids=str)
def test_without_zero_gradients_are_unscaled_and_the_loss_is_not_scaled(upstream: Outcomes, case: Bad) -> None:
    bad, mended = upstream.bad(case), upstream.mended(case)
    assert bad["raised"] is None, bad["message"]
    assert bad["scales"][0] > 1
    assert bad["moves"][0] == pytest.approx(0.25 / bad["scales"][0], rel=0.01)
    assert mended["raised"] is None, mended["message"]
    assert mended["moves"][0] == pytest.approx(0.25, rel=0.01)


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_are_halved_where_the_loss_scale_doubles(upstream: Outcomes, stage: int) -> None:
    result = upstream.of(f"doubling {stage}")
    assert result["raised"] is None, result["message"]
    doubled = [before != after for before, after in pairwise(result["scales"])]
    assert any(doubled)
    for moved, at_doubling in zip(result["moves"], doubled, strict=False):
        assert moved == pytest.approx(0.125 if at_doubling else 0.25, rel=0.01)


@pytest.mark.parametrize("stage", fast([2], all_of=[1, 2]))
def test_zenflow_selects_other_columns_behind_a_bias(upstream: Outcomes, stage: int) -> None:
    result = upstream.of(f"selection {stage}")
    assert result["raised"] is None, result["message"]
    assert result["matrices"]["selected"] == result["matrices"]["largest"]
    assert result["biases"]["selected"] != result["biases"]["largest"]
