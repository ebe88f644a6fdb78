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
from zftune.tuner.forecast import Observation
from zftune.tuner.sampler_process import SamplerError, SamplerProcess, gentle_share
from zftune.tuner.space import Forecast, Setting, space_for
from zftune.tuner.trials import TrialTable

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
    sampler_process = SamplerProcess(share=gentle_share())
    sampler_process.ready()
    (process,) = psutil.Process().children()
    thread = threading.Thread(target=_ask, args=(sampler_process, Setting.of(config)), daemon=True)
    thread.start()
    try:
        yield process
    finally:
        sampler_process.close()
        thread.join()


def _ask(sampler_process: SamplerProcess, start: Setting) -> None:
    draw = random.Random(0)
    space = space_for(start, "published", coverage=_coverage)
    book = TrialTable(space, _forecast, start)
    settings = draw.sample(list(space.settings()), _KNOWN)
    told = [Observation(setting, draw.gauss(0.0, 0.1), 0.0) for setting in settings]
    with contextlib.suppress(SamplerError):  # it was closed: that is the end
        while True:
            sampler_process.propose(space, told, book.judge, sampler="gp", seed=draw.randrange(1 << 30))


def _coverage(topk_ratio: float) -> float:
    return float(topk_ratio**0.03) if topk_ratio else 0.0


def _forecast(_: Setting) -> Forecast:
    return Forecast(1.0)
