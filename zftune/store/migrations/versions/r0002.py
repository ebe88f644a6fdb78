"""Presets and runs of several ranks: on how many machines, and whether weights were sharded."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Columns of the key. What was kept before was of ranks on one machine that had all of the weights each."""
    for table in ("preset", "run"):
        for name in ("nodes", "shards"):
            op.add_column(table, sa.Column(name, sa.Integer(), server_default="1", nullable=False))
