"""Study 019's figures on numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.studies.test_studies import STUDIES, load


@pytest.fixture(scope="module")
def study() -> Any:
    return load(STUDIES / "019-many-ranks" / "run.py")


def side(seconds: list[float], losses: list[float]) -> dict[str, Any]:
    counted = {"host_bytes": 0, "d2h": 0, "h2d": 0, "host_ms": None}
    return {"step_s": seconds, "cpu_s": [2 * one for one in seconds], "losses": losses, **counted}


def test_turns_are_compared_with_those_beside_them(study: Any) -> None:
    found = {study.FSDP2: side([1.0, 2.0, 4.0], [3.0, 2.0]), study.EXACT: side([2.0, 3.0, 4.0], [3.0, 2.002])}
    figures = study.cpu_figures(found)
    ratio = figures[study.EXACT]["step_ratio"]
    assert (ratio["median"], ratio["n"]) == (1.5, 3)
    assert figures[study.EXACT]["losses_apart"] == pytest.approx(1e-3)
    assert figures[study.FSDP2]["losses_apart"] == 0


def test_ranks_share_the_host_of_their_node(study: Any) -> None:
    assert study._rig_of(4).host_gbps == study.NODE.host_gbps / 4
    assert study._rig_of(4).link_d2h_gbps == study.NODE.link_d2h_gbps
