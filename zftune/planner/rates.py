"""How long things take: of a model and a job on a machine, or on a rig."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zenflow import ZenFlowConfig
from zftune.emulation import Rig
from zftune.planner.model import Job, Machine, ModelFacts
from zftune.planner.split import Split

MOMENTS = 2
"""Of AdamW, which plans are made for."""
WEIGHT_UNITS, BUCKET_UNITS, JOB_UNITS = 1, 17, 11
"""What the training thread takes for a weight that a step looks at, a bucket of gradients that it sends and a host job
that it submits, in units of one `x.add_(1)` to a small CPU tensor."""
_FORWARD_SHARE = 0.4
"""Of the thread's time in forward and backward without offloading: an estimate."""
_STATE = 8 * (1 + MOMENTS)  # bytes of fp32 state that an update of an element reads and writes


@dataclass(frozen=True, kw_only=True, slots=True)
class Thread:
    """The training thread's time, which launches all that the GPU does. In ms."""

    weight_ms: float = 0.0
    """For a weight that a step looks at."""
    bucket_ms: float = 0.0
    """For a bucket of gradients that is sent."""
    job_ms: float = 0.0
    """For a host job that is submitted."""
    forward_ms: float = 0.0
    """For a forward pass without offloading."""
    backward_ms: float = 0.0

    @classmethod
    def of(cls, model: ModelFacts, machine: Machine, job: Job) -> Thread:
        """Of a machine; it takes no time where the machine has no figures for it."""
        unit_ms = (machine.thread_unit_us or 0.0) / 1e3
        passes_ms = (machine.thread_layer_us or 0.0) / 1e3 * model.layers
        forward_ms = _FORWARD_SHARE * passes_ms
        return cls(
            weight_ms=WEIGHT_UNITS * unit_ms,
            bucket_ms=BUCKET_UNITS * unit_ms,
            job_ms=JOB_UNITS * unit_ms,
            forward_ms=forward_ms,
            backward_ms=passes_ms - forward_ms + job.checkpointing * forward_ms,
        )

    @classmethod
    def of_rig(cls, rig: Rig) -> Thread:
        """Of a rig, whose passes take the thread no time."""
        return cls(
            weight_ms=rig.thread_weight_us / 1e3, bucket_ms=rig.thread_bucket_us / 1e3, job_ms=rig.thread_job_us / 1e3
        )

    def step_ms(self, split: Split, window: int, passes: int = 1) -> float:
        """Of a step, on average over a window."""
        calls = split.weights * self.weight_ms + split.buckets * (self.bucket_ms + self.job_ms / window)
        return passes * (self.forward_ms + self.backward_ms) + calls


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Times and rates of one rank: its share of the host, its own link."""

    forward_ms: float
    """Of one pass, as backward's."""
    backward_ms: float
    d2h_gbps: float
    h2d_gbps: float
    host_gbps: float
    update_gelements_s: float | None = None
    """None: arithmetic takes no time."""
    device_gbps: float | None = None
    """None: the runtime's device kernels take no time."""
    comm_gbps: float | None = None
    """None: what ranks send to each other takes no time."""
    comm_latency_ms: float = 0.0
    """Of a collective."""
    ranks: int = 1
    """Each has its rows of every weight (FSDP2), or of its state."""
    replicas: int = 1
    """How many ranks have the same rows (HSDP)."""
    network_gbps: float | None = None
    """What a rank sends to those; None: as `comm_gbps`."""
    reshard: bool = True
    """Whether layers are gathered again for backward."""
    keeps_whole: bool = False
    """Whether each of several ranks has all of the weights, and the state of its rows (`zenflow.Partition`)."""
    gloo: bool = False
    """Whether ranks are processors over gloo. A reduce-scatter is an all-reduce there, which sends everything twice,
    and nothing lies beside compute: FSDP2 leaves that to streams, and a processor has none.
    """
    element_bytes: int = 2
    accumulation: int = 1
    """Passes a step; gradients leave in the last one."""
    thread: Thread = Thread()
    link_in_host: bool = True
    """Whether the link's own traffic takes host memory bandwidth (not on a rig)."""

    @classmethod
    def of(cls, model: ModelFacts, machine: Machine, job: Job) -> Rates:
        """Of a rank on a machine; ranks share the host evenly."""
        forward_ms, backward_ms = compute_ms(model, machine, job)
        return cls(
            forward_ms=forward_ms,
            backward_ms=backward_ms,
            d2h_gbps=machine.link_d2h_gbps,
            h2d_gbps=machine.link_h2d_gbps,
            host_gbps=machine.host_gbps / job.gpus,
            update_gelements_s=machine.host_update_gelements_s / job.gpus,
            device_gbps=machine.device_gbps,
            comm_gbps=_comm_gbps(machine, job),
            ranks=job.shards,
            replicas=job.replicas,
            network_gbps=None if job.replicas == 1 or job.network_gbps is None else job.network_gbps / job.gpus,
            reshard=job.reshard,
            keeps_whole=job.keeps_whole,
            element_bytes=model.element_bytes,
            accumulation=job.accumulation,
            thread=Thread.of(model, machine, job),
        )

    @classmethod
    def of_rig(
        cls,
        rig: Rig,
        element_bytes: int = 2,
        *,
        ranks: int = 1,
        replicas: int = 1,
        reshard: bool = True,
        keeps_whole: bool = False,
    ) -> Rates:
        """Of an emulated accelerator, or of each of several ranks that have one like it, and of their replicas."""
        return cls(
            forward_ms=rig.forward_ms,
            backward_ms=rig.backward_ms,
            d2h_gbps=rig.link_d2h_gbps,
            h2d_gbps=rig.link_h2d_gbps,
            host_gbps=rig.host_gbps,
            device_gbps=rig.device_gbps,
            comm_gbps=rig.comm_gbps if ranks > 1 else None,
            comm_latency_ms=rig.comm_latency_us / 1e3 if ranks > 1 else 0.0,
            ranks=ranks,
            replicas=replicas,
            network_gbps=rig.network_gbps if replicas > 1 else None,
            reshard=reshard,
            keeps_whole=keeps_whole and ranks > 1,
            element_bytes=element_bytes,
            thread=Thread.of_rig(rig),
            link_in_host=False,
        )

    @property
    def compute_ms(self) -> float:
        """The compute of a step, c."""
        return self.accumulation * (self.forward_ms + self.backward_ms)

    def streams(self, config: ZenFlowConfig) -> bool:
        """Whether gradients leave during backward: with whole weights they are averaged after it."""
        return config.stream and not self.keeps_whole

    def device_ms(self, nbytes: float) -> float:
        """Of a kernel that moves so many bytes of device memory."""
        return 0.0 if self.device_gbps is None else nbytes / self.device_gbps / 1e6

    def down_ms(self, elements: float) -> float:
        """Of gradients to the host."""
        return self.element_bytes * elements / self.d2h_gbps / 1e6

    def up_ms(self, elements: float) -> float:
        """Of weights to the device."""
        return self.element_bytes * elements / self.h2d_gbps / 1e6

    def host_ms(self, elements: float, entries: int, updates: int | None = None) -> float:
        """T_host: of the update of a rank's elements with so many logged gradients each.

        `updates` of each element; None: as many as entries (replay).
        """
        logged = self.element_bytes * entries
        nbytes = _STATE + logged + self.element_bytes
        if self.link_in_host:
            nbytes += logged + self.element_bytes
        memory = nbytes * elements / self.host_gbps / 1e6
        if self.update_gelements_s is None:
            return memory
        return max(memory, (updates or entries) * elements / self.update_gelements_s / 1e6)

    def read_ms(self, elements: float) -> float:
        """Of taking over weights as fp32 masters on the host."""
        return (self.element_bytes + 4) * elements / self.host_gbps / 1e6

    def update_ms(self, elements: float) -> float:
        """Of AdamW on elements whose state is on the device."""
        return self.device_ms((_STATE + 2 * self.element_bytes) * elements)

    def pack_ms(self, elements: float) -> float:
        """Of packing gradients for the link."""
        return self.device_ms(2 * self.element_bytes * elements)

    def scatter_ms(self, elements: float) -> float:
        """Of writing arrived weights."""
        return self.device_ms(2 * self.element_bytes * elements)

    def stage_ms(self, scored: int, kept: int) -> float:
        """Of reading gradients for their importance, and keeping some of them."""
        return self.device_ms(self.element_bytes * (scored + 2 * kept))

    def gather_ms(self, elements: float) -> float:
        """Of an all-gather of elements among all ranks: each sends its share to all others."""
        return self._sending_ms(self.element_bytes * elements, self.ranks, self.comm_gbps)

    def reduce_ms(self, elements: float) -> float:
        """Of a reduce-scatter of elements among all ranks: each sends all but its own share."""
        times = 2 if self.gloo else 1
        return self._sending_ms(times * self.element_bytes * elements, self.ranks, self.comm_gbps)

    def replicate_ms(self, elements: float) -> float:
        """Of adding up a rank's share of elements over the replicas: an all-reduce."""
        return self._sending_ms(2 * self.element_bytes * elements / self.ranks, self.replicas, self._between_gbps)

    def add_up_ms(self, words: float) -> float:
        """Of an all-reduce of fp32 numbers over all ranks and replicas: a reduce-scatter, then an all-gather."""
        everybody = self.ranks * self.replicas
        return max(self._sending_ms(2 * 4 * words, everybody, rate) for rate in (self.comm_gbps, self._between_gbps))

    @property
    def _between_gbps(self) -> float | None:
        """Between replicas."""
        return self.comm_gbps if self.network_gbps is None else self.network_gbps

    def _sending_ms(self, nbytes: float, ranks: int, gbps: float | None) -> float:
        if ranks == 1:
            return 0.0
        sending = 0.0 if gbps is None else nbytes * (ranks - 1) / ranks / gbps / 1e6
        return self.comm_latency_ms + sending


