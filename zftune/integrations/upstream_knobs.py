"""Knobs of upstream's own ZenFlow, changed while DeepSpeed trains: three of them, at ZeRO stages 1 and 2.

    step = set_upstream_knobs(engine, update_interval=8)    # between engine.step() and the next forward, on all ranks

Upstream has no such function. This one writes what its optimizer reads, at a moment when nothing is pending there.
"""

from __future__ import annotations

import logging
import sys
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch

from zftune.errors import BadInputError

TESTED = ("0.19.6",)
"""Versions of DeepSpeed whose ZenFlow this was tested with; it writes to what is private there."""
LIVE = ("topk_ratio", "update_interval", "select_interval")

_HOST_STATE = ("exp_avg_cpu_data", "exp_avg_sq_cpu_data")
_logger = logging.getLogger("zftune")

__all__ = ["LIVE", "TESTED", "set_upstream_knobs"]


def set_upstream_knobs(engine: Any, **knobs: Any) -> int:
    """Change knobs of a DeepSpeed engine with ZenFlow; they hold from the first window that begins after this.

    Call it between `engine.step()` and the next forward, on all ranks with the same values. Where a window is open, or
    the warm-up lasts, or the new windows would begin elsewhere, the change waits: the engine's own forward makes it.
    Several calls before that add up. With `overlap_step` the update that is under way is waited for.

    Another `topk_ratio` selects anew at once, with fresh moments for what is selected; as at each of upstream's own
    selections, fp32 masters are then read from the weights.

    Args:
        engine: of DeepSpeed, ZeRO stage 1 or 2, with a `zenflow` section.
        knobs: `topk_ratio`, `update_interval`, `select_interval` (in steps, a multiple of `update_interval`).

    Returns:
        The number of the step after which they hold, as `engine.micro_steps` counts them.

    Raises:
        BadInputError: another version of DeepSpeed, an engine without ZenFlow, a knob that needs a restart, or a value
            that is not allowed. Nothing has changed then.
    """
    _require_version()
    _require_zenflow(engine)
    _require_agreement(knobs)
    pending = _pending.get(engine)
    wanted = _wanted(_Knobs.of(engine) if pending is None else pending.knobs, knobs)
    _require_live(engine)
    if pending is not None:
        pending.cancel()
    change = _Change(engine, wanted)
    if change.at == engine.micro_steps:
        change.apply(engine)
    else:
        change.wait(engine)
    return change.at


@dataclass(frozen=True, slots=True)
class _Knobs:
    topk_ratio: float
    update_interval: int
    select_interval: int
    """In steps; 0: nothing is selected again."""

    @classmethod
    def of(cls, engine: Any) -> _Knobs:
        """Those in force."""
        return cls(engine.optimizer.topk_ratio, engine.update_interval, engine.select_interval)


class _Change:
    """A change of knobs that was asked for."""

    def __init__(self, engine: Any, knobs: _Knobs) -> None:
        self.knobs = knobs
        self.at = _barrier(engine, knobs.update_interval)
        """The step after which it is made."""
        self._hook: Any = None

    def wait(self, engine: Any) -> None:
        """Let the engine's forward make it."""
        _pending[engine] = self
        self._hook = engine.register_forward_pre_hook(self._before_forward)

    def cancel(self) -> None:
        """Do not make it."""
        if self._hook is not None:
            self._hook.remove()

    def apply(self, engine: Any) -> None:
        """Make it, while nothing is pending."""
        optimizer, knobs, before = engine.optimizer, self.knobs, _Knobs.of(engine)
        if hasattr(optimizer, "process_optimizer_established"):
            _drain(optimizer)
        for owner in (engine, optimizer):
            owner.update_interval, owner.select_interval = knobs.update_interval, knobs.select_interval
        # The engine divides gradients by the one and counts windows with it; the optimizer has a copy of its own.
        engine._config.gradient_accumulation_steps = knobs.update_interval
        optimizer.gradient_accumulation_steps = knobs.update_interval
        if knobs.topk_ratio != before.topk_ratio:
            _select_anew(optimizer, knobs.topk_ratio)
        section = engine.zenflow_config()  # what others read of it
        section.topk_ratio, section.update_interval = knobs.topk_ratio, knobs.update_interval
        if section.select_strategy == "step":
            section.select_interval = knobs.select_interval

    def _before_forward(self, engine: Any, _: Any) -> None:
        if engine.micro_steps > self.at:  # the model was called without its engine
            late, self.at = self.at, _barrier(engine, self.knobs.update_interval)
            _logger.warning("Knobs that were to hold after step %d hold after step %d.", late, self.at)
        if engine.micro_steps == self.at:
            self.cancel()
            del _pending[engine]
            self.apply(engine)


_pending: weakref.WeakKeyDictionary[Any, _Change] = weakref.WeakKeyDictionary()


def _barrier(engine: Any, interval: int) -> int:
    """The first step from now on with which a window ends, and with which windows of the new length end too."""
    warm_up, now, select = engine.full_warm_up_rounds, engine.update_interval, engine.select_interval
    step: int = max(engine.micro_steps, warm_up)
    while (step - warm_up) % interval or ((step - warm_up) % now and (select == 0 or step % select)):
        step += 1
    return step


