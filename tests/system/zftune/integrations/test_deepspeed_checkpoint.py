"""Checkpoints of the backend zenflow, by DeepSpeed's engine: a resumed run is the uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.once import once
from tests.support.tiers import fast
from tests.support.zftune.integrations.ds_running import ADAMW, ZENFLOW, ds_config, run_cases
from tests.support.zftune.integrations.ds_worker import make_model
from zenflow import ZenFlowConfig
from zftune.exactness import keep_exact
from zftune.integrations.deepspeed import optimizers
from zftune.integrations.deepspeed.engine_optimizer import EngineOptimizer

STEPS, SAVED_AFTER = 13, 6  # in the middle of a window
SCALED = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 4, "hysteresis": 1}
ALL: dict[str, dict[str, Any]] = {
    "exact fp32": {"config": ds_config("fp32"), "optimizer": "instance", "scheduler": "instance"},
    "late bf16": {"config": ds_config("bf16", zenflow=ZENFLOW), "model": "late", "optimizer": "instance"},
    "scaled fp16": {"config": {**ds_config("fp16", zenflow=ZENFLOW, optimizer=ADAMW), "fp16": SCALED}},
    "twin": {
        "config": ds_config("bf16", optimizer=ADAMW, zero_optimization={
            "stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5}, "zenflow": ZENFLOW,
        }),
        "model": "odd",
    },
    "zenflow bf16": {"config": ds_config("bf16", zenflow=ZENFLOW, optimizer=ADAMW), "scheduler": "callable"},
}  # fmt: skip
CONFIGS = fast({name: ALL[name] for name in ("scaled fp16", "zenflow bf16")}, all_of=ALL)
"""The last one is killed."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = {name: {**case, "ours": True, "steps": STEPS} for name, case in CONFIGS.items()}
    return once(tmp_path_factory, "whole", lambda folder: run_cases(folder, cases)[0])


