"""Study 021's answers on numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.studies.test_studies import STUDIES, load
from zftune.planner.model import Job, Machine, ModelFacts
from zftune.planner.split import split_of


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
    found = {"steps_ms": steps_ms, "bound_by": "host", "replicas_ms": None}
    assert study.answer(found) == expected
    if steps_ms:
        assert study.answer(found | {"replicas_ms": 99.0}) == expected
        assert study.answer(found | {"replicas_ms": 80.0}) == f"{expected}; replicas: 80"


def test_of_the_weights_only_what_changed_is_sent(study: Any) -> None:
    model, gpus = ModelFacts.from_name("tiny"), 4
    split = split_of(model, study.wire.CONFIG)
    norms = split.resident  # which all change; of the others one in 20, and a quarter of the rest
    columns = model.trainable - norms
    changed = (norms + columns * (0.05 + 0.95 / 4)) / model.trainable
    assert study.wire.changed_share(split) == pytest.approx(changed, rel=0.02)
    ways = study.wire.ways_of(model, Machine.load("a100-80-pcie"), gpus, 1)
    one = 2 * model.trainable * (gpus - 1) / gpus / 1e9
    energies = 2 * 4 * split.words * (gpus - 1) / gpus / 1e9
    sent = [ways[way].sent_gb - energies for way in study.wire.WAYS[1:]]
    assert sent == pytest.approx([2 * one, (1 + changed) * one], rel=0.01)
    assert ways["kept until backward"].step_ms > ways["changed columns"].step_ms