def _drain(optimizer: Any) -> None:
    """Wait for the update that the optimizer's process works on, and make it visible.

    Upstream does so when the next window ends, and writes the selected columns again after it, which this keeps.
    """
    if not optimizer.process_optimizer_established or optimizer.first_update_round_after_warmup:
        return  # nothing was submitted since the last time
    kept = [(parameter, _on_device(parameter).clone()) for group in optimizer.bit16_groups for parameter in group]
    optimizer.wait_last_update_and_copy()
    for parameter, values in kept:
        if parameter.dim() == 1:
            parameter.data.copy_(values)
        else:
            parameter.data[:, parameter.selected_indices] = values
    optimizer.first_update_round_after_warmup = True  # so that the next window's end waits for nothing


def _on_device(parameter: torch.Tensor) -> torch.Tensor:
    """What is updated every step."""
    if parameter.dim() == 1:
        return parameter.data
    return parameter.data[:, parameter.selected_indices]  # type: ignore[attr-defined]


def _select_anew(optimizer: Any, topk_ratio: float) -> None:
    """Let the next backward select as many columns, the state of which begins anew: its shape is another."""
    from deepspeed.accelerator import get_accelerator

    optimizer.topk_ratio = topk_ratio
    optimizer.full_warm_up_rounds = (
        optimizer.micro_step + 1
    )  # the step after the warm-up selects; nothing else asks now
    optimizer.selective_optimizer.state.clear()
    for parameter in (parameter for group in optimizer.bit16_groups for parameter in group):
        for name in _HOST_STATE:
            if hasattr(parameter, name):
                if optimizer.cpu_offload_pin_memory:
                    get_accelerator().unpin_memory(getattr(parameter, name))
                delattr(parameter, name)


# --- what is refused -------------------------------------------------------------------------------------------------


def _require_version() -> None:
    version = str(getattr(sys.modules.get("deepspeed"), "__version__", None))
    if version.partition("+")[0] not in TESTED:
        raise BadInputError(
            f"deepspeed is {version}, allowed is {' or '.join(TESTED)}, with which live changes of its ZenFlow were "
            "tested: set the knobs in the ds_config and restart"
        )


def _require_zenflow(engine: Any) -> None:
    if not getattr(engine, "zenflow", False):
        raise BadInputError("zenflow is not in the engine's ds_config, allowed is an engine with DeepSpeed's ZenFlow")
    stage = int(engine.zero_optimization_stage())
    if stage not in (1, 2):
        raise BadInputError(
            f"zero_optimization.stage is {stage}, allowed are 1 and 2: at others a change needs a restart"
        )
    if engine.auto_update:
        raise BadInputError("update_interval is 'auto' in the ds_config, allowed is an integer: this needs a restart")


def _require_live(engine: Any) -> None:
    """That the engine is between two steps, and counts them as its optimizer does."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "process_optimizer_established") and engine.full_warm_up_rounds < 1:
        raise BadInputError(
            "full_warm_up_rounds is 0, allowed is at least 1 where knobs change under overlap_step: without a warm-up "
            "DeepSpeed always has an update under way that nobody waits for; this needs a restart"
        )
    if engine._is_gradient_accumulation_boundary is not None:
        raise BadInputError(
            "set_gradient_accumulation_boundary() was called, as Accelerate and the Trainer do, allowed is DeepSpeed's "
            "own schedule: with theirs every step is a window's end, whatever update_interval says"
        )
    ahead = optimizer.micro_step + 1 - engine.micro_steps
    if ahead == 1:
        raise BadInputError("the engine is between backward() and step(), allowed is a call after step()")
    if ahead:
        raise BadInputError(
            f"engine.micro_steps is {engine.micro_steps} and its optimizer's {optimizer.micro_step + 1}, allowed are "
            "equal counts: after a checkpoint was loaded DeepSpeed selects out of step, a change needs a restart"
        )


def _wanted(now: _Knobs, knobs: dict[str, Any]) -> _Knobs:
    for name, value in knobs.items():
        if name not in LIVE:
            raise BadInputError(f"{name} is {value!r}, allowed are changes of {', '.join(LIVE)}: this needs a restart")
    ratio: Any = knobs.get("topk_ratio", now.topk_ratio)
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
        raise BadInputError(f"topk_ratio is {ratio!r}, allowed is a number from 0 to 1")
    for name, value in knobs.items():
        if name != "topk_ratio" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise BadInputError(f"{name} is {value!r}, allowed is an integer >= 1")
    wanted = replace(now, **knobs)
    update, select = wanted.update_interval, wanted.select_interval
    if select % update and knobs.keys() & {"update_interval", "select_interval"}:
        raise BadInputError(f"select_interval is {select}, allowed is a multiple of update_interval, which is {update}")
    return wanted


def _require_agreement(knobs: dict[str, Any]) -> None:
    """Before anything that may be refused on one rank alone: the others would wait for it."""
    distributed = torch.distributed
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    everywhere: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everywhere, knobs)
    if any(one != everywhere[0] for one in everywhere):
        raise BadInputError(f"the knobs are {everywhere} on the ranks, allowed are the same on all of them")
