"""What the store keeps, as plain data. Nothing here knows of a database."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Quality = Literal["exact", "published", "loose"]
QUALITIES: tuple[Quality, ...] = get_args(Quality)
PROMISES: dict[Quality, str] = {
    "exact": "exact: the weights are those of the plain optimizer",
    "published": "published: updates of unimportant columns may come late",
    "loose": "loose: updates of unimportant columns may come late, twice as much as published",
}
STALENESS: dict[Quality, int] = {"exact": 0, "published": 1, "loose": 2}
"""What a quality allows, as a multiple of the published setting's staleness or of the user's own."""
Backend = Literal["zenflow", "deepspeed"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
DecisionKind = Literal[
    "start", "adopt", "keep", "void", "crash", "stop", "hold", "reopen", "guard", "resume", "remark",
    "rollback", "memory", "movement", "pause", "unpause",
]  # fmt: skip

LEASE_S = 120.0
"""Of a run, after which another process may take it over."""


class TrialState(enum.StrEnum):
    """Where a trial stands. A trial ends in one of the last four and stays there."""

    PLANNED = "planned"
    IN_FLIGHT = "in_flight"
    """Written down before its setting is applied."""
    MEASURED = "measured"
    REJECTED = "rejected"
    """By the planner: never applied."""
    CRASHED = "crashed"
    """The run ended without goodbye while it was in flight: not to be tried again."""
    VOID = "void"
    """Says nothing about the setting: throttling, a co-tenant, a run that ended before."""


class RunState(enum.StrEnum):
    """Where a run stands."""

    RUNNING = "running"
    FINISHED = "finished"
    LOST = "lost"
    """It ended before its search did: killed, or interrupted. It may be resumed."""


class PresetState(enum.StrEnum):
    """Whether a preset may be proposed."""

    ACTIVE = "active"
    WITHDRAWN = "withdrawn"
    """It lost two later comparisons, or was withdrawn: see `Preset.withdrawn`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What a preset must agree in to be used as it is."""

    model_id: str
    hw_id: str
    backend: Backend
    stage: int
    """ZeRO stage, 0 to 3; 0 where there is no ZeRO."""
    dtype: str
    world_size: int
    """Ranks."""
    nodes: int = 1
    """Machines that they are on."""
    shards: int = 1
    """Ranks that share out each weight's state by rows; 1: each has all of it, or as the stage of DeepSpeed's says."""
    micro_batch: int
    """Sequences of a rank's pass; 0: not known."""
    sequence: int
    """Tokens a sequence; 0: not known. Of a preset: the most that was recorded; it serves shorter ones too."""
    checkpointing: bool
    """Whether activations are computed again in backward."""
    quality: Quality

    @property
    def ranks(self) -> str:
        """How many train, and how they share the weights, in words."""
        return ranks_in_words(self.world_size, self.nodes, self.shards if self.backend == "zenflow" else None)


def ranks_in_words(ranks: int, nodes: int = 1, shards: int | None = None) -> str:
    """How many ranks train, and how they share the state of the weights.

    `shards` share each weight by rows; None: the sharing is described elsewhere.
    """
    words = "1 rank" if ranks == 1 else f"{ranks} ranks"
    if nodes > 1:
        words += f" on {nodes} nodes"
    if ranks == 1 or shards is None:
        return words
    if shards == 1:
        return f"{words}, state replicated"
    return f"{words}, state sharded" + ("" if shards == ranks else f" over {shards}")


@dataclass(frozen=True, slots=True)
class Ratios:
    """Measured ratios that speed follows from, equal for alike pairs of model and machine."""

    host_over_compute: float
    """Time of a host pass over all offloaded elements (S = 1) over the compute time of a step."""
    link_over_compute: float
    """Time of the link for the gradients of all offloaded elements over the compute time of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What knobs are wanted for."""

    key: Key
    ratios: Ratios | None = None
    usable_cores: float | None = None
    rig: str | None = None
    """Name of the emulated accelerator; what was measured on one never serves a real machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as its trainable parameters make it."""

    model_id: str
    name: str | None = None
    parameters: int | None = None
    trainable: int | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A machine; never its name."""

    hw_id: str
    gpu: str | None = None
    gpu_memory_bytes: int | None = None
    cpu_model: str | None = None
    numa_nodes: int | None = None
    ram_bytes: int | None = None
    rig: str | None = None

    @classmethod
    def of(cls, hw_id: str, machine: Mapping[str, Any], *, rig: str | None = None) -> Hardware:
        """From what `zftune.telemetry.fingerprint.hardware()` returns."""
        gpus = machine["gpus"] or [{"name": None, "memory_bytes": None}]
        return cls(
            hw_id=hw_id,
            gpu=gpus[0]["name"],
            gpu_memory_bytes=gpus[0]["memory_bytes"],
            cpu_model=machine["cpu_model"],
            numa_nodes=machine["numa_nodes"],
            ram_bytes=machine["ram_bytes"],
            rig=rig,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a preset was proven by."""

    step_ms: float
    """Median step time under it."""
    baseline: str
    """Against which setting: "start", "planner" (its choice where the quality or GPU memory did not allow the start),
    "zero_offload", "no_offload", "deepspeed"."""
    baseline_step_ms: float
    gain_error: float | None = None
    """Two bootstrap standard errors of the gain, which is a share of the baseline's step time."""
    measurements: int
    """Of the whole search."""
    steps: int
    """That were measured under this setting."""
    measured_unix_s: float

    @property
    def gain(self) -> float:
        """Share of the baseline's step time that is saved; below 0: it is slower."""
        return 1.0 - self.step_ms / self.baseline_step_ms


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """Why a preset was withdrawn that has not lost its comparisons."""

    kind: Literal["rollback", "guard"]
    """Somebody rolled its setting back, or training went wrong under it."""
    by: str = ""
    """Who, in words such as "by hand"."""

    @property
    def sentence(self) -> str:
        """In words, without a full stop."""
        if self.kind == "guard":
            return "training went wrong under it"
        return f"it was rolled back {self.by}".rstrip()


