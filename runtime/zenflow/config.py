"""`ZenFlowConfig`: the knobs of the runtime, under DeepSpeed's names."""

from __future__ import annotations

import copy
import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, fields, replace
from typing import Any, Literal, Self, get_args

from zenflow.errors import ConfigError
from zenflow.host.cores import MAX_THREADS
from zenflow.names import did_you_mean

Auto = Literal["auto"]
SelectStrategy = Literal["auto", "step", "epoch"]
DeferredUpdate = Literal["replay", "mean"]
LookAhead = Literal["none", "coast", "guess"]
WindowPhase = Literal["together", "staggered"]
Pipeline = Literal["bucket", "none"]

# Of an "auto" update interval: the length of windows where no weight has both selected and deferred columns.
AUTO_UPDATE_INTERVAL = 4
# Of an "auto" select interval: steps between two looks at the selection, and the share of it that must still be right.
AUTO_SELECT_INTERVAL = 8
AUTO_SELECT_OVERLAP = 0.8

# What newer DeepSpeed clips to where a ds_config says nothing (older releases did not clip).
_DEEPSPEED_CLIPPING = 1.0

_ZERO_OFFLOAD = {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False, "pipeline": "none"}

# DeepSpeed's defaults, which differ from ours where a bare ZenFlowConfig() should be usable as it is.
_OF_BARE_SECTION = {"update_interval": "auto", "overlap_step": False}

# Where knobs stand in a ds_config that do not stand in its section of ZenFlow.
_ZENFLOW = "zero_optimization.zenflow."
_IN_DS_CONFIG = {
    "offload_ratio": "zero_optimization.offload_optimizer.ratio",
    "max_grad_norm": "gradient_clipping",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}

# These stand elsewhere in a ds_config, or nowhere.
_NOT_IN_SECTION = {
    "offload_ratio",
    "max_grad_norm",
    "bucket_bytes",
    "ledger",
    "max_update_interval",
    "stream",
    "gradient_accumulation_steps",
    "reduce_gradients",
}

_COUNTS = (
    "select_interval",
    "update_interval",
    "full_warm_up_rounds",
    "steps_per_epoch",
    "apply_lag",
    "host_threads",
    "staging_bytes",
)

# What may change while it trains; the rest decides how the state is cut up, or what a schedule began with.
LIVE_KNOBS = (
    "topk_ratio",
    "select_interval",
    "update_interval",
    "overlap_step",
    "auto_ratio",
    "pt_reserved_cores_perc",
    "offload_ratio",
    "max_grad_norm",
    "deferred_update",
    "apply_lag",
    "look_ahead",
    "window_phase",
    "pipeline",
    "skip_nonfinite",
    "host_threads",
    "max_update_interval",
)


