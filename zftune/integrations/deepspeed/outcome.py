"""What `zftune run` does with a ds_config: the one table that `zftune check`, `zftune run` and its training read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from zenflow.config import modernized, read_ds_config
from zftune.ds_config.facts import BATCH, OWN_KNOBS, TESTED_UPSTREAM, scrambles
from zftune.ds_config.reading import MISSING, Place, at, enabled, offload_device, path_of, shown, stage_of
from zftune.errors import BadInputError
from zftune.integrations.deepspeed import asking, optimizers, precision, section, spawning
from zftune.integrations.deepspeed.asking import Fault
from zftune.integrations.deepspeed.section import INSTEAD, INSTEAD_OF_A_SECTION, NAME, Refusal, Section
from zftune.store.types import Backend, Quality

TAKEN_OVER = ("bf16", "bfloat16", "fp16", "data_types", "optimizer", "zero_optimization", "zftune")
"""Sections that the backend zenflow reads itself: the engine is made without them."""
A_NUMBER = "a number >= 0"
_WITH = "with the backend zenflow"

_SWITCHES = {
    "amp": 'use "bf16"',
    "hybrid_engine": "leave it out",
    "elasticity": "leave it out",
    "eigenvalue": "leave it out",
    "expert_parallel": "leave it out",
}
_ABOVE_ONE = ("sequence_parallel_size", "pipeline_parallel_size")
_ZERO_FEATURES = ("zero_quantized_gradients", "zero_quantized_weights", "zero_hpz_partition_size", "mics_shard_size")
_NOTHING = (None, False, 0, 1, -1)


def refusals(config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Each setting that the backend zenflow refuses, but for the optimizer, which the script may pass."""
    knobs = (Refusal.of(*fault) for fault in read_ds_config(config)[1])
    told = set()
    for refusal in (
        *_about_zero(config),
        *_about_the_run(config),
        *divided_by(config),
        *_about_gradients(config),
        *precision.refusals(config),
        *knobs,
    ):
        if refusal.field not in told:
            told.add(refusal.field)
            yield refusal


def _about_zero(config: Mapping[str, Any]) -> Iterator[Refusal]:
    stage, zero = stage_of(config), config.get("zero_optimization")
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        yield Refusal.of("zero_optimization.stage", stage, f"0, 1, 2 or 3 {_WITH}")
    if offload_device(config) == "nvme":
        yield Refusal("zero_optimization.offload_optimizer.device", '"nvme"', f'"cpu" {_WITH}', INSTEAD)
    zero = zero if isinstance(zero, Mapping) else {}
    weights = zero.get("offload_param")
    if isinstance(weights, Mapping) and weights.get("device") == "nvme":
        yield Refusal("zero_optimization.offload_param.device", '"nvme"', f'"none" or "cpu" {_WITH}', INSTEAD)
    for name in _ZERO_FEATURES:
        if zero.get(name) is True or zero.get(name) not in _NOTHING:
            yield Refusal.of(f"zero_optimization.{name}", zero[name], f"left out {_WITH}", INSTEAD)


def _about_the_run(config: Mapping[str, Any]) -> Iterator[Refusal]:
    for name, instead in _SWITCHES.items():
        if enabled(config, name):
            yield Refusal(f"{name}.enabled", "True", f"false {_WITH} ({instead})", INSTEAD)
    compiled = config.get("compile")
    if isinstance(compiled, Mapping) and compiled.get("deepcompile"):
        yield Refusal("compile.deepcompile", "True", "false (use torch.compile on the model's blocks)", INSTEAD)
    if config.get("compression_training"):
        yield Refusal("compression_training", "there", f"left out {_WITH}", INSTEAD)
    for name in _ABOVE_ONE:
        if config.get(name) not in (None, 1):
            yield Refusal.of(name, config[name], f"1 {_WITH}", INSTEAD)
    tensor = config.get("tensor_parallel")
    if isinstance(tensor, Mapping) and tensor.get("autotp_size", 0) not in (0, 1):
        yield Refusal.of("tensor_parallel.autotp_size", tensor["autotp_size"], f"1 {_WITH}", INSTEAD)


