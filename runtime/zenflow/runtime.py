"""What all weights of one optimizer share."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from zenflow.arrivals import StagingRoom
from zenflow.buckets import Buckets
from zenflow.config import ZenFlowConfig
from zenflow.device import Device, Transfer
from zenflow.errors import HostMemoryError
from zenflow.history import History
from zenflow.host.backend import choose_backend
from zenflow.host.cores import HostCores, host_cores
from zenflow.host.engine import HostEngine
from zenflow.host.gradient_log import GradientLog
from zenflow.host.limits import Claim, first_fitting
from zenflow.host.memory import HostMemory
from zenflow.host.places import padded
from zenflow.kernels import Kernels, kernels_for
from zenflow.layout import WeightPlan
from zenflow.ledger import Ledger
from zenflow.masters import InitialMasters
from zenflow.ranks import Ranks
from zenflow.rules import Rule
from zenflow.schedule import log_bytes
from zenflow.stats import Traffic


@dataclass(slots=True)
class Runtime:
    """Device and its kernels, host engine and rule, host memory, and the count of bytes on the link."""

    device: Device
    engine: HostEngine
    memory: HostMemory
    log: GradientLog
    buckets: Buckets
    room: StagingRoom  # for gradients on their way to the host
    leaving: StagingRoom  # for the state of columns on its way to the host
    kernels: Kernels
    rule: Rule
    deferred_update: str
    guesses: bool
    """Whether deferred weights move at once by the signs of their gradients, which are kept for that."""
    cores: HostCores
    """Where the host engine's threads run, and why."""
    ranks: Ranks | None  # that train the same model; None where there is one
    masters: InitialMasters
    cpus: tuple[int, ...] | None
    """Those that are this rank's share of the node; None: all that are allowed."""
    ledger: Ledger | None = None
    """Accounts for every gradient, where that is asked for."""
    traffic: Traffic = field(default_factory=Traffic)
    last_d2h: Transfer | None = None
    """The newest copy to the host; copies in one direction arrive in order."""

    def fetch(self, tensor: torch.Tensor, target: torch.Tensor | None = None) -> tuple[torch.Tensor, Transfer]:
        """Start a copy of a device tensor into host memory (new memory where none is given)."""
        if target is None:
            target = self.device.host_empty(tensor.shape, tensor.dtype)
        self.last_d2h = self.device.d2h(tensor, target)
        return target, self.last_d2h

    def send_index(self, index: torch.Tensor) -> torch.Tensor:
        """A copy of a column or slot index on the device."""
        if self.device.torch_device.type != "cpu":
            self.traffic.index_bytes += index.nbytes
        return self.device.send(index)

    def host_bytes_for(
        self, weights: Sequence[tuple[WeightPlan, torch.dtype]], buckets: int, config: ZenFlowConfig
    ) -> int:
        """Host memory in bytes that a split into `buckets` takes: plan and dtype of each parameter that is trained."""
        state_bytes = 0
        for weight, dtype in weights:
            elements = weight.deferred * weight.rows
            state_bytes += elements * (4 * (1 + self.rule.moments) + dtype.itemsize) + 4 * weight.deferred
        return state_bytes + self.log_bytes_for(weights, buckets, config)

    def log_bytes_for(
        self, weights: Sequence[tuple[WeightPlan, torch.dtype]], buckets: int, config: ZenFlowConfig
    ) -> int:
        """Of `host_bytes_for`, what the gradient log takes."""
        entries: Counter[tuple[int, torch.dtype, bool]] = Counter()
        for weight, dtype in weights:
            for number, (low, high) in enumerate(weight.bucket_slots, weight.first_bucket):
                entries[number, dtype, weight.transposed] += padded((high - low) * weight.rows * dtype.itemsize)
        return log_bytes(config, [(kind[0], nbytes) for kind, nbytes in entries.items()], buckets)

    def require_host_bytes(self, needs: Sequence[int], what: str, advice: str) -> int:
        """Refuse what would not fit, on all ranks where it would not on one node; to be called before any allocates.

        Returns the number of the first of `needs` (bytes, the best first) that fits on all ranks; raises
        HostMemoryError if none does. `what` is the subject of the sentence and `advice` its end.
        """
        try:
            return first_fitting(self._claims(needs), what, advice)
        except HostMemoryError:  # on all ranks, each of which may have something to spare
            self.log.give_up_spare()
        return first_fitting(self._claims(needs), what, advice)

    def _claims(self, needs: Sequence[int]) -> list[Claim]:
        mine = Claim.of(needs)
        return [mine] if self.ranks is None else self.ranks.everybodys(mine)

    def fitting(
        self, config: ZenFlowConfig, weights: Sequence[tuple[WeightPlan, torch.dtype]], buckets: int
    ) -> ZenFlowConfig:
        """Refuse a split whose host memory does not fit, before any of it is allocated; the knobs to go on with.

        Among them "auto" windows are as short as the log has to be to fit. Raises HostMemoryError on all ranks.
        """
        lengths = range(config.longest_window, 0, -1) if config.update_interval == "auto" else [config.longest_window]
        shorter = [replace(config, max_update_interval=length, apply_lag=None) for length in lengths]
        longest = lengths[
            self.require_host_bytes(
                [self.host_bytes_for(weights, buckets, one) for one in shorter],
                "the state of the deferred columns",
                "lower offload_ratio or update_interval, or raise topk_ratio",
            )
        ]
        if longest == config.longest_window:
            return config
        warnings.warn(f"windows have at most {longest} steps: the host has no memory for a longer log", stacklevel=2)
        lag = None if config.apply_lag is None else min(config.apply_lag, longest)
        return replace(config, max_update_interval=longest, apply_lag=lag)


def make_runtime(
    device: Device, rule: Rule, config: ZenFlowConfig, history: History, ranks: Ranks | None = None
) -> Runtime:
    """Start the host engine for a device, with resolved knobs.

    Raises ConfigError if `$ZENFLOW_NATIVE` or `$ZENFLOW_KERNELS` has a value that is not allowed, HostEngineError if
    the engine could not be started.
    """
    cpus = None if ranks is None else ranks.cpus(device.numa_node())
    cores = host_cores(
        reserved_share=config.pt_reserved_cores_perc,
        numa_node=device.numa_node(),
        threads=config.host_threads,
        affinity=cpus,
    )
    backend = choose_backend(list(cores.cpus))
    engine = HostEngine(device, backend)
    memory = HostMemory(backend, device)
    log = GradientLog(memory, engine, device, history, config)
    # Launchers leave PyTorch one thread where a GPU computes, and weights on the host are much work for it.
    whole_share = device.in_host_memory and not device.takes_host_cores
    kernels = kernels_for(device.torch_device, len(cores.cpus) if whole_share else None)
    ledger = Ledger() if config.ledger else None
    return Runtime(
        device,
        engine,
        memory,
        log,
        Buckets(log, memory),
        StagingRoom(device, history, config.staging_bytes),
        StagingRoom(device, history, config.staging_bytes),
        kernels,
        rule,
        config.deferred_update,
        config.look_ahead == "guess",
        cores,
        ranks,
        InitialMasters(None if ranks is not None and ranks.sharded else ranks),
        cpus,
        ledger,
    )
