"""The planner: step time, stall and memory of a setting before it is run, and the settings worth trying.

    from zftune.planner import Job, Machine, ModelFacts, assumed_coverage, choose, predict, published_budget

    model, machine = ModelFacts.from_name("Llama-2-7B"), Machine.load("a100-40-sxm")
    best = choose(model, machine, Job(seq=2048), budget=published_budget(assumed_coverage))

Times follow from a closed form (what each resource has to do in a step) and from a simulation of the pipeline (what
waits for what). Names are imported when they are first used, so that `zftune --help` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zftune.planner.choosing import assumed_coverage, choose, fits, published_budget, ranked
    from zftune.planner.facts import Job, Machine, Memory, ModelFacts, Prediction, model_facts
    from zftune.planner.machine_files import machine_names
    from zftune.planner.plan import make_plan
    from zftune.planner.predicting import predict
    from zftune.planner.rates import Rates

_WHERE = {
    "Job": "facts",
    "Machine": "facts",
    "Memory": "facts",
    "ModelFacts": "facts",
    "Prediction": "facts",
    "Rates": "rates",
    "assumed_coverage": "choosing",
    "choose": "choosing",
    "fits": "choosing",
    "machine_names": "machine_files",
    "make_plan": "plan",
    "model_facts": "facts",
    "predict": "predicting",
    "published_budget": "choosing",
    "ranked": "choosing",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


__all__ = [
    "Job",
    "Machine",
    "Memory",
    "ModelFacts",
    "Prediction",
    "Rates",
    "assumed_coverage",
    "choose",
    "fits",
    "machine_names",
    "make_plan",
    "model_facts",
    "predict",
    "published_budget",
    "ranked",
]
