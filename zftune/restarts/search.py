"""The search over restarts: each thing that it asks for is a run of the command of its own."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zftune.errors import BadInputError, ProfileError, noting
from zftune.profile.command.records import Rank
from zftune.restarts.process import Asked, Ended, Interrupts, Plan, ProcessTrial
from zftune.restarts.upstream import Upstream, refuse_early, seeds, space_for
from zftune.store.account import Count
from zftune.store.types import Model
from zftune.text import time_left
from zftune.tuner import messages
from zftune.tuner.guard import LossGuard
from zftune.tuner.recording import Recording, RunFacts
from zftune.tuner.scores import MOST_STEPS, steps_of
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.setup import NoForecast, SearchRequest, begin
from zftune.tuner.space import Setting, Space
from zftune.tuner.states import Outcome, Request, Stopped

if TYPE_CHECKING:
    from zftune.restarts.document import OnProgress, RestartOptions
    from zftune.store.store import Store
    from zftune.tuner.recorder import StoreRecorder


@dataclass(frozen=True, slots=True)
class Length:
    """Whole windows from a boundary on; the first one, and what is slow in the beginning, does not count.

    Args:
        upstream: says how long its own warm-up is.
        warm_up: first steps that do not count, at least.
        steps: that count, at least.
    """

    upstream: Upstream
    warm_up: int
    steps: int

    def first(self, setting: Setting) -> int:
        """Number of the first step that counts, from 0."""
        window, begin = setting.update_interval, self.upstream.warm_up(setting)
        least = max(self.warm_up, begin + window, 1)
        return begin + window * -(-(least - begin) // window)

    def counted(self, setting: Setting, steps: int) -> int:
        """Steps that count where a search asks for so many."""
        return steps_of(setting.update_interval, max(steps, self.steps))

    def needed(self, setting: Setting, steps: int) -> int:
        """Steps of a whole run for it."""
        return self.first(setting) + self.counted(setting, steps)

    def most(self, space: Space, start: Setting) -> int:
        """Steps of a run that are enough for every measurement of a search."""
        return max(self.needed(setting, MOST_STEPS) for setting in (start, *space.settings()))


def too_short(length: Length, request: Request, taken: int, most: int) -> str:
    """What a run that ended too early means, without a subject.

    Args:
        length: of the runs.
        request: what it was to measure.
        taken: steps that it made.
        most: steps that are always enough.
    """
    setting = request.setting
    fewer = length.first(setting) + steps_of(setting.update_interval, request.steps)
    smaller = f", or --trial-steps {request.steps}" if fewer <= taken else ""
    return (
        f"ended by itself after {taken} steps, {length.needed(setting, request.steps)} are needed to measure "
        f"{setting}; give it a training of {most} steps or more, which is always enough{smaller}"
    )


_TRIES = 3
SAME_CRASHES = 3
"""Settings that may crash in a row for the same reason before any has run."""
_UNLIMITED = float("inf")


class _RefusedError(Exception):
    """The store takes no more: the setting must not be applied."""


@dataclass(slots=True)
class Restarts:
    """One `zftune tune --restartable`.

    Args:
        argv: the command.
        options: what was asked for.
        store: where it is written down.
        on_progress: told what goes on.
        interrupts: looked at all the time.
        clock: seconds; the search takes what passes on it.
    """

    argv: Sequence[str]
    options: RestartOptions
    store: Store
    on_progress: OnProgress
    interrupts: Interrupts
    clock: Callable[[], float] = time.monotonic
    upstream: Upstream | None = None
    ranks: Sequence[Rank] = ()
    """Of the first run: what is trained."""
    search: Search | None = None
    notices: list[str] = field(default_factory=list)
    runs: int = 0
    """Of the command."""
    steps: int = 0
    """Of all of them."""
    interrupted: bool = False
    too_short: str | None = None
    """Why the command's runs are too short to be measured, a sentence without a full stop; None: they are not."""
    rows: Store = field(init=False)
    """Where the search is: the store, or one in memory where what trains has no name to be found by."""
    _recording: Recording | None = None
    _recorder: StoreRecorder | None = None
    crashed: str | None = None
    """Why every setting crashes though the command runs as it is, without a full stop; None: that is not so."""
    _began_s: float = field(init=False)
    _asked: Request | None = None
    """What the first run is for, once it is known."""
    _longest: int = 0
    """Steps that a run made before it was ended from here."""

    _crashes: list[str] = field(default_factory=list)
    """Reasons of the settings that were tried last, which all crashed for the same one."""

    def __post_init__(self) -> None:
        self.rows = self.store
        self._began_s = self.clock()

    @property
    def took_s(self) -> float:
        """Since the first start of the command, in this process."""
        return self.clock() - self._began_s

    def _count(self) -> Count:
        """Nothing is trained for the user: all time is spent."""
        return Count(steps=self.steps, seconds=self.took_s, spent_s=self.took_s, runs=self.runs)

    def run(self) -> None:
        """Search until it is over, or until the user has had enough.

        Raises:
            BadInputError: something is not allowed, nothing is tunable, or no run was long enough to be measured.
            ProfileError: the command cannot be tuned; says why.
        """
        try:
            self._first()
            while self.search is not None and not self.interrupted and not (self.too_short or self.crashed):
                request = self._next()
                if request is None:
                    break
                self._carry_out(request)
        finally:
            self._finish()
        if self.too_short is not None and not any(trial.samples for trial in self._searched().book.trials):
            raise BadInputError(self.too_short)

    # --- the first run: what is there to be tuned --------------------------------------------------------------------

    def _first(self) -> None:
        """Run the command as it is: its ds_config says what can be tuned, and its steps are what to beat."""
        for _ in range(_TRIES):
            self.on_progress("running the command as it is", None)
            ended = self._run(None, self._vet, self._begin)
            if ended.status != "busy":
                break
        if ended.status == "interrupted":
            self.interrupted = True
        elif ended.status != "looked":
            outcome = self._outcome(ended)
            if self._asked is not None and ended.taken:
                self._end_short(self._asked, ended)
                return
            if outcome.status != "measured" or self._asked is None:
                raise ProfileError(f"the command cannot be tuned as it is: {outcome.reason}")
            self._tell(self._asked, outcome)

    def _vet(self, asked: Asked) -> None:
        upstream = Upstream(asked.config, asked.version)
        refuse_early(upstream, self.options.quality)
        if upstream.start().overlap_step and upstream.warm_up(upstream.start()) < 1:
            self.notices.append(
                "zero_optimization.zenflow.full_warm_up_rounds is 0: upstream's overlapped updates are then two "
                "windows late; what is found here has it at a whole window."
            )
        self.upstream = upstream

    def _begin(self, ranks: Sequence[Rank]) -> Plan | None:
        """All ranks train: make the search, or take up an earlier one."""
        assert self.upstream is not None
        self.ranks = ranks
        engine = _engine(ranks)
        space = space_for(
            self.upstream,
            self.options.quality,
            has_loss=bool(ranks[0].trial.get("has_loss")),
            has_scheduler=bool(engine["has_scheduler"]),
            sub_groups=int(engine["sub_groups"]),
        )
        start = self.upstream.start()
        start = start if space.violation(start) is None else space.base
        self._recording = self._make_recording(ranks, space.quality)
        self._make_search(space, start)
        self._asked = request = self._next()
        if request is None or request.setting != self.upstream.start():
            return None  # a look was enough
        self._before(request)
        return self._plan(request, ranks)

    def _make_search(self, space: Space, start: Setting) -> None:
        """A new search, or one that is where an earlier run of this command was when it ended."""
        recording, asked = self._recording, self.options
        options = SearchOptions(
            seed=asked.seed,
            sampler=asked.sampler,
            most_measurements=asked.most_measurements,
            patience=asked.patience,
            cost_share=1.0,
            grant_s=_UNLIMITED,
        )

        begun = begin(
            recording,
            SearchRequest(
                own=start, space=space, options=options, fresh=asked.fresh, presets=False, crash_ends_training=False
            ),
            lambda start, options: Search(
                space, start, NoForecast(1.0, start, has_memory=False), seeds(space), options
            ),
        )
        self.search, self._recorder = begun.search, begun.recorder
        if self._recorder is not None:
            self._recorder.predicts = False  # nobody predicts upstream's times
            self._recorder.follow(self._count)
        crashed = len({one.setting for one in self.search.options.barred if one.kind == "crash"})
        for sentence in (begun.sentence, messages.crashed_before(crashed)):
            if sentence:
                self.notices.append(sentence)
                self.on_progress(sentence, self.search)

    @property
    def run_id(self) -> str | None:
        """In the store; None: it is not there."""
        return None if self._recorder is None else self._recorder.run_id

    def _make_recording(self, ranks: Sequence[Rank], quality: Any) -> Recording:
        model, engine = ranks[0].model, _engine(ranks)
        if "model_id" not in model:
            from zftune.store import open_store

            reason = ranks[0].missing.get("fingerprint.model_id", "it is not known what is trained")
            self.notices.append(f"Nothing is kept in the store: {reason}.")
            self.rows = open_store("sqlite://")
            self.rows.notices.clear()  # nobody asked for it
        facts = RunFacts(
            model=Model(
                model_id=model.get("model_id", "unknown"),
                name=model.get("model"),
                parameters=model.get("parameters"),
                trainable=model.get("trainable"),
                dtype=model.get("dtype"),
            ),
            micro_batch=int(model.get("micro_batch") or engine["micro_batch"]),
            sequence=int(model.get("sequence") or 1),
            backend="deepspeed",
            stage=int(engine["stage"]),
            world_size=int(ranks[0].header["world_size"]),
            checkpointing=bool(model.get("checkpointing")),
        )
        recording = Recording(self.rows, facts, quality)
        recording.elapsed_s = self.took_s
        return recording

    # --- every other run ---------------------------------------------------------------------------------------------

    def _next(self) -> Request | None:
        search = self._searched()
        known = len(search.book.trials)
        request = search.next()
        for trial in search.book.trials[known:]:
            trial.forecast = None
        if request is not None and self.runs >= self.options.most_measurements:
            # Crashes are no measurements, and where times change the search counts anew: runs are what was promised.
            search.stop(messages.enough_runs(self.runs))
            return None
        return request

    def _carry_out(self, request: Request) -> None:
        search, upstream = self._searched(), self.upstream
        assert upstream is not None
        self.on_progress(f"{self._so_far(search)}: {request.setting}", search)
        applied: list[bool] = []

        def asked(_: Asked) -> None:
            self._before(request)
            applied.append(True)

        knobs = None if request.setting == upstream.start() else upstream.knobs(request.setting)
        try:
            ended = self._run(knobs, asked, lambda ranks: self._plan(request, ranks))
        except _RefusedError as error:
            search.stop(str(error))
            return
        if ended.status == "interrupted":
            self.interrupted = True
            return
        outcome = self._outcome(ended)
        if ended.status == "short" and ended.taken >= self._longest:  # else it is the setting that ends it
            self._end_short(request, ended)
            return
        if not applied:  # it never came to these knobs
            try:
                self._before(request)
            except _RefusedError as error:
                search.stop(str(error))
                return
            outcome = Outcome("void", reason=outcome.reason)
        self._tell(request, outcome)
        self._end_crashing(search, ended)

    def _so_far(self, search: Search) -> str:
        """How far it is: runs, the best so far, and about how long it takes."""
        most = self.options.most_measurements
        run_s = self.took_s / self.runs
        left = time_left(run_s * min(search.left()[0], most - self.runs), run_s * (most - self.runs))
        step_ms = search.book.incumbent_step_ms
        best = f", best so far {step_ms:.1f} ms: {search.book.incumbent.setting}" if step_ms else ""
        return f"run {self.runs + 1} of at most {most}{best}; {left}; trying"

    def _end_short(self, request: Request, ended: Ended) -> None:
        """End the search for now: later runs would be as short. The run stays there to be gone on with."""
        search = self._searched()
        most = self._length.most(search.book.space, search.book.trials[0].setting)
        what = f"run {self.runs} {too_short(self._length, request, ended.taken, most)}"
        if self._recorder is not None and search.measurements:
            what += " (given again, the search goes on from here)"
        self.too_short = f"command: {what}"
        search.stop(f"The search is not over: {what}.")

    def _end_crashing(self, search: Search, ended: Ended) -> None:
        """End the search where no setting has run, and several in a row crashed for what is not their own matter."""
        ran = any(trial.samples for trial in search.book.trials[1:])
        same = bool(self._crashes) and _cause(self._crashes[0]) == _cause(ended.reason)
        self._crashes = [*(self._crashes if same else ()), ended.reason]
        if ended.status != "crashed" or ran or ended.is_out_of_memory:
            self._crashes = []
        if len(self._crashes) == SAME_CRASHES:
            what = f"{SAME_CRASHES} settings in a row crashed for the same reason, while it runs as it is"
            self.crashed = f"the command cannot be tuned here: {what}: {ended.reason}"
            search.stop(f"The search ends: {what}.".replace(" it runs", " the command runs"))

    @property
    def _length(self) -> Length:
        assert self.upstream is not None
        return Length(self.upstream, self.options.warm_up, self.options.steps)

    def _before(self, request: Request) -> None:
        refused = None if self._recorder is None else self._recorder.before(self._searched(), request)
        if refused is not None:
            raise _RefusedError(refused)

    def _plan(self, request: Request, ranks: Sequence[Rank]) -> Plan:
        self._check_engine(request.setting, ranks)
        length, setting = self._length, request.setting
        return Plan(length.first(setting), length.counted(setting, request.steps), request.abort_reason)

    def _check_engine(self, setting: Setting, ranks: Sequence[Rank]) -> None:
        """Whether the engine runs with what was asked for: somebody may have changed it on the way."""
        assert self.upstream is not None
        if setting == self.upstream.start():
            return
        wanted: Mapping[str, Any] = self.upstream.applied(setting)[0]["zero_optimization"].get("zenflow") or {}
        found = _engine(ranks)["zenflow"] or {}
        for name in found:
            if name in wanted and found[name] != wanted[name]:
                raise ProfileError(
                    f"the engine runs with {name} {found[name]} instead of the {wanted[name]} of the trial: something "
                    "in the script changes it"
                )

    def _run(
        self,
        knobs: Mapping[str, Any] | None,
        asked: Callable[[Asked], None],
        plan: Callable[[Sequence[Rank]], Plan | None],
    ) -> Ended:
        assert knobs is None or self.upstream is not None
        self.runs += 1
        path = self.store.path
        trial = ProcessTrial(
            self.argv,
            knobs,
            0 if self.upstream is None else self.upstream.stage,
            self.interrupts,
            asked,
            plan,
            self.options.timeout_s,
            left_out=() if path is None else (path,),
        )
        ended = trial.run()
        made = len(ended.discarded_ms) + len(ended.steps_ms)
        self.steps += made
        self._longest = max(self._longest, made + 1 if ended.status in ("measured", "aborted") else 0)
        if ended.wrote and not any("in the working directory changed" in notice for notice in self.notices):
            self.notices.append(
                f"'{ended.wrote[0]}' in the working directory changed while a trial ran: where the command did that, "
                "by an absolute path, its outputs are not kept from there."
            )
        return ended

    def _outcome(self, ended: Ended) -> Outcome:
        figures: dict[str, Any] = {
            "steps_ms": ended.steps_ms,
            "discarded_ms": ended.discarded_ms,
            "tokens": int(self.ranks[0].model.get("tokens_per_step") or 1) if self.ranks else 1,
            "device_bytes": ended.device_bytes,
        }
        guard = LossGuard()
        wrong = next((reason for loss in ended.losses if (reason := guard.add(loss)) is not None), None)
        if wrong is not None and ended.status in ("measured", "aborted"):
            return Outcome("crashed", reason=f"the training goes wrong: {wrong}", **figures)
        if ended.status in ("busy", "short"):
            return Outcome("void", reason=ended.reason, **figures)
        if ended.status == "aborted":
            return Outcome("aborted", reason=ended.reason, **figures)
        if ended.status == "crashed":
            return Outcome("crashed", reason=ended.reason, **figures)
        return Outcome("measured", **figures)

    def _tell(self, request: Request, outcome: Outcome) -> None:
        search = self._searched()
        search.tell(outcome)
        if self._recorder is not None:
            self._recorder.after(search, request, outcome)
        self.on_progress("", search)

    def _finish(self) -> None:
        if self.search is not None and self.interrupted:
            self.search.stop("Interrupted.", interrupted=True)
        if self._recording is not None and self.search is not None:
            unfinished = self.interrupted or self.too_short is not None or not _is_over(self.search)
            with noting(self.notices):
                self._recording.finish(self.search, unfinished=unfinished)
            self.notices += self._recording.notices

    def _searched(self) -> Search:
        assert self.search is not None
        return self.search


def _cause(reason: str) -> str:
    """A reason without its figures: process ids and addresses differ from run to run."""
    return re.sub(r"\d+", "#", reason)


def _is_over(search: Search) -> bool:
    return isinstance(search.state, Stopped)


def _engine(ranks: Sequence[Rank]) -> Mapping[str, Any]:
    """What the engine of the first rank runs with.

    Raises:
        ProfileError: it did not tell.
    """
    found = ranks[0].model.get("deepspeed")
    if not isinstance(found, dict):
        raise ProfileError("the steps are not those of an engine of a DeepSpeed that is known: nothing can be tuned")
    return found
