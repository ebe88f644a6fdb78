"""A search in a training loop, thought about in the process that trains.

    live = LiveSearch(optimizer, search, tokens=micro_batch * sequence)
    try:
        for batch in batches:
            loss = train_step(batch)      # forward, backward, optimizer.step(), optimizer.zero_grad()
            if not live.on_step(loss):
                break                     # or go on: the knobs that were found hold
    finally:
        live.close()

Nothing here waits: step times come from the optimizer's own history, two steps late, and a desk (see
`zftune.tuner.thinking`) thinks and writes in a thread of its own, while training goes on under the incumbent's knobs.
"""

from __future__ import annotations

from functools import partial

from zenflow.optimizer import ZenFlowOptimizer
from zftune.tuner.changing import Change, Changes
from zftune.tuner.executor import Disturbance, Executor
from zftune.tuner.facts import device_limit
from zftune.tuner.guard import Losses, LossGuard
from zftune.tuner.search import Search
from zftune.tuner.thinking import DeskMaker, Recorder, ThreadDesk

__all__ = ["Change", "Disturbance", "LiveSearch", "Recorder"]


class LiveSearch(Executor):
    """Carries out what a search asks for.

    Args:
        optimizer: that trains.
        search: begins at the optimizer's knobs. While a desk thinks it is the desk's: read it after `close()`.
        tokens: of a step.
        recorder: where it is written down.
        disturbance: says that a measurement does not count.
        guard: watches over the loss; None: nobody does.
        desk: where it is thought about; None: in a thread.
        on_change: told of every change of knobs.
        changes: how knobs change; None: at once.
    """

    def __init__(
        self,
        optimizer: ZenFlowOptimizer,
        search: Search,
        *,
        tokens: int,
        recorder: Recorder | None = None,
        disturbance: Disturbance = lambda: None,
        guard: LossGuard | None = None,
        desk: DeskMaker | None = None,
        on_change: Change | None = None,
        changes: Changes | None = None,
    ) -> None:
        self.search = search
        search.book.device_limit_bytes = device_limit(optimizer)
        if desk is None:
            desk = partial(ThreadDesk, clock=optimizer.device.clock)
        super().__init__(
            optimizer,
            desk(search, recorder),
            start=search.book.trials[0].setting,
            incumbent=search.book.incumbent.setting,
            tokens=tokens,
            disturbance=disturbance,
            losses=None if guard is None else Losses(optimizer.device, guard),
            on_change=on_change,
            changes=changes,
        )
