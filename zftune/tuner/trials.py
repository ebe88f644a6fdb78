"""A search's trials, which of them is the incumbent, and which settings may run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from zftune.store.types import TrialState
from zftune.tuner import messages
from zftune.tuner.evidence import Gain
from zftune.tuner.space import Forecast, Forecaster, Setting, Space
from zftune.tuner.states import Adoption, BarredSetting, Trial


class TrialTable:
    """Trials by number, the first of them the starting point; `barred` settings are never tried."""

    def __init__(
        self, space: Space, forecast: Forecaster, start: Setting, barred: Sequence[BarredSetting] = ()
    ) -> None:
        self.space = space
        self.trials = [Trial(0, start, "start")]
        self.adoptions: list[Adoption] = []
        """All of them, but for those that were rolled back."""
        self.chain: list[Adoption] = []
        """Those since `reference`, which made the incumbent what it is."""
        self.tokens = 1
        """Of a step."""
        self.log_us: float | None = None
        """Of the incumbent's newest block, a logarithm of microseconds per token; None: not measured."""
        self.gain: Gain | None = None
        """Of the incumbent over the reference; None: it is that. Kept by the search."""
        self.device_limit_bytes: int | None = None
        """Most GPU memory at the peak; None: there is no such limit."""
        self.barred = {one.setting: one.kind for one in barred}
        self.incumbent_number = self.reference_number = 0
        self._forecast = forecast
        self._forecasts: dict[Setting, Forecast] = {}

    # --- the incumbent -----------------------------------------------------------------------------------------------

    @property
    def incumbent(self) -> Trial:
        """The setting to beat."""
        return self.trials[self.incumbent_number]

    @property
    def reference(self) -> Setting:
        """What the incumbent gains over: the starting point, or what had to take its place."""
        return self.trials[self.reference_number].setting

    @property
    def adopted(self) -> Trial:
        """The last that was adopted for its speed, where one was."""
        return self.trials[self.adoptions[-1].trial]

    @property
    def incumbent_step_ms(self) -> float:
        """Step time of its newest block; 0 before it was measured."""
        return 0.0 if self.log_us is None else math.exp(self.log_us) * self.tokens / 1e3

    def step_ms(self, trial: Trial) -> float | None:
        """Mean step time of a trial's blocks; None: it has none."""
        return math.exp(trial.log_us) * self.tokens / 1e3 if trial.blocks else None

    def adopt(self, trial: Trial, adoption: Adoption) -> None:
        """Make a trial the incumbent, for its speed."""
        self.adoptions.append(adoption)
        self.chain.append(adoption)
        self.incumbent_number = trial.number
        if trial.setting == self.reference:
            self.reference_number = trial.number
            self.chain.clear()
        self.log_us = trial.log_us

    def move_to(self, trial: Trial) -> None:
        """Make a trial the incumbent that was not compared with the one before: gains are over it from here on."""
        self.incumbent_number = self.reference_number = trial.number
        self.chain.clear()
        self.log_us = None

    def restore_start(self) -> None:
        """Make the starting point the incumbent again."""
        self.adoptions.clear()
        self.move_to(self.trials[0])

    def roll_back(self) -> Trial:
        """Make the setting before the last adoption the incumbent again; the one that was adopted is barred."""
        last = self.adoptions.pop()
        barred = self.trials[last.trial]
        if self.chain and self.chain[-1] == last:
            self.chain.pop()
            self.incumbent_number, self.log_us = last.replaced, None
        else:
            self.move_to(self.trials[last.replaced])
        self.barred[barred.setting] = "rollback"
        return barred

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
        whole = [one for one in self.space.settings() if one.offload_ratio == higher[-1] and one not in self.barred]
        fitting = [one for one in whole if self.forecast(one).device_bytes <= room]
        found = min(fitting, key=lambda one: self.forecast(one).step_ms, default=raised[-1] if raised else tight)
        return None if found == tight else found

    # --- trials ------------------------------------------------------------------------------------------------------

    def add(self, setting: Setting, source: str, params: dict[str, int] | None = None) -> Trial:
        """A new visit of a setting; `params` as the study has it."""
        trial = Trial(len(self.trials), setting, source, forecast=self.forecast(setting))
        trial.constraint, trial.incumbent = self._margin(setting), self.incumbent_number
        trial.params = params or {}
        self.trials.append(trial)
        return trial

    def crash(self, trial: Trial, reason: str) -> None:
        """Never try a setting again."""
        self.barred[trial.setting] = "crash"
        trial.state, trial.reason = TrialState.CRASHED, reason

    def predict_with(self, forecast: Forecaster) -> None:
        """Use another prediction from now on: the machine has changed."""
        self._forecast = forecast
        self._forecasts.clear()

    def forecast(self, setting: Setting) -> Forecast:
        """The planner's prediction."""
        if setting not in self._forecasts:
            self._forecasts[setting] = self._forecast(setting)
        return self._forecasts[setting]

    def judge(self, setting: Setting) -> tuple[float, str]:
        """By which share of a limit a setting must not run, and why; at most 0 and "" where it may."""
        reasons = [(1.0, messages.BARRED[self.barred[setting]])] if setting in self.barred else []
        violation = self.space.violation(setting)
        if violation is not None:
            reasons.append((violation.excess, violation.reason))
        forecast = self.forecast(setting)
        if forecast.excess > 0:
            reasons.append((forecast.excess, forecast.reason))
        excess = self._excess(forecast)
        if excess > 0:
            reasons.append((excess, "it would leave less GPU memory free than must stay free, by the measured peak"))
        return max(reasons, default=(self._margin(setting), ""))

    def may_run(self, setting: Setting) -> bool:
        """Whether nothing speaks against it but its speed."""
        return self.judge(setting)[0] <= 0

    def _excess(self, forecast: Forecast) -> float:
        """By which share of the limit the incumbent's measured peak and what is predicted beyond it are too much."""
        measured = self.incumbent.device_bytes
        if self.device_limit_bytes is None or measured is None:
            return 0.0
        more = forecast.device_bytes - self.forecast(self.incumbent.setting).device_bytes
        return (measured + more) / self.device_limit_bytes - 1

    def _margin(self, setting: Setting) -> float:
        """How far within its budget a setting is, as a share below 0."""
        budget = self.space.budget
        return min(0.0, self.space.cost(setting) / budget - 1.0) if budget else 0.0