@pytest.fixture(scope="module")
def resumption(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Each run, saved, its process killed, and gone on with in another one: the files, and what was seen."""
    return once(tmp_path_factory, "resumed", save_and_go_on)


def save_and_go_on(folder: Path) -> tuple[Path, dict[str, Any]]:
    saving = {
        name: {
            **case,
            "ours": True,
            "steps": STEPS,
            "save": str(folder / name),
            "save_after": SAVED_AFTER,
            "die": name == list(CONFIGS)[-1],
        }
        for name, case in CONFIGS.items()
    }
    run_cases(folder / "first", saving, status=-9)
    going_on = {
        name: {**case, "ours": True, "steps": STEPS - SAVED_AFTER, "load": str(folder / name)}
        for name, case in CONFIGS.items()
    }
    short = {"short": {**CONFIGS["zenflow bf16"], "ours": True, "steps": SAVED_AFTER}}
    return folder, run_cases(folder / "second", {**going_on, **short})[0]


@pytest.fixture(scope="module")
def resumed(resumption: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    return resumption[1]


@pytest.mark.smoke
@pytest.mark.parametrize("name", CONFIGS)
def test_a_killed_run_goes_on_bitwise(whole: dict[str, Any], resumed: dict[str, Any], name: str) -> None:
    uninterrupted, second = whole[name], resumed[name]
    assert "error" not in uninterrupted, uninterrupted["error"]
    assert "error" not in second, second["error"]
    assert second["losses"] == uninterrupted["losses"][SAVED_AFTER:]
    assert second["lrs"] == uninterrupted["lrs"][SAVED_AFTER:]
    assert second["scales"] == uninterrupted["scales"][SAVED_AFTER:]
    for weights in ("weights", "flushed"):
        for key, value in uninterrupted[weights].items():
            assert torch.equal(second[weights][key], value), (weights, key)
    assert second["client_state"]["mine"] == 7


def test_the_scaled_run_had_overflows_before_and_after(whole: dict[str, Any]) -> None:
    scales = whole["scaled fp16"]["scales"]
    assert len(set(scales[:SAVED_AFTER])) > 1
    assert len(set(scales[SAVED_AFTER:])) > 1


@pytest.mark.smoke
def test_the_saved_weights_lack_no_update(resumption: tuple[Path, dict[str, Any]]) -> None:
    """They are those of a run that ends there, and load into a plain model."""
    folder, seen = resumption
    tag = (folder / "zenflow bf16" / "latest").read_text()
    file = folder / "zenflow bf16" / tag / "mp_rank_00_model_states.pt"
    saved = torch.load(file, weights_only=False)  # DeepSpeed's files hold more than tensors
    make_model("plain").to(torch.bfloat16).load_state_dict(saved["module"])
    assert any(not torch.equal(seen["short"]["weights"][key], value) for key, value in seen["short"]["flushed"].items())
    for key, value in seen["short"]["flushed"].items():
        assert torch.equal(saved["module"][key], value), key


def test_a_checkpoint_of_zero_is_refused_with_what_to_do(tmp_path: Path) -> None:
    zero = ds_config("bf16", optimizer=ADAMW)
    zero["zero_optimization"] = {"stage": 2}
    saving = {"config": zero, "save": str(tmp_path / "zero"), "save_after": 2, "steps": 2}
    loading = {"config": ds_config("bf16", optimizer=ADAMW), "ours": True, "load": str(tmp_path / "zero")}
    seen = run_cases(tmp_path / "of zero", {"saved": saving, "loaded": loading})[0]
    assert "error" not in seen["saved"], seen["saved"]
    assert seen["loaded"]["error"] == (
        "BadInputError: the checkpoint is of ZeRO, and the backend zenflow loads its own: `zftune checkpoint import` "
        "makes one"
    )


@pytest.mark.smoke
def test_a_group_that_joins_has_the_models_names() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    model[0].requires_grad_(False)
    recipe = optimizers.from_config(ds_config(optimizer=ADAMW))
    assert recipe is not None
    optimizer = EngineOptimizer(list(model.parameters()), recipe, ZenFlowConfig(), model, None)
    thawed = list(model[0].requires_grad_(True).parameters())
    optimizer.add_param_group({"params": [("called otherwise", thawed[0]), ("here", thawed[1])], "lr": 0.5})
    optimizer.add_param_group({"params": nn.Parameter(torch.ones(2))})
    named = [group["param_names"] for group in optimizer.state_dict()["param_groups"]]
    assert named == [["1.weight", "1.bias"], ["0.weight", "0.bias"], ["2.0"]]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.5, 1e-3]
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": thawed[:1]})
    optimizer.close()


class _Scaler:
    """What is used of DeepSpeed's, which takes seconds to import; those of whole runs are real."""

    cur_scale = 8.0

    def __init__(self) -> None:
        self.overflows: list[bool] = []

    def update_scale(self, overflow: bool) -> None:
        self.overflows.append(overflow)


@pytest.mark.smoke
def test_the_loss_scale_is_made_where_the_gradients_are() -> None:
    model = nn.Linear(8, 8).half()
    recipe = optimizers.from_config(ds_config(optimizer=ADAMW))
    assert recipe is not None
    scaler = _Scaler()
    optimizer = EngineOptimizer(list(model.parameters()), recipe, ZenFlowConfig(skip_nonfinite=True), model, scaler)
    for _ in range(3):
        (8.0 * model(torch.ones(2, 8).half()).float().square().mean()).backward()
        with torch.device("meta"):  # where a number without a device of its own would be, to be copied from there
            optimizer.step()
        optimizer.zero_grad()
    assert scaler.overflows == [False] * 3
    optimizer.close()


@pytest.mark.smoke
@pytest.mark.parametrize("waits", [False, True])
def test_late_settings_of_a_checkpoint_end_where_nothing_may_be_late(
    caplog: pytest.LogCaptureFixture, waits: bool
) -> None:
    """They were set by a search: whoever saved and whoever loads has made the optimizer alike."""
    recipe = optimizers.from_config(ds_config(optimizer=ADAMW))
    assert recipe is not None
    exact = ZenFlowConfig(topk_ratio=0.25, update_interval=1, overlap_step=False)

    def made() -> tuple[nn.Linear, EngineOptimizer]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        return model, EngineOptimizer(list(model.parameters()), recipe, exact, model, None)

    def train(model: nn.Linear, optimizer: EngineOptimizer, steps: int) -> None:
        for _ in range(steps):
            model(torch.randn(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, saving = made()
    saving.set_knobs(update_interval=4, overlap_step=True)
    train(model, saving, 6)
    state, weights = saving.state_dict(), {name: one.clone() for name, one in model.state_dict().items()}
    saving.close()
    again, going_on = made()
    if waits:
        assert not keep_exact(going_on)
    again.load_state_dict(weights)
    going_on.load_state_dict(state)
    train(again, going_on, 5)  # the first closes the window that was saved, whose updates the second may show
    found = (going_on.config.update_interval, going_on.config.overlap_step)
    told = [one for one in caplog.messages if "late after what was loaded (update_interval 4, overlap_step True" in one]
    assert (found, len(told)) == (((1, False), 1) if waits else ((4, True), 0))
    late = [one.staleness_max_steps or 0 for one in going_on.history(wait=True)[-3:]]
    assert any(late) is not waits
    going_on.close()
