"""The page beside a training that really trains: what the browser shows is what the optimizer does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.zftune.daemon.chromium import SOON_S, chromium, needs_chromium
from tests.zftune.daemon.daemons import COMMAND, serving
from tests.zftune.daemon.runs.loops import Loop
from tests.zftune.daemon.test_page_in_a_browser import STATE, STEP, button, opened
from zftune.daemon.client.http import DaemonClient
from zftune.explain.document import chosen_run
from zftune.store import open_store

pytestmark = needs_chromium


@contextmanager
def trains(training: Loop) -> Iterator[None]:
    """Let it train beside the test."""
    ends = threading.Event()
    thread = threading.Thread(target=lambda: training.run(ends.is_set))
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        training.close()


def test_it_is_seen_paused_and_gone_on_with(folder: Path) -> None:
    more = {"ZFTUNE_DB": str(folder / "zftune.db"), "HOME": str(folder)}
    with serving(folder, module=COMMAND, more=more) as daemon, chromium(folder) as browser:
        training = Loop(DaemonClient(daemon.path), most=500)
        with trains(training), DaemonClient(daemon.path) as client:
            browser.size(1400, 1000)
            while not client.get("/v1/runs"):
                assert daemon.process.poll() is None
            opened(browser, daemon)
            browser.until(f"['searching', 'comparing'].includes({STATE})")
            first = browser.run(STEP)
            browser.until(f"{STEP} > {first}")  # it lives
            browser.run(f"{button('pause')}.click()")
            browser.until(f"{STATE} === 'paused'")
            paused_at = browser.run(STEP)
            browser.until(f"{STEP} > {paused_at} + 20")  # the training goes on
            assert not training.requested
            assert training.tuner is not None
            assert training.knobs == training.tuner.incumbent
            changes = len(training.changes)
            later = browser.run(STEP)
            browser.until(f"{STEP} > {later} + 20")
            assert len(training.changes) == changes
            browser.run(f"{button('resume')}.click()")
            browser.until(f"{STATE} !== 'paused'")
            shown = browser.run("document.querySelectorAll('#trials tr').length")
            browser.until(f"document.querySelectorAll('#trials tr').length > {shown}")
            decisions = browser.text("#decisions")
            assert (
                decisions.index("Resumed by hand.")
                < decisions.index("Paused by hand")
                < decisions.rindex("The search begins from")
            )
            ends = time.monotonic() + SOON_S  # a row appears when a setting is chosen, before the training takes it
            while len(training.changes) <= changes:
                assert time.monotonic() < ends, decisions
                time.sleep(0.02)
            with open_store(more["ZFTUNE_DB"]) as store:
                known, _ = chosen_run(store, browser.text("#run-title")[-8:])  # as zftune explain finds it
                (listed,) = client.get("/v1/runs")
                assert known.run_id == listed["record"]
        assert browser.complaints == []
