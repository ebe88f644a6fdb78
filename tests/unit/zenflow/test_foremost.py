"""Independent host jobs: of those whose gradients are there the foremost is next, and the step shows it."""

from __future__ import annotations

import pytest
from torch import Tensor

from tests.support.zenflow.small import Stack, seeded
from tests.unit.zenflow.test_timeline import BACKWARD_MS, FORWARD_MS, Run, emulated
from zenflow import CpuDevice, ZenFlowConfig

PIPELINED = ZenFlowConfig.zero_offload(pipeline="bucket", bucket_bytes=600)
WINDOWS = ZenFlowConfig(topk_ratio=0.0, update_interval=4, select_interval=1000)


def test_the_first_layer_is_next_though_its_gradient_came_last() -> None:
    """Gradients leave during backward; in the host's own memory they are there at once."""
    model = seeded(Stack, depth=3)
    run = Run(PIPELINED, CpuDevice(), model)
    run.steps(2)
    run.recorder = run.optimizer.record_timeline(2)  # the updates of the first of them begin and end in it
    run.steps(4)
    lanes = run.timeline().lanes
    run.optimizer.close()
    work = [span.label for span in sorted(lanes["host"], key=lambda span: span.begin_ms)]
    names: dict[int, list[str]] = {}
    for weight in run.optimizer._training.model.weights:
        for part in () if weight.deferred is None else weight.deferred.parts:
            names.setdefault(part.index, []).append(weight.name)
    forward = [f"updating {first}" + (f" and {len(more)} more" if more else "") for first, *more in names.values()]
    assert len(work) >= len(forward) > 3
    first = forward.index(work[0])
    assert work == (3 * forward)[first : first + len(work)]


@pytest.mark.parametrize("config", [PIPELINED, WINDOWS], ids=["synchronous", "windows"])
def test_weights_are_those_of_any_order(config: ZenFlowConfig) -> None:
    """Of a host that is behind and of one that waits for the link."""
    found: list[list[Tensor]] = []
    for rates in ({"link_d2h_gbps": 1.0, "host_gbps": 2e-3}, {"link_d2h_gbps": 3e-4, "host_gbps": 1.0}):
        with emulated(config, **rates) as run:
            run.steps(10)
            run.optimizer.flush()
            found.append([parameter.detach().clone() for parameter in run.model.parameters()])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


def test_a_slow_link_is_waited_for_in_every_step_alike() -> None:
    """The log gets room back while the last step's gradients arrive, not when all of them have."""
    matrices = [parameter for parameter in seeded(Stack, depth=3).parameters() if parameter.ndim > 1]
    nbytes = sum(parameter.nbytes for parameter in matrices)
    gbps = nbytes / (2e-3 * (FORWARD_MS + BACKWARD_MS)) / 1e9
    with emulated(WINDOWS, link_d2h_gbps=gbps, link_h2d_gbps=1.0, host_gbps=1.0) as run:
        run.steps(24)
        steps = [stats.step_ms or 0.0 for stats in run.optimizer.history(wait=True)[8:]]
    floor = 2 * (FORWARD_MS + BACKWARD_MS)
    assert sum(steps) / len(steps) == pytest.approx(floor, rel=0.01)
    assert max(steps) < 1.1 * floor
