"""What a tuner says at its end."""

from __future__ import annotations

import logging

from tests.support.zftune.tuner.surfaces import make
from zftune.store.account import Count, saved_with_error
from zftune.tuner.messages import conclusion
from zftune.tuner.messages import sentence as in_words
from zftune.tuner.search import Search


def said(search: Search | None, *, over: bool = False) -> tuple[int, str]:
    count = Count() if search is None else Count(seconds=2 * search.cost.elapsed_s, spent_s=search.cost.spent_s)
    return conclusion(search, count, steps=60, begins=8, over=over)


def test_a_search_that_had_not_begun_names_what_was_missing() -> None:
    level, sentence = said(None)
    assert level == logging.WARNING
    assert "which begins after 8 steps and some seconds of preparation" in sentence
    search, driver = make(6, 0.05)
    assert "and takes 68 more steps" in said(search)[1]
    driver.run(search, most=1)
    search.stop("Tuning ended.")
    assert said(search) == (
        logging.WARNING,
        "zftune tuned nothing: the training took 60 steps, and only the settings that it began with were measured.",
    )


def test_nothing_is_claimed_of_settings_that_were_not_tried() -> None:
    search, driver = make(1, 0.05, sampler="none")
    driver.run(search, most=1)
    search.stop("That is enough.")
    level, sentence = said(search, over=True)
    assert level == logging.INFO
    assert sentence.endswith("\nGain: none. No other setting was measured. That is enough.")


def test_knobs_cost_and_gain_are_three_lines() -> None:
    search, driver = make(6, 0.05)
    driver.run(search)
    assert search.book.gain is not None
    level, sentence = said(search, over=True)
    assert level == logging.INFO
    took_s = 2 * search.cost.elapsed_s  # by the account: more than what the search saw of it
    spent, share = search.cost.spent_s, search.cost.spent_s / took_s
    assert 0 < share < 1
    assert sentence.splitlines() == [
        f"zftune keeps {search.book.incumbent.setting}.",
        (
            f"Time spent: exploring took {spent:.1f} s more than the settings that were best so far, "
            f"{100 * share:.1f}% of the {took_s:.1f} s."
        ),
        f"Gain: {search.book.gain} of the step time. {in_words(search.notes[-1])}",
    ]
    gain = {"share": search.book.gain.share, "error": 2 * search.book.gain.error}
    count = Count(seconds=50.0, spent_s=5.0, saved_s=20.0)
    _, sentence = conclusion(search, count, steps=60, begins=8, over=True)
    assert f"10.0% of the 50.0 s; {saved_with_error(20.0, gain)} were saved." in sentence


def test_what_the_guard_did_is_the_fourth_line() -> None:
    search, driver = make(6, 0.05)
    driver.run(search)
    search.guard("Stopped at step 9: the loss is nan.")
    _, sentence = said(search, over=True)
    kept, _, gain, guard = sentence.splitlines()
    assert kept == f"zftune keeps {search.book.trials[0].setting}."
    assert gain == "Gain: none. What had been adopted was taken back (guard)."
    assert guard == "Guard: Stopped at step 9: the loss is nan."
