"""The search for the fastest knobs: `next()` says what to measure, `tell()` takes what came of it.

A challenger is compared with the incumbent in units: blocks of the incumbent, the challenger and the incumbent again,
so that a drift of the machine cancels and nothing is compared with another minute. What is believed of all settings
(`zftune.tuner.belief`) says which challenger comes next; a sequential test of its own units (`zftune.tuner.evidence`)
says whether it is adopted. It neither trains nor waits nor looks at a clock: whoever drives it does.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zftune.errors import ZftuneError
from zftune.store.types import Decision, DecisionKind, TrialState
from zftune.tuner import messages
from zftune.tuner.belief import Belief, Lesson, doubted, far_apart
from zftune.tuner.blocks import BLOCK_STEPS, BlockNoise, block_steps, block_values
from zftune.tuner.candidates import neighbours, places_of, pool_of
from zftune.tuner.cost import ExplorationCost
from zftune.tuner.evidence import Gain, log_evidence, needed_evidence
from zftune.tuner.pace import Pace, differs
from zftune.tuner.space import Forecaster, Setting, Space
from zftune.tuner.states import (
    AT_S,
    OF_INCUMBENT,
    Adoption,
    BarredSetting,
    Block,
    Choosing,
    Opening,
    Outcome,
    Pair,
    Remark,
    Request,
    Resting,
    Role,
    SearchOptions,
    SearchState,
    State,
    Stopped,
    Trial,
    Unit,
    UnmeasuredSteps,
)
from zftune.tuner.trials import TrialTable

if TYPE_CHECKING:
    from zftune.tuner.setup import Planning
    from zftune.tuner.study import SearchStudy

__all__ = ["MOST_VOIDS", "Search", "SearchOptions"]
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
        planning: the planner, to be asked again where the machine has changed; None: it is not asked again.
    """

    def __init__(
        self,
        space: Space,
        start: Setting,
        forecast: Forecaster,
        planned: Sequence[Setting] = (),
        options: SearchOptions | None = None,
        planning: Planning | None = None,
    ) -> None:
        self.options = options or SearchOptions()
        self.book = TrialTable(space, forecast, start, self.options.barred)
        self.state: State = Opening()
        self.notes: list[Decision] = []
        self.cost = ExplorationCost(self.options.cost_share, self.options.cost_floor_s)
        self._ended_early = False
        self.measurements = 0
        """Blocks, or pairs of blocks, that counted."""
        self._planning, self._planned = planning, tuple(planned)
        self._wanted: list[tuple[Setting, str]] = [(one, "planner") for one in planned[:1] if one != start]
        self._pool: tuple[Setting, ...] = ()
        self._lessons: tuple[Lesson, ...] = ()
        self._belief: Belief | None = None
        self._study: SearchStudy | None = None
        self._pairs: list[Pair] = []
        self._noise, self._own_noise = BlockNoise(), BlockNoise()
        self._last: Block | None = None
        self._rests = self._surprises = 0
        self._pace: Pace | None = None
        self._paces: list[Pace] = []

    # --- from outside -------------------------------------------------------------------------------------------------

    def idle(self, between: UnmeasuredSteps) -> None:
        """Count steps that belong to no measurement; `tell` does so with those before an outcome."""
        step_s = self.book.incumbent_step_ms / 1e3
        self.cost.add(between.seconds, 0, None)
        self.cost.add(between.late_s, between.late_steps, step_s or None)
        if between.late_s and step_s:
            self.cost.changed(between.late_s, between.late_steps, step_s)

    def suggest(self, setting: Setting, source: str) -> None:
        """Look at a setting before all others."""
        if setting != self.book.incumbent.setting:
            self._wanted.insert(0, (setting, source))
            self._forget_pool()

    def remark(self, reason: str, **about: float) -> None:
        """Write down what was found out beside the search."""
        self._note("remark", reason, None, **about)

    def remember(self, remark: Remark) -> None:
        """Write down what was found out before, where it belongs; it changes nothing."""
        self.notes.append(Decision("remark", remark.reason, None, {AT_S: remark.at_s}, remark.step, remark.at_unix_s))

    def stop(self, reason: str, *, final: bool = False, early: bool = False, **about: str | bool) -> None:
        """End the search; the incumbent stays.

        `final`: for later trainings too. `early`: it had not come to its end. `about` is the data of `reason`.
        """
        self._end_visit()
        self._ended_early = early
        self._note("stop", reason, self.book.incumbent.number, **({"final": 1.0} if final else {}), **about)
        self.state = Stopped(reason, final=final)

    def roll_back(self, by: str, reason: str = "") -> None:
        """End the search with the incumbent before the last one; the last is barred from now on.

        `by` names the requester; `reason` is a stored sentence.
        """
        self._end_visit()
        barred = self.book.roll_back()
        self._state_gain()
        about = {"by": by, "barred": str(barred.setting)}
        reason = reason or messages.commanded("rollback", about)
        self._note("rollback", reason, barred.number, pinned=float(self.book.incumbent.number), **about)
        self.state = Stopped(reason, final=True)

    def guard(self, reason: str) -> None:
        """End the search because training goes wrong: the starting point's knobs are the incumbent again."""
        self._end_visit()
        self.book.restore_start()
        self._state_gain()
        self._note("guard", reason, self.book.incumbent.number)
        self.state = Stopped(reason, final=True)

    @property
    def is_settled(self) -> bool:
        """Whether it has come to its end: it has stopped, or rests since nothing is worth a comparison."""
        has_stopped = isinstance(self.state, Stopped) and not self._ended_early
        return has_stopped or (isinstance(self.state, Resting) and self.state.is_idle)

    def begin_again(self) -> None:
        """Training was ended and goes on: an open unit is given up, and the incumbent is measured first."""
        last = self.book.trials[-1]
        if self._open and not last.gains and last.state is not TrialState.CRASHED:
            self._wanted.insert(0, (last.setting, last.source))
        self._end_visit()
        self._last = None
        self._pace, self._paces = None, []
        if self._is_final:
            return
        self.state = Opening()
        self._note("resume", messages.resumed(self.measurements), None)

    def take_for_crashed(self, trial: Trial, reason: str) -> None:
        """A training did not survive a trial that was in flight."""
        self.book.crash(trial, reason)
        self._note("crash", messages.crashed(trial, reason), trial.number)
        self._end_visit()
        if isinstance(self.state, Unit):
            self.state = Choosing()

    def bound(self, **about: float) -> bool:
        """Keep to what may be late by how far the weights move; whether updates had to come earlier for that."""
        late = self.book.incumbent
        violation = self.book.space.violation(late.setting)
        if violation is None or violation.excess <= _MOVEMENT_NOISE:
            return False
        self.go_on_with(self.book.space.earlier(late.setting), violation.reason, **about)
        return True

    def go_on_with(self, setting: Setting, why: str, **about: float) -> None:
        """Make a setting whose updates come earlier the incumbent."""
        late = self.book.incumbent
        trial = self._move_to(setting)
        self._note("movement", messages.made_earlier(trial, late, why), trial.number, **about)

    # --- what next ---------------------------------------------------------------------------------------------------

    def next(self) -> Request | None:
        """What to measure next; the same until it was told what came of it. None: the search is over."""
        if isinstance(self.state, Choosing):
            self.state = self._choose()
        state, incumbent = self.state, self.book.incumbent
        window = incumbent.setting.update_interval
        if isinstance(state, Opening):
            steps = block_steps(window)
            return Request(incumbent.setting, "start", incumbent.number, 0, messages.OPENING_BLOCKS * steps, steps)
        if isinstance(state, Resting):
            steps = block_steps(window, min(_HOLD_STEPS, state.steps))
            steps = max(steps, window * -(-min(_HOLD_STEPS, state.steps) // window))
            return Request(incumbent.setting, "hold", incumbent.number, 0, steps)
        return self._of_unit(state) if isinstance(state, Unit) else None

    def _of_unit(self, unit: Unit) -> Request:
        incumbent, challenger = self.book.incumbent, self.book.trials[unit.trial]
        if unit.before is None or unit.blocks:
            role: Role = "a1" if unit.before is None else "a2"
            window = incumbent.setting.update_interval
            return Request(incumbent.setting, role, incumbent.number, 0, block_steps(window, unit.size), 0)
        window = challenger.setting.update_interval
        size = block_steps(window, unit.size)
        usual_ms = math.exp(unit.before.wall)
        return Request(
            challenger.setting, "explore" if unit.is_look else "b", challenger.number, window,
            size if unit.is_look else 2 * size, size, SLOWER * usual_ms,
            self.cost.left_s - self.cost.change_s, usual_ms,
        )  # fmt: skip

    def _choose(self) -> State:
        most = self.options.most_measurements
        if most is not None and self.measurements + 2 > most:
            reason = messages.enough(self.measurements, most)
            if self.options.watch:
                return self._rest(reason)
            self.stop(reason)
            return self.state
        trial = self._visited() or self._next_visit()
        if trial is None:
            return self._rest(messages.nothing_worth(self.book.space.fixed_because))
        missing_s = self.cost.spent_s + self._expected_s(trial.setting) - self.cost.allowed_s
        if missing_s > 0:
            return self._wait(missing_s)
        pair = self._pair(trial.setting)
        return Unit(trial.number, self._block_size(), self._last, is_look=not pair.gains)

    def _next_visit(self) -> Trial | None:
        """The trial of what was wanted, or of what the study proposes; None: nothing is worth a unit."""
        self._look_around()
        while self._wanted:
            setting, source = self._wanted.pop(0)
            if setting == self.book.incumbent.setting:
                continue
            params = dict(self.book.space.indices(setting))
            if self.book.may_run(setting):
                self._studied().visit(params)
                return self.book.add(setting, source, params)
            self._reject(setting, source, params)
        rejected: list[tuple[Setting, dict[str, int]]] = []
        proposed = self._studied().propose(
            len(self.book.trials), self.book.incumbent.setting, self._predicted, rejected
        )
        for one, params in rejected:
            self._reject(one, "search", params)
        return None if proposed is None else self.book.add(proposed[0], "search", proposed[1])

    def _reject(self, setting: Setting, source: str, params: dict[str, int]) -> None:
        """Keep a proposal that may not run, with the reason."""
        trial = self.book.add(setting, source, params)
        trial.constraint, trial.reason = self.book.judge(setting)
        trial.state, trial.value = TrialState.REJECTED, self._predicted(setting)

    def _look_around(self) -> None:
        """Without a planner the first looks are at settings that are far apart."""
        belief, book = self._believed(), self.book
        if self._pairs or self._wanted or not belief.is_flat or self.options.sampler != "belief":
            return
        allowed = [one for one in belief.settings if book.may_run(one)]
        found = far_apart(allowed, places_of(belief.settings), book.incumbent.setting, _FAR_APART)
        self._wanted += [(one, "search") for one in found]

    def _visited(self) -> Trial | None:
        """The trial whose visit is open; it is the last one."""
        last = self.book.trials[-1]
        is_open = last.state in (TrialState.PLANNED, TrialState.MEASURED) and self._open
        return last if is_open and last.number else None

    @property
    def _open(self) -> bool:
        return self._study is not None and self._study.is_open

    def _best(self) -> Setting | None:
        """What the belief proposes: the largest expected improvement, if it is worth a unit."""
        belief, incumbent = self._believed(), self.book.incumbent.setting
        expected = belief.improvements(incumbent)
        for index in expected.argsort()[::-1]:
            setting = belief.settings[int(index)]
            if expected[index] < WORTH and not self._rested:
                return None
            if setting != incumbent and self.book.may_run(setting):
                return setting
        return None

    @property
    def _rested(self) -> bool:
        """Whether a rest is over, so that one unit is made whatever it is worth."""
        return isinstance(self.state, Choosing) and self._rests > 0 and not self._open

    def _outdone(self) -> bool:
        """Whether the visit that is open is to end: another setting is worth more, or this one nothing."""
        trial = self.book.trials[-1]
        if self.options.sampler in ("belief", "none"):
            return self._wanted != [] or self._best() != trial.setting
        belief = self._believed()
        expected = belief.improvements(self.book.incumbent.setting)
        return bool(expected[belief.settings.index(trial.setting)] < WORTH)

    def _rest(self, reason: str) -> State:
        """Nothing is worth a unit: one unit now and then, or none at all."""
        may_rest = self.options.watch or bool(self.book.space.dimensions)
        if not self.options.hold or not may_rest:
            self.stop(reason)
            return self.state
        self._last = None
        if not self._rests:
            self._note("hold", reason, None)
        return Resting(REST_STEPS, reason, is_idle=True)

    def _wait(self, missing_s: float) -> State:
        """The next unit cannot be paid yet."""
        reason = messages.spent(self.cost)
        if not self.options.hold or not self.cost.share:
            self.stop(reason)
            return self.state
        self._last = None
        self._note("hold", reason, None)
        step_s = max(1e-6, self.book.incumbent_step_ms / 1e3)
        return Resting(min(REST_STEPS, max(1, math.ceil(missing_s / self.cost.share / step_s))), reason)

    def _expected_s(self, setting: Setting) -> float:
        """What a unit is expected to cost."""
        step_s = self.book.incumbent_step_ms / 1e3
        belief = self._believed()
        gain = belief.gain(self.book.incumbent.setting, setting)[0] if setting in belief else 0.0
        steps = 2 * self._block_size() + setting.update_interval
        return 2 * self.cost.change_s + step_s * steps * max(0.0, math.exp(-gain) - 1)

    def _block_size(self) -> int:
        """Steps of a block: as long as a change of knobs costs."""
        step_s = self.book.incumbent_step_ms / 1e3
        return math.ceil(self.cost.change_s / step_s) if step_s else BLOCK_STEPS

    def _predicted(self, setting: Setting) -> float:
        """Logarithm of its time over the start's, by prediction."""
        return math.log(self.book.forecast(setting).step_ms / self.book.forecast(self.book.trials[0].setting).step_ms)

    # --- what is believed --------------------------------------------------------------------------------------------

    def _believed(self) -> Belief:
        if self._belief is None:
            book = self.book
            if not self._pool:
                known = [book.trials[0].setting, book.incumbent.setting, *self._planned]
                known += [one for one, _ in self._wanted]
                everything = self.options.sampler != "none"
                self._pool = tuple(dict.fromkeys(known))
                self._pool = pool_of(book.space, self._pool, self.options.seed) if everything else self._pool
            missing = (one.setting for one in book.trials if one.setting not in self._pool)
            self._pool = (*self._pool, *dict.fromkeys(missing))
            self._belief = Belief({one: book.forecast(one).step_ms for one in self._pool}, places_of(self._pool))
            self._belief.learn_all(self._lessons)
        return self._belief

    def _forget_pool(self) -> None:
        self._belief = None
        self._pool = tuple(dict.fromkeys([*self._pool, *(one for one, _ in self._wanted)])) if self._pool else ()

    def _studied(self) -> SearchStudy:
        if self._study is None:
            from zftune.tuner.study import SearchStudy

            self._study = SearchStudy(
                self.book.space, self.options.sampler, self.options.seed, best=self._best, outdone=self._outdone,
                may_run=self._may_visit,
            )  # fmt: skip
            self.book.trials[0].value = 0.0
            self._study.refill(self.book.trials)
        return self._study

    def _may_visit(self, setting: Setting) -> bool:
        if setting not in self._believed():
            self._pool = (*self._pool, setting)
            self._belief = None
        return setting != self.book.incumbent.setting and self.book.may_run(setting)

    def _value(self, trial: Trial) -> float | None:
        """Of a visit in the study: the logarithm of its time over the start's; None: it is not known."""
        if not trial.gains:
            return None
        start, incumbent = self.book.trials[0].setting, self.book.trials[trial.incumbent].setting
        return -self._believed().gain(start, incumbent)[0] - statistics.fmean(trial.gains)

    def _pair(self, challenger: Setting) -> Pair:
        incumbent = self.book.incumbent.setting
        for pair in self._pairs:
            if (pair.incumbent, pair.challenger) == (incumbent, challenger):
                return pair
        pair = Pair(incumbent, challenger, len(self._pairs) + 1)
        self._pairs.append(pair)
        return pair

    @property
    def uses_own_time(self) -> bool:
        """Whether steps are judged without what other processes took from the training thread.

        That is where it halves the noise and says the same of the gains as the wall clock.
        """
        both = [wall - own for pair in self._pairs for wall, own in zip(pair.gains, pair.own, strict=False)]
        if len(both) < _LEAST_OWN or self._own_noise.variance > _LESS_NOISE * self._noise.variance:
            return False
        return abs(statistics.fmean(both)) <= 2 * statistics.stdev(both) / math.sqrt(len(both))

    # --- what came of it ---------------------------------------------------------------------------------------------

    def tell(self, outcome: Outcome) -> None:
        """Take what came of the last request."""
        request = self.next()
        if request is None:
            raise RuntimeError("the search is over: nothing was asked for")
        self.idle(outcome.between)
        trial, step_s = self.book.trials[request.trial], self.book.incumbent_step_ms / 1e3
        challenges = request.role not in OF_INCUMBENT
        self.cost.add(outcome.seconds, outcome.step_count, step_s if challenges and step_s else None)
        if outcome.movement_percent is not None:
            self.book.space = self.book.space.moving(outcome.movement_percent, outcome.movement_rate)
        counted = outcome.status != "crashed" and not outcome.called_off
        if counted and outcome.tokens != self.book.tokens:
            self._take_tokens(outcome)
        if outcome.status == "crashed":
            self._crashed(trial, request, outcome)
        elif outcome.status == "void" or not outcome.steps_ms:
            self._void(trial, request, outcome)
        else:
            self._measured(trial, request, outcome)
        if request.role in OF_INCUMBENT and counted:
            self._make_room(outcome)
            self._take_pace(outcome.pace)
        if outcome.movement_percent is not None and not self._is_final:
            self.bound()

    @property
    def _is_final(self) -> bool:
        return isinstance(self.state, Stopped) and self.state.final

    def _measured(self, trial: Trial, request: Request, outcome: Outcome) -> None:
        if request.role == "hold":
            self._rested_for(len(outcome.steps_ms))
            return
        self.measurements += 1
        blocks = self._blocks(request, outcome)
        per_token = math.log(1e3 / outcome.tokens)
        trial.keep([block.wall + per_token for block in blocks])
        trial.device_bytes = outcome.device_bytes if outcome.device_bytes is not None else trial.device_bytes
        trial.host_bytes = outcome.host_bytes if outcome.host_bytes is not None else trial.host_bytes
        trial.pace = outcome.pace or trial.pace
        for one, other in itertools.pairwise(blocks):
            self._noise.add(one.wall - other.wall, 2)
            if one.own is not None and other.own is not None:
                self._own_noise.add(one.own - other.own, 2)
        if request.role in OF_INCUMBENT:
            self.book.log_us = blocks[-1].wall + per_token
        state = self.state
        if isinstance(state, Opening):
            self._last = blocks[-1]
            if not any(note.kind == "start" for note in self.notes):
                self._note("start", messages.start(trial, self.book.incumbent_step_ms), trial.number)
            self.state = Choosing()
        elif isinstance(state, Unit) and request.role == "a1":
            self.state = replace(state, before=blocks[-1])
        elif isinstance(state, Unit) and request.role == "a2":
            self._finish_unit(state, blocks[-1])
        elif isinstance(state, Unit):
            self.state = replace(state, blocks=tuple(blocks), voids=0)

    def _blocks(self, request: Request, outcome: Outcome) -> list[Block]:
        size = request.block or len(outcome.steps_ms)
        walls = block_values(outcome.steps_ms, outcome.moves, size)
        if len(outcome.taken_ms) != len(outcome.steps_ms) or min(outcome.own_ms) <= 0:
            return [Block(wall) for wall in walls]
        owns = block_values(outcome.own_ms, outcome.moves, size)
        return [Block(wall, own) for wall, own in zip(walls, owns, strict=True)]

    def _finish_unit(self, unit: Unit, after: Block) -> None:
        assert unit.before is not None
        trial = self.book.trials[unit.trial]
        pair = self._pair(trial.setting)
        weight = 1.0 if len(unit.blocks) > 1 else _ONE_BLOCK
        gain = (unit.before.wall + after.wall) / 2 - statistics.fmean(one.wall for one in unit.blocks)
        owns = [one.own for one in (unit.before, after, *unit.blocks) if one.own is not None]
        own = None
        if len(owns) == 2 + len(unit.blocks):
            own = (owns[0] + owns[1]) / 2 - statistics.fmean(owns[2:])
        _compare(self._noise, pair.gains, pair.weights, gain, weight)
        if own is not None and len(pair.own) == len(pair.gains):
            _compare(self._own_noise, pair.own, pair.weights, own, weight)
            pair.own.append(own)
        pair.gains.append(gain)
        pair.weights.append(weight)
        trial.gains.append(gain)
        self._last = after
        judged, noise = (own, self._own_noise) if own is not None and self.uses_own_time else (gain, self._noise)
        self._heed_surprise(trial.setting, judged, noise.cautious / weight)
        lesson = Lesson(pair.incumbent, pair.challenger, judged, noise.cautious / weight)
        self._believed().learn(lesson)
        self._lessons = self._believed().lessons
        self._state_gain()
        self.state = Choosing()
        outdone = self._studied().report(gain)
        if self._is_proven(pair):
            self._adopt(trial, pair)
        elif outdone or self._rests:
            self._keep(trial, pair)
        if self._rests and not self._is_worth_searching():
            self.state = Resting(REST_STEPS, is_idle=True)

    def _is_worth_searching(self) -> bool:
        """Whether anything is worth a unit again, after one while resting."""
        rests, self._rests = self._rests, 0
        worth = self._best() is not None
        self._rests = 0 if worth else rests
        return worth

    def _is_proven(self, pair: Pair) -> bool:
        """Whether a pair's own units are enough to adopt the challenger."""
        if len(pair.gains) < 2:
            return False
        uses_own = self.uses_own_time and len(pair.own) == len(pair.gains)
        gains, noise = (pair.own, self._own_noise) if uses_own else (pair.gains, self._noise)
        if log_evidence(gains, pair.weights, noise.cautious) <= needed_evidence(pair.order):
            return False
        mean, error = _mean(pair.gains, pair.weights, self._noise.cautious)
        return mean > error

    def _adopt(self, trial: Trial, pair: Pair) -> None:
        mean, error = _mean(pair.gains, pair.weights, self._noise.cautious)
        before = self.book.incumbent
        pair.adopted_after = len(pair.gains)
        self._end_visit(adopted=True)
        self.book.adopt(trial, Adoption(trial.number, before.number, mean, error))
        near = [one for one in neighbours(self.book.space, trial.setting) if one not in self._pool]
        if near and self.options.sampler != "none":
            self._pool = (*self._pool, *near)
            self._belief = None
        self._last, self._rests, self._pace, self._paces = None, 0, None, []
        self._state_gain()
        self._note("adopt", messages.adopted(trial, before, Gain.of_log(mean, error), len(pair.gains)), trial.number,
                   **_figures(mean, error, len(pair.gains)))  # fmt: skip

    def _keep(self, trial: Trial, pair: Pair) -> None:
        """End the visit of a setting that was not adopted; it may be visited again."""
        mean, error = _mean(pair.gains, pair.weights, self._noise.cautious)
        self._end_visit()
        reason = messages.kept(trial, self.book.incumbent, Gain.of_log(mean, error), len(pair.gains))
        self._note("keep", reason, trial.number, **_figures(mean, error, len(pair.gains)))

    def _state_gain(self) -> None:
        """What the incumbent gains over the reference, by all that is believed: free of the winner's luck."""
        book = self.book
        if not book.chain:
            book.gain = None
            return
        mean, error = self._believed().gain(book.reference, book.incumbent.setting)
        book.gain = Gain.of_log(mean, error)

    def _end_visit(self, *, adopted: bool = False) -> None:
        if self._open and self._study is not None:
            trial = self.book.trials[-1]
            trial.value = self._value(trial)
            self._study.end(trial.value, trial.setting, adopted=adopted)
            if trial.state is TrialState.PLANNED:
                trial.state = TrialState.VOID

    def _rested_for(self, steps: int) -> None:
        if not isinstance(self.state, Resting):
            return
        left, is_idle = self.state.steps - steps, self.state.is_idle
        if left > 0:
            self.state = replace(self.state, steps=left)
            return
        self._last = None
        self.state = Choosing()
        if not is_idle:
            return
        self._rests += 1
        replaced = self.book.chain[-1].replaced if self.book.chain else None
        if self._rests % 2 and replaced is not None and not self._open:
            setting = self.book.trials[replaced].setting
            self._wanted.append((setting, "start" if replaced == 0 else "reference"))

    def _heed_surprise(self, setting: Setting, gain: float, variance: float) -> None:
        """Two units in a row, while the search rests, that contradict what is believed widen the belief."""
        mean, error = self._believed().gain(self.book.incumbent.setting, setting)
        is_one = bool(self._rests) and abs(gain - mean) > _SURPRISE * math.hypot(error, math.sqrt(variance))
        self._surprises = self._surprises + 1 if is_one else 0
        if self._surprises == 2:
            self._surprises = 0
            self._doubt()
            self._note("reopen", messages.SURPRISED, self.book.incumbent.number)

    def _doubt(self) -> None:
        """Believe what is known less from here on."""
        self._lessons = doubted(self._lessons, self._believed().planner_error)
        self._belief = None
        self._pairs = [replace(one, gains=[], own=[], weights=[]) for one in self._pairs]

    # --- what does not count, or changes the rules -------------------------------------------------------------------

    def _void(self, trial: Trial, request: Request, outcome: Outcome) -> None:
        """Measure again; give up where that does not help. What was called off says nothing of that."""
        state = self.state
        self._last = None
        if isinstance(state, Resting):
            self._rested_for(outcome.step_count)
        if outcome.called_off or not isinstance(state, (Opening, Unit)):
            if isinstance(state, Unit):
                self.state = replace(state, before=None, blocks=())
            return
        if state.voids + 1 < MOST_VOIDS:
            again = replace(state, voids=state.voids + 1)
            self.state = replace(again, before=None, blocks=()) if isinstance(again, Unit) else again
            return
        reason = messages.void(trial, MOST_VOIDS, outcome.reason)
        self._note("void", reason, trial.number)
        if isinstance(state, Unit):
            challenger = self.book.trials[state.trial]
            self._end_visit()
            if not challenger.blocks:
                challenger.state, challenger.reason = TrialState.VOID, outcome.reason
            self.state = Choosing()
        elif self.options.hold:
            self.state = Resting(_HOLD_STEPS, reason)
        else:
            self.stop(reason)

    def _crashed(self, trial: Trial, request: Request, outcome: Outcome) -> None:
        if request.role in OF_INCUMBENT:
            reason = messages.incumbent_failed(trial, outcome.reason)
            self._end_visit()
            self._note("crash", reason, trial.number)
            self.state = Stopped(reason)
            return
        self._end_visit()
        self.book.crash(trial, outcome.reason)
        self._note("crash", messages.crashed(trial, outcome.reason), trial.number)
        self._last = None
        self.state = Choosing()

    def _take_tokens(self, outcome: Outcome) -> None:
        """Steps have another number of tokens: blocks of before say nothing of those to come, gains a little."""
        before, self.book.tokens = self.book.tokens, outcome.tokens
        if self.book.log_us is not None:
            self._changed(messages.other_tokens(outcome.tokens, before), tokens=outcome.tokens)

    def _changed(self, reason: str, **details: float) -> None:
        """Something was counted that changes step times: the belief is widened, nothing is forgotten."""
        self._doubt()
        self._end_visit()
        self._last, self._rests = None, 0
        self._pace, self._paces = None, []
        self._note("reopen", reason, self.book.incumbent.number, **details)
        if not isinstance(self.state, Stopped):
            self.state = Opening() if self.book.log_us is None else Choosing()

    def _take_pace(self, pace: Pace | None) -> None:
        """Ask the planner again where the machine's rates, by the bytes and times that were counted, have changed."""
        if pace is None or isinstance(self.state, Stopped):
            return
        self._paces = [*self._paces[1 - _NEWEST_PACES :], pace]
        if len(self._paces) < _NEWEST_PACES:
            return
        now = Pace.median(self._paces)
        if self._pace is None:
            self._pace = now
            return
        what = differs(self._pace, now)
        if what is None:
            return
        before = self._pace
        if self._planning is not None:
            self._planning.learn(before, now)
            self.book.predict_with(self._planning.forecast)
            self._planned = tuple(self._planning.planned())
            self._wanted += [(one, "planner") for one in self._planned[:1] if one != self.book.incumbent.setting]
        self._changed(messages.other_pace(what))
        self._forget_pool()

    def _move_to(self, setting: Setting) -> Trial:
        """Make a setting the incumbent that was not compared."""
        self._end_visit()
        trial = self.book.add(setting, "reference")
        self.book.move_to(trial)
        if setting not in self._pool:
            near = neighbours(self.book.space, setting) if self.options.sampler != "none" else []
            self._pool = tuple(dict.fromkeys([*self._pool, setting, *near])) if self._pool else ()
            self._belief = None
        self._state_gain()
        self._last, self._pace, self._paces, self._rests = None, None, [], 0
        if not isinstance(self.state, Stopped):
            self.state = Opening()
        return trial

    def _make_room(self, outcome: Outcome) -> None:
        """Raise the offload ratio at once where less memory is left free than must stay free."""
        room = None if self._is_final else self.book.roomier(outcome.device_bytes)
        if room is None:
            return
        tight = self.book.incumbent
        trial = self._move_to(room)
        self._note("memory", messages.made_room(trial, tight, outcome, self.book.device_limit_bytes), trial.number)

    def _note(self, kind: DecisionKind, reason: str, trial: int | None, **details: float | str | bool) -> None:
        figures: dict[str, Any] = {
            name: value if isinstance(value, str | bool) else float(f"{value:.6g}") for name, value in details.items()
        }
        figures["spent_s"], figures["elapsed_s"] = round(self.cost.spent_s, 3), round(self.cost.elapsed_s, 3)
        self.notes.append(Decision(kind, reason, trial, figures))

    # --- its state ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> SearchState:
        """All that it knows."""
        book, space = self.book, self.book.space
        at = {setting: index for index, setting in enumerate(self._pool)}
        return SearchState(
            movement_percent=space.movement_percent,
            movement_rate=space.movement_rate,
            state=self.state,
            trials=tuple(replace(one, gains=list(one.gains)) for one in book.trials),
            incumbent=book.incumbent_number,
            reference=book.reference_number,
            adoptions=tuple(book.adoptions),
            chain=tuple(book.chain),
            barred=tuple(BarredSetting(setting, kind) for setting, kind in book.barred.items()),
            tokens=book.tokens,
            log_us=book.log_us,
            gain=book.gain,
            pairs=tuple(
                replace(one, gains=list(one.gains), own=list(one.own), weights=list(one.weights)) for one in self._pairs
            ),
            lessons=tuple((at[one.incumbent], at[one.challenger], one.gain, one.variance) for one in self._lessons),
            pool=self._pool,
            planned=self._planned,
            noise=replace(self._noise),
            own_noise=replace(self._own_noise),
            last=self._last,
            wanted=tuple(self._wanted),
            is_open=self._open,
            measurements=self.measurements,
            rests=self._rests,
            surprises=self._surprises,
            cost=replace(self.cost, changes_s=list(self.cost.changes_s)),
            pace=self._pace,
            paces=tuple(self._paces),
        )

    def restore(self, state: SearchState, notes: Sequence[Decision] = ()) -> None:
        """Go on from a snapshot as if the search had never been interrupted; `notes` are its decisions so far."""
        book = self.book
        if book.trials[0].setting != state.trials[0].setting:
            raise ZftuneError("the run in the store began with another setting than this one: it cannot go on from it")
        if state.movement_percent is not None:
            book.space = book.space.moving(state.movement_percent, state.movement_rate)
        book.trials = [replace(one, gains=list(one.gains)) for one in state.trials]
        book.incumbent_number, book.reference_number = state.incumbent, state.reference
        book.adoptions, book.chain = list(state.adoptions), list(state.chain)
        book.barred = {**book.barred, **{one.setting: one.kind for one in state.barred}}
        book.tokens, book.log_us, book.gain = state.tokens, state.log_us, state.gain
        self._pairs = [
            replace(one, gains=list(one.gains), own=list(one.own), weights=list(one.weights)) for one in state.pairs
        ]
        self._pool, self._planned = state.pool, state.planned
        self._lessons = tuple(Lesson(self._pool[i], self._pool[j], *figures) for i, j, *figures in state.lessons)
        self._noise, self._own_noise = replace(state.noise), replace(state.own_noise)
        self._last, self._wanted = state.last, list(state.wanted)
        self.measurements, self._rests, self._surprises = state.measurements, state.rests, state.surprises
        self.cost = replace(state.cost, changes_s=list(state.cost.changes_s))
        self._pace, self._paces = state.pace, list(state.paces)
        self.state, self.notes = state.state, list(notes)
        self._belief = self._study = None
        if state.is_open:
            self._study = self._studied()
            self._study.resume(book.trials[-1])


def _compare(noise: BlockNoise, gains: Sequence[float], weights: Sequence[float], gain: float, weight: float) -> None:
    """What units of the same pair differ by is noise."""
    if gains:
        mean, _ = _mean(gains, weights, 0.0)
        noise.add(gain - mean, 1 / sum(weights) + 1 / weight)


def _mean(gains: Sequence[float], weights: Sequence[float], variance: float) -> tuple[float, float]:
    """Mean gain of units and its standard error."""
    total = sum(weights)
    mean = sum(weight * gain for weight, gain in zip(weights, gains, strict=True)) / total
    return mean, math.sqrt(variance / total)


def _figures(gain: float, error: float, units: int) -> Mapping[str, float]:
    """The data of a decision about a gain."""
    found = Gain.of_log(gain, error)
    return {"gain": found.share, "error": found.error, "units": units}
