"""Everything that a daemon and a training need, imported once: what is forked from here begins at once."""

import gc

import uvicorn.protocols.http.h11_impl
import uvicorn.server  # noqa: F401

import tests.zftune.daemon.faults.lives  # noqa: F401
import zftune.planner
import zftune.store.opening
import zftune.store.store
import zftune.tuner.preparing  # noqa: F401

gc.collect()
gc.freeze()  # or every fork would look through all of it
