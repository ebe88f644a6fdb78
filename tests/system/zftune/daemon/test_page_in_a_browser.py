"""The page as a browser shows it, of runs that train: what is read on it, and what its buttons do."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.zftune.daemon.chromium import Chromium, chromium, needs_chromium
from tests.support.zftune.daemon.daemons import Daemon
from tests.support.zftune.daemon.scripted import EVIL, START, Training, training_under
from zftune.daemon.client.http import DaemonClient

pytestmark = needs_chromium

STEP = "Number(document.querySelector('#figures dd').firstChild.data)"
STATE = "document.querySelector('#state .state').textContent"


def button(command: str) -> str:
    return f"document.querySelector('[data-command={command}]')"


def traces(browser: Chromium, plot: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = browser.run(
        f"Object.fromEntries(document.getElementById('{plot}').data.map(one => [one.name, one.y]))"
    )
    return found


def opened(browser: Chromium, daemon: Daemon) -> str:
    with DaemonClient(daemon.path) as client:
        url = client.post("/v1/page")["url"]
    browser.size(1400, 1000)
    browser.open(url)
    browser.until("document.querySelector('#figures dd')")
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def test_a_run_is_seen_and_told_what_to_do(folder: Path) -> None:
    with training_under(folder, "gpt2", EVIL) as (daemon, (training, evil)), chromium(folder) as browser:
        origin = opened(browser, daemon)
        for phase in (
            shows_hostile_text_as_text,
            shows_the_run,
            lives,
            pauses_by_keyboard,
            rolls_back_when_it_is_meant,
        ):
            phase(browser, evil if phase is shows_hostile_text_as_text else training)
            evil.report()  # it lives
        fits(browser)
        assert browser.complaints == []
        assert {"page.css", "page.js", "plotly-basic.min.js", "runs"} <= {
            url.rpartition("/")[2] for url in browser.asked
        }
        assert [url for url in browser.asked if not url.startswith(f"{origin}/")] == []
        daemon.process.kill()
        browser.until("document.querySelector('#daemon.lost')?.textContent.includes('does not answer')")
        assert browser.run("[...document.querySelectorAll('#buttons button')].every(one => one.disabled)")


def shows_the_run(browser: Chromium, training: Training) -> None:
    browser.run("document.querySelectorAll('#runs button')[1].click()")
    browser.until(f"document.querySelector('#run-title').textContent === 'gpt2 · {training.called}'")
    assert browser.run("location.hash.slice(1)") == training.run
    assert browser.run("document.querySelectorAll('#runs li').length") == 2
    decisions = browser.text("#decisions")
    assert re.search(r"adopted\s+Adopted: .* of the step time", decisions)
    assert decisions.index("Adopted: ") < decisions.index("The search begins from")  # the newest first
    assert "the best" in browser.text("#trials")
    assert re.search(r"gain\s+(19|20)\.\d ± 0\.\d%", browser.text("#figures"))
    assert re.search(r"so far; (\d[\d.]* ± [\d.]+ s saved|nothing saved)", browser.text("#figures"))
    assert len(traces(browser, "steps")) == 5  # four causes, and the whole step
    course = traces(browser, "course")
    assert course["loss"][0] > course["loss"][-1] > 2.5  # beside step times, and it falls
    assert {"step time", "loss", "topk_ratio", "update_interval", "apply_lag"} <= set(course)
    assert course["update_interval"][0] == START.update_interval
    bar = "document.querySelector('#runs [aria-pressed=true] .bar')"
    shares = browser.run(
        f"[...{bar}.children].map(one => one.className + ' ' + parseFloat(one.style.width).toFixed(0))"
    )
    assert shares == ["fill-host 12", "fill-h2d 8", "fill-d2h 4", "fill-select 1"]
    assert browser.run(f"{bar}.getAttribute('aria-label')").endswith("host 12%, h2d 8%, d2h 4%")


def lives(browser: Chromium, training: Training) -> None:
    for _ in range(2):
        training.go_on()
        browser.until(f"{STEP} === {training.step}")


def pauses_by_keyboard(browser: Chromium, training: Training) -> None:
    browser.until(f"{STATE} === 'settled' && {button('resume')}.disabled")
    browser.run(f"{button('pause')}.focus()")
    browser.key("Enter", 13)
    browser.until(f"{STATE} === 'paused' && {button('pause')}.disabled")
    assert training.report().kind == "pause"
    browser.until("document.querySelector('#decisions .kind').textContent === 'paused'")
    browser.run(f"{button('resume')}.click()")
    browser.until(f"{STATE} === 'settled'")
    assert training.report().kind != "pause"


def shows_hostile_text_as_text(browser: Chromium, evil: Training) -> None:
    assert browser.text("#run-title").endswith(evil.called)  # the newest
    shown = EVIL.partition("\x1b")[0]
    for selector in ("#run-title", "#command", "#runs"):
        assert shown in browser.text(selector)
    assert browser.run("document.querySelectorAll('img, body script').length") == 0


def rolls_back_when_it_is_meant(browser: Chromium, training: Training) -> None:
    browser.run(f"{button('rollback')}.click()")
    assert browser.run(f"{button('rollback')}.textContent") == "Really roll back?"
    assert training.report().incumbent != START
    browser.run(f"{button('rollback')}.click()")
    browser.until("document.querySelector('#decisions .kind').textContent === 'rolled back'")
    assert training.report().incumbent == START
    browser.until("document.querySelector('#figures').innerText.includes('what was adopted was taken back')")
    browser.until(f"{button('rollback')}.disabled")  # there is no other one to go back to
    browser.run(f"{button('stop')}.click()")
    browser.run(f"{button('stop')}.click()")
    browser.until("document.querySelector('#state').textContent.includes('Rolled back')")
    training.until(lambda: training.last.kind == "stop")


def fits(browser: Chromium) -> None:
    """Whatever the size, nothing but the table of trials is wider than the window; dark is dark."""
    for width in (420, 1400):
        for scheme in ("light", "dark"):
            browser.size(width, 900, scheme)
            assert browser.run("document.documentElement.scrollWidth") == width
            ground = browser.run("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", ground))) < 3 * 64) == (scheme == "dark")


def test_a_run_without_steps_and_a_daemon_without_runs(folder: Path) -> None:
    with training_under(folder) as (daemon, _), chromium(folder) as browser:
        with DaemonClient(daemon.path) as client:
            browser.open(client.post("/v1/page")["url"])
            browser.until("document.querySelector('#daemon')?.textContent === '0 runs'")
            assert "No run is followed." in browser.text("main")
            assert not browser.run("document.querySelector('#run').checkVisibility()")
            Training(client, run="b1" * 16, model="")
            browser.until("/^a run · [0-9a-f]{8}$/.test(document.querySelector('#run-title').textContent)")
            assert "no step was reported yet" in browser.text("main")
            assert not browser.run("document.querySelector('#steps').checkVisibility()")
            assert not browser.run("document.querySelector('#no-run').checkVisibility()")
        assert browser.complaints == []
