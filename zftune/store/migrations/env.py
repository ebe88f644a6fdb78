"""What Alembic runs: within the transaction of the connection that it is given.

`alembic revision` needs none; it is told by `zftune.store.opening`.
"""

from __future__ import annotations

from alembic import context

from zftune.store.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
    transactional_ddl=False,  # the caller's transaction holds all of it, SQLite's too
)
context.run_migrations()
