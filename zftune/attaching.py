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
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim import Optimizer

from zenflow import ZenFlowConfig
from zenflow.device import HostWeights
from zenflow.names import unread_variables
from zenflow.optimizer import ZenFlowOptimizer
from zenflow.ranks import several_ranks
from zftune import losses
from zftune.daemon.client.autostart import START_S
from zftune.errors import BadInputError
from zftune.exactness import is_exact, keep_exact
from zftune.store.types import PROMISES, QUALITIES, Quality
from zftune.text import one_of
from zftune.tracking import stats
from zftune.tuner.drivers import LocalDriver, SearchDriver
from zftune.tuner.executor import Change, disturbance_of, leave_tried
from zftune.tuner.ranks import KnobConsensus, RankChannel
from zftune.tuner.search import SearchOptions
from zftune.tuner.setup import SINGLE_RANK, TuneRequest, WorldInfo
from zftune.tuner.tuner import Tuner, asked_config, open_tuners
from zftune.variables import FRESH, NOBODY, ONLINE, READ, RUN

if TYPE_CHECKING:
    from zftune.store.store import Store


Begin = Callable[[WorldInfo, KnobConsensus], Tuner]
"""Makes the tuner of the rank that decides."""


def attach_ranks(optimizer: ZenFlowOptimizer, begin: Begin, on_change: Change | None) -> Tuner:
    """Follow an optimizer on every rank, or on none.

    Args:
        begin: is called on rank 0; what it raises is raised there.

    Raises:
        BadInputError: not all ranks are there, or the first one could not begin.
    """
    exchange = RankChannel()
    consensus = KnobConsensus(optimizer, exchange, on_change)
    if consensus.is_first:
        return _lead(exchange, consensus, begin)
    if not exchange.agree(well=True):
        raise BadInputError("nothing is tuned: rank 0 cannot tune, see its own message")
    return Tuner(optimizer, SearchDriver(), tokens=1, consensus=consensus)


def _lead(exchange: RankChannel, consensus: KnobConsensus, begin: Begin) -> Tuner:
    try:
        tuner = begin(exchange.company, consensus)
    except BaseException:
        exchange.agree(well=False)
        raise
    if exchange.agree(well=True):
        return tuner
    consensus.over = True
    tuner.close()
    raise BadInputError("nothing is tuned: another rank is gone")


__all__ = ["Tuner", "attach", "log_loss", "log_tokens", "stats"]

_SEARCHES = ("", "process", "daemon", NOBODY)
_logger = logging.getLogger("zftune")


