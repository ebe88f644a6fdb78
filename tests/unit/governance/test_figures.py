"""The figures that README and docs/ quote are those of the studies' figures.json, and each study is whole."""

from __future__ import annotations

import json
import re
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

from tests.support.governance.documents import ROOT

STUDIES = sorted(path.parent for path in (ROOT / "studies").glob("*/README.md"))
QUOTED = [study for study in STUDIES if (study / "figures.json").is_file()]
WITHOUT_SCRIPT = {"026-fleet"}
"""Its script needs a feature that was given up."""
WITHOUT_RECORDS = {"027-training-thread"}
"""Younger than the last commit with records."""
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
_LINK = re.compile(r"\]\([./]*studies/([\w-]+)/README\.md")


def document(study: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((study / "figures.json").read_text(encoding="utf-8"))
    return found


def quotes(page: str) -> dict[str, list[str]]:
    """Each study's quotes on a page, with the figures put in."""
    every = {study.name: document(study) for study in QUOTED}
    return {
        name: [quote.format(**one["figures"]) for quote in one["quotes"].get(page, ())] for name, one in every.items()
    }


def words(text: str) -> str:
    return " ".join(text.split())


def table(name: str, head: str) -> list[str]:
    """The rows of the page's table that begins with this line."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    below = lines[lines.index(head) + 2 :]
    return below[: next(number for number, line in enumerate(below) if not line.startswith("|"))]


@pytest.mark.parametrize("study", QUOTED, ids=lambda study: str(study.name))
def test_pages_quote_the_figures(study: Path) -> None:
    found = document(study)
    used: set[str] = set()
    for page, templates in found["quotes"].items():
        text = words((ROOT / page).read_text(encoding="utf-8"))
        for template in templates:
            assert words(template.format(**found["figures"])) in text, page
            used.update(name for _, name, _, _ in Formatter().parse(template) if name)
    assert used == set(found["figures"])


@pytest.mark.parametrize(
    ("page", "head"),
    [
        ("README.md", "| claim | what we found | on | verdict |"),
        ("docs/claims.md", "| claim | what we found | on | verdict | measured again by |"),
    ],
)
def test_claims_are_quotes(page: str, head: str) -> None:
    assert table(page, head) == quotes(page)["024-claims"]


def test_each_row_of_the_status_is_a_quote() -> None:
    of_study = quotes("docs/status.md")
    for row in table("docs/status.md", "| claim | measured on | study |"):
        (study,) = _LINK.findall(row)
        claim = row.split(" | ")[0]
        for quote in of_study[study]:
            claim = claim.replace(quote, "")
        assert not re.search(r"\d", claim), row


def test_each_row_of_the_predictions_has_a_quote() -> None:
    of_study = quotes("docs/how-to/plan.md")
    for row in table("docs/how-to/plan.md", "| compared with | error | study |"):
        (study,) = _LINK.findall(row)
        assert any(quote in row for quote in of_study[study]), row


def test_the_gpus_study_has_its_figures() -> None:
    figures = document(ROOT / "studies" / "gpu")["h200"]
    rows = []
    for size in ("1B", "1B-16k"):
        found = figures[size]
        tokens = found["model"]["batch"] * found["model"]["sequence"]
        for name, one in found.items():
            if name != "model":
                step, planned = one["step_ms"]["p50"], one["prediction"]["step_ms"]
                rows.append(f"| {name} | {tokens:,} | {step:.1f} | {planned:.1f} | {step / planned - 1:+.0%} |")
    head = "| system | tokens a step | step, ms | planned, ms | measured beside planned |"
    assert table("studies/gpu/README.md", head) == rows


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: str(study.name))
def test_a_study_is_whole(study: Path) -> None:
    script = study / ("run_all.py" if study.name == "gpu" else "run.py")
    assert script.is_file() == (study.name not in WITHOUT_SCRIPT)
    text = (study / "README.md").read_text(encoding="utf-8")
    assert study.name in WITHOUT_RECORDS or re.search(
        rf"`git archive 6a9c4c73 (studies/\S+ )*studies/{study.name}(/results)?[ `]", text
    )
    for name in re.findall(r"`?(results/[\w.-]+\.(?:md|svg))", text):
        assert (study / name).is_file(), name


def test_tests_that_a_page_names_are_there() -> None:
    named = _TEST.findall((ROOT / "docs" / "claims.md").read_text(encoding="utf-8"))
    assert len(named) >= 5
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), name
