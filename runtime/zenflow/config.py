"""`ZenFlowConfig`: the knobs of the runtime, under DeepSpeed's names."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from zenflow.errors import ConfigError
from zenflow.host.cores import MAX_THREADS

Auto = Literal["auto"]
SelectStrategy = Literal["auto", "step", "epoch"]
DeferredUpdate = Literal["replay", "mean"]
Pipeline = Literal["bucket", "none"]

# Of an "auto" update interval: the length of windows where no weight has both selected and deferred columns.
AUTO_UPDATE_INTERVAL = 4
# Of an "auto" select interval: steps between two looks at the selection, and the share of it that must still be right.
AUTO_SELECT_INTERVAL = 8
AUTO_SELECT_OVERLAP = 0.8

# What newer DeepSpeed clips to where a ds_config says nothing (older releases did not clip).
_DEEPSPEED_CLIPPING = 1.0

# These stand elsewhere in a ds_config, or nowhere.
_NOT_IN_SECTION = {
    "offload_ratio",
    "max_grad_norm",
    "bucket_bytes",
    "staging_bytes",
    "ledger",
    "max_update_interval",
    "stream",
    "gradient_accumulation_steps",
    "reduce_gradients",
}

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
        ConfigError: a field has a value that is not allowed; one sentence that names all three.
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
    """L in 1..S: steps over which a window's buckets become visible; None means S (all of an "auto" window)."""
    pipeline: Pipeline = "bucket"
    """"bucket": host and H2D follow D2H bucket by bucket; "none": one after the other (DeepSpeed's order)."""
    skip_nonfinite: bool = False
    """Skip a step whose gradient norm is not finite, as GradScaler does."""
    steps_per_epoch: int | None = None
    """Steps in an epoch, for `select_strategy="epoch"`."""
    bucket_bytes: int = 1 << 25
    """Largest bucket: bytes of one weight's gradient that are moved and updated as a unit."""
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
    """Average gradients over the ranks in `step()`; False: somebody else has (DistributedDataParallel)."""
    offload: InitVar[bool] = False
    """DeepSpeed's: accepted and ignored with a warning, since the state of selected columns stays on the GPU."""

    def __post_init__(self, offload: bool) -> None:
        if offload:
            warnings.warn("offload is ignored: the state of selected columns stays on the GPU", stacklevel=3)
        for name in ("topk_ratio", "offload_ratio", "auto_ratio", "pt_reserved_cores_perc"):
            _require(
                self, name, _is_number(getattr(self, name)) and 0 <= getattr(self, name) <= 1, "a number from 0 to 1"
            )
        for name in ("select_interval", "update_interval"):
            _require(
                self,
                name,
                _is_count(getattr(self, name), 1) or getattr(self, name) == "auto",
                'an integer >= 1 or "auto"',
            )
        _require(self, "max_update_interval", _is_count(self.max_update_interval, 1), "an integer >= 1")
        _require(self, "full_warm_up_rounds", _is_count(self.full_warm_up_rounds, 0), "an integer >= 0")
        _require(self, "gradient_accumulation_steps", _is_count(self.gradient_accumulation_steps, 1), "an integer >= 1")
        for name in ("overlap_step", "skip_nonfinite", "ledger", "stream", "reduce_gradients"):
            _require(self, name, isinstance(getattr(self, name), bool), "true or false")
        for name, literal in (
            ("select_strategy", SelectStrategy),
            ("deferred_update", DeferredUpdate),
            ("pipeline", Pipeline),
        ):
            allowed = get_args(literal)
            _require(self, name, getattr(self, name) in allowed, " or ".join(f'"{value}"' for value in allowed))
        norm = self.max_grad_norm
        _require(self, "max_grad_norm", norm is None or (_is_number(norm) and norm > 0), "a number > 0, or none")
        _require(
            self,
            "steps_per_epoch",
            self.steps_per_epoch is None or _is_count(self.steps_per_epoch, 1),
            "an integer >= 1, or none",
        )
        for name in ("bucket_bytes", "staging_bytes"):
            _require(self, name, _is_count(getattr(self, name), 1), "an integer >= 1")
        threads = self.host_threads
        threads_ok = threads is None or (_is_count(threads, 1) and threads <= MAX_THREADS)
        _require(self, "host_threads", threads_ok, f"an integer from 1 to {MAX_THREADS}, or none")
        lag_ok = self.apply_lag is None or (_is_count(self.apply_lag, 1) and self.apply_lag <= self.longest_window)
        limit = "max_update_interval" if self.update_interval == "auto" else "update_interval"
        _require(self, "apply_lag", lag_ok, f"an integer from 1 to {limit} ({self.longest_window}), or none")

    @classmethod
    def zero_offload(cls, **knobs: Any) -> ZenFlowConfig:
        """ZeRO-Offload: all state on the host, every step synchronous; in DeepSpeed's order unless `knobs` differ."""
        return cls(**{"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False, "pipeline": "none", **knobs})

    @classmethod
    def from_ds_config(cls, source: Mapping[str, Any] | str | Path) -> ZenFlowConfig:
        """Read a DeepSpeed configuration as it is, with DeepSpeed's own defaults for what it leaves out.

        Without `offload_optimizer` nothing is offloaded; with it and without a `zenflow` section the result is
        ZeRO-Offload (pipelined), or Twin-Flow where `offload_optimizer.ratio` is below 1.

        Args:
            source: the configuration, or the path of its JSON file.

        Raises:
            ConfigError: the file cannot be read, is not a JSON object, or a field has a value that is not allowed.
        """
        config = source if isinstance(source, Mapping) else _read_json(Path(source))
        zero = _section(config, "zero_optimization")
        offload = _section(zero, "offload_optimizer", "zero_optimization.")
        knobs: dict[str, Any] = {}
        passes = config.get("gradient_accumulation_steps", 1)
        if passes is not None and passes != "auto":
            knobs["gradient_accumulation_steps"] = passes
        clipping = config.get("gradient_clipping", _DEEPSPEED_CLIPPING)
        if clipping not in (0, 0.0, None, "auto"):  # the Hugging Face integration writes "auto" and fills it in itself
            knobs["max_grad_norm"] = clipping
        device = offload.get("device", "none")
        if device not in ("none", "cpu"):
            raise ConfigError(f'zero_optimization.offload_optimizer.device is {device!r}, allowed is "cpu" or "none"')
        if device == "none":
            return cls(offload_ratio=0.0, **knobs)
        knobs["offload_ratio"] = offload.get("ratio", 1.0)
        if zero.get("zenflow") is None:
            return cls.zero_offload(pipeline="bucket", **knobs)
        return cls(**_zenflow_section(_section(zero, "zenflow", "zero_optimization.")), **knobs)

    @property
    def longest_window(self) -> int:
        """Most steps in a window."""
        return self.max_update_interval if self.update_interval == "auto" else self.update_interval

    @property
    def lag(self) -> int:
        """L, in steps."""
        return self.apply_lag or self.longest_window

    def resolved(self) -> ZenFlowConfig:
        """The same with `select_interval` in steps, where `steps_per_epoch` is known; "auto" stays "auto"."""
        select = self.select_interval
        if self.select_strategy == "epoch" and self.steps_per_epoch is not None:
            select = (1 if select == "auto" else select) * self.steps_per_epoch
        return replace(self, select_interval=select, select_strategy="step")

    def changed(self, knobs: Mapping[str, Any]) -> ZenFlowConfig:
        """The same with other live knobs.

        Args:
            knobs: by name; `select_interval` in steps.

        Raises:
            ConfigError: one cannot be changed while it trains, or has a value that is not allowed.
        """
        for name, value in knobs.items():
            if name not in LIVE_KNOBS:
                raise ConfigError(f"{name} is {value!r}, allowed are changes of {', '.join(LIVE_KNOBS)}")
        return replace(self, **knobs)


def _zenflow_section(section: Mapping[str, Any]) -> dict[str, Any]:
    # DeepSpeed's defaults, which differ from ours where a bare ZenFlowConfig() should be usable as it is.
    knobs: dict[str, Any] = {"update_interval": "auto", "overlap_step": False}
    known = ({field.name for field in fields(ZenFlowConfig)} | {"offload"}) - _NOT_IN_SECTION
    for name, value in section.items():
        if name not in known:
            raise ConfigError(
                f"zero_optimization.zenflow.{name} is {value!r}, allowed are the fields {', '.join(sorted(known))}"
            )
        if value == "auto" and name not in ("select_strategy", "select_interval", "update_interval"):
            continue  # DeepSpeed drops such a field and takes its default
        knobs[name] = value
    return knobs


def _require(config: ZenFlowConfig, name: str, ok: bool, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {getattr(config, name)!r}, allowed is {allowed}")


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max  # math.isfinite fails on huge integers


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _section(config: Mapping[str, Any], name: str, prefix: str = "") -> Mapping[str, Any]:
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{prefix}{name} is {value!r}, allowed is a JSON object")
    return value


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"ds_config is '{path}', allowed is a readable JSON file ({error.strerror})") from error
    except ValueError as error:  # bad JSON or bad UTF-8
        raise ConfigError(f"ds_config is '{path}', allowed is a file of valid JSON ({error})") from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"ds_config is '{path}', allowed is a file that holds a JSON object")
    return config