def attach(
    optimizer: Optimizer,
    *,
    quality: Quality | None = None,
    tokens: int | None = None,
    micro_batch: int | None = None,
    sequence: int | None = None,
    zero_stage: int = 0,
    eval_fn: Callable[[], float] | None = None,
    store: Store | Literal[False] | None = None,
    tune_memory: bool = False,
    fresh: bool = False,
    seed: int = 0,
    most_measurements: int | None = None,
    on_change: Change | None = None,
    daemon: bool | None = None,
) -> Tuner:
    """Tune an optimizer's knobs while it trains. Call it before the first step; on a GPU it takes some seconds.

    `update_interval: "auto"` is left for windows of four steps once there is a search, which needs a known length.

    Args:
        optimizer: of zenflow; given its `module`, more is known of the model.
        quality: "exact", "published" or "loose"; None: "published", but "exact" where the knobs wait for every update.
        tokens: of a step, for scores in time per token; None: `micro_batch * sequence`, else scores are per step.
        micro_batch: sequences of a step; None: not known, and no preset claims it.
        sequence: tokens of each. With `micro_batch` the planner knows the activations, and the store what was trained.
        zero_stage: of a ds_config, under which presets are kept; 0 where there is no ZeRO.
        eval_fn: gives the loss on a batch that stays the same: the staleness probe, before and after a flush. It is
            called at the end of the warm-up and after other knobs were adopted; its flushes are part of the schedule.
            For one rank.
        store: where runs and presets are remembered; None: the user's own; False: nowhere.
        tune_memory: whether `offload_ratio` may be lowered, which takes GPU memory.
        fresh: begin neither from a preset nor where an earlier run was ended.
        seed: of the search.
        most_measurements: of the search, from 5; a comparison takes two. None: no limit but what exploring may cost.
        on_change: told of the step after which new knobs hold, and of the knobs.
        daemon: whether the daemon searches, on $ZFTUNE_SOCKET or its usual socket, rather than this process. It need
            not be there yet, nor stay: meanwhile the best settings so far hold, at first the user's own. It has its own
            store. None: as $ZFTUNE_ONLINE says, "daemon" or "process"; where that is not set, or a store is given, this
            process. Under `zftune run --schedule` nobody searches, whatever is given: the tuner is closed from the
            beginning.

    Raises:
        BadInputError: an argument is not allowed, such as an optimizer whose weights are on the host, or not all ranks
            have come.
    """
    optimizer = _check_optimizer(optimizer)
    if quality is not None:
        one_of("quality", quality, QUALITIES)
    _check_kinds(store, eval_fn=eval_fn, on_change=on_change)
    if daemon and store is not None:
        raise BadInputError("store must be None where the daemon searches: it has its own")
    searches = _searches()
    if searches == NOBODY:
        _logger.info("zftune.attach does nothing: the settings come from a schedule.")
        tuner = Tuner(optimizer, SearchDriver(), tokens=1)  # it has the knobs, and nothing else
        tuner.close()
        return tuner
    if daemon is None:
        daemon = searches == "daemon" and store is None  # who brings a store has no daemon in mind
    check_counts(tokens=tokens, micro_batch=micro_batch, sequence=sequence, most_measurements=most_measurements)
    wishes = TuneRequest(
        quality=quality or default_quality(asked_config(optimizer)),
        micro_batch=micro_batch or 0,
        sequence=sequence or tokens or 0,
        zero_stage=zero_stage,
        tune_memory=tune_memory,
        fresh=fresh,
        search=SearchOptions(seed=seed, most_measurements=most_measurements, hold=True),
    )
    if tokens is None:
        tokens = micro_batch * sequence if micro_batch and sequence else 1
    return start_tuner(
        optimizer, wishes, tokens=tokens, store=store, daemon=daemon, eval_fn=eval_fn, on_change=on_change
    )


def start_tuner(
    optimizer: ZenFlowOptimizer,
    wishes: TuneRequest,
    *,
    tokens: int,
    store: Store | Literal[False] | None = None,
    name: str | None = None,
    daemon: bool = False,
    eval_fn: Callable[[], float] | None = None,
    on_change: Change | None = None,
) -> Tuner:
    """Tune a training, whatever the environment says; `attach` and `zftune tune` both begin here.

    Args:
        store: as `attach` takes it.
        name: of the model; None: that of its class.
        eval_fn: the staleness probe.

    Raises:
        BadInputError: not all ranks have come, or the probe is given on several.
        HostEngineError: quality "exact" changes the knobs, and host work failed.
    """
    if os.environ.get(FRESH) == "1":  # `zftune run --fresh`, whoever attaches: its hooks, an engine, the script
        wishes = replace(wishes, fresh=True)
    several = several_ranks()
    if several and eval_fn is not None:
        raise BadInputError("eval_fn must be None on several ranks: its flushes are one rank's")

    back = leave_tried(optimizer, on_change)
    # Not with the search, which begins later: all steps are promised.
    if wishes.quality == "exact" and keep_exact(optimizer):
        _logger.info("Quality exact: every update is on time, with update_interval 1 and overlap_step off.")

    def begin(company: WorldInfo, consensus: KnobConsensus | None) -> Tuner:
        tuner = Tuner(
            optimizer,
            _driver(optimizer, wishes, tokens, store, company, name, daemon=daemon),
            tokens=tokens,
            disturbance=disturbance_of(optimizer.device, sampled=not daemon),
            eval_fn=eval_fn,
            on_change=on_change,
            consensus=consensus,
        )
        _logger.info("zftune tunes %s with quality %s.", _subject(optimizer, name), PROMISES[wishes.quality])
        _logger.info("%s", _end(wishes.search))
        tuner.say(back, logging.INFO)
        return tuner

    return attach_ranks(optimizer, begin, on_change) if several else begin(SINGLE_RANK, None)


