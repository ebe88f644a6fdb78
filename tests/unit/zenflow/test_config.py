"""`ZenFlowConfig`: what is refused and in which words, what a ds_config turns into, what "auto" stands for."""

from __future__ import annotations

import json
import math
import random
import warnings
from dataclasses import fields
from typing import Any

import pytest

import zenflow
from tests.support.seeds import fresh_seeds
from zenflow import ConfigError, ZenFlowConfig

SHARE = "a number from 0 to 1"
COUNT_OR_AUTO = 'an integer >= 1 or "auto"'
OPTIONAL_COUNT = "an integer >= 1, or none"
BAD: list[tuple[str, list[Any], str]] = [
    *((name, [-0.1, 1.01, math.nan, math.inf, "0.5", True, None], SHARE)
      for name in ("topk_ratio", "offload_ratio", "auto_ratio", "pt_reserved_cores_perc")),
    *((name, [0, -1, 4.0, "Auto", True, None], COUNT_OR_AUTO) for name in ("select_interval", "update_interval")),
    ("full_warm_up_rounds", [-1, 1.0, "auto", False, None], "an integer >= 0"),
    ("overlap_step", [0, 1, "true", None], "true or false"),
    ("skip_nonfinite", [0, "no", None], "true or false"),
    ("select_strategy", ["custom", 1, None, ["step"]], '"auto" or "step" or "epoch"'),
    ("deferred_update", ["sum", None], '"replay" or "mean"'),
    ("look_ahead", ["coasts", True, None], '"none" or "coast" or "guess"'),
    ("window_phase", ["stagger", True, None], '"together" or "staggered"'),
    ("pipeline", ["buckets", False], '"bucket" or "none"'),
    ("max_grad_norm", [0, -1.0, math.nan, math.inf, "1", True], "a number > 0, or none"),
    ("steps_per_epoch", [0, 2.5, "auto", True], OPTIONAL_COUNT),
    ("bucket_bytes", [0, -5, 1e6, None], "an integer >= 1"),
    ("staging_bytes", [0, -5, 1e6, None], "an integer >= 1"),
    ("host_threads", [0, -1, 2.0, True, 5000], "an integer from 1 to 4096, or none"),
    ("max_update_interval", [0, -5, 2.0, "auto", None], "an integer >= 1"),
    ("ledger", [0, "no", None], "true or false"),
    ("stream", [1, "yes", None], "true or false"),
    ("reduce_gradients", [1, "yes", None], "true or false"),
    ("gradient_accumulation_steps", [0, -1, 2.0, "auto", None], "an integer >= 1"),
    ("apply_lag", [0, 5, -1, 1.5, True, "auto"], "an integer from 1 to update_interval (4), or none"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "allowed"), [(field, value, allowed) for field, values, allowed in BAD for value in values]
)
def test_a_bad_value_is_named_with_what_is_allowed(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ZenFlowConfig(**{field: value})
    assert str(caught.value).partition("; did you mean")[0] == f"{field} is {value!r}; it must be {allowed}"


@pytest.mark.parametrize(
    ("field", "value", "meant"),
    [
        ("select_strategy", "epocs", "epoch"),
        ("update_interval", "atuo", "auto"),
        ("pipeline", "buket", "bucket"),
        ("deferred_update", "repaly", "replay"),
    ],
)
def test_a_misspelt_value_is_answered_with_the_near_one(field: str, value: Any, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"; did you mean {meant}$"):
        ZenFlowConfig(**{field: value})
    with pytest.raises(ConfigError, match=r'"bucket" or "none"$'):
        ZenFlowConfig(pipeline="streamed")  # type: ignore[arg-type]


def test_every_field_has_bad_values_above() -> None:
    assert {field for field, _, _ in BAD} == {field.name for field in fields(ZenFlowConfig)}


# from_ds_config


def ds(zenflow: Any = None, offload: Any = None, **top: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 2, "offload_optimizer": {"device": "cpu"} if offload is None else offload}
    if zenflow is not None:
        zero["zenflow"] = zenflow
    return {"train_batch_size": 8, "zero_optimization": zero, **top}


def test_the_documented_zenflow_section() -> None:
    section = {
        "topk_ratio": 0.05,
        "select_strategy": "auto",
        "select_interval": "auto",
        "update_interval": 4,
        "full_warm_up_rounds": 0,
        "overlap_step": True,
    }
    config = ZenFlowConfig.from_ds_config(ds(section))
    assert config == ZenFlowConfig(topk_ratio=0.05, update_interval=4, overlap_step=True, max_grad_norm=1.0)
    assert (config.offload_ratio, config.pipeline) == (1.0, "bucket")


def test_what_a_zenflow_section_omits_takes_deepspeeds_default() -> None:
    config = ZenFlowConfig.from_ds_config(ds({}))
    assert (config.topk_ratio, config.update_interval, config.select_interval) == (0.1, "auto", "auto")
    assert (config.overlap_step, config.full_warm_up_rounds, config.auto_ratio) == (False, 0, 0.99)
    assert (config.select_strategy, config.pt_reserved_cores_perc) == ("auto", 0.5)


def test_plain_zero_offload() -> None:
    config = ZenFlowConfig.from_ds_config(ds())
    assert (config.topk_ratio, config.update_interval, config.overlap_step) == (0.0, 1, False)
    assert (config.pipeline, config.offload_ratio) == ("bucket", 1.0)


def test_twin_flow_ratio() -> None:
    config = ZenFlowConfig.from_ds_config(ds(offload={"device": "cpu", "ratio": 0.3, "pin_memory": True}))
    assert config == ZenFlowConfig.zero_offload(pipeline="bucket", offload_ratio=0.3, max_grad_norm=1.0)
    assert ZenFlowConfig.from_ds_config(ds({}, {"device": "cpu", "ratio": 0.3})).offload_ratio == 0.3


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"zero_optimization": None},
        {"zero_optimization": {"stage": 2}},
        {"zero_optimization": {"offload_optimizer": None, "zenflow": {"topk_ratio": 0.2}}},
        {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
        {"zero_optimization": {"offload_optimizer": {}}},
    ],
)
def test_without_offloading_everything_is_resident(config: dict[str, Any]) -> None:
    assert ZenFlowConfig.from_ds_config(config).offload_ratio == 0.0


