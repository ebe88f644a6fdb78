"""Decisions in words: each template has the figures that it needs."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import replace

from tests.support.zftune.tuner.surfaces import START, TOKENS, make
from zftune.store.types import Decision
from zftune.tuner.messages import BECAUSE, TEMPLATES, sentence
from zftune.tuner.pace import Pace
from zftune.tuner.states import OF_INCUMBENT, Outcome, Request

ELSEWHERE = {"died", "survived", "pause", "unpause", "rate", "trained_on", "limit", "fixed", "surprise", "incumbent"}
"""Of the store, the recorder and the daemon, or of a search that the one below is not."""


def template(decision: Decision) -> str:
    return str(decision.details.get(BECAUSE) or ("text" if "text" in decision.details else decision.kind))


def test_every_decision_of_a_search_has_its_figures() -> None:
    found: list[Decision] = []
    for seed in range(4):
        search, driver = make(seed, 0.03, hold=True, cost_floor_s=30.0)
        search.device_limit_bytes = 10**9
        asked = 0

        def outcome(request: Request, measure: Callable[[Request], Outcome] = driver.measure) -> Outcome:
            nonlocal asked
            asked += 1
            if request.role not in OF_INCUMBENT and asked % 7 == 0:
                return Outcome("crashed", tokens=TOKENS, reason="no memory")
            if request.role == "a2" and 20 < asked < 30:
                return Outcome("void", tokens=TOKENS, reason="hot")
            more = {"movement_percent": 0.5} if asked == 60 else {"device_bytes": int(1.1e9)} if asked == 70 else {}
            pace = Pace(link_gbps=5.0 if asked > 40 else 10.0)
            tokens = 2 * TOKENS if asked > 50 else TOKENS
            return replace(measure(request), tokens=tokens, pace=pace, **more)

        driver.fault = outcome
        driver.run(search, most=90)
        search.remark("Something was found out.")
        if search.book.adoptions:
            search.roll_back("by hand")
        search.guard("Training goes on.")
        search.stop(because="command", by="by hand")
        search.begin_again()
        found += search.notes
    made = {template(one) for one in found}
    assert made >= {"start", "adopt", "keep", "crash", "pace", "tokens", "movement", "text", "command"}
    for one in found:
        wanted = {name for _, name, _, _ in string.Formatter().parse(TEMPLATES[template(one)]) if name}
        assert wanted <= set(one.details)
        assert sentence(one) != f"{one.kind}."
    assert set(TEMPLATES) - made - ELSEWHERE <= {"void", "idle", "budget", "memory", "rollback", "resume"}


def test_figures_of_another_version_are_no_error() -> None:
    assert sentence(Decision("adopt", 1)) == "adopt."
    assert sentence(Decision("remark", None, {BECAUSE: "unheard of"})) == "remark."


def test_a_setting_that_was_compared_is_told_with_what_was_needed() -> None:
    search, driver = make(1, 0.03)
    driver.run(search)
    adopted = next(one for one in search.notes if one.kind == "adopt")
    assert adopted.details["evidence"] > adopted.details["needed"]
    assert adopted.details["units"] >= 2
    kept = [one for one in search.notes if one.kind == "keep"]
    assert all(one.details["evidence"] <= one.details["needed"] or one.details["units"] == 1 for one in kept)
    assert search.book.trials[0].setting == START
