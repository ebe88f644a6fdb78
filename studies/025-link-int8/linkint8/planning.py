"""What a code would win by the planner: bytes on the link, memory of a residual, step times and the least window."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from linkint8.coding import Code
from zenflow import ZenFlowConfig
from zftune.planner.choosing import PUBLISHED, budget_of, choose, limits
from zftune.planner.closed_form import floor, predict
from zftune.planner.memory import host_bytes, memory
from zftune.planner.model import Job, Machine, ModelFacts
from zftune.planner.plan import BASELINES
from zftune.planner.rates import Rates
from zftune.planner.simulate import simulate
from zftune.planner.split import model_plan, split_of

MODELS = ("Llama-2-7B", "Qwen2.5-1.5B", "Llama-2-13B", "Qwen2.5-3B", "Qwen2.5-32B", "Llama-2-70B")
GPUS = (1, 2, 4, 8)
INTERVALS = (1, 2, 3, 4, 6, 8, 16)
MACHINES: Mapping[str, tuple[str, Mapping[str, float]]] = {
    **{
        name: (name, {})
        for name in (
            "rtx3090", "rtx4090", "rtx5090", "gh200", "l40s", "a100-40-pcie", "a100-80-pcie", "h100-pcie",
            "a100-40-sxm", "a100-80-sxm", "h100-sxm", "h200-sxm",
        )
    },
    "rtx4090, Gen3": ("rtx4090", {"link_d2h_gbps": 12.5, "link_h2d_gbps": 12.5}),
    "a100-80-pcie, Gen3": ("a100-80-pcie", {"link_d2h_gbps": 12.5, "link_h2d_gbps": 12.5}),
    "h100-pcie, Gen3": ("h100-pcie", {"link_d2h_gbps": 12.5, "link_h2d_gbps": 12.5}),
    "a100-80-pcie, quarter of a host": ("a100-80-pcie", {"host_gbps": 71.7, "host_update_gelements_s": 9.6}),
}  # fmt: skip
HIDDEN, NEAR, PIECES = 0.02, 1.02, 32
"""Stall of host and link that is taken for none, of a step; steps that are as good; of the simulator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodedRates(Rates):
    """Rates where a logged gradient has other bytes than a weight."""

    entry_bytes: float
    """Of an element's code and its share of scales."""
    residual_bytes: int = 0
    """Of an element of the residual, which packing reads and writes."""

    @classmethod
    def over(cls, rates: Rates, entry_bytes: float, residual_bytes: int) -> CodedRates:
        own = {field.name: getattr(rates, field.name) for field in fields(Rates)}
        return cls(**own, entry_bytes=entry_bytes, residual_bytes=residual_bytes)

    def down_ms(self, elements: float) -> float:
        return self.entry_bytes * elements / self.d2h_gbps / 1e6

    def pack_ms(self, elements: float) -> float:
        return self.device_ms((self.element_bytes + self.entry_bytes + 2 * self.residual_bytes) * elements)

    def host_ms(self, elements: float, entries: int, updates: int | None = None) -> float:
        plain = Rates.host_ms(replace(self, update_gelements_s=None), elements, entries, updates)
        passes = 2 if self.link_in_host else 1
        saved = passes * (self.element_bytes - self.entry_bytes) * entries * elements / self.host_gbps / 1e6
        if self.update_gelements_s is None:
            return plain - saved
        return max(plain - saved, (updates or entries) * elements / self.update_gelements_s / 1e6)


def link_bytes(model: ModelFacts, config: ZenFlowConfig, code: Code | None) -> float:
    """Of a step, both ways, on average over a window, in model sizes; None: gradients in the model's dtype."""
    down = up = 0
    for weight in model_plan(model, config).weights:
        plain = model.element_bytes * weight.rows
        down += weight.deferred * (plain if code is None else code.bytes_of(weight.rows))
        up += weight.deferred * plain
    return (down + up / config.longest_window) / (model.element_bytes * model.trainable)


def bytes_of(name: str, codes: Sequence[Code]) -> dict[str, float]:
    """Model sizes a step by k, S and code."""
    model = ModelFacts.from_name(name)
    return {
        f"k={k:g} S={interval} {'bf16' if code is None else f'{code.element} in {code.block}'}": link_bytes(
            model, ZenFlowConfig(topk_ratio=k, update_interval=interval), code
        )
        for k in (0.0, 0.05, 0.1, 0.2)
        for interval in (1, 2, 4, 8)
        for code in (None, *codes)
    }


def cells(models: Sequence[str] = MODELS, machines: Sequence[str] = tuple(MACHINES)) -> Iterator[tuple[str, str, int]]:
    for machine in machines:
        most = Machine.load(MACHINES[machine][0]).gpus
        for model in models:
            yield from ((model, machine, gpus) for gpus in GPUS if gpus <= most)