def _subject(optimizer: ZenFlowOptimizer, name: str | None) -> str:
    return name or ("this training" if optimizer.module is None else type(optimizer.module).__name__)


def _end(options: SearchOptions) -> str:
    most = "" if options.most_measurements is None else f" or {options.most_measurements} measurements were made"
    return (
        f"The search ends when the training does{most}; it costs at most {100 * options.cost_share:g}% of the time, or "
        f"{options.cost_floor_s:g} s."
    )


def log_loss(loss: torch.Tensor | float) -> None:
    """Give a step's loss to the tuners that are attached and to `zftune profile`; without them this does nothing.

    It never waits. A profile counts it to the step whose `step()` comes next, so call it before that one: a loss given
    after `step()` stands one step late there. For the tuner either will do.

    Args:
        loss: a scalar on any device, or a number.

    Raises:
        BadInputError: it is no number, or more than one.
    """
    if not isinstance(loss, (torch.Tensor, Real)):
        raise BadInputError(f"loss is {loss!r}; it must be a number, or a tensor of one")
    for hear in tuple(losses.listeners):
        hear(loss)
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
    check_counts(tokens=tokens)
    for tuner in open_tuners():
        tuner.log_tokens(tokens)


def _check_kinds(store: object, **functions: object) -> None:
    if store is True or isinstance(store, (str, os.PathLike)):
        raise BadInputError(
            f"store is {store!r}; it must be an open store, False or None: a path belongs in $ZFTUNE_DB"
        )
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise BadInputError(f"{name} is {function!r}; it must be a function")


def _check_optimizer(optimizer: Optimizer) -> ZenFlowOptimizer:
    if not isinstance(optimizer, ZenFlowOptimizer):
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        raise BadInputError(f"optimizer is a {name}; it must be one of zenflow, such as zenflow.ZenFlowAdamW")
    if not optimizer.trains:
        raise BadInputError("optimizer was closed, or made in another process: it takes no more steps; give a new one")
    if any(tuner.follows(optimizer) for tuner in open_tuners()):
        raise BadInputError("optimizer is followed by a tuner already: close() that one first")
    if isinstance(optimizer.device, HostWeights):
        raise BadInputError(
            "the optimizer's weights are on the host (CPUOffloadPolicy); they must be on a device: it has no "
            "columns to select, and the search's measurements are of a device's waits"
        )
    return optimizer


def _driver(
    optimizer: ZenFlowOptimizer,
    wishes: TuneRequest,
    tokens: int,
    store: Store | Literal[False] | None,
    company: WorldInfo,
    name: str | None,
    *,
    daemon: bool,
) -> SearchDriver:
    if daemon:
        from zftune.daemon.client.driver import DaemonDriver  # with pydantic, which nobody else needs

        # `zftune run` has a daemon started again that ended before the training came.
        patience_s = START_S if os.environ.get(RUN) else 0.0
        return DaemonDriver(optimizer, wishes, tokens, company=company, patience_s=patience_s)
    return LocalDriver(optimizer, wishes, store, company, name)


def _searches() -> str:
    for sentence in unread_variables(os.environ, "ZFTUNE_", READ):
        _logger.warning("%s.", sentence)
    value = os.environ.get(ONLINE, "")
    if value not in _SEARCHES:
        raise BadInputError(f"{ONLINE} is {value!r}; it must be daemon or process")
    return value


def check_counts(**counts: Any) -> None:
    """Raises `BadInputError` where one of them is given and is no count, with its name."""
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise BadInputError(f"{name} is {value!r}; it must be an integer >= 1")


def default_quality(config: ZenFlowConfig) -> Quality:
    """A user of a plain offloaded optimizer has not asked for staleness."""
    return "exact" if is_exact(config) else "published"
