"""Random tasks for host backends: drawn from a seed, done by any backend, compared bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from tests.support.zenflow.cases import examples, same_bits
from zenflow import CpuDevice
from zenflow.host.backend import Backend
from zenflow.host.native import load_native
from zenflow.host.tasks import Control, HostColumns, HostGradient, LogEntry, ReadMasters, Targets, Task, Unpack, Update
from zenflow.rules import RULES, Hyper, Rule
from zenflow.state import ColumnState

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Rows and columns: single elements, odd rows, more than one block, more than one piece for each of two threads.
SHAPES = ((1, 1), (1, 300), (1, 5000), (3, 40), (7, 33), (31, 65), (64, 9), (65, 8), (1000, 3), (1027, 5), (4097, 2))
LARGE = ((1027, 90), (1, 70_000), (70_001, 1))
SPECIAL = (
    *(0.0, float("inf"), float("nan"), 3.4e38, 65504.0, 65520.0, 1e30, 1.0),
    *(1e-45, 1e-40, 1.1754942e-38, 6e-8, 2.0**-25, 6.1e-5, 9.2e-41, 1 + 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-8),
)
_GUARD = 13  # elements before and behind everything that a task may write
_GUARD_BYTE = 0x5A


def thorough(count: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=examples(count),
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


class Draw:
    """Random numbers of both kinds from one seed."""

    def __init__(self, seed: int, specials: float | None = None) -> None:
        self.rng = random.Random(seed)
        self._torch = torch.Generator().manual_seed(self.rng.getrandbits(63))
        self.specials = self.rng.choice([0.0, 0.0, 0.05, 0.5]) if specials is None else specials
        """Share of the values that are infinite, NaN, denormal, huge, or between two halves."""

    def values(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        shape = tuple(shape)
        plain = torch.randn(shape, generator=self._torch) * torch.randn(shape, generator=self._torch).mul(2).exp()
        table = torch.tensor([*SPECIAL, *(-value for value in SPECIAL)])
        special = table[torch.randint(len(table), shape, generator=self._torch)]
        return torch.where(torch.rand(shape, generator=self._torch) < self.specials, special, plain).to(dtype)

    def some(self, high: int, n: int) -> Tensor:
        """[n] int64 below `high`, in any order, some of them twice."""
        return torch.randint(max(high, 1), (n,), generator=self._torch)

    def index(self, within: range) -> Tensor:
        """At least one of the numbers, each at most once; often in ascending order."""
        found = self.rng.sample(within, self.rng.randint(1, len(within)))
        return torch.tensor(found if self.rng.random() < 0.3 else sorted(found))

    def count(self, columns: int) -> Tensor:
        """Update counts that are all alike, mixed, or large."""
        kind = self.rng.choice(["none", "equal", "mixed", "mixed", "stretches", "large"])
        if kind in ("none", "equal"):
            return torch.full((columns,), 0 if kind == "none" else self.rng.randint(1, 5000), dtype=torch.int32)
        if kind == "stretches":
            return (torch.arange(columns, dtype=torch.int32) // self.rng.randint(1, 9)) % 4
        return self.some(4 if kind == "mixed" else 2_000_000_000, columns).int()

    def hyper(self, rule: Rule) -> Hyper:
        choice = self.rng.choice
        momentum = choice([0.0, 0.5, 0.9])
        nesterov = momentum > 0 and self.rng.random() < 0.5
        return rule.hyper(
            {
                "lr": choice([0.0, 1e-3, 0.1, self.rng.random()]),
                "betas": (choice([0.0, 0.8, 0.9, self.rng.random()]), choice([0.0, 0.95, 0.999, self.rng.random()])),
                "eps": choice([0.0, 1e-8, 1e-3]),
                "weight_decay": choice([0.0, 0.01, 0.3, self.rng.random()]),
                "lr_decay": choice([0.0, 0.1, 3.0]),
                "momentum": momentum,
                "dampening": 0.0 if nesterov else choice([0.0, 0.0, 0.3]),
                "nesterov": nesterov,
            }
        )

    def control(self, void: float) -> Control | None:
        if self.rng.random() < 0.4 and void < 1:
            return None
        factor = self.rng.choice([1.0, 0.5, 1 / 1024, self.rng.random(), 0.0, float("nan"), float("inf")])
        skip = float(self.rng.random() < void)
        return Control(torch.tensor([factor, skip]), arrived())

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """The same elements in memory of their own, cut at multiples of 32 elements or anywhere."""
        unit = self.rng.choice([32, 32, 32, 1])
        most = self.rng.choice([0, 0, 1, 2, 5])
        cuts = sorted(self.rng.randint(0, flat.numel() // unit) * unit for _ in range(most))
        bounds = [0, *cuts, flat.numel()]
        return [flat[low:high].clone() for low, high in pairwise(bounds)]

    def entry(self, step: LogEntry, targets: int, rows: int) -> tuple[LogEntry, Tensor | None]:
        """A step's gradient of some targets, and which row belongs to which of them."""
        kind = self.rng.choice(["all", "all", "more", "shifted", "some", "ascending"])
        packed_rows = targets if kind == "all" else targets + self.rng.randint(1, 9)
        gradient = self.values((packed_rows * rows,), self.rng.choice(DTYPES))
        index = {
            "shifted": torch.arange(targets) + packed_rows - targets,
            "some": self.some(packed_rows, targets),
            "ascending": self.some(packed_rows, targets).sort().values,
        }.get(kind)
        pieces, start = self.pieces(gradient), 0
        if self.rng.random() < 0.5:  # others lie beside it
            start = self.rng.randint(1, 9)
            pieces = [torch.full((start,), torch.nan, dtype=gradient.dtype), *pieces, pieces[0]]
        made = HostGradient(pieces, start, gradient.numel(), arrived())
        return LogEntry(step.step, made, step.hyper, step.control), index


