"""The tables, and their rows as plain data. Times `_unix_s` are wall clock."""

from __future__ import annotations

import enum
from dataclasses import asdict
from typing import Any, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Enum,
    ForeignKey,
    Index,
    MetaData,
    String,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from zftune.store.account import Account
from zftune.store.types import (
    Curve,
    CurvePoint,
    Decision,
    Evidence,
    Hardware,
    Key,
    KnobChange,
    Measurement,
    Model,
    Preset,
    PresetState,
    Ratios,
    RunRecord,
    RunState,
    TrialRecord,
    TrialState,
    Withdrawal,
)

T = TypeVar("T")


def _read(kind: type[T], row: Base | KeyColumns, **given: Any) -> T:
    """A dataclass from the columns of its fields' names, but for those that are given."""
    names: Any = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return kind(**{name: getattr(row, name) for name in names if name not in given}, **given)


def hardware_of(row: HardwareRow) -> Hardware:
    """A machine."""
    return _read(Hardware, row)


def model_of(row: ModelRow) -> Model:
    """A model."""
    return _read(Model, row)


def preset_of(row: PresetRow, model: ModelRow, hardware: HardwareRow) -> Preset:
    """A preset."""
    ratios = None
    if row.host_over_compute is not None and row.link_over_compute is not None:
        ratios = Ratios(row.host_over_compute, row.link_over_compute)
    return _read(
        Preset,
        row,
        key=_read(Key, row),
        evidence=Evidence(**row.evidence),
        model=model_of(model),
        hardware=hardware_of(hardware),
        ratios=ratios,
        withdrawn=None if row.withdrawn is None else Withdrawal(**row.withdrawn),
    )


def preset_row(preset: Preset) -> PresetRow:
    """A new row; its model and machine must be there."""
    return PresetRow(
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
        withdrawn=None if preset.withdrawn is None else asdict(preset.withdrawn),
        created_unix_s=preset.created_unix_s,
    )


def run_of(row: RunRow) -> RunRecord:
    """A run, without the right to write into it."""
    return _read(RunRecord, row, key=_read(Key, row))


def account_of(row: RunRow) -> Account:
    """What is kept of a run's account; nothing before anybody has counted."""
    return Account() if row.account is None else Account.of(row.account)


def trial_of(row: TrialRow) -> TrialRecord:
    """A trial."""
    return _read(TrialRecord, row)


def measurement_of(row: MeasurementRow) -> Measurement:
    """A measurement."""
    return _read(Measurement, row, steps_ms=tuple(row.steps_ms))


def measurement_row(trial_id: int, measurement: Measurement) -> MeasurementRow:
    """A new row."""
    values: dict[str, Any] = asdict(measurement)
    return MeasurementRow(trial_id=trial_id, **{**values, "steps_ms": list(measurement.steps_ms)})


def curve_of(row: CurveRow) -> Curve:
    """How a run went."""
    return Curve(
        tuple(CurvePoint(*point) for point in row.points), tuple(KnobChange(step, knobs) for step, knobs in row.changes)
    )


def decision_of(row: DecisionRow, trial: int | None) -> Decision:
    """A decision about a trial with that number."""
    return _read(Decision, row, trial=trial)


ID_LENGTH = 16
NAME_LENGTH = 64
TEXT_LENGTH = 200
REASON_LENGTH = 1000

_NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_name)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    """All tables."""

    metadata = MetaData(naming_convention=_NAMES)
    type_annotation_map = {dict[str, Any]: JSON, list[float]: JSON, list[Any]: JSON}  # noqa: RUF012 - SQLAlchemy's own spelling


def _enum(kind: type[enum.StrEnum], name: str) -> Enum:
    """Kept as its value, and checked by the database."""
    values = [member.value for member in kind]
    return Enum(kind, name=name, native_enum=False, create_constraint=True, length=16, values_callable=lambda _: values)


class SchemaRow(Base):
    """The one row that tells which tables these are."""

    __tablename__ = "zftune_schema"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class HardwareRow(Base):
    """A machine."""

    __tablename__ = "hardware"

    hw_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    gpu: Mapped[str | None] = mapped_column(String(TEXT_LENGTH))
    gpu_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    cpu_model: Mapped[str | None] = mapped_column(String(TEXT_LENGTH))
    numa_nodes: Mapped[int | None]
    ram_bytes: Mapped[int | None] = mapped_column(BigInteger)
    rig: Mapped[str | None] = mapped_column(String(TEXT_LENGTH))
    imported: Mapped[bool]


