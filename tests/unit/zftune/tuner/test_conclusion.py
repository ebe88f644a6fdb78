"""What a tuner says at its end."""

from __future__ import annotations

import logging
from dataclasses import replace

from tests.support.zftune.tuner.surfaces import make
from zftune.store.account import Count, saved_with_error
from zftune.store.types import Decision
from zftune.tuner.messages import conclusion
from zftune.tuner.search import Search
from zftune.tuner.states import Comparing


def said(search: Search | None, *, over: bool = False, waited_s: float = 0.0) -> tuple[int, str]:
    count = Count() if search is None else Count(seconds=2 * search.cost.elapsed_s, spent_s=search.cost.spent_s)
    return conclusion(search, count, steps=60, begins=8, over=over, waited_s=waited_s)


def test_only_the_start_was_measured() -> None:
    search, driver = make(6, 0.05)
    driver.run(search, most=1)
    search.stop("Tuning ended.")
    level, sentence = said(search)
    assert level == logging.WARNING
    assert sentence == (
        "zftune tuned nothing: the training took 60 steps, and only the settings that it began with were measured."
    )


def test_a_search_that_got_no_core_says_so_instead_of_counting_steps() -> None:
    why = "(choosing settings has waited 412 s for a core in all: the training and other programs take them)"
    took = "zftune tuned nothing: the training took 60 steps"
    search, driver = make(6, 0.05)
    for begun in (None, search):
        assert said(begun, waited_s=412.4) == (logging.WARNING, f"{took} and ended before a first measurement {why}.")
        assert "which begins after 8 steps and some seconds of preparation" in said(begun, waited_s=4.9)[1]
    driver.run(search, most=1)
    search.stop("Tuning ended.")
    assert said(search, waited_s=412.4)[1] == (f"{took}, and only the settings that it began with were measured {why}.")


def test_nothing_is_claimed_of_settings_that_were_not_tried() -> None:
    search, driver = make(1, 0.05, sampler="none")
    driver.run(search, most=1)
    search.stop("That is enough.")
    level, sentence = said(search, over=True)
    assert level == logging.INFO
    assert sentence.endswith(
        "\nGain: none. No other setting was measured, so that nothing is known of them. That is enough."
    )


def test_what_was_measured_and_not_compared_is_told_as_such() -> None:
    search, driver = make(6, 0.05)
    while not isinstance(search.state, Comparing):
        driver.run(search, most=1)
    not_compared = "measured, but not compared with those that it began with"
    tried = len({note.trial for note in search.notes if note.kind == "keep"}) + 1
    alone, several = f"The one other setting that was tried was {not_compared}.", f"; one of them was {not_compared}."
    assert (alone if tried == 1 else several) in said(search)[1]
    for trial in search.book.trials[1:]:
        trial.samples.clear()  # as where the search begins again
    assert (alone if tried == 1 else several) in said(search)[1]
    search.notes.append(Decision("abort", "Cut short.", search.state.trial))  # when it was tried again, say
    assert not_compared not in said(search)[1]


def test_what_was_found_is_said() -> None:
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
        f"Gain: {search.book.gain} of the step time. {search.notes[-1].reason}",
    ]
    for since in ("", ", 2 times since"):
        search.book.forget()
        assert f"step time, measured before the search began again{since}. " in said(search, over=True)[1]
    gain = {"share": search.book.gain.share, "error": 2 * search.book.gain.error}
    count = Count(seconds=50.0, spent_s=5.0, saved_s=20.0)
    _, sentence = conclusion(search, count, steps=60, begins=8, over=True)
    assert f"10.0% of the 50.0 s; {saved_with_error(20.0, gain)} were saved." in sentence
    assert " +/- " in saved_with_error(20.0, gain)


def test_what_the_guard_did_is_the_fourth_line() -> None:
    search, driver = make(6, 0.05)
    driver.run(search)
    search.guard("Stopped at step 9: the loss is nan.")
    _, sentence = said(search, over=True)
    kept, _, gain, guard = sentence.splitlines()
    assert kept == f"zftune keeps {search.book.trials[0].setting}."
    assert gain == "Gain: none. What had been adopted was taken back, since training went wrong."
    assert guard == "Guard: Stopped at step 9: the loss is nan."


def test_what_was_given_up_for_the_quality_gains_nothing() -> None:
    search, driver = make(6, 0.05, watch=True)
    driver.fault = lambda request: replace(
        driver.measure(request), movement_percent=5.0 if search.book.adoptions and request.role == "hold" else None
    )
    while "movement" not in {note.kind for note in search.notes}:
        driver.run(search, most=1)
    assert search.book.adoptions
    gain = said(search, over=True)[1].splitlines()[2]
    assert gain.startswith("Gain: none. What had been adopted was given up for the quality. ")
