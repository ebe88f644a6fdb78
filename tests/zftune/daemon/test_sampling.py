"""The daemon's samplers: what a scripted driver says voids measurements and is shown, for all runs on a GPU."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.nvml.scripted import GPU, HOPPER, Machine, here, machine, nvml_library
from tests.tiers import everything
from tests.zftune.daemon.daemons import COMMAND, exchange, get, serving
from tests.zftune.daemon.runs.agents import RUN, SOON_S, Agent, hello
from zftune.daemon.client.http import DaemonClient
from zftune.daemon.protocol.messages import Applied, Hello, StepFigures
from zftune.daemon.server.sampling import Node, NodeFigures
from zftune.telemetry import NvmlSampler

__all__ = ["here", "machine", "nvml_library"]

OTHER = "0" * 31 + "2"
_HOT = 1 << 6


class Runs(Node):
    """A node whose runs live until they are taken out."""

    def __init__(self) -> None:
        self.live: set[str] = set()
        super().__init__(lambda: self.live, sampler=_quick, look_s=600.0)

    def come(self, run: str = RUN, *, pid: int = os.getpid(), gpu: str | None = GPU) -> Callable[[], str | None]:
        self.live.add(run)
        return self.watch(on_gpu(run, pid=pid, gpu=gpu))


def _quick(uuid: str, ours: Callable[[int], bool | None]) -> NvmlSampler:
    return NvmlSampler([uuid], 20, ours=ours)


def on_gpu(run: str = RUN, *, pid: int = os.getpid(), gpu: str | None = GPU) -> Hello:
    return replace(hello(run), pid=pid, gpu_uuid=gpu)


@pytest.fixture
def node() -> Iterator[Runs]:
    made = Runs()
    yield made
    made.close()


def until(holds: Callable[[], Any]) -> Any:
    ends_s = time.monotonic() + SOON_S
    while not (found := holds()):
        assert time.monotonic() < ends_s
        time.sleep(0.01)
    return found


def figures(node: Node, run: str = RUN) -> Any:
    """Of a run's GPU, once there are any."""

    def look() -> Any:
        node.look()
        found = node.gpu(run)
        return None if found is None else found[1].figures

    return until(look)


def test_a_gpu_is_sampled_from_its_first_run_to_its_last(here: Callable[..., None], node: Runs) -> None:
    here(HOPPER, timeline=[{"t": 0, "util": 70}])
    assert node.gpus() == {}
    node.come()
    node.come(OTHER)
    assert figures(node)["utilisation_percent"] == pytest.approx(70)
    assert figures(node) == figures(node, OTHER)
    assert list(node.gpus()) == [GPU.casefold()]
    node.live.discard(RUN)
    node.look()
    assert node.gpu(RUN) is None
    assert list(node.gpus()) == [GPU.casefold()]
    node.live.clear()
    node.look()
    assert node.gpus() == {}
    assert node.host.figures is None


def test_runs_on_one_gpu_are_co_tenants(here: Callable[..., None], node: Runs) -> None:
    here((*HOPPER, f"process {os.getpid()}"), timeline=[{"t": 0, "util": 50}])
    disturbed = node.come()
    figures(node)
    assert disturbed() is None
    node.come(OTHER, pid=os.getppid())
    assert disturbed() == "the GPU was shared with 1 more run"
    node.live.discard(OTHER)
    node.look()
    assert disturbed() is None


def test_a_link_that_is_shifted_down_while_a_run_trains_voids(here: Callable[..., None], node: Runs) -> None:
    fast, slow = {"util": 60, "generation": 5, "width": 16}, {"util": 60, "generation": 3, "width": 16}
    here(HOPPER, timeline=[{"t": 0, **fast}, {"t": 8, **fast}, {"t": 8.1, **slow}])
    disturbed = node.come()
    assert figures(node)["pcie_gen"] == 5
    assert disturbed() is None
    assert until(disturbed).startswith("the PCIe link was shifted down to generation ")  # in part, at first


def test_without_a_driver_there_is_the_host(node: Runs) -> None:
    assert node.come()() is None
    node.come(OTHER, gpu=None)
    assert node.gpu(OTHER) is None

    def host() -> Any:
        node.look()
        return node.host.figures

    until(host)
    found = node.gpu(RUN)
    assert found is not None
    assert found[1].figures is None
    assert found[1].missing


def test_metrics_leave_out_what_is_not_known(here: Callable[..., None], node: Runs) -> None:
    here(HOPPER, timeline=[{"t": 0, "util": 70}])
    registry = CollectorRegistry()
    registry.register(NodeFigures(node))
    assert b"zftune_gpu_utilisation_percent{" not in generate_latest(registry)
    node.come()
    figures(node)
    assert f'zftune_gpu_utilisation_percent{{gpu="{GPU.casefold()}"}} 70.0'.encode() in generate_latest(registry)


class OnGpu(Agent):
    """An agent whose training is on the scripted GPU."""

    def say_hello(self, again: Any = None) -> None:
        self._hello = replace(self._hello, pid=os.getpid(), gpu_uuid=GPU)
        super().say_hello(again)


def shown(client: DaemonClient) -> Any:
    """What is shown of the GPU of the only run."""
    return client.get("/v1/runs")[0]["gpu"]


def asked_for(machine: Machine) -> int:
    """Ticks of the sampler so far."""
    return sum(name == "nvmlDeviceGetUtilizationRates" for _, _, name, _ in machine.calls())


@pytest.mark.skipif(not everything(), reason="before a release: by day a link voids one")
def test_throttling_voids_a_measurement_of_a_daemon_that_runs(
    folder: Path, machine: Machine, nvml_library: Path
) -> None:
    machine.write(HOPPER, timeline=[{"t": 0, "util": 60, "reasons": _HOT}])
    more = {"LD_LIBRARY_PATH": str(nvml_library.parent), "NVML_SCRIPT": str(machine.script)}
    more["ZFTUNE_DB"] = f"sqlite:///{folder / 'z.db'}"
    with (
        serving(folder, module=COMMAND, more=more, forked=False) as daemon,
        DaemonClient(daemon.path, timeout_s=SOON_S) as client,
    ):
        agent = OnGpu(client)
        until(lambda: shown(client)["utilisation"] is not None)
        agent.asked()
        agent.report(applied=Applied(agent.last.decision, 1))
        ticks = asked_for(machine)
        until(lambda: asked_for(machine) >= ticks + 2)  # a whole tick since then
        agent.measure()
        agent.report(steps=tuple(StepFigures(step, 100.0, {"host": 12.0}) for step in range(1, 30)))
        agent.until(lambda: agent.done is None)
        gpu = shown(client)
        metrics = exchange(daemon.path, get("/metrics"))
        agent.goodbye()
    with closing(sqlite3.connect(folder / "z.db")) as database:
        reasons = [reason for (reason,) in database.execute("select void_reason from measurement")]
    assert reasons == ["the GPU was slowed down because it was hot"]
    assert gpu["sentence"] == "stall by events 12%, NVML idle 40%: more than 10 points apart"
    assert gpu["apart"]
    assert gpu["throttled_by"] == ["hw_thermal_slowdown"]
    assert f'zftune_gpu_utilisation_percent{{gpu="{GPU.casefold()}"}} 60.0'.encode() in metrics
