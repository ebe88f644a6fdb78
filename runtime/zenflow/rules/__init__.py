"""Update rules: elementwise arithmetic on master weights and moments, the same on every tier.

Plain additions, multiplications, divisions and roots, nothing fused: every tier, the reference and a kernel compiled
without contraction then round alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from zenflow.rules.adaptive import Adagrad, AdagradHyper, Adam, AdamHyper, AdamW, AdamWHyper
from zenflow.rules.base import Hyper, Rule
from zenflow.rules.momentum import SGD, Lion, LionHyper, SGDHyper

RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in (AdamW(), Adam(), Adagrad(), Lion(), SGD())})

__all__ = [
    "RULES",
    "SGD",
    "Adagrad",
    "AdagradHyper",
    "Adam",
    "AdamHyper",
    "AdamW",
    "AdamWHyper",
    "Hyper",
    "Lion",
    "LionHyper",
    "Rule",
    "SGDHyper",
]
