"""One table of words: it has every state, decision, cause and role that there is, and the page has the same."""

from __future__ import annotations

from typing import get_args

from zftune import words
from zftune.daemon.runs import states
from zftune.profile.schema import CAUSES
from zftune.quality import Trend
from zftune.store.types import DecisionKind, RunState, TrialState
from zftune.tuner.states import Role


def test_every_state_kind_and_cause_has_a_word() -> None:
    assert set(words.LIVE_STATES) == {one.name for one in get_args(states.State)}
    assert set(words.TRIALS) == {one.value for one in TrialState}
    assert set(words.RUN_STATES) == {"ended", *(one.value for one in RunState if one is not RunState.LOST)}
    assert set(words.ROLES) == set(get_args(Role))
    assert set(words.DECISIONS) == set(get_args(DecisionKind))
    assert tuple(words.CAUSES) == (*CAUSES, "thread")  # which a plan has alone
    assert set(words.TRENDS) == set(get_args(Trend))


def test_settings_in_short() -> None:
    knobs = {"topk_ratio": 0.123456, "update_interval": 4, "overlap_step": True, "host_threads": 2, "new": None}
    assert words.short_setting(knobs, few=True) == "k0.1235 S4"
    assert words.short_setting({**knobs, "overlap_step": False}, few=True) == "k0.1235 S4 sync"
    assert words.short_setting(knobs) == "k 0.1235 S 4 host_threads 2 new default"
    assert words.short_setting({**knobs, "overlap_step": False}).endswith(
        " overlap_step off host_threads 2 new default"
    )
