"""How a run's state follows from its search's, and from commands."""

from __future__ import annotations

import pytest

from zftune.daemon.runs import states
from zftune.daemon.runs.states import NotAllowedError, State
from zftune.store.types import Decision
from zftune.tuner import states as search
from zftune.words import LIVE_STATES

AGAIN = "the best settings so far are measured once more"
KEEP = Decision("keep", 3, {"text": "not faster"})
WHOLE: list[states.Going] = [
    states.Warming(), states.Baseline(), states.Searching(1), states.Confirming(2), states.Frozen("enough"),
    states.Drifted("other times"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("state", "notes", "expected"),
    [
        (search.Opening(), [], states.Baseline()),
        (search.Opening(), [Decision("resume")], states.Baseline(AGAIN)),
        (search.Opening(), [Decision("reopen", None, {"text": "other tokens"})], states.Drifted("other tokens")),
        (search.Choosing(), [], states.Searching(None, "the next setting is being chosen")),
        (search.Unit(3, 16, is_look=True), [], states.Searching(3, "setting 3 is compared for the first time")),
        (search.Unit(4, 16), [], states.Confirming(4, "setting 4 is compared with the best so far")),
        (search.Resting(5), [Decision("hold", None, {"text": "dear"}), KEEP], states.Searching(None, "dear")),
        (search.Resting(5, is_idle=True), [Decision("hold", None, {"text": "idle"}), KEEP], states.Frozen("idle")),
        (search.Stopped(), [Decision("stop", None, {"text": "enough"})], states.Frozen("enough")),
        (search.Stopped(final=True), [Decision("guard", 0, {"text": "wrong"})], states.Frozen("wrong", pinned=True)),
    ],
)
def test_a_state_follows_from_the_search(state: search.State, notes: list[Decision], expected: State) -> None:
    assert states.of_search(state, notes) == expected


@pytest.mark.parametrize("state", WHOLE, ids=lambda one: one.name)
def test_a_pause_holds_and_a_resume_goes_on(state: states.Going) -> None:
    paused = states.paused(state)
    assert paused.held == state
    assert states.paused(paused) == paused
    assert states.resumed(paused) == state
    assert states.resumed(states.advanced(paused, states.Frozen("later"))) == states.Frozen("later")
    with pytest.raises(NotAllowedError, match=f"cannot resume: the run is {LIVE_STATES[state.name]}, not paused"):
        states.resumed(state)


def test_a_search_that_has_ended_for_good_is_not_paused() -> None:
    with pytest.raises(NotAllowedError, match="cannot pause: Rolled back"):
        states.paused(states.Frozen("Rolled back", pinned=True))


@pytest.mark.parametrize("state", [*WHOLE, states.Paused(states.Baseline())], ids=lambda one: one.name)
def test_what_has_ended_stays_so(state: State) -> None:
    ended = states.ended(state, "goodbye")
    assert ended == states.Ended("goodbye")
    assert states.ended(ended, "another reason") == ended
    assert states.advanced(ended, states.Baseline()) == ended
    with pytest.raises(NotAllowedError, match="cannot pause: goodbye"):
        states.paused(ended)
    with pytest.raises(NotAllowedError, match="cannot resume: goodbye"):
        states.resumed(ended)


def test_names_are_those_of_the_interface() -> None:
    names = [state.name for state in WHOLE] + [states.Paused.name, states.Ended.name]
    assert names == ["warming", "baseline", "searching", "confirming", "frozen", "drifted", "paused", "ended"]
