"""What `zftune daemon` hosts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from zftune.daemon.service import Service

_log = logging.getLogger(__name__)


@contextmanager
def hosted() -> Iterator[Sequence[Service]]:
    """The services, with the store open for them; what is wrong with it is logged, and nothing fails for it."""
    from zftune.daemon.brain.registry import Registry
    from zftune.daemon.brain.service import Runs
    from zftune.daemon.sampling import Node
    from zftune.store import open_store

    with open_store() as store:
        for notice in store.notices:
            _log.warning("%s", notice)
        node = Node(lambda: [brain.hello.run for brain in registry.brains() if not brain.over])
        registry = Registry(store, disturbance=node.watch)
        yield (Runs(registry, node),)
