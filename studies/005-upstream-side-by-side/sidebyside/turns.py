"""One size and one seed: all systems train, turn by turn."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sidebyside.children import Child
from sidebyside.setting import SYSTEMS, Scale, Size

Say = Callable[[str], None]


@dataclass(slots=True)
class Run:
    """What was seen of one system."""

    child: Child
    steps_ms: list[list[float]] = field(default_factory=list)
    """Of each turn's counted steps."""
    parts_ms: list[list[float]] = field(default_factory=list)
    """Forward, backward and the rest: means over each turn's counted steps."""
    processor_ms: list[float] = field(default_factory=list)
    """Processor time of a step, over all its threads and processes: means over whole turns."""
    after_ms: list[float] = field(default_factory=list)
    """How long it went on computing after its turn; not counted."""
    losses: list[float] = field(default_factory=list)
    held_out: dict[str, float] = field(default_factory=dict)
    """By the number of steps taken."""

    def train(self, steps: int) -> list[list[float]]:
        """Steps that do not count."""
        found = self.child.do("train", steps=steps)
        self.losses += [round(loss, 5) for loss in found["losses"]]
        times: list[list[float]] = found["ms"]
        return times

    def turn(self, scale: Scale) -> None:
        """One turn, until it is quiet again."""
        before = self.child.cpu_s()
        counted = self.train(scale.turn)[scale.settling :]
        self.steps_ms.append([round(math.fsum(parts), 3) for parts in counted])
        self.parts_ms.append([round(math.fsum(part) / len(counted), 3) for part in zip(*counted, strict=True)])
        self.after_ms.append(round(self.child.settle(), 1))
        self.processor_ms.append(round(1e3 * (self.child.cpu_s() - before) / scale.turn, 2))

    def evaluate(self, scale: Scale) -> None:
        """The held-out loss as it is now."""
        self.held_out[str(len(self.losses))] = round(self.child.do("evaluate", sequences=scale.sequences), 6)
        self.child.settle()

    def figures(self) -> dict[str, Any]:
        """For the record."""
        host = self.child.do("bytes")
        return {
            "steps_ms": self.steps_ms,
            "parts_ms": self.parts_ms,
            "processor_ms": self.processor_ms,
            "after_ms": self.after_ms,
            "losses": self.losses,
            "held_out": self.held_out,
            "host_bytes": host["bytes"],
            "elements": host["elements"],
        }


def measure(size: Size, seed: int, folder: Path, scale: Scale, say: Say) -> dict[str, Any]:
    """Every system's run, a turn at a time in changing order.

    Raises:
        ChildError: one of them ended.
    """
    label = f"{size.name}, seed {seed}"
    say(f"{label}: starting {len(SYSTEMS)} processes")
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        runs: dict[str, Run] = {}
        for number, (system, port) in enumerate(zip(SYSTEMS.values(), _ports(len(SYSTEMS)), strict=True)):
            start = {"system": system.name, "folder": str(folder), "seed": seed, "port": port}
            child = Child(system, start, Path(logs) / f"{number}.log")
            stack.callback(child.end)
            runs[system.name] = Run(child)
        for run in runs.values():
            run.child.wait_ready()
            run.child.settle()
        for run in runs.values():
            say(f"{label}: first steps of {run.child.system.name}")
            run.evaluate(scale)
            run.train(scale.opening)
            run.child.do("freeze")
            run.child.settle()
        share = _turns(runs, scale, lambda number: say(f"{label}: turn {number + 1} of {scale.turns}"))
        systems = {name: run.figures() for name, run in runs.items()}
    return {"others_share": round(share, 4), "systems": systems}


def _turns(runs: Mapping[str, Run], scale: Scale, say: Callable[[int], None]) -> float:
    """All turns; the share of the processors that others took meanwhile."""
    before = _busy(runs)
    for number in range(scale.turns):
        say(number)
        for name in order(list(runs), number):
            runs[name].turn(scale)
        if (number + 1) % scale.evaluate_every == 0 or number + 1 == scale.turns:
            for run in runs.values():
                run.evaluate(scale)
    total, busy, own = (now - then for now, then in zip(_busy(runs), before, strict=True))
    return max(0.0, busy - own) / total if total > 0 else 0.0


def order(names: Sequence[str], number: int) -> list[str]:
    """Who begins changes from turn to turn, and who follows whom from one to the next."""
    place = number % len(names)
    rotated = [*names[place:], *names[:place]]
    return rotated if number % 2 == 0 else rotated[::-1]


def _busy(runs: Mapping[str, Run]) -> tuple[float, float, float]:
    """Processor seconds so far: all there were, those that were used, those that this study used."""
    times, own = psutil.cpu_times(), os.times()
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)  # in user and nice, too
    idle = times.idle + getattr(times, "iowait", 0.0)
    return total, total - idle, own.user + own.system + math.fsum(run.child.cpu_s() for run in runs.values())


def _ports(count: int) -> list[int]:
    """Free ports, no two alike."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