def test_gradient_clipping_is_deepspeeds_default_where_nothing_is_said() -> None:
    for config in (ds({}), ds(), {}):
        assert ZenFlowConfig.from_ds_config(config).max_grad_norm == 1.0


@pytest.mark.parametrize(("clipping", "norm"), [(1.0, 1.0), (0.5, 0.5), (0, None), (0.0, None), ("auto", None)])
def test_gradient_clipping(clipping: Any, norm: float | None) -> None:
    for config in (ds({}, gradient_clipping=clipping), ds(gradient_clipping=clipping), {"gradient_clipping": clipping}):
        assert ZenFlowConfig.from_ds_config(config).max_grad_norm == norm


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            ds({"topk": 0.1}),
            "zero_optimization.zenflow.topk is 0.1; it must be left out: the fields are apply_lag, auto_ratio",
        ),
        (ds({"offload_ratio": 0.1}), "zero_optimization.zenflow.offload_ratio is 0.1; it must be left out: the fields"),
        (ds({"topk_ratio": 2}), "topk_ratio is 2; it must be a number from 0 to 1"),
        (ds({"select_strategy": "custom"}), "select_strategy is 'custom'; it must be"),
        (ds([]), "zero_optimization.zenflow is []; it must be a JSON object"),
        (ds(offload="cpu"), "zero_optimization.offload_optimizer is 'cpu'; it must be a JSON object"),
        (ds(offload={"device": "nvme"}), "zero_optimization.offload_optimizer.device is 'nvme'; it must be"),
        (
            ds(offload={"device": "cpu", "ratio": 2}),
            "zero_optimization.offload_optimizer.ratio is 2; it must be a number",
        ),
        ({"zero_optimization": 2}, "zero_optimization is 2; it must be a JSON object"),
        (ds({}, gradient_clipping=-1), "gradient_clipping is -1; it must be a number > 0, or none"),
    ],
)
def test_a_bad_ds_config_is_a_sentence(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ZenFlowConfig.from_ds_config(config)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_offload_true_is_ignored_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="offload is ignored") as caught:
        config = ZenFlowConfig.from_ds_config(ds({"offload": True, "topk_ratio": 0.2}))
    assert len(caught) == 1
    assert config == ZenFlowConfig.from_ds_config(ds({"topk_ratio": 0.2}))
    with pytest.warns(UserWarning, match="offload is ignored") as caught:
        assert ZenFlowConfig(offload=True, topk_ratio=0.2) == ZenFlowConfig(topk_ratio=0.2)
    assert caught[0].filename == __file__
    assert ZenFlowConfig.from_ds_config(ds({"offload": False})).topk_ratio == 0.1  # what it already does: no warning


def test_a_path_is_refused_with_a_way_to_read_it() -> None:
    with pytest.raises(ConfigError, match=r"ds_config is 'ds_config.json'; it must be a dictionary, such as json.load"):
        ZenFlowConfig.from_ds_config("ds_config.json")  # type: ignore[arg-type]


# resolved


def test_resolved_leaves_numbers_and_auto_alone_and_says_nothing() -> None:
    for intervals in ((3, 5), ("auto", 5), (3, "auto")):
        update, select = intervals
        config = ZenFlowConfig(update_interval=update, select_interval=select, select_strategy="step", apply_lag=2)  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert config.resolved() == config


