"""The search for the fastest knobs: `next()` returns what to measure, `tell()` takes its outcome.

A challenger is compared with the incumbent in units: blocks of the incumbent, the challenger and the incumbent again,
so that a drift of the machine cancels and nothing is compared with another minute. What is believed of all settings
(`zftune.tuner.belief`) decides which challenger comes next; a sequential test of its own units
(`zftune.tuner.evidence`) decides whether it is adopted. It neither trains nor waits nor looks at a clock.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zftune.errors import ZftuneError
from zftune.store.types import Decision, DecisionKind, TrialState
from zftune.tuner import evidence, messages, states
from zftune.tuner.belief import Belief, doubted, far_apart, neighbours, places_of, pool_of
from zftune.tuner.evidence import Gain, block_steps
from zftune.tuner.messages import BECAUSE
from zftune.tuner.pace import Pace, differs
from zftune.tuner.space import Forecast, Forecaster, Setting, Space
from zftune.tuner.states import OF_INCUMBENT, Block, Outcome, Request, SearchOptions, Trial

if TYPE_CHECKING:
    from zftune.tuner.study import Params, SearchStudy

__all__ = ["MOST_VOIDS", "Search", "SearchOptions"]
Replan = Callable[[Pace | None, Pace], tuple[Forecaster, Sequence[Setting]]]
"""Asks the planner again after the machine's pace has changed: its predictions, and its own choices, best first."""
MOST_VOIDS = 3
LEAST_MEASUREMENTS = 5
"""The start, a first look with the incumbent's block after it, and a whole unit: with fewer, nothing can be adopted."""
WORTH = 0.004
"""Expected improvement that is worth a unit."""
SLOWER = 1.3
"""Times the incumbent's block before: a challenger that is slower in its first block has no second one."""
REST_STEPS = 2000
"""Between units once nothing is worth one."""
_HOLD_STEPS = 200
_FAR_APART = 6
"""First looks where there is no planner."""
_ONE_BLOCK = 2 / 3
"""The weight of a unit with one block of the challenger: its variance is 3/2 of that of a whole one."""
_SURPRISE = 3.0
"""Standard deviations by which a unit contradicts the belief; two in a row, while the search rests, widen it."""
_LEAST_OWN = 4
"""Units by which it is decided whether steps are judged without what other processes took."""
_LESS_NOISE = 0.6
"""Of the variance of the wall clock's units: only then that is worth it."""
_NEWEST_PACES = 3
_MOVEMENT_NOISE = 0.1
"""Of the bound on lateness: by so much more the incumbent may be late before another replaces it."""