def compute_ms(model: ModelFacts, machine: Machine, job: Job) -> tuple[float, float]:
    """Forward and backward of a pass: as measured, else by arithmetic at the share that training achieves.

    2 operations an element and token forward, 4 backward, and those that it does again; attention's products beside
    them. No pass is shorter than reading all weights once takes (backward: and writing gradients).
    """
    if job.forward_ms is not None and job.backward_ms is not None:
        return job.forward_ms, job.backward_ms
    products, again = products_of(model, job)
    passes = 2.0 + again / products  # of backward, in units of forward
    if job.compute_ms is not None:
        forward = job.compute_ms / job.accumulation / (1 + passes)
        return forward, forward * passes
    forward = products / (machine.compute_tflops * machine.compute_share * 1e12) * 1e3
    read = model.element_bytes * model.parameters / machine.device_gbps / 1e6
    return max(forward, read), max(passes * forward, (3 + job.checkpointing) * read)


def products_of(model: ModelFacts, job: Job) -> tuple[float, float]:
    """Operations of forward, and of what checkpointing does again in backward.

    An embedding that is not the head as well is only looked up. Of a layer everything is done again but its last
    product, whose result backward does not need: torch stops before it (`use_reentrant=False`, transformers' default).
    """
    behind = (shape for shape, stage in zip(model.weights, model.stages, strict=True) if stage == model.layers)
    head_of_its_own = any(len(shape) > 1 for shape in behind)
    looked_up = sum(map(math.prod, model.weights[: model.before_layers])) if head_of_its_own else 0
    attention = 2.0 * model.layers * model.hidden * job.seq
    forward = (2.0 * (model.parameters - looked_up) + attention) * job.tokens
    left_out = model.hidden * (model.vocabulary + model.layers * model.intermediate)
    return forward, max(0.0, forward - 2.0 * left_out * job.tokens) if job.checkpointing else 0.0


