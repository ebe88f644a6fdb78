"""What a search knows: its trials, which of them is the incumbent, how candidates are judged, and which are left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from zftune.store.types import Decision, TrialState
from zftune.tuner import messages
from zftune.tuner.forecast import MOST_REJECTIONS, Evaluation, Observation, Proposal, propose
from zftune.tuner.scores import ERRORS, LEAST_GAIN, Gain, Sample, score
from zftune.tuner.space import Forecast, Forecaster, Setting, Space
from zftune.tuner.states import (
    COMPARED_AGAIN,
    REFERENCES,
    Adoption,
    BarredSetting,
    Gains,
    Outcome,
    Sampler,
    Trial,
    gain_of,
)

SLOWEST = 1.3
"""A candidate is rejected where the planner predicts more than this factor of the incumbent's time."""
_CRASHED = 2.0  # times the incumbent's: what Optuna is told of a setting that crashed
_ABORTED = 1.5
_NEWEST = 3  # measurements of a setting that count: older ones may no longer be true
_SAME_STALENESS = 0.05  # steps
_SAME_BYTES = 0.01
_WELL_KNOWN = 0.03  # of the step time: so much of a gain may be noise before it is measured once more, or
_WELL_KNOWN_SHARE = 0.25  # of the gain, where that is more


