"""Steps beside a process that thinks all the time, and beside one that is stopped: by turns, in random order."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from zenflow import ZenFlowConfig
from zftune.tuner.book import Book
from zftune.tuner.propose import Told
from zftune.tuner.settings import Setting
from zftune.tuner.space import Forecast, space_for
from zftune.tuner.thinker import Thinker, ThinkerError, gentle_share

_KNOWN = 20  # settings whose time is known, as late in a search


def ratios(train: Callable[[int], float], config: ZenFlowConfig, pairs: int, steps: int) -> list[float]:
    """Of each pair: time of the steps beside thinking over that of the others.

    Args:
        train: takes so many steps, and tells their time, ms.
        config: that it trains with.
        pairs: how many.
        steps: of each kind in a pair.
    """
    found = []
    with _thinking(config) as process:
        for _ in range(pairs):
            times = {}
            for thinks in random.sample((True, False), 2):
                process.send_signal(signal.SIGCONT if thinks else signal.SIGSTOP)
                times[thinks] = train(steps)
            found.append(times[True] / times[False])
        process.send_signal(signal.SIGCONT)
    return found


@contextmanager
def _thinking(config: ZenFlowConfig) -> Iterator[psutil.Process]:
    """A process that is asked one question after the other, as `zftune.attach` would ask them."""
    thinker = Thinker(share=gentle_share())
    thinker.ready()
    (process,) = psutil.Process().children()
    thread = threading.Thread(target=_ask, args=(thinker, Setting.of(config)), daemon=True)
    thread.start()
    try:
        yield process
    finally:
        thinker.close()
        thread.join()


def _ask(thinker: Thinker, start: Setting) -> None:
    draw = random.Random(0)
    space = space_for(start, "published", coverage=_coverage)
    book = Book(space, _forecast, start)
    settings = draw.sample(list(space.settings()), _KNOWN)
    told = [Told(setting, draw.gauss(0.0, 0.1), 0.0) for setting in settings]
    with contextlib.suppress(ThinkerError):  # it was closed: that is the end
        while True:
            thinker.propose(space, told, book.judge, sampler="gp", seed=draw.randrange(1 << 30))


def _coverage(topk_ratio: float) -> float:
    return float(topk_ratio**0.03) if topk_ratio else 0.0


def _forecast(_: Setting) -> Forecast:
    return Forecast(1.0)
