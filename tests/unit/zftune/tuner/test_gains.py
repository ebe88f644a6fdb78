"""What the best settings gain, over what, and when that is measured anew."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.zftune.tuner.drifting import FAST, World
from tests.support.zftune.tuner.surfaces import START


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
