"""`zftune check` and `zftune run` agree on what a run refuses, and on the setting: over random ds_configs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st

from tests.tiers import by_day
from tests.zftune.check.cases import CASES, OFFLOAD, SAFE, ZENFLOW, ZERO, safe
from zenflow import ZenFlowError
from zenflow.ds_config import modernized
from zftune.ds_config import reading
from zftune.ds_config.reading import MISSING, Source, offload_device, path_of, put
from zftune.errors import BadInputError
from zftune.integrations.deepspeed import asking, upstream
from zftune.integrations.deepspeed import backend as zenflow
from zftune.integrations.deepspeed.check.checking import check
from zftune.integrations.deepspeed.check.findings import Finding
from zftune.integrations.deepspeed.choosing import Chosen, with_knobs
from zftune.integrations.deepspeed.engine_optimizer import EngineOptimizer
from zftune.integrations.deepspeed.optimizers import Recipe
from zftune.integrations.deepspeed.section import Section, require_none
from zftune.integrations.deepspeed.verdict import undecided
from zftune.store.types import Backend

pytestmark = pytest.mark.filterwarnings(
    "ignore:offload is ignored", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
BAD: tuple[Any, ...] = (None, True, -1, 0, 1, 2.5, "x", "auto", [], {})
SWITCH: tuple[Any, ...] = (True, False, "true", "no", "auto", "x", None)
# Of each setting that either side looks at, what is mostly allowed; odd values are for all of them.
VALUES: dict[str, tuple[Any, ...]] = {
    ZERO: (MISSING, {"stage": 1}),
    f"{ZERO}.stage": (0, 1, 2, 3, "2", 2.0),
    f"{ZERO}.cpu_offload": (True, False),
    f"{ZERO}.overlap_comm": (True, False),
    f"{ZERO}.reduce_scatter": (True, False),
    f"{ZERO}.zftune": (MISSING, MISSING, {"preset": "best"}),
    f"{ZERO}.unheard_of": (MISSING, 1),
    f"{ZERO}.zero_quantized_gradients": SWITCH,
    f"{ZERO}.zero_quantized_weights": SWITCH,
    f"{ZERO}.zero_hpz_partition_size": (1, 2),
    f"{ZERO}.mics_shard_size": (-1, 1, 8),
    f"{ZERO}.offload_param": ({"device": "cpu"}, {"device": "none"}),
    f"{ZERO}.round_robin_gradients": (True, False),
    OFFLOAD: (MISSING, {"device": "cpu"}),
    f"{OFFLOAD}.device": ("cpu", "cpu", "cpu", "nvme", "none", "gpu"),
    f"{OFFLOAD}.ratio": (0, 0.3, 1.0, 1, 1.5),
    f"{OFFLOAD}.pin_memory": SWITCH,
    ZENFLOW: (MISSING, {}, {"topk_ratio": 0.1, "update_interval": "auto"}),
    f"{ZENFLOW}.topk_ratio": (0, 0.05, 1, 1.5),
    f"{ZENFLOW}.select_strategy": ("auto", "step", "epoch", "steps"),
    f"{ZENFLOW}.select_interval": ("auto", 8, 256, 4.0),
    f"{ZENFLOW}.update_interval": ("auto", 1, 4, 4.0, 128),
    f"{ZENFLOW}.full_warm_up_rounds": (0, 4, 2.0),
    f"{ZENFLOW}.overlap_step": SWITCH,
    f"{ZENFLOW}.offload": SWITCH,
    f"{ZENFLOW}.auto_ratio": (0.5, 2),
    f"{ZENFLOW}.pt_reserved_cores_perc": (0.5, 2),
    f"{ZENFLOW}.steps_per_epoch": (10, 0),
    f"{ZENFLOW}.apply_lag": (1, 4, 99),
    f"{ZENFLOW}.pipeline": ("bucket", "none"),
    f"{ZENFLOW}.deferred_update": ("replay", "mean"),
    f"{ZENFLOW}.skip_nonfinite": SWITCH,
    f"{ZENFLOW}.host_threads": (1, 10_000),
    f"{ZENFLOW}.offload_ratio": (MISSING, 0.5),
    f"{ZENFLOW}.top k": (MISSING, 1),
    "bf16": ({"enabled": True}, {"enabled": False}, {"enabled": "auto"}, MISSING),
    "bf16.enabled": SWITCH,
    "bfloat16.enabled": SWITCH,
    "fp16": ({"enabled": True}, {"enabled": True, "loss_scale": 8}, {"enabled": False}, MISSING),
    "fp16.enabled": SWITCH,
    "fp16.auto_cast": SWITCH,
    "fp16.loss_scale": (0, 1, 128.0, "16"),
    "fp16.initial_scale_power": (16, "8", 4000, 2.0),
    "fp16.loss_scale_window": (1000, 10.0),
    "fp16.hysteresis": (2, "2"),
    "fp16.consecutive_hysteresis": SWITCH,
    "fp16.min_loss_scale": (1, 0.5),
    "fp16.fp16_master_weights_and_grads": SWITCH,
    "fp16.opt_level": (MISSING, "O2"),
    "amp.enabled": SWITCH,
    "torch_autocast": ({"enabled": True, "dtype": "bfloat16"}, {"enabled": True, "dtype": "float16"}, {}),
    "data_types.grad_accum_dtype": ("bf16", "fp16", "fp32"),
    "data_types.buffer_dtype": ("bf16", "fp32", "int8"),
    "optimizer": (MISSING, {"type": "AdamW"}, {"params": {"lr": 1}}, {"type": "Lamb", "params": {"lr": 1}}),
    "optimizer.type": ("Adam", "AdamW", "adagrad", "Lion", "SGD", "OneBitAdam", "Muon"),
    "optimizer.params": (MISSING, {}, {"lr": 1e-3, "momentum": 0.9, "nesterov": True}),
    "optimizer.params.lr": (1e-3, "auto", "1e-3"),
    "optimizer.params.betas": ([0.9, 0.999], [0.9], [0.9, 1.0], "auto"),
    "optimizer.params.eps": (1e-8, 10**400),
    "optimizer.params.weight_decay": (0.1, 0),
    "optimizer.params.momentum": (0.9,),
    "optimizer.params.nesterov": SWITCH,
    "optimizer.params.amsgrad": SWITCH,
    "optimizer.params.adam_w_mode": SWITCH,
    "optimizer.params.torch_adam": SWITCH,
    "optimizer.params.bias_correction": SWITCH,
    "optimizer.params.freeze_step": (MISSING, 400),
    "optimizer.params.max_grad_norm": (MISSING, MISSING, 1.0),
    "scheduler": ({"type": "WarmupLR", "params": {"warmup_num_steps": 10}}, {"type": "Cosine"}, MISSING),
    "scheduler.params.warmup_num_steps": (10, 0, "auto"),
    "gradient_clipping": (0, 1.0, "auto", -1.0),
    "gradient_accumulation_steps": (1, 4, "auto", 2.0),
    "train_batch_size": (8, "auto"),
    "train_micro_batch_size_per_gpu": (4, "auto"),
    "communication_data_type": ("fp16", "fp32"),
    "sparse_gradients": SWITCH,
    "gradient_allreduce_op": ("mean", "sum", "SUM"),
    "managed_gradient_accumulation": SWITCH,
    "compile.deepcompile": SWITCH,
    "compression_training": (MISSING, {}, {"weight_quantization": {}}),
    "sequence_parallel_size": (1, 2),
    "pipeline_parallel_size": (1, 2),
    "tensor_parallel.autotp_size": (0, 1, 4),
    "pipeline": ({"stages": "auto"}, {"stages": 2}),
    "hybrid_engine.enabled": SWITCH,
    "elasticity.enabled": SWITCH,
    "eigenvalue.enabled": SWITCH,
    "expert_parallel.enabled": SWITCH,
    "checkpoint": ({"load_universal": True}, {"tag_validation": "WARN"}),
    "zero_allow_untested_optimizer": SWITCH,
    "zero_force_ds_cpu_optimizer": SWITCH,
    "zftune": (MISSING, {}, {"backend": "zenflow"}, {"backend": "deepspeed"}, {"presets": "x", "online": 1}),
    "zftune.backend": ("zenflow", "deepspeed", "torch"),
    "zftune.preset": ("best", "mine"),
    "zftune.quality": ("exact", "published", "loose", "best"),
    "zftune.online": SWITCH,
    "zftune.nested": (MISSING, {"inner": "auto"}),
}
OTHERS = {"auto-not-filled", "not-a-number"}
"""Rules about who ends the run in its place: Hugging Face, the reader of the file."""


@st.composite
def ds_configs(draw: st.DrawFn) -> dict[str, Any]:
    """A ds_config that trains, with up to eight other settings, of which one in eight is odd."""
    config = safe(draw(st.sampled_from(sorted(path.stem for path in SAFE.glob("*.json")))))
    for dotted in draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=8)):
        values = BAD if draw(st.integers(0, 7)) == 0 else VALUES[dotted]
        put(config, path_of(dotted), copy.deepcopy(draw(st.sampled_from(values))))
    return config


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
    report = check(config, backend=asked, version="0.19.6", world_size=1)
    said: Backend = report.backend or "zenflow"
    findings = told(report.findings, said)
    if sentence is not None:
        assert named(sentence, findings)
        assert report.outcome.kind == "refused"
        assert not report.ok
    elif any(finding.advice.startswith("did you mean") for finding in findings):
        assert report.outcome.kind == "refused"  # by zftune run, before a training could take it
    elif said == "zenflow" and offload_device(as_handed_on(config)) != "none":
        error = asking.first_error(plan_of(config, asked).config, 1)  # the engine is made with what is left of it
        if not any(finding.rule in OTHERS for finding in findings):  # these end it before an engine could
            assert (findings == []) == (error is None)
        assert report.outcome.kind == "trains" or error is not None
    return sentence is not None


@settings(max_examples=by_day(150, all_of=3000), deadline=None, suppress_health_check=list(HealthCheck))
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
    assume(not undecided(config))  # DeepSpeed itself would be asked, which takes seconds
    event("refused" if require_agreement(config, asked) else "taken")


@pytest.mark.parametrize("asked", [None, "zenflow", "deepspeed"])
def test_so_it_is_with_what_is_known_to_be_bad(asked: Backend | None) -> None:
    refusals = sum(require_agreement(case.config, asked) for case in CASES)
    assert 0 < refusals < len(CASES)
