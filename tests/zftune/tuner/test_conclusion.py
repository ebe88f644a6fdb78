"""What a tuner says at its end."""

from __future__ import annotations

import logging

from tests.zftune.tuner.surfaces import make
from zftune.store.account import Count
from zftune.tuner.messages import conclusion
from zftune.tuner.search import Search


def said(search: Search | None, *, over: bool = False, remembered: bool = True) -> tuple[int, str]:
    count = Count() if search is None else Count(seconds=2 * search.cost.elapsed_s, spent_s=search.cost.spent_s)
    return conclusion(search, count, steps=60, begins=8, over=over, remembered=remembered)


def test_only_the_start_was_measured() -> None:
    search, driver = make(6, 0.05)
    driver.run(search, most=1)
    search.stop("Tuning ended.")
    level, sentence = said(search)
    assert level == logging.WARNING
    assert sentence == (
        "zftune tuned nothing: the training took 60 steps, and only the settings that it began with were measured; "
        "the next run of this training goes on from here."
    )
    assert said(search, remembered=False)[1].endswith("were measured.")


def test_nothing_is_claimed_of_settings_that_were_not_tried() -> None:
    search, driver = make(1, 0.05, sampler="none")
    driver.run(search, most=1)
    search.stop("That is enough.")
    level, sentence = said(search, over=True)
    assert level == logging.INFO
    assert sentence.endswith(
        "\nGain: none. No other setting was measured, so that nothing is known of them. That is enough."
    )


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


def test_what_the_guard_did_is_the_fourth_line() -> None:
    search, driver = make(6, 0.05)
    driver.run(search)
    search.guard("Stopped at step 9: the loss is nan.")
    _, sentence = said(search, over=True)
    kept, _, gain, guard = sentence.splitlines()
    assert kept == f"zftune keeps {search.book.trials[0].setting}."
    assert gain == "Gain: none. What had been adopted was taken back, since training went wrong."
    assert guard == "Guard: Stopped at step 9: the loss is nan."


def test_what_was_rolled_back_is_not_told_as_never_adopted() -> None:
    search, driver = make(6, 0.05)
    driver.run(search)
    while search.book.adoptions:
        search.roll_back("by hand")
    gain = said(search, over=True)[1].splitlines()[2]
    assert gain.startswith("Gain: none. What had been adopted was rolled back. Rolled back by hand: ")
