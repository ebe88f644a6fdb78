"""Figures that README and docs/ name are those of the studies' records, and tests that they name are there."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

import pytest

from tests.governance.documents import ROOT

STUDY = ROOT / "studies" / "024-claims"
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """What makes the rows of the claims from the records."""
    before = list(sys.path)
    sys.path[:0] = [str(STUDY), str(STUDY.parent)]
    yield importlib.import_module("claims.page")
    sys.path[:] = before


@pytest.fixture(scope="module")
def found(page: Any) -> dict[str, dict[str, Any]]:
    records: dict[str, dict[str, Any]] = page.every_record()
    return records


def table(name: str, head: str) -> list[str]:
    """The rows of the page's table that begins with this line."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    below = lines[lines.index(head) + 2 :]
    return below[: next(number for number, line in enumerate(below) if not line.startswith("|"))]


def test_the_claims_are_the_records(page: Any, found: dict[str, Any]) -> None:
    rows = [one.row for one in page.claims(found)]
    assert table("docs/claims.md", page.head(page.PAGE_HEADS)) == rows
    assert all((ROOT / row.split("`")[-2].split()[1]).is_file() for row in rows)


def test_readme_says_what_the_records_say(page: Any, found: dict[str, Any]) -> None:
    rows = [one.short_row for one in page.claims(found) if one.short]
    assert table("README.md", page.head(page.HEADS)) == rows


CHANGED = {
    "024-claims": {
        "rig": "step_ms", "shape": "elements_a_column", "traffic": "over_model_bytes", "upstream": "over_model_bytes",
        "selection": "cheaper", "tuned--": "tuned_ms", "tuned-on-cpu": "ratio",
        "twin-flow": "planned_ms", "both": "step_ms",
    },
    "004-tuner-regret": {"": "over_start"},
    "005-upstream-side-by-side": {"58M": "steps_ms"},
    "023-accuracy": {"s": "accuracy", "language": "loss"},
    "023-accuracy/results/480-steps": {"signature": "accuracy"},
    "gpu/results/h200": {"1B": "p50", "1B-16k": "mean"},
}  # fmt: skip
"""A figure of each part's records, of which the page tells, by study and by how the records' names begin."""


@pytest.mark.parametrize(("study", "part"), [(study, part) for study, parts in CHANGED.items() for part in parts])
def test_another_record_would_show(page: Any, found: dict[str, Any], study: str, part: str) -> None:
    before, mine = [one.row for one in page.claims(found)], found[study]
    changed = halved({name: one for name, one in mine.items() if name.startswith(part)}, CHANGED[study][part])
    assert changed
    assert [one.row for one in page.claims({**found, study: {**mine, **changed}})] != before


def halved(figures: Any, key: str) -> Any:
    """With every fourth of the figures of this name at half, so that ratios change as well."""
    count = itertools.count()

    def walk(value: Any, factor: float) -> Any:
        if isinstance(value, dict):
            return {
                name: walk(one, (0.5, 1, 1, 1)[next(count) % 4] if name == key else factor)
                for name, one in value.items()
            }
        if isinstance(value, list):
            return [walk(one, factor) for one in value]
        return value * factor if isinstance(value, int | float) and not isinstance(value, bool) else value

    return walk(figures, 1)


# --- docs/status.md --------------------------------------------------------------------------------------------------


def record(study: str, name: str) -> Any:
    (folder,) = (ROOT / "studies").glob(f"{study}-*")
    return json.loads((folder / "results" / f"{name}.json").read_text(encoding="utf-8"))["figures"]


def told(study: str, pattern: str, name: str = "table.md") -> list[str]:
    """What a study's own table says, by the groups of a pattern."""
    (folder,) = (ROOT / "studies").glob(f"{study}-*")
    found = re.findall(pattern, (folder / "results" / name).read_text(encoding="utf-8"))
    assert found, f"{study}: {pattern}"
    return list(found[0]) if isinstance(found[0], tuple) else found


def on_gpu(size: str) -> dict[str, Any]:
    """What the GPU's study has of each system at a size."""
    path = ROOT / "studies" / "gpu" / "results" / "h200" / f"{size}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["figures"]
    return found


def of_gpu() -> str:
    found = on_gpu("1B")
    step = {name: one["step_ms"]["p50"] for name, one in found.items() if name != "model"}
    wide = {name: one["step_ms"]["p50"] for name, one in on_gpu("1B-16k").items() if name != "model"}
    ours, zero, theirs = step["zenflow"], step["zero-offload"], step["deepspeed-zero-offload"]
    several = [ours, *found["zenflow"]["other_trainings_p50_ms"].values()]
    low, high = min(several), max(several)
    return (
        f"A step takes {low:.0f} to {high:.0f} ms in {len(several)} trainings: {zero / high:.1f} to {zero / low:.1f}× "
        f"the speed of ZeRO-Offload, {theirs / high:.1f} to {theirs / low:.1f}× that of DeepSpeed's, "
        f"{step['adamw'] / high:.0%} to {step['adamw'] / low:.0%} of the speed without offloading (at 16,384 tokens "
        f"{wide['adamw'] / wide['zenflow']:.1%}); "
        f"{found['zenflow']['prediction']['measured_over_predicted']:.1f} times as long as planned"
    )


def of_rigs() -> str:
    steps = {name: one["step_ms"] for name, one in record("024", "rig--llama2-7b-4xa100")["systems"].items()}
    gain, share = steps["ZeRO-Offload"] / steps["published"], steps["no offload"] / steps["published"]
    return f"{gain:.1f}× the speed of ZeRO-Offload, {share:.1%} of the speed without offloading"


