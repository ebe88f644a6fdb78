"""Pages as a browser draws them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiers import fast
from tests.support.zftune.daemon.chromium import CHROMIUM, needs_chromium
from tests.support.zftune.explain.runs import finished, record
from tests.support.zftune.report.documents import cpu_profile
from tests.support.zftune.report.pages import BUILDERS, Page
from zftune.explain.summary import RunSummary
from zftune.report.html import html, write_html
from zftune.report.tune import tune_page
from zftune.store import open_store

pytestmark = needs_chromium


@pytest.fixture(params=BUILDERS)
def document(request: pytest.FixtureRequest) -> dict[str, Any]:
    return BUILDERS[request.param]()


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """Of `zftune explain`, with enough settings to tell what matters."""
    with open_store("sqlite://", environment={"HOME": "/nowhere"}) as store:
        run, _ = finished(store, 8, most_measurements=40)
        return RunSummary.read(store, record(store, run)).document()


def browse(page: Path, folder: Path, size: str) -> tuple[str, list[str]]:
    """What a browser makes of a page, and the lines of its console; it can reach no server."""
    done = subprocess.run(
        [
            str(CHROMIUM),
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking"),
            *("--enable-logging=stderr", "--v=0", "--virtual-time-budget=20000"),
            *(f"--user-data-dir={folder / 'browser'}", f"--window-size={size}"),
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "HOME": str(folder)},
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("size", fast(["420,2600"], all_of=["1400,2200", "420,2600"]))
def test_a_browser_draws_it_without_errors(document: dict[str, Any], size: str, tmp_path: Path) -> None:
    write_html(document, tmp_path / "report.html")
    drawn, console = browse(tmp_path / "report.html", tmp_path, size)
    assert console == []
    expected = ["timeline", "run", "roofs"] if document["roofs"] is not None else ["timeline", "run"]
    assert re.findall(r'<div class="plot[^"]*" id="(\w+)"[^>]*data-drawn="yes"', drawn) == expected
    figures = Page((tmp_path / "report.html").read_text(encoding="utf-8")).json("figures")
    bars = sum(len(trace["x"]) for name in expected for trace in figures[name]["data"] if trace["type"] == "bar")
    assert drawn.count('<g class="point">') >= 0.9 * bars  # those of no length are left out


@pytest.mark.smoke
@pytest.mark.parametrize(
    "fault",
    fast(
        ['<img src="http://127.0.0.1:9/x.png">'],
        all_of=["<script>throw new Error('x')</script>", '<img src="http://127.0.0.1:9/x.png">'],
    ),
)
def test_a_browser_tells_errors_and_requests(fault: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(html(cpu_profile()).replace("</main>", f"{fault}</main>"), encoding="utf-8")
    _, console = browse(page, tmp_path, "800,600")
    assert len(console) == 1


@pytest.mark.smoke
@pytest.mark.parametrize("size", fast(["420,3600"], all_of=["1400,2400", "420,3600"]))
def test_a_browser_draws_a_search_without_errors(told: dict[str, Any], size: str, tmp_path: Path) -> None:
    (tmp_path / "tune.html").write_text(tune_page(told), encoding="utf-8")
    drawn, console = browse(tmp_path / "tune.html", tmp_path, size)
    assert console == []
    found = re.findall(r'<div class="plot[^"]*" id="(\w+)"[^>]*data-drawn="yes"', drawn)
    assert found == ["history", "plane", "knobs"]
