"""`zftune.attach(optimizer)`: the one line that tunes a training loop of one's own while it trains.

    optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=2e-5, module=model)
    zftune.attach(optimizer, micro_batch=8, sequence=2048)
    for batch in batches:
        loss = model(batch).loss
        loss.backward()
        zftune.log_loss(loss)      # lets a guard watch over it; knobs that change the trajectory stay fixed without
        optimizer.step()
        optimizer.zero_grad()

A hook of the optimizer's `step()` does the rest. The training never fails, nor waits, because of it. With several ranks
of torch.distributed all of them call it: rank 0 thinks, and knobs change on all ranks after the same step or on none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim import Optimizer

from zenflow import ZenFlowConfig
from zenflow.device import HostWeights
from zenflow.optimizer import ZenFlowOptimizer
from zftune.agent import NOBODY, ONLINE
from zftune.errors import BadInputError
from zftune.store.types import Quality
from zftune.tuner.changing import Change
from zftune.tuner.counsel import Counsel
from zftune.tuner.disturbances import disturbance_of
from zftune.tuner.facts import ALONE, Company, Wishes
from zftune.tuner.following import Tuner, open_tuners
from zftune.tuner.own_counsel import OwnCounsel
from zftune.tuner.ranks.accord import Accord
from zftune.tuner.ranks.attaching import attach_ranks
from zftune.tuner.ranks.exchange import several_ranks
from zftune.tuner.remote.counsel import DaemonCounsel
from zftune.tuner.search import SearchOptions
from zftune.tuner.space import QUALITIES, QUALITY_WORDS

if TYPE_CHECKING:
    from zftune.store.store import Store

__all__ = ["Tuner", "attach", "log_loss", "log_tokens"]

_SEARCHES = ("", "process", "daemon", NOBODY)
_logger = logging.getLogger("zftune")


def attach(
    optimizer: Optimizer,
    *,
    quality: Quality | None = None,
    tokens: int | None = None,
    micro_batch: int | None = None,
    sequence: int | None = None,
    eval_fn: Callable[[], float] | None = None,
    store: Store | Literal[False] | None = None,
    tune_memory: bool = False,
    fresh: bool = False,
    seed: int = 0,
    most_measurements: int = 24,
    on_change: Change | None = None,
    daemon: bool | None = None,
) -> Tuner:
    """Tune an optimizer's knobs while it trains. Call it before the first step; on a GPU it takes some seconds.

    `update_interval: "auto"` is left for windows of four steps once there is a search, which needs a known length.

    Args:
        optimizer: of zenflow; given its `module`, more is known of the model.
        quality: "exact", "published" or "loose"; None: "published", but "exact" where the knobs wait for every update.
        tokens: of a step, for scores in time per token; None: `micro_batch * sequence`, else scores are per step.
        micro_batch: sequences of a step.
        sequence: tokens of each. With `micro_batch` the planner knows the activations, and the store what was trained.
        eval_fn: gives the loss on a batch that stays the same: the staleness probe, before and after a flush. It is
            called at the end of the warm-up and after other knobs were adopted; its flushes are part of the schedule.
            For one rank.
        store: where runs and presets are remembered; None: the user's own; False: nowhere.
        tune_memory: whether `offload_ratio` may be lowered, which takes GPU memory.
        fresh: begin neither from a preset nor where an earlier run was ended.
        seed: of the search.
        most_measurements: of the search.
        on_change: told of the step after which new knobs hold, and of the knobs.
        daemon: whether the daemon searches, on $ZFTUNE_SOCKET or its usual socket, rather than this process. It need
            not be there yet, nor stay: meanwhile the best knobs so far hold, at first the user's own. It has its own
            store. None: as $ZFTUNE_ONLINE says, "daemon" or "process"; where that is not set, or a store is given, this
            process. Under `zftune run --schedule` nobody searches, whatever is given: the tuner is closed from the
            beginning.

    Raises:
        BadInputError: an argument is not allowed, such as an optimizer whose weights are on the host, or not all ranks
            have come.
    """
    optimizer = _check_optimizer(optimizer)
    if quality is not None and quality not in QUALITIES:
        raise BadInputError(f"quality is {quality!r}, allowed are {', '.join(QUALITIES)}, or None")
    if daemon and store is not None:
        raise BadInputError("store is given, allowed is None where the daemon searches: it has its own")
    searches = _searches()
    if searches == NOBODY:
        return _closed_tuner(optimizer)
    if daemon is None:
        daemon = searches == "daemon" and store is None  # who brings a store has no daemon in mind
    _check_counts(tokens=tokens, micro_batch=micro_batch, sequence=sequence, most_measurements=most_measurements)
    wishes = Wishes(
        quality=quality or _default_quality(optimizer.config),
        micro_batch=micro_batch or 1,
        sequence=sequence or (1 if tokens is None else tokens),
        tune_memory=tune_memory,
        fresh=fresh,
        search=SearchOptions(seed=seed, most_measurements=most_measurements, hold=True),
    )
    if tokens is None:
        tokens = micro_batch * sequence if micro_batch and sequence else 1
    several = several_ranks()
    if several and eval_fn is not None:
        raise BadInputError("eval_fn is given on several ranks, allowed is None there: its flushes are one rank's")

    def begin(company: Company, accord: Accord | None) -> Tuner:
        _logger.info("zftune tunes with quality %s.", QUALITY_WORDS[wishes.quality])
        return Tuner(
            optimizer,
            _counsel(optimizer, wishes, tokens, store, company, daemon=daemon),
            tokens=tokens,
            disturbance=disturbance_of(optimizer.device, sampled=not daemon),
            eval_fn=eval_fn,
            on_change=on_change,
            accord=accord,
        )

    return attach_ranks(optimizer, begin, on_change) if several else begin(ALONE, None)


def log_loss(loss: torch.Tensor | float) -> None:
    """Give a step's loss to the tuners that are attached; without one this does nothing. It never waits.

    Args:
        loss: a scalar on any device, or a number.

    Raises:
        BadInputError: it is more than one number.
    """
    for tuner in open_tuners():
        tuner.log_loss(loss)


def log_tokens(tokens: int) -> None:
    """Say that steps have another number of tokens from now on, such as where sequences get longer.

    Scores are in time per token, and what was measured with other steps does not count any more. It is not for batches
    that differ from step to step: say their mean, once. Without a tuner this does nothing.

    Args:
        tokens: of a step.

    Raises:
        BadInputError: it is no number of tokens.
    """
    for tuner in open_tuners():
        tuner.log_tokens(tokens)


def _check_optimizer(optimizer: Optimizer) -> ZenFlowOptimizer:
    if not isinstance(optimizer, ZenFlowOptimizer):
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        raise BadInputError(f"optimizer is a {name}, allowed is one of zenflow, such as zenflow.ZenFlowAdamW")
    if any(tuner.follows(optimizer) for tuner in open_tuners()):
        raise BadInputError(
            "optimizer is followed by a tuner already, allowed is one that is not: close() that one first"
        )
    if isinstance(optimizer.device, HostWeights):
        raise BadInputError(
            "the optimizer's weights are on the host (CPUOffloadPolicy), allowed are weights on a device: it has no "
            "columns to select, and the search's measurements are of a device's waits"
        )
    return optimizer


def _counsel(
    optimizer: ZenFlowOptimizer,
    wishes: Wishes,
    tokens: int,
    store: Store | Literal[False] | None,
    company: Company,
    *,
    daemon: bool,
) -> Counsel:
    if daemon:
        return DaemonCounsel(optimizer, wishes, tokens, company=company)
    return OwnCounsel(optimizer, wishes, store, company)


def _searches() -> str:
    value = os.environ.get(ONLINE, "")
    if value not in _SEARCHES:
        raise BadInputError(f"{ONLINE} is {value!r}, allowed are daemon and process")
    return value


def _closed_tuner(optimizer: ZenFlowOptimizer) -> Tuner:
    from zftune.tuner.nobody import closed_tuner

    _logger.info("zftune.attach does nothing: the knobs come from a schedule.")
    return closed_tuner(optimizer)


def _check_counts(**counts: Any) -> None:
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise BadInputError(f"{name} is {value!r}, allowed is an integer >= 1")


def _default_quality(config: ZenFlowConfig) -> Quality:
    """Who has a plain offloaded optimizer has not asked for staleness."""
    return "exact" if config.update_interval == 1 and not config.overlap_step else "published"
