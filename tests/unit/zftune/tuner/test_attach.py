"""One line in a plain loop: `zftune.attach(optimizer)`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import zftune
from tests.support.zftune.tuner.loop import BEGIN, Attach, Loop, attach
from zenflow import ZenFlowConfig
from zenflow.errors import HostEngineError
from zftune.attaching import default_quality
from zftune.errors import BadInputError
from zftune.store import open_store
from zftune.store.store import Store
from zftune.store.types import RunState, TrialState
from zftune.tuner import drivers
from zftune.tuner.messages import NOT_PREDICTED, sentence
from zftune.tuner.space import Setting

__all__ = ["attach"]


def test_a_loop_is_tuned_and_remembered(attach: Attach, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="zftune")
    loop = Loop()
    changes: list[tuple[int, Mapping[str, Any]]] = []
    probes: list[float] = []

    def eval_fn() -> float:
        probes.append(float(loop.loss()))
        return probes[-1]

    tuner = attach(
        loop, micro_batch=4, sequence=4, eval_fn=eval_fn, on_change=lambda step, knobs: changes.append((step, knobs))
    )
    loop.run(tuner)
    for _ in range(30):
        loop.step()
    opening = [one for one in caplog.messages if one.startswith(("zftune tunes", "The search ends"))]
    (run,) = store.runs()
    assert opening == [
        "zftune tunes Sequential with quality published: updates of unimportant columns may come late.",
        (
            "The search ends when the training does or 5 measurements were made; it costs at most 1% of the time, or "
            "108 s."
        ),
        f"zftune tunes this training as run {run.run_id[:8]}; watch it with: zftune explain {run.run_id[:8]}",
    ]
    assert loop.knobs == tuner.incumbent
    tuner.close()
    search = tuner.search
    assert search is not None
    adopted = [message for message in caplog.messages if message.startswith("zftune sets the best settings so far: ")]
    assert len(adopted) == len(search.book.adoptions)
    warned = [record for record in caplog.records if "of the gradient energy, where 94% is assumed" in record.message]
    assert [record.levelno for record in warned] == [logging.WARNING]
    assert search.book.incumbent.setting == loop.knobs
    assert search.book.tokens == 16
    assert search.space.dimensions
    assert 0 < (search.space.movement_percent or 0.0) < 0.02  # measured
    assert {Setting.from_knobs(knobs) for _, knobs in changes} >= {search.book.trials[0].setting}
    assert run.settings["unsearched"] == {"ledger": True}
    assert run.state is RunState.FINISHED
    assert run.key.micro_batch == 4
    reasons = [sentence(decision) for decision in store.decisions(run.run_id)]
    assert reasons == [sentence(note) for note in search.notes]
    curve = store.curve(run.run_id)
    assert curve.points[0].loss is not None  # from the first step on, before there was a search
    assert curve.points[-1].loss is not None
    assert curve.points[len(curve.points) // 2].step_ms is not None  # of the last steps the loss alone is known
    assert curve.changes
    assert len(probes) in (2, 4, 6)
    after = re.compile(r"Staleness probe after step (\d+) ")
    told = [(found, one) for one in store.decisions(run.run_id) if (found := after.match(sentence(one)))]
    assert told
    assert [int(found[1]) - (one.step or 0) in (0, 1) for found, one in told] == [True] * len(told)
    assert all(balance.balanced for balance in loop.optimizer.ledger().values())
    loop.step()  # nobody follows any more


def test_where_a_run_can_be_looked_at_is_said_before_anything_is_measured(
    attach: Attach, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="zftune")
    loop = Loop()
    with open_store(str(tmp_path / "zftune.db"), environment={"HOME": "/nowhere"}) as store:
        tuner = attach(loop, store=store)
        loop.run(tuner, until=lambda: tuner.live is not None)
        called = store.runs()[0].run_id[:8]
        assert (
            caplog.messages[-1] == f"zftune tunes this training as run {called}; watch it with: zftune explain {called}"
        )
        tuner.close()


def test_that_nothing_is_kept_is_said_before_anything_is_measured_and_once(
    attach: Attach, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="zftune")
    (tmp_path / "bad.db").write_bytes(b"no database" * 100)
    loop = Loop()
    with open_store(str(tmp_path / "bad.db"), environment={"HOME": "/nowhere"}) as store:
        tuner = attach(loop, store=store)
        loop.run(tuner, until=lambda: tuner.live is not None)
        (said,) = [one for one in caplog.records if "what zftune learns is kept in memory until it ends" in one.message]
        assert said.levelno == logging.WARNING
        assert said.message in tuner.notices
        tuner.close()
    assert [one for one in caplog.messages if "kept in memory" in one] == [said.message]


def test_without_a_loss_the_trajectory_stays(attach: Attach, store: Store) -> None:
    loop = Loop(logs=False, given=False)
    tuner = attach(loop)
    loop.run(tuner)
    tuner.close()
    search = tuner.search
    assert search is not None
    assert search.space.fixed_because.startswith("no loss is known")
    kept = Setting.of(BEGIN)
    for trial in search.book.trials:
        assert trial.setting.knobs() | {"host_threads": None} == kept.knobs() | {"host_threads": None}
    assert NOT_PREDICTED in [note.details.get("text") for note in search.notes]
    (run,) = store.runs()
    assert (run.key.micro_batch, run.key.sequence) == (0, 0)  # nobody told, and nothing is claimed


@pytest.mark.parametrize("late", [False, True])
def test_a_loss_that_is_not_finite_ends_it(attach: Attach, *, late: bool) -> None:
    loop = Loop()
    tuner = attach(loop)
    if late:
        loop.run(tuner, until=lambda: tuner.live is not None and tuner.live.request is not None)
    else:
        loop.step()
    loop.step(scale=float("nan"))
    loop.step()
    assert not tuner.searching
    loop.step()
    assert loop.knobs == Setting.of(BEGIN)
    tuner.close()
    if late:
        assert tuner.search is not None
        assert "guard" in [note.kind for note in tuner.search.notes]
    else:
        assert tuner.notices[0].startswith("Training goes on with the settings at the start")
        assert "at step 1 the loss is nan." in tuner.notices[0]


def test_a_training_that_ends_before_the_search_says_so(attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    tuner = attach(loop)
    for _ in range(3):
        loop.step()
    tuner.close()
    said = (
        "zftune tuned nothing: the training took 3 steps and ended before a first measurement, which begins after 8 "
        "steps and some seconds of preparation."
    )
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [said]
    assert tuner.notices == [said]


def test_a_training_that_ends_before_a_measurement_says_so(attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    tuner = attach(loop)
    loop.run(tuner, until=lambda: tuner.live is not None and tuner.live.request is not None)
    loop.step()
    steps = loop.optimizer.steps
    tuner.close()
    said = (
        f"zftune tuned nothing: the training took {steps} steps and ended before a first measurement, which begins "
        "after 8 steps and some seconds of preparation and takes 68 more steps."
    )
    assert said in tuner.notices
    assert caplog.messages.count(said) == 1
    assert tuner.search is not None
    reasons = [sentence(note) for note in tuner.search.notes]
    assert "The training ended before the search did." in reasons


def test_an_optimizer_that_never_stepped_says_nothing(attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    attach(Loop()).close()
    assert caplog.messages == []


def test_exact_is_exact_from_the_first_step_whatever_the_script_asks_for(attach: Attach) -> None:
    loop, plain = Loop(lr=1e-3), Loop(ZenFlowConfig.zero_offload(host_threads=1), lr=1e-3)
    tuner = attach(loop, quality="exact")
    for _ in range(6):  # before the search
        loop.step()
        plain.step()
        assert tuner.live is None or tuner.live.request is None
    tuner.close()
    plain.optimizer.close()
    for ours, theirs in zip(loop.module.parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_synchronous_optimizer_may_become_as_late_as_it_is_asked_to(attach: Attach) -> None:
    loop = Loop(ZenFlowConfig.zero_offload(host_threads=1), lr=3e-5)
    tuner = attach(loop, quality="published", most_measurements=1)
    loop.run(tuner, until=lambda: tuner.live is not None)
    tuner.close()
    assert tuner.search is not None
    space = tuner.search.space
    assert space.violation(Setting(topk_ratio=0.1, update_interval=4, apply_lag=4)) is None
    assert space.violation(Setting(topk_ratio=0.1, update_interval=8, apply_lag=8)) is not None


def test_a_setting_that_is_too_late_for_how_far_weights_move_is_begun_earlier(attach: Attach) -> None:
    loop = Loop(lr=3e-3)
    tuner = attach(loop, most_measurements=1)
    loop.run(tuner, until=lambda: tuner.live is not None)
    tuner.close()
    loop.step()  # with which the knobs change
    assert tuner.search is not None
    book = tuner.search.book
    space = tuner.search.space
    assert (space.movement_percent or 0.0) > 0.5
    assert space.movement_rate == 3e-3
    assert book.trials[0].setting == space.base == loop.knobs
    assert loop.knobs.synchronous


def test_a_training_that_goes_on_from_saved_settings_goes_on_with_its_search(attach: Attach, store: Store) -> None:
    """Those of a checkpoint are the search's, not the user's: the quality and the run stay."""
    first = Loop(lr=3e-3)
    tuner = attach(first)
    first.run(
        tuner,
        until=lambda: any(store.measurements(one.trial_id) for run in store.runs() for one in store.trials(run.run_id)),
    )
    saved = first.optimizer.state_dict()
    tuner.close()
    assert default_quality(first.optimizer.config) == "exact"

    second = Loop(lr=3e-3)
    second.module.load_state_dict(first.module.state_dict())
    second.optimizer.load_state_dict(saved)
    assert second.knobs.synchronous
    assert Setting.of(second.optimizer.asked_config) == Setting.of(BEGIN)
    second.optimizer.param_groups[0]["lr"] = 2e-3
    tuner = attach(second)
    second.run(tuner)
    (run,) = store.runs()
    assert run.key.quality == "published"
    tuner.close()
    assert tuner.search is not None
    rates = [note.details for note in tuner.search.notes if note.details.get("because") == "rate"]
    assert [(one["learning_rate"], one["before"]) for one in rates] == [(2e-3, 3e-3)]
    second.optimizer.set_knobs(update_interval=3)
    assert second.optimizer.asked_config.update_interval == 3


def test_what_is_refused(attach: Attach) -> None:
    loop = Loop()
    plain: Any = torch.optim.AdamW(loop.module.parameters())
    with pytest.raises(BadInputError, match=r"optimizer is a torch\.optim\.adamw\.AdamW; it must be one of zenflow"):
        zftune.attach(plain)
    wrong: Any = "best"
    with pytest.raises(BadInputError, match="quality is 'best'; it must be exact, published or loose"):
        zftune.attach(loop.optimizer, quality=wrong)
    for given in ("/tmp/z.db", Path("z.db"), True):
        with pytest.raises(
            BadInputError, match=r"store is .*; it must be an open store, False or None: a path belongs"
        ):
            attach(Loop(), store=given)
    for name in ("on_change", "eval_fn"):
        with pytest.raises(BadInputError, match=f"{name} is 3; it must be a function"):
            attach(Loop(), **{name: 3})
    with pytest.raises(BadInputError, match="tokens is 0; it must be an integer >= 1"):
        zftune.attach(loop.optimizer, tokens=0)
    with pytest.raises(BadInputError, match="tokens is -4; it must be an integer >= 1"):
        zftune.log_tokens(-4)  # also where nobody listens
    with pytest.raises(BadInputError, match="loss is 'x'; it must be a number, or a tensor of one"):
        zftune.log_loss("x")  # type: ignore[arg-type]
    attach(loop)
    with pytest.raises(BadInputError, match="optimizer is followed by a tuner already"):
        zftune.attach(loop.optimizer)
    with pytest.raises(BadInputError, match=r"loss has the shape \(2,\); it must be a scalar"):
        zftune.log_loss(torch.zeros(2))
    closed = Loop()
    closed.optimizer.close()
    with pytest.raises(BadInputError, match="optimizer was closed"):
        zftune.attach(closed.optimizer)


def test_a_bug_of_ours_ends_the_tuning_not_the_training(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    tuner = attach(loop)
    loop.run(tuner, until=lambda: tuner.live is not None)

    def fail() -> bool:
        raise ArithmeticError("a bug")

    monkeypatch.setattr(tuner.live, "on_step", fail)
    loop.step()
    assert not tuner.searching
    assert tuner.notices[-1] == "Tuning ended: ArithmeticError: a bug."
    assert "Traceback" in caplog.text
    loop.step()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ArithmeticError("a bug"), "Tuning ended: ArithmeticError: a bug."),
        # one that the training itself ends with, where it is its own
        (HostEngineError("a bug"), "Tuning ended: RuntimeError: the search cannot be made: a bug."),
    ],
)
def test_a_search_that_cannot_be_prepared_is_none_and_closing_says_nothing_more(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(drivers, "prepare", fail)
    loop = Loop()
    tuner = attach(loop)
    loop.run(tuner)
    assert tuner.notices[-1] == said
    loop.step()
    tuner.close()
    loop.step()


def test_an_optimizer_that_is_closed_while_a_setting_is_tried_blames_no_setting(attach: Attach, store: Store) -> None:
    """As a script ends that closes what it made: the tuner is closed later, when the process ends."""
    loop = Loop()
    tuner = attach(loop)

    def tries() -> bool:
        return tuner.live is not None and tuner.live.request is not None and loop.knobs != tuner.incumbent

    loop.run(tuner, until=tries)
    assert tries()
    loop.optimizer.close()
    tuner.close()
    (run,) = store.runs()
    states = [trial.state for trial in store.trials(run.run_id)]
    assert states.count(TrialState.VOID) == 1
    assert not {TrialState.IN_FLIGHT, TrialState.PLANNED, TrialState.CRASHED} & set(states)
    assert run.state is RunState.LOST  # which its training may go on with


def test_where_nothing_is_remembered_nothing_is_looked_up(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ArithmeticError("a bug")

    for name in ("trained_model", "MachineInfo.now"):
        monkeypatch.setattr(f"zftune.tuner.setup.{name}", fail)
    loop = Loop()
    tuner = attach(loop, store=False)
    loop.run(tuner, until=lambda: tuner.live is not None)
    assert tuner.live is not None
    assert not [one for one in tuner.notices if one.startswith("Tuning ended")]


def test_a_loop_with_a_store_of_its_own_searches_here_under_run_online(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZFTUNE_ONLINE", "daemon")
    loop = Loop()
    tuner = attach(loop)
    loop.run(tuner, lambda: tuner.live is not None)
    tuner.close()
    assert tuner.search is not None