def of_upstream() -> str:
    found = [record("005", f"58M-seed{seed}")["systems"] for seed in range(3)]
    names = ("ZeRO-Offload", "this, exact", "this, replay", "ZenFlow, sequential")
    step = {name: fmean(ms for one in found for turn in one[name]["steps_ms"] for ms in turn) for name in names}
    loss = {name: fmean(list(one[name]["held_out"].values())[-1] for one in found) for name in names}
    exact, late, theirs = (f"{step[name] / step['ZeRO-Offload']:.0%}" for name in names[1:])
    assert f"{loss['this, exact']:.3f}" == f"{loss['ZeRO-Offload']:.3f}"
    return (
        f"A step takes {exact} of ZeRO-Offload's with the same loss (`exact`), {late} with late updates and a loss of "
        f"{loss['this, replay']:.3f} instead of {loss['ZeRO-Offload']:.3f}; DeepSpeed's own ZenFlow takes {theirs}"
    )


def of_convergence() -> str:
    pattern = r"## fine-tuning: k = 0.05, S = 4[^#]*?\| 0.0001 \| 5 \|[^|]*\| \+([\d.]+)"
    (worst,) = told("003", pattern)
    return (
        f"Held-out loss within {math.ceil(10 * float(worst)) / 10:g}% of synchronous AdamW at learning rates up to "
        "1e-4 (S = 4); above that, lateness hurts"
    )


def of_host() -> str:
    rows = record("001", "memory")["rows"]
    (share,) = (
        one["engine_over_it"]["median"]
        for one in rows
        if (one["interval"], one["replay"], one["contender"]) == (4, True, "DeepSpeedCPUAdam")
    )
    return f"The host applies a window of four gradients in {share:.0%} of DeepSpeedCPUAdam's time"


def of_defects() -> str:
    (folder,) = (ROOT / "studies").glob("002-*")
    names = [path.stem for path in (folder / "results").glob("*.json") if "--" not in path.stem]
    return f"None of {len(names)} defects of DeepSpeed 0.19.6's ZenFlow"


def of_search() -> str:
    (folder,) = (ROOT / "studies").glob("004-*")
    cases = sorted((folder / "results").glob("*--0.03--tuner.json"))
    regrets = [one["regret"] for path in cases for one in record("004", path.stem)["searches"]]
    assert (len(cases), len(regrets)) == (6, 72)
    return f"The search's choice is {median(regrets):.1%} off the best in the median, {max(regrets):.1%} at worst"


def of_long_run() -> str:
    recovered = set(told("006", r"the daemon recovers (\d+%) of the gap"))
    assert len(recovered) == 1
    (share,) = recovered
    conditions = "In a long run whose conditions change three times"
    return f"{conditions}, the daemon recovers {share} of what an oracle would save"


def of_profiling() -> str:
    found = record("011", "overhead-cpu")
    share, step = found["hooks_fraction"]["median"], found["step_ms"]["median"]
    return f"Profiling takes {share:.1%} of a {step:.0f} ms step"


def of_searching() -> str:
    (share,) = told("013", r"([\d.]+)% of such a step is spent in the training thread", "real-time.md")
    return f"Searching takes {float(share):.1f}% of a step"


def of_planner() -> str:
    worst, settings = told("012", r"step time within 0.5%: worst ([\d.]+)% of (\d+) settings")
    given = [float(one) for one in told("012", r"\| [\d,]+ ms \| [^|]*\| [\d,]+ ms \| ([+-][\d.]+)% \|")]
    off = [int(one) for one in told("012", r"\| ([+-]\d+)% \| [^|]*\|\n")]
    nearer = math.ceil(max(map(abs, given)))
    return (
        f"The planner is within {float(worst):.2f}% of {settings} emulated runs, within {nearer}% of "
        f"published FSDP2 steps (compute given), and {min(off)}% to +{max(off)}% of published DeepSpeed steps"
    )


STATUS = {
    "gpu": of_gpu,
    "000": of_rigs, "005": of_upstream, "003": of_convergence, "001": of_host, "002": of_defects, "004": of_search,
    "006": of_long_run, "011": of_profiling, "013": of_searching, "012": of_planner,
}  # fmt: skip
"""Rows of docs/status.md; that of study 018 says what was promised."""


def test_the_status_is_what_the_studies_found() -> None:
    rows = table("docs/status.md", "| claim | measured on | study |")
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[: len(STATUS)]] == [of() for of in STATUS.values()]
    assert len(rows) == len(STATUS) + 1


def test_the_gpus_study_tells_its_records() -> None:
    head = "| system | tokens a step | step, ms | planned, ms | measured beside planned |"
    rows = []
    for size in ("1B", "1B-16k"):
        found = on_gpu(size)
        tokens = found["model"]["batch"] * found["model"]["sequence"]
        for name, one in found.items():
            if name != "model":
                step, planned = one["step_ms"]["p50"], one["prediction"]["step_ms"]
                rows.append(f"| {name} | {tokens:,} | {step:.1f} | {planned:.1f} | {step / planned - 1:+.0%} |")
    assert table("studies/gpu/README.md", head) == rows


def test_tests_that_a_page_names_are_there() -> None:
    named = _TEST.findall((ROOT / "docs" / "claims.md").read_text(encoding="utf-8"))
    assert len(named) >= 5
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), name
