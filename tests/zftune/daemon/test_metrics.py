"""What Prometheus reads, who may read it, and the file for its node exporter."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.zftune.daemon.daemons import Daemon, exchange, get, serving, status_of
from tests.zftune.daemon.test_page import Browser, link
from zftune import __version__
from zftune.daemon import PROTOCOL
from zftune.daemon.client.http import DaemonClient
from zftune.daemon.server import sampling as metrics_module
from zftune.daemon.server.answers import DaemonState

ROOT = Path(__file__).parents[3]


def samples(text: str) -> dict[str, float]:
    """Values by name; the parser refuses what Prometheus would."""
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def body(answer: bytes) -> str:
    assert status_of(answer) == 200, answer
    return answer.partition(b"\r\n\r\n")[2].decode()


def test_the_socket_gives_the_metrics(served: Daemon) -> None:
    answer = exchange(served.path, get("/metrics"))
    assert b"\r\ncontent-type: text/plain; version=0.0.4" in answer
    found = samples(body(answer))
    assert found["zftune_daemon_info"] == 1
    assert f'zftune_daemon_info{{protocol="{PROTOCOL}",version="{__version__}"}}' in body(answer)
    assert found["zftune_daemon_uptime_seconds"] > 0
    assert found["zftune_runs"] == 0
    with DaemonClient(served.path) as client:
        client.post("/v1/test/runs/3")
        client.post("/v1/test/echo/1", {"topk_ratio": 0, "name": ""})
        after = samples(body(exchange(served.path, get("/metrics"))))
        client.post("/v1/test/runs/0")
    assert after["zftune_runs"] == 3
    assert after["test_asked_total"] == found["test_asked_total"] + 1  # a service's own


def test_a_token_reads_the_metrics_and_nothing_else(served: Daemon) -> None:
    scraper = Browser(link(served)[0])
    assert status_of(scraper.ask("GET", "/metrics")) == 401
    file = served.path.with_name("z.sock.metrics-token")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    token = file.read_text().strip()
    scraper.headers["authorization"] = f"Bearer {token}"
    assert samples(body(scraper.ask("GET", "/metrics")))["zftune_runs"] == 0
    for method, path in (("GET", "/"), ("GET", "/v1/health"), ("POST", "/metrics"), ("POST", "/v1/test/runs/1")):
        assert status_of(scraper.ask(method, path)) == 401
    assert status_of(scraper.ask("GET", "/metrics", host="evil.example")) == 421
    for wrong in (token, f"Bearer {token}x", f"Bearer {token[:-1]}", f"bearer  {token}", "Bearer ", "Basic x"):
        assert status_of(scraper.ask("GET", "/metrics", authorization=wrong)) == 401
    assert token not in served.log.read_text()


def test_a_port_may_be_there_from_the_start_and_the_token_stays(folder: Path) -> None:
    tokens = []
    for _ in range(2):
        with serving(folder, "--port", "0") as daemon:
            assert "the page and /metrics are on http://127.0.0.1:" in daemon.log.read_text()
            tokens.append((folder / "z.sock.metrics-token").read_text())
            daemon.signal()
            assert daemon.ends() == 0
    assert tokens[0] == tokens[1]


def test_the_textfile_is_whole_whenever_it_is_read_and_goes_in_the_end(folder: Path) -> None:
    file = folder / "zftune.prom"
    with serving(folder, "--textfile", str(file), module="tests.zftune.daemon.hosted_often") as daemon:
        found: set[float] = set()
        while len(found) < 20:  # written again and again meanwhile
            try:
                text = file.read_text()
            except FileNotFoundError:
                assert not found, "it was away between two writes"
                continue
            assert samples(text)["zftune_runs"] == 0
            assert text.splitlines()[-1].startswith("test_asked_created")
            found.add(samples(text)["zftune_daemon_uptime_seconds"])
        daemon.signal()
        assert daemon.ends() == 0
    assert {path.name for path in folder.iterdir()} == {"log", "n"}


def test_a_textfile_that_cannot_be_written_ends_nothing(folder: Path) -> None:
    blocked = folder / "blocked"
    blocked.mkdir()
    with serving(folder, "--textfile", str(blocked), module="tests.zftune.daemon.hosted_often") as daemon:
        assert status_of(exchange(daemon.path, get("/v1/health"))) == 200
        daemon.signal()
        assert daemon.ends() == 0
    assert daemon.log.read_text().count("cannot be written") == 1
    assert list(blocked.iterdir()) == []


def test_the_usual_period_suits_a_scraper() -> None:
    assert 5 <= metrics_module.TEXTFILE_PERIOD_S <= 60


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
