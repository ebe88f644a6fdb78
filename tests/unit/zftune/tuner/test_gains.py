"""What the best settings gain, over what, and when that is measured anew."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.zftune.tuner.drifting import FAST, World
from tests.support.zftune.tuner.surfaces import START, TOKENS
from zftune.tuner.scores import Gain
from zftune.tuner.space import Setting
from zftune.tuner.states import Outcome, Stopped, Trial, WaitingForBudget


@pytest.mark.parametrize("fast", [0.9, 0.95, 1.3])
def test_in_other_times_what_the_best_gains_is_measured_anew(fast: float) -> None:
    world = World()
    world.settle()
    book = world.search.book
    before = book.gain
    assert before is not None
    assert before.share == pytest.approx(0.2, abs=0.02)
    world.factor, world.fast = 1.5, fast
    world.run(2)
    since = book.gain
    assert since == replace(before, counted=0.0)
    assert book.gain_age == 1
    asked = len(world.driver.requests)
    world.settle()
    roles = [(one.role, one.setting) for one in world.driver.requests[asked:] if one.role != "hold"]
    if fast == 1.3:  # the start is the faster one now, which gains nothing over itself
        assert book.incumbent.setting == START
        assert book.gain is None
        return
    assert roles == [("explore", START), ("a2", FAST)]
    assert book.incumbent.setting == FAST
    found = book.gain
    assert found is not None
    assert found.share == pytest.approx(1 - fast, abs=0.02)
    assert (found.saves, book.gain_age) == (found.share, 0)
    kept = [note for note in world.search.notes if "compared_again" in note.details]
    assert [(note.kind, note.trial) for note in kept] == [("keep", len(book.trials) - 1)]
    assert kept[0].reason == f"Compared with the starting point again: the best so far gains {found}."
    assert world.search._misses == 0  # it was no candidate


def test_what_is_gained_over_settings_that_the_quality_required_is_measured_anew_against_these() -> None:
    world = World()
    world.movement_percent, world.plan = 0.1, [FAST]
    world.run(1)
    book = world.search.book
    required = book.incumbent.setting
    assert required != START
    world.movement_percent = 0.02
    world.settle()
    assert (book.incumbent.setting, book.reference) == (FAST, required)
    world.factor, world.fast = 1.5, 0.9
    world.run(2)
    asked = len(world.driver.requests)
    world.settle()
    roles = [(one.role, one.setting) for one in world.driver.requests[asked:] if one.role != "hold"]
    assert roles[:2] == [("explore", required), ("a2", FAST)]
    found = book.gain
    assert found is not None
    assert found.share == pytest.approx(0.1, abs=0.02)
    assert (found.saves, book.gain_age, book.reference) == (found.share, 0, required)
    (kept,) = [note for note in world.search.notes if "compared_again" in note.details]
    what = f"what quality or GPU memory required ({required})"
    assert kept.reason == f"Compared with {what} again: the best so far gains {found}."
    assert book.trials[kept.trial or 0].source == "reference"


@pytest.mark.parametrize(("noise", "again"), [(0.01, 0), (0.2, 1)])
def test_a_gain_that_noise_may_have_made_is_measured_once_more(noise: float, again: int) -> None:
    world = World(grant_s=1e9, sampler="random", patience=2, watch=False)
    world.fast, world.driver.noise = 0.9, noise
    while "adopt" not in world.kinds:
        world.run(1)
    book = world.search.book
    adopted = book.gain
    assert adopted is not None
    asked = len(world.driver.requests)
    world.settle()
    roles = [(one.role, one.setting) for one in world.driver.requests[asked:]]
    picked, *_ = [note for note in world.search.notes if note.kind == "adopt"]
    anew = [note for note in world.search.notes if "compared_again" in note.details]
    assert len(anew) == again
    if not again:
        assert ("explore", START) not in roles
        return
    # The look at the start is left out, and so is the comparison that the best was picked by.
    assert roles[:4] == [("explore", START), ("a1", FAST), ("b", START), ("a2", FAST)]
    assert anew[0].details["gain"] == pytest.approx(-0.11, abs=0.1)
    assert picked.details["gain"] == pytest.approx(adopted.share, rel=1e-4)
    assert book.gain not in (None, adopted)


def test_a_start_that_would_cost_too_much_is_not_compared_again() -> None:
    world = World(grant_s=0.0, grant_steps=0, cost_share=0.0)
    world.run(1)
    world.search.cost.grant_s = 1e3
    world.settle()
    book = world.search.book
    assert (book.incumbent.setting, book.gain_age) == (FAST, 0)
    world.search.cost.grant_s = 0.0
    world.factor = 1.5
    world.run(6)
    assert "reopen" in world.kinds
    assert {one.role for one in world.driver.requests[-4:]} == {"hold"}  # nor is it waited for
    assert isinstance(world.search.state, Stopped)


def test_a_gain_is_that_of_the_setting_which_it_was_measured_for() -> None:
    world = World()
    world.run(1)
    book, samples = world.search.book, list(world.search.book.incumbent.samples)
    first, second, room, last = (replace(START, topk_ratio=ratio) for ratio in (0.15, 0.2, 0.3, 0.4))

    def adopt(setting: Setting, share: float) -> None:
        book.adopt(book.append(Trial(len(book.trials), setting, "planner")), Gain(share, 0.01), samples)

    def gain() -> float | None:
        return None if book.gain is None else round(book.gain.share, 6)

    def over_start() -> bool:
        return book.reference == START

    adopt(first, 0.2)
    adopt(second, 0.1)
    assert gain() == 0.28
    book.forget()  # trials are others from here on, and settings the same
    number = next(trial.number for trial in book.trials if trial.setting == first)
    assert book.move_to(first).number != number
    assert (gain(), over_start()) == (0.2, True)
    book.move_to(START)
    assert (gain(), book.gain_share, over_start()) == (None, 0.0, True)
    book.move_to(room)
    assert (gain(), book.gain_share, over_start()) == (None, 0.0, False)
    adopt(last, 0.1)
    assert (gain(), over_start()) == (0.1, False)
    adopt(room, 0.1)  # as in other times
    assert (gain(), over_start()) == (None, False)
    book.roll_back()
    book.roll_back()
    assert (book.incumbent.setting, gain()) == (room, None)
    adopt(START, 0.1)  # that room was made in its place says nothing of it
    assert (gain(), over_start()) == (None, True)
    book.move_to(second)
    assert gain() == 0.28
    adopt(START, 0.1)  # in other times
    assert (gain(), book.gain_share, over_start()) == (None, 0.0, True)
    adopt(last, 0.3)
    assert (gain(), over_start()) == (0.3, True)
    book.restore_start()
    assert gain() is None


def test_a_comparison_that_became_too_dear_is_made_once_it_is_not() -> None:
    world = World(grant_s=0.0, grant_steps=0, cost_share=1e-9)  # what is missing is waited for
    world.run(1)
    world.search.cost.grant_s = 1e3
    world.settle()
    world.factor = 1.5
    world.run(2)
    request = world.search.next()
    assert request is not None
    assert (request.role, request.setting) == ("explore", START)
    world.search.cost.grant_s = 0.0
    world.search.tell(Outcome("void", tokens=TOKENS))
    assert isinstance(world.search.state, WaitingForBudget)
    world.search.cost.grant_s = 1e3
    asked = len(world.driver.requests)
    world.settle()
    roles = [(one.role, one.setting) for one in world.driver.requests[asked:] if one.role != "hold"]
    assert ("explore", START) in roles
    assert world.search.book.gain_age == 0
