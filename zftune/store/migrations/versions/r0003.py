"""The tables."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """All of them."""
    _facts()
    _preset()
    _run()
    _trial()
    _measurement()
    _decision()
    _curve()


def _key() -> list[sa.Column[Any]]:
    return [
        sa.Column("model_id", sa.String(length=16), sa.ForeignKey("model.model_id"), nullable=False),
        sa.Column("hw_id", sa.String(length=16), sa.ForeignKey("hardware.hw_id"), nullable=False),
        sa.Column("backend", sa.String(length=16), nullable=False),
        sa.Column("stage", sa.Integer(), nullable=False),
        sa.Column("dtype", sa.String(length=32), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("micro_batch", sa.Integer(), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("checkpointing", sa.Boolean(), nullable=False),
        sa.Column("quality", sa.String(length=16), nullable=False),
        sa.Column("nodes", sa.Integer(), nullable=False),
        sa.Column("shards", sa.Integer(), nullable=False),
    ]


def _state(*values: str) -> sa.Column[Any]:
    kind = sa.Enum(*values, name="state", native_enum=False, create_constraint=True, length=16)
    return sa.Column("state", kind, nullable=False)


def _facts() -> None:
    op.create_table(
        "hardware",
        sa.Column("hw_id", sa.String(length=16), primary_key=True),
        sa.Column("gpu", sa.String(length=200)),
        sa.Column("gpu_memory_bytes", sa.BigInteger()),
        sa.Column("cpu_model", sa.String(length=200)),
        sa.Column("numa_nodes", sa.Integer()),
        sa.Column("ram_bytes", sa.BigInteger()),
        sa.Column("rig", sa.String(length=200)),
        sa.Column("imported", sa.Boolean(), nullable=False),
    )
    op.create_table(
        "model",
        sa.Column("model_id", sa.String(length=16), primary_key=True),
        sa.Column("name", sa.String(length=200)),
        sa.Column("parameters", sa.BigInteger()),
        sa.Column("trainable", sa.BigInteger()),
        sa.Column("dtype", sa.String(length=32)),
        sa.Column("imported", sa.Boolean(), nullable=False),
    )


def _preset() -> None:
    op.create_table(
        "preset",
        sa.Column("preset_id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("name", sa.String(length=64), nullable=False, unique=True),
        sa.Column("knobs", sa.JSON(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("usable_cores", sa.Double()),
        sa.Column("host_over_compute", sa.Double()),
        sa.Column("link_over_compute", sa.Double()),
        sa.Column("imported", sa.Boolean(), nullable=False),
        _state("active", "withdrawn"),
        sa.Column("lost_comparisons", sa.Integer(), nullable=False),
        sa.Column("withdrawn", sa.JSON()),
        sa.Column("created_unix_s", sa.Double(), nullable=False),
        *_key(),
        sa.CheckConstraint("lost_comparisons >= 0", name="lost_comparisons"),
    )
    op.create_index("ix_preset_key", "preset", ["model_id", "hw_id"])


def _run() -> None:
    op.create_table(
        "run",
        sa.Column("run_id", sa.String(length=32), primary_key=True),
        sa.Column("token", sa.String(length=32), nullable=False),
        _state("running", "finished", "lost"),
        sa.Column("knobs", sa.JSON(), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("usable_cores", sa.Double()),
        sa.Column("began_unix_s", sa.Double(), nullable=False),
        sa.Column("lease_until_unix_s", sa.Double(), nullable=False),
        sa.Column("ended_unix_s", sa.Double()),
        sa.Column("account", sa.JSON()),
        sa.Column("search", sa.JSON()),
        *_key(),
    )
    op.create_index("ix_run_key", "run", ["model_id", "hw_id"])
    op.create_index("ix_run_state", "run", ["state"])


def _trial() -> None:
    op.create_table(
        "trial",
        sa.Column("trial_id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("run_id", sa.String(length=32), sa.ForeignKey("run.run_id", ondelete="CASCADE"), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("knobs", sa.JSON(), nullable=False),
        sa.Column("source", sa.String(length=32), nullable=False),
        _state("planned", "in_flight", "measured", "rejected", "crashed", "void", "aborted"),
        sa.Column("reason", sa.String(length=1000)),
        sa.Column("predicted_step_ms", sa.Double()),
        sa.Column("constraint_excess", sa.Double()),
        sa.Column("created_unix_s", sa.Double(), nullable=False),
        sa.Column("ended_unix_s", sa.Double()),
        sa.UniqueConstraint("run_id", "number"),
    )


def _measurement() -> None:
    op.create_table(
        "measurement",
        sa.Column("measurement_id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("trial_id", sa.Integer(), sa.ForeignKey("trial.trial_id", ondelete="CASCADE"), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("step_ms", sa.Double(), nullable=False),
        sa.Column("began_unix_s", sa.Double(), nullable=False),
        sa.Column("void_reason", sa.String(length=1000)),
        sa.Column("steps_ms", sa.JSON(), nullable=False),
        sa.Column("aggregates", sa.JSON(), nullable=False),
    )
    op.create_index("ix_measurement_trial_id", "measurement", ["trial_id"])


def _decision() -> None:
    op.create_table(
        "decision",
        sa.Column("decision_id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("run_id", sa.String(length=32), sa.ForeignKey("run.run_id", ondelete="CASCADE"), nullable=False),
        sa.Column("trial_id", sa.Integer(), sa.ForeignKey("trial.trial_id", ondelete="CASCADE")),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("step", sa.Integer()),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("at_unix_s", sa.Double(), nullable=False),
    )
    op.create_index("ix_decision_run_id", "decision", ["run_id"])


def _curve() -> None:
    op.create_table(
        "curve",
        sa.Column("run_id", sa.String(length=32), sa.ForeignKey("run.run_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("points", sa.JSON(), nullable=False),
        sa.Column("changes", sa.JSON(), nullable=False),
    )
