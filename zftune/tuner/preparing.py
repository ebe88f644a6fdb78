"""From an optimizer that trains to a search over its knobs: the model, the machine, the space, and earlier runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zenflow.optimizer import ZenFlowOptimizer
from zftune.planner import Job, assumed_coverage
from zftune.tuner.beginning import Again, Wanted, begin
from zftune.tuner.drift import Pace, changed
from zftune.tuner.facts import ALONE, Company, Reader, Seen, TrainingFacts, Wishes
from zftune.tuner.forecast import PlannerForecast, forecast_for
from zftune.tuner.ratios import ratios_of
from zftune.tuner.recording import Recording
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.settings import Setting
from zftune.tuner.space import Forecast, Forecaster, Space, space_for
from zftune.tuner.thinker import Thinker, ThinkerError

if TYPE_CHECKING:
    from zftune.store.store import Store
    from zftune.tuner.recorder import StoreRecorder

__all__ = ["NoForecast", "Preparation", "Prepared", "Seen", "Wishes", "prepare", "ratio_choices", "thread_choices"]

_LOWER_RATIOS = (0.4, 0.6, 0.8, 0.9)
_FEW_CORES = 4  # fewer usable cores leave no choice of threads


@dataclass(frozen=True, slots=True)
class NoForecast:
    """Stands for the planner where nothing can be predicted: every setting takes as long as the first, until measured.

    Args:
        step_ms: of the first.
        start: the first.
        has_memory: whether there is device memory that others may need more of.
    """

    step_ms: float
    start: Setting
    has_memory: bool

    def __call__(self, setting: Setting) -> Forecast:
        """The prediction for a setting."""
        more = setting.topk_ratio > self.start.topk_ratio or setting.offload_ratio < self.start.offload_ratio
        if self.has_memory and more:
            return Forecast(self.step_ms, excess=1.0, reason="it needs more GPU memory, and nobody knows how much")
        return Forecast(self.step_ms)


@dataclass(slots=True)
class Prepared:
    """A search that can begin."""

    search: Search
    recording: Recording | None
    recorder: StoreRecorder | None
    sentence: str
    """Where it begins from; "": the knobs that there are."""


class Preparation:
    """Makes a search in the process that trains; made before training begins (see `zftune.tuner.facts.Reader`).

    Args:
        optimizer: that trains.
        wishes: of the user.
        store: open; None: nothing is remembered.
        thinker: where the planner works.
        company: ranks that it trains with.
    """

    def __init__(
        self,
        optimizer: ZenFlowOptimizer,
        wishes: Wishes,
        store: Store | None,
        thinker: Thinker,
        company: Company = ALONE,
    ) -> None:
        self.reader = Reader(optimizer, wishes, remembered=store is not None, company=company)
        self._store, self._thinker = store, thinker

    @property
    def notices(self) -> list[str]:
        """Sentences: what could not be had."""
        return self.reader.notices

    def prepare(self, seen: Seen) -> Prepared:
        """Make the search; may be called from any thread.

        Args:
            seen: in the warm-up.
        """
        return prepare(self.reader.facts(seen), self._store, self._thinker, self.notices)


def prepare(
    facts: TrainingFacts, store: Store | None, thinker: Thinker, notices: list[str], again: Again | None = None
) -> Prepared:
    """Make the search of a training, here or where its facts were sent.

    Args:
        facts: of the training.
        store: open; None: nothing is remembered.
        thinker: where the planner works.
        notices: takes sentences: what could not be had.
        again: the run of a training that lives.
    """
    wishes, base = facts.wishes, Setting.of(facts.config)
    space = space_for(
        base, wishes.quality, coverage=facts.coverage or assumed_coverage, has_loss=facts.has_loss,
        threads=thread_choices(_usable_cores() if facts.here is None else facts.here.usable_cores),
        offload_ratios=ratio_choices(base, tune_memory=wishes.tune_memory),
        zenflow_section=not base.synchronous,  # else nothing could come late in "published"
    )  # fmt: skip
    forecast = _forecast(facts, base, notices)
    rates = forecast.rates if isinstance(forecast, PlannerForecast) else None

    def make(start: Setting, options: SearchOptions) -> Search:
        least = 0.0 if wishes.tune_memory else start.offload_ratio
        planning = None
        if isinstance(forecast, PlannerForecast):
            planning = _Planning(forecast, space, least, thinker, notices)
        planned = () if planning is None else planning.planned()[:1]
        search = Search(space, start, forecast, planned, options, planning)
        search.book.device_limit_bytes = facts.device_limit_bytes
        return search

    recording = None
    if store is not None and facts.run is not None:
        recording = Recording(store, facts.run, wishes.quality, facts.here)
    wanted = Wanted(
        own=base, space=space, options=wishes.search, fresh=wishes.fresh,
        least_ratio=0.0 if wishes.tune_memory else base.offload_ratio,
        ratios=None if rates is None else ratios_of(facts.load, rates), again=again,
    )  # fmt: skip
    begun = begin(recording, wanted, make)
    return Prepared(begun.search, recording, begun.recorder, _in_python(begun.sentence))


@dataclass(slots=True)
class _Planning:
    """The planner, asked in a process of its own.

    Args:
        forecast: of the machine as it was at the beginning.
        space: of the search.
        least_ratio: offload ratio at least.
        thinker: the process.
        notices: takes sentences.
    """

    forecast: PlannerForecast
    space: Space
    least_ratio: float
    thinker: Thinker
    notices: list[str]

    def learn(self, before: Pace | None, now: Pace) -> None:
        """Take in by how much the machine's rates have changed."""
        self.forecast = replace(self.forecast, rates=changed(self.forecast.rates, before, now))

    def planned(self) -> Sequence[Setting]:
        """The planner's own choices, best first."""
        try:
            found: list[Setting] = self.thinker.ask(self.forecast.planned, self.space, least_ratio=self.least_ratio)
        except ThinkerError as error:
            self.notices.append(f"The planner was not asked for its own choice: {error}.")
            return ()
        return found


