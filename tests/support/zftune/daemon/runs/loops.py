"""A small training whose search is in a registry, and ways to reach that."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zenflow import ZenFlowAdamW, ZenFlowConfig
from zftune.daemon.client.driver import DaemonDriver
from zftune.daemon.client.session import Transport
from zftune.daemon.protocol.codec import decode, encode
from zftune.daemon.protocol.messages import Goodbye, Hello, Report
from zftune.daemon.runs.registry import Registry, UnknownRunError
from zftune.daemon.runs.states import NotAllowedError
from zftune.emulation import EmulatedAccelerator, Rig
from zftune.errors import DaemonError
from zftune.tuner.search import SearchOptions
from zftune.tuner.setup import TuneRequest
from zftune.tuner.space import Setting
from zftune.tuner.states import Sampler
from zftune.tuner.tuner import Tuner

BEGIN = ZenFlowConfig(topk_ratio=0.1, update_interval=4, ledger=True, host_threads=1)
ENDS_S = 120.0


class Direct:
    """Asks a registry without a socket, through JSON all the same."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.reports: list[Report] = []
        self.away = threading.Event()
        """Whether nobody answers."""

    def post(self, route: str, document: Any = None, *, timeout_s: float | None = None) -> Any:
        if self.away.is_set():
            raise DaemonError("no daemon serves 'nowhere'")
        document = json.loads(document)
        try:
            return json.loads(encode(self._answer(route, document)))
        except UnknownRunError as error:
            raise DaemonError(str(error), status=404) from error
        except NotAllowedError as error:
            raise DaemonError(str(error), status=409) from error

    def _answer(self, route: str, document: Any) -> Any:
        _, _, _, *rest = route.split("/")
        if not rest:
            return self.registry.hello(decode(Hello, document))
        if rest[1] == "goodbye":
            return self.registry.goodbye(rest[0], decode(Goodbye, document))
        self.reports.append(decode(Report, document))
        return self.registry.report(rest[0], self.reports[-1])

    def close(self) -> None:
        return


class Loop:
    """A training on the CPU, or on a fast emulated accelerator in simulated time, whose knobs and hooks are looked at.

    Without a `transport` nobody tunes. `thinking_s` is what a thought takes in simulated time.
    """

    def __init__(
        self,
        transport: Transport | None,
        *,
        sampler: Sampler = "random",
        most: int = 6,
        emulated: bool = False,
        fresh: bool = True,
        thinking_s: float | None = None,
        config: ZenFlowConfig = BEGIN,
        rig: Rig | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))
        self.device = EmulatedAccelerator(rig or fast_rig()) if emulated else None
        self.optimizer = ZenFlowAdamW(
            self.module.parameters(), lr=1e-5, config=config, module=self.module, device=self.device
        )
        if self.device is not None:
            self.device.attach(self.module)
        self.batch = torch.randn(16, 32)
        self.changes: list[tuple[int, Mapping[str, Any]]] = []
        self.hooks_s: list[float] = []
        self.tuner: Tuner | None = None
        if transport is not None:
            search = SearchOptions(sampler=sampler, most_measurements=most, hold=True, thinking_s=thinking_s)
            wishes = TuneRequest(quality="published", sequence=16, fresh=fresh, search=search)
            self.tuner = Tuner(
                self.optimizer,
                DaemonDriver(self.optimizer, wishes, 16, transport),
                tokens=16,
                on_change=lambda step, knobs: self.changes.append((step, knobs)),
            )

    def step(self, scale: float = 1.0) -> None:
        # Never near zero, where any noise is a spike to the guard: a loaded machine may take thousands of steps.
        loss = (self.module(self.batch).square().mean() + 1) * scale
        loss.backward()
        if self.tuner is not None:
            self.tuner.log_loss(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, until: Callable[[], bool]) -> None:
        ends = time.monotonic() + ENDS_S
        while not until():
            self.step()
            time.sleep(0.001)
            assert time.monotonic() < ends, "it takes too long"

    @property
    def knobs(self) -> Setting:
        return Setting.of(self.optimizer.config)

    @property
    def requested(self) -> bool:
        return self.tuner is not None and self.tuner.live is not None and self.tuner.live.request is not None

    @property
    def live_role(self) -> str | None:
        live = None if self.tuner is None else self.tuner.live
        request = None if live is None else live.request
        return None if request is None else request.role

    def close(self) -> None:
        if self.tuner is not None:
            self.tuner.close()
        self.optimizer.close()
        if self.device is not None:
            self.device.close()


def fast_rig() -> Rig:
    rates = dict.fromkeys(("link_d2h_gbps", "link_h2d_gbps", "host_gbps", "device_gbps"), 1.0)
    return Rig("fast", "", forward_ms=3.0, backward_ms=3.0, scale=1.0, **rates)


@contextmanager
def registry_of(store: Any, **more: Any) -> Iterator[Registry]:
    registry = Registry(lambda _: store, **more)
    yield registry
    registry.close()
