"""Steps that count, runs that are refused, and nothing left behind when one ends early."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

from tests.support.zftune.fixtures import MINI_TIMELINE, rig_text
from zenflow import ConfigError, ZenFlowConfig
from zftune.emulation.emulator import Slack
from zftune.emulation.machines import DEFAULT_RIG, load_rig, rig_names
from zftune.errors import BadInputError, ProfileError
from zftune.profile import measure as module
from zftune.profile.measure import Task, lateness, measure, steady, step_counts
from zftune.workload import load_text


def task(model: Path, rig: Path, sequence: int = 8, *, real_time: bool = False) -> Task:
    return Task(
        model=str(model),
        corpus=load_text(__file__),
        dtype=torch.float32,
        micro_batch=1,
        sequence=sequence,
        seed=0,
        torch_device=torch.device("cpu"),
        rig=load_rig(str(rig)),
        real_time=real_time,
    )


def config(update_interval: int = 1, **knobs: int) -> ZenFlowConfig:
    return ZenFlowConfig(update_interval=update_interval, **knobs).resolved()  # type: ignore[arg-type]


def ignore(done: int, total: int) -> None:
    pass


def zenflow_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("zenflow-")]


@pytest.mark.parametrize(
    ("interval", "warm_up", "steps", "discarded", "measured"),
    [
        (1, 0, 1, 3, 1),
        (1, 0, 24, 3, 24),
        (2, 0, 5, 4, 6),
        (4, 0, 24, 8, 24),
        (4, 0, 25, 8, 28),
        (4, 5, 4, 13, 4),
        (7, 0, 1, 14, 7),
    ],
)
def test_whole_windows_count_after_two_of_them(
    interval: int, warm_up: int, steps: int, discarded: int, measured: int
) -> None:
    assert step_counts(config(interval, full_warm_up_rounds=warm_up), steps) == (discarded, measured)


@pytest.mark.parametrize(
    ("slack", "fault"),
    [
        (Slack(), None),
        (Slack(segments=200, late_host_s=0.1), None),
        (Slack(segments=200, late=2, host_s=1.0, late_host_s=0.01), None),
        (Slack(segments=200, late=3), "3 of 200 segments were late"),
        (Slack(segments=50, late=1), "1 of 50 segments were late"),
        (Slack(segments=200, host_s=2.0, late_host_s=0.05), "the host was 2.5% slower than the rig's"),
        (Slack(segments=10, late=10, host_s=1.0, late_host_s=1.0), "the host was 100.0% slower than the rig's"),
    ],
)
def test_lateness_is_more_than_a_hundredth(slack: Slack, fault: str | None) -> None:
    assert lateness(slack) == fault


def test_a_run_that_was_late_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, mini_model: Path, mini_rig: Path
) -> None:
    faults: list[str | None] = ["busy", "still busy", None]
    monkeypatch.setattr(module, "lateness", lambda slack: faults.pop(0))
    assert measure(task(mini_model, mini_rig, real_time=True), config(), 1, ignore).attempts == 3
    assert faults == []


def test_a_slow_host_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, mini_model: Path, tmp_path: Path) -> None:
    (tmp_path / "rig.toml").write_text(rig_text("fast-host", **{**MINI_TIMELINE, "host_ms": 1e-4}))
    monkeypatch.setattr(module, "_ATTEMPTS", 1)
    with pytest.raises(ProfileError, match=r"rig 'fast-host': the host was \S+% slower than the rig's"):
        measure(task(mini_model, tmp_path / "rig.toml", real_time=True), config(overlap_step=False), 2, ignore)
    assert zenflow_threads() == []


def test_a_sequence_that_does_not_fit_leaves_no_thread(mini_model: Path, mini_rig: Path) -> None:
    with pytest.raises(BadInputError, match="--sequence is 999"):
        measure(task(mini_model, mini_rig, sequence=999), config(), 1, ignore)
    assert zenflow_threads() == []


def test_an_interrupt_leaves_no_thread_and_torch_as_it_was(mini_model: Path, mini_rig: Path) -> None:
    seen = []

    def interrupt(done: int, total: int) -> None:
        seen.append((done, len(zenflow_threads()) > 0))
        if done == 2:
            raise KeyboardInterrupt

    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt) as held:  # its traceback keeps the optimizer from being collected
        measure(task(mini_model, mini_rig), config(), 4, interrupt)
    assert held.traceback
    assert seen == [(1, True), (2, True)]
    assert zenflow_threads() == []
    assert torch.get_num_threads() == threads


def test_what_the_runtime_refuses_is_a_profile_error(mini_model: Path, mini_rig: Path) -> None:
    odd = task(mini_model, mini_rig)
    odd = Task(**{name: getattr(odd, name) for name in odd.__slots__} | {"dtype": torch.float64})
    with pytest.raises(ProfileError, match="float64"):
        measure(odd, config(), 1, ignore)
    assert zenflow_threads() == []


def test_there_are_four_rigs_and_the_default_is_among_them() -> None:
    assert len(rig_names()) >= 4
    assert DEFAULT_RIG in rig_names()


def test_a_rig_file_of_ones_own_is_read_by_path(mini_rig: Path) -> None:
    assert load_rig(str(mini_rig)).values == MINI_TIMELINE
    bad = mini_rig.with_name("bad.toml")
    bad.write_text("=")
    with pytest.raises(BadInputError, match=r"--rig: rig .* cannot be read") as error:
        load_rig(str(bad))
    assert isinstance(error.value.__cause__, ConfigError)


@pytest.mark.parametrize("frozen", [False, True])
def test_objects_are_frozen_while_it_measures_and_those_of_somebody_else_stay_so(frozen: bool) -> None:
    gc.unfreeze()
    if frozen:
        gc.freeze()
    with steady(emulated=False):
        assert gc.get_freeze_count() > 0
    assert (gc.get_freeze_count() > 0) == frozen
