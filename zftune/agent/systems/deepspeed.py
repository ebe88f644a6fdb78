"""Upstream DeepSpeed: its engine makes the steps, and its optimizers wait at known places.

Never imports DeepSpeed. What an installed version does not have becomes a reason for what is missing, not an error.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from zftune.agent.recorder import Cause
    from zftune.agent.session import Session

_ENGINE = "deepspeed.runtime.engine"
_WAITS: dict[str, tuple[tuple[str | None, str, Cause], ...]] = {
    "deepspeed.runtime.zenflow.zenflow_stage_1_and_2": (
        ("ZenFlowZeroOptimizerParallel", "_wait_for_optimizer_process", "host"),
        ("ZenFlowZeroOptimizer", "sync_fp32_param_from_gpu", "select"),
        ("ZenFlowZeroOptimizer", "update_selected_channels", "select"),
    ),
    "deepspeed.runtime.zenflow.engine_stage3": (
        (None, "wait_last_update_and_copy", "host"),  # the wait and the copy are one function there
        (None, "sync_fp32_param_from_gpu", "select"),
        (None, "update_selected_channels", "select"),
    ),
    "deepspeed.ops.adam.cpu_adam": (("DeepSpeedCPUAdam", "step_subgroup", "host"),),
    "deepspeed.ops.adam.zenflow_cpu_adam": (("ZenFlowCPUAdam", "_sequential_step", "host"),),
}
"""Module: class or None, function, and what it waits for."""
_ZENFLOW = ("topk_ratio", "update_interval", "select_interval", "overlap_step", "full_warm_up_rounds")
_TRANSMIT, _STEP = "optimizer_transmit_time", "optimizer_step"  # names of upstream's timers


def engine_of(of: Any) -> Any:
    """`of`, if it is an engine."""
    module = sys.modules.get(_ENGINE)
    engine = getattr(module, "DeepSpeedEngine", None)
    return of if engine is not None and isinstance(of, engine) else None


def optimizer_of(of: Any) -> Any:
    """The innermost optimizer of an engine; anything else itself."""
    inner = vars(of).get("optimizer") if engine_of(of) is not None else of
    while inner is not of and hasattr(inner, "optimizer"):
        inner = inner.optimizer
    return inner


def module_of(of: Any) -> nn.Module | None:
    """The model of an engine."""
    engine = engine_of(of)
    return None if engine is None else engine.module


def describe(of: Any) -> list[str]:
    """The version, the ZeRO stage, what is offloaded, and ZenFlow's settings."""
    engine = engine_of(of)
    if engine is None:
        return []
    parts = [f"DeepSpeed {getattr(sys.modules['deepspeed'], '__version__', 'of unknown version')}"]
    for ask in (_stage, _offloading, _zenflow):
        try:
            parts += ask(engine)
        except (AttributeError, TypeError):  # another version
            parts.append(f"{ask.__name__.lstrip('_')} unknown")
    return [", ".join(parts)]


def settings(of: Any) -> dict[str, Any] | None:
    """What an engine really runs with, as it took it from its configuration; None: it is no engine that tells.

    {"version", "stage", "micro_batch", "offload_ratio", "sub_groups", "has_scheduler", "zenflow": {..} | null}
    """
    engine = engine_of(of)
    if engine is None:
        return None
    try:
        offload, zenflow = engine.zero_offload_optimizer(), engine.zenflow_config()
        return {
            "version": str(getattr(sys.modules["deepspeed"], "__version__", "")),
            "stage": int(engine.zero_optimization_stage()),
            "micro_batch": int(engine.train_micro_batch_size_per_gpu()),
            "offload_ratio": None if offload is None else float(getattr(offload, "ratio", 1.0)),
            "sub_groups": len(getattr(engine.optimizer, "fp16_groups", ())),
            "has_scheduler": engine.lr_scheduler is not None,
            "zenflow": None if zenflow is None else {name: getattr(zenflow, name) for name in _ZENFLOW},
        }
    except (AttributeError, TypeError):  # another version
        return None


def _stage(engine: Any) -> list[str]:
    """The engine's, or the user's where this package's runtime trains in the place of ZeRO, and how it does."""
    optimizer = optimizer_of(engine)
    given = getattr(optimizer, "given_stage", None)
    if given is None:
        return [f"ZeRO stage {int(engine.zero_optimization_stage())}"]
    if int(engine.world_size) == 1:
        how = "on one rank"
    elif optimizer.is_partitioned:
        how = "with whole weights, its state shared out among the ranks"
    else:
        how = "over FSDP2" if optimizer.is_sharded else "with all of its state on each rank"
    return [f"stage {given} in the ds_config, trained by zenflow {how}"]


def _offloading(engine: Any) -> list[str]:
    offload = engine.zero_offload_optimizer()
    if offload is None or str(getattr(offload.device, "value", offload.device)) == "none":
        return []
    share = f" (ratio {offload.ratio:g})" if getattr(offload, "ratio", 1.0) != 1.0 else ""
    return [f"optimizer offloaded to {getattr(offload.device, 'value', offload.device)}{share}"]


