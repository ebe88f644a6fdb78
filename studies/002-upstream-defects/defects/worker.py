"""Runs one defect in this process: `python worker.py NAME FILE`; FILE has what is known so far if it ends early."""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # an overlapped update's process begins by reading this file again
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]


def main(name: str, file: Path, parts: tuple[str, ...]) -> None:
    """Run a defect's parts and write each figure as soon as it is there."""
    import torch

    from defects.case import Defect, raised
    from defects.upstream import prepared

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    defect: Defect = importlib.import_module(f"defects.{name}").DEFECT
    figures: dict[str, Any] = {}

    def measure(part: str, attempt: Callable[[], Any]) -> None:
        if part not in parts:
            return
        start = time.perf_counter()
        figures[part] = raised(attempt)
        figures.setdefault("seconds", {})[part] = round(time.perf_counter() - start, 2)
        file.write_text(json.dumps(figures), encoding="utf-8")

    measure("expected", defect.expected)
    measure("ours", defect.ours)
    if not {"control", "upstream"} & set(parts):
        return
    with prepared():
        if defect.control is not None:
            measure("control", defect.control)
        measure("upstream", defect.upstream)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), tuple(sys.argv[3:]) or ("expected", "ours", "control", "upstream"))
