"""The backend zenflow with quality exact: the same training as ZeRO's without offloading, under a real engine."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.support.once import once
from tests.support.tiers import fast
from tests.support.zftune.integrations.ds_running import ADAMW, ds_config, run_cases
from tests.support.zftune.integrations.ds_worker import make_model

PRECISIONS = ("fp32", "bf16", "fp16")
STEPS = fast({"fp32": 20, "bf16": 10, "fp16": 10}, all_of={"fp32": 50, "bf16": 20, "fp16": 20})
RTOL = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
OPTIMIZERS = {
    "json": {"scheduler": "callable"},
    "instance": {"scheduler": "instance"},
    "callable": {"scheduler": "callable"},
}
EXACT = list(itertools.product(PRECISIONS, OPTIMIZERS))
OVERFLOWS = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 3, "hysteresis": 1}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-3, "warmup_type": "linear"}}


def _pair(config: dict[str, Any], **case: Any) -> dict[str, Any]:
    """The same training by us and by ZeRO without offloading: at stage 0, which in fp16 forgets to scale the loss."""
    stage = 2 if "fp16" in config or case.get("backward") else 0
    plain = {**config, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    return {"ours": {**case, "config": config, "ours": True}, "zero": {**case, "config": plain}}


def _cases() -> dict[str, Any]:
    pairs: dict[str, dict[str, Any]] = {}
    for precision, kind in EXACT:
        config = ds_config(precision) | ({"optimizer": ADAMW} if kind == "json" else {})
        pairs[f"{precision} {kind}"] = _pair(config, optimizer=kind, steps=STEPS[precision], **OPTIMIZERS[kind])
    pairs["warmup"] = _pair(ds_config(optimizer=ADAMW, scheduler=WARMUP), steps=8)
    pairs["stage 1"] = _pair(ds_config(stage=1, optimizer=ADAMW), steps=6)
    old = {**ds_config(optimizer=ADAMW), "zero_optimization": {"stage": 2, "cpu_offload": True}}
    pairs["cpu_offload"] = _pair(old, steps=4)
    pairs["accumulation"] = _pair(ds_config(optimizer=ADAMW, gradient_accumulation_steps=3), passes=3, steps=6)
    pairs["no clipping"] = _pair(ds_config(optimizer=ADAMW, gradient_clipping=0.0), steps=6)
    pairs["overflow"] = _pair({**ds_config("fp16", optimizer=ADAMW), "fp16": OVERFLOWS}, steps=20, scheduler="callable")
    pairs["static"] = _pair(
        {**ds_config("fp16", optimizer=ADAMW), "fp16": {"enabled": True, "loss_scale": 64}}, steps=6
    )
    pairs["groups"] = _pair(ds_config(optimizer=ADAMW), optimizer="groups", steps=6)
    for name in ("Adam", "SGD", "Adagrad"):
        pairs[name] = _pair(ds_config(), optimizer=name, steps=8)
    for form in ("path", "base64", "args"):
        pairs[form] = _pair(ds_config(optimizer=ADAMW), form=form, steps=4)
    for how in ("scaled", "direct"):
        pairs[f"{how} backward"] = _pair(
            ds_config("bf16", optimizer=ADAMW, gradient_accumulation_steps=2), backward=how, passes=2
        )
    pairs["scaled backward fp16"] = _pair(ds_config("fp16", optimizer=ADAMW), backward="scaled")
    pairs["twice"] = _pair(ds_config("bf16", optimizer=ADAMW), twice=True, steps=6)
    pairs["odd"] = _pair(ds_config(optimizer=ADAMW), model="odd", steps=10)
    pairs["odd bf16"] = _pair(ds_config("bf16"), model="odd", optimizer="instance", scheduler="instance", steps=10)
    return {f"{name}/{who}": case for name, pair in pairs.items() for who, case in pair.items()}


CASES = _cases()
BY_DAY = ["fp32 json", "bf16 json", "fp16 instance", "stage 1", "accumulation", "overflow", "static", "odd"]
NAMES = fast(BY_DAY, all_of=list(dict.fromkeys(name.split("/")[0] for name in CASES)))
CASES = {name: case for name, case in CASES.items() if name.split("/")[0] in NAMES}
CASES |= {f"unscaled fp16/{w}": c for w, c in _pair(ds_config("fp16", optimizer=ADAMW), backward="direct").items()}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What happened in each case."""
    return once(tmp_path_factory, "exact", lambda folder: run_cases(folder, CASES)[0])


@pytest.mark.smoke
@pytest.mark.parametrize("name", NAMES)
def test_it_trains_as_zero_without_offloading(seen: dict[str, Any], name: str) -> None:
    ours, zero = seen[f"{name}/ours"], seen[f"{name}/zero"]
    assert "error" not in ours, ours["error"]
    assert "error" not in zero, zero["error"]
    precision = next(one for one in reversed(PRECISIONS) if one == "fp32" or one in CASES[f"{name}/ours"]["config"])
    assert ours["optimizer"] == "EngineOptimizer"
    assert ours["dtypes"] == zero["dtypes"]
    assert ours["engine_dtypes"] == zero["engine_dtypes"]
    assert ours["lrs"] == zero["lrs"]
    assert ours["losses"] == pytest.approx(zero["losses"], rel=RTOL[precision])
    assert ours["losses"][-1] < ours["losses"][0]
    assert ours["skipped"] == zero["skipped"]
    assert ours["has_scheduler"] == zero["has_scheduler"]
    assert ours["warnings"] == []
    if precision == "fp32":
        # DeepSpeed gives a parameter without a gradient one of zeros, so that it decays; torch and we leave it alone.
        for key, value in zero["weights"].items() if name != "odd" else ():
            torch.testing.assert_close(ours["weights"][key], value, rtol=1e-4, atol=2e-5, msg=key)


@pytest.mark.smoke
def test_the_loss_scale_moves_as_deepspeeds_own(seen: dict[str, Any]) -> None:
    ours, zero = seen["overflow/ours"], seen["overflow/zero"]
    assert ours["skipped"] >= 3
    assert ours["scales"] == zero["scales"]
    assert seen["static/ours"]["scales"] == [64.0] * 6


def test_a_parameter_without_a_gradient_is_left_alone(seen: dict[str, Any]) -> None:
    weights, zero = (seen[f"odd/{who}"]["weights"] for who in ("ours", "zero"))
    unused = ("unused.weight", "unused.bias")
    before = make_model("odd").state_dict()
    assert all(torch.equal(weights[key], before[key]) for key in unused)
    for key in weights.keys() - set(unused):
        torch.testing.assert_close(weights[key], zero[key], rtol=1e-4, atol=2e-5, msg=key)


def test_a_loss_that_is_not_scaled_is_refused(seen: dict[str, Any]) -> None:
    for who in ("ours", "zero"):
        assert seen[f"unscaled fp16/{who}"]["error"].startswith("RuntimeError: ")
    assert "with fp16 call engine.backward(loss)" in seen["unscaled fp16/ours"]["error"]


@pytest.mark.smoke
def test_the_gradient_norm_is_that_before_clipping(seen: dict[str, Any]) -> None:
    ours, zero = seen["bf16 json/ours"], seen["bf16 json/zero"]
    assert ours["norms"] == pytest.approx(zero["norms"], rel=0.03)


@pytest.mark.smoke
@pytest.mark.parametrize("name", NAMES)
def test_destroy_leaves_neither_threads_nor_another_affinity(seen: dict[str, Any], name: str) -> None:
    assert seen[f"{name}/ours"]["affinity_kept"]
    assert seen[f"{name}/ours"]["threads"] == 0
