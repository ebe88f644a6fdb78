"""`ZFTuneCallback`: what is saved at the end holds every update, losses reach the tuner, knobs reach the log."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="the huggingface extra is not installed")

from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

import zftune
from tests.support.tiers import fast
from tests.support.zftune.integrations.trainers import (
    EXACT,
    LATE,
    furthest,
    same,
    tiny_model,
    trained,
    trainer,
    weights,
)
from zenflow import ZenFlowAdamW
from zftune.emulation import EmulatedAccelerator, Rig
from zftune.errors import BadInputError
from zftune.integrations.huggingface import ZFTuneCallback, zenflow_optimizer
from zftune.tuner.space import Setting


def late(model: nn.Module, args: Any) -> torch.optim.Optimizer:
    return zenflow_optimizer(model, args, LATE)


def file_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("saves", fast([True], all_of=[False, True]), ids=str)
def test_what_is_saved_at_the_end_holds_every_update(tmp_path: Path, saves: bool) -> None:
    without = trained(tmp_path / "without", late)
    lacking = weights(without.model)
    without.optimizer.optimizer.flush()
    complete = weights(without.model)
    assert not same(lacking, complete)
    more = {"save_strategy": "steps", "save_steps": 5} if saves else {}
    done = trained(tmp_path / "with", late, callbacks=[ZFTuneCallback(tune=False)], **more)
    done.save_model()
    assert same(file_of(tmp_path / "with"), complete)
    if saves:
        assert same(file_of(tmp_path / "with" / "checkpoint-10"), complete)
        assert not same(file_of(tmp_path / "with" / "checkpoint-5"), complete)


@pytest.mark.parametrize("helper", [False, True], ids=["no callback", "callback"])
def test_a_last_model_that_lacks_updates_is_told(
    tmp_path: Path, helper: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the last step's checkpoint, which has them, was saved before."""
    callbacks = [ZFTuneCallback(tune=False)] if helper else []
    done = trained(tmp_path, late, callbacks=callbacks, save_strategy="steps", save_steps=5)
    done.save_model()
    model = done.model
    del done, callbacks
    gc.collect()
    assert same(file_of(tmp_path), weights(model)) == helper
    said = [record.getMessage() for record in caplog.records if record.name == "zenflow"]
    assert [one.partition(",")[0] for one in said] == ([] if helper else ["what model.state_dict() gave after step 10"])
    assert helper or said[0].endswith("with the Trainer, callbacks=[ZFTuneCallback()] does that")


def test_checkpoints_on_the_way_are_not_flushed(tmp_path: Path) -> None:
    """So a run is the same with and without the callback, and resumed with it."""
    more: dict[str, Any] = {"save_strategy": "steps", "save_steps": 6}
    trained(tmp_path / "without", late, **more)
    whole = trained(tmp_path / "with", late, callbacks=[ZFTuneCallback(tune=False)], **more)
    assert same(file_of(tmp_path / "with" / "checkpoint-6"), file_of(tmp_path / "without" / "checkpoint-6"))
    resumed = trainer(tmp_path / "with", late, callbacks=[ZFTuneCallback(tune=False)], **more)
    resumed.train(resume_from_checkpoint=str(tmp_path / "with" / "checkpoint-6"))
    assert same(weights(resumed.model), weights(whole.model))


@pytest.mark.parametrize("strategy", fast(["steps"], all_of=["steps", "epoch"]))
def test_the_best_model_is_left_alone(tmp_path: Path, strategy: str) -> None:
    """Early stopping ends the run after an evaluation; what is pending then is not for the weights that are loaded."""
    early = EarlyStoppingCallback(early_stopping_patience=1)
    done = trained(
        tmp_path,
        late,
        callbacks=[ZFTuneCallback(tune=False), early],
        max_steps=160,
        num_train_epochs=10,
        learning_rate=0.3,
        eval_strategy=strategy,
        save_strategy=strategy,
        eval_steps=3,
        save_steps=3,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
    )
    assert done.state.global_step < 160
    best = Path(done.state.best_model_checkpoint)
    assert best.name != f"checkpoint-{done.state.global_step}"
    assert same(weights(done.model), file_of(best))
    done.optimizer.optimizer.flush()
    assert same(weights(done.model), file_of(best))


def test_the_log_history_has_the_knobs(tmp_path: Path) -> None:
    done = trained(tmp_path, late, callbacks=[ZFTuneCallback(tune=False)], eval_strategy="steps", eval_steps=5)
    entries = [entry for entry in done.state.log_history if "loss" in entry]
    assert len(entries) == 10
    for entry in entries:
        assert entry["zenflow_topk_ratio"] == 0.25
        assert entry["zenflow_update_interval"] == entry["zenflow_select_interval"] == 4
        assert "zenflow_stall_ms" not in entry  # on a plain CPU nobody knows
    others = [entry for entry in done.state.log_history if "loss" not in entry]
    assert len(others) == 3  # two evaluations and the summary are as the Trainer wrote them
    assert not [name for entry in others for name in entry if name.startswith("zenflow")]
    done.save_state()
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert state["log_history"] == done.state.log_history


