"""The settings worth trying on a machine, best first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from zenflow import ZenFlowConfig
from zftune.planner.closed_form import floor, mean_staleness, predict
from zftune.planner.memory import host_bytes, memory
from zftune.planner.model import Job, Machine, Memory, ModelFacts, Prediction
from zftune.planner.rates import Rates
from zftune.planner.split import split_of, totals_of
from zftune.quality import assumed_coverage, most_late_steps, selected_share
from zftune.store.types import STALENESS, Quality

NEAR = 1.02
"""A setting is as good as the best up to this factor of its step time."""
HEADROOM = 0.10
"""Share of device and host memory that stays free."""
LEAST_HEADROOM_BYTES = 2 << 30
"""Of device memory, whatever the share."""

TOPK_RATIOS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
INTERVALS = (*range(1, 17), 20, 24, 32)
OFFLOAD_RATIOS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
_WORTH = 0.005
_ROOM_STEP = 1 << 28  # bytes: `staging_bytes` is proposed in multiples
_FIRST_LOOK = 16
_SECOND_LOOK = 32

Choice = tuple[ZenFlowConfig, Prediction]
PUBLISHED = ZenFlowConfig(topk_ratio=0.1, update_interval=4)
"""The setting of the ZenFlow paper; its staleness is the budget where the user's configuration has none of its own."""


def published_budget(coverage: Callable[[float], float]) -> float:
    """(1 - coverage) * mean staleness of the published setting."""
    window = PUBLISHED.longest_window
    return (1 - coverage(PUBLISHED.topk_ratio)) * ((window - 1) / 2 + (window + 1) / 2)


def budget_of(quality: Quality) -> float:
    """The budget of "exact", "published" or "loose", with the assumed coverage."""
    return STALENESS[quality] * published_budget(assumed_coverage)


def bound_of(
    quality: Quality, movement_percent: float | None, *, guesses: bool = False
) -> tuple[float, Callable[[float], float]]:
    """`budget` and `coverage` of `choose`.

    `movement_percent`: how far a step moves the deferred weights; None: not known, lateness itself is bounded, as it
    is where late weights are guessed.
    """
    if movement_percent is None and not guesses:
        return budget_of(quality), assumed_coverage
    return most_late_steps(quality, movement_percent or 0.0, guesses=guesses), selected_share


def fits(prediction: Prediction, machine: Machine, headroom: float = HEADROOM) -> bool:
    """Whether a setting leaves enough memory free on the device and on the host."""
    memory = prediction.memory
    device, host = limits(machine, headroom)
    return memory.device_bytes <= device and memory.host_bytes + memory.migration_bytes <= host


def limits(machine: Machine, headroom: float = HEADROOM) -> tuple[float, float]:
    """Bytes that a setting may take, of the device and of the host."""
    free = max(headroom * machine.device_memory_bytes, LEAST_HEADROOM_BYTES)
    return machine.device_memory_bytes - free, (1 - headroom) * machine.host_memory_bytes


def least_gpu(device_bytes: float, headroom: float = HEADROOM) -> float:
    """Bytes of a device's memory of which a setting may take so many: the inverse of `limits`."""
    return max(device_bytes / (1 - headroom), device_bytes + LEAST_HEADROOM_BYTES)


def choose(
    model: ModelFacts,
    machine: Machine,
    job: Job,
    *,
    budget: float,
    coverage: Callable[[float], float] = assumed_coverage,
    memory_headroom: float = HEADROOM,
    rates: Rates | None = None,
    base: ZenFlowConfig | None = None,
) -> list[Choice]:
    """The settings that fit, best first: those within 2% of the fastest by least mean staleness, then least device
    memory, then least host memory; after them the slower ones by step time.

    An offload ratio below 1 is among the first only where it wins: where it is more than 2% faster than all of 1, or
    where nothing has to be offloaded at all; then that is the first if it is within 2% of what else would be.

    Args:
        model: what is trained.
        machine: where.
        job: batch and ranks.
        budget: most of (1 - coverage(k)) * mean staleness; 0 allows synchronous windows of one step only.
        coverage: share of the gradient's energy in the top k columns; `selected_share` where movement is what counts:
            something is selected then all the same.
        memory_headroom: share of device and host memory that stays free.
        rates: other ones than those that follow from machine and job.
        base: of a run that trains: of its knobs only those that set what is late change. None: all may.

    Returns:
        Empty where nothing fits.

    Raises:
        BadInputError: the machine has fewer GPUs than the job.
    """
    rates = rates or Rates.of(model, machine, job)
    search = _Search(model, machine, job, rates, memory_headroom, base)
    candidates = [one for one in search.candidates() if (1 - coverage(one.config.topk_ratio)) * one.staleness <= budget]
    if coverage is selected_share:
        candidates = [one for one in candidates if one.config.topk_ratio or not one.staleness]
    # A long window hides most, so the fastest are known first; then the least stale that could be as fast.
    found = search.look(sorted(candidates, key=lambda one: (one.floor_ms, -one.staleness)), _FIRST_LOOK)
    fastest = min((prediction.step_ms for _, prediction in found), default=float("inf"))
    near = [one for one in candidates if one.floor_ms <= NEAR * fastest]
    found += search.look(sorted(near, key=lambda one: (one.staleness, one.device_bytes)), _SECOND_LOOK)
    whole = [one for one in near if one.config.offload_ratio == 1]
    found += search.look(sorted(whole, key=lambda one: (one.staleness, one.device_bytes)), _SECOND_LOOK)
    # What is first may itself be 2% slower than the fastest; see `ranked`.
    found += search.look([one for one in candidates if not one.config.offload_ratio], _SECOND_LOOK)
    return ranked(found)