class TrialTable:
    """Trials by number, the first of them the starting point; `barred` settings are never tried."""

    def __init__(
        self, space: Space, forecast: Forecaster, start: Setting, barred: Sequence[BarredSetting] = ()
    ) -> None:
        self.space = space
        self.trials = [Trial(0, start, "start")]
        self.adoptions: list[Adoption] = []
        self._forecast = forecast
        self._forecasts: dict[Setting, Forecast] = {}
        self._barred = {one.setting: one.kind for one in barred}
        self._newest: dict[Setting, Trial] = {start: self.trials[0]}
        self._incumbent = 0
        self._gains: Gains[Setting] = Gains(start)
        self.tokens = 1
        """Of a step."""
        self.device_limit_bytes: int | None = None
        """Most GPU memory at the peak; None: there is no such limit."""

    # --- the incumbent -----------------------------------------------------------------------------------------------

    @property
    def incumbent(self) -> Trial:
        """The setting to beat."""
        return self.trials[self._incumbent]

    @property
    def adopted(self) -> Trial:
        """The last that was adopted, where one was: it is the incumbent, unless `move_to` has made another one so."""
        return self.trials[self.adoptions[-1].trial]

    @property
    def incumbent_step_ms(self) -> float:
        """Its step time; 0 before it was measured."""
        samples = self.incumbent.samples
        return score(samples) * self.tokens / 1e3 if samples else 0.0

    @property
    def gain(self) -> Gain | None:
        """Of the incumbent over the starting point, or over what had to take its place; None: it is one of these."""
        return self._gains.gain

    @property
    def gain_age(self) -> int:
        """How often the search began again, such as for other step times, since that was measured."""
        return self._gains.age

    @property
    def reference(self) -> Setting:
        """What the incumbent gains over: the starting point, or what had to take its place."""
        return self._gains.reference

    @property
    def gain_share(self) -> float:
        """The same as a share of that one's step time; 0 where there was none."""
        return 0.0 if self.gain is None else self.gain.share

    def adopt(self, trial: Trial, found: Gain, samples: Sequence[Sample]) -> None:
        """Make a trial the incumbent.

        `samples` come from the comparison; the look that singled it out was too good, on average, and is left out.
        """
        trial.samples = list(samples)
        self.adoptions.append(Adoption(trial.number, found, self._incumbent))
        self._gains.adopt(trial.setting, found)
        self._incumbent = trial.number

    def compared_again(self, trial: Trial, found: Gain) -> bool:
        """Update the incumbent's gain over its reference from a comparison with `trial`, which gained `found`.

        Returns:
            Whether it was so: the trial has the reference's setting.
        """
        is_reference = self.gain is not None and trial.setting == self.reference
        if is_reference:
            self._gains.compare_again(found)
        return is_reference

    def reference_again(self, missing_s: Callable[[Trial], float]) -> Trial | None:
        """A trial of the reference, to be compared with the incumbent whose gain is not well known.

        What is adopted was picked for its comparison, so that this is too good on average, the more the noisier times
        are. A gain that was found in several parts of a search has all their errors, and what the machine did between.
        `missing_s` is what a trial would cost beyond its limit.

        Returns:
            The trial, if it may run without waiting; None also where the incumbent was compared with it before.
        """
        setting = self.reference
        known, found = self.find(setting), self.gain
        if found is None:
            return None
        if known is not None and known.number > self._incumbent:
            waits = known.source in REFERENCES and known.state is TrialState.PLANNED  # a void one, which was too dear
            return known if waits and missing_s(known) <= 0 else None
        poorly_known = self.gain_age > 0 or ERRORS * found.error > max(_WELL_KNOWN, _WELL_KNOWN_SHARE * found.share)
        if not poorly_known or self.judge(setting).rejected:
            return None
        source = "start" if setting == self.trials[0].setting else "reference"
        trial = Trial(len(self.trials), setting, source, forecast=self.forecast(setting))
        return None if missing_s(trial) > 0 else self.append(trial)

    def roomier(self, peak_bytes: int | None) -> Setting | None:
        """The setting to run if the incumbent, with a peak of `peak_bytes`, leaves too little free; None: keep it.

        The incumbent with the least offload ratio that is enough; where none is, the fastest by prediction of all that
        are allowed with everything offloaded, such as with fewer columns selected.
        """
        limit, tight = self.device_limit_bytes, self.incumbent.setting
        if limit is None or peak_bytes is None or peak_bytes <= limit:
            return None
        room = limit - peak_bytes + self.forecast(tight).device_bytes
        higher = sorted({1.0, *self.space.offload_ratios})
        raised = [replace(tight, offload_ratio=ratio) for ratio in higher if ratio > tight.offload_ratio]
        for one in raised:
            if self.forecast(one).device_bytes <= room:
                return one
        whole = [one for one in self.space.settings() if one.offload_ratio == higher[-1] and one not in self._barred]
        fitting = [one for one in whole if self.forecast(one).device_bytes <= room]
        found = min(fitting, key=lambda one: self.forecast(one).step_ms, default=raised[-1] if raised else tight)
        return None if found == tight else found

    def trial_of(self, setting: Setting) -> Trial:
        """The trial of a setting that has to run; a new one where there is none that may."""
        trial = self.find(setting)
        if trial is None or trial.state in (TrialState.REJECTED, TrialState.VOID):
            trial = self.append(Trial(len(self.trials), setting, "planner", forecast=self.forecast(setting)))
        return trial

    def move_to(self, setting: Setting) -> Trial:
        """Make a setting the incumbent that nobody has compared with it."""
        trial = self.trial_of(setting)
        self.go_back_to(trial)
        return trial

    def go_back_to(self, trial: Trial) -> None:
        """The same with a trial; the one before is void where nobody came to measure it."""
        left = self.incumbent
        if left.number and left is not trial and left.state is TrialState.PLANNED:
            left.state = TrialState.VOID
        self._incumbent = trial.number
        self._gains.move_to(trial.setting)

    def restore_start(self) -> None:
        """Make the starting point the incumbent again."""
        self.adoptions.clear()
        self._incumbent = 0
        self._gains.move_to(self.incumbent.setting)

    def restore(self, decisions: Iterable[Decision]) -> None:
        """Restore incumbents and their gains from a run's decisions, in order."""
        self.restore_start()
        self._gains = Gains(self.incumbent.setting)
        for one in decisions:
            if one.kind == "reopen":
                self._gains.begin_again()
            elif COMPARED_AGAIN in one.details:
                self._gains.compare_again(gain_of(one))
            elif one.trial is not None and one.kind == "adopt":
                self.adoptions.append(Adoption(one.trial, gain_of(one), self._incumbent))
                self._gains.adopt(self.trials[one.trial].setting, gain_of(one))
                self._incumbent = one.trial
            elif one.trial is not None and one.kind in ("memory", "movement"):
                self._gains.move_to(self.trials[one.trial].setting)
                self._incumbent = one.trial

    def roll_back(self) -> Trial:
        """Make the setting before the last adoption the incumbent again.

        Returns:
            The trial that was adopted, never to be tried again.
        """
        last = self.adoptions.pop()
        barred, self._incumbent = self.trials[last.trial], last.replaced
        self._gains.move_to(self.incumbent.setting)
        self._barred[barred.setting] = "rollback"
        return barred

    def forget(self) -> None:
        """Forget all measured times, and what was rejected by them: they are no longer true."""
        self._gains.begin_again()
        for trial in self.trials:
            trial.samples.clear()
            if trial.state is not TrialState.CRASHED and trial is not self.incumbent:
                self._newest.pop(trial.setting, None)

    def predict_with(self, forecast: Forecaster) -> None:
        """Use another prediction from now on: the machine has changed."""
        self._forecast = forecast
        self._forecasts.clear()

    # --- trials ------------------------------------------------------------------------------------------------------

    @property
    def tried(self) -> int:
        """How many settings the search has proposed that were neither rejected nor given up."""
        out = (TrialState.REJECTED, TrialState.VOID)
        return sum(trial.source == "search" and trial.state not in out for trial in self.trials)

    def find(self, setting: Setting) -> Trial | None:
        """The trial of a setting."""
        return self._newest.get(setting)

    def waiting(self) -> Trial | None:
        """A trial of the search that was planned and not measured yet."""
        last = next((trial for trial in reversed(self.trials) if trial.state is TrialState.PLANNED), None)
        return last if last is not None and last.source in ("search", "planner") else None

    def add(self, judged: Evaluation, source: str) -> Trial:
        """A new trial, planned or rejected."""
        setting = judged.told.setting
        if judged.forecast is not None:
            self._forecasts[setting] = judged.forecast  # it may have been made elsewhere
        trial = Trial(len(self.trials), setting, source, forecast=self.forecast(setting))
        trial.constraint = judged.told.constraint
        if judged.rejected:
            trial.state, trial.reason = TrialState.REJECTED, judged.reason
        return self.append(trial)

    def append(self, trial: Trial) -> Trial:
        """Take a trial in as it is."""
        self.trials.append(trial)
        self._newest[trial.setting] = trial
        return trial

    def replace(self, trial: Trial) -> None:
        """Take in another trial in the place of the one with its number."""
        self._newest.pop(self.trials[trial.number].setting, None)
        self.trials[trial.number] = trial
        self._newest[trial.setting] = trial

    def drop(self, trial: Trial) -> None:
        """Let go of a trial that its run did not come to: the setting may be proposed again."""
        trial.state = TrialState.VOID
        self._newest.pop(trial.setting, None)

    def keep(self, trial: Trial, outcome: Outcome) -> Sample:
        """Keep a valid measurement."""
        self.tokens = outcome.tokens
        sample = Sample.of(outcome.steps_ms, trial.setting.update_interval, outcome.tokens)
        trial.samples = [*trial.samples[1 - _NEWEST :], sample]
        trial.state = TrialState.MEASURED
        trial.device_bytes = outcome.device_bytes if outcome.device_bytes is not None else trial.device_bytes
        trial.pace = outcome.pace or trial.pace
        trial.host_bytes = outcome.host_bytes if outcome.host_bytes is not None else trial.host_bytes
        return sample

    def abort(self, trial: Trial, outcome: Outcome) -> None:
        """Keep what was measured of a trial before it was aborted."""
        sample = Sample.of(outcome.steps_ms, trial.setting.update_interval, outcome.tokens)
        trial.samples = [sample] if sample.token_us else []
        trial.state, trial.reason = TrialState.ABORTED, outcome.reason

    def crash(self, trial: Trial, reason: str) -> None:
        """Never try a setting again."""
        self._barred[trial.setting] = "crash"
        trial.samples.clear()
        trial.state, trial.reason = TrialState.CRASHED, reason

    # --- judging -----------------------------------------------------------------------------------------------------

    def forecast(self, setting: Setting) -> Forecast:
        """The planner's prediction."""
        if setting not in self._forecasts:
            self._forecasts[setting] = self._forecast(setting)
        return self._forecasts[setting]

    def relative(self, setting: Setting) -> float:
        """Its time by prediction over the incumbent's: what both share that the planner does not know cancels."""
        return self.forecast(setting).step_ms / self.forecast(self.incumbent.setting).step_ms

    def judge(self, setting: Setting) -> Evaluation:
        """Whether a setting may run, was tried, and how long it may take."""
        known = self.find(setting)
        reasons = [(1.0, messages.BARRED[self._barred[setting]])] if setting in self._barred else []
        violation = self.space.violation(setting)
        if violation is not None:
            reasons.append((violation.excess, violation.reason))
        forecast, relative = self.forecast(setting), self.relative(setting)
        if forecast.excess > 0:
            reasons.append((forecast.excess, forecast.reason))
        excess = self._excess(forecast)
        if excess > 0:
            reasons.append((excess, "it would leave less GPU memory free than must stay free, by the measured peak"))
        if relative > SLOWEST:
            reasons.append(
                (relative / SLOWEST - 1, f"the planner predicts {relative:.2f} times the step time of the best so far")
            )
        constraint, reason = max(reasons, default=(self._margin(setting), ""))
        told = self._told(known) if known is not None else None
        if told is None:
            told = Observation(setting, self._value(relative), constraint)
        return Evaluation(told, known is not None, reason, forecast)

    def _excess(self, forecast: Forecast) -> float:
        """By which share of the limit the incumbent's measured peak and what is predicted beyond it are too much."""
        measured = self.incumbent.device_bytes
        if self.device_limit_bytes is None or measured is None:
            return 0.0
        more = forecast.device_bytes - self.forecast(self.incumbent.setting).device_bytes
        return (measured + more) / self.device_limit_bytes - 1

    def told(self) -> list[Observation]:
        """All that is known, for Optuna."""
        found = [self._told(trial) for trial in self.trials if self._newest.get(trial.setting) is trial]
        return [told for told in found if told is not None]

    def _told(self, trial: Trial) -> Observation | None:
        constraint = trial.constraint or self._margin(trial.setting)
        if trial.state is TrialState.CRASHED:
            return Observation(trial.setting, self._value(_CRASHED), max(constraint, 1.0))
        if trial.state is TrialState.REJECTED:
            return Observation(trial.setting, self._value(self.relative(trial.setting)), constraint)
        if trial.samples:
            return Observation(trial.setting, math.log(score(trial.samples)), constraint)
        if trial.state is TrialState.ABORTED:
            return Observation(trial.setting, self._value(_ABORTED), constraint)
        return None

    def _value(self, relative: float) -> float:
        return math.log(relative * (score(self.incumbent.samples) if self.incumbent.samples else 1.0))

    def _margin(self, setting: Setting) -> float:
        """How far within its budget a setting is, as a share below 0."""
        budget = self.space.budget
        return min(0.0, self.space.cost(setting) / budget - 1.0) if budget else 0.0

    # --- ties --------------------------------------------------------------------------------------------------------

    def tie(self, tried: set[int]) -> Trial | None:
        """A setting about as fast as the incumbent that is less stale, else takes less GPU, else less host memory."""
        limit = score(self.incumbent.samples) * (1 + LEAST_GAIN)
        near = [
            trial
            for trial in self.trials
            if trial.state is TrialState.MEASURED
            and trial.samples
            and trial.number not in tried
            and score(trial.samples) <= limit
            and (trial.number == 0 or self.space.violation(trial.setting) is None)
            and self._better(trial, self.incumbent)
        ]
        return min(near, key=lambda trial: (trial.setting.mean_staleness_steps, *self._bytes(trial)), default=None)

    def _better(self, one: Trial, other: Trial) -> bool:
        difference = one.setting.mean_staleness_steps - other.setting.mean_staleness_steps
        if abs(difference) > _SAME_STALENESS:
            return difference < 0
        for mine, others in zip(self._bytes(one), self._bytes(other), strict=True):
            if abs(mine - others) > _SAME_BYTES * max(mine, others):
                return mine < others
        return False

    def _bytes(self, trial: Trial) -> tuple[int, int]:
        """GPU and host memory: by prediction for all alike, since a peak may be another setting's."""
        forecast = self.forecast(trial.setting)
        return forecast.device_bytes, forecast.host_bytes


