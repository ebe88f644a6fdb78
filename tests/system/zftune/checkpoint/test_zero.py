"""ZeRO-1 and ZeRO-2 as DeepSpeed saves them: what is taken over, and who goes on how from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zenflow
from tests.support.zftune.checkpoint.tiny import BETAS, LR, Tiny, groups_of, train, weights_of
from tests.support.zftune.checkpoint.upstream import BACK, CASES_OF, FIRST, MORE
from zftune.checkpoint.converting import export_checkpoint, import_checkpoint
from zftune.checkpoint.sources import MODEL_STATES, load
from zftune.errors import BadInputError

Saved = Callable[[int], Path]
SINGLE = [name for name in CASES_OF[1] if name != "zenflow"]
KNOBS = {
    "zero_offload": zenflow.ZenFlowConfig.zero_offload(),
    "selecting": zenflow.ZenFlowConfig(topk_ratio=0.3, update_interval=1, overlap_step=False),
    "resident": zenflow.ZenFlowConfig(offload_ratio=0.0, update_interval=1, overlap_step=False),
    "twin": zenflow.ZenFlowConfig(topk_ratio=0.2, offload_ratio=0.5, update_interval=1, overlap_step=False),
}


def found_in(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"{name}.pt", weights_only=True)
    return found


def model_file(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob(f"*/{MODEL_STATES}")
    document: dict[str, Any] = torch.load(path, weights_only=True)
    return document


def imported(folder: Path, name: str, tmp_path: Path) -> dict[str, Any]:
    import_checkpoint(str(folder / name), str(tmp_path / "ours.pt"))
    document: dict[str, Any] = torch.load(tmp_path / "ours.pt", weights_only=True)
    return document


def close(ours: Iterable[dict[str, Tensor]], theirs: Iterable[dict[str, Tensor]], *, ulp: float) -> None:
    """Every step within so many units in the last place of the largest weight, times the number of the step."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True), 1):
        for name, weight in other.items():
            unit = torch.finfo(weight.dtype).eps * float(weight.float().abs().max())
            difference = float((one[name].float() - weight.float()).abs().max())
            assert difference <= ulp * number * unit, (number, name, difference / unit)


@pytest.mark.smoke
@pytest.mark.parametrize(("ranks", "name"), [*((1, name) for name in SINGLE), (2, "zero2_bf16")])
def test_masters_moments_and_steps_are_taken_over(saved_by: Saved, tmp_path: Path, ranks: int, name: str) -> None:
    folder = saved_by(ranks)
    document = imported(folder, name, tmp_path)
    state, groups = document["optimizer"]["state"], document["optimizer"]["param_groups"]
    expected = found_in(folder, name)["state"]
    names = [name for group in groups for name in group["param_names"]]
    assert names == [n for want in (2, 1) for n, p in Tiny().named_parameters() if n in expected and p.dim() == want]
    for number, weight in enumerate(names):
        for stream, tensor in expected[weight].items():
            assert torch.equal(state[number][stream], tensor), (weight, stream)
        assert set(state[number]["count"].tolist()) == {len(FIRST)}
    assert [(group["lr"], tuple(group["betas"]), group["weight_decay"]) for group in groups] == [
        (LR, BETAS, 0.1),
        (LR, BETAS, 0.0),
    ]
    saved = model_file(folder / name)["module"]
    assert list(document["model"]) == list(saved)
    assert all(torch.equal(document["model"][n], t) and document["model"][n].dtype == t.dtype for n, t in saved.items())


def test_parameters_in_turns_come_back_in_the_order_of_their_group(saved_by: Saved, tmp_path: Path) -> None:
    folder = saved_by(2)
    document, saved = imported(folder, "zero2_robin", tmp_path), model_file(folder / "zero2_robin")
    names = [name for group in document["optimizer"]["param_groups"] for name in group["param_names"]]
    in_turns = [name for shapes in saved["param_shapes"] for name in shapes]
    assert (
        names == [name for shapes in model_file(folder / "zero2_bf16")["param_shapes"] for name in shapes] != in_turns
    )
    for number, name in enumerate(names):  # DeepSpeed's own account of masters is wrong there
        assert torch.equal(document["optimizer"]["state"][number]["master"].bfloat16(), saved["module"][name])


