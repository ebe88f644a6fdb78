"""A tuned run in the store: what crashed before, its rows, and the preset that it proves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from zftune.errors import StoreError, ZftuneError, noting
from zftune.store.types import (
    Evidence,
    Hardware,
    Key,
    Match,
    Model,
    Preset,
    PresetState,
    Quality,
    Query,
    Ratios,
    RunRecord,
    RunState,
    TrialState,
    Withdrawal,
)
from zftune.tuner import messages
from zftune.tuner.blocks import BLOCK_STEPS
from zftune.tuner.recorder import StoreRecorder
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.space import Setting, Space, feasible
from zftune.tuner.states import LEARNING_RATE, UNSEARCHED, BarredSetting

if TYPE_CHECKING:
    from torch import dtype, nn

    from zftune.store.store import Store

_FINISH_S = 5.0
_logger = logging.getLogger("zftune")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What is trained, and how: with the machine it is the key of a preset."""

    model: Model
    """Its `dtype` is given."""
    micro_batch: int
    sequence: int
    """Tokens a sequence."""
    rig: str | None = None
    """Name of the emulated accelerator."""
    stage: int = 0
    """ZeRO stage; 0 where there is no ZeRO."""
    world_size: int = 1
    nodes: int = 1
    shards: int = 1
    """Ranks that share each weight by rows."""
    checkpointing: bool = False

    @classmethod
    def of(
        cls, module: nn.Module, dtype: dtype, *, micro_batch: int, sequence: int, name: str | None = None, **more: Any
    ) -> RunFacts:
        """Facts of a model in this process: sequences of a rank's pass, and tokens of a sequence."""
        from zftune.telemetry.fingerprint import model_id, recomputes

        parameters = list(module.parameters())
        model = Model(
            model_id=model_id(module),
            name=name,
            parameters=sum(one.numel() for one in parameters),
            trainable=sum(one.numel() for one in parameters if one.requires_grad),
            dtype=str(dtype).removeprefix("torch."),
        )
        checkpointing = recomputes(module)
        return cls(model=model, micro_batch=micro_batch, sequence=sequence, checkpointing=checkpointing, **more)


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineInfo:
    """The machine and the software that a process trains with."""

    hardware: Hardware
    usable_cores: float | None
    """By affinity and control group."""
    versions: Mapping[str, str]

    @classmethod
    def now(cls, rig: str | None = None) -> MachineInfo:
        """This process's machine, or the emulated accelerator `rig` on it."""
        from zftune.telemetry import hardware, hw_id, software

        machine, found = hardware(), software()
        return cls(
            hardware=Hardware.of(hw_id(machine, rig=rig), machine, rig=rig),
            usable_cores=machine["usable_cores"],
            versions={name: found[name] for name in ("zftune", "torch", "python") if found[name] is not None},
        )