@dataclass(frozen=True, slots=True)
class Barred:
    """A setting that is not tried again."""

    knobs: Mapping[str, Any]
    kind: Literal["crash", "rollback"]
    """A training did not survive it, or somebody rolled it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Knobs with what they were proven for, and by what."""

    key: Key
    knobs: Mapping[str, Any]
    """Of `zenflow.ZenFlowConfig`, those that are tuned."""
    evidence: Evidence
    model: Model
    hardware: Hardware
    name: str = ""
    """Unique in a store; "" lets the store choose."""
    ratios: Ratios | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    usable_cores: float | None = None
    imported: bool = False
    """From a file: always provisional."""
    state: PresetState = PresetState.ACTIVE
    lost_comparisons: int = 0
    withdrawn: Withdrawal | None = None
    """None: it is active, or has lost its comparisons."""
    created_unix_s: float = 0.0

    @property
    def withdrawn_because(self) -> str:
        """Why it is proposed no more, in words without a full stop; "": it is."""
        if self.state is PresetState.ACTIVE:
            return ""
        lost = f"it was slower in {self.lost_comparisons} later comparisons"
        return lost if self.withdrawn is None else self.withdrawn.sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A preset that a look-up found."""

    preset: Preset
    knobs: Mapping[str, Any]
    """The preset's; those that follow from cores are recomputed for the asked machine."""
    distance: float
    """0: the same key. Else the distance of the ratios: logarithms of two factors, as a length."""
    provisional: bool
    """To be compared with the starting point before it is trusted."""
    reason: str
    """A sentence."""


@dataclass(frozen=True, slots=True)
class Run:
    """The right to write into a run, until another process has taken it over."""

    run_id: str
    token: str
    """Random; neither a process id nor anything that a reboot makes ambiguous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run as it was written down."""

    run_id: str
    key: Key
    state: RunState
    knobs: Mapping[str, Any]
    """What it began with."""
    settings: Mapping[str, Any]
    """Of the search: seed, budget and the like."""
    versions: Mapping[str, str]
    usable_cores: float | None
    began_unix_s: float
    lease_until_unix_s: float
    ended_unix_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """A setting that was thought of, and what became of it."""

    trial_id: int
    run_id: str
    number: int
    """0, 1, .. in its run."""
    knobs: Mapping[str, Any]
    source: str
    """Who proposed it: "start", "planner", "search", "preset" or "reference"."""
    state: TrialState
    reason: str | None
    predicted_step_ms: float | None
    constraint: float | None
    """Above 0: the planner says it breaks a limit, by so much."""
    created_unix_s: float
    ended_unix_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A run of whole update windows under one setting."""

    role: str
    """Its place in a comparison: "explore", "a1", "b", "a2"."""
    steps: int
    step_ms: float
    """Median."""
    began_unix_s: float
    void_reason: str | None = None
    """Why it does not count."""
    steps_ms: tuple[float, ...] = ()
    aggregates: Mapping[str, Any] = field(default_factory=dict)
    """Of the samplers."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a search has decided, or somebody for it; `zftune.tuner.messages.sentence` puts it into words."""

    kind: DecisionKind
    trial: int | None = None
    """Its number in the run."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Its figures: gain, error, units and the like."""
    step: int | None = None
    at_unix_s: float = 0.0
    """When it was made; 0: where it is written down, then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTrial:
    """A setting that was thought of and is not written down yet."""

    knobs: Mapping[str, Any]
    source: str
    predicted_step_ms: float | None = None
    constraint: float | None = None
    """Above 0: it breaks a limit, by so much."""
    rejected: str | None = None
    """Why it is never to be applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a search has come to since it was written down last; it is written in one transaction."""

    trials: tuple[NewTrial, ...] = ()
    states: Mapping[int, tuple[TrialState, str | None]] = field(default_factory=dict)
    """Of trials, with the reason, by number."""
    measured: tuple[int, Measurement] | None = None
    """By the number of its trial."""
    decisions: tuple[Decision, ...] = ()
    search: Mapping[str, Any] | None = None
    """All that it knows; None: as before."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Consecutive steps of a training as one point; means over those of them where a figure is known."""

    step: int
    """The last of them."""
    steps: int
    """How many were seen."""
    step_ms: float | None = None
    """Mean; None: not known."""
    loss: float | None = None
    """Mean; None: not known."""
    coverage: float | None = None
    """Share of the gradient energy in the selected columns."""


@dataclass(frozen=True, slots=True)
class KnobChange:
    """Knobs that held from a step on."""

    step: int
    """The first under them."""
    knobs: Mapping[str, Any]
    """All of them."""


@dataclass(frozen=True, slots=True)
class Curve:
    """How a run went, from its first step to its last, in a few hundred points."""

    points: tuple[CurvePoint, ...] = ()
    changes: tuple[KnobChange, ...] = ()
    """Oldest first."""
