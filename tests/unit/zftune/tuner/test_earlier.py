"""What another training of a run goes on with where the best settings so far come late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.tiers import combinations
from tests.support.zftune.tuner.surfaces import START, Surface, coverage
from tests.unit.zftune.tuner.test_resume import World, kept, learning
from zftune.explain.summary import RunSummary
from zftune.store import open_store
from zftune.store.types import Curve, CurvePoint, TrialState
from zftune.tuner import messages
from zftune.tuner.space import Setting, Space, space_for
from zftune.tuner.states import OF_INCUMBENT

LATE = replace(START, update_interval=8, apply_lag=8)


class LateIsFast(Surface):
    def ms(self, setting: Setting) -> float:
        return 60.0 if setting == LATE else 100.0


@pytest.fixture
def world() -> Iterator[World]:
    """A training whose weights hardly move."""
    with open_store("sqlite://", environment={"HOME": "/nowhere"}) as store:
        world = World(store)
        world.surface, world.space = LateIsFast(**vars(world.surface)), world.space.moving(1e-3)
        yield world


@pytest.fixture
def adopted(world: World) -> World:
    """A run of it that has adopted what comes late, and whose search is not over."""
    begun = world.begin()
    begun.search.suggest(LATE, "planner")
    learning(begun, 1e-5)
    while not begun.search.book.adoptions:
        world.go(begun, 1)
    assert begun.search.book.incumbent.setting == LATE
    world.end(begun, unfinished=True)
    return world


def unmoved(space: Space) -> Space:
    """One of a training in which nothing was measured yet."""
    return replace(space_for(START, "published", coverage=coverage), dimensions=space.dimensions)


def test_what_comes_too_late_in_this_training_is_not_gone_on_with(adopted: World) -> None:
    moving = adopted.space.moving(0.05)
    begun = adopted.begin(space=moving)
    earlier = begun.search.book.incumbent
    assert earlier.setting == moving.earlier(LATE) != LATE
    assert f"Adopted for the quality: {earlier.setting.differences(LATE)}: under " in begun.sentence
    assert adopted.go(begun, 3).requests[0].setting == earlier.setting
    adopted.end(begun, unfinished=True)

    again = adopted.begin(space=moving)  # the rows follow from each other
    assert again.sentence.startswith("Resumes run")
    assert again.search.book.incumbent.number == earlier.number
    assert again.search.measurements == begun.search.measurements
    assert [one.setting for one in again.search.book.trials] == [one.setting for one in begun.search.book.trials]
    (run,) = adopted.store.runs()
    assert [one.kind for one in adopted.store.decisions(run.run_id)].count("movement") == 1


@pytest.mark.parametrize(
    ("more", "holds"),
    [
        ({"begins_anew": True, "learning_rate": 1e-5}, False),
        ({"learning_rate": 1e-3}, False),  # that the run has not seen
        ({"learning_rate": 1e-5}, True),  # from a checkpoint
    ],
)
def test_until_it_is_known_how_far_weights_move_a_new_training_has_its_own_settings(
    adopted: World, more: dict[str, Any], holds: bool
) -> None:
    begun = adopted.begin(space=unmoved(adopted.space), **more)
    assert begun.search.book.incumbent.setting == (LATE if holds else START)
    assert (messages.NOT_KNOWN_YET in begun.sentence) is not holds
    asked = [one.setting for one in adopted.go(begun, 2, movement_percent=1e-3).requests]
    assert holds or asked == [START, LATE]  # what is measured with the first tells that it may be as late as that
    adopted.end(begun, unfinished=True)
    assert adopted.begin(space=unmoved(adopted.space), **more).sentence.startswith("Resumes run")


@pytest.mark.parametrize("begins_anew", [True, False])
@pytest.mark.parametrize("is_same_training", [True, False])
def test_a_loss_curve_is_that_of_one_training(adopted: World, begins_anew: bool, is_same_training: bool) -> None:
    (run,) = adopted.store.runs()
    earlier = Curve((CurvePoint(5, 5, 100.0, 4.9, None),), ())
    ended = adopted.store.resume_run(run.run_id)
    adopted.store.save_curve(ended, earlier)
    adopted.store.interrupt_run(ended)
    again = run.run_id if is_same_training else None  # its daemon was killed
    begun = adopted.begin(space=adopted.space, begins_anew=begins_anew, learning_rate=1e-5, run_id=again)
    assert begun.recorder is not None
    own = () if begins_anew and not is_same_training else earlier.points
    assert begun.recorder.curve.curve().points == own
    assert adopted.store.curve(run.run_id).points == own  # also where this one is killed at once
    assert begun.recorder.curve.last_step is None  # of this process


@pytest.mark.parametrize(
    ("lives", "is_known", "is_same_training"),
    combinations(lives=[1, 2], is_known=[True, False], is_same_training=[True, False]),
)
def test_a_step_back_holds_where_nothing_was_measured_after_it(
    adopted: World, is_known: bool, is_same_training: bool, lives: int
) -> None:
    """The daemon was killed and comes back, or the training was, and goes on from its checkpoint."""
    (run,) = adopted.store.runs()
    space = adopted.space.moving(0.05) if is_known else unmoved(adopted.space)
    begun = adopted.begin(space=space, begins_anew=True, learning_rate=1e-5)
    back = begun.search.book.incumbent
    assert back.setting == (space.earlier(LATE) if is_known else START)
    for _ in range(lives):
        adopted.end(begun, unfinished=True)
        more: dict[str, Any] = {"run_id": run.run_id} if is_same_training else {}
        begun = adopted.begin(space=unmoved(adopted.space), learning_rate=1e-5, **more)
        book = begun.search.book
        assert (book.incumbent.number, book.incumbent.setting, book.gain) == (back.number, back.setting, None)
    told = RunSummary.read(adopted.store, run)
    assert (told.best, told.gain, len(told.rows)) == (back.number, None, len(book.trials))
    first, second = adopted.go(begun, 2, movement_percent=0.05 if is_known else 1e-3).requests
    assert (first.role, first.setting, is_known or second.setting) == ("start", back.setting, is_known or LATE)
    adopted.end(begun, unfinished=True)
    book = adopted.begin(space=unmoved(adopted.space), learning_rate=1e-5).search.book
    assert (book.incumbent.number, book.gain) == (back.number, None)


def test_a_training_that_lives_goes_on_as_it_was(adopted: World) -> None:
    (run,) = adopted.store.runs()
    begun = adopted.begin(space=adopted.space.moving(0.05), begins_anew=True, run_id=run.run_id)
    assert begun.search.book.incumbent.setting == LATE


def test_a_search_that_was_ended_for_good_stays_so_where_its_settings_come_too_late(adopted: World) -> None:
    begun = adopted.begin()
    begun.search.stop(because="command", by="by hand", final=True)
    adopted.end(begun, unfinished=True)  # as where it was killed after that
    for space in (adopted.space.moving(0.05), unmoved(adopted.space), *[adopted.space.moving(0.05)] * 2):
        again = adopted.begin(space=space, learning_rate=1e-5)
        assert again.search.book.incumbent.setting == adopted.space.moving(0.05).earlier(LATE)
        assert again.search.next() is None
        adopted.end(again, unfinished=True)
    told = RunSummary.read(adopted.store, adopted.store.runs()[0])
    assert [one.kind for one in told.notes].count("movement") == 1
    assert told.best == len(told.rows) - 1


def test_what_comes_late_is_tried_again_also_where_the_run_began_with_it(world: World) -> None:
    kept(world, LATE)
    begun = world.begin()
    assert begun.search.book.trials[0].setting == LATE
    world.go(begun, 1)
    world.end(begun, unfinished=True)
    begun = world.begin(space=unmoved(world.space), begins_anew=True)
    assert [one.setting for one in world.go(begun, 2, movement_percent=1e-3).requests] == [START, LATE]


def test_what_had_to_run_is_not_proposed_once_more(adopted: World) -> None:
    """Where the training was killed before it was measured."""
    begun = adopted.begin()
    adopted.go(begun, 1, movement_percent=0.05)  # what comes earlier runs from here on
    earlier = begun.search.book.incumbent
    assert (earlier.setting, earlier.state) == (adopted.space.moving(0.05).earlier(LATE), TrialState.PLANNED)
    adopted.end(begun, unfinished=True)
    begun = adopted.begin(space=adopted.space.moving(0.05))
    first, *others = adopted.go(begun, 4, movement_percent=0.05).requests
    assert (first.role, first.setting) == ("start", earlier.setting)
    assert earlier.setting not in [one.setting for one in others if one.role not in OF_INCUMBENT]
    (run,) = adopted.store.runs()
    assert [one.knobs for one in adopted.store.trials(run.run_id)].count(earlier.setting.knobs()) == 1


def test_what_was_tried_again_is_not_planned_once_more(adopted: World) -> None:
    begun = adopted.begin(space=unmoved(adopted.space), begins_anew=True, learning_rate=1e-5)
    assert adopted.go(begun, 2, movement_percent=1e-3).requests[-1].setting == LATE
    adopted.end(begun, unfinished=True)
    begun = adopted.begin(space=unmoved(adopted.space), learning_rate=1e-5)
    assert LATE not in [setting for setting, _ in begun.search.known.wanted[1:]]
