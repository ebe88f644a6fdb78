"""The closed form: what each resource has to do in a step, and the shortest window that the host keeps up with."""

from __future__ import annotations

from dataclasses import dataclass

from zenflow import ZenFlowConfig
from zftune.planner.rates import Rates, device_work_ms
from zftune.planner.split import Split

_LONGEST = 4096


@dataclass(frozen=True, slots=True)
class Floor:
    """Lower bounds of a step."""

    loads_ms: dict[str, float]
    """Time a step that each resource needs, whatever overlaps."""
    step_ms: float
    """The largest of them; where nothing overlaps, what follows each other."""
    s_min: int | None
    bound_by: str


def least_window(rates: Rates, deferred: float, compute_ms: float) -> int | None:
    """S_min: the least S with T_host(S) <= S c; None: no window is long enough.

    Args:
        rates: of a rank.
        deferred: elements of a rank.
        compute_ms: c, with the runtime's own kernels.
    """
    if deferred == 0:
        return 1
    # T_host(S) = max(fixed + slope S, S / U): linear in S, so two windows give fixed and slope.
    if rates.host_ms(deferred, _LONGEST) > _LONGEST * compute_ms:
        return None
    low, high = 1, _LONGEST
    while low < high:
        middle = (low + high) // 2
        if rates.host_ms(deferred, middle) <= middle * compute_ms:
            high = middle
        else:
            low = middle + 1
    return low


def floor(rates: Rates, split: Split, config: ZenFlowConfig) -> Floor:
    """Evaluate it for a setting.

    Args:
        rates: of a rank.
        split: of the model under these knobs.
        config: the knobs.
    """
    window = config.longest_window
    own = split.deferred / rates.ranks
    compute = rates.compute_ms + device_work_ms(rates, split, window, stream=config.stream)
    loads = {
        "compute": compute,
        "d2h": rates.down_ms(own),
        "h2d": rates.up_ms(own) / window,
        "host": rates.host_ms(own, window) / window,
    }
    if rates.ranks > 1:
        loads["comm"] = collective_ms(rates, split)
    s_min = least_window(rates, own, compute)
    bound_by = max(loads, key=lambda name: loads[name])
    step = compute + loads["comm"] if rates.gloo and rates.ranks > 1 else loads[bound_by]
    if own and not config.overlap_step:
        alone = compute - rates.scatter_ms(own) / window
        if config.pipeline == "none":
            step = max(step, alone + loads["host"] + loads["h2d"])
        else:  # forward goes on as far as weights are there
            step = max(step, alone - rates.forward_ms / window + loads["host"])
    return Floor(loads, step, s_min, bound_by)


def collective_ms(rates: Rates, split: Split) -> float:
    """Time a step in collectives: FSDP2 gathers each unit (but the last one again for backward) and reduce-scatters its
    gradients, and the ranks add up the columns' energies. Replicas add up gradients beside that: what takes longer.
    """
    gathers = [rates.gather_ms(elements) for elements in split.gathered]
    again = sum(gathers[:-1]) if rates.reshard else 0.0
    reduced = sum(rates.reduce_ms(elements) for elements in split.reduced if elements)
    between = sum(rates.replicate_ms(elements) for elements in split.reduced if elements)
    return max(sum(gathers) + again + reduced, between) + rates.add_up_ms(split.words)


def mean_staleness(split: Split, config: ZenFlowConfig) -> float:
    """Steps from a deferred gradient's production to its application, on average; without pieces as of many buckets."""
    if split.deferred == 0:
        return 0.0
    window = config.longest_window
    in_window = (window - 1) / 2
    if not config.overlap_step:
        return in_window
    if not split.pieces:
        return in_window + (1 + config.lag) / 2
    return in_window + sum(piece.elements * piece.due for piece in split.pieces) / split.deferred


def greatest_staleness(config: ZenFlowConfig) -> int:
    """The most that any has."""
    window = config.longest_window
    return window - 1 if not config.overlap_step else window - 1 + config.lag
