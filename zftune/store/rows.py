"""Rows of the tables as plain data, and back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, cast

from zftune.store import tables
from zftune.store.types import (
    Backend,
    Decision,
    Evidence,
    Hardware,
    Key,
    Measurement,
    Model,
    Preset,
    Quality,
    Ratios,
    RunRecord,
    TrialRecord,
)


def key_of(row: tables.KeyColumns) -> Key:
    """What a preset or a run is for."""
    return Key(
        model_id=row.model_id,
        hw_id=row.hw_id,
        backend=cast(Backend, row.backend),
        stage=row.stage,
        dtype=row.dtype,
        world_size=row.world_size,
        nodes=row.nodes,
        shards=row.shards,
        micro_batch=row.micro_batch,
        sequence=row.sequence,
        checkpointing=row.checkpointing,
        quality=cast(Quality, row.quality),
    )


def hardware_of(row: tables.HardwareRow) -> Hardware:
    """A machine."""
    return Hardware(
        hw_id=row.hw_id,
        gpu=row.gpu,
        gpu_memory_bytes=row.gpu_memory_bytes,
        cpu_model=row.cpu_model,
        numa_nodes=row.numa_nodes,
        ram_bytes=row.ram_bytes,
        rig=row.rig,
    )


def model_of(row: tables.ModelRow) -> Model:
    """A model."""
    return Model(
        model_id=row.model_id, name=row.name, parameters=row.parameters, trainable=row.trainable, dtype=row.dtype
    )


def preset_of(row: tables.PresetRow, model: tables.ModelRow, hardware: tables.HardwareRow) -> Preset:
    """A preset."""
    ratios = None
    if row.host_over_compute is not None and row.link_over_compute is not None:
        ratios = Ratios(row.host_over_compute, row.link_over_compute)
    return Preset(
        key=key_of(row),
        knobs=row.knobs,
        evidence=Evidence(**row.evidence),
        model=model_of(model),
        hardware=hardware_of(hardware),
        name=row.name,
        ratios=ratios,
        versions=row.versions,
        usable_cores=row.usable_cores,
        imported=row.imported,
        state=row.state,
        lost_comparisons=row.lost_comparisons,
        created_unix_s=row.created_unix_s,
    )


def preset_row(preset: Preset) -> tables.PresetRow:
    """A new row; its model and machine must be there."""
    return tables.PresetRow(
        **asdict(preset.key),
        name=preset.name,
        knobs=dict(preset.knobs),
        evidence=asdict(preset.evidence),
        versions=dict(preset.versions),
        usable_cores=preset.usable_cores,
        host_over_compute=None if preset.ratios is None else preset.ratios.host_over_compute,
        link_over_compute=None if preset.ratios is None else preset.ratios.link_over_compute,
        imported=preset.imported,
        state=preset.state,
        lost_comparisons=preset.lost_comparisons,
        created_unix_s=preset.created_unix_s,
    )


def run_of(row: tables.RunRow) -> RunRecord:
    """A run, without the right to write into it."""
    return RunRecord(
        run_id=row.run_id,
        key=key_of(row),
        state=row.state,
        knobs=row.knobs,
        settings=row.settings,
        versions=row.versions,
        usable_cores=row.usable_cores,
        began_unix_s=row.began_unix_s,
        lease_until_unix_s=row.lease_until_unix_s,
        ended_unix_s=row.ended_unix_s,
    )


def trial_of(row: tables.TrialRow) -> TrialRecord:
    """A trial."""
    return TrialRecord(
        trial_id=row.trial_id,
        run_id=row.run_id,
        number=row.number,
        knobs=row.knobs,
        source=row.source,
        state=row.state,
        reason=row.reason,
        predicted_step_ms=row.predicted_step_ms,
        constraint=row.constraint,
        created_unix_s=row.created_unix_s,
        ended_unix_s=row.ended_unix_s,
    )


def measurement_of(row: tables.MeasurementRow) -> Measurement:
    """A measurement."""
    return Measurement(
        role=row.role,
        steps=row.steps,
        step_ms=row.step_ms,
        token_us=row.token_us,
        mad_us=row.mad_us,
        stall_fraction=row.stall_fraction,
        began_unix_s=row.began_unix_s,
        void_reason=row.void_reason,
        steps_ms=tuple(row.steps_ms),
        aggregates=row.aggregates,
    )


def measurement_row(trial_id: int, measurement: Measurement) -> tables.MeasurementRow:
    """A new row."""
    values: dict[str, Any] = asdict(measurement)
    return tables.MeasurementRow(trial_id=trial_id, **{**values, "steps_ms": list(measurement.steps_ms)})


def decision_of(row: tables.DecisionRow) -> Decision:
    """A decision."""
    return Decision(
        kind=row.kind,
        reason=row.reason,
        step=row.step,
        trial_id=row.trial_id,
        details=row.details,
        at_unix_s=row.at_unix_s,
    )
