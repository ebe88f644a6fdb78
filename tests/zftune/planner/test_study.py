"""Study 012's arithmetic on published figures, by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "studies" / "012-planner"
PARAMETERS = 1_543_714_304


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield import_module("planning.published")
    for name in [name for name in sys.modules if name == "planning" or name.startswith("planning.")]:
        sys.modules.pop(name)


def test_the_fit_gives_back_what_it_was_made_from(published: Any) -> None:
    fitted = published.fit(240.0, 1365.0, 569.0)
    compute = 240.0 - 28 * PARAMETERS / 2 / 1555e6
    assert fitted.compute_ns * PARAMETERS / 1e6 == pytest.approx(compute)
    assert published.zero_offload_ms(fitted, PARAMETERS / 2, compute) == pytest.approx(1365.0)
    assert published.zenflow_ms(fitted, PARAMETERS / 2, compute) == pytest.approx(569.0)


def test_upstreams_bytes(published: Any) -> None:
    # At 1 GB/s each and 1e9 elements: 6 s on the link and 28 s on the host, nothing overlaps.
    slow = published.Fitted(1.0, 1.0, 0.0)
    assert published.zero_offload_ms(slow, 1e9, 500.0) == pytest.approx(34_500.0)
    # 5 s on the link and 6 / 4 s of casting; the host's 36 / 4 s are longer.
    assert published.zenflow_ms(slow, 1e9, 500.0) == pytest.approx(9_000.0)
    assert published.zenflow_ms(slow, 1e9, 5_000.0) == pytest.approx(11_500.0)


def test_what_was_fitted_is_said_and_the_rest_is_predicted(published: Any) -> None:
    _, found = published.comparisons()
    assert [one.what for one in found if one.fitted] == [
        "Qwen2.5-1.5B, 2 A100, ZeRO-Offload",
        "Qwen2.5-1.5B, 2 A100, ZenFlow",
    ]
    assert all(abs(one.off) < 1e-9 for one in found if one.fitted)
    bound = {one.what: one.off for one in found if one.note == "bound" and not one.fitted}
    assert bound["Qwen2.5-3B, 2 A100, ZenFlow"] == pytest.approx(0.019, abs=0.001)
    assert bound["Qwen2.5-3B, 2 A100, ZeRO-Offload"] == pytest.approx(0.093, abs=0.001)
