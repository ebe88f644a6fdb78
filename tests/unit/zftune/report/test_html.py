"""The page against the document it shows, as text; `tests/system/zftune/report` has it drawn by a browser."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs_version

from tests.support.zftune.report.documents import cpu_profile, gpu_profile, rig_profile
from tests.support.zftune.report.pages import BUILDERS, EVIL, Page
from zftune.errors import ZftuneError
from zftune.plotly_js import plotly_js
from zftune.profile.schema import CAUSES, PHASES, validate
from zftune.profile.verdict import WITH_DATA
from zftune.report.html import html, write_html
from zftune.report.trace import kind_of
from zftune.text import ms
from zftune.words import CAUSE_NAMES, COLOURS, LANE_NAMES


@pytest.fixture(params=BUILDERS)
def document(request: pytest.FixtureRequest) -> dict[str, Any]:
    return BUILDERS[request.param]()


def figures_of(document: dict[str, Any]) -> Any:
    return Page(html(document)).json("figures")


def test_the_documents_are_valid(document: dict[str, Any]) -> None:
    validate(document)


def test_the_page_holds_the_document(document: dict[str, Any]) -> None:
    assert Page(html(document)).json("profile") == document


def test_every_span_of_every_lane_is_drawn(document: dict[str, Any]) -> None:
    drawn = defaultdict(list)
    for trace in figures_of(document)["timeline"]["data"]:
        rows = zip(trace["base"], trace["x"], trace["y"], trace["customdata"], strict=True)
        for begin, length, lane, (label, _) in rows:
            drawn[lane].append((pytest.approx(begin), pytest.approx(begin + length), label))
            lane_key = next(key for key, name in LANE_NAMES.items() if name == lane)
            assert trace["marker"]["color"] == COLOURS[kind_of(lane_key, label)]
    lanes = document["timeline"]["lanes"]
    assert set(drawn) == {LANE_NAMES[lane] for lane, spans in lanes.items() if spans}
    for lane, spans in lanes.items():
        assert len(drawn[LANE_NAMES[lane]]) == len(spans)
        for span, found in zip(sorted(spans), sorted(drawn[LANE_NAMES[lane]], key=first_of), strict=True):
            assert tuple(span) == found


def first_of(row: tuple[Any, Any, str]) -> float:
    return float(row[0].expected)


def test_the_bars_are_the_steps_by_cause_or_phase(document: dict[str, Any]) -> None:
    bars = {trace["name"]: trace for trace in figures_of(document)["run"]["data"] if trace["type"] == "bar"}
    rows = document["per_step"]
    field, names = ("phases_ms", {phase: phase for phase in PHASES})
    if document["stall"] is not None:
        field, names = "stall_ms", {cause: CAUSE_NAMES[cause] for cause in CAUSES}
    for key, name in names.items():
        values = [row[field].get(key, 0.0) for row in rows]
        if any(values):
            bar = bars.pop(name)
            assert bar["y"] == values
            assert bar["marker"]["color"] == COLOURS[key]
            assert bar["x"] == pytest.approx([row["begin_ms"] for row in rows])
            assert bar["width"] == pytest.approx([row["step_ms"] for row in rows])
    for rest in bars.values():  # on top of the others it makes up the step
        parts = [sum(row[field].values()) for row in rows]
        assert [a + b for a, b in zip(rest["y"], parts, strict=True)] == pytest.approx([row["step_ms"] for row in rows])
    assert len(bars) == (1 if document["stall"] is not None else 0)


def test_the_samples_lie_under_the_steps_on_their_axis() -> None:
    document = gpu_profile()
    figure = figures_of(document)["run"]
    lines = [trace for trace in figure["data"] if trace["type"] == "scatter"]
    assert {trace["meta"]["field"] for trace in lines} == {
        "pcie_rx_gbps",
        "pcie_tx_gbps",
        "utilisation_percent",
        "sm_utilisation_percent",
        "cpu_percent",
        "power_w",
        "memory_used_bytes",
        "rss_bytes",
    }
    for trace in lines:
        field, device = trace["meta"]["field"], re.search(r"GPU (\d)$", trace["name"])
        rows = document["series"]["nvml" if device else "system"]
        rows = [row for row in rows if device is None or row["device"] == int(device[1])]
        known = [row for row in rows if row[field] is not None]
        assert trace["y"] == pytest.approx([row[field] * trace["meta"]["factor"] for row in known])
        assert trace["x"] == pytest.approx([row["at_ms"] for row in known])
    last = figure["layout"]["xaxis6"]
    assert [figure["layout"][f"xaxis{n or ''}"]["matches"] for n in (0, 2, 3, 4, 5)] == ["x6"] * 5
    assert "matches" not in last
    assert not any("is not shown" in text for text in Page(html(document)).text)


def test_what_is_absent_is_a_sentence_and_no_empty_plot() -> None:
    for document, absent in (
        (rig_profile(), ("PCIe", "GPU busy", "Power")),
        (cpu_profile(), ("PCIe", "GPU busy", "Power", "Stall")),
    ):
        page = Page(html(document))
        text = " ".join(page.text)
        for name in absent:
            reason = document["missing"]["stall" if name == "Stall" else "series.nvml"]
            assert f"{name} is not shown: {reason}." in text
        panels = {trace["yaxis"] for trace in page.json("figures")["run"]["data"]}
        assert len(panels) == 3  # steps, processors, memory
    assert "No lower bound is known: measured by hooks around a script" in " ".join(page.text)


def test_a_lane_without_spans_is_not_drawn() -> None:
    document = rig_profile()
    document["timeline"]["lanes"]["data"] = []
    lanes = figures_of(document)["timeline"]["layout"]["yaxis"]["categoryarray"]
    assert lanes == [name for lane, name in LANE_NAMES.items() if document["timeline"]["lanes"].get(lane)]


def test_forward_is_called_what_it_is_where_nobody_saw_the_batches() -> None:
    document = cpu_profile()
    for phases in (document["phases_ms"], *(row["phases_ms"] for row in document["per_step"])):
        phases["data"] = None
    document["timeline"]["lanes"]["data"] = []
    page = Page(html(document))
    assert page.text.count(WITH_DATA) == 2  # two legends
    assert page.text.count("forward") == 1  # the head of a column, as in the terminal
    names = {trace["name"] for trace in page.json("figures")["run"]["data"]}
    assert WITH_DATA in names
    assert "forward" not in names
    (forward,) = [one for one in page.json("figures")["timeline"]["data"] if one["name"] == "compute: forward"]
    assert {label for label, _ in forward["customdata"]} == {WITH_DATA}


def test_a_single_sample_is_no_panel() -> None:
    document = gpu_profile()
    rows = document["series"]["system"]
    del rows[1:]
    page = Page(html(document))
    length = ms(document["per_step"][-1]["begin_ms"] + document["per_step"][-1]["step_ms"])
    assert f"CPU of the run is not shown: {length} have fewer than two samples." in " ".join(page.text)
    shown = {one["meta"]["field"] for one in page.json("figures")["run"]["data"] if "meta" in one}
    assert not {"cpu_percent", "rss_bytes"} & shown
    assert "memory_used_bytes" in shown  # of the GPUs, which have more
    document["series"]["nvml"] = document["series"]["nvml"][:2]  # one of each GPU
    text = " ".join(Page(html(document)).text)
    few = "PCIe, GPU busy, CPU of the run, Power and Memory are not shown"
    assert text.count("have fewer than two samples") == text.count(few) == 1


def test_a_page_without_timeline_and_samples() -> None:
    document = cpu_profile()
    document["timeline"] = document["series"]["system"] = None
    document["missing"] |= {"timeline": "the run ended too early", "series.system": "no sampler"}
    page = Page(html(document))
    assert "There is no timeline: the run ended too early." in page.text
    assert set(page.json("figures")) == {"run"}
    assert "Memory is not shown: no driver" not in " ".join(page.text)
    assert re.search(r"CPU of the run is not shown: no sampler\.", " ".join(page.text))


def test_the_roofs_stand_where_the_document_says() -> None:
    document = rig_profile()
    traces = {trace["name"]: trace for trace in figures_of(document)["roofs"]["data"]}
    now = document["knobs"]["offload_ratio"] * (1 - document["knobs"]["topk_ratio"])
    roofs = document["roofs"]
    for name, field in (("link down (D2H)", "d2h_ms"), ("link up (H2D)", "h2d_ms"), ("host memory", "host_ms")):
        at = traces[name]["x"].index(now)
        assert traces[name]["y"][at] == pytest.approx(roofs[field])
    assert traces["compute"]["y"] == [roofs["compute_ms"]] * 2
    assert (traces["least possible step"]["x"], traces["least possible step"]["y"]) == ([now], [roofs["least_step_ms"]])
    assert (traces["measured step"]["x"], traces["measured step"]["y"]) == ([now], [document["step_ms"]["mean"]])


def test_verdict_figures_reasons_ranks_and_knobs_are_there() -> None:
    document = rig_profile()
    text = Page(html(document)).text
    joined = " ".join(text)
    for sentence in document["verdict"]:
        assert sentence in text
    for needed in (
        "link.d2h_bytes_per_step",
        "1.65 MB",
        "stall.by_cause.host",
        "topk_ratio",
        "0.05",
        "llama2-7b-4xa100",
    ):
        assert needed in joined
    for name, reason in document["missing"].items():
        assert name in text
        assert reason in text
    assert text.count("rig") > 10  # the source of every figure of it


@pytest.mark.parametrize(("ranks", "told"), [(1, False), (2, True)])
def test_the_ranks_of_a_built_in_workload_are_in_the_head(ranks: int, told: bool) -> None:
    document = rig_profile()
    document["ranks"] = [{**document["ranks"][0], "rank": rank} for rank in range(ranks)]
    place = re.search(r'<p class="place">(.*?)</p>', html(document))
    assert place is not None
    assert ("2 ranks" in place[1]) is told


def test_no_text_of_a_tile_is_too_wide_to_break(document: dict[str, Any]) -> None:
    texts = re.findall(r"<small>(.*?)</small></dd>", html(document))
    assert texts
    for text in texts:
        assert max(map(len, text.split(" "))) <= 24, text


def test_everything_is_escaped() -> None:
    document = gpu_profile()
    document["verdict"] = [EVIL]
    document["device"] = document["command"]["script"] = document["workload"]["model"] = EVIL
    document["missing"]["roofs"] = document["hardware"]["cpu_model"] = document["software"]["zftune"] = EVIL
    document["timeline"]["lanes"]["comm"][0][2] = EVIL
    document["missing"]["series.nvml"], document["series"]["nvml"] = EVIL, None
    text = html(document)
    assert EVIL not in text
    assert "<img" not in text.replace("".join(Page(text).scripts[None]), "")
    page = Page(text)
    assert page.json("profile") == document
    assert EVIL in page.text
    assert {tag for tag, _ in page.tags}.isdisjoint({"img", "b", "iframe", "object", "embed"})
    assert sum(tag == "script" for tag, _ in page.tags) == 4
    labels = [row[0] for t in page.json("figures")["timeline"]["data"] for row in t["customdata"] if "img" in row[0]]
    assert labels == ["&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;&lt;b&gt;&amp;amp;"]


def test_the_file_needs_nothing_else(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_html(document, path)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert text.count("* plotly.js (basic - minified) v") == 1
    assert len(text.encode()) < 1_500_000
    targets = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href", "action")]
    assert targets == ["data:,"]
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_the_bundle_is_of_the_version_that_figures_are_made_for() -> None:
    assert f"* plotly.js (basic - minified) v{get_plotlyjs_version()}\n" in plotly_js()[:100]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ZftuneError, match=r"--html '.*': cannot be written \(No such file or directory\)"):
        write_html(cpu_profile(), tmp_path / "missing" / "report.html")


def test_many_spans_are_drawn_as_fewer() -> None:
    document = rig_profile()
    length = document["timeline"]["length_ms"]
    each = length / 20_000
    document["timeline"]["lanes"]["d2h"] = [[n * each, (n + 0.9) * each, "4 kB"] for n in range(20_000)]
    page = Page(html(document))
    traces = {trace["name"]: trace for trace in page.json("figures")["timeline"]["data"]}
    drawn = traces["d2h: d2h"]
    assert 100 < len(drawn["x"]) < 2500
    assert drawn["base"][0] == 0
    assert drawn["base"][-1] + drawn["x"][-1] == pytest.approx(length, rel=1e-3)
    assert sum(drawn["x"]) >= 0.9 * length
    stalls = [span for span in document["timeline"]["lanes"]["stall"] if span[2] == "h2d"]
    assert sum(traces["stall: h2d"]["x"]) == pytest.approx(sum(end - begin for begin, end, _ in stalls))
    assert "drawn as one" in " ".join(page.text)


def test_colours_differ() -> None:
    assert len({COLOURS[cause] for cause in CAUSES}) == len(CAUSES)
    assert len({COLOURS[name] for name in (*PHASES, "host", "h2d", "d2h", "select", "comm")}) == len(PHASES) + 5
