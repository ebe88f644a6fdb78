"""What `zftune run` does with a zenflow optimizer in the process that trains: tune it, replay knobs, or record them.

zenflow is imported -> hooks on every optimizer's step -> first step: who is asked for begins -> after each step
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zenflow.errors import ZenFlowError
from zenflow.optimizer import ZenFlowOptimizer
from zftune.agent import is_first_rank, show_lines, show_refusals
from zftune.agent.session import Patches
from zftune.errors import ZftuneError

if TYPE_CHECKING:
    from zftune.agent.arming import WhenImported
    from zftune.tuner.tuner import Tuner


_LOOK_S = 5.0
_LONGEST_LOOK_S = 300.0
_SUSPENDED_S = 20.0
"""By so much longer than asked for a pause takes where the process was stopped, as by Ctrl-Z: a daemon may be gone."""
_logger = logging.getLogger("zftune")


class RunHook(Protocol):
    """Something that is asked for."""

    def begin(self, optimizer: ZenFlowOptimizer) -> None:
        """Called before the first step of an optimizer that this process sees."""

    def before(self, optimizer: ZenFlowOptimizer) -> None:
        """Called before each step."""

    def after(self, optimizer: ZenFlowOptimizer) -> None:
        """Called after each step."""


def begin(wanted: Mapping[str, Any], when_imported: WhenImported) -> None:
    """Do what is asked for with each zenflow optimizer, from its first step on.

    Raises:
        BadInputError: the schedule cannot be read any more.
    """
    show_lines(quiet=bool(wanted.get("quiet")))
    show_refusals()
    parts: list[RunHook] = []
    if wanted.get("export_schedule") is not None and is_first_rank():
        from zftune.agent.schedule import Recording

        parts.append(Recording(wanted["export_schedule"]))
    if wanted.get("schedule") is not None:
        from zftune.agent.schedule import Replay

        parts.append(Replay(wanted["schedule"]))
    if wanted.get("online"):
        parts.append(Online(wanted.get("quality"), when_imported))
    hook(parts)


def hook(parts: list[RunHook]) -> Callable[[], None]:
    """Let parts see the steps of zenflow's optimizers.

    Returns:
        What removes the hooks.
    """
    seen: weakref.WeakSet[ZenFlowOptimizer] = weakref.WeakSet()

    def before(optimizer: Any, *_: Any) -> None:
        if is_compiling() or not isinstance(optimizer, ZenFlowOptimizer):
            return
        if optimizer not in seen:
            seen.add(optimizer)
            for part in parts:
                part.begin(optimizer)
        for part in parts:
            part.before(optimizer)

    def after(optimizer: Any, *_: Any) -> None:
        if is_compiling() or not isinstance(optimizer, ZenFlowOptimizer):
            return
        for part in parts:
            part.after(optimizer)

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)

    def remove() -> None:
        for one in hooks:
            one.remove()

    return remove


class Online:
    """Tunes each optimizer that nobody follows yet."""

    def __init__(self, quality: Any, when_imported: WhenImported) -> None:
        self._quality = quality
        self.patches = Patches()
        when_imported("transformers.trainer", self._tune_trainers)

    def begin(self, optimizer: ZenFlowOptimizer) -> None:
        """Attach, on all ranks at once; after another optimizer, too: a script may train one after the other."""
        try:
            self._attach(optimizer)
        except ZenFlowError:
            raise
        except ZftuneError as error:  # such as of a socket that cannot be
            _logger.warning("Nothing is tuned: %s.", error)
        except Exception:
            _logger.exception("Nothing is tuned; the training goes on.")

    def _attach(self, optimizer: ZenFlowOptimizer) -> None:
        from zftune.attaching import attach
        from zftune.tuner.tuner import open_tuners

        # One that follows it already is of DeepSpeed's engine, a Trainer's callback, or the script itself.
        tuner = next((one for one in open_tuners() if one.follows(optimizer)), None)
        tuner = attach(optimizer, quality=self._quality) if tuner is None else tuner
        if tuner.driver.asks_daemon and is_first_rank():
            kept = (weakref.ref(tuner),)
            threading.Thread(target=_keep_daemon, args=kept, name="zftune-ensure", daemon=True).start()

    def before(self, optimizer: ZenFlowOptimizer) -> None:
        """Nothing: the tuner has a hook of its own."""

    def after(self, optimizer: ZenFlowOptimizer) -> None:
        """Nothing."""

    def _tune_trainers(self, module: Any) -> None:
        self.patches.replace(module.Trainer, "train", self._train)

    def _train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """With the callback, from which the tuner hears of the losses."""

        @functools.wraps(original)
        def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(trainer.optimizer, ZenFlowOptimizer):
                from zftune.integrations.huggingface import ZFTuneCallback

                if not any(isinstance(one, ZFTuneCallback) for one in trainer.callback_handler.callbacks):
                    trainer.add_callback(ZFTuneCallback(quality=self._quality))
            return original(trainer, *args, **kwargs)

        return train


def _keep_daemon(tuner: weakref.ref[Tuner]) -> None:
    """See that there is a daemon while a tuner needs one, ever more rarely where none stays.

    Until the training is registered, one is started whenever none answers: a private one ends where no run comes for a
    while, and models take theirs to load. Later it is started again where it has died, and not where it was ended; but
    one that has ended while this process was stopped, so that it was not heard of, ended for want of runs.
    """
    from zftune.daemon.client.autostart import ensure_daemon, revive_daemon

    look_s, is_new = _LOOK_S, True
    told: set[type[Exception]] = set()
    while _searches(tuner):
        try:
            rarer = ensure_daemon() if is_new or not _is_registered(tuner) else revive_daemon()
            is_new = False
        except (ZftuneError, OSError) as error:
            rarer = True
            if type(error) not in told:
                _logger.warning("Tuning waits for a daemon: %s.", error)
            told.add(type(error))
        if rarer:
            look_s = min(2 * look_s, _LONGEST_LOOK_S)  # it may be what the training asks that kills it
        began_s = time.monotonic()
        time.sleep(look_s)
        is_new |= time.monotonic() - began_s > look_s + _SUSPENDED_S


def _searches(tuner: weakref.ref[Tuner]) -> bool:
    found = tuner()
    return found is not None and found.searching


def _is_registered(tuner: weakref.ref[Tuner]) -> bool:
    found = tuner()
    return found is not None and found.driver.registered