NOTHING: Any = None
"""Of a step whose gradient is drawn later."""


def arrived() -> Any:
    nothing = torch.zeros(1)
    return CpuDevice().d2h(nothing, nothing)


@dataclass(frozen=True)
class Scene:
    """The columns of a weight, and an update of them."""

    rule: Rule
    streams: tuple[Tensor, ...]
    """Master and moments, each [columns, rows] fp32."""
    count: Tensor
    parts: tuple[Targets, ...]
    closing: Hyper | None
    result: torch.dtype | None
    """Of the new weights; int32 for packed state; None for neither."""

    @property
    def targets(self) -> int:
        return sum(len(part.slots) for part in self.parts)


def draw_scene(rule: Rule, seed: int, *, large: bool = False, specials: float | None = None) -> Scene:
    """Any update that the runtime could ask for, and some that it does not."""
    draw = Draw(seed, specials)
    rng = draw.rng
    rows, columns = rng.choice(LARGE if large else SHAPES)
    steps = _steps(draw, rule)
    zones = sorted(rng.randint(0, columns) for _ in range(rng.choice([0, 0, 1, 2])))
    bounds = [0, *zones, columns]
    slots = [_slots(draw, range(low, high)) for low, high in pairwise(bounds)]
    n = sum(len(of_part) for of_part in slots)
    out = torch.tensor(rng.sample(range(n), n) if rng.random() < 0.5 else range(n), dtype=torch.int64)
    in_order = len(slots) == 1 and rng.random() < 0.5
    outs = [None] if in_order else out.split([len(of_part) for of_part in slots])
    parts = tuple(
        Targets(of_part, [draw.entry(step, len(of_part), rows) for step in steps], out_of_part)
        for of_part, out_of_part in zip(slots, outs, strict=True)
    )
    moments = [draw.values((columns, rows), torch.float32).abs() for _ in range(rule.moments)]
    return Scene(
        rule,
        (draw.values((columns, rows), torch.float32), *moments),
        draw.count(columns),
        parts,
        draw.hyper(rule) if rng.random() < 0.5 else None,
        rng.choice([None, torch.int32, torch.int32, *DTYPES, *DTYPES]),
    )


def _steps(draw: Draw, rule: Rule) -> list[LogEntry]:
    """The window without its gradients."""
    void = draw.rng.choice([0.0, 0.0, 0.3, 1.0])
    constant = draw.hyper(rule) if draw.rng.random() < 0.3 else None
    count = draw.rng.randint(1, 9)
    return [LogEntry(t, NOTHING, constant or draw.hyper(rule), draw.control(void)) for t in range(count)]


def _slots(draw: Draw, zone: range) -> range | Tensor:
    kind = draw.rng.choice(["all", "range", "holes", "holes", "one", "one"])
    if kind == "all" or not zone:
        return zone
    if kind == "one":
        slot = draw.rng.choice(zone)
        return range(slot, slot + 1) if draw.rng.random() < 0.5 else torch.tensor([slot])
    if kind == "range":
        low = draw.rng.choice(zone)
        return range(low, draw.rng.randint(low, zone.stop))
    return draw.index(zone)


