"""`zftune check` and `zftune run` agree on what a run refuses, and on the setting: over random ds_configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from tests.support.tiers import fast
from tests.support.zftune.check.asked import ask
from tests.support.zftune.check.cases import CASES, ZERO, safe
from tests.support.zftune.check.shapes import some_config
from zenflow import ZenFlowError
from zenflow.config import modernized
from zftune.ds_config import reading
from zftune.ds_config.reading import MISSING, Source, offload_device
from zftune.errors import BadInputError
from zftune.integrations.deepspeed import backend as zenflow
from zftune.integrations.deepspeed import upstream
from zftune.integrations.deepspeed.check.checking import check
from zftune.integrations.deepspeed.check.findings import Finding
from zftune.integrations.deepspeed.choosing import Chosen, with_knobs
from zftune.integrations.deepspeed.engine_optimizer import EngineOptimizer
from zftune.integrations.deepspeed.optimizers import Recipe
from zftune.integrations.deepspeed.section import Section, require_none
from zftune.store.types import Backend

pytestmark = pytest.mark.filterwarnings(
    "ignore:offload is ignored", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
OTHERS = {"auto-not-filled", "not-a-number"}
"""Rules about who ends the run in its place: Hugging Face, the reader of the file."""


@st.composite
def ds_configs(draw: st.DrawFn) -> dict[str, Any]:
    """A ds_config that trains, with up to eight other settings, of which one in eight is odd."""
    return some_config(draw(st.randoms(use_true_random=False)))


def refused(config: dict[str, Any], asked: Backend | None) -> str | None:
    """The sentence that `zftune run` ends with, whatever DeepSpeed's engine may say; None: it trains."""
    try:
        section = Section(backend=asked).over(Section.of(config))
        config = modernized(as_handed_on(config))
        if offload_device(config) == "none":
            return None
        if section.backend == "deepspeed":
            require_none(upstream.refusals(config, online=section.online))
            return None
        plan = zenflow.plan(config, section)
        recipe = zenflow.recipe_of(config, None)
        if recipe is not None:  # else the script passes an optimizer
            take_a_step(plan, recipe)
    except (BadInputError, ZenFlowError) as error:
        return str(error)
    return None


def as_handed_on(config: dict[str, Any]) -> dict[str, Any]:
    """With the values of the Trainer, where it is of one."""
    return reading.given(Source(config))


def plan_of(config: dict[str, Any], asked: Backend | None) -> zenflow.Plan:
    return zenflow.plan(as_handed_on(config), Section(backend=asked).over(Section.of(config)))


def take_a_step(plan: zenflow.Plan, recipe: Recipe) -> None:
    """Make the optimizer, and train: what is refused only then is a refusal too."""
    module = torch.nn.Linear(3, 5)
    plan.precision.cast(module)
    knobs = with_knobs(plan.own, Chosen({}, "of the ds_config"), plan.quality)
    optimizer = EngineOptimizer(list(module.parameters()), recipe, knobs, module, None)
    module(torch.randn(2, 3).to(module.weight.dtype)).float().square().sum().backward()
    optimizer.step()
    optimizer.close()


def told(findings: tuple[Finding, ...], backend: Backend) -> list[Finding]:
    return [finding for finding in findings if backend in finding.backends and finding.severity == "crashes"]


def named(sentence: str, findings: list[Finding]) -> bool:
    """Whether one is about the same setting, which stands in the file; but for the stage, 0 where nothing is said."""
    for finding in findings:
        dotted = ".".join(finding.path)
        if sentence.startswith(f"{dotted} is ") and (finding.value is not MISSING or dotted == f"{ZERO}.stage"):
            return True
    return False


def require_agreement(config: dict[str, Any], asked: Backend | None) -> bool:
    """Whether a run refuses it, which the check is to say of the same setting, and not where it does not."""
    sentence = refused(config, asked)
    report = check(config, backend=asked, version="0.19.6", ask=ask, world_size=1)
    said: Backend = report.backend or "zenflow"
    findings = told(report.findings, said)
    if sentence is not None:
        assert named(sentence, findings)
        assert report.outcome.kind == "refused"
        assert not report.ok
    elif any(finding.advice.startswith("did you mean") for finding in findings):
        assert report.outcome.kind == "refused"  # by zftune run, before a training could take it
    elif said == "zenflow" and offload_device(as_handed_on(config)) != "none":
        errors = ask(plan_of(config, asked).config, 1)  # the engine is made with what is left of it
        if not any(finding.rule in OTHERS for finding in findings):  # these end it before an engine could
            assert (findings == []) == (errors == [])
        assert report.outcome.kind == "trains" or errors
    return sentence is not None


@pytest.mark.smoke
@settings(max_examples=fast(50, all_of=1000), deadline=None, suppress_health_check=list(HealthCheck))
@given(config=ds_configs(), asked=st.sampled_from([None, "zenflow", "deepspeed"]))
@example(config={**safe("zero2-offload"), "zftune": {"backend": "deepspeed", "online": True}}, asked=None)
@example(config={**safe("zero2-offload"), "fp16": {"enabled": True, "loss_scale": -1}}, asked="zenflow")
@example(config={**safe("zero2-offload"), "optimizer": {"params": {"max_grad_norm": 1}}}, asked="zenflow")
@example(config={**safe("zero2-offload"), "optimizer": {"params": 3}}, asked="zenflow")
@example(
    config={**safe("zero2-offload"), "communication_data_type": "auto", "train_micro_batch_size_per_gpu": "auto"},
    asked=None,
)
def test_what_a_run_refuses_is_an_error_of_the_check(config: dict[str, Any], asked: Backend | None) -> None:
    event("refused" if require_agreement(config, asked) else "taken")


@pytest.mark.smoke
@pytest.mark.parametrize("asked", [None, "zenflow", "deepspeed"])
def test_so_it_is_with_what_is_known_to_be_bad(asked: Backend | None) -> None:
    refusals = sum(require_agreement(case.config, asked) for case in CASES)
    assert 0 < refusals < len(CASES)