class Recording:
    """One run. Nothing that the store cannot do is an error here: it is a sentence in `notices`."""

    def __init__(self, store: Store, facts: RunFacts, quality: Quality, here: MachineInfo | None = None) -> None:
        self.notices = list(store.notices)
        self.recorder: StoreRecorder | None = None
        self.ratios: Ratios | None = None
        """Measured here; a preset is found by them on other machines."""
        self.elapsed_s = 0.0
        """Since the search began, when it is written down that it does."""
        self._stake: tuple[str, Setting] | None = None
        self._versions: Mapping[str, str] = {}
        self._store = store
        self._here = here or MachineInfo.now(facts.rig)
        self.key = Key(
            model_id=facts.model.model_id, hw_id=self._here.hardware.hw_id, backend="zenflow", stage=facts.stage,
            dtype=facts.model.dtype or "unknown", world_size=facts.world_size, nodes=facts.nodes,
            shards=facts.shards, micro_batch=facts.micro_batch, sequence=facts.sequence,
            checkpointing=facts.checkpointing, quality=quality,
        )  # fmt: skip
        self._model = facts.model
        self._hardware, self._usable_cores = self._here.hardware, self._here.usable_cores

    @property
    def wrong(self) -> list[str]:
        """Sentences: what the store could not do by now."""
        return [*self.notices, *(() if self.recorder is None else self.recorder.notices)]

    def barred(self) -> tuple[BarredSetting, ...]:
        """Settings that earlier runs did not survive, or that were rolled back.

        Runs that ended without goodbye are closed first.
        """
        found: list[BarredSetting] = []
        with noting(self.notices):
            self._store.reap()
            found += (BarredSetting(Setting.from_knobs(row.knobs), row.kind) for row in self._store.barred(self.key))
        return tuple(found)

    def preset(self) -> Match | None:
        """The preset to begin with; None: there is none. Where `ratios` is None, only one of the same key serves."""
        query = Query(key=self.key, ratios=self.ratios, usable_cores=self._usable_cores, rig=self._hardware.rig)
        try:
            return self._store.find_preset(query)
        except StoreError as error:
            self.notices.append(f"{error}.")
            return None

    def unfinished(self, knobs: Mapping[str, Any], settings: Mapping[str, Any]) -> RunRecord | None:
        """The newest run of a search, if it was not finished."""
        try:
            return self._store.unfinished_run(self.key, knobs, settings)
        except StoreError as error:
            self.notices.append(f"{error}.")
            return None

    def why_new(self) -> str:
        """A sentence where the newest run like this one, which ended before its search, trained other weights or had
        another quality; else "".

        Models are told apart by what they train; that it is the same one is known by its name alone.
        """
        from zftune.store.store import facts_of

        try:
            own, quality = self.key.model_id, self.key.quality
            alike = (one for one in self._store.runs() if replace(one.key, model_id=own, quality=quality) == self.key)
            newest = next(alike, None)
            if newest is None or newest.state is not RunState.LOST or newest.key == self.key:
                return ""
            if newest.key.model_id == self.key.model_id:
                return f"Begins a new run, since run {newest.run_id[:8]} had quality {newest.key.quality}."
            before = facts_of(self._store, newest.key)[0]
        except StoreError as error:
            self.notices.append(f"{error}.")
            return ""
        if before.name is None or before.name != self._model.name:
            return ""
        counts = f"{before.trainable or 0:,} instead of {self._model.trainable or 0:,}"
        what = f"run {newest.run_id[:8]} trained other weights of {before.name} ({counts})"
        return f"Begins a new run, since {what}."

    def began_from(self, run: RunRecord) -> Setting | None:
        """The setting that the search of a run began from; None: it cannot be gone on with."""
        try:
            return Setting.from_knobs(self._store.trials(run.run_id)[0].knobs)
        except (ZftuneError, LookupError, TypeError) as error:
            self.notices.append(_anew(run, error))
            return None

    def known(self, run_id: str) -> RunRecord | None:
        """A run whose training lives and which can be resumed, or None.

        Nothing that was in flight crashed: the training was not asked for it yet, or survived it.
        """
        try:
            found = next((one for one in self._store.runs() if one.run_id == run_id and one.key == self.key), None)
            if found is not None:
                self._store.spare_trials(run_id)
            return found
        except StoreError as error:
            self.notices.append(f"{error}.")
            return None

    def resume(
        self, run: RunRecord, search: Search, learning_rate: float | None = None, *, is_another: bool = False
    ) -> StoreRecorder | None:
        """Continue a run with a new search that has the old one's arguments; it is brought to the old one's state.

        `is_another`: another training continues it from its first step, with a loss curve of its own.

        Returns:
            Where it is written down; None where it could not be gone on with: `search` is of no use then.
        """
        taken = None
        try:
            taken = self._store.resume_run(run.run_id)
            recorder = StoreRecorder(self._store, taken)
            recorder.resume(search, learning_rate, is_another=is_another)
        except ZftuneError as error:
            self.notices.append(_anew(run, error))
            if taken is not None:
                with noting(self.notices, StoreError):
                    self._store.finish_run(taken)  # it would be found again and again
            return None
        stake = run.settings.get("stake")
        self._stake = None if stake is None else (stake["preset"], Setting.from_knobs(stake["knobs"]))
        self._versions, self.recorder = run.versions, recorder
        return recorder

    def bound(self, search: Search, here: Space, own: Setting | None) -> str:
        """Make updates come earlier before a training continues with the best settings, if its weights may move
        further.

        `own` is the setting it begins with, where the movement was not measured and another training found the best.

        Returns:
            What takes the place of the best settings so far, and why, a sentence; "": they hold.
        """
        known, space, late = len(search.notes), search.book.space, search.book.incumbent
        if here.movement_percent is not None:
            search.book.space = space.moving(here.movement_percent, here.movement_rate)
            search.bound()
        elif own is not None and not space.fixed_because and space.cost(own) < space.cost(late.setting):
            search.go_on_with(own, messages.NOT_KNOWN_YET)
            search.suggest(late.setting, "planner")
        if self.recorder is not None:
            with noting(self.notices):
                self.recorder.write(search)
        return next((one.reason for one in search.notes[known:] if one.kind == "movement"), "")

    def begin(
        self,
        search: Search,
        knobs: Mapping[str, Any] | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        stake: tuple[str, Setting] | None = None,
        learning_rate: float | None = None,
        run_id: str | None = None,
        unsearched: Mapping[str, Any] | None = None,
    ) -> StoreRecorder | None:
        """Add the run of a new search; None if the store takes nothing.

        `knobs` default to what the search begins from, `settings` (what a run must share to continue this one) to
        `search_settings`. `stake` is the preset that is measured again: its name and setting. `run_id`: see
        `zftune.store.runs.Runs.begin_run`. `unsearched`: see `zftune.tuner.space.unsearched`.
        """
        knobs = search.book.trials[0].setting.knobs() if knobs is None else knobs
        space = search.book.space
        settings = {
            **(settings or search_settings(search.options, space)),
            "budget_steps": space.budget,
            "movement_percent": space.movement_percent,
            "movement_rate": space.movement_rate,
            "feasible": feasible(space),
            "fixed_because": space.fixed_because or None,
            LEARNING_RATE: learning_rate,
            UNSEARCHED: dict(unsearched or {}),
        }
        if stake is not None:
            settings["stake"] = {"preset": stake[0], "knobs": stake[1].knobs()}
        versions = self._here.versions
        with noting(self.notices, StoreError):
            run = self._store.begin_run(
                self.key, self._model, self._hardware, knobs=knobs, settings=settings, versions=versions,
                usable_cores=self._usable_cores, elapsed_s=self.elapsed_s, run_id=run_id,
            )  # fmt: skip
            self._versions, self._stake = versions, stake
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
        if not unfinished:
            with noting(self.notices, StoreError):
                self._judge_preset(search)
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

    def keep_preset(self, search: Search) -> None:
        """Keep the incumbent as a preset, if it has proven itself; call it while no worker thinks."""
        try:
            self._keep_preset(search)
        except (StoreError, ValueError) as error:
            self.notices.append(f"The settings were not kept as a preset: {error}.")

    def withdraw_preset(self, setting: Setting, why: Withdrawal) -> None:
        """Withdraw a setting from every preset of this key.

        Raises:
            StoreError: it could not be written.
        """
        for one in self._presets_of(setting):
            self._store.withdraw_preset(one.name, why)

    def _presets_of(self, setting: Setting) -> list[Preset]:
        """Those of this key that were measured here."""
        own = (one for one in self._store.presets() if one.key == self.key and not one.imported)
        return [one for one in own if Setting.from_knobs(one.knobs) == setting]

    def _judge_preset(self, search: Search) -> None:
        """Write down whether the preset that was measured again was the best, if it was compared with anything."""
        won = None if self._stake is None else stake_won(search, self._stake[1])
        if self._stake is None or won is None:
            return
        if self._store.record_comparison(self._stake[0], won=won) is PresetState.WITHDRAWN:
            self.notices.append(f"Preset {self._stake[0]} was slower in two later comparisons and is withdrawn.")

    def _keep_preset(self, search: Search) -> None:
        gain, best, book = search.book.gain, search.book.incumbent, search.book
        step_ms = book.step_ms(best)
        if gain is None or step_ms is None or not gain.holds:
            return
        if any(one.state is PresetState.ACTIVE for one in self._presets_of(best.setting)):
            return
        evidence = Evidence(
            step_ms=step_ms,
            baseline="start" if book.reference == book.trials[0].setting else "planner",
            baseline_step_ms=step_ms / (1 - gain.share),
            gain_error=2 * gain.error,
            measurements=search.measurements,
            steps=sum(one.blocks for one in book.trials if one.setting == best.setting) * BLOCK_STEPS,
            measured_unix_s=time.time(),
        )
        self._store.save_preset(
            Preset(
                key=self.key,
                knobs=best.setting.knobs(),
                evidence=evidence,
                model=self._model,
                hardware=self._hardware,
                ratios=self.ratios,
                versions=self._versions,
                usable_cores=self._usable_cores,
            )
        )


def search_settings(options: SearchOptions, space: Space) -> dict[str, Any]:
    """All that a search follows from except measurements: a run must share it to be resumed."""
    names = ("seed", "sampler", "most_measurements")
    dimensions = {one.name: list(one.choices) for one in space.dimensions}
    return {**{name: getattr(options, name) for name in names}, "dimensions": dimensions}


def stake_won(search: Search, setting: Setting) -> bool | None:
    """Whether a preset's setting won its comparisons in a search that is over; None: none was decisive."""
    book = search.book
    visits = {trial.number for trial in book.trials if trial.setting == setting}
    if any(one.trial in visits for one in book.adoptions):
        return True
    if book.trials[0].setting == setting:
        compared = any(trial.gains for trial in book.trials)
        return None if not compared else not book.adoptions
    if any(book.trials[number].state is TrialState.CRASHED for number in visits):
        return False
    gains = [gain for number in visits for gain in book.trials[number].gains]
    return False if gains and fmean(gains) < 0 else None


def _anew(run: RunRecord, error: Exception) -> str:
    return f"Run {run.run_id[:8]} cannot be gone on with ({error}): the search begins anew."
