"""What Prometheus reads, who may read it, and the file for its node exporter."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.zftune.daemon.in_process import TOKEN, Application, Client
from tests.unit.zftune.daemon.test_page import Browser
from zftune import __version__
from zftune.daemon import PROTOCOL
from zftune.daemon.server import sampling as metrics_module
from zftune.daemon.server.answers import DaemonState
from zftune.daemon.server.sampling import Metrics

ROOT = Path(__file__).parents[4]


def samples(text: str) -> dict[str, float]:
    """Values by name; the parser refuses what Prometheus would."""
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_the_socket_gives_the_metrics(application: Application) -> None:
    answer = application.ask("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples(answer.text)
    assert f'zftune_daemon_info{{protocol="{PROTOCOL}",version="{__version__}"}} 1.0' in answer.text
    assert found["zftune_daemon_uptime_seconds"] >= 0
    assert found["zftune_runs"] == 0
    client = Client(application)
    client.post("/v1/test/runs/3")
    client.post("/v1/test/echo/1", {"topk_ratio": 0, "name": ""})
    after = samples(application.ask("GET", "/metrics").text)
    client.post("/v1/test/runs/0")
    assert after["zftune_runs"] == 3
    assert after["test_asked_total"] == found["test_asked_total"] + 1  # a service's own


def test_a_token_reads_the_metrics_and_nothing_else(application: Application) -> None:
    scraper = Browser(application)
    assert scraper.ask("GET", "/metrics").status_code == 401
    scraper.headers["authorization"] = f"Bearer {TOKEN}"
    assert samples(scraper.ask("GET", "/metrics").text)["zftune_runs"] == 0
    for method, path in (("GET", "/"), ("GET", "/v1/health"), ("POST", "/metrics"), ("POST", "/v1/test/runs/1")):
        assert scraper.ask(method, path).status_code == 401
    assert scraper.ask("GET", "/metrics", host="evil.example").status_code == 421
    for wrong in (TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"bearer  {TOKEN}", "Bearer", "Basic x"):
        assert scraper.ask("GET", "/metrics", authorization=wrong).status_code == 401


def test_the_textfile_is_whole_whenever_it_is_read_and_goes_in_the_end(tmp_path: Path) -> None:
    file = tmp_path / "zftune.prom"

    async def written() -> None:
        state = DaemonState()
        keeping = asyncio.create_task(Metrics(state).keep_textfile(file, 0.001))
        found: set[float] = set()
        while len(found) < 5:  # written again and again meanwhile
            await asyncio.sleep(0)
            if file.exists():
                found.add(samples(file.read_text())["zftune_daemon_uptime_seconds"])
        state.stopping.set()
        await keeping

    asyncio.run(written())
    assert list(tmp_path.iterdir()) == []


def test_a_textfile_that_cannot_be_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def blocked() -> None:
        asked = 0

        def clock() -> float:
            nonlocal asked
            asked += 1
            if asked == 5:
                state.stopping.set()
            return 0.0

        state = DaemonState(clock=clock)
        await Metrics(state).keep_textfile(tmp_path, 0.001)

    asyncio.run(blocked())
    assert sum("cannot be written" in one for one in caplog.messages) == 1


def test_the_dashboard_asks_for_what_the_daemon_offers_with_its_labels() -> None:
    figures = dict.fromkeys([*metrics_module._OF_GPU, *metrics_module._OF_HOST], 1.0)
    seen = metrics_module.Seen(figures=figures, missing="")
    metrics = metrics_module.Metrics(DaemonState())
    node: Any = SimpleNamespace(gpus=lambda: {"GPU-1": seen}, host=seen)
    metrics.registry.register(metrics_module.NodeFigures(node))
    offered: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            offered[sample.name] = {*sample.labels, "instance", "job"}  # Prometheus adds two
    document = json.loads((ROOT / "examples/grafana/zftune.json").read_text())
    variables = {f"${one['name']}" for one in document["templating"]["list"]}
    asked: set[str] = set()
    for panel in document["panels"]:
        for target in panel["targets"]:
            names = set(re.findall(r"zftune_\w+", target["expr"]))
            labels = set(re.findall(r'(\w+)=~?"', target["expr"])) | set(
                re.findall(r"{{(\w+)}}", target["legendFormat"])
            )
            assert names, panel["title"]
            assert names <= offered.keys(), names - offered.keys()
            assert all(labels <= offered[name] for name in names), (names, labels)
            assert set(re.findall(r"\$\w+", target["expr"])) <= variables
            asked |= names
    queries = [one["query"]["query"] for one in document["templating"]["list"] if one["type"] == "query"]
    assert {name for query in queries for name in re.findall(r"zftune_\w+", query)} <= offered.keys()
    assert asked == offered.keys()  # nothing is left out
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
