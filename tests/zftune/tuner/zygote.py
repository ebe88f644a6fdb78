"""Everything that a search needs, imported once: what is forked from here begins at once."""

import gc

import tests.zftune.tuner.killable  # noqa: F401

gc.collect()
gc.freeze()  # or every fork would look through all of it