def ranked(found: Sequence[Choice]) -> list[Choice]:
    """Settings in the order of preference."""
    if not found:
        return []
    fastest = min(prediction.step_ms for _, prediction in found)
    whole = [prediction.step_ms for config, prediction in found if config.offload_ratio in (0, 1)]
    needless = bool(whole) and min(whole) <= NEAR * fastest

    def order(choice: Choice) -> tuple[float, ...]:
        config, prediction = choice
        near = prediction.step_ms <= NEAR * fastest and not (needless and 0 < config.offload_ratio < 1)
        if not near:
            return (1, prediction.step_ms, prediction.staleness_steps)
        size = prediction.memory
        # Where buckets end moves the mean staleness by hundredths.
        return (0, round(prediction.staleness_steps, 1), size.device_bytes, size.host_bytes, prediction.step_ms)

    first, *others = sorted(found, key=order)
    # Who need not offload does not for 2%, though the fastest of all, which is later, may be a little more than that.
    needed_ms = NEAR * first[1].step_ms
    kept = [one for one in others if not one[0].offload_ratio and one[1].step_ms <= needed_ms]
    return [*kept, first, *(one for one in others if one not in kept)]


@dataclass(frozen=True, slots=True)
class _Candidate:
    config: ZenFlowConfig
    floor_ms: float
    staleness: float
    device_bytes: int


class _Search:
    """Looks at settings by their lower bounds first, and simulates those that are worth it."""

    def __init__(
        self,
        model: ModelFacts,
        machine: Machine,
        job: Job,
        rates: Rates,
        headroom: float,
        base: ZenFlowConfig | None,
    ) -> None:
        self._model, self._machine, self._job, self._rates, self._headroom = model, machine, job, rates, headroom
        self._base = base
        self._seen: set[ZenFlowConfig] = set()

    def candidates(self) -> Iterator[_Candidate]:
        """Every setting of the grid that could fit."""
        device, host = limits(self._machine, self._headroom)
        sizes: dict[tuple[float, float], Memory] = {}
        for config in grid() if self._base is None else late_grid(self._base):
            split = totals_of(self._model, config)
            if not split.deferred and config.offload_ratio:
                continue
            key = config.topk_ratio, config.offload_ratio
            if key not in sizes:  # with nothing on its way, the device needs the same whatever S and L
                sizes[key] = memory(self._model, self._job, config, packed=0.0, arrived=0.0)
            size = sizes[key]
            job = self._job
            of_all = sum(host_bytes(self._model, config, ranks=job.shards).values())
            on_host = of_all * job.replicas // job.nodes
            if size.device_bytes <= device and on_host + size.migration_bytes <= host:
                least = floor(self._rates, split, config)
                yield _Candidate(config, least.step_ms, mean_staleness(split, config), size.device_bytes)

    def look(self, candidates: Sequence[_Candidate], most: int) -> list[Choice]:
        """Predict the first so many, as long as one of them could be as good as the best so far."""
        found: list[Choice] = []
        fastest = float("inf")
        for one in candidates:
            if len(found) >= most:
                break
            if one.config in self._seen or one.floor_ms > NEAR * fastest:
                continue
            self._seen.add(one.config)
            choice = self._roomier(one.config, self._predict(one.config))
            if fits(choice[1], self._machine, self._headroom):
                found.append(choice)
                fastest = min(fastest, choice[1].step_ms)
        return found

    def _predict(self, config: ZenFlowConfig) -> Prediction:
        return predict(self._model, self._machine, self._job, config, rates=self._rates)

    def _roomier(self, config: ZenFlowConfig, prediction: Prediction) -> Choice:
        """The setting with room on the device for all weights that arrive in a step, where that is worth it."""
        if self._base is not None or prediction.stall_ms_by_cause["h2d"] <= _WORTH * prediction.step_ms:
            return config, prediction
        shown: Counter[int] = Counter()
        for piece in split_of(self._model, config).pieces:
            shown[piece.due if config.overlap_step else 0] += piece.elements
        arriving = self._model.element_bytes * max(shown.values()) // self._job.shards
        if arriving <= config.staging_bytes:
            return config, prediction
        roomier = replace(config, staging_bytes=-(-arriving // _ROOM_STEP) * _ROOM_STEP)
        other = self._predict(roomier)
        better = other.step_ms < (1 - _WORTH) * prediction.step_ms and fits(other, self._machine, self._headroom)
        return (roomier, other) if better else (config, prediction)


def grid() -> Iterator[ZenFlowConfig]:
    """The settings that the planner considers."""
    yield ZenFlowConfig.zero_offload(offload_ratio=0.0, pipeline="bucket")
    for offload_ratio in OFFLOAD_RATIOS[:-1]:
        yield from late_grid(ZenFlowConfig(offload_ratio=offload_ratio))


def late_grid(base: ZenFlowConfig) -> Iterator[ZenFlowConfig]:
    """Those that differ from a setting only in what is late, and in what never is."""
    for topk_ratio in TOPK_RATIOS:
        yield replace(base, topk_ratio=topk_ratio, update_interval=1, overlap_step=False, apply_lag=None)
        for interval in INTERVALS:
            for lag in (1,) if base.guesses else sorted({1, -(-interval // 2), interval}):
                yield replace(
                    base,
                    topk_ratio=topk_ratio,
                    update_interval=interval,
                    overlap_step=True,
                    apply_lag=None if lag == interval and not base.guesses else lag,
                )
