"""The search for the fastest knobs, as a state machine: `next()` says what to measure, `tell()` takes what came of it.

It neither trains nor waits nor looks at a clock: whoever drives it does. What it does follows from its arguments and
from what it was told, so that it is rebuilt from the store's rows (see `zftune.tuner.rows`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zftune.store.types import Decision, DecisionKind, TrialState
from zftune.tuner import messages
from zftune.tuner.scores import (
    LEAST_GAIN,
    LEAST_STEPS,
    ChangePoint,
    ExplorationCost,
    Pace,
    Sample,
    differs,
    gain,
    spread,
    step_ms_of,
    steps_for,
    steps_of,
)
from zftune.tuner.space import Forecaster, Setting, Space
from zftune.tuner.states import (
    AT_S,
    COMPARED_AGAIN,
    LATE,
    OF_INCUMBENT,
    REFERENCES,
    TOKENS,
    Choosing,
    Comparing,
    Exploring,
    MeasuringBaseline,
    Outcome,
    Purpose,
    Remark,
    Request,
    Role,
    SearchOptions,
    State,
    Stopped,
    Trial,
    UnmeasuredSteps,
    WaitingForBudget,
)
from zftune.tuner.trials import CandidateQueue, TrialTable

if TYPE_CHECKING:
    from zftune.tuner.setup import Planning

__all__ = ["MOST_VOIDS", "Search", "SearchOptions"]
MOST_VOIDS = 3
_COMPARISON, _ONCE_MORE = 3, 2  # measurements; the latter of the challenger and of the incumbent
LEAST_MEASUREMENTS = 2 + _COMPARISON
"""The start, a look at another setting, and its comparison: with fewer, nothing can be found."""
_HOLD_STEPS = 200
MOST_RESTARTS = 4
"""For changed times, before a search came to its end: from there on it waits, ever longer, or ends."""
_LONGEST_HOLD = 32  # times as many steps
_MOST_TIES = 2
_PLANNED = ("planner", "preset")
_FOR_CHANGES = 0.25  # of what exploring may cost, where it may wait: the planner's choices once times change gain most
_OTHER_TIMES = 0.05  # of the step time: where the incumbent's differs by so much, what was measured is no longer true
_MOVEMENT_NOISE = 0.1  # of the bound on lateness: by so much more the incumbent may be late before another replaces it


class Search:
    """A search over a space.

    Args:
        planned: the planner's own choice, and what it would try beside it; best first.
        planning: the planner, to be asked again where times have changed; None: it is not asked again.
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
        self.state: State = MeasuringBaseline()
        self.notes: list[Decision] = []
        self.cost = ExplorationCost(self.options.cost_share, self.options.grant_s, self.options.grant_steps)
        self.measurements = 0
        """Since times changed last."""
        self.agenda = CandidateQueue(self.book, planned, self.options.sampler, self.options.seed)
        self._restarts = 0
        """How often times have changed since the search came to its end last."""
        self._misses = 0
        """Settings in a row that were tried and not adopted for their speed."""
        self._ties: set[int] = set()
        self._tied = False
        self._last_role: Role | None = None
        self._change = ChangePoint()
        self._planning = planning
        self._changed = False
        """Whether the planner is to be asked again once the incumbent was measured."""
        self._other_life = False
        """Whether what is known of the incumbent's times is of a training that has ended."""

    # --- from outside -------------------------------------------------------------------------------------------------

    def idle(self, between: UnmeasuredSteps) -> None:
        """Count steps that belong to no measurement; `tell` does so with those before an outcome."""
        step_s = self.book.incumbent_step_ms / 1e3
        self.cost.add(between.seconds, 0, None)
        self.cost.add(between.late_s, between.late_steps, step_s or None)
        if between.late_s and step_s:
            self.cost.changed(between.late_s, between.late_steps, step_s)

    def remark(self, reason: str, **about: float) -> None:
        """Write down what was found out beside the search."""
        self._note("remark", reason, None, **about)

    def remember(self, remark: Remark) -> None:
        """Write down what was found out before, where it belongs; it changes nothing."""
        self.notes.append(Decision("remark", remark.reason, None, {AT_S: remark.at_s}, remark.step, remark.at_unix_s))

    def stop(self, reason: str, *, final: bool = False, **about: str | bool) -> None:
        """End the search; the incumbent stays. `final`: it does not resume if step times change. `about` is the data of
        the sentence `reason`.
        """
        self._note("stop", reason, self.book.incumbent.number, **({"final": 1.0} if final else {}), **about)
        self.state = Stopped(reason, final=final)

    def roll_back(self, by: str, reason: str = "") -> None:
        """End the search with the incumbent before the last one; the last is barred from now on.

        `by` names the requester; `reason` is a stored sentence.
        """
        barred = self.book.roll_back()
        about = {"by": by, "barred": str(barred.setting)}
        reason = reason or messages.commanded("rollback", about)
        self._note("rollback", reason, barred.number, pinned=float(self.book.incumbent.number), **about)
        self.state = Stopped(reason, final=True)

    def guard(self, reason: str) -> None:
        """End the search because training goes wrong: the starting point's knobs are the incumbent again."""
        self.book.restore_start()
        self._note("guard", reason, self.book.incumbent.number)
        self.state = Stopped(reason, final=True)

    def left(self) -> tuple[int, int]:
        """How many measurements are still made where nothing faster turns up, and where all that are allowed are made.

        The first follows from the patience, from the settings that there are, and from what exploring has cost so far.
        """
        options, book = self.options, self.book
        most = max(0, options.most_measurements - self.measurements)
        if isinstance(self.state, Stopped):
            return 0, 0
        measured = sum(bool(trial.samples) for trial in book.trials[1:])
        settings = math.prod(len(one.choices) for one in book.space.dimensions) - 1 - measured
        each = max(1.0, (self.measurements - 1) / max(1, measured))
        usual = each * max(0, min(options.patience - self._misses, settings))
        if not options.hold and self.cost.spent_s > 0:
            usual = min(usual, self.measurements * max(0.0, self.cost.left_s) / self.cost.spent_s)
        return min(most, math.ceil(usual)), most

    # --- what next ---------------------------------------------------------------------------------------------------

    def next(self) -> Request | None:
        """What to measure next; the same until it was told what came of it. None: the search is over."""
        if isinstance(self.state, Choosing):
            self.state = self._choose()
        book, state = self.book, self.state
        if isinstance(state, MeasuringBaseline):
            steps = LEAST_STEPS if state.then is None else state.then.steps
            return self._request(book.incumbent, "start", steps_of(book.incumbent.setting.update_interval, steps))
        if isinstance(state, Exploring):
            trial = book.trials[state.trial]
            return self._request(trial, "explore", steps_of(trial.setting.update_interval))
        if isinstance(state, Comparing):
            trial = book.trials[state.trial] if state.role == "b" else book.incumbent
            return self._request(trial, state.role, steps_of(trial.setting.update_interval, state.steps))
        if isinstance(state, WaitingForBudget):
            return self._request(book.incumbent, "hold", steps_of(book.incumbent.setting.update_interval, state.steps))
        if self.options.watch and not (isinstance(state, Stopped) and state.final):
            return self._request(book.incumbent, "hold", steps_of(book.incumbent.setting.update_interval, _HOLD_STEPS))
        return None

    def _request(self, trial: Trial, role: Role, steps: int) -> Request:
        window = trial.setting.update_interval
        step_ms = self.book.incumbent_step_ms
        if role in OF_INCUMBENT:
            usual_ms = step_ms if role == "hold" and step_ms else None
            return Request(trial.setting, role, trial.number, window, steps, usual_ms)
        left_s = self.cost.left_s - self.cost.change_s  # the way back costs, too
        return Request(trial.setting, role, trial.number, window, steps, step_ms, left_s)

    def _enough(self) -> str | None:
        """Why no other setting is looked at, whichever are left; None: one may be."""
        if self.measurements + 1 + _COMPARISON > self.options.most_measurements:
            return messages.enough(self.measurements, self.options.most_measurements, 1 + _COMPARISON)
        return messages.patience(self._misses) if self._misses >= self.options.patience else None

    def _choose(self) -> State:
        if enough := self._enough():
            return self._settle(enough)
        trial = self.agenda.planned() or self.book.reference_again(self._missing_s) or self.agenda.searched()
        if trial is None:
            return self._settle(messages.none_left(self.book.space.fixed_because))
        return self._affordable(trial)

    def _affordable(self, trial: Trial) -> State:
        """Exploring a trial, or what to do instead where that might cost too much."""
        step_s, missing_s = self.book.incumbent_step_ms / 1e3, self._missing_s(trial)
        if missing_s <= 0:
            return Exploring(trial.number)
        reason = messages.spent(self.cost, self._kept)
        if not self.options.hold:
            return self._settle(reason)
        steps = min(_HOLD_STEPS, max(1, round(missing_s / self.cost.share / step_s)))
        self._note("hold", reason, None)
        return WaitingForBudget(steps)

    def _missing_s(self, trial: Trial) -> float:
        """What exploring a trial may cost beyond what is left."""
        step_s, window = self.book.incumbent_step_ms / 1e3, trial.setting.update_interval
        steps = window + steps_of(window)
        slower_s = step_s * steps * (self.book.relative(trial.setting) - 1.0)
        needed_s = max(step_s, slower_s) + 4 * self.cost.change_s  # a step is lost in any case
        keeps = self._kept and trial.source not in _PLANNED  # what is allowed may be infinite
        return needed_s + (self._kept * self.cost.allowed_s if keeps else 0.0) - self.cost.left_s

    @property
    def _kept(self) -> float:
        """Share of what exploring may cost that is not for what the sampler proposes."""
        return _FOR_CHANGES if self.options.hold else 0.0

    def _settle(self, reason: str) -> State:
        """Stop, once no setting that is as fast as the incumbent and better otherwise is left to be compared."""
        room = self.measurements + _COMPARISON <= self.options.most_measurements
        tie = self.book.tie(self._ties) if room and len(self._ties) < _MOST_TIES and not self._tied else None
        if tie is not None:
            self._ties.add(tie.number)
            return self._comparing(tie, "tie")
        self._restarts = 0
        self.stop(reason)
        return self.state

    def _comparing(self, trial: Trial, purpose: Purpose) -> Comparing:
        steps = steps_for(spread(self.book.incumbent.samples), trial.setting.update_interval)
        return Comparing(trial.number, purpose, steps)

    def resume_choice(self, trial: int, role: str, stopped: str | None = None) -> None:
        """Take the choice of a trial from the store's rows without repeating it.

        `stopped`: why the search had ended and only watched step times; None: it had not.
        """
        ended = stopped or self._enough() if role == "hold" else ""
        if role == "explore":
            self.state = Exploring(trial)
        elif ended is None:
            self._note("hold", messages.spent(self.cost, self._kept), None)
            self.state = WaitingForBudget(1)
        else:
            self.state = self._settle(ended)

    def begin_again(self) -> None:
        """Training was ended and goes on: the incumbent is measured once more before anything is compared with it."""
        state = self.state
        self._restarts = 0  # what made times unsteady may have ended with the process before
        if isinstance(state, Stopped):
            return
        then = state.then if isinstance(state, MeasuringBaseline) else state if isinstance(state, Comparing) else None
        then = None if then is None else replace(then, before=(), after=(), voids=0)
        self.state = MeasuringBaseline(again=bool(self.book.incumbent.samples), then=then)
        self._other_life = True
        self._note("resume", messages.resumed(self.measurements), None)

    def go_on_with(self, trial: Trial, reason: str, **about: float) -> None:
        """Make a trial of the book whose updates come earlier the incumbent.

        `about` has `LIFE`, where no measurement tells of it, and `LATE`, where what comes later is to be tried again.
        """
        trial.pace = self.book.incumbent.pace
        self.book.go_back_to(trial)
        self._note("movement", reason, trial.number, **about)
        if LATE in about:
            self.agenda.try_again(self.book.trials[int(about[LATE])].setting)
        if not (isinstance(self.state, Stopped) and self.state.final):
            self._changed_times("With earlier updates the search begins again.")

    def bound(self, **about: float) -> bool:
        """Keep to what may be late by how far the weights move; whether updates had to come earlier for that."""
        late = self.book.incumbent
        violation = self.book.space.violation(late.setting)
        if violation is None or violation.excess <= _MOVEMENT_NOISE:
            return False
        trial = self.book.trial_of(self.book.space.earlier(late.setting))
        self.go_on_with(trial, messages.made_earlier(trial, late, violation.reason), **about)
        return True

    # --- what came of it ---------------------------------------------------------------------------------------------

    def tell(self, outcome: Outcome) -> None:
        """Take what came of the last request."""
        request = self.next()
        if request is None:
            raise RuntimeError("the search is over: nothing was asked for")
        self.idle(outcome.between)
        before_s = (outcome.before_ms or self.book.incumbent_step_ms) / 1e3
        self.cost.add(outcome.seconds, outcome.step_count, None if request.role in OF_INCUMBENT else before_s)
        trial = self.book.trials[request.trial]
        if outcome.movement_percent is not None:
            self.book.space = self.book.space.moving(outcome.movement_percent, outcome.movement_rate)
        if self._counts_anew(outcome):
            self._changed_times(messages.other_tokens(outcome.tokens, self.book.tokens), **{TOKENS: outcome.tokens})
            self.book.tokens = outcome.tokens
        elif request.role == "hold":
            self._held(request, outcome)
        elif outcome.status == "void":
            self._void(trial, outcome)
        elif outcome.status == "measured":
            self.measurements += not (isinstance(self.state, MeasuringBaseline) and self.state.again)
            self._measured(trial, request, outcome)
        else:
            self.measurements += outcome.status == "aborted"
            self._failed(trial, request, outcome)
        if outcome.status != "void":
            self._last_role = request.role
        if request.role in OF_INCUMBENT and outcome.status != "crashed" and not outcome.called_off:
            self._make_room(request, outcome)  # also where times do not count: the peak does
        if outcome.movement_percent is not None:
            self._heed_movement(request, outcome)

    def _counts_anew(self, outcome: Outcome) -> bool:
        """Whether steps have another number of tokens than before; what was called off or crashed does not know."""
        knows = outcome.status != "crashed" and not outcome.called_off
        return knows and bool(self.book.incumbent.samples) and outcome.tokens != self.book.tokens

    def _make_room(self, request: Request, outcome: Outcome) -> None:
        """Raise the offload ratio at once where less memory is left free than must stay free."""
        room = None if isinstance(self.state, Stopped) and self.state.final else self.book.roomier(outcome.device_bytes)
        if room is None:
            return
        tight, trial = self.book.incumbent, self.book.move_to(room)
        # What the machine does now was learnt just before, or is still to be learnt, by the pace before.
        trial.pace = None if request.role == "start" and outcome.status == "measured" else tight.pace
        self._note("memory", messages.made_room(trial, tight, outcome, self.book.device_limit_bytes), trial.number)
        self._changed_times("With another share of the state offloaded the search begins again.")

    def _heed_movement(self, request: Request, outcome: Outcome) -> None:
        """Bound what may be late from here on; a search that was ended for good stays as it is."""
        moved = not (isinstance(self.state, Stopped) and self.state.final) and self.bound()
        if moved and request.role == "start" and outcome.status == "measured":
            self.book.incumbent.pace = None  # what the machine does now was learnt just before

    def _measured(self, trial: Trial, request: Request, outcome: Outcome) -> None:
        earlier, pace = list(trial.samples), trial.pace
        sample = self.book.keep(trial, outcome)
        if self._other_life and request.role in OF_INCUMBENT:  # two trainings, such as beside other work, are not one
            trial.samples, self._other_life = [sample], False
        if request.role in ("a1", "a2") and differs(earlier, sample, seed=self.options.seed):
            trial.pace = pace  # of the times before
            self._changed_times("The best settings so far take another time than before: the search begins again.")
            self.state = self._after_restart(self.state)
        elif isinstance(self.state, MeasuringBaseline):
            self._opened(trial, earlier, sample, self.state)
            self._ask_planner(pace, outcome.pace)
        elif isinstance(self.state, Exploring):
            self._explored(trial, sample, outcome)
        elif isinstance(self.state, Comparing):
            state = self.state
            before = state.before if request.role == "b" else (*state.before, sample)
            after = (*state.after, sample) if request.role == "b" else state.after
            self.state = replace(state, voids=0, before=before, after=after)
            if len(self.state.before) > max(1, len(self.state.after)):
                self._compared(self.state)

    def _opened(self, trial: Trial, before: list[Sample], sample: Sample, state: MeasuringBaseline) -> None:
        if not state.again or not before:
            self._note("start", messages.start(trial, self.book.incumbent_step_ms), trial.number)
            self.cost.begin(self.book.incumbent_step_ms / 1e3)
            self.state = Choosing()
            return
        found = gain(before, [sample], seed=self.options.seed)
        if abs(found.share) > max(_OTHER_TIMES, 2 * found.error):
            self.reopen(messages.other_times(found), trial)
            self._changed = True
            trial.samples = [sample]
            self.state = self._after_restart(Choosing())
        else:
            self.state = Choosing() if state.then is None else replace(state.then, before=(sample,))

    def _ask_planner(self, before: Pace | None, now: Pace | None) -> None:
        """Once the incumbent was measured in other times: what they say of the machine, and what is best on it."""
        changed, self._changed = self._changed, False
        if self._planning is None or not changed:
            return
        if now is not None:
            self._planning.learn(before, now)
            self.book.predict_with(self._planning.forecast)
        self.agenda.plan_again(self._planning.planned)

    def _explored(self, trial: Trial, sample: Sample, outcome: Outcome) -> None:
        """Reject after one look what is not faster than the incumbent was, neither when measured nor just before."""
        incumbent = self.book.incumbent
        seen = gain(incumbent.samples, [sample], seed=self.options.seed)
        step_ms = step_ms_of(outcome.steps_ms, trial.setting.update_interval)
        now = None if step_ms is None or outcome.before_ms is None else 1.0 - step_ms / outcome.before_ms
        if trial.source not in REFERENCES and seen.share < LEAST_GAIN and (now is None or now < LEAST_GAIN):
            self._misses += 1
            self._note("keep", messages.slower(trial, incumbent, seen), trial.number, gain=seen.share)
            self.state = Choosing()
            return
        self.state = self._comparing(trial, "gain")
        if trial.source in (*_PLANNED, *REFERENCES) and self._last_role == "start":
            # Nobody picked it for its time here, and the incumbent was measured before: the first two are there.
            self.state = replace(self.state, before=tuple(incumbent.samples[-1:]), after=(sample,))

    def _compared(self, done: Comparing) -> None:
        """Adopt or keep after incumbent, challenger, incumbent; measure once more where other work hides a gain."""
        trial, incumbent, seed = self.book.trials[done.trial], self.book.incumbent, self.options.seed
        steps_alone = gain(done.before, done.after, seed=seed)
        found = gain(done.before, done.after, seed=seed, repeats=(done.before, trial.samples))
        against_each = [gain([one], done.after, seed=seed).share for one in done.before]
        hidden = steps_alone.holds and not found.holds
        once = found.holds and len(trial.samples) == 1  # nothing says yet how far measurements of it differ
        room = self.measurements + _ONCE_MORE <= self.options.most_measurements
        room = room and self.cost.left_s > 2 * self.cost.change_s
        if done.purpose == "gain" and (hidden or once) and min(against_each) > 0 and len(done.before) == 2 and room:
            return
        if done.purpose == "tie":
            adopted = -found.share + found.error <= LEAST_GAIN
            reason = messages.tied(trial, incumbent, found, adopted=adopted)
        else:
            adopted = found.holds and min(against_each) > 0
            reason = messages.compared(trial, incumbent, found, adopted=adopted, hidden=hidden)
        kind: DecisionKind = "adopt" if adopted else "keep"
        anew = {COMPARED_AGAIN: 1.0} if not adopted and self.book.compared_again(trial, found) else {}
        self._note(kind, reason, trial.number, gain=found.share, error=found.error, needed=found.needed, **anew)
        if done.purpose == "gain" and not anew:  # a tie's setting was tried, and counted, before
            self._misses = 0 if adopted else self._misses + 1
        if adopted:
            self._tied = done.purpose == "tie"
            self.book.adopt(trial, found, done.after)
        self.state = Choosing()

    def _void(self, trial: Trial, outcome: Outcome) -> None:
        """Measure again; give up where that does not help. What was called off says nothing of that."""
        state = self.state
        if outcome.called_off or not isinstance(state, (MeasuringBaseline, Exploring, Comparing)):
            return
        if state.voids + 1 < MOST_VOIDS:
            again = self._affordable(trial) if isinstance(state, Exploring) else state
            self.state = replace(again, voids=state.voids + 1) if isinstance(again, type(state)) else again
            return
        challenger = trial if isinstance(state, MeasuringBaseline) else self.book.trials[state.trial]
        reason = messages.void(trial, challenger, MOST_VOIDS, outcome.reason)
        self._note("void", reason, challenger.number)
        if isinstance(state, MeasuringBaseline):  # the incumbent cannot be measured: later, where the search may wait
            if self.options.hold:
                self.state = WaitingForBudget(_HOLD_STEPS)
            else:
                self.stop(reason)
            return
        if not challenger.samples:
            challenger.state, challenger.reason = TrialState.VOID, outcome.reason
        self._misses += 1
        self.state = Choosing()

    def _failed(self, trial: Trial, request: Request, outcome: Outcome) -> None:
        """Aborted or crashed."""
        if request.role in OF_INCUMBENT:
            reason = messages.incumbent_failed(trial, outcome.reason)
            self._note("crash", reason, trial.number)
            self.state = Stopped(reason)
            return
        crashed = outcome.status == "crashed"
        if crashed:
            self.book.crash(trial, outcome.reason)
        else:
            self.book.abort(trial, outcome)
        reason = messages.failed(trial, self.book.incumbent, outcome)
        self._note("crash" if crashed else "abort", reason, trial.number)
        self._misses += 1
        # That may be the times' fault, unless the incumbent was measured just before: it is looked at again.
        again = outcome.status == "aborted" and self._last_role == request.role == "explore"
        self.state = MeasuringBaseline(again=True) if again else Choosing()

    def _held(self, request: Request, outcome: Outcome) -> None:
        known = bool(self.book.incumbent.samples)
        if isinstance(self.state, WaitingForBudget) and (not known or self._other_life):
            self.state = MeasuringBaseline(again=known)
        if outcome.status == "void" or not known:
            return
        changed = self._change.add_all(outcome.steps_ms, request.setting.update_interval)
        if changed or outcome.status == "aborted":  # by what is usual: see `Request.abort_reason`
            waited = self._restarts >= MOST_RESTARTS and isinstance(self.state, WaitingForBudget)
            what = " while the search waited." if waited else ": the search begins again."
            self._changed_times(f"Step times have changed{what}")
            self.state = self._after_restart(self.state)
        elif isinstance(self.state, WaitingForBudget):
            self.state = Choosing()

    def _changed_times(self, reason: str, **details: float) -> None:
        """Begin again, with the incumbent's measurement."""
        self._changed = True
        self.reopen(reason, self.book.incumbent, **details)
        self.state = MeasuringBaseline()

    def _after_restart(self, state: State) -> State:
        """Begin again for changed times, unless that came to nothing too often: then wait first, or end."""
        self._restarts += 1
        if self._restarts < MOST_RESTARTS:
            return state
        reason = messages.unsteady(self._restarts, waits=self.options.hold)
        if not self.options.hold:
            self.stop(reason)
            return self.state
        steps = _HOLD_STEPS * min(_LONGEST_HOLD, 2 ** (self._restarts - MOST_RESTARTS))
        if self._restarts == MOST_RESTARTS:
            self.remark(reason)
        self._note("hold", messages.waits(steps), None)
        return WaitingForBudget(steps)

    def reopen(self, reason: str, incumbent: Trial, **details: float) -> None:
        """Forget what was measured under other circumstances."""
        self.book.forget()
        self._change.reset()
        self.measurements = self._misses = 0
        self._ties.clear()
        self._tied = self._other_life = False
        self._note("reopen", reason, incumbent.number, **details)

    def _note(self, kind: DecisionKind, reason: str, trial: int | None, **details: float | str) -> None:
        figures: dict[str, Any] = {
            name: value if isinstance(value, str | bool) else float(f"{value:.6g}") for name, value in details.items()
        }
        figures["spent_s"], figures["elapsed_s"] = round(self.cost.spent_s, 3), round(self.cost.elapsed_s, 3)
        self.notes.append(Decision(kind, reason, trial, figures))
