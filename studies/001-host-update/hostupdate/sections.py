"""The parts of the study, each one record: a size of the state, and the main thread beside the engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import torch

from hostupdate import engine as native
from hostupdate.contenders import (
    BlockedContender,
    Contender,
    Inputs,
    OptimizerContender,
    OptimizerKind,
    UnavailableError,
)
from hostupdate.machine import COLUMN, GRADIENT_BYTES, RESULT_BYTES, STATE_BYTES, Machine
from hostupdate.main_thread import Work, loop_beside
from hostupdate.oracle import ALLOWED_ULP, check, random_inputs
from hostupdate.timing import (
    IN_CACHE,
    PASS,
    Sampler,
    Setting,
    interleave,
    pass_sampler,
    rows_of,
    settings,
    window_sampler,
)
from zftune.telemetry.bandwidth import host_bandwidth

INTERVALS = (1, 4, 8)
MAIN_THREAD = "main-thread"
_BLOCK = 1 << 19  # elements; see BlockedContender
_IN_CACHE_INTERVAL = 64  # so that starting a task does not count
_COLD_SHARE = 4  # of the last-level cache: state that leaves nothing of itself in it between two windows
_LOOP_SHARE, _LOOP_WINDOWS = 2, 4  # beside the Python loop: size of the state, windows queued at a time
_CONTENDER_BYTES = STATE_BYTES + 8 + RESULT_BYTES  # an element, with two fp32 buffers

Say = Callable[[str], None]


class DisagreementError(Exception):
    """A contender does not compute AdamW; its time would mean nothing."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much state, in terms of the last-level cache."""

    name: str
    title: str
    llc_share: float
    in_blocks: bool = False
    """Whether the rivals also run block by block; a small state is one block."""


SIZES = (
    Size("cache", "cache-resident", 1 / 16),
    Size("llc", "as large as the last-level cache", 1.0),
    Size("memory", "10 times the last-level cache", 10.0, in_blocks=True),
)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    rounds: int
    in_blocks: bool
    loop_rounds: int
    loop_s: float


def measure_size(machine: Machine, size: Size, rivals: Sequence[OptimizerKind], effort: Effort, say: Say) -> Any:
    """Every kind of window on one size of state, all contenders in turn.

    Raises:
        DisagreementError: a contender's result is not AdamW's.
        MemoryError: the machine has too little memory for it.
    """
    n, seed = machine.elements(size.llc_share), random.SystemRandom().getrandbits(32)
    in_blocks = size.in_blocks and effort.in_blocks
    _check_memory(n, contenders=1 + len(rivals) * (1 + in_blocks))
    torch.set_num_threads(machine.threads)
    inputs = random_inputs(n, max(INTERVALS), seed)
    missing: dict[str, str] = {}
    done = iter(range(1, effort.rounds + 1))
    with ExitStack() as stack:
        first = _engine(machine, missing)
        contenders = [*_rivals(rivals, in_blocks), *([] if first is None else [first])]
        agreement = {}
        for contender in contenders:
            say(f"{size.title}: checking {contender.name}")
            stack.callback(contender.close)
            contender.prepare(inputs)
            agreement[contender.name] = _checked(contender, inputs, seed)
        in_cache = None if first is None else _in_cache_sampler(machine, seed, stack)
        times = interleave(
            {s: _samplers(machine, contenders, s, size, in_cache) for s in settings(INTERVALS)},
            None if first is None else first.name,
            effort.rounds,
            random.Random(seed),
            lambda: say(f"{size.title}: round {next(done)} of {effort.rounds}"),
        )
    return {"elements": n, "seed": seed, "agreement": agreement, "missing": missing, "rows": rows_of(times)}


