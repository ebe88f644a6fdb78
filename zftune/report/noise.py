"""How far a mean over measured steps may be off, by resampling them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_RESAMPLES = 1000
_SEED = 0  # the same two files always compare alike
_LEAST_BLOCKS = 4


def standard_error(values: Sequence[float], window: int) -> float | None:
    """Bootstrap standard error of the mean of `values`, one for each step.

    Steps of an update window differ by their place in it, which is no noise: whole windows are resampled where there
    are at least four of them, else single steps, which gives a larger error.

    Args:
        values: in the order of the steps.
        window: steps in an update window.

    Returns:
        None where there are fewer than two steps.
    """
    if len(values) < 2:
        return None
    blocks = np.asarray(values, dtype=np.float64)
    windows = len(values) // window
    if windows >= _LEAST_BLOCKS:
        blocks = blocks[: windows * window].reshape(windows, window).mean(axis=1)
    generator = np.random.default_rng(_SEED)
    draws = generator.integers(0, len(blocks), (_RESAMPLES, len(blocks)))
    return float(blocks[draws].mean(axis=1).std(ddof=1))