class ModelRow(Base):
    """A model."""

    __tablename__ = "model"

    model_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    name: Mapped[str | None] = mapped_column(String(TEXT_LENGTH))
    parameters: Mapped[int | None] = mapped_column(BigInteger)
    trainable: Mapped[int | None] = mapped_column(BigInteger)
    dtype: Mapped[str | None] = mapped_column(String(32))
    imported: Mapped[bool]


class KeyColumns:
    """What a preset must agree in."""

    model_id: Mapped[str] = mapped_column(ForeignKey("model.model_id"))
    hw_id: Mapped[str] = mapped_column(ForeignKey("hardware.hw_id"))
    backend: Mapped[str] = mapped_column(String(16))
    stage: Mapped[int]
    dtype: Mapped[str] = mapped_column(String(32))
    world_size: Mapped[int]
    micro_batch: Mapped[int]
    sequence: Mapped[int]
    checkpointing: Mapped[bool]
    quality: Mapped[str] = mapped_column(String(16))
    nodes: Mapped[int]
    shards: Mapped[int]


class PresetRow(KeyColumns, Base):
    """Knobs with their evidence."""

    __tablename__ = "preset"
    __table_args__ = (
        Index("ix_preset_key", "model_id", "hw_id"),
        CheckConstraint("lost_comparisons >= 0", name="lost_comparisons"),
    )

    preset_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    name: Mapped[str] = mapped_column(String(NAME_LENGTH), unique=True)
    knobs: Mapped[dict[str, Any]]
    evidence: Mapped[dict[str, Any]]
    versions: Mapped[dict[str, Any]]
    usable_cores: Mapped[float | None]
    host_over_compute: Mapped[float | None]
    link_over_compute: Mapped[float | None]
    imported: Mapped[bool]
    state: Mapped[PresetState] = mapped_column(_enum(PresetState, "state"))
    lost_comparisons: Mapped[int]
    withdrawn: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """By whom it was withdrawn, where it was not by comparisons."""
    created_unix_s: Mapped[float]


class RunRow(KeyColumns, Base):
    """A training run that was tuned."""

    __tablename__ = "run"
    __table_args__ = (Index("ix_run_key", "model_id", "hw_id"),)

    run_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    token: Mapped[str] = mapped_column(String(32))
    state: Mapped[RunState] = mapped_column(_enum(RunState, "state"), index=True)
    knobs: Mapped[dict[str, Any]]
    settings: Mapped[dict[str, Any]]
    versions: Mapped[dict[str, Any]]
    usable_cores: Mapped[float | None]
    began_unix_s: Mapped[float]
    lease_until_unix_s: Mapped[float]
    ended_unix_s: Mapped[float | None]
    account: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """A `zftune.store.account.Account`."""
    search: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    """All that its search knows, a `zftune.tuner.states.SearchState`."""


class TrialRow(Base):
    """A setting in a run."""

    __tablename__ = "trial"
    __table_args__ = (UniqueConstraint("run_id", "number"),)

    trial_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id", ondelete="CASCADE"))
    number: Mapped[int]
    knobs: Mapped[dict[str, Any]]
    source: Mapped[str] = mapped_column(String(32))
    state: Mapped[TrialState] = mapped_column(_enum(TrialState, "state"))
    reason: Mapped[str | None] = mapped_column(String(REASON_LENGTH))
    predicted_step_ms: Mapped[float | None]
    constraint: Mapped[float | None] = mapped_column("constraint_excess")
    created_unix_s: Mapped[float]
    ended_unix_s: Mapped[float | None]


class MeasurementRow(Base):
    """A run of whole update windows."""

    __tablename__ = "measurement"

    measurement_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    trial_id: Mapped[int] = mapped_column(ForeignKey("trial.trial_id", ondelete="CASCADE"), index=True)
    role: Mapped[str] = mapped_column(String(16))
    steps: Mapped[int]
    step_ms: Mapped[float]
    began_unix_s: Mapped[float]
    void_reason: Mapped[str | None] = mapped_column(String(REASON_LENGTH))
    steps_ms: Mapped[list[float]]
    aggregates: Mapped[dict[str, Any]]


class DecisionRow(Base):
    """What was decided, in figures."""

    __tablename__ = "decision"

    decision_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id", ondelete="CASCADE"), index=True)
    trial_id: Mapped[int | None] = mapped_column(ForeignKey("trial.trial_id", ondelete="CASCADE"))
    kind: Mapped[str] = mapped_column(String(16))
    step: Mapped[int | None]
    details: Mapped[dict[str, Any]]
    at_unix_s: Mapped[float]


class CurveRow(Base):
    """How a run went."""

    __tablename__ = "curve"

    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id", ondelete="CASCADE"), primary_key=True)
    points: Mapped[list[Any]]
    changes: Mapped[list[Any]]
