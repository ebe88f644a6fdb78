"""A tuned run in the store: written while it goes on, resumed, proven as a preset. No training fails because of it."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from zftune.errors import StoreError, ZftuneError, noting
from zftune.store import types
from zftune.store.account import Account, Count, Heart
from zftune.tuner import states
from zftune.tuner.curve import CurveBuilder
from zftune.tuner.evidence import BLOCK_STEPS, block_value
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.space import Setting, Space

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import TypeAdapter
    from torch import dtype, nn

    from zftune.store.store import Store

PATIENCE_S = 30.0
"""For so long a search waits for a database server that is away; its training does not."""
_LEASE_SPARE = 3.0  # a measurement takes no longer than so many times what is expected
_FINISH_S = 5.0
_logger = logging.getLogger("zftune")


class StoreRecorder:
    """Writes one run's trials, measurements and decisions."""

    def __init__(self, store: Store, run: types.Run) -> None:
        self.notices: list[str] = []
        """Why nothing more is written, in sentences."""
        self.curve = CurveBuilder()
        """How the training goes; written with the measurements."""
        self.run_id = run.run_id
        self._store, self._run = store, run
        self._hurried = threading.Event()
        self._curve_version = 0
        self._account = store.account(run.run_id) or Account()
        self._process = ""
        self._counted: Callable[[], Count] = Count
        self._heart: Heart | None = None
        """Keeps the counts of this process, if it trains, beside the rows."""
        self._states: dict[int, types.TrialState] = {}
        """Of the trials that are written down, by number."""
        self._notes = self.earlier_notes = 0
        """How many of the search's decisions are written down, and how many are of earlier lives of the run."""
        self._lease_until = time.monotonic() + types.LEASE_S
        self._runs = False
        """Whether a challenger was written down as in flight, and its outcome is unknown."""

    @property
    def database(self) -> Path | None:
        return self._store.path

    @property
    def account(self) -> Account:
        """What the run took, spent and gained, by now."""
        if self._process:
            self._account = self._account.taken(self._process, self._counted())
        return self._account

    def follow(self, counted: Callable[[], Count], process: str = "") -> None:
        """Keep the account with every row from now on; `process` counts, "": this one, whose count is kept beside the
        rows as well.
        """
        self._process, self._counted = process or self._run.token, counted
        if not process and self._heart is None:
            self._heart = Heart(self._store.pulse(self._run), counted)

    def resume(self, search: Search, rate: float | None = None, *, is_another: bool = False) -> None:
        """Bring a new search to the stored state of this run; its first request is the incumbent.

        `rate` is the highest learning rate of the training that continues. `is_another`: it begins with its first step,
        so its loss curve is its own. Raises StoreError: the store could not be read or written; ZftuneError: the state
        is not that of such a search.
        """
        run_id = self.run_id
        rows, found = self._store.trials(run_id), self._store.search_state(run_id)
        try:
            state = None if found is None else state_adapter().validate_python(found)
        except ValueError as error:
            raise ZftuneError(f"the state of its search cannot be read ({str(error).splitlines()[0]})") from error
        if state is not None:
            search.restore(state, self._store.decisions(run_id))
        if is_another:
            self._store.save_curve(self._run, self.curve.curve())  # before a resumption could take the other one's up
        else:
            self.curve.join(self._store.curve(run_id))
        self._states = {row.number: row.state for row in rows}
        self._notes = self.earlier_notes = len(search.notes)
        for row, trial in zip(rows, search.book.trials, strict=False):
            if row.state is types.TrialState.CRASHED and trial.state is not types.TrialState.CRASHED:
                search.book.crash(trial, row.reason or "")
        total = self.account.total
        search.cost.spent_s = max(search.cost.spent_s, total.spent_s)
        search.cost.elapsed_s = max(search.cost.elapsed_s, total.seconds)
        search.begin_again()
        for row, trial in zip(rows, search.book.trials, strict=False):
            if row.state is types.TrialState.VOID and trial.state is types.TrialState.VOID:
                trial.reason = row.reason or trial.reason
        if rate is not None and total.highest_rate and not total.has_learned_at(rate):
            shared = "the account is" if is_another else "the account and losses are"
            about = {states.LEARNING_RATE: rate, "before": total.highest_rate, "shared": shared}
            search.remark(because="rate", about=about)
        self._record(search)

    def hurry(self) -> None:
        self._hurried.set()

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Wait for a server that is away or a locked file; a failure is a notice, and the end of writing."""
        with noting(self.notices), self._store.patient(PATIENCE_S, self._hurried):
            yield

    def before(self, search: Search, request: states.Request) -> str | None:
        """Write down new trials, and that a challenger is in flight; why it must not be applied, or None."""
        challenges = request.role not in states.OF_INCUMBENT
        if self.notices:
            return "The store takes no more: no setting can be tried safely." if challenges else None
        with self._keeping():
            self._hold(search, request)
            if challenges:
                self._tries(request.trial)
                self._record(search, in_flight=request.trial)
                self._runs = True
            elif len(search.book.trials) > len(self._states) or len(search.notes) > self._notes:
                self._record(search)
        if self.notices and challenges:
            self._tries(None)
            return f"No setting can be tried safely: {self.notices[-1]}"
        return None

    def after(self, search: Search, request: states.Request, outcome: states.Outcome) -> None:
        """Write down the outcome of a request, the decisions, and the state of the search."""
        self._runs = False
        if not self.notices:
            with self._keeping():
                if self._process:
                    search.cost.elapsed_s = max(search.cost.elapsed_s, self.account.total.seconds)
                self._record(search, None if request.role == "hold" else (request.trial, _row(request, outcome)))
                self._write_curve()
        self._tries(None)  # not before the outcome is written

    def _tries(self, trial: int | None) -> None:
        if self._heart is not None:
            self._heart.tries(trial)

    def write(self, search: Search) -> None:
        """Write down new decisions. Raises ZftuneError where nothing more is written."""
        if self.notices:
            raise ZftuneError(self.notices[-1].rstrip("."))
        self._record(search)

    def command(self, kind: Literal["pause", "unpause"], by: str) -> None:
        """Record a command that does not concern the search, from any thread; raises as `write` does."""
        if self.notices:
            raise ZftuneError(self.notices[-1].rstrip("."))
        progress = types.Progress(decisions=(self._dated(types.Decision(kind, None, {"by": by})),))
        self._store.record(self._run, progress, self._kept)

    def renew(self, lease_s: float) -> None:
        """Extend the run's lease by `lease_s`."""
        self._store.renew_lease(self._run, lease_s, self._kept)
        self._write_curve()

    def lose(self) -> None:
        """The training has fallen silent: its setting in flight is marked crashed, unless it was survived."""
        self._end(self._store.lose_run if self._runs else self._store.interrupt_run)

    def interrupt(self) -> None:
        self._end(self._store.interrupt_run)

    def finish(self, search: Search, *, unfinished: bool = False) -> None:
        """Close the run; `unfinished`: the search was not over, so it can be resumed."""
        if not self.notices:
            with noting(self.notices):
                self._record(search)
                self._write_curve()
            if self.notices:
                return self._tries(None)  # nor would it be closed now
        return self._end(self._store.interrupt_run if unfinished or self.notices else self._store.finish_run)

    def _end(self, end: Callable[[types.Run, Account | None], None]) -> None:
        """Also where the store took no more: it may again, and what is in flight would be taken for a crash."""
        self._tries(None)  # where the rows take no more, this is what is known
        before = len(self.notices)
        with noting(self.notices):
            end(self._run, self._kept)
        is_written = len(self.notices) == before
        del self.notices[max(1, before) :]
        if self._heart is not None:
            self._heart.end(remove=is_written)

    def _write_curve(self) -> None:
        if (version := self.curve.version) != self._curve_version:
            self._store.save_curve(self._run, self.curve.curve())
            self._curve_version = version

    def _hold(self, search: Search, request: states.Request) -> None:
        """Keep the lease until well after the request's expected end."""
        step_ms = max(search.book.incumbent_step_ms, search.forecast(request.setting).step_ms)
        until = time.monotonic() + _LEASE_SPARE * (request.discard + request.steps) * step_ms / 1e3
        if self._lease_until - until < types.LEASE_S / 2:
            lease_s = until - time.monotonic() + types.LEASE_S
            self._store.renew_lease(self._run, lease_s, self._kept)
            self._lease_until = time.monotonic() + lease_s

    def _record(
        self, search: Search, measured: tuple[int, types.Measurement] | None = None, in_flight: int | None = None
    ) -> None:
        trials = search.book.trials
        changed: dict[int, tuple[types.TrialState, str | None]] = {
            one.number: (one.state, one.reason or None)
            for one in trials
            if one.state not in (self._states.get(one.number, types.TrialState.PLANNED), types.TrialState.REJECTED)
        }
        if in_flight is not None:
            changed[in_flight] = (types.TrialState.IN_FLIGHT, None)
        progress = types.Progress(
            trials=tuple(
                types.NewTrial(
                    knobs=one.setting.knobs(),
                    source=one.source,
                    predicted_step_ms=None if one.forecast is None else one.forecast.step_ms,
                    constraint=one.constraint,
                    rejected=one.reason if one.state is types.TrialState.REJECTED else None,
                )
                for one in trials[len(self._states) :]
            ),
            states=changed,
            measured=measured,
            decisions=tuple(self._decisions(search)),
            search=state_adapter().dump_python(search.known, mode="json"),
        )
        made = self._store.record(self._run, progress, self._kept)
        first = len(self._states)
        if [one.number for one in made] != list(range(first, first + len(made))):
            raise ZftuneError(f"trial {first} became another row: another process writes to this run")
        self._states |= {one.number: one.state for one in made}
        self._states |= {number: state for number, (state, _) in changed.items()}
        self._notes = len(search.notes)

    def _decisions(self, search: Search) -> Iterator[types.Decision]:
        """The new ones; a remark that was made before, as in each life of a run, says nothing new."""
        seen = {one.details.get("text") for one in search.notes[: self._notes] if one.kind == "remark"}
        for note in search.notes[self._notes :]:
            text = note.details.get("text") if note.kind == "remark" else None
            if text is None or text not in seen:
                yield self._dated(note)
            seen.add(text)

    def _dated(self, decision: types.Decision) -> types.Decision:
        """With the account's figures and the step that it was made at."""
        account = self._kept
        if account is not None:
            total, at_s = account.total, decision.details.get(states.AT_S)
            known = {"elapsed_s": total.seconds, "spent_s": total.spent_s}
            if at_s is not None:  # of this process, written down later
                known = {"elapsed_s": min(total.seconds, account.before.seconds + at_s)}
            rounded = {name: round(value, 3) for name, value in known.items()}
            decision = replace(decision, details={**decision.details, **rounded})
        return replace(decision, step=self.curve.last_step if decision.step is None else decision.step)

    @property
    def _kept(self) -> Account | None:
        """The account; None: nobody counts."""
        return self.account if self.account.process else None


