"""Revisions of the schema: which this program knows, and how an older database becomes the newest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy import Connection

REVISIONS = ("0001", "0002")
"""Oldest first. They are the files of `migrations/versions`; Alembic is imported only where one has to be run."""
HEAD = REVISIONS[-1]

MIGRATIONS = Path(__file__).with_name("migrations")


def upgrade(connection: Connection) -> None:
    """Bring a database to the newest schema, within the connection's transaction.

    Raises:
        SQLAlchemyError: a statement failed.
    """
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