def _zenflow(engine: Any) -> list[str]:
    zenflow = engine.zenflow_config()
    if zenflow is None:
        return []
    names = ("topk_ratio", "update_interval", "select_interval", "overlap_step")
    values = [f"{name} {str(getattr(zenflow, name)).lower()}" for name in names]
    return [f"ZenFlow ({', '.join(values)})"]


def watch(session: Session, when_imported: Callable[[str, Callable[[Any], None]], None]) -> None:
    """Hook DeepSpeed once it is imported."""
    when_imported(_ENGINE, lambda module: _hook_engine(session, module))
    when_imported("deepspeed.ops.adam.cpu_adam", lambda module: _know_host_optimizer(session, module))
    for name in _WAITS:
        when_imported(name, functools.partial(_hook_waits, session, name))
    copies = _Copies(session)
    when_imported("deepspeed.utils.timer", copies.hook_timers)
    when_imported("deepspeed.runtime.zero.stage_1_and_2", copies.hook_optimizer)


def _hook_engine(session: Session, module: Any) -> None:
    from zftune.agent.hooks import backward

    engine = module.DeepSpeedEngine
    session.patches.replace(engine, "backward", lambda original: backward(session, original, of_engine=True))
    session.patches.replace(engine, "step", lambda original: _engine_step(session, original))


def _engine_step(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.step_begins(session.clock_ns(), self)
        before, done = vars(self).get("global_steps"), False
        try:
            result = original(self, *args, **kwargs)
            done = True
        finally:
            # global_steps counts the boundaries of gradient accumulation, overflows too; under ZenFlow each call counts
            counts = vars(self).get("global_steps") != before or bool(vars(self).get("zenflow"))
            session.step_ends(session.clock_ns(), self, counts=done and counts)
        return result

    return step


def _know_host_optimizer(session: Session, module: Any) -> None:
    kind = getattr(module, "DeepSpeedCPUAdam", None)
    if kind is None:
        session.absent["waits_ms.host"] = "this DeepSpeed has no deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam"
    else:
        session.host_optimizers.add(kind)


def _hook_waits(session: Session, name: str, module: Any) -> None:
    from zftune.agent.hooks import waiting

    for owner_name, function, cause in _WAITS[name]:
        owner = module if owner_name is None else getattr(module, owner_name, None)
        make = functools.partial(waiting, session, cause)
        if owner is None or not session.patches.replace(owner, function, make):
            place = ".".join(part for part in (name, owner_name, function) if part)
            session.absent[f"waits_ms.{cause}"] = f"this DeepSpeed has no {place}"


class _Copies:
    """Parameters' copies to the device: upstream brackets them with timers, whether these measure or not.

    Under ZenFlow a timer is around the copy alone. Under ZeRO-Offload it begins with the host's step: the copy, and the
    cast before it, is what comes after that.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waiting = False

    def hook_timers(self, module: Any) -> None:
        for name in ("NoopTimer", "SynchronizedWallClockTimer"):
            timers = getattr(module, name, None)
            if timers is None or not self._session.patches.replace(timers, "__call__", self._timers):
                self._session.absent["waits_ms.h2d"] = f"this DeepSpeed has no timers {name}"

    def hook_optimizer(self, module: Any) -> None:
        optimizer = getattr(module, "DeepSpeedZeroOptimizer", None)
        if optimizer is None or not self._session.patches.replace(optimizer, "_optimizer_step", self._optimizer_step):
            self._session.absent["waits_ms.h2d"] = "this DeepSpeed has no DeepSpeedZeroOptimizer._optimizer_step"

    def begin(self) -> None:
        if not self._waiting:
            self._waiting = bool(self._session.wait_begins(self._session.clock_ns(), "h2d"))

    def end(self) -> None:
        if self._waiting:
            self._waiting = False
            self._session.wait_ends(self._session.clock_ns())

    def _optimizer_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def optimizer_step(zero: Any, *args: Any, **kwargs: Any) -> Any:
            self.end()  # a step that raised left its copy open
            result = original(zero, *args, **kwargs)
            if vars(zero).get("cpu_offload"):
                self.begin()
            return result

        return optimizer_step

    def _timers(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def timer_of(timers: Any, name: Any) -> Any:
            timer = original(timers, name)
            if self._session.off or name not in (_TRANSMIT, _STEP):
                return timer
            return _Bracket(timer, self, begins=name == _TRANSMIT)

        return timer_of


class _Bracket:
    def __init__(self, timer: Any, copies: _Copies, *, begins: bool) -> None:
        self._timer = timer
        self._copies = copies
        self._begins = begins

    def start(self) -> None:
        self._timer.start()
        if self._begins:
            self._copies.begin()

    def stop(self, *args: Any, **kwargs: Any) -> None:
        self._copies.end()
        self._timer.stop(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timer, name)