def test_the_longest_window_bounds_the_lag() -> None:
    config = ZenFlowConfig(update_interval="auto", max_update_interval=6)
    assert (config.longest_window, config.lag) == (6, 6)
    assert ZenFlowConfig(update_interval="auto", max_update_interval=6, apply_lag=6).lag == 6
    with pytest.raises(ConfigError, match=r"apply_lag is 7; it must be an integer from 1 to max_update_interval \(6\)"):
        ZenFlowConfig(update_interval="auto", max_update_interval=6, apply_lag=7)
    assert ZenFlowConfig(update_interval=3).longest_window == 3
    assert ZenFlowConfig(update_interval=3).lag == 3
    assert ZenFlowConfig(update_interval=3, apply_lag=2).lag == 2


# changed


def test_changed_replaces_live_knobs_and_checks_them() -> None:
    config = ZenFlowConfig(topk_ratio=0.1, update_interval=4, apply_lag=3)
    new = config.changed({"topk_ratio": 0.2, "update_interval": 8})
    assert (new.topk_ratio, new.update_interval, new.apply_lag) == (0.2, 8, 3)
    with pytest.raises(ConfigError, match="apply_lag is 3; it must be an integer from 1 to update_interval"):
        config.changed({"update_interval": 2})


@pytest.mark.parametrize("name", ["bucket_bytes", "full_warm_up_rounds", "steps_per_epoch", "ledger", "topk"])
def test_what_cannot_change_while_it_trains_is_a_sentence(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot be changed while it trains: topk_ratio, select_interval"):
        ZenFlowConfig().changed({name: 1})


@pytest.mark.parametrize(
    ("strategy", "interval", "per_epoch", "expected"),
    [
        ("epoch", 2, 10, 20),
        ("epoch", "auto", 10, 10),
        ("epoch", 2, None, 2),
        ("epoch", "auto", None, "auto"),
        ("step", 2, 10, 2),
        ("auto", 2, 10, 2),
        ("auto", "auto", 10, "auto"),
    ],
)
def test_epochs_become_steps(strategy: Any, interval: Any, per_epoch: int | None, expected: int) -> None:
    config = ZenFlowConfig(select_strategy=strategy, select_interval=interval, steps_per_epoch=per_epoch)
    resolved = config.resolved()
    assert (resolved.select_interval, resolved.select_strategy) == (expected, "step")
    assert resolved.resolved() == resolved


def drawn(rng: random.Random) -> ZenFlowConfig:
    """Any knobs that a ds_config has a place for."""
    update: Any = rng.choice([1, 2, 4, 7, "auto"])
    return ZenFlowConfig(
        topk_ratio=rng.choice([0.0, 0.05, 0.1, 1.0]),
        select_interval=rng.choice(["auto", 8, 31]),
        update_interval=update,
        full_warm_up_rounds=rng.choice([0, 3]),
        overlap_step=rng.random() < 0.5,
        auto_ratio=rng.choice([0.99, 0.5]),
        offload_ratio=rng.choice([1.0, 0.3]),
        max_grad_norm=rng.choice([None, 1.0, 0.3]),
        deferred_update=rng.choice(["replay", "mean"]),
        apply_lag=rng.choice([None, 1]),
        pipeline=rng.choice(["bucket", "none"]),
        skip_nonfinite=rng.random() < 0.5,
        host_threads=rng.choice([None, 3]),
        staging_bytes=rng.choice([1 << 30, 1 << 33]),
        gradient_accumulation_steps=rng.choice([1, 4]),
    )


@pytest.mark.parametrize("seed", fresh_seeds("ds_config of knobs", 1))
def test_sections_of_a_ds_config_and_python_are_read_as_the_same_knobs(seed: int) -> None:
    rng = random.Random(seed)
    plain = [ZenFlowConfig(), ZenFlowConfig.zero_offload(), ZenFlowConfig.zero_offload(pipeline="bucket")]
    for config in (*plain, *(drawn(rng) for _ in range(300))):
        assert ZenFlowConfig.from_ds_config(json.loads(json.dumps(config.to_ds_config()))) == config
        assert eval(config.to_python(), {"zenflow": zenflow}) == config
    pipelined = ZenFlowConfig.zero_offload(pipeline="bucket").to_ds_config()
    assert pipelined == {"gradient_clipping": 0.0, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert ZenFlowConfig.from_ds_config(ZenFlowConfig(offload_ratio=0.0).to_ds_config()).offload_ratio == 0
    assert ZenFlowConfig(topk_ratio=0.05).to_python() == "zenflow.ZenFlowConfig(topk_ratio=0.05)"