def _forecast(facts: TrainingFacts, start: Setting, notices: list[str]) -> Forecaster:
    model, machine, wishes = facts.model, facts.machine, facts.wishes
    if machine is None:
        notices.append("Nothing is predicted here: settings are only measured.")
        return NoForecast(facts.step_ms or 1.0, start, facts.has_memory)
    measured_ms = facts.compute_ms if facts.rig is None else 0.0
    job = Job(seq=wishes.sequence, micro_batch=wishes.micro_batch, compute_ms=measured_ms or None)
    return forecast_for(model, machine, job, facts.config, company=facts.company, rig=facts.rig)


def _usable_cores() -> float | None:
    """Of this process."""
    from zftune.telemetry import hardware

    cores: float | None = hardware()["usable_cores"]
    return cores


def thread_choices(usable_cores: float | None) -> tuple[int, ...]:
    """Choices for the host engine's threads; none: they stay.

    Args:
        usable_cores: of the process that trains; None: not known.
    """
    cores = int(usable_cores or 1)
    return tuple(sorted({cores // 4, cores // 2, 3 * cores // 4})) if cores >= _FEW_CORES else ()


def ratio_choices(base: Setting, *, tune_memory: bool) -> list[float]:
    """Choices for `offload_ratio`: a lower one takes more GPU memory.

    Args:
        base: what the user has.
        tune_memory: whether the user allows to lower it.
    """
    lower = _LOWER_RATIOS if tune_memory else ()
    return sorted({*(ratio for ratio in (*lower, 1.0) if ratio > base.offload_ratio or lower), base.offload_ratio})


def _in_python(sentence: str) -> str:
    """With the command line's options as `attach` has them."""
    return sentence.replace("--fresh", "fresh=True").replace("--tune-memory", "tune_memory=True")
