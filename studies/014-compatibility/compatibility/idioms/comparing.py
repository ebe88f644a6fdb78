"""An idiom with DeepSpeed beside the same with torch alone: does it read the same?"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from compatibility.cells import Cell
from compatibility.idioms.listing import idiom
from compatibility.idioms.script import Script
from compatibility.idioms.sides import DeepSpeed, Plain, oracle


def compared_idiom(cell: Cell) -> dict[str, Any]:
    """Run an idiom on both sides.

    Args:
        cell: that names it.

    Returns:
        "reads": how many tensors it read; "off": the greatest difference of an element, as a share of the largest in
        its tensor, or of 1 if that is more (None: it is not finite); "what": was read there.
    """
    script = idiom(cell.row)
    expected = Script(Plain(oracle(cell.config, windowed=cell.windowed))).run(script)
    seen = Script(DeepSpeed(cell.config)).run(script)
    if [what for what, _ in seen] != [what for what, _ in expected]:
        raise AssertionError("the script has read other things than with torch alone")
    off, what = max((_off(tensor, right), what) for (what, tensor), (_, right) in zip(seen, expected, strict=True))
    return {"reads": len(seen), "off": float(f"{off:.3g}") if math.isfinite(off) else None, "what": what}


def _off(tensor: Tensor, right: Tensor) -> float:
    if not bool(torch.isfinite(tensor).all()):
        return math.inf
    return float((tensor - right).abs().max()) / max(1.0, float(right.abs().max()))
