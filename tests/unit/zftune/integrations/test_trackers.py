"""What trackers get, read back from their own files: the Trainer's reporters, Accelerate's trackers, a plain loop's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the huggingface extra is not installed")

from transformers import TrainerCallback

import zftune
from tests.support.zftune.integrations.trainers import Tokens, tiny_model, trained
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.living import all_training
from zftune.emulation import EmulatedAccelerator, Rig
from zftune.errors import BadInputError
from zftune.integrations.huggingface import AccelerateAdamW, ZFTuneCallback

KNOBS = {
    "zenflow_topk_ratio": 0.25,
    "zenflow_update_interval": 4,
    "zenflow_select_interval": 4,
    "zenflow_offload_ratio": 1,
    "zenflow_overlap_step": 0,
    "zenflow_apply_lag": 4,
    "zenflow_host_threads": 1,
}
STEPS = {
    "zenflow_step_ms",
    "zenflow_stall_ms",
    "zenflow_stall_host_ms",
    "zenflow_stall_h2d_ms",
    "zenflow_stall_d2h_ms",
    "zenflow_hidden_ms",
    "zenflow_coverage",
    "zenflow_staleness_steps",
    "zenflow_movement_percent",
}
WAITING = ZenFlowConfig(update_interval=4, topk_ratio=0.25, select_interval=4, overlap_step=False, host_threads=1)
"""Each window is applied in the step that closes it, for which the device stalls."""


@pytest.fixture
def slow_host() -> Iterator[EmulatedAccelerator]:
    """A host that is slower than all else: the device stalls for it."""
    rig = Rig("slow host", "", 1, 1, link_d2h_gbps=1, link_h2d_gbps=1, host_gbps=0.1, device_gbps=100, scale=1)
    device = EmulatedAccelerator(rig)
    yield device
    for optimizer in all_training():
        optimizer.close()
    device.close()


def on(device: EmulatedAccelerator, kind: type[ZenFlowAdamW] = ZenFlowAdamW) -> Callable[[nn.Module], ZenFlowAdamW]:
    def make(model: nn.Module) -> ZenFlowAdamW:
        device.attach(model)
        return kind(model.parameters(), config=WAITING, module=model, device=device)

    return make


def of_tensorboard(folder: Path) -> dict[str, list[float]]:
    """Of event files, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[float]] = {}
    for events in sorted(folder.rglob("events.out.tfevents*")):
        run = EventAccumulator(str(events))
        run.Reload()
        for tag in run.Tags()["scalars"]:
            found.setdefault(tag.removeprefix("train/"), []).extend(one.value for one in run.Scalars(tag))
    return found


@pytest.fixture
def tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose files are in the test's folder."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
    return "tensorboard"


def expect(found: dict[str, list[float]], entries: int) -> None:
    """Knobs in each entry; and of steps what is known then, which is nothing in the first two."""
    for name, value in KNOBS.items():
        assert found[name] == [value] * entries
    assert set(found) >= STEPS
    assert all(1 <= len(found[name]) <= entries for name in STEPS)
    assert max(found["zenflow_stall_host_ms"]) > 0
    assert 0 < max(found["zenflow_coverage"]) <= 1


pytestmark = pytest.mark.filterwarnings("ignore:::(tensorboard|google|torch.utils.tensorboard)")


def test_a_trainers_reporters_get_the_figures(tmp_path: Path, tracker: str, slow_host: EmulatedAccelerator) -> None:
    callback = ZFTuneCallback(tune=False)
    done = trained(
        tmp_path, lambda model, _: on(slow_host)(model), callbacks=[callback], report_to=[tracker], logging_steps=2
    )
    found = of_tensorboard(tmp_path)
    expect(found, entries=5)
    history = [entry for entry in done.state.log_history if "loss" in entry]
    for name in KNOBS.keys() | STEPS:
        assert found[name] == pytest.approx([entry[name] for entry in history if name in entry], rel=1e-6)
    assert [type(one).__name__ for one in done.callback_handler.callbacks[:1]] == ["DefaultFlowCallback"]


def test_accelerates_trackers_get_the_figures(tmp_path: Path, tracker: str, slow_host: EmulatedAccelerator) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with=tracker, project_dir=str(tmp_path))
    accelerator.init_trackers("training")
    model = tiny_model()
    wrapped, optimizer = accelerator.prepare(model, on(slow_host, AccelerateAdamW)(model))
    train(wrapped, optimizer, lambda step: accelerator.log(zftune.stats(optimizer), step=step))
    accelerator.end_training()
    expect(of_tensorboard(tmp_path), entries=10)


