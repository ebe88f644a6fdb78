"""The environment variables that zftune and the processes it starts read."""

from __future__ import annotations

_OF_AGENT = DIR, VERSION, WARMUP, STEPS, STOP, RUN, ONLINE, FRESH, DISABLE = (
    "ZFTUNE_AGENT_DIR",
    "ZFTUNE_AGENT_VERSION",
    "ZFTUNE_AGENT_WARMUP",
    "ZFTUNE_AGENT_STEPS",
    "ZFTUNE_AGENT_STOP",
    "ZFTUNE_RUN",
    "ZFTUNE_ONLINE",
    "ZFTUNE_FRESH",
    "ZFTUNE_DISABLE",
)
"""Environment variables that the agent reads."""

PUBLIC = {
    "ZFTUNE_DB": "Where results are kept: a path or a `file:` URI of an SQLite database, or the URL of a PostgreSQL one"
    " (`postgresql+psycopg://`). Default: `~/.local/share/zftune/zftune.db`.",
    "ZFTUNE_SOCKET": "The daemon's Unix socket. Default: `$XDG_RUNTIME_DIR/zftune/zftune.sock`, else in a folder of"
    " your own in the one for temporary files.",
    ONLINE: "`daemon`: `zftune.attach` leaves the search to the daemon. Unset, the training's own process searches.",
    DISABLE: "`1` turns the agent off: nothing is profiled, replaced or refused in the process that has it.",
}
"""Environment variables that users set, and what each does."""

READ = (*_OF_AGENT, "ZFTUNE_DB", "ZFTUNE_SOCKET", "ZENFLOW_KERNELS", "ZENFLOW_NATIVE")
"""Environment variables that anybody in this package or in zenflow reads."""

NOBODY = "nobody"
"""In ONLINE: knobs come from a schedule, and no tuner may change them."""
