"""`zftune.attach` on several ranks, which all call it."""

from __future__ import annotations

from collections.abc import Callable

from zenflow.optimizer import ZenFlowOptimizer
from zftune.errors import BadInputError
from zftune.tuner.changing import Change
from zftune.tuner.facts import Company
from zftune.tuner.following import Tuner
from zftune.tuner.ranks.accord import Accord
from zftune.tuner.ranks.exchange import GlooExchange
from zftune.tuner.ranks.follower import Follower

Begin = Callable[[Company, Accord], Tuner]
"""Makes the tuner of the rank that decides."""


def attach_ranks(optimizer: ZenFlowOptimizer, begin: Begin, on_change: Change | None) -> Tuner:
    """Follow an optimizer on every rank, or on none.

    Args:
        optimizer: that trains.
        begin: is called on rank 0; what it raises is raised there.
        on_change: told of every change on this rank.

    Raises:
        BadInputError: not all ranks are there, or the first one could not begin.
    """
    exchange = GlooExchange()
    accord = Accord(optimizer, exchange, on_change)
    if accord.is_first:
        return _lead(exchange, accord, begin)
    if not exchange.agree(well=True):
        raise BadInputError("nothing is tuned: rank 0 cannot, and says why")
    return Follower(optimizer, accord)


def _lead(exchange: GlooExchange, accord: Accord, begin: Begin) -> Tuner:
    try:
        tuner = begin(exchange.company, accord)
    except BaseException:
        exchange.agree(well=False)
        raise
    if exchange.agree(well=True):
        return tuner
    accord.over = True
    tuner.close()
    raise BadInputError("nothing is tuned: another rank is gone")