class CandidateQueue:
    """Settings still to be tried; `planned` are the planner's choices, best first."""

    def __init__(self, book: TrialTable, planned: Sequence[Setting], sampler: Sampler, seed: int) -> None:
        self.propose: Callable[..., Proposal] = propose
        """Who answers what to look at next, where nothing is planned."""
        self._book, self._sampler, self._seed = book, sampler, seed
        start = book.trials[0].setting
        self._planned = [(setting, "planner") for setting in planned if setting != start]
        self._again: set[Setting] = set()
        self._plan: Callable[[], Sequence[Setting]] | None = None

    def suggest(self, setting: Setting, source: str) -> None:
        """Try a setting before the planned ones; the planner judges it before it runs."""
        if setting != self._book.incumbent.setting:
            self._planned.insert(0, (setting, source))

    def try_again(self, setting: Setting) -> None:
        """Look first at what was the best in another training of the run, whatever the planner comes to think."""
        self._again.add(setting)
        self.suggest(setting, "planner")

    def taken(self, setting: Setting) -> None:
        """It was looked at, by the store's rows: it is not planned any more."""
        self._planned = [one for one in self._planned if one[0] != setting]

    def plan_again(self, plan: Callable[[], Sequence[Setting]]) -> None:
        """Replace the plan, which is out of date, once the next setting is wanted; `plan` may take seconds."""
        self._planned = [one for one in self._planned if one[1] != "planner" or one[0] in self._again]
        self._plan = plan

    def repeat(self, trial: Trial) -> None:
        """Propose the setting of a trial again that its run did not come to."""
        self._book.drop(trial)
        if (trial.setting, trial.source) not in self._planned:
            self._planned.insert(0, (trial.setting, trial.source))

    def _take_plan(self) -> None:
        """The first of the planner's new choices that may run; the incumbent is one that does."""
        plan, self._plan = self._plan, None
        for setting in () if plan is None else plan():
            if setting == self._book.incumbent.setting:
                return
            if not self._book.judge(setting).rejected:
                self._planned.append((setting, "planner"))
                return

    def planned(self) -> Trial | None:
        """The next one that somebody thought of; None: the search is asked."""
        self._take_plan()
        while self._planned:
            setting, source = self._planned[0]
            known = self._book.find(setting)
            if known is not None and known.state is TrialState.PLANNED and not self._book.judge(setting).rejected:
                return known  # it was too dear before
            self._planned.pop(0)
            if known is not None:
                continue
            judged = self._book.judge(setting)
            trial = self._book.add(judged, source)
            if not judged.rejected:
                return trial
        return None

    def searched(self) -> Trial | None:
        """The next one of the search; None: everything that is allowed was tried."""
        waiting = self._book.waiting()
        if waiting is not None and not self._book.judge(waiting.setting).rejected:
            return waiting
        book = self._book
        seed = int(np.random.SeedSequence([self._seed, book.tried]).generate_state(1)[0])
        proposal = self.propose(book.space, book.told(), book.judge, sampler=self._sampler, seed=seed)
        for judged in proposal.rejected[:MOST_REJECTIONS]:
            book.add(judged, "search")
        return None if proposal.chosen is None else book.add(proposal.chosen, proposal.source)