def guarded(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory with guards around it: all of it, and the inner part in its shape."""
    elements = torch.Size(shape).numel()
    nbytes = (elements + 2 * _GUARD) * dtype.itemsize
    whole = torch.full((nbytes,), _GUARD_BYTE, dtype=torch.uint8).view(dtype)
    return whole, whole[_GUARD : _GUARD + elements].view(tuple(shape))


def assert_guards(whole: Tensor, name: str) -> None:
    for side, guard in (("before", whole[:_GUARD]), ("behind", whole[-_GUARD:])):
        assert bool((guard.view(torch.uint8) == _GUARD_BYTE).all()), f"written {side} {name}"


class Memory:
    """A copy of columns' state in guarded memory, known to a backend."""

    def __init__(self, backend: Backend, rule: Rule, streams: Sequence[Tensor], count: Tensor) -> None:
        self._wholes: dict[str, Tensor] = {}
        self._backend = backend
        names = ["master", *(f"moment {i}" for i in range(len(streams) - 1)), "count"]
        copies = [self.place(name, tensor) for name, tensor in zip(names, [*streams, count], strict=True)]
        self.state = ColumnState.over(copies[:-1], copies[-1])
        self.columns = HostColumns(rule, self.state, backend.register(rule, self.state))

    def place(self, name: str, tensor: Tensor) -> Tensor:
        whole, inner = guarded(tensor.shape, tensor.dtype)
        inner.copy_(tensor)
        self._wholes[name] = whole
        return inner

    def do(self, task: Task) -> None:
        self._backend.finish(self._backend.start(task))
        for name, whole in self._wholes.items():
            assert_guards(whole, name)


def update(scene: Scene, backend: Backend) -> tuple[ColumnState, Tensor | None]:
    """Do the scene's update with a backend.

    Returns:
        The state afterwards, and the result: weights [n, rows], or packed state [n, packed_columns] int32.
    """
    memory = Memory(backend, scene.rule, scene.streams, scene.count)
    result = None
    if scene.result is not None:
        width = memory.state.packed_columns if scene.result == torch.int32 else memory.state.master.shape[1]
        result = memory.place("result", torch.full((scene.targets, width), 7, dtype=scene.result))
    weights, packed = (None, result) if scene.result == torch.int32 else (result, None)
    memory.do(Update(memory.columns, scene.parts, scene.closing, weights, packed))
    return memory.state, result


def same(ours: Tensor, theirs: Tensor, name: str) -> None:
    """Bitwise equality, NaN as NaN; packed state is compared as what it stands for."""
    if ours.dtype == torch.int32 and ours.dim() == 2:
        assert torch.equal(ours[:, -1], theirs[:, -1]), f"counts in {name}"
        ours, theirs = ours[:, :-1].view(torch.float32), theirs[:, :-1].view(torch.float32)
    equal = same_bits(ours, theirs) if ours.is_floating_point() else ours == theirs
    where = (~equal).nonzero()[:4].tolist()
    assert where == [], f"{name} differs: {ours[~equal][:4].tolist()} against {theirs[~equal][:4].tolist()}"


def same_state(ours: ColumnState, theirs: ColumnState) -> None:
    for number, (mine, other) in enumerate(zip(ours.moments, theirs.moments, strict=True)):
        same(mine, other, f"moment {number}")
    same(ours.master, theirs.master, "master")
    same(ours.count, theirs.count, "count")


def assert_untouched(scene: Scene, state: ColumnState) -> None:
    """Slots that are not targets, against what they were."""
    others = torch.ones(len(scene.count), dtype=torch.bool)
    for part in scene.parts:
        others[list(part.slots) if isinstance(part.slots, range) else part.slots] = False
    for stream, before in zip((state.master, *state.moments), scene.streams, strict=True):
        same(stream[others], before[others], "a slot that is no target")
    same(state.count[others], scene.count[others], "the count of a slot that is no target")


def drawn_memories(draw: Draw, rule: Rule, *backends: Any) -> list[Memory]:
    rows, columns = draw.rng.choice([(1, 1), (1, 200), (7, 33), (1000, 3), (1027, 20)])
    streams = [draw.values((columns, rows), torch.float32) for _ in range(1 + rule.moments)]
    count = draw.count(columns)
    return [Memory(backend, rule, streams, count) for backend in backends]


def drawn_range(draw: Draw, columns: int) -> range:
    low = draw.rng.randint(0, columns - 1)
    return range(low, draw.rng.randint(low, columns))


def drawn_weights(draw: Draw, state: ColumnState, slots: range, dtype: torch.dtype) -> Tensor:
    """Some are what the masters round to."""
    masters = state.master[slots.start : slots.stop]
    fresh = draw.values(masters.shape, dtype)
    return torch.where(fresh.float() > 0, fresh, masters.to(dtype))


def draw_pair(draw: Draw, rule: Rule, ours: Memory, theirs: Memory) -> tuple[Task, Task]:
    """The same task for two copies of the columns."""
    columns, rows = ours.state.master.shape
    kind = draw.rng.choice(["update", "update", "update", "pack", "read", "unpack"])
    if kind == "read":
        slots = drawn_range(draw, columns)
        weights, keep = drawn_weights(draw, ours.state, slots, draw.rng.choice(DTYPES)), draw.rng.random() < 0.5
        return ReadMasters(ours.columns, slots, weights, keep), ReadMasters(theirs.columns, slots, weights, keep)
    index = draw.index(range(columns))
    if kind == "unpack":
        packed = draw.values((len(index), ours.state.packed_columns), torch.float32).view(torch.int32)
        packed[:, -1] = draw.count(len(index))
        return Unpack(ours.columns, index, packed), Unpack(theirs.columns, index, packed)
    steps = [LogEntry(step, NOTHING, draw.hyper(rule), draw.control(0.2)) for step in range(3)]
    part = Targets(index, [draw.entry(step, len(index), rows) for step in steps])
    closing = draw.hyper(rule) if draw.rng.random() < 0.5 else None
    if kind == "pack":
        results = [torch.zeros(len(index), ours.state.packed_columns, dtype=torch.int32) for _ in range(2)]
        mine, other = (
            Update(memory.columns, [part], closing, packed=result)
            for memory, result in zip((ours, theirs), results, strict=True)
        )
        return mine, other
    dtype = draw.rng.choice(DTYPES)
    mine, other = (
        Update(memory.columns, [part], closing, weights=torch.zeros(len(index), rows, dtype=dtype))
        for memory in (ours, theirs)
    )
    return mine, other


class Raw:
    """Calls of the native module itself, with any argument replaced: 4 columns of 3 rows, SGD.

    An update's window has two gradients, for the slots 1 and 2.
    """

    def __init__(self) -> None:
        self.native: Any = load_native()
        self.engine = self.native.Engine([-1, -1])
        self.state = torch.zeros(2, 4, 3)
        self.count = torch.zeros(4, dtype=torch.int32)
        self.gradient = torch.ones(2, 3)
        self.results = torch.zeros(100, 3)  # room for rows that must be refused
        self.weight = self.register()

    def register(self, **wrong: Any) -> int:
        master, moment = (stream.data_ptr() for stream in self.state)
        arguments = {"rule": "sgd", "columns": 4, "rows": 3, "master": master, "moments": [moment]}
        weight: int = self.engine.register(**{**arguments, "count": self.count.data_ptr(), **wrong})
        return weight

    def entry(self, **wrong: Any) -> Any:
        extents = [(self.gradient.data_ptr(), 4), (self.gradient.data_ptr() + 16, 2)]
        hyper = RULES["sgd"].hyper({"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0})
        arguments = {"extents": extents, "dtype": "fp32", "hyper": (hyper.numbers, 1.0), "factor": 1.0, "rows": None}
        return self.native.Entry(**{**arguments, **wrong})

    def part(self, entries: Any = None, **wrong: Any) -> Any:
        arguments = {"first": 1, "targets": 2, "slots": None, "out": None}
        return self.native.Part(**{**arguments, "entries": entries or [self.entry(), self.entry()], **wrong})

    def update(self, *parts: Any, **wrong: Any) -> int:
        arguments = {"mean": None, "weights": (self.results[40].data_ptr(), "fp32"), "packed": None}
        weight = wrong.pop("weight", self.weight)
        ticket: int = self.engine.update(weight, list(parts) or [self.part()], **{**arguments, **wrong})
        return ticket

    def read(self, **wrong: Any) -> int:
        weights = self.gradient.data_ptr()
        arguments = {"weight": self.weight, "first": 1, "targets": 2, "weights": weights, "dtype": "fp32"}
        ticket: int = self.engine.read(**{**arguments, "keep": False, **wrong})
        return ticket

    def unpack(self, *slots: int) -> int:
        ticket: int = self.engine.unpack(self.weight, indices(*slots), torch.zeros(2, 7).data_ptr())
        return ticket


def indices(*rows: int) -> Any:
    return np.array(rows, dtype=np.int64)
