"""The scripted run: its model, its four phases with three changes between them, and the settings of the grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zenflow import ZenFlowConfig
from zenflow.layout import BUCKETS_A_MODEL
from zftune.emulation import Rig, RigSpec
from zftune.emulation.machines import load_rig
from zftune.planner.choosing import LEAST_HEADROOM_BYTES
from zftune.tuner.space import Setting

WIDTH, LAYERS = 320, 4
ELEMENTS = LAYERS * WIDTH * WIDTH
ROWS = 32
"""Tokens of a step, before sequences double."""
BASE = ZenFlowConfig(
    topk_ratio=0.1,
    update_interval=4,
    offload_ratio=0.8,
    select_interval=1 << 20,
    bucket_bytes=2 * ELEMENTS // BUCKETS_A_MODEL,
)
"""What the user has: the published setting and a fifth of the state on the GPU. Selections stay as they are, so that a
setting has one time; and there are as many buckets as in a large model."""
START = Setting.of(BASE)

ACTIVATION_BYTES = round(4.8 * ELEMENTS)
"""Of a step, before sequences double."""
_LIMIT_BYTES = round(15.6 * ELEMENTS)
"""What may be used: weights and gradients take 4 bytes an element, and state on the device 12."""
MEMORY_BYTES = _LIMIT_BYTES + LEAST_HEADROOM_BYTES

_PAIRS = ((0.05, 2), (0.1, 4), (0.2, 6), (0.3, 8), (0.4, 12))
"""topk_ratio and the longest window that the budget allows, or nearly so."""
_RATIOS = (0.6, 0.8, 0.9, 1.0)
_BEYOND = ((0.05, 16), (0.1, 16), (0.2, 16))
"""Settings that the budget forbids, measured to show that it binds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A time in which nothing changes."""

    name: str
    sequences: int = 1
    """Their length, in that of the beginning."""
    link: float = 1.0
    """Of its rate at the beginning."""
    host: float = 1.0
    share: float = 1.0
    """Of the tokens of the first phase."""

    def rig(self, base: Rig) -> Rig:
        """The accelerator in this phase."""
        return replace(
            base,
            forward_ms=base.forward_ms * self.sequences,
            backward_ms=base.backward_ms * self.sequences,
            link_d2h_gbps=base.link_d2h_gbps * self.link,
            link_h2d_gbps=base.link_h2d_gbps * self.link,
            host_gbps=base.host_gbps * self.host,
        )

    def steps(self, first: int) -> int:
        """Of this phase, where the first has so many."""
        return round(first * self.share / self.sequences)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return ROWS * self.sequences


PHASES: Sequence[Phase] = (
    Phase(name="as it begins"),
    Phase(name="the link at half its rate", link=0.5),
    Phase(name="a neighbour on half of the host", link=0.5, host=0.5),
    Phase(name="sequences twice as long", link=0.5, host=0.5, sequences=2),
)


def spec() -> RigSpec:
    """The rig of the first phase."""
    return load_rig("long-run")


def candidates() -> Iterator[Setting]:
    """The grid: every pair with every ratio, the user's own setting among them, and some that the budget forbids."""
    for topk_ratio, interval in (*_PAIRS, *_BEYOND):
        for ratio in _RATIOS if (topk_ratio, interval) in _PAIRS else (0.8, 1.0):
            yield replace(
                START, topk_ratio=topk_ratio, update_interval=interval, apply_lag=interval, offload_ratio=ratio
            )


SETTINGS: Sequence[Setting] = tuple(candidates())
QUICK_SETTINGS: Sequence[Setting] = tuple(
    one for one in SETTINGS if one == START or (one.topk_ratio, one.offload_ratio) in ((0.4, 0.8), (0.1, 1.0))
)
