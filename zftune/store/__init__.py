"""What zftune remembers: presets, and every run with its trials, measurements and decisions.

`open_store` always gives a store. What could not be had, such as a home folder that can be written, is a sentence in
`Store.notices`; a write that fails raises `StoreError`, which callers turn into a notice too: no training run may fail
because of the store. SQLAlchemy is imported by `open_store`, not before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from zftune.store.location import DATABASE, home_of

if TYPE_CHECKING:
    from zftune.store.store import Store


def open_store(
    url: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    clock: Callable[[], float] = time.time,
) -> Store:
    """Open the store. This never fails; `Store.notices` says what is not as it should be, a sentence each.

    Args:
        url: a path or a URL of SQLAlchemy; by default $ZFTUNE_DB, else $XDG_DATA_HOME/zftune/zftune.db.
        environment: by default this process's.
        root: stands for "/" where the mounts are read.
        clock: wall clock, seconds.
    """
    from zftune.store.opening import open_database
    from zftune.store.store import Store

    environment = os.environ if environment is None else environment
    value = environment.get(DATABASE, "") if url is None else url
    database, path, notices = open_database(value, environment, home_of(environment), root, clock)
    return Store(database, path, notices, clock)