@pytest.mark.smoke
@pytest.mark.parametrize("knobs", KNOBS)
@pytest.mark.parametrize("name", BACK)
def test_training_goes_on_as_upstream_does(saved_by: Saved, tmp_path: Path, name: str, knobs: str) -> None:
    folder = saved_by(1)
    document, expected = imported(folder, name, tmp_path), found_in(folder, name)["weights"]
    model = Tiny(1)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(expected[0]["words.weight"].dtype)
    optimizer = zenflow.ZenFlowAdamW(groups_of(model), lr=1.0, config=KNOBS[knobs], module=model)
    optimizer.load_state_dict(document["optimizer"])
    model.load_state_dict(document["model"])
    assert optimizer.steps == len(FIRST)
    close(train(model, optimizer, MORE), expected, ulp=4 if "fp32" in name else 1)
    assert optimizer.config.topk_ratio == KNOBS[knobs].topk_ratio
    assert optimizer.config.offload_ratio == KNOBS[knobs].offload_ratio
    optimizer.close()


@pytest.mark.parametrize("name", BACK)
def test_deepspeeds_engine_goes_on_with_our_optimizer(saved_by: Saved, name: str) -> None:
    found = found_in(saved_by(1), name)
    close(found["under_engine"], found["weights"], ulp=4 if "fp32" in name else 1)


def test_torchs_adamw_goes_on_from_the_plain_form(saved_by: Saved, tmp_path: Path) -> None:
    folder = saved_by(1)
    imported(folder, "zero2_fp32", tmp_path)
    export_checkpoint(str(tmp_path / "ours.pt"), str(tmp_path / "plain.pt"))
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    model = Tiny(1)
    optimizer = torch.optim.AdamW(groups_of(model), lr=1.0)
    model.load_state_dict(plain["model"])
    optimizer.load_state_dict(plain["optimizer"])
    close(train(model, optimizer, MORE), found_in(folder, "zero2_fp32")["weights"], ulp=4)


@pytest.mark.smoke
@pytest.mark.parametrize("name", BACK)
def test_upstreams_own_script_reads_what_was_imported(saved_by: Saved, name: str) -> None:
    found = found_in(saved_by(1), name)
    assert found["fp32"].keys() == Tiny().state_dict().keys()
    for weight, streams in found["state"].items():
        assert torch.equal(found["fp32"][weight], streams["master"])
    assert torch.equal(found["fp32"]["head.weight"], found["fp32"]["words.weight"])


def test_what_the_engine_needs_is_kept(saved_by: Saved) -> None:
    folder = saved_by(1)
    before, after = model_file(folder / "zero2_bf16"), model_file(folder / "zero2_bf16_ours")
    assert (folder / "zero2_bf16_ours" / "latest").read_text() == "global_step3"
    for key in ("global_steps", "global_samples", "lr_scheduler", "skipped_steps", "buffer_names", "ds_config"):
        assert before[key] == after[key], key
    for key in ("param_shapes", "frozen_param_shapes", "shared_params"):
        assert before[key] == after[key], key


def test_the_inner_folder_keeps_its_name(saved_by: Saved, tmp_path: Path) -> None:
    """Accelerate's is called pytorch_model."""
    source = tmp_path / "accelerate"
    shutil.copytree(saved_by(1) / "zero2_bf16", source)
    (source / "global_step3").rename(source / "pytorch_model")
    (source / "latest").write_text("pytorch_model\n")
    assert import_checkpoint(str(source), str(tmp_path / "new")).copied == ()
    assert (tmp_path / "new" / "latest").read_text() == "pytorch_model"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["latest", "pytorch_model"]