def measure_main_thread(machine: Machine, effort: Effort, say: Say) -> Any:
    """A pure-Python loop beside the engine, and beside other native code for comparison."""
    if machine.threads < 2 or -1 in machine.cores:
        return {
            "missing": {MAIN_THREAD: "a Python loop and the engine need a core each, and here there is one at most"}
        }
    loop_core, work_core = machine.cores[0], machine.cores[-1]
    n, seed = machine.elements(_LOOP_SHARE), random.SystemRandom().getrandbits(32)
    inputs = random_inputs(n, max(INTERVALS), seed)
    missing: dict[str, str] = {}
    rows: dict[str, Any] = {}

    def beside(name: str, work: Work) -> None:
        say(f"a Python loop beside: {name}")
        rows[name] = loop_beside(work, (loop_core, work_core), rounds=effort.loop_rounds, loop_s=effort.loop_s)

    first = _engine(machine, missing, cores=(work_core,))
    if first is not None:
        first.prepare(inputs)
        beside(first.name, lambda: first.apply(max(INTERVALS), replay=True, times=_LOOP_WINDOWS))
        first.close()
    # No interpreter between the passes of one call: what the loop loses here is not the engine's doing.
    passes = _LOOP_WINDOWS * max(INTERVALS)
    beside(PASS, lambda: _discard(host_bandwidth(elements=n, threads=1, repeats=passes)))
    return {"seed": seed, "cores": {"loop": loop_core, "work": work_core}, "missing": missing, "rows": rows}


def _discard(_: object) -> None:
    pass


def _engine(machine: Machine, missing: dict[str, str], cores: Sequence[int] | None = None) -> Contender | None:
    try:
        return native.engine(machine.cores if cores is None else cores)
    except UnavailableError as error:
        missing[native.NAME] = str(error)
        return None


def _rivals(kinds: Sequence[OptimizerKind], in_blocks: bool) -> list[Contender]:
    whole: list[Contender] = [OptimizerContender(kind) for kind in kinds]
    return whole + [BlockedContender(kind, _BLOCK) for kind in kinds if in_blocks]


def _checked(contender: Contender, inputs: Inputs, seed: int) -> dict[str, Any]:
    found = check(contender, inputs, INTERVALS)
    if not found.agrees:
        raise DisagreementError(
            f"{contender.name} is not AdamW: {found.last_ulp:.3g} ulp off after {found.updates} updates "
            f"(allowed {ALLOWED_ULP:g} an update), {found.results_off} results wrongly rounded, seed {seed}"
        )
    return asdict(found)


def _samplers(
    machine: Machine, contenders: Sequence[Contender], setting: Setting, size: Size, in_cache: Sampler | None
) -> dict[str, Sampler]:
    n = machine.elements(size.llc_share)
    found = {c.name: window_sampler(c, setting, n, warm=size.llc_share < _COLD_SHARE) for c in contenders}
    found[PASS] = pass_sampler(machine, n, setting.interval)
    if in_cache is not None and setting.replay:
        found[IN_CACHE] = in_cache
    return found


def _in_cache_sampler(machine: Machine, seed: int, stack: ExitStack) -> Sampler:
    """The engine's arithmetic alone: state and one gradient in half of the cores' second-level caches."""
    elements = machine.l2_bytes // 2 // (STATE_BYTES + GRADIENT_BYTES + RESULT_BYTES) // COLUMN * COLUMN
    contender = native.engine(machine.cores)
    stack.callback(contender.close)
    inputs = random_inputs(elements, 1, seed)
    contender.prepare(replace(inputs, log=list(inputs.log) * _IN_CACHE_INTERVAL))
    return window_sampler(contender, Setting(_IN_CACHE_INTERVAL, replay=True), elements, warm=True)


def _check_memory(n: int, contenders: int) -> None:
    log = max(INTERVALS) * GRADIENT_BYTES
    needed = n * (STATE_BYTES + log + contenders * _CONTENDER_BYTES + STATE_BYTES + log + RESULT_BYTES)
    if needed > (available := psutil.virtual_memory().available):
        raise MemoryError(f"{n} elements need {needed / 1e9:.1f} GB for all contenders, {available / 1e9:.1f} are free")