@dataclass(frozen=True, kw_only=True)
class ZenFlowConfig:
    """Knobs of one optimizer. Field names are DeepSpeed's where DeepSpeed has the knob.

    The familiar systems are points of this space: `offload_ratio=0` is plain AdamW on the GPU;
    `zero_offload()` is ZeRO-Offload in DeepSpeed's order; `topk_ratio=0` with a ratio between 0 and 1 is
    Twin-Flow; the rest is ZenFlow.

    Raises:
        ConfigError: a field has a value that is not allowed; one sentence that names all three. Or there is no field of
            that name; it names the near ones.
    """

    topk_ratio: float = 0.1
    """Share of each weight's offloaded columns that the GPU updates every step, 0 to 1 (at least one if > 0)."""
    select_strategy: SelectStrategy = "auto"
    """Unit of `select_interval`: "step", or "epoch" where `steps_per_epoch` is known; "auto" means "step"."""
    select_interval: int | Auto = "auto"
    """Steps (or epochs) between two selections of the important columns; "auto" reselects when too few still are."""
    update_interval: int | Auto = AUTO_UPDATE_INTERVAL
    """S: steps whose deferred gradients are logged and then applied in one host pass; "auto" is Zen-auto."""
    max_update_interval: int = 16
    """Most steps in a window where `update_interval` is "auto"; the log has room for as many."""
    full_warm_up_rounds: int = 0
    """Number of first steps that are synchronous."""
    overlap_step: bool = True
    """Let the host update run beside the following steps; False applies each window in the step that closes it."""
    auto_ratio: float = 0.99
    """Share of the weights that must agree before an "auto" window closes."""
    pt_reserved_cores_perc: float = 0.5
    """Share of the cores that stays PyTorch's."""
    offload_ratio: float = 1.0
    """Share of the elements of 2-D and larger parameters whose fp32 state lives on the host, 0 to 1."""
    max_grad_norm: float | None = None
    """Clip the global gradient norm to this inside `step()`, without a device synchronisation."""
    deferred_update: DeferredUpdate = "replay"
    """Apply a window's gradients one by one ("replay") or as one update with their mean ("mean", the paper)."""
    apply_lag: int | None = None
    """L in 1..S: steps over which a window's buckets become visible; None means S (all of an "auto" window). Of
    staggered windows each bucket becomes visible L steps after its own close; None means 1."""
    look_ahead: LookAhead = "none"
    """"coast": show deferred weights as they would be after the updates that they lack, if no more gradients came, so
    that lateness costs less; the masters stay exact. "guess": besides, move them at once by the sign of the gradient,
    until the exact update comes (AdamW and Adam; not with an "auto" `update_interval`). Only with
    `deferred_update="replay"`."""
    window_phase: WindowPhase = "together"
    """"staggered": each step closes the windows of a share of the buckets, so that weights are less late and link and
    host have as much to do in every step. Not with an "auto" `update_interval` or `deferred_update="mean"`."""
    pipeline: Pipeline = "bucket"
    """"bucket": host and H2D follow D2H bucket by bucket; "none": one after the other (DeepSpeed's order)."""
    skip_nonfinite: bool = False
    """Skip a step whose gradient norm is not finite, as GradScaler does."""
    steps_per_epoch: int | None = None
    """Steps in an epoch, for `select_strategy="epoch"`."""
    bucket_bytes: int = 1 << 25
    """Largest bucket: bytes of a step's gradients that are moved and updated as a unit; a 32nd of the model at most,
    unless that is below 1 MiB."""
    staging_bytes: int = 1 << 30
    """Device memory for updated weights on their way; one bucket always has room."""
    host_threads: int | None = None
    """Threads of the host engine; None means one on each core that `pt_reserved_cores_perc` leaves."""
    ledger: bool = False
    """Account for every logged gradient (`optimizer.ledger()`); reads each of them twice more."""
    stream: bool = True
    """Send gradients to the host as backward produces them; False: in `step()`, with all of `.grad` kept until then."""
    gradient_accumulation_steps: int = 1
    """Backward passes before a step, if you accumulate; where it is more, that is learnt from the step before."""
    reduce_gradients: bool = True
    """Average gradients over the ranks in `step()`; False: somebody else has. FSDP2 and DDP are recognised."""
    offload: InitVar[bool] = False
    """DeepSpeed's: accepted and ignored with a warning, since the state of selected columns stays on the GPU."""

    def __new__(cls, *_: Any, **knobs: Any) -> Self:
        """Refuse a name that is no field, in our own words: what a dataclass says names no near one."""
        known = [*(field.name for field in fields(cls)), "offload"]
        for name in knobs:
            if name not in known:
                meant = did_you_mean(name, known)
                raise ConfigError(f"there is no field {name}: the fields are {', '.join(sorted(known))}{meant}")
        return super().__new__(cls)

    def __post_init__(self, offload: bool) -> None:
        if offload:
            warnings.warn("offload is ignored: the state of selected columns stays on the GPU", stacklevel=3)
        for name, allowed in _faults(vars(self)):
            raise ConfigError.of(name, getattr(self, name), allowed)

    @classmethod
    def zero_offload(cls, **knobs: Any) -> ZenFlowConfig:
        """ZeRO-Offload: all state on the host, every step synchronous; in DeepSpeed's order unless `knobs` differ."""
        return cls(**{**_ZERO_OFFLOAD, **knobs})

    @classmethod
    def from_ds_config(cls, ds_config: Mapping[str, Any]) -> ZenFlowConfig:
        """Read a DeepSpeed configuration as it is, with DeepSpeed's own defaults for what it leaves out.

        Without `offload_optimizer` nothing is offloaded; with it and without a `zenflow` section the result is
        ZeRO-Offload (pipelined), or Twin-Flow where `offload_optimizer.ratio` is below 1.

        Raises:
            ConfigError: it is no dictionary, or a field has a value that is not allowed.
        """
        if not isinstance(ds_config, Mapping):
            raise ConfigError.of("ds_config", ds_config, "a dictionary, such as json.load() makes of a file")
        knobs, faults = read_ds_config(modernized(ds_config))
        for name, value, allowed in faults:
            raise ConfigError.of(name, value, allowed)
        return cls(**knobs)

    def to_ds_config(self) -> dict[str, Any]:
        """The fields of a ds_config from which `from_ds_config` reads these knobs, without what is its default there.

        There is no place in it for `bucket_bytes`, `stream`, `ledger`, `max_update_interval` and
        `reduce_gradients`, and where nothing is offloaded for none but clipping and accumulation.
        """
        found: dict[str, Any] = {"gradient_clipping": self.max_grad_norm or 0.0}
        if self.gradient_accumulation_steps != 1:
            found["gradient_accumulation_steps"] = self.gradient_accumulation_steps
        if self.offload_ratio == 0:
            return found
        offload: dict[str, Any] = {"device": "cpu"}
        if self.offload_ratio != 1:
            offload["ratio"] = self.offload_ratio
        zero: dict[str, Any] = {"offload_optimizer": offload}
        in_section = [field for field in fields(self) if field.name not in _NOT_IN_SECTION]
        plain = {field.name: field.default for field in in_section} | _ZERO_OFFLOAD | {"pipeline": "bucket"}
        if any(getattr(self, name) != value for name, value in plain.items()):
            absent = {field.name: field.default for field in in_section} | _OF_BARE_SECTION
            own = {name: getattr(self, name) for name in absent}
            said = ("topk_ratio", *_OF_BARE_SECTION)  # whatever they are: a reader looks for them
            zero["zenflow"] = {name: value for name, value in own.items() if name in said or value != absent[name]}
        return {**found, "zero_optimization": zero}

    def to_python(self) -> str:
        """The call that makes this, with the knobs that are not at their defaults."""
        knobs = {field.name: getattr(self, field.name) for field in fields(self)}
        said = (f"{field.name}={knobs[field.name]!r}" for field in fields(self) if knobs[field.name] != field.default)
        return f"zenflow.ZenFlowConfig({', '.join(said)})"

    @property
    def longest_window(self) -> int:
        """Most steps in a window."""
        return self.max_update_interval if self.update_interval == "auto" else self.update_interval

    @property
    def lag(self) -> int:
        """L, in steps."""
        return self.apply_lag or (1 if self.window_phase == "staggered" else self.longest_window)

    @property
    def staggers(self) -> bool:
        """Whether buckets close by turns."""
        return self.window_phase == "staggered"

    @property
    def guesses(self) -> bool:
        """Whether late weights are guessed in staggered windows, where lateness costs next to nothing.

        That is so where a bucket is visible one step after its close: later, it overwrites the guesses between.
        """
        return self.look_ahead == "guess" and self.staggers and self.lag == 1

    def resolved(self) -> ZenFlowConfig:
        """The same with `select_interval` in steps, where `steps_per_epoch` is known; "auto" stays "auto"."""
        select = self.select_interval
        if self.select_strategy == "epoch" and self.steps_per_epoch is not None:
            select = (1 if select == "auto" else select) * self.steps_per_epoch
        return replace(self, select_interval=select, select_strategy="step")

    def changed(self, knobs: Mapping[str, Any]) -> ZenFlowConfig:
        """The same with other live knobs; `select_interval` is in steps.

        Raises ConfigError if one cannot be changed while it trains, or has a value that is not allowed.
        """
        for name in knobs:
            if name not in LIVE_KNOBS:
                meant = did_you_mean(name, LIVE_KNOBS)
                raise ConfigError(f"{name} cannot be changed while it trains: {', '.join(LIVE_KNOBS)} can{meant}")
        return replace(self, **knobs)


