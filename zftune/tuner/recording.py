"""A tuned run of the built-in workload in the store: what crashed before, its rows, and the preset that it proves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from zenflow import ZenFlowConfig
from zftune.errors import ZftuneError
from zftune.store import Evidence, Hardware, Key, Model, Preset, StoreError
from zftune.store.types import Quality
from zftune.tuner.builtin import Training
from zftune.tuner.recorder import StoreRecorder
from zftune.tuner.scores import score
from zftune.tuner.search import Search
from zftune.tuner.settings import Setting

if TYPE_CHECKING:
    from zftune.store.store import Store


class Recording:
    """One run. Nothing that the store cannot do is an error here: it is a sentence in `notices`.

    Args:
        store: open.
        training: what is tuned.
        quality: what the user asked for.
    """

    def __init__(self, store: Store, training: Training, quality: Quality) -> None:
        from zftune.telemetry import fingerprint, hardware

        self.notices = list(store.notices)
        self.recorder: StoreRecorder | None = None
        self._store = store
        task, workload = training.task, training.workload
        rig = None if training.rig is None else training.rig.name
        machine = hardware()
        ids = fingerprint(workload.module, machine=machine, rig=rig)
        dtype = str(workload.dtype).removeprefix("torch.")
        self._key = Key(
            **ids, backend="zenflow", stage=0, dtype=dtype, world_size=1, micro_batch=task.micro_batch,
            sequence=task.sequence, checkpointing=False, quality=quality,
        )  # fmt: skip
        self._model = Model(
            model_id=ids["model_id"],
            name=workload.name,
            parameters=workload.parameters,
            trainable=workload.trainable,
            dtype=dtype,
        )
        self._hardware = Hardware.of(ids["hw_id"], machine, rig=rig)
        self._usable_cores = machine["usable_cores"]

    def crashed(self) -> tuple[Setting, ...]:
        """Settings that earlier runs did not survive; runs that ended without goodbye are closed first."""
        try:
            self._store.reap()
            return tuple(Setting.from_knobs(knobs) for knobs in self._store.crashed_knobs(self._key))
        except ZftuneError as error:
            self.notices.append(f"{error}.")
            return ()

    def begin(self, search: Search, config: ZenFlowConfig) -> StoreRecorder | None:
        """Write down that the search begins; None where the store takes nothing.

        Args:
            search: of the run.
            config: what the training began with.
        """
        from zftune.telemetry import software

        options = search.options
        settings = {name: getattr(options, name) for name in ("seed", "sampler", "most_measurements", "patience")}
        settings["budget_steps"] = search.book.space.budget
        found = software()
        versions = {name: found[name] for name in ("zftune", "torch", "python") if found[name] is not None}
        try:
            run = self._store.begin_run(
                self._key, self._model, self._hardware, knobs=Setting.of(config).knobs(), settings=settings,
                versions=versions, usable_cores=self._usable_cores,
            )  # fmt: skip
        except StoreError as error:
            self.notices.append(f"{error}.")
            return None
        self._versions = versions
        self.recorder = StoreRecorder(self._store, run)
        return self.recorder

    def finish(self, search: Search) -> None:
        """Say goodbye, and keep what was proven as a preset."""
        if self.recorder is None:
            return
        self.recorder.finish(search)
        self.notices += self.recorder.notices
        gain, start, best = search.book.gain, search.book.trials[0], search.book.incumbent
        if gain is None or not start.samples or not best.samples or self.recorder.notices:
            return
        step_ms = score(best.samples) * search.book.tokens / 1e3
        evidence = Evidence(
            step_ms=step_ms,
            baseline="start",
            baseline_step_ms=step_ms / (1 - gain.share),
            gain_error=2 * gain.error,
            measurements=search.measurements,
            steps=sum(len(one.token_us) for one in best.samples),
            measured_unix_s=time.time(),
        )
        try:
            self._store.save_preset(
                Preset(
                    key=self._key,
                    knobs=best.setting.knobs(),
                    evidence=evidence,
                    model=self._model,
                    hardware=self._hardware,
                    versions=self._versions,
                    usable_cores=self._usable_cores,
                )
            )
        except (StoreError, ValueError) as error:
            self.notices.append(f"The knobs were not kept as a preset: {error}.")