def device_work_ms(rates: Rates, split: Split, window: int, *, stream: bool) -> float:
    """Of the runtime's kernels in a step, on average over a window."""
    staged = rates.stage_ms(split.scored, split.kept) if stream else 0.0
    moved = rates.pack_ms(split.deferred) + rates.scatter_ms(split.deferred) / window
    updated = rates.update_ms(split.resident + split.selected)
    return (staged + moved + updated) / rates.ranks + score_ms(rates, split, stream=stream)


def score_ms(rates: Rates, split: Split, *, stream: bool) -> float:
    """Of reading for their importance, in `step()`, the gradients that have not left; ranks add up that of all."""
    if rates.ranks > 1:
        left = split.scored if stream else 0
        return rates.device_ms(rates.element_bytes * (split.matrices - left)) / rates.ranks
    return 0.0 if stream else rates.device_ms(rates.element_bytes * split.selecting)


def _comm_gbps(machine: Machine, job: Job) -> float | None:
    """What a rank sends to the next one; a ring leaves each machine once, so there it has all of the network."""
    if job.ranks == 1:
        return None
    inside = [machine.comm_gbps] if job.gpus > 1 else []
    if job.replicas > 1:
        return machine.comm_gbps
    return min([*inside, *([] if job.network_gbps is None else [job.network_gbps])])