_TRUE = ("true", "1", "1.0", "yes", "on", "t", "y")  # what pydantic takes for true


def modernized(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which old names are replaced as DeepSpeed replaces them.

    `zero_optimization: true` is stage 1; `cpu_offload: true` and `cpu_offload_param: true` are the sections
    `offload_optimizer` and `offload_param` with device "cpu". Beside those sections DeepSpeed refuses them: they stay.
    """
    changed = copy.deepcopy(dict(config))
    zero = changed.get("zero_optimization")
    if isinstance(zero, bool):
        changed["zero_optimization"] = {"stage": int(zero)}
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if isinstance(zero, Mapping) and str(zero.get(old)).lower() in _TRUE and new not in zero:
            section = changed["zero_optimization"]
            del section[old]
            section[new] = {"device": "cpu"}
    return changed


def read_ds_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, Any, str]]]:
    """The knobs that a DeepSpeed configuration asks for, by name, and everything that is wrong with them.

    Of each value that is not allowed, where it stands, the value, and what it must be.
    """
    faults: list[tuple[str, Any, str]] = []
    zero = _section(config, "zero_optimization", faults)
    offload = _section(zero, "offload_optimizer", faults, "zero_optimization.")
    knobs: dict[str, Any] = {}
    passes = config.get("gradient_accumulation_steps", 1)
    if passes is not None and passes != "auto":
        knobs["gradient_accumulation_steps"] = _whole(passes)
    clipping = config.get("gradient_clipping", _DEEPSPEED_CLIPPING)
    if clipping not in (0, 0.0, None, "auto"):  # the Hugging Face integration writes "auto" and fills it in itself
        knobs["max_grad_norm"] = clipping
    device = offload.get("device", "none")
    if device not in ("none", "cpu"):
        allowed = f'"cpu" or "none"{did_you_mean(device, ("cpu", "none"))}'
        faults.append(("zero_optimization.offload_optimizer.device", device, allowed))
    if device == "none":
        knobs["offload_ratio"] = 0.0
    else:
        knobs["offload_ratio"] = offload.get("ratio", 1.0)
        if zero.get("zenflow") is None:
            knobs |= {**_ZERO_OFFLOAD, "pipeline": "bucket"}
        else:
            knobs |= _zenflow_section(_section(zero, "zenflow", faults, "zero_optimization."), faults)
    values = {**{field.name: field.default for field in fields(ZenFlowConfig)}, **knobs}
    faults += [
        (_IN_DS_CONFIG.get(name, f"{_ZENFLOW}{name}"), values[name], allowed) for name, allowed in _faults(values)
    ]
    return knobs, faults


def _zenflow_section(section: Mapping[str, Any], faults: list[tuple[str, Any, str]]) -> dict[str, Any]:
    knobs: dict[str, Any] = dict(_OF_BARE_SECTION)
    known = ({field.name for field in fields(ZenFlowConfig)} | {"offload"}) - _NOT_IN_SECTION
    for name, value in section.items():
        if name not in known:
            allowed = f"left out: the fields are {', '.join(sorted(known))}{did_you_mean(name, known)}"
            faults.append((f"{_ZENFLOW}{name}", value, allowed))
        elif value != "auto" or name in ("select_strategy", "select_interval", "update_interval"):
            knobs[name] = _whole(value) if name in _COUNTS else value  # elsewhere DeepSpeed drops the word "auto"
    return knobs


def _whole(value: Any) -> Any:
    """An integer that is written as 4.0, which DeepSpeed takes for 4."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_number(value: object) -> bool:
    """Whether it is a number, a truth value being none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max  # math.isfinite fails on huge integers


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _section(
    config: Mapping[str, Any], name: str, faults: list[tuple[str, Any, str]], prefix: str = ""
) -> Mapping[str, Any]:
    value = config.get(name)
    if isinstance(value, Mapping):
        return value
    if value is not None:
        faults.append((f"{prefix}{name}", value, "a JSON object"))
    return {}


def _share(value: object) -> bool:
    return is_number(value) and 0 <= value <= 1  # type: ignore[operator]


def _count(least: int, *words: str | None, most: float = math.inf) -> Callable[[object], bool]:
    return lambda value: value in words or (_is_count(value, least) and value <= most)  # type: ignore[operator]


def _word(value: object, words: Sequence[str]) -> bool:
    return isinstance(value, str) and value in words


_INTERVAL = ('an integer >= 1 or "auto"', _count(1, "auto"), ("auto",))
_SWITCH = ("true or false", lambda value: isinstance(value, bool), ())
_NUMBER = ("a number from 0 to 1", _share, ())
_ALLOWED: dict[str, tuple[str, Callable[[Any], bool], Sequence[str]]] = {
    **dict.fromkeys(("topk_ratio", "offload_ratio", "auto_ratio", "pt_reserved_cores_perc"), _NUMBER),
    **dict.fromkeys(("select_interval", "update_interval"), _INTERVAL),
    "full_warm_up_rounds": ("an integer >= 0", _count(0), ()),
    **dict.fromkeys(
        ("max_update_interval", "gradient_accumulation_steps", "bucket_bytes", "staging_bytes"),
        ("an integer >= 1", _count(1), ()),
    ),
    **dict.fromkeys(("overlap_step", "skip_nonfinite", "ledger", "stream", "reduce_gradients"), _SWITCH),
    **{
        name: (" or ".join(f'"{word}"' for word in words), functools.partial(_word, words=words), words)
        for name, words in (
            ("select_strategy", get_args(SelectStrategy)),
            ("deferred_update", get_args(DeferredUpdate)),
            ("look_ahead", get_args(LookAhead)),
            ("window_phase", get_args(WindowPhase)),
            ("pipeline", get_args(Pipeline)),
        )
    },
    "max_grad_norm": ("a number > 0, or none", lambda value: value is None or (is_number(value) and value > 0), ()),
    "steps_per_epoch": ("an integer >= 1, or none", _count(1, None), ()),
    "host_threads": (f"an integer from 1 to {MAX_THREADS}, or none", _count(1, None, most=MAX_THREADS), ()),
}
"""Of each field: what is allowed, in words and as a test, and the words that a misspelt one may have meant."""


def _faults(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, (allowed, is_allowed, words) in _ALLOWED.items():
        if not is_allowed(values[name]):
            yield name, f"{allowed}{did_you_mean(values[name], words)}"
    if values["look_ahead"] != "none" and values["deferred_update"] == "mean":
        yield "look_ahead", '"none" with deferred_update "mean"'
    if values["look_ahead"] == "guess" and values["update_interval"] == "auto":
        yield "look_ahead", '"none" or "coast" with update_interval "auto"'
    if values["window_phase"] == "staggered":
        for name, value in (("deferred_update", "mean"), ("update_interval", "auto")):
            if values[name] == value:
                yield "window_phase", f'"together" with {name} "{value}"'
    limit = "max_update_interval" if values["update_interval"] == "auto" else "update_interval"
    lag, longest = values["apply_lag"], values[limit]
    if lag is not None and _is_count(longest, 1) and not (_is_count(lag, 1) and lag <= longest):
        yield "apply_lag", f"an integer from 1 to {limit} ({longest}), or none"
