"""What `zftune run` does with a ds_config: the one table that `zftune check`, `zftune run` and its training read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from zenflow.ds_config import modernized
from zftune.integrations.deepspeed import optimizers, section, support
from zftune.integrations.deepspeed.ds_config import MISSING, Place, at, offload_device, shown
from zftune.integrations.deepspeed.refusal import INSTEAD, Refusal
from zftune.integrations.deepspeed.section import NAME, Section
from zftune.integrations.deepspeed.verdict import BATCH, Fault
from zftune.store.types import Backend, Quality

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
    """Why it is left alone."""
    refusals: tuple[Refusal, ...] = ()
    """All of them; a training ends with the first."""

    def placed(self, places: Mapping[str, Place]) -> Outcome:
        """The same in the names that settings have where Accelerate reads them.

        Args:
            places: of settings, as `Source` has them; nothing changes where there are none.
        """
        reason = f"{_placed(_DEVICE, places)}, {_STAYS}" if self.kind == "left" and places else self.reason
        refusals = tuple(_refusal_in(refusal, places) for refusal in self.refusals if places) or self.refusals
        return replace(self, reason=reason, refusals=refusals)

    def __str__(self) -> str:
        if self.kind == "refused":
            return f"is refused: {self.refusals[0]}"
        if self.kind == "left":
            return f"is left to DeepSpeed: {self.reason}"
        if self.backend == "deepspeed":
            return f"trains on DeepSpeed's own runtime, quality {self.quality}"
        return f"trains on zenflow, quality {self.quality}"


def outcome(config: Mapping[str, Any], asked: Section, faults: Sequence[Fault] = ()) -> Outcome:
    """What `zftune run` does.

    Args:
        config: a ds_config as DeepSpeed is given it: without words that Hugging Face fills in.
        asked: what the command line says; it comes before the file's own "zftune" section.
        faults: what DeepSpeed itself refuses. Batch sizes are left to it, and what is not there: scripts set those.
    """
    done = _outcome(config, asked)
    for fault in faults if done.kind != "refused" else ():
        value = at(config, fault.path)
        reaches = done.backend != "zenflow" or fault.path[0] not in support.TAKEN_OVER
        if reaches and value is not MISSING and fault.path[0] not in BATCH:
            refusal = Refusal(".".join(fault.path), shown(value), f"by DeepSpeed is {fault.allowed}")
            return Outcome("refused", refusals=(refusal,))
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

        refusals = tuple(upstream.refusals(config, online=wanted.online))
    else:
        refusals = (*support.refusals(config), *optimizers.refusals(config))
    if refusals:
        return Outcome("refused", backend, refusals=refusals)
    return Outcome("trains", backend, quality_of(config, wanted))


def quality_of(config: Mapping[str, Any], wanted: Section) -> Quality:
    """The promise about updates: what is asked for; else late ones only where the ds_config has ZenFlow."""
    zero = config.get("zero_optimization")
    has_zenflow = isinstance(zero, Mapping) and zero.get("zenflow") is not None
    return wanted.quality or ("published" if has_zenflow else "exact")


def _nothing_to_do(config: Mapping[str, Any]) -> str:
    zero = config.get("zero_optimization")
    offload = zero.get("offload_optimizer") if isinstance(zero, Mapping) else None
    if isinstance(offload, Mapping):
        return f'{_DEVICE} is "none", {_STAYS}'
    return f"zero_optimization.offload_optimizer is not there, {_STAYS}"


def in_accelerate(text: str) -> str:
    """What is advised, where there is no "zftune" section: Accelerate's configuration has none.

    Args:
        text: of a sentence.
    """
    return text.replace(INSTEAD, "or zftune run --backend deepspeed")


def _refusal_in(refusal: Refusal, places: Mapping[str, Place]) -> Refusal:
    place = places.get(refusal.field)
    if place is None:
        return refusal._replace(allowed=in_accelerate(refusal.allowed))
    value = "not there" if place.value is MISSING else shown(place.value)
    return Refusal(place.name, value, in_accelerate(refusal.allowed))


def _placed(field: str, places: Mapping[str, Place]) -> str:
    name, value = places[field]
    return f"{name} is {'not there' if value is MISSING else shown(value)}"
