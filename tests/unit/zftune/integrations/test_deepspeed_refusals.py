"""What the backends refuse: one sentence with the field, its value, and what to use instead."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.zftune.integrations.ds_running import ADAMW, ZENFLOW, ds_config
from zftune.ds_config import facts
from zftune.errors import BadInputError
from zftune.integrations.deepspeed import backend, initializing, optimizers, outcome, upstream
from zftune.integrations.deepspeed.section import Section


def _changed(**more: Any) -> dict[str, Any]:
    return {**ds_config(optimizer=ADAMW), **more}


def _zero(**more: Any) -> dict[str, Any]:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, **more}
    return _changed(zero_optimization=zero)


REFUSED = {
    "stage 4": (_zero(stage=4), "zero_optimization.stage is 4; it must be 0, 1, 2 or 3"),
    "weights on NVMe": (
        _zero(stage=3, offload_param={"device": "nvme", "nvme_path": "/x"}),
        'offload_param.device is "nvme"; it must be "none" or "cpu"',
    ),
    "hpZ": (_zero(stage=3, zero_hpz_partition_size=2), "zero_hpz_partition_size is 2; it must be left out"),
    "stage true": (_zero(stage=True), "zero_optimization.stage is True"),
    "nvme": (_zero(offload_optimizer={"device": "nvme"}), 'offload_optimizer.device is "nvme"; it must be "cpu"'),
    "quantized": (_zero(zero_quantized_gradients=True), "zero_optimization.zero_quantized_gradients is True"),
    "amp": (_changed(amp={"enabled": True}), 'amp.enabled is True; it must be false.*use "bf16"'),
    "compile": (_changed(compile={"deepcompile": True}), "compile.deepcompile is True; it must be false"),
    "compression": (_changed(compression_training={"weight_quantization": {}}), "compression_training is there"),
    "sequence parallel": (_changed(sequence_parallel_size=2), "sequence_parallel_size is 2; it must be 1"),
    "tensor parallel": (_changed(tensor_parallel={"autotp_size": 4}), "tensor_parallel.autotp_size is 4"),
    "sparse": (_changed(sparse_gradients=True), "sparse_gradients is True"),
    "sum": (_changed(gradient_allreduce_op="sum"), "gradient_allreduce_op is 'sum'; it must be \"mean\""),
    "unmanaged": (_changed(managed_gradient_accumulation=False), "managed_gradient_accumulation is False"),
    "autocast": (_changed(torch_autocast={"enabled": True, "dtype": "float16"}), "torch_autocast.dtype is 'float16'"),
    "fp32 sums": (
        _changed(bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}, gradient_accumulation_steps=2),
        "data_types.grad_accum_dtype is 'fp32'",
    ),
    "both halves": (
        _changed(bf16={"enabled": True}, fp16={"enabled": True}),
        "fp16.enabled is True; it must be false where bf16",
    ),
    "loss scale": (
        _changed(fp16={"enabled": True, "loss_scale": -1}),
        "fp16.loss_scale is -1; it must be a number >= 0",
    ),
    "topk": (_zero(zenflow={**ZENFLOW, "topk_ratio": 2}), "topk_ratio is 2; it must be a number from 0 to 1"),
    "unknown knob": (_zero(zenflow={**ZENFLOW, "top_k": 2}), "zero_optimization.zenflow.top_k is 2"),
    "ratio": (_zero(offload_optimizer={"device": "cpu", "ratio": 3}), "zero_optimization.offload_optimizer.ratio is 3"),
    "buffers": (_changed(data_types={"buffer_dtype": "int8"}), "data_types.buffer_dtype is 'int8'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_is_not_done_is_one_sentence(name: str) -> None:
    config, sentence = REFUSED[name]
    with pytest.raises(BadInputError, match=sentence) as raised:
        backend.plan(config, Section())
    assert "\n" not in str(raised.value)


def test_what_is_done_is_not_refused() -> None:
    config = _zero(
        offload_optimizer={"device": "cpu", "pin_memory": True}, overlap_comm=True, round_robin_gradients=True
    )
    assert list(outcome.refusals(config)) == []


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ("best", "zftune is 'best'; it must be a JSON object"),
        (
            {"presets": "best"},
            "zftune.presets is 'best'; it must be left out: the fields are preset, online, quality, backend",
        ),
        ({"preset": "auto"}, "zftune.preset is 'auto'; it must be another word: Hugging Face takes \"auto\""),
        ({"preset": 3}, 'zftune.preset is 3; it must be "best", "none", a name or a file'),
        ({"online": "yes"}, "zftune.online is 'yes'; it must be true or false"),
        ({"quality": "best"}, "zftune.quality is 'best'; it must be exact, published or loose"),
        ({"backend": "torch"}, "zftune.backend is 'torch'; it must be zenflow or deepspeed"),
    ],
)
def test_a_section_that_is_wrong(section: Any, sentence: str) -> None:
    with pytest.raises(BadInputError, match=sentence):
        Section.of({"zftune": section})


def test_what_is_asked_for_comes_before_the_section() -> None:
    config = Section.of({"zftune": {"preset": "mine", "quality": "loose"}})
    asked = Section(quality="exact", backend="deepspeed")
    assert asked.over(config) == Section(preset="mine", quality="exact", backend="deepspeed")


@pytest.mark.parametrize(
    ("optimizer", "sentence"),
    [
        ({"type": "OneBitAdam"}, "optimizer.type is 'OneBitAdam'; it must be Adam, AdamW, Adagrad, Lion"),
        ({"type": "AdamW", "params": 1}, "optimizer.params is 1; it must be a JSON object"),
        (
            {"type": "AdamW", "params": {"rho": 1}},
            "optimizer.params.rho is 1; it must be left out: AdamW has lr, betas, eps",
        ),
        ({"type": "Adam", "params": {"bias_correction": False}}, "optimizer.params.bias_correction is False"),
        (
            {"type": "Adam", "params": {"max_grad_norm": 1}},
            "max_grad_norm is not DeepSpeed's; it must be gradient_clip",
        ),
    ],
)
def test_an_optimizer_that_does_not_fit(optimizer: Any, sentence: str) -> None:
    with pytest.raises(BadInputError, match=sentence):
        optimizers.from_config({"optimizer": optimizer})


def test_a_passed_optimizer_that_does_not_fit() -> None:
    with pytest.raises(
        BadInputError, match=r"the optimizer is a torch.optim.*RMSprop; the backend zenflow trains with Adam"
    ):
        optimizers.from_client(torch.optim.RMSprop(nn.Linear(2, 2).parameters()))


def test_adam_is_adamw_unless_it_says_otherwise() -> None:
    """As DeepSpeed has it, with its defaults."""
    plain = optimizers.from_config({"optimizer": {"type": "Adam"}})
    coupled = optimizers.from_config({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}})
    assert plain is not None
    assert coupled is not None
    assert (plain.rule, plain.defaults["weight_decay"]) == ("adamw", 0.0)
    assert coupled.rule == "adam"


@pytest.mark.parametrize("version", facts.SCRAMBLING)
@pytest.mark.parametrize("stage", [1, 2])
def test_upstreams_zenflow_is_refused_where_it_scrambles_weights(version: str, stage: int) -> None:
    config = ds_config(stage=stage, zenflow=ZENFLOW)
    with pytest.raises(BadInputError, match=f"{version} scrambles every 2-D weight .* install 0.19.6"):
        outcome.refuse_scrambling(config, version)
    outcome.refuse_scrambling(ds_config(stage=stage), version)
    outcome.refuse_scrambling(ds_config(stage=3, zenflow=ZENFLOW), version)
    outcome.refuse_scrambling(config, "0.19.6")


SAFE = {**ZENFLOW, "select_strategy": "step", "select_interval": 128, "full_warm_up_rounds": 4}


@pytest.mark.parametrize(
    ("zenflow", "more", "sentence"),
    [
        ({"topk_ratio": 0.1, "overlap_step": False}, {"optimizer": ADAMW}, "zenflow.update_interval .*weights NaN"),
        (SAFE, {}, "optimizer"),
        (
            {**SAFE, "select_interval": "auto"},
            {"optimizer": ADAMW},
            "zenflow.select_interval is .*DeepSpeed needs a number",
        ),
    ],
    ids=["nan", "no optimizer", "strategy"],
)
def test_what_ends_upstreams_training_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zenflow: Any, more: Any, sentence: str
) -> None:
    monkeypatch.setenv("ZFTUNE_DB", str(tmp_path / "zftune.db"))
    config = {**ds_config("bf16", zenflow=zenflow), **more}
    with pytest.raises(BadInputError, match=sentence) as raised:
        upstream.changed(config, Section(backend="deepspeed"), nn.Linear(2, 2))
    assert "which the backend deepspeed refuses" in str(raised.value)


def test_what_upstream_can_do_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ZFTUNE_DB", str(tmp_path / "zftune.db"))
    config = {**ds_config("bf16", zenflow=SAFE), "optimizer": ADAMW}
    with caplog.at_level("INFO", logger="zftune"):
        found = upstream.changed({**config, "zftune": {"preset": "best"}}, Section(), nn.Linear(2, 2))
    assert found == config
    assert "gradient_clipping" in caplog.text  # which leaves selected columns out
    assert "bf16.enabled" in caplog.text


def test_quality_exact_waits_for_every_update() -> None:
    plan = backend.plan(ds_config(zenflow=ZENFLOW, optimizer=ADAMW), Section(quality="exact"))
    assert (plan.own.update_interval, plan.own.overlap_step) == (1, False)
    assert backend.plan(ds_config(zenflow=ZENFLOW, optimizer=ADAMW), Section()).quality == "published"
    assert backend.plan(ds_config(optimizer=ADAMW), Section()).quality == "exact"


def test_the_engine_gets_a_config_without_what_the_runtime_does() -> None:
    config = ds_config("bf16", optimizer=ADAMW, zftune={"preset": "best"}, wall_clock_breakdown=True)
    engine = backend.plan(config, Section.of(config)).config
    assert engine == {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "wall_clock_breakdown": True}
    assert "optimizer" in config  # the script's own is as it was


@pytest.mark.parametrize(
    ("changes", "passed", "named"),
    [
        ({"train_batch_size": "auto"}, {}, "train_batch_size"),
        ({"gradient_clipping": "auto"}, {}, "gradient_clipping"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, {}, "optimizer.params.lr"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, {"optimizer": object()}, None),
        ({"fp16": {"enabled": "auto"}}, {}, None),
    ],
)
def test_deepspeed_is_never_given_the_word_auto_that_ends_it(
    changes: dict[str, Any], passed: dict[str, Any], named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hugging Face has put its values in when it calls; what DeepSpeed does not read, or drops, is let be."""
    went_on: list[Any] = []

    def initialize(model: Any = None, config: Any = None, optimizer: Any = None) -> None: ...

    def join(_: Any) -> None:
        went_on.append(True)
        raise BadInputError("far enough")

    monkeypatch.setattr(initializing, "_join_ranks", join)
    module = SimpleNamespace(initialize=initialize)
    initializing.wrap(module, Section())
    with pytest.raises(BadInputError, match="far enough" if named is None else f'^{named} is "auto"; it must be a'):
        module.initialize(model=nn.Linear(2, 2), config=_changed(**changes), **passed)
    assert bool(went_on) == (named is None)