class Search:
    """A search over a space.

    Args:
        planned: the planner's own choices, best first; the first of them is looked at first.
        replan: None: the planner is not asked again when the machine has changed.
    """

    def __init__(
        self,
        space: Space,
        start: Setting,
        forecast: Forecaster,
        planned: Sequence[Setting] = (),
        options: SearchOptions | None = None,
        replan: Replan | None = None,
    ) -> None:
        self.options = options or SearchOptions()
        self.space = space
        self.device_limit_bytes: int | None = None
        """Most GPU memory at the peak; None: there is no such limit."""
        self.notes: list[Decision] = []
        self.known = states.SearchState(
            book=states.Book([Trial(0, start, "start")], list(self.options.barred)),
            cost=states.ExplorationCost(self.options.cost_share, self.options.cost_floor_s),
            planned=list(planned),
            wanted=[(one, "planner") for one in planned[:1] if one != start],
        )
        if space.movement_percent is not None:
            self.known.movement = space.movement_percent, space.movement_rate
        self._replan, self._forecast = replan, forecast
        self._forecasts: dict[Setting, Forecast] = {}
        self._ended_early = False
        self._belief: Belief | None = None
        self._study: SearchStudy | None = None

    @property
    def book(self) -> states.Book:
        return self.known.book

    @property
    def state(self) -> states.State:
        return self.known.state

    @property
    def cost(self) -> states.ExplorationCost:
        return self.known.cost

    @property
    def measurements(self) -> int:
        return self.known.measurements

    # --- from outside -------------------------------------------------------------------------------------------------

    def suggest(self, setting: Setting, source: str) -> None:
        if setting != self.book.incumbent.setting:
            self.known.wanted.insert(0, (setting, source))
            self._grow_pool([setting])

    def remark(self, text: str = "", because: str = "", about: Mapping[str, Any] | None = None) -> None:
        """Record a finding beside the search: a sentence, or the template `because` with its figures `about`."""
        self._note("remark", None, because, **(about or {"text": text}))

    def remember(self, remark: states.Remark) -> None:
        """Record an earlier finding with its own time; it changes nothing."""
        about = {"text": remark.reason, states.AT_S: remark.at_s}
        self.notes.append(Decision("remark", None, about, remark.step, remark.at_unix_s))

    def stop(self, text: str = "", because: str = "", *, early: bool = False, **about: Any) -> None:
        """End the search; the incumbent stays. `text`, or the template `because` with figures `about`, is the reason.

        `early`: before its own end; with `final=True` among the figures it is over for later trainings, too.
        """
        self._end_visit()
        self._ended_early = early
        self._note("stop", self.book.incumbent.number, because, **about, **({"text": text} if text else {}))
        self.known.state = states.Stopped(final=bool(about.get("final")))

    def roll_back(self, by: str) -> None:
        """End the search with the incumbent before the last one; the last is barred from now on."""
        self._end_visit()
        barred = self.book.roll_back()
        self._state_gain()
        pinned = self.book.incumbent.number
        self._note("rollback", barred.number, by=by, barred=str(barred.setting), pinned=pinned)
        self.known.state = states.Stopped(final=True)

    def guard(self, reason: str) -> None:
        self._end_visit()
        self.book.adoptions.clear()
        self.book.move_to(self.book.trials[0])
        self._state_gain()
        self._note("guard", self.book.incumbent.number, text=reason)
        self.known.state = states.Stopped(final=True)

    @property
    def is_settled(self) -> bool:
        """Whether it has come to its end: it has stopped, or rests since nothing is worth a comparison."""
        has_stopped = isinstance(self.state, states.Stopped) and not self._ended_early
        return has_stopped or (isinstance(self.state, states.Resting) and self.state.is_idle)

    def begin_again(self) -> None:
        """Training was ended and goes on: an open unit is given up, and the incumbent is measured first."""
        last = self.book.trials[-1]
        if self.known.is_open and not last.gains and last.state is not TrialState.CRASHED:
            self.known.wanted.insert(0, (last.setting, last.source))
        self._end_visit()
        self._forget_pace()
        if not self._is_final:
            self.known.state = states.Opening()
            self._note("resume", None, measurements=self.measurements)

    def bound(self) -> None:
        """Keep to what may be late by how far the weights move."""
        late = self.book.incumbent.setting
        violation = self.space.violation(late)
        if violation is not None and violation.excess > _MOVEMENT_NOISE:
            self.make_earlier(self.space.earlier(late), violation.reason)

    def make_earlier(self, setting: Setting, why: str) -> None:
        late = self.book.incumbent.setting
        trial = self._move_to(setting)
        self._note("movement", trial.number, what=_what(setting, late), late=late.differences(setting), why=why)

    # --- which settings may run --------------------------------------------------------------------------------------

    def forecast(self, setting: Setting) -> Forecast:
        if setting not in self._forecasts:
            self._forecasts[setting] = self._forecast(setting)
        return self._forecasts[setting]

    def judge(self, setting: Setting) -> tuple[float, str]:
        """By which share of a limit a setting must not run, and why; at most 0 and "" where it may."""
        forecast, incumbent = self.forecast(setting), self.book.incumbent
        kind, violation = self.book.why_barred(setting), self.space.violation(setting)
        reasons = [] if kind is None else [(1.0, messages.BARRED[kind])]
        reasons += [(one.excess, one.reason) for one in (violation, forecast) if one is not None and one.excess > 0]
        if self.device_limit_bytes is not None and incumbent.device_bytes is not None:
            peak = incumbent.device_bytes + forecast.device_bytes - self.forecast(incumbent.setting).device_bytes
            why = "it would leave less GPU memory free than must stay free, by the measured peak"
            reasons += [(peak / self.device_limit_bytes - 1, why)] if peak > self.device_limit_bytes else []
        budget = self.space.budget
        margin = min(0.0, self.space.cost(setting) / budget - 1.0) if budget else 0.0
        return max(reasons, default=(margin, ""))

    def may_run(self, setting: Setting) -> bool:
        return self.judge(setting)[0] <= 0

    def add(self, setting: Setting, source: str, params: Params | None = None) -> Trial:
        book = self.book
        trial = Trial(len(book.trials), setting, source, forecast=self.forecast(setting), params=params or {})
        trial.constraint, trial.incumbent = min(0.0, self.judge(setting)[0]), book.incumbent_number
        book.trials.append(trial)
        return trial

    def _reject(self, setting: Setting, source: str, params: Params) -> None:
        trial = self.add(setting, source, params)
        trial.constraint, trial.reason = self.judge(setting)
        trial.state, trial.value = TrialState.REJECTED, self._predicted(setting)

    # --- what next ---------------------------------------------------------------------------------------------------

    def next(self) -> Request | None:
        """What to measure next; the same until it was told its outcome. None: the search is over."""
        if isinstance(self.state, states.Choosing):
            self.known.state = self._choose()
        state, incumbent = self.state, self.book.incumbent
        window = incumbent.setting.update_interval
        if isinstance(state, states.Opening):
            steps = block_steps(window)
            return Request(incumbent.setting, "start", incumbent.number, 0, messages.OPENING_BLOCKS * steps, steps)
        if isinstance(state, states.Resting):
            most = min(_HOLD_STEPS, state.steps)
            steps = max(block_steps(window, most), window * -(-most // window))
            return Request(incumbent.setting, "hold", incumbent.number, 0, steps)
        if not isinstance(state, states.Unit):
            return None
        if state.before is None or state.blocks:
            role: states.Role = "a1" if state.before is None else "a2"
            return Request(incumbent.setting, role, incumbent.number, 0, block_steps(window, state.size))
        challenger = self.book.trials[state.trial]
        window = challenger.setting.update_interval
        size, usual_ms = block_steps(window, state.size), math.exp(state.before.wall)
        left_s = self.cost.allowed_s - self.cost.spent_s - self.cost.change_s
        role, steps = ("explore", size) if state.is_look else ("b", 2 * size)
        return Request(
            challenger.setting, role, challenger.number, window, steps, size, SLOWER * usual_ms, left_s, usual_ms
        )

    def _choose(self) -> states.State:
        most, cost = self.options.most_measurements, self.cost
        if most is not None and self.measurements + 2 > most:
            return self._rest("limit", may_hold=self.options.watch, made=self.measurements, most=most)
        last = self.book.trials[-1]
        goes_on = self.known.is_open and last.number and last.state in (TrialState.PLANNED, TrialState.MEASURED)
        trial = last if goes_on else self._next_visit()
        if trial is None:
            why = self.space.fixed_because
            may_hold = self.options.watch or bool(self.space.dimensions)
            return self._rest("fixed", may_hold=may_hold, why=why) if why else self._rest("idle", may_hold=may_hold)
        missing_s = cost.spent_s + self._expected_s(trial.setting) - cost.allowed_s
        if missing_s <= 0:
            is_look = not self.known.pair(trial.setting).gains
            return states.Unit(trial.number, self._block_size(), self.known.last, is_look=is_look)
        if not cost.share:
            self.stop(because="budget", allowed_s=cost.allowed_s)
            return self.state
        step_s = max(1e-6, self.book.incumbent_step_ms / 1e3)
        steps = min(REST_STEPS, max(1, math.ceil(missing_s / cost.share / step_s)))
        return self._rest("budget", may_hold=True, steps=steps, allowed_s=cost.allowed_s)

    def _rest(self, because: str, *, may_hold: bool, steps: int = 0, **about: Any) -> states.State:
        """Nothing is worth a unit (one is made now and then), or none can be paid before so many `steps`."""
        if not self.options.hold or not may_hold:
            self.stop(because=because, **about)
            return self.state
        self.known.last = None
        if steps or not self.known.rests:
            self._note("hold", None, because, **about)
        return states.Resting(steps or REST_STEPS, is_idle=not steps)

    def _next_visit(self) -> Trial | None:
        belief, start = self._believed(), self.book.incumbent.setting
        if not self.known.pairs and not self.known.wanted and belief.is_flat and self.options.sampler == "belief":
            # Without a planner the first looks are at settings that are far apart.
            allowed = [one for one in belief.settings if self.may_run(one)]
            found = far_apart(allowed, places_of(belief.settings), start, _FAR_APART)
            self.known.wanted += [(one, "search") for one in found]
        while self.known.wanted:
            setting, source = self.known.wanted.pop(0)
            if setting == start:
                continue
            params = dict(self.space.indices(setting))
            if self.may_run(setting):
                self._studied().visit(params)
                self.known.is_open = True
                return self.add(setting, source, params)
            self._reject(setting, source, params)
        rejected: list[tuple[Setting, Params]] = []
        proposed = self._studied().propose(len(self.book.trials), start, self._predicted, rejected)
        for one, params in rejected:
            self._reject(one, "search", params)
        self.known.is_open = proposed is not None
        return None if proposed is None else self.add(proposed[0], "search", proposed[1])

    def _best(self) -> Setting | None:
        """What the belief proposes: the largest expected improvement, if it is worth a unit."""
        belief, incumbent = self._believed(), self.book.incumbent.setting
        is_rest_over = isinstance(self.state, states.Choosing) and self.known.rests > 0 and not self.known.is_open
        expected = belief.improvements(incumbent)
        for index in expected.argsort()[::-1]:
            setting = belief.settings[int(index)]
            if expected[index] < WORTH and not is_rest_over:  # then one unit is made whatever it is worth
                return None
            if setting != incumbent and self.may_run(setting):
                return setting
        return None

    def _outdone(self) -> bool:
        """Whether the visit that is open is to end: another setting is worth more, or this one nothing."""
        trial, belief = self.book.trials[-1], self._believed()
        if self.options.sampler in ("belief", "none"):
            return self.known.wanted != [] or self._best() != trial.setting
        expected = belief.improvements(self.book.incumbent.setting)
        return bool(expected[belief.settings.index(trial.setting)] < WORTH)

    def _expected_s(self, setting: Setting) -> float:
        """What a unit would cost."""
        belief = self._believed()
        gain = belief.gain(self.book.incumbent.setting, setting)[0] if setting in belief else 0.0
        steps = 2 * self._block_size() + setting.update_interval
        return 2 * self.cost.change_s + self.book.incumbent_step_ms / 1e3 * steps * max(0.0, math.exp(-gain) - 1)

    def _block_size(self) -> int:
        """Steps of a block: as long as a change of knobs costs."""
        step_s = self.book.incumbent_step_ms / 1e3
        return math.ceil(self.cost.change_s / step_s) if step_s else evidence.BLOCK_STEPS

    def _predicted(self, setting: Setting) -> float:
        return math.log(self.forecast(setting).step_ms / self.forecast(self.book.trials[0].setting).step_ms)

    # --- what is believed --------------------------------------------------------------------------------------------

    def _believed(self) -> Belief:
        if self._belief is None:
            known, book = self.known, self.book
            if not known.pool:
                first = [book.trials[0].setting, book.incumbent.setting, *known.planned]
                first = list(dict.fromkeys([*first, *(one for one, _ in known.wanted)]))
                known.pool = first if self.options.sampler == "none" else pool_of(self.space, first, self.options.seed)
            known.pool = list(dict.fromkeys([*known.pool, *(one.setting for one in book.trials)]))
            times = {one: self.forecast(one).step_ms for one in known.pool}
            self._belief = Belief(times, places_of(known.pool), known.lessons)
        return self._belief

    def _grow_pool(self, settings: Sequence[Setting]) -> None:
        if self.known.pool:
            self.known.pool = list(dict.fromkeys([*self.known.pool, *settings]))
        self._belief = None

    def _studied(self) -> SearchStudy:
        if self._study is None:
            from zftune.tuner.study import SearchStudy

            def may_visit(setting: Setting) -> bool:
                if setting not in self._believed():
                    self._grow_pool([setting])
                return setting != self.book.incumbent.setting and self.may_run(setting)

            self._study = SearchStudy(
                self.space, self.options.sampler, self.options.seed, best=self._best, outdone=self._outdone,
                may_run=may_visit,
            )  # fmt: skip
            self.book.trials[0].value = 0.0
            self._study.refill(self.book.trials)
        return self._study

    @property
    def uses_own_time(self) -> bool:
        """Whether steps are judged without what other processes took from the training thread.

        That is where it halves the noise and gives the same gains as the wall clock.
        """
        known = self.known
        both = [wall - own for pair in known.pairs for wall, own in zip(pair.gains, pair.own, strict=False)]
        if len(both) < _LEAST_OWN or known.own_noise.variance > _LESS_NOISE * known.noise.variance:
            return False
        return abs(statistics.fmean(both)) <= 2 * statistics.stdev(both) / math.sqrt(len(both))

    # --- outcomes ----------------------------------------------------------------------------------------------------

    def tell(self, outcome: Outcome) -> None:
        request = self.next()
        if request is None:
            raise RuntimeError("the search is over: nothing was asked for")
        trial, step_s = self.book.trials[request.trial], self.book.incumbent_step_ms / 1e3
        of_incumbent = request.role in OF_INCUMBENT
        self._pay(outcome, None if of_incumbent or not step_s else step_s)
        self.known.ranks_ms = outcome.ranks_ms or self.known.ranks_ms
        if outcome.movement_percent is not None:
            self.known.movement = outcome.movement_percent, outcome.movement_rate
            self.space = self.space.moving(*self.known.movement)
        counted = outcome.status != "crashed" and not outcome.called_off
        if counted and outcome.tokens != self.book.tokens:
            before, self.book.tokens = self.book.tokens, outcome.tokens
            if self.book.log_us is not None:  # blocks of before prove nothing of those to come, gains a little
                self._changed("tokens", tokens=outcome.tokens, before=before)
        if outcome.status == "crashed":
            self._crashed(trial, outcome.reason, of_incumbent=of_incumbent)
        elif outcome.status == "void" or not outcome.steps_ms:
            self._void(trial, outcome)
        elif request.role == "hold":
            self._rested_for(len(outcome.steps_ms))
        else:
            self._measured(trial, request, outcome)
        if of_incumbent and counted:
            self._make_room(outcome.device_bytes)
            self._take_pace(outcome.pace)
        if outcome.movement_percent is not None and not self._is_final:
            self.bound()

    def _pay(self, outcome: Outcome, incumbent_step_s: float | None) -> None:
        """Count the time of an outcome and of what came before it; the argument is that of `ExplorationCost.add`."""
        cost, between, step_s = self.cost, outcome.between, self.book.incumbent_step_ms / 1e3
        cost.add(between.seconds, 0, None)
        cost.add(between.late_s, between.late_steps, step_s or None)
        if between.late_s and step_s:
            cost.changed(between.late_s, between.late_steps, step_s)
        cost.add(outcome.seconds, outcome.step_count, incumbent_step_s)

    @property
    def _is_final(self) -> bool:
        return isinstance(self.state, states.Stopped) and self.state.final

    def _measured(self, trial: Trial, request: Request, outcome: Outcome) -> None:
        known, state = self.known, self.state
        known.measurements += 1
        blocks = _blocks(request, outcome)
        per_token = math.log(1e3 / outcome.tokens)
        trial.keep([block.wall + per_token for block in blocks])
        trial.device_bytes = outcome.device_bytes if outcome.device_bytes is not None else trial.device_bytes
        for one, other in itertools.pairwise(blocks):
            known.noise.add(one.wall - other.wall, 2)
            if one.own is not None and other.own is not None:
                known.own_noise.add(one.own - other.own, 2)
        if request.role in OF_INCUMBENT:
            self.book.log_us = blocks[-1].wall + per_token
        if isinstance(state, states.Opening):
            known.last, known.state = blocks[-1], states.Choosing()
            if not any(note.kind == "start" for note in self.notes):
                self._note("start", trial.number, what=str(trial.setting), step_ms=self.book.incumbent_step_ms)
        elif isinstance(state, states.Unit) and request.role == "a2":
            self._finish_unit(state, blocks[-1])
        elif isinstance(state, states.Unit) and request.role == "a1":
            known.state = replace(state, before=blocks[-1])
        elif isinstance(state, states.Unit):
            known.state = replace(state, blocks=tuple(blocks), voids=0)

    def _finish_unit(self, unit: states.Unit, after: Block) -> None:
        assert unit.before is not None
        known, trial = self.known, self.book.trials[unit.trial]
        pair = known.pair(trial.setting)
        weight = 1.0 if len(unit.blocks) > 1 else _ONE_BLOCK
        gain = (unit.before.wall + after.wall) / 2 - statistics.fmean(one.wall for one in unit.blocks)
        owns = [one.own for one in (unit.before, after, *unit.blocks) if one.own is not None]
        own = (owns[0] + owns[1]) / 2 - statistics.fmean(owns[2:]) if len(owns) == 2 + len(unit.blocks) else None
        _compare(known.noise, pair.gains, pair.weights, gain, weight)
        if own is not None and len(pair.own) == len(pair.gains):
            _compare(known.own_noise, pair.own, pair.weights, own, weight)
            pair.own.append(own)
        pair.gains.append(gain)
        pair.weights.append(weight)
        trial.gains.append(gain)
        known.last = after
        judged, noise = (own, known.own_noise) if own is not None and self.uses_own_time else (gain, known.noise)
        self._heed_surprise(trial.setting, judged, noise.cautious / weight)
        lesson = self._believed().lesson(pair.incumbent, pair.challenger, judged, noise.cautious / weight)
        self._believed().learn(lesson)
        known.lessons.append(lesson)
        self._state_gain()
        known.state = states.Choosing()
        self._decide(trial, pair, outdone=self._studied().report(gain))
        if known.rests:
            rests, known.rests = known.rests, 0
            if self._best() is None:
                known.rests, known.state = rests, states.Resting(REST_STEPS, is_idle=True)

    def _decide(self, trial: Trial, pair: states.Pair, *, outdone: bool) -> None:
        """Adopt a challenger, leave it, or go on with it: where its evidence is enough it lacks a second unit."""
        known, before = self.known, self.book.incumbent
        uses_own = self.uses_own_time and len(pair.own) == len(pair.gains)
        gains, noise = (pair.own, known.own_noise) if uses_own else (pair.gains, known.noise)
        mean, error = evidence.mean_gain(pair.gains, pair.weights, known.noise.cautious)
        found, stated = evidence.log_evidence(gains, pair.weights, noise.cautious), Gain.of_log(mean, error)
        needed, units = evidence.needed_evidence(pair.order), len(pair.gains)
        figures: dict[str, Any] = {
            "what": _what(trial.setting, before.setting), "gain": stated.share, "error": stated.error, "units": units,
            "evidence": found, "needed": needed,
        }  # fmt: skip
        if units >= 2 and found > needed and mean > error:  # the wall clock's, too
            self._end_visit(adopted=True)
            self.book.adopt(trial, states.Adoption(trial.number, before.number, mean, error))
            if self.options.sampler != "none":
                self._grow_pool(neighbours(self.space, trial.setting))
            self._forget_pace()
            self._state_gain()
            self._note("adopt", trial.number, **figures)
        elif known.rests or (outdone and found <= needed):
            self._end_visit()
            self._note("keep", trial.number, **figures)

    def _state_gain(self) -> None:
        """What the incumbent gains over the reference, by all that is believed: free of the winner's luck."""
        book = self.book
        believed = self._believed().gain(book.reference, book.incumbent.setting) if book.chain else None
        book.gain = None if believed is None else Gain.of_log(*believed)

    def _end_visit(self, *, adopted: bool = False) -> None:
        if not self.known.is_open:
            return
        trial, book = self.book.trials[-1], self.book
        if trial.gains:
            start, incumbent = book.trials[0].setting, book.trials[trial.incumbent].setting
            trial.value = -self._believed().gain(start, incumbent)[0] - statistics.fmean(trial.gains)
        self._studied().end(trial.value, trial.setting, adopted=adopted)
        self.known.is_open = False
        if trial.state is TrialState.PLANNED:
            trial.state = TrialState.VOID

    def _rested_for(self, steps: int) -> None:
        if not isinstance(self.state, states.Resting):
            return
        left, is_idle = self.state.steps - steps, self.state.is_idle
        if left > 0:
            self.known.state = replace(self.state, steps=left)
            return
        self.known.last, self.known.state = None, states.Choosing()
        self.known.rests += is_idle
        replaced = self.book.chain[-1].replaced if self.book.chain else None
        if is_idle and self.known.rests % 2 and replaced is not None and not self.known.is_open:
            setting = self.book.trials[replaced].setting
            self.known.wanted.append((setting, "start" if replaced == 0 else "reference"))

    def _heed_surprise(self, setting: Setting, gain: float, variance: float) -> None:
        """Two units in a row, while the search rests, that contradict what is believed widen the belief."""
        mean, error = self._believed().gain(self.book.incumbent.setting, setting)
        is_one = bool(self.known.rests) and abs(gain - mean) > _SURPRISE * math.hypot(error, math.sqrt(variance))
        is_second = is_one and self.known.surprises == 1
        self.known.surprises = int(is_one and not is_second)
        if is_second:
            self._doubt()
            self._note("reopen", self.book.incumbent.number, "surprise")

    def _doubt(self) -> None:
        self.known.lessons = doubted(self.known.lessons, self._believed().planner_error)
        self._belief = None  # units of the past prove nothing any more; how many challengers there were stays
        self.known.pairs = [replace(one, gains=[], own=[], weights=[]) for one in self.known.pairs]

    # --- what does not count, or changes the rules -------------------------------------------------------------------

    def _void(self, trial: Trial, outcome: Outcome) -> None:
        """Measure again; give up where that does not help. What was called off is no reason to."""
        state, self.known.last = self.state, None
        if isinstance(state, states.Resting):
            self._rested_for(outcome.step_count)
        if not isinstance(state, states.Opening | states.Unit):
            return
        voids = state.voids + (not outcome.called_off)
        if voids < MOST_VOIDS:
            again = replace(state, voids=voids)
            self.known.state = replace(again, before=None, blocks=()) if isinstance(again, states.Unit) else again
            return
        about: dict[str, Any] = {"times": MOST_VOIDS, "what": str(trial.setting), "why": outcome.reason}
        self._note("void", trial.number, **about)
        if isinstance(state, states.Unit):
            challenger = self.book.trials[state.trial]
            self._end_visit()
            if not challenger.blocks:
                challenger.state, challenger.reason = TrialState.VOID, outcome.reason
            self.known.state = states.Choosing()
        elif self.options.hold:
            self.known.state = states.Resting(_HOLD_STEPS)
        else:
            self.stop(because="void", **about)

    def _crashed(self, trial: Trial, why: str, *, of_incumbent: bool) -> None:
        self._end_visit()
        self._note("crash", trial.number, "incumbent" if of_incumbent else "", what=str(trial.setting), why=why)
        if of_incumbent:
            self.known.state = states.Stopped()
        else:
            self.book.crash(trial, why)
            self.known.last, self.known.state = None, states.Choosing()

    def _changed(self, because: str, **details: float | str) -> None:
        """Something was counted that changes step times: the belief is widened, nothing is forgotten."""
        self._doubt()
        self._end_visit()
        self._forget_pace()
        self._note("reopen", self.book.incumbent.number, because, **details)
        if not isinstance(self.state, states.Stopped):
            self.known.state = states.Opening() if self.book.log_us is None else states.Choosing()

    def _forget_pace(self) -> None:
        """Nothing of before is comparable with the incumbent's next block."""
        known = self.known
        known.last, known.rests, known.pace, known.paces = None, 0, None, []

    def _take_pace(self, pace: Pace | None) -> None:
        """Ask the planner again where the machine's rates, by the bytes and times that were counted, have changed."""
        known = self.known
        if pace is None or isinstance(self.state, states.Stopped):
            return
        known.paces = [*known.paces[1 - _NEWEST_PACES :], pace]
        if len(known.paces) < _NEWEST_PACES:
            return
        now = Pace.median(known.paces)
        before = known.pace = known.pace or now
        what = differs(before, now)
        if what is None:
            return
        if self._replan is not None:
            self._forecast, planned = self._replan(before, now)
            self._forecasts.clear()
            known.planned = list(planned)
            known.wanted += [(one, "planner") for one in planned[:1] if one != self.book.incumbent.setting]
        self._changed("pace", what=what)
        self._grow_pool([one for one, _ in known.wanted])

    def _move_to(self, setting: Setting) -> Trial:
        """Make a setting the incumbent that was not compared with the one before."""
        self._end_visit()
        trial = self.add(setting, "reference")
        self.book.move_to(trial)
        self._grow_pool([setting, *(neighbours(self.space, setting) if self.options.sampler != "none" else [])])
        self._state_gain()
        self._forget_pace()
        if not isinstance(self.state, states.Stopped):
            self.known.state = states.Opening()
        return trial

    def _make_room(self, peak_bytes: int | None) -> None:
        """Replace an incumbent that leaves too little GPU memory free.

        By itself with the least offload ratio that is enough; where none is, by the fastest by prediction of all that
        are allowed with everything offloaded, such as with fewer columns selected.
        """
        limit, tight = self.device_limit_bytes, self.book.incumbent.setting
        if self._is_final or limit is None or peak_bytes is None or peak_bytes <= limit:
            return
        room = limit - peak_bytes + self.forecast(tight).device_bytes
        higher = sorted({1.0, *self.space.offload_ratios})
        raised = [replace(tight, offload_ratio=ratio) for ratio in higher if ratio > tight.offload_ratio]
        found = next((one for one in raised if self.forecast(one).device_bytes <= room), None)
        if found is None:
            whole = (one for one in self.space.settings() if one.offload_ratio == higher[-1])
            fits = (one for one in whole if self.forecast(one).device_bytes <= room and not self.book.why_barred(one))
            found = min(fits, key=lambda one: self.forecast(one).step_ms, default=raised[-1] if raised else tight)
        if found != tight:
            peak_mib, limit_mib = peak_bytes / 2**20, limit / 2**20
            number = self._move_to(found).number
            self._note("memory", number, what=_what(found, tight), peak_mib=peak_mib, limit_mib=limit_mib)

    def _note(self, kind: DecisionKind, trial: int | None, because: str = "", **details: float | str | bool) -> None:
        figures = {name: float(f"{one:.6g}") if isinstance(one, float) else one for name, one in details.items()}
        figures |= {BECAUSE: because} if because else {}
        figures |= {"spent_s": round(self.cost.spent_s, 3), "elapsed_s": round(self.cost.elapsed_s, 3)}
        self.notes.append(Decision(kind, trial, figures))

    def snapshot(self) -> states.SearchState:
        return copy.deepcopy(self.known)

    def restore(self, state: states.SearchState, notes: Sequence[Decision] = ()) -> None:
        """Go on from a snapshot as if the search had never been interrupted; `notes` are its decisions so far."""
        if self.book.trials[0].setting != state.book.trials[0].setting:
            raise ZftuneError("the run in the store began with another setting than this one: it cannot go on from it")
        barred = self.book.barred
        self.known, self.notes = copy.deepcopy(state), list(notes)
        self.book.barred += [one for one in barred if not self.book.why_barred(one.setting)]
        if state.movement is not None:
            self.space = self.space.moving(*state.movement)
        self._belief = self._study = None
        if state.is_open:
            last = self.book.trials[-1]
            self._studied().visit(last.params, last.gains)


def _blocks(request: Request, outcome: Outcome) -> list[Block]:
    size, window = request.block or len(outcome.steps_ms), request.setting.update_interval
    walls = evidence.block_values(outcome.steps_ms, outcome.moves, size, window)
    if len(outcome.taken_ms) != len(outcome.steps_ms) or min(outcome.own_ms) <= 0:
        return [Block(wall) for wall in walls]
    owns = evidence.block_values(outcome.own_ms, outcome.moves, size, window)
    return [Block(wall, own) for wall, own in zip(walls, owns, strict=True)]


def _compare(
    noise: evidence.BlockNoise, gains: Sequence[float], weights: Sequence[float], gain: float, weight: float
) -> None:
    """What units of the same pair differ by is noise."""
    if gains:
        mean, _ = evidence.mean_gain(gains, weights, 0.0)
        noise.add(gain - mean, 1 / sum(weights) + 1 / weight)


def _what(setting: Setting, incumbent: Setting) -> str:
    return setting.differences(incumbent) or str(setting)
