"""Study 021's answers on numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.studies.test_studies import STUDIES, load
from zftune.planner.facts import Job, Machine


@pytest.fixture(scope="module")
def study() -> Any:
    return load(STUDIES / "021-scaling" / "run.py")


def test_gpus_beyond_one_machine_are_whole_machines(study: Any) -> None:
    machine = Machine.load("a100-80-pcie")
    found = {gpus: study.job_of(machine, gpus) for gpus in (1, 4, 6, 64)}
    assert found[6] is None
    assert found[4] == Job(seq=2048, gpus=4, checkpointing=True)
    assert (found[64].gpus, found[64].nodes, found[64].ranks) == (4, 16, 64)
    assert found[64].network_gbps == study.NETWORKS["a100-80-pcie"]


@pytest.mark.parametrize(
    ("steps_ms", "expected"),
    [
        ({"published": 100.0, "zero_offload": 250.0}, "100 ms, 2.5x (host)"),
        ({"published": 100.0}, "100 ms (host)"),
        ({"published": 100.0, "zero_offload": 250.0, "no_offload": 101.0}, "do not offload, 101 ms"),
        ({"published": 100.0, "zero_offload": 250.0, "no_offload": 103.0}, "100 ms, 2.5x (host)"),
        ({}, "nothing fits"),
    ],
)
def test_what_to_do(study: Any, steps_ms: dict[str, float], expected: str) -> None:
    assert study.answer({"steps_ms": steps_ms, "bound_by": "host"}) == expected