def machine_of(name: str) -> Machine:
    base, changes = MACHINES[name]
    return replace(Machine.load(base), **changes)  # type: ignore[arg-type]


def planned(name: str, machines: Sequence[str], entry_bytes: float) -> dict[str, Any]:
    """Every cell of a model that fits with bf16 and k = 0.1, S = 4."""
    model = ModelFacts.from_name(name)
    found = {}
    for _, machine, gpus in cells((name,), machines):
        job = Job(seq=2048, gpus=gpus, checkpointing=True)
        one = planned_cell(model, machine_of(machine), job, entry_bytes)
        if one is not None:
            found[f"{name} on {machine} x {gpus}"] = one
    return found


def planned_cell(model: ModelFacts, machine: Machine, job: Job, entry_bytes: float) -> dict[str, Any] | None:
    """Memory with a residual of 1 and 2 bytes an element, and steps with and without a code; None: it does not fit."""
    device, host = limits(machine)
    least = memory(model, job, PUBLISHED, packed=0.0, arrived=0.0)
    of_host = sum(host_bytes(model, PUBLISHED, ranks=job.shards).values()) + least.migration_bytes
    if least.device_bytes > device or of_host > host:
        return None
    need = predict(model, machine, job, PUBLISHED).memory
    if need.device_bytes > device:
        return None
    without = predict(model, machine, job, BASELINES["no_offload"])
    deferred = math.ceil(split_of(model, PUBLISHED, pieces=PIECES).deferred / job.ranks)
    rates = Rates.of(model, machine, job)
    ways = {
        "bf16": rates,
        "coded": CodedRates.over(rates, entry_bytes, 0),
        "coded, residual": CodedRates.over(rates, entry_bytes, 2),
    }
    return {
        "device_bytes": need.device_bytes,
        "limit_bytes": device,
        "saved_bytes": without.memory.device_bytes - need.device_bytes,
        "residual_bytes": {"1": deferred, "2": 2 * deferred},
        "fits_with_residual": {str(each): need.device_bytes + each * deferred <= device for each in (1, 2)},
        "no_offload_ms": without.step_ms if without.memory.device_bytes <= device else None,
        "ways": {way: steps_of(model, own) for way, own in ways.items()},
    }


def steps_of(model: ModelFacts, rates: Rates) -> dict[str, Any]:
    """At k = 0.1, L = S, by S: the step and its stall for host and link; the least S that hides it, the best of 4."""
    steps, stalls, hidden = {}, {}, None
    for interval in INTERVALS:
        if hidden is not None and interval > PUBLISHED.longest_window:
            break
        config = replace(PUBLISHED, update_interval=interval)
        steady = simulate(rates, split_of(model, config, pieces=PIECES), config)
        steps[interval] = steady.step_ms
        stalls[interval] = sum(steady.stall_ms[cause] for cause in ("host", "d2h", "h2d"))
        if hidden is None and stalls[interval] <= HIDDEN * steps[interval]:
            hidden = interval
    allowed = [interval for interval in steps if interval <= PUBLISHED.longest_window]
    best = min(steps[interval] for interval in allowed)
    proposal = next(interval for interval in allowed if steps[interval] <= NEAR * best)
    least = floor(rates, split_of(model, PUBLISHED, pieces=PIECES), PUBLISHED)
    return {
        "steps_ms": steps,
        "stalls_ms": stalls,
        "s_min": hidden,
        "s_min_of_host": least.s_min,
        "bound_by": least.bound_by,
        "proposal": proposal,
        "step_ms": steps[proposal],
        "stall_ms": stalls[proposal],
    }


def proposals(name: str, machine_name: str, gpus: int, entry_bytes: float) -> dict[str, Any]:
    """The planner's own proposals of quality `published` with bf16 and with a code: knobs, step, stall."""
    model, machine = ModelFacts.from_name(name), machine_of(machine_name)
    job = Job(seq=2048, gpus=gpus, checkpointing=True)
    rates = Rates.of(model, machine, job)
    found = {}
    for way, own in (("bf16", rates), ("coded", CodedRates.over(rates, entry_bytes, 0))):
        config, one = choose(model, machine, job, budget=budget_of("published"), rates=own)[0]
        found[way] = {
            "k": config.topk_ratio,
            "S": config.longest_window,
            "L": config.lag,
            "offload_ratio": config.offload_ratio,
            "overlap": config.overlap_step,
            "step_ms": one.step_ms,
            "stall_ms": sum(one.stall_ms_by_cause[cause] for cause in ("host", "d2h", "h2d")),
        }
    return found