def test_a_plain_loops_own_writer_gets_the_figures(tmp_path: Path, slow_host: EmulatedAccelerator) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    model = tiny_model()
    with SummaryWriter(str(tmp_path)) as writer:

        def log(step: int) -> None:
            for name, value in zftune.stats().items():  # of the one optimizer that trains
                writer.add_scalar(name, value, step)

        optimizer = on(slow_host)(model)
        train(model, optimizer, log)
    expect(of_tensorboard(tmp_path), entries=10)


def train(model: nn.Module, optimizer: Any, log: Callable[[int], None]) -> None:
    data = Tokens()
    for step in range(10):
        batch = torch.stack([data[4 * step + row]["input_ids"] for row in range(4)])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log(step)


class Reporter(TrainerCallback):  # type: ignore[misc]
    """What a Trainer's own reporters are told; it stands where they do, before the callbacks that a user gives."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **of: Any) -> None:
        self.entries.append(dict(logs))


def test_a_reporter_before_the_callback_gets_the_figures(tmp_path: Path, slow_host: EmulatedAccelerator) -> None:
    """Without any tracker; twice, since a Trainer may train again."""
    reporter, callback = Reporter(), ZFTuneCallback(tune=False)
    done = trained(tmp_path, lambda model, _: on(slow_host)(model), callbacks=[reporter, callback])
    names = [type(one).__name__ for one in done.callback_handler.callbacks]
    assert names == ["DefaultFlowCallback", "Reporter", "ZFTuneCallback", "PrinterCallback"]
    done.train()
    for told in (reporter.entries[:10], reporter.entries[11:21]):
        assert all({name: entry[name] for name in KNOBS} == KNOBS for entry in told)
        assert set().union(*told) >= STEPS
    assert not [name for entry in reporter.entries[10::11] for name in entry if name.startswith("zenflow")]
    assert [one.keys() for one in done.state.log_history if "loss" in one] == [
        {*one, "step"} for one in reporter.entries[11:21]
    ]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x)
        return found


def stepped(steps: int = 1, **knobs: Any) -> ZenFlowAdamW:
    model = Model()
    optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(host_threads=1, **knobs), module=model)
    for _ in range(steps):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_stats_of_nothing_is_empty() -> None:
    assert zftune.stats() == {}


def test_stats_hold_numbers_and_nothing_that_is_not_known() -> None:
    optimizer = stepped(6, update_interval="auto", topk_ratio=0.5)
    told = zftune.stats()
    assert all(isinstance(value, (int, float)) for value in told.values())
    assert "zenflow_update_interval" not in told  # a word
    assert "zenflow_stall_ms" not in told  # on a plain CPU nobody knows
    assert "zenflow_gain" not in told  # nobody tunes
    assert told["zenflow_topk_ratio"] == 0.5
    assert told["zenflow_step_ms"] > 0
    assert "zenflow_step_ms" not in zftune.stats()  # of the steps since the last call
    optimizer.close()
    assert zftune.stats() == {}


def test_stats_have_the_tuners_gain() -> None:
    optimizer = stepped()
    tuner = zftune.attach(optimizer, store=False)
    assert zftune.stats()["zenflow_gain"] == 0
    tuner.close()
    assert zftune.stats()["zenflow_gain"] == 0  # its knobs stay
    optimizer.close()


def test_stats_of_several_optimizers_are_asked_for_by_name() -> None:
    one, other = stepped(topk_ratio=0.25), stepped(topk_ratio=0.5)
    with pytest.raises(BadInputError, match=r"2 optimizers of zenflow train .* call stats\(optimizer\)"):
        zftune.stats()
    assert zftune.stats(other)["zenflow_topk_ratio"] == 0.5
    with zftune.attach(one, store=False):
        assert zftune.stats()["zenflow_topk_ratio"] == 0.25  # the one that is tuned
    one.close()
    other.close()


def test_stats_of_another_optimizer_are_refused() -> None:
    with pytest.raises(BadInputError, match=r"optimizer is a torch.optim.adamw.AdamW; it must be one of zenflow"):
        zftune.stats(torch.optim.AdamW(Model().parameters()))
