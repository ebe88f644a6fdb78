"""Independent host jobs: of those whose gradients are there the foremost is next, and the emulated step shows it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
from torch import Tensor

from tests.support.zenflow.host_calls import SOON_S, within
from tests.support.zenflow.small import Stack, seeded
from tests.unit.zenflow.test_timeline import BACKWARD_MS, FORWARD_MS, Run, emulated
from zenflow import CpuDevice, HostEngineError, ZenFlowConfig
from zenflow.device import Transfer
from zenflow.host.engine import HostEngine, Job


class Copy(Transfer):
    """A copy that arrives when the test says so."""

    nbytes = 0

    def __init__(self, *, there: bool = False, error: Exception | None = None) -> None:
        self._there = threading.Event()
        self._error = error
        self.awaited = threading.Event()
        if there:
            self.arrive()

    def arrive(self) -> None:
        self._there.set()

    def done(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._there.is_set()

    def wait(self) -> None:
        self.awaited.set()
        if self._error is not None:
            raise self._error
        assert self._there.wait(SOON_S)


class Jobs:
    """Jobs by number, what they wait for, and the order in which they ran."""

    def __init__(
        self, copies: list[Copy], work: Callable[[int], object] = lambda _: None, shared: Sequence[Copy] = ()
    ) -> None:
        self.ran: list[int] = []
        self.copies, self.shared = copies, shared
        self.jobs = [self._job(number, work) for number in range(len(copies))]

    def _job(self, number: int, work: Callable[[int], object]) -> Job:
        def task() -> None:
            self.ran.append(number)
            work(number)

        copies = [self.copies[number], *self.shared]
        return Job(f"job {number}", CpuDevice(), task, nbytes=0, inputs=copies)  # type: ignore[arg-type]

    def submit(self, engine: HostEngine, *, last_arrives_first: bool = True) -> None:
        with engine.foremost_first(last_arrives_first=last_arrives_first, patient=False):
            for job in self.jobs:
                engine.submit(job)

    def wait(self, engine: HostEngine) -> None:
        for job in self.jobs:
            within(SOON_S, lambda job=job: job.wait(engine))  # type: ignore[misc]


@pytest.mark.parametrize("last_arrives_first", [True, False])
def test_where_nothing_is_there_it_is_the_order_of_arrival(engine: HostEngine, last_arrives_first: bool) -> None:
    jobs = Jobs([Copy() for _ in range(5)])
    jobs.submit(engine, last_arrives_first=last_arrives_first)
    order = list(range(5))[:: -1 if last_arrives_first else 1]
    for number in order:
        assert jobs.copies[number].awaited.wait(SOON_S)
        assert jobs.ran.count(number) == 0
        jobs.copies[number].arrive()
    jobs.wait(engine)
    assert jobs.ran == order


def test_what_all_wait_for_is_waited_for_before_one_is_chosen(engine: HostEngine) -> None:
    """Such as a clipping factor, behind all gradients on the link."""
    factor = Copy()
    jobs = Jobs([Copy() for _ in range(4)], shared=[factor])
    jobs.submit(engine)
    assert factor.awaited.wait(SOON_S)
    for copy in jobs.copies:
        copy.arrive()
    factor.arrive()
    jobs.wait(engine)
    assert jobs.ran == [0, 1, 2, 3]


def test_what_arrives_meanwhile_overtakes(engine: HostEngine) -> None:
    working, gate = threading.Event(), threading.Event()

    def work(number: int) -> None:
        if number == 5:
            working.set()
            assert gate.wait(SOON_S)

    jobs = Jobs([Copy() for _ in range(5)] + [Copy(there=True)], work)
    jobs.copies[4].arrive()
    jobs.copies[3].arrive()
    jobs.submit(engine)  # 3, the foremost of those, then 4, and meanwhile nothing else has arrived
    jobs.jobs[3].wait(engine)
    assert working.wait(SOON_S)
    assert jobs.copies[2].awaited.wait(SOON_S)  # nothing is there, and the last of them is to arrive first
    for number in (2, 1, 0):
        jobs.copies[number].arrive()
    gate.set()
    jobs.wait(engine)
    assert jobs.ran == [3, 4, 5, 2, 0, 1]


def test_what_comes_later_waits_for_all_of_them(engine: HostEngine) -> None:
    jobs = Jobs([Copy(), Copy(there=True), Copy()])
    jobs.submit(engine)
    after: list[int] = []
    task: Callable[[], None] = lambda: after.extend(jobs.ran)  # noqa: E731
    later = engine.submit(Job("later", CpuDevice(), task, nbytes=0, inputs=[]))  # type: ignore[arg-type]
    assert jobs.copies[2].awaited.wait(SOON_S)
    jobs.copies[2].arrive()
    assert not later.finished
    jobs.copies[0].arrive()
    later.wait(engine)
    assert after == [1, 2, 0]


def test_a_copy_that_failed_fails_its_job_and_those_after_it(engine: HostEngine) -> None:
    jobs = Jobs([Copy(there=True), Copy(error=RuntimeError("the link is down")), Copy(there=True)])
    jobs.submit(engine)
    for job in jobs.jobs[1:]:
        with pytest.raises(HostEngineError, match="job 1 failed: the link is down"):
            within(SOON_S, lambda job=job: job.wait(engine))  # type: ignore[misc]
    assert 1 not in jobs.ran
    assert 2 not in jobs.ran


PIPELINED = ZenFlowConfig.zero_offload(pipeline="bucket")
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
    forward = [f"updating {name}" for name, weight in model.named_parameters() if weight.ndim > 1]
    assert len(work) >= len(forward)
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
