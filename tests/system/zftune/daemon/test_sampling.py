"""The daemon's samplers: what a scripted driver says voids measurements and is shown, for all runs on a GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.nvml.scripted import GPU, HOPPER, here, machine, nvml_library
from tests.support.zftune.daemon.runs.agents import RUN, SOON_S, hello
from zftune.daemon.client.http import DaemonClient
from zftune.daemon.protocol.messages import Hello
from zftune.daemon.server.sampling import Node
from zftune.telemetry import NvmlSampler

__all__ = ["here", "machine", "nvml_library"]

OTHER = "0" * 31 + "2"


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
    def look() -> Any:
        node.look()
        found = node.gpu(run)
        return None if found is None else found[1].figures

    return until(look)


@pytest.mark.smoke
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


@pytest.mark.smoke
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


def shown(client: DaemonClient) -> Any:
    return client.get("/v1/runs")[0]["gpu"]
