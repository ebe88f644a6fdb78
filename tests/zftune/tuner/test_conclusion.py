"""What a tuner says at its end."""

from __future__ import annotations

import logging

from tests.zftune.tuner.surfaces import make
from zftune.tuner.conclusion import Followed, conclusion
from zftune.tuner.search import Search


def said(search: Search | None, *, over: bool = False, remembered: bool = True) -> tuple[int, str]:
    return conclusion(search, Followed(steps=60, begins=8, over=over, remembered=remembered))


def test_only_the_start_was_measured() -> None:
    search, driver = make(6, 0.05)
    driver.run(search, most=1)
    search.stop("Tuning ended.")
    level, sentence = said(search)
    assert level == logging.WARNING
    assert sentence == (
        "zftune tuned nothing: the training took 60 steps, and nothing but the knobs that it began with was measured; "
        "the next run of this training goes on from here."
    )
    assert said(search, remembered=False)[1].endswith("was measured.")


def test_nothing_is_claimed_of_settings_that_were_not_tried() -> None:
    search, driver = make(1, 0.05, sampler="none")
    driver.run(search, most=1)
    search.stop("That is enough.")
    level, sentence = said(search, over=True)
    assert level == logging.INFO
    assert "no other setting was measured, so that nothing is known of them. That is enough." in sentence


def test_what_was_found_is_said() -> None:
    search, driver = make(6, 0.05)
    driver.run(search)
    assert search.book.gain is not None
    level, sentence = said(search, over=True)
    assert level == logging.INFO
    assert sentence == (
        f"zftune keeps {search.book.incumbent.setting}: they save {search.book.gain} of the step time. "
        f"{search.notes[-1].reason}"
    )