def test_the_loss_scale_of_fp16_is_kept_for_the_engine(saved_by: Saved, tmp_path: Path) -> None:
    source = saved_by(1) / "zero2_fp16"
    import_checkpoint(str(source), str(tmp_path / "folder"))
    scaler = model_file(tmp_path / "folder")["optimizer"]["loss_scaler"]
    assert (scaler["cur_scale"], scaler["cur_iter"]) == (2**8, len(FIRST))
    assert import_checkpoint(str(source), str(tmp_path / "file.pt")).notes == ("the loss scale, 256, is not in a file",)


@pytest.mark.parametrize("settings_known", [True, False])
def test_upstreams_zenflow_is_refused(saved_by: Saved, tmp_path: Path, settings_known: bool) -> None:
    source = tmp_path / "zenflow"
    shutil.copytree(saved_by(1) / "zenflow", source)
    if not settings_known:
        _forget_settings(source)
    with pytest.raises(
        BadInputError, match="ZenFlow" if settings_known else "328 of 342 masters do not round to the weights"
    ):
        import_checkpoint(str(source), str(tmp_path / "ours.pt"))
    assert not (tmp_path / "ours.pt").exists()


def _forget_settings(folder: Path) -> None:
    """As where the configuration was a path that is not there any more."""
    for path in folder.glob("*/*.pt"):
        document = load(path, trust=False)
        if "optimizer_state_dict" in document:
            document["optimizer_state_dict"].pop("loss_scaler")
            document["optimizer_state_dict"].pop("param_slice_mappings")
        torch.save({**document, "ds_config": "/no/such/ds_config.json"}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)  # what was loaded is still read from the old one


def test_the_configuration_may_be_a_path(saved_by: Saved, tmp_path: Path) -> None:
    source = tmp_path / "by_path"
    shutil.copytree(saved_by(1) / "zero2_bf16", source)
    document = model_file(source)
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({**document["ds_config"], "gradient_clipping": 0.25}))
    torch.save({**document, "ds_config": str(config)}, next(source.glob(f"*/{MODEL_STATES}")))
    ours = imported(tmp_path, "by_path", tmp_path)
    header = json.loads(ours["optimizer"]["param_groups"][0]["zenflow"])
    assert header["config"]["max_grad_norm"] == 0.25


def test_one_ranks_file_missing_is_found_out(saved_by: Saved, tmp_path: Path) -> None:
    source = tmp_path / "ranks"
    shutil.copytree(saved_by(2) / "zero2_bf16", source)
    next(source.glob("*/*rank_1_mp*")).unlink()
    with pytest.raises(BadInputError, match="the optim_states of 1 ranks; it must have those of all"):
        import_checkpoint(str(source), str(tmp_path / "ours.pt"))
    next(source.glob("*/*rank_0_mp*")).unlink()
    with pytest.raises(BadInputError, match="of ranks none"):
        import_checkpoint(str(source), str(tmp_path / "ours.pt"))


def test_weights_and_masters_of_different_moments_are_told(saved_by: Saved, tmp_path: Path) -> None:
    source = tmp_path / "changed"
    shutil.copytree(saved_by(1) / "zero2_bf16", source)
    document = model_file(source)
    document["module"]["norm.bias"] = document["module"]["norm.bias"].clone()
    document["module"]["norm.bias"][0] += 1
    torch.save(document, next(source.glob(f"*/{MODEL_STATES}")))
    done = import_checkpoint(str(source), str(tmp_path / "ours.pt"))
    assert done.notes == ("1 weights differ from their masters, which win",)
    model = torch.load(tmp_path / "ours.pt", weights_only=True)["model"]
    master = found_in(saved_by(1), "zero2_bf16")["state"]["norm.bias"]["master"]
    assert torch.equal(model["norm.bias"], master.bfloat16())


def test_a_thousand_weights_are_no_more_than_they_are(saved_by: Saved, tmp_path: Path) -> None:
    """Views of one flat vector must not each be saved with all of it."""
    imported(saved_by(1), "zero2_bf16", tmp_path)
    elements = sum(weight.numel() for weight in weights_of(Tiny()).values())
    assert (tmp_path / "ours.pt").stat().st_size < 40_000 + 40 * elements
