"""The account of a run, and why a preset was withdrawn."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Two columns. Of runs that were kept before, the account is made from their measurements where it is read."""
    op.add_column("run", sa.Column("account", sa.JSON()))
    op.add_column("preset", sa.Column("withdrawn", sa.JSON()))