def test_the_log_history_has_the_stall_where_it_is_known(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A host that is slower than everything else stalls the emulated device by more than its own time a step."""
    rig = Rig("slow host", "", 1, 1, link_d2h_gbps=1, link_h2d_gbps=1, host_gbps=0.1, device_gbps=100, scale=1)

    device = EmulatedAccelerator(rig)
    request.addfinalizer(device.close)

    def make(model: nn.Module, args: Any) -> torch.optim.Optimizer:
        device.attach(model)
        return ZenFlowAdamW(model.parameters(), config=EXACT, module=model, device=device)

    done = trained(tmp_path, make, callbacks=[ZFTuneCallback(tune=False)], logging_steps=5)
    stalls = [entry["zenflow_stall_ms"] for entry in done.state.log_history if "loss" in entry]
    assert len(stalls) == 2
    assert min(stalls) > 1


@pytest.mark.parametrize("passes", [1, 2])
def test_the_tuner_gets_the_losses_that_the_trainer_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    seen: list[float] = []
    monkeypatch.setattr(zftune, "log_loss", lambda loss: seen.append(float(loss)))
    more = {"gradient_accumulation_steps": passes, "eval_strategy": "steps", "eval_steps": 3}
    done = trained(tmp_path, late, callbacks=[ZFTuneCallback(tune=False)], **more)
    logged = [entry["loss"] for entry in done.state.log_history if "loss" in entry]
    assert seen == pytest.approx(logged, rel=1e-6)


def test_a_loss_that_the_model_does_not_give_comes_from_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    monkeypatch.setattr(zftune, "log_loss", lambda loss: seen.append(float(loss)))
    callbacks = [ZFTuneCallback(tune=False)]
    done = trained(tmp_path, late, callbacks=callbacks, label_smoothing_factor=0.1, logging_steps=2)
    logged = [entry["loss"] for entry in done.state.log_history if "loss" in entry]
    assert len(logged) == 5
    assert seen == logged[:-1]  # the last step ends the tuner


class UntilTuned(TrainerCallback):  # type: ignore[misc]
    """Ends the training once other knobs have been tried."""

    def __init__(self, callback: ZFTuneCallback) -> None:
        self.callback = callback
        self.changes: list[Setting] = []
        self.ends = time.monotonic() + 120

    def on_change(self, step: int, knobs: Mapping[str, Any]) -> None:
        self.changes.append(Setting.from_knobs(knobs))

    def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        tuner = self.callback.tuner
        assert tuner is not None
        if tuner.live is None or tuner.live.request is None:
            time.sleep(0.01)  # these steps are so short that a thought would last for thousands of them
        assert time.monotonic() < self.ends
        if len(set(self.changes)) > 1 or not tuner.searching:
            control.should_training_stop = True


def test_a_trainer_is_tuned_while_it_trains(tmp_path: Path) -> None:
    callback = ZFTuneCallback(quality="loose", sequence=16, store=False, most_measurements=5)
    until = UntilTuned(callback)
    callback._attach["on_change"] = until.on_change
    done = trained(tmp_path, late, callbacks=[callback, until], max_steps=100_000, logging_steps=10)
    tuner = callback.tuner
    assert tuner is not None
    assert not tuner.searching
    assert tuner.search is not None
    assert not tuner.search.space.fixed_because  # it has seen losses
    assert tuner.search.book.tokens == 4 * 16
    assert len(set(until.changes)) > 1
    assert {entry["zenflow_update_interval"] for entry in done.state.log_history if "loss" in entry}
    optimizer = done.optimizer.optimizer
    assert Setting.of(optimizer.config) == tuner.incumbent or optimizer._training.coming is not None
    seen = weights(done.model)
    optimizer.flush()
    assert same(weights(done.model), seen)
    assert furthest(seen, weights(tiny_model())) > 0
    zftune.attach(optimizer, store=False).close()  # nobody follows it any more


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, None, callbacks=[ZFTuneCallback()])
    with pytest.raises(BadInputError, match=r"optimizer is a AdamW; it must be one of zenflow"):
        made.train()


def test_a_second_training_begins_anew(tmp_path: Path) -> None:
    callback = ZFTuneCallback(store=False)
    made = trainer(tmp_path, late, callbacks=[callback])
    made.train()
    first = callback.tuner
    made.train()
    assert first is not None
    assert callback.tuner is not first
    assert not first.searching
    assert not made.model._forward_hooks


def test_a_quality_that_nobody_would_follow_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"quality is 'exact' with tune=False; it must be None"):
        ZFTuneCallback(tune=False, quality="exact")


def test_arguments_are_checked_before_a_training_begins() -> None:
    with pytest.raises(BadInputError, match="tune is 'no'; it must be True or False"):
        ZFTuneCallback(tune="no")  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="quality is 'exat'; it must be exact, published or loose"):
        ZFTuneCallback(quality="exat")  # type: ignore[arg-type]
    for sequence in ("a", 0, 2.0, True):
        with pytest.raises(BadInputError, match=rf"sequence is {sequence!r}; it must be an integer >= 1"):
            ZFTuneCallback(sequence=sequence)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'qualty'"):
        ZFTuneCallback(qualty="exact")
