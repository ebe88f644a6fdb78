"""Between ours and the plain form: nothing is lost, and what is pending is applied as a flush applies it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenflow
from tests.support.zftune.checkpoint.tiny import BETAS, LR, Tiny, groups_of, loss_of, train, weights_of
from zftune.checkpoint.converting import export_checkpoint, import_checkpoint
from zftune.checkpoint.sources import MODEL_STATES
from zftune.errors import BadInputError

WINDOW = zenflow.ZenFlowConfig(
    topk_ratio=0.3, offload_ratio=0.8, update_interval=4, select_interval=2, bucket_bytes=100
)
PASSES = 6  # in the middle of the second window, with updates of the first one under way


def load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = torch.load(path, weights_only=True)
    return document


def ours(config: zenflow.ZenFlowConfig, dtype: torch.dtype, *, named: bool = True) -> tuple[Tiny, Any]:
    model = Tiny().to(dtype)
    groups = groups_of(model, named=named)
    optimizer = zenflow.ZenFlowAdamW(groups, lr=LR, betas=BETAS, config=config, module=model)
    for step in range(PASSES):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return model, optimizer


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    model = Tiny()
    optimizer = torch.optim.AdamW(groups_of(model, named=True), lr=LR, betas=BETAS)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    list(train(model, optimizer, range(3)))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "plain.pt")
    return tmp_path / "plain.pt"


@pytest.mark.parametrize("target", ["ours.pt", "ours"])
def test_there_and_back_changes_no_bit(plain: Path, tmp_path: Path, target: str) -> None:
    done = import_checkpoint(str(plain), str(tmp_path / target))
    assert (done.source_form, done.target_form, done.rule, done.steps) == ("plain", "ours", "adamw", 3)
    export_checkpoint(str(tmp_path / target), str(tmp_path / "back.pt"))
    before, after = load(plain), load(tmp_path / "back.pt")
    assert same(before["optimizer"], after["optimizer"])
    assert same(before["model"], after["model"])
    assert list(before["model"]) == list(after["model"])
    assert after["model"]["head.weight"].data_ptr() == after["model"]["words.weight"].data_ptr()


def test_what_else_a_file_holds_is_in_the_new_file_too(plain: Path, tmp_path: Path) -> None:
    beside = {"scheduler": {"last_epoch": 3}, "step": 3}
    torch.save({**load(plain), **beside}, plain)
    assert import_checkpoint(str(plain), str(tmp_path / "ours.pt")).copied == ("scheduler", "step")
    export_checkpoint(str(tmp_path / "ours.pt"), str(tmp_path / "back.pt"))
    for name in ("ours.pt", "back.pt"):
        assert {key: value for key, value in load(tmp_path / name).items() if key in beside} == beside
    done = import_checkpoint(str(plain), str(tmp_path / "folder"))
    assert done.copied == ()
    assert "scheduler, step: left out, for which a folder of DeepSpeed's has no place" in done.notes


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["replay", "mean"])
def test_pending_updates_are_applied_as_a_flush_does(
    tmp_path: Path, named: bool, dtype: torch.dtype, rule: Any
) -> None:
    config = replace(WINDOW, deferred_update=rule)
    model, optimizer = ours(config, dtype, named=named)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ours.pt")
    header = json.loads(optimizer.state_dict()["param_groups"][0]["zenflow"])
    assert any(weight["log"] for weight in header["weights"])
    assert any(weight["flights"] for weight in header["weights"])
    done = export_checkpoint(str(tmp_path / "ours.pt"), str(tmp_path / "plain.pt"))
    assert bool(done.notes) == (rule == "mean")
    optimizer.flush()
    flushed = optimizer.state_dict()["state"]
    exported = load(tmp_path / "plain.pt")
    names = [name for group in exported["optimizer"]["param_groups"] for name in group["param_names"]]
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.dim() == 2] == names[:3]
    for number, name in enumerate(names):
        assert torch.equal(exported["model"][name], flushed[number]["master"]), name
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(exported["optimizer"]["state"][number][moment], flushed[number][moment]), name
        assert int(exported["optimizer"]["state"][number]["step"]) == int(flushed[number]["count"].max()) == PASSES
    tokens = torch.arange(19)
    other = Tiny(5).to(dtype)
    other.load_state_dict(exported["model"])
    assert torch.equal(other(tokens), model(tokens))
    optimizer.close()


def test_torchs_adamw_goes_on_as_ours_would(tmp_path: Path) -> None:
    model, optimizer = ours(zenflow.ZenFlowConfig.zero_offload(), torch.float32)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ours.pt")
    export_checkpoint(str(tmp_path / "ours.pt"), str(tmp_path / "plain.pt"))
    exported, other = load(tmp_path / "plain.pt"), Tiny(5)
    adamw = torch.optim.AdamW(groups_of(other), lr=1.0)
    other.load_state_dict(exported["model"])
    adamw.load_state_dict(exported["optimizer"])
    for ours_now, torchs in zip(train(model, optimizer, range(6, 9)), train(other, adamw, range(6, 9)), strict=True):
        for name, weight in torchs.items():
            assert torch.allclose(ours_now[name], weight, rtol=0, atol=3e-6 * float(weight.abs().max())), name
    optimizer.close()


def test_a_folder_of_deepspeeds_engine_is_exported(tmp_path: Path) -> None:
    model, optimizer = ours(WINDOW, torch.bfloat16, named=False)
    (tmp_path / "run" / "global_step6").mkdir(parents=True)
    (tmp_path / "run" / "latest").write_text("global_step6")
    document = {"module": model.state_dict(), "buffer_names": ["shift"], "optimizer": optimizer.state_dict()}
    torch.save(document, tmp_path / "run" / "global_step6" / MODEL_STATES)
    export_checkpoint(str(tmp_path / "run"), str(tmp_path / "plain.pt"))
    export_checkpoint(str(tmp_path / "run" / "global_step6"), str(tmp_path / "same.pt"))
    assert same(load(tmp_path / "plain.pt"), load(tmp_path / "same.pt"))
    optimizer.flush()
    for name, weight in weights_of(model).items():
        assert torch.equal(load(tmp_path / "plain.pt")["model"][name].bfloat16(), weight)
    optimizer.close()


def test_an_optimizers_own_state_dict_needs_the_model(tmp_path: Path) -> None:
    model, optimizer = ours(WINDOW, torch.bfloat16)
    torch.save(optimizer.state_dict(), tmp_path / "ours.pt")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with pytest.raises(BadInputError, match="holds no model beside the optimizer: give --model FILE"):
        export_checkpoint(str(tmp_path / "ours.pt"), str(tmp_path / "plain.pt"))
    export_checkpoint(str(tmp_path / "ours.pt"), str(tmp_path / "plain.pt"), model=str(tmp_path / "model.pt"))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "both.pt")
    export_checkpoint(str(tmp_path / "both.pt"), str(tmp_path / "of_both.pt"))
    assert same(load(tmp_path / "plain.pt"), load(tmp_path / "of_both.pt"))
    optimizer.close()


def test_what_was_written_to_a_weight_is_its_master(tmp_path: Path) -> None:
    """As in training, where masters are read again at the next step."""
    model, optimizer = ours(zenflow.ZenFlowConfig.zero_offload(), torch.bfloat16)
    optimizer.flush()
    with torch.no_grad():
        model.up.weight[3, 2] = 7.0
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ours.pt")
    before = optimizer.state_dict()["state"][1]["master"].clone()
    export_checkpoint(str(tmp_path / "ours.pt"), str(tmp_path / "plain.pt"))
    before[3, 2] = 7.0
    assert torch.equal(load(tmp_path / "plain.pt")["model"]["up.weight"], before)
    optimizer.close()


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    model = Tiny().bfloat16()
    optimizer = zenflow.ZenFlowAdamW(groups_of(model, named=True), lr=LR, config=WINDOW, module=model)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ours.pt")
    done = export_checkpoint(str(tmp_path / "ours.pt"), str(tmp_path / "plain.pt"))
    exported = load(tmp_path / "plain.pt")
    assert done.steps == 0
    assert exported["optimizer"]["state"] == {}
    assert all(torch.equal(exported["model"][name], weight.float()) for name, weight in weights_of(model).items())
    import_checkpoint(str(tmp_path / "plain.pt"), str(tmp_path / "again.pt"))
    again = Tiny().bfloat16()
    other = zenflow.ZenFlowAdamW(groups_of(again), lr=1.0, config=WINDOW, module=again)
    other.load_state_dict(load(tmp_path / "again.pt")["optimizer"])
    for one, two in zip(train(model, optimizer, range(1)), train(again, other, range(1)), strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    for used in (optimizer, other):
        used.close()


@pytest.mark.parametrize(("kind", "ours_kind"), [(torch.optim.Adam, zenflow.ZenFlowAdam), (torch.optim.AdamW, None)])
def test_adam_is_not_taken_for_adamw(tmp_path: Path, kind: Any, ours_kind: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    optimizer = kind(model.parameters(), lr=LR, weight_decay=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "plain.pt")
    assert import_checkpoint(str(tmp_path / "plain.pt"), str(tmp_path / "ours.pt")).rule == kind.__name__.lower()
    other = (ours_kind or zenflow.ZenFlowAdamW)(model.parameters(), config=WINDOW)
    other.load_state_dict(load(tmp_path / "ours.pt")["optimizer"])
    other.close()
    if ours_kind is not None:
        with pytest.raises(zenflow.CheckpointError, match="of the rule adam, the optimizer of adamw"):
            zenflow.ZenFlowAdamW(model.parameters()).load_state_dict(load(tmp_path / "ours.pt")["optimizer"])


def test_another_rule_is_refused(tmp_path: Path) -> None:
    model = Tiny()
    optimizer = zenflow.ZenFlowLion(groups_of(model), lr=LR, config=WINDOW)
    list(train(model, optimizer, range(1)))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ours.pt")
    with pytest.raises(BadInputError, match="is of the rule lion; it must be of adamw or adam"):
        export_checkpoint(str(tmp_path / "ours.pt"), str(tmp_path / "plain.pt"))
    optimizer.close()


def test_columns_of_a_conv1d_stay_columns(tmp_path: Path) -> None:
    """transformers' GPT-2 stores weights [in, out], and some are square."""
    transformers = pytest.importorskip("transformers", reason="the huggingface extra is not installed")
    config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, n_inner=12, n_positions=8, vocab_size=11)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    tokens = torch.arange(8).view(1, -1)

    def steps(model: nn.Module, optimizer: Any, count: int) -> dict[str, Tensor]:
        for _ in range(count):
            optimizer.zero_grad()
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
        return weights_of(model)

    model = transformers.GPT2LMHeadModel(config)
    adamw = torch.optim.AdamW(model.parameters(), lr=LR)
    steps(model, adamw, 2)
    torch.save({"model": model.state_dict(), "optimizer": adamw.state_dict()}, tmp_path / "plain.pt")
    import_checkpoint(str(tmp_path / "plain.pt"), str(tmp_path / "ours.pt"))
    document, other = load(tmp_path / "ours.pt"), transformers.GPT2LMHeadModel(config)
    knobs = zenflow.ZenFlowConfig(topk_ratio=0.3, update_interval=1, overlap_step=False)
    optimizer = zenflow.ZenFlowAdamW(other.parameters(), config=knobs, module=other)
    optimizer.load_state_dict(document["optimizer"])
    other.load_state_dict(document["model"])
    ours_now, torchs = steps(other, optimizer, 3), steps(model, adamw, 3)
    for name, weight in torchs.items():
        assert torch.allclose(ours_now[name], weight, rtol=0, atol=1e-5), name
    header = json.loads(optimizer.state_dict()["param_groups"][0]["zenflow"])
    turned = {
        name
        for name, weight in zip(dict(other.named_parameters()), header["weights"], strict=True)
        if weight["plan"]["transposed"]
    }
    assert turned == {
        f"transformer.h.0.{part}.weight" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    optimizer.close()


def test_clipping_of_the_first_step_is_that_of_the_configuration(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps({"gradient_clipping": 0.25, "gradient_accumulation_steps": 3}))
    import_checkpoint(str(plain), str(tmp_path / "ours.pt"), ds_config=str(tmp_path / "ds_config.json"))
    header = json.loads(load(tmp_path / "ours.pt")["optimizer"]["param_groups"][0]["zenflow"])
    assert (header["config"]["max_grad_norm"], header["config"]["gradient_accumulation_steps"]) == (0.25, 3)
    import_checkpoint(str(plain), str(tmp_path / "without.pt"))
    header = json.loads(load(tmp_path / "without.pt")["optimizer"]["param_groups"][0]["zenflow"])
    assert header["config"]["max_grad_norm"] is None


def test_everything_is_its_loaders(plain: Path, tmp_path: Path) -> None:
    import_checkpoint(str(plain), str(tmp_path / "ours.pt"))
    model, other = Tiny(), Tiny()
    document = load(tmp_path / "ours.pt")
    knobs = zenflow.ZenFlowConfig(
        topk_ratio=0.3, update_interval=1, overlap_step=False, max_grad_norm=0.01, stream=False, bucket_bytes=64
    )
    optimizer = zenflow.ZenFlowAdamW(groups_of(model), config=knobs, module=model)
    optimizer.load_state_dict(document["optimizer"])
    model.load_state_dict(document["model"])
    torchs = torch.optim.AdamW(groups_of(other), lr=1.0)
    torchs.load_state_dict(load(plain)["optimizer"])
    other.load_state_dict(load(plain)["model"])
    for step, ours_now in enumerate(train(model, optimizer, range(3, 6)), 3):
        torchs.zero_grad()
        loss_of(other, step).backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.01)
        torchs.step()
        for name, weight in weights_of(other).items():
            assert torch.allclose(ours_now[name], weight, rtol=0, atol=3e-6 * float(weight.abs().max())), (step, name)
    assert optimizer.config == knobs.resolved()
    optimizer.close()


@pytest.mark.parametrize("named", [True, False])
def test_frozen_parameters_in_the_groups_have_a_shape_alone(tmp_path: Path, named: bool) -> None:
    model = Tiny()
    parameters: Any = model.named_parameters() if named else model.parameters()
    optimizer = zenflow.ZenFlowAdamW(parameters, lr=LR, betas=BETAS, config=WINDOW, module=model)
    list(train(model, optimizer, range(PASSES)))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ours.pt")
    export_checkpoint(str(tmp_path / "ours.pt"), str(tmp_path / "plain.pt"))
    optimizer.close()
    exported = load(tmp_path / "plain.pt")
    for name, value in model.state_dict().items():
        assert torch.equal(exported["model"][name], value), name
    trained = [number for number, (_, p) in enumerate(model.named_parameters()) if p.requires_grad]
    assert sorted(exported["optimizer"]["state"]) == trained