def divided_by(config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Each number of steps that DeepSpeed divides by while it trains, has not looked at, and cannot divide by."""
    printed = config.get("steps_per_print")
    if printed not in (None, "auto") and not (isinstance(printed, (int, float)) and printed):
        yield Refusal.of("steps_per_print", printed, "a number above 0, or left out")
    curriculum = at(config, ("curriculum_learning", "schedule_type"))
    divisors = {
        "fp16.loss_scale_window": enabled(config, "fp16") and at(config, ("fp16", "loss_scale")) in (MISSING, 0),
        "scheduler.params.lr_range_test_step_size": at(config, ("scheduler", "type")) == "LRRangeTest",
    }
    for name in ("total_curriculum_step", "difficulty_step"):
        dotted = f"curriculum_learning.schedule_config.{name}"
        divisors[dotted] = enabled(config, "curriculum_learning") and curriculum in ("fixed_linear", "fixed_root")
    for dotted, divides in divisors.items():
        if divides and at(config, path_of(dotted)) == 0:
            yield Refusal.of(dotted, at(config, path_of(dotted)), "an integer >= 1")


def _about_gradients(config: Mapping[str, Any]) -> Iterator[Refusal]:
    if config.get("sparse_gradients"):
        yield Refusal("sparse_gradients", "True", f"false {_WITH}", INSTEAD)
    if config.get("gradient_allreduce_op", "mean") != "mean":
        yield Refusal.of("gradient_allreduce_op", config["gradient_allreduce_op"], f'"mean" {_WITH}', INSTEAD)
    if config.get("managed_gradient_accumulation") is False:
        yield Refusal("managed_gradient_accumulation", "False", f"true {_WITH}", INSTEAD)
    autocast = config.get("torch_autocast")
    if (
        isinstance(autocast, Mapping)
        and autocast.get("enabled")
        and "dtype" in autocast
        and autocast["dtype"] != "bfloat16"
    ):
        yield Refusal.of("torch_autocast.dtype", autocast["dtype"], f'"bfloat16" {_WITH}')
    types = config.get("data_types")
    accumulated = types.get("grad_accum_dtype") if isinstance(types, Mapping) else None
    passes = config.get("gradient_accumulation_steps", 1)
    if accumulated not in (None, _dtype_word(config)) and passes not in (None, 1):
        yield Refusal.of(
            "data_types.grad_accum_dtype",
            accumulated,
            "the model's own where the backend zenflow accumulates gradients",
            INSTEAD,
        )


def _dtype_word(config: Mapping[str, Any]) -> str:
    return "bf16" if enabled(config, "bf16", "bfloat16") else "fp16" if enabled(config, "fp16") else "fp32"


def require_known_names(config: Mapping[str, Any]) -> None:
    """Refuse a misspelt setting of a section that DeepSpeed would refuse, but that the backend zenflow reads itself.

    Raises:
        BadInputError: there is one.
    """
    sections = {name: config[name] for name in ("bf16", "fp16", "zero_optimization") if name in config}
    for fault in asking.refusals({"train_batch_size": 1, **sections}, 1):
        if fault.unknown and fault.near and fault.path[-1] not in OWN_KNOBS:
            raise BadInputError(f"DeepSpeed has no setting {'.'.join(fault.path)}; {fault.near}")


def refuse_scrambling(config: Mapping[str, Any], version: str) -> None:
    """Refuse upstream's ZenFlow where it destroys the weights.

    Raises:
        BadInputError: this version does.
    """
    zero = config.get("zero_optimization")
    if scrambles(version) and isinstance(zero, Mapping) and zero.get("zenflow") is not None and zero["stage"] != 3:
        raise BadInputError(
            f"DeepSpeed {version} scrambles every 2-D weight under ZenFlow at initialisation: install "
            f'{TESTED_UPSTREAM[-1]}, or set "zftune": {{"backend": "zenflow"}}, which does not'
        )


_DEVICE = "zero_optimization.offload_optimizer.device"
_STAYS = "so the optimizer's state stays on the GPU"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of a training with a ds_config."""

    kind: Literal["trains", "left", "refused"]
    backend: Backend | None = None
    """That trains it, or that refuses it; None: `zftune run` leaves it alone, or the file itself is wrong."""
    quality: Quality | None = None
    reason: str = ""
    """Why it is left alone; with DeepSpeed's own runtime, what it asks of the script."""
    refusals: tuple[Refusal, ...] = ()

    def placed(self, places: Mapping[str, Place]) -> Outcome:
        """The same in the names that settings have where Accelerate reads them."""
        reason = f"{_placed(_DEVICE, places)}, {_STAYS}" if self.kind == "left" and places else self.reason
        refusals = tuple(in_accelerate(refusal, places) for refusal in self.refusals if places) or self.refusals
        return replace(self, reason=reason, refusals=refusals)

    def __str__(self) -> str:
        if self.kind == "refused":
            return f"is refused: {self.refusals[0]}"
        if self.kind == "left":
            return f"is left to DeepSpeed: {self.reason}"
        quality = "" if self.quality is None else f", quality {self.quality}"
        if self.backend == "deepspeed":
            return f"trains on DeepSpeed's own runtime{quality}{self.reason}"
        return f"trains on zenflow{quality}"


def outcome(config: Mapping[str, Any], asked: Section, faults: Sequence[Fault] = ()) -> Outcome:
    """What `zftune run` does.

    Args:
        config: a ds_config as DeepSpeed is given it: without words that Hugging Face fills in.
        asked: what the command line says; it comes before the file's own "zftune" section.
        faults: what DeepSpeed itself refuses. Batch sizes are left to it, and what is not there: scripts set those.
    """
    done = _outcome(config, asked)
    for fault in faults if done.kind != "refused" else ():
        value, first = at(config, fault.path), next(iter(fault.path), "")
        near = fault.near if fault.unknown else ""
        reaches = done.backend != "zenflow" or first not in TAKEN_OVER or near
        if reaches and value is not MISSING and first not in BATCH:
            other = "left out: DeepSpeed has no such setting" if fault.unknown else f"something else: {fault.error}"
            end = f"; {fault.near}" if fault.near else ""
            return Outcome("refused", refusals=(Refusal(".".join(fault.path), shown(value), other, near=end),))
    return done


def _outcome(config: Mapping[str, Any], asked: Section) -> Outcome:
    wrong = tuple(section.refusals(config))
    if wrong:
        return Outcome("refused", refusals=wrong)
    config = modernized(config)
    wanted = asked.over(Section(**(config.get(NAME) or {})))
    if offload_device(config) == "none":
        return Outcome("left", reason=_nothing_to_do(config))
    backend: Backend = wanted.backend or "zenflow"
    if backend == "deepspeed":
        from zftune.integrations.deepspeed import upstream

        found = tuple(upstream.refusals(config, online=wanted.online))
    else:
        found = (*refusals(config), *optimizers.refusals(config))
    if found:
        return Outcome("refused", backend, refusals=found)
    asks = spawning.ASKS if backend == "deepspeed" and spawning.overlaps(config) else ""
    return Outcome("trains", backend, quality_of(config, wanted), reason=asks)


def quality_of(config: Mapping[str, Any], wanted: Section) -> Quality:
    """The promise about updates: what is asked for; else late ones only where the ds_config has ZenFlow."""
    return wanted.quality or ("published" if has_zenflow(config) else "exact")


def has_zenflow(config: Mapping[str, Any]) -> bool:
    """Whether a ds_config has a "zenflow" section, be it empty."""
    return at(config, ("zero_optimization", "zenflow")) not in (MISSING, None)


def _nothing_to_do(config: Mapping[str, Any]) -> str:
    zero = config.get("zero_optimization")
    offload = zero.get("offload_optimizer") if isinstance(zero, Mapping) else None
    if isinstance(offload, Mapping):
        return f'{_DEVICE} is "none", {_STAYS}'
    return f"zero_optimization.offload_optimizer is not there, {_STAYS}"


def in_accelerate(refusal: Refusal, places: Mapping[str, Place]) -> Refusal:
    """The same in Accelerate's own configuration, which has other names and no "zftune" section."""
    refusal = refusal._replace(instead=INSTEAD_OF_A_SECTION if refusal.instead else "")
    place = places.get(refusal.field)
    if place is None:
        return refusal
    return refusal._replace(field=place.name, value="not there" if place.value is MISSING else shown(place.value))


def _placed(field: str, places: Mapping[str, Place]) -> str:
    name, value = places[field]
    return f"{name} is {'not there' if value is MISSING else shown(value)}"
