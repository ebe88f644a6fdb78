"""How a run went: step time, loss and coverage over its steps, and where its knobs changed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """A table beside that of the runs: it is written often, and read only where a run is looked at."""
    op.create_table(
        "curve",
        sa.Column("run_id", sa.String(length=32), sa.ForeignKey("run.run_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("points", sa.JSON(), nullable=False),
        sa.Column("changes", sa.JSON(), nullable=False),
    )
