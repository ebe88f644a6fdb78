"""The tables (design: hardware, model, preset, run, trial, measurement, decision). Times `_unix_s` are wall clock."""

from __future__ import annotations

import enum
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Enum,
    ForeignKey,
    Index,
    MetaData,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from zftune.store.types import PresetState, RunState, TrialState

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
    type_annotation_map = {dict[str, Any]: JSON, list[float]: JSON}  # noqa: RUF012 - SQLAlchemy's own spelling


def _enum(kind: type[enum.StrEnum], name: str) -> Enum:
    """Kept as its value, and checked by the database."""
    values = [member.value for member in kind]
    return Enum(kind, name=name, native_enum=False, create_constraint=True, length=16, values_callable=lambda _: values)


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
    nodes: Mapped[int] = mapped_column(server_default="1")
    shards: Mapped[int] = mapped_column(server_default="1")


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
    token_us: Mapped[float]
    mad_us: Mapped[float | None]
    stall_fraction: Mapped[float | None]
    began_unix_s: Mapped[float]
    void_reason: Mapped[str | None] = mapped_column(String(REASON_LENGTH))
    steps_ms: Mapped[list[float]]
    aggregates: Mapped[dict[str, Any]]


class DecisionRow(Base):
    """What was decided, and why."""

    __tablename__ = "decision"

    decision_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id", ondelete="CASCADE"), index=True)
    trial_id: Mapped[int | None] = mapped_column(ForeignKey("trial.trial_id", ondelete="CASCADE"))
    kind: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text)
    step: Mapped[int | None]
    details: Mapped[dict[str, Any]]
    at_unix_s: Mapped[float]