@functools.cache
def state_adapter() -> TypeAdapter[states.SearchState]:
    """Converts the state of a search to JSON and back."""
    from pydantic import TypeAdapter

    return TypeAdapter(states.SearchState)


def _row(request: states.Request, outcome: states.Outcome) -> types.Measurement:
    window = request.setting.update_interval
    return types.Measurement(
        role=request.role,
        steps=len(outcome.steps_ms),
        step_ms=math.exp(block_value(outcome.steps_ms, outcome.moves, window)) if outcome.steps_ms else 0.0,
        began_unix_s=time.time() - outcome.seconds,
        void_reason=None if outcome.status == "measured" else outcome.reason or outcome.status,
        steps_ms=outcome.steps_ms,
        aggregates={name: getattr(outcome, name) for name in ("discarded_ms", "taken_ms", "tokens", "device_bytes")},
    )


def trained_model(module: nn.Module, dtype: dtype, name: str | None = None) -> types.Model:
    """A model of this process as the store keeps it."""
    from zftune.telemetry.fingerprint import model_id

    parameters = list(module.parameters())
    return types.Model(
        model_id=model_id(module),
        name=name,
        parameters=sum(one.numel() for one in parameters),
        trainable=sum(one.numel() for one in parameters if one.requires_grad),
        dtype=str(dtype).removeprefix("torch."),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineInfo:
    """The machine and the software of a training process; its cores by affinity and control group."""

    hardware: types.Hardware
    usable_cores: float | None
    versions: Mapping[str, str]

    @classmethod
    def now(cls, rig: str | None = None) -> MachineInfo:
        """This process's machine, or the emulated accelerator `rig` on it."""
        from zftune.telemetry import hardware, hw_id, software

        machine, found = hardware(), software()
        return cls(
            hardware=types.Hardware.of(hw_id(machine, rig=rig), machine, rig=rig),
            usable_cores=machine["usable_cores"],
            versions={name: found[name] for name in ("zftune", "torch", "python") if found[name] is not None},
        )


class Recording:
    """One run, and the presets of its key. A failure of the store is no error here but a sentence in `notices`."""

    def __init__(self, store: Store, key: types.Key, model: types.Model, here: MachineInfo) -> None:
        self.notices = list(store.notices)
        self.recorder: StoreRecorder | None = None
        self.ratios: types.Ratios | None = None
        """Measured here; a preset is found by them on other machines."""
        self._stake: tuple[str, Setting] | None = None
        self._versions: Mapping[str, str] = {}
        self.key, self._store, self._model, self._here = key, store, model, here

    def barred(self) -> tuple[states.BarredSetting, ...]:
        """Settings that earlier runs, those that ended without goodbye too, did not survive, or were rolled back."""
        found: list[states.BarredSetting] = []
        with noting(self.notices):
            self._store.reap()
            rows = self._store.barred(self.key)
            found += (states.BarredSetting(Setting.from_knobs(row.knobs), row.kind) for row in rows)
        return tuple(found)

    def preset(self) -> types.Match | None:
        """The preset to begin with; None: there is none. Where `ratios` is None, only one of the same key serves."""
        rig, cores = self._here.hardware.rig, self._here.usable_cores
        try:
            return self._store.find_preset(types.Query(key=self.key, ratios=self.ratios, usable_cores=cores, rig=rig))
        except StoreError as error:
            self.notices.append(f"{error}.")
            return None

    def unfinished(self, knobs: Mapping[str, Any], settings: Mapping[str, Any]) -> types.RunRecord | None:
        try:
            return self._store.unfinished_run(self.key, knobs, settings)
        except StoreError as error:
            self.notices.append(f"{error}.")
            return None

    def living(self, run_id: str) -> types.RunRecord | None:
        """A run whose training lives and which can be resumed, or None; what was in flight did not crash."""
        found = None
        with noting(self.notices, StoreError):
            run = self._store.run(run_id)
            if run is not None and run.key == self.key:
                self._store.spare_trials(run_id)
                found = run
        return found

    def resume(
        self,
        run: types.RunRecord,
        make: Callable[[Setting], Search],
        learning_rate: float | None = None,
        *,
        is_another: bool = False,
    ) -> Search | None:
        """The search of a run, brought to its last state; `make` makes one that begins from a setting.

        `is_another`: another training continues it from its first step, with a loss curve of its own. None: it cannot
        be resumed.
        """
        taken = None
        try:
            rows = self._store.trials(run.run_id)
            if not rows:
                raise StoreError("it has no trials")
            search = make(Setting.from_knobs(rows[0].knobs))
            taken = self._store.resume_run(run.run_id)
            recorder = StoreRecorder(self._store, taken)
            recorder.resume(search, learning_rate, is_another=is_another)
        except ZftuneError as error:
            self.notices.append(f"Run {run.run_id[:8]} cannot be resumed ({error}): the search begins anew.")
            if taken is not None:
                with noting(self.notices, StoreError):
                    self._store.finish_run(taken)  # it would be found again and again
            return None
        stake = run.settings.get("stake")
        self._stake = None if stake is None else (stake["preset"], Setting.from_knobs(stake["knobs"]))
        self._versions, self.recorder = run.versions, recorder
        return search

    def begin(
        self,
        search: Search,
        knobs: Mapping[str, Any] | None = None,
        *,
        stake: tuple[str, Setting] | None = None,
        learning_rate: float | None = None,
        run_id: str | None = None,
        unsearched: Mapping[str, Any] | None = None,
    ) -> StoreRecorder | None:
        """Add the run of a new search; None if the store takes nothing.

        `knobs` default to what the search begins from; `stake` is the preset that is measured again: its name and
        setting. For the others see `begin_run` of the store and `zftune.tuner.space.unsearched`.
        """
        knobs, space = search.book.trials[0].setting.knobs() if knobs is None else knobs, search.space
        settings = {
            **search_settings(search.options, space),
            "budget_steps": space.budget,
            "movement_percent": space.movement_percent,
            "movement_rate": space.movement_rate,
            "fixed_because": space.fixed_because or None,
            "guesses": space.guesses,
            states.LEARNING_RATE: learning_rate,
            states.UNSEARCHED: dict(unsearched or {}),
        }
        if stake is not None:
            settings["stake"] = {"preset": stake[0], "knobs": stake[1].knobs()}
        with noting(self.notices, StoreError):
            run = self._store.begin_run(
                self.key, self._model, self._here.hardware, knobs=knobs, settings=settings,
                versions=self._here.versions, usable_cores=self._here.usable_cores, run_id=run_id,
            )  # fmt: skip
            self._versions, self._stake = self._here.versions, stake
            self.recorder = StoreRecorder(self._store, run)
        return self.recorder

    def finish(self, search: Search, *, unfinished: bool = False) -> None:
        """Close the run and keep the proven setting as a preset; `unfinished`: a later run may resume it."""
        if self.recorder is None:
            return
        self.recorder.finish(search, unfinished=unfinished)
        self.notices += self.recorder.notices
        if self.recorder.notices:
            return
        name, setting = self._stake or ("", None)
        won = None if setting is None or unfinished else stake_won(search, setting)
        with noting(self.notices, StoreError):
            if won is not None and self._store.record_comparison(name, won=won) is types.PresetState.WITHDRAWN:
                self.notices.append(f"Preset {name} was slower in two later comparisons and is withdrawn.")
        self.keep_preset(search)

    def finish_soon(self, search: Search, *, unfinished: bool) -> bool:
        """`finish` for a training that waits: a server takes some seconds at most; whether it succeeded."""
        if not self._store.is_server:
            self.finish(search, unfinished=unfinished)
            return True
        finish = partial(self.finish, search, unfinished=unfinished)
        thread = threading.Thread(target=finish, name="zftune-finish", daemon=True)
        thread.start()
        thread.join(_FINISH_S)
        return not thread.is_alive()

    def withdraw_preset(self, setting: Setting, why: types.Withdrawal) -> None:
        for one in self._presets_of(setting):
            self._store.withdraw_preset(one.name, why)

    def _presets_of(self, setting: Setting) -> list[types.Preset]:
        """Those of this key."""
        own = (one for one in self._store.presets() if one.key == self.key and not one.imported)
        return [one for one in own if Setting.from_knobs(one.knobs) == setting]

    def keep_preset(self, search: Search) -> None:
        """Keep the incumbent as a preset, if it has proven itself; call it while no worker thinks."""
        book = search.book
        gain, best, step_ms = book.gain, book.incumbent, book.step_ms(book.incumbent)
        if gain is None or step_ms is None or not gain.holds:
            return
        evidence = types.Evidence(
            step_ms=step_ms,
            baseline="start" if book.reference == book.trials[0].setting else "planner",
            baseline_step_ms=step_ms / (1 - gain.share),
            gain_error=2 * gain.error,
            measurements=search.measurements,
            steps=sum(one.blocks for one in book.trials if one.setting == best.setting) * BLOCK_STEPS,
            measured_unix_s=time.time(),
        )
        preset = types.Preset(
            key=self.key, knobs=best.setting.knobs(), evidence=evidence, model=self._model,
            hardware=self._here.hardware, ratios=self.ratios, versions=self._versions,
            usable_cores=self._here.usable_cores,
        )  # fmt: skip
        try:
            if all(one.state is not types.PresetState.ACTIVE for one in self._presets_of(best.setting)):
                self._store.save_preset(preset)
        except (StoreError, ValueError) as error:
            self.notices.append(f"The settings were not kept as a preset: {error}.")


def search_settings(options: SearchOptions, space: Space) -> dict[str, Any]:
    """All that a search follows from except measurements: a run must share it to be resumed."""
    known = {name: getattr(options, name) for name in ("seed", "sampler", "most_measurements")}
    return {**known, "dimensions": {one.name: list(one.choices) for one in space.dimensions}}


def stake_won(search: Search, setting: Setting) -> bool | None:
    """Whether a preset's setting won its comparisons in a search that is over; None: none was decisive."""
    book = search.book
    visits = {trial.number for trial in book.trials if trial.setting == setting}
    if any(one.trial in visits for one in book.adoptions):
        return True
    if book.trials[0].setting == setting:
        compared = any(trial.gains for trial in book.trials)
        return None if not compared else not book.adoptions
    if any(book.trials[number].state is types.TrialState.CRASHED for number in visits):
        return False
    gains = [gain for number in visits for gain in book.trials[number].gains]
    return False if gains and fmean(gains) < 0 else None
