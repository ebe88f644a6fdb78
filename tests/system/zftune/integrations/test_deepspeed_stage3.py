"""ZeRO stage 3 on the backend zenflow: as one process with the whole batch, whatever scripts do with the weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fork_server
from tests.support.tiers import fast
from tests.support.zftune.integrations.ds_running import ADAMW, ZENFLOW, ds_config, run_cases
from tests.support.zftune.integrations.ds_worker import Experts, make_model
from zftune.checkpoint.converting import export_checkpoint
from zftune.errors import BadInputError

GATHERS = {"stage3_gather_16bit_weights_on_model_save": True}
SCALED = {"enabled": True, "initial_scale_power": 16, "hysteresis": 1}
STEPS, SAVED_AFTER = 9, 5


def config_of(precision: str = "fp32", **more: Any) -> dict[str, Any]:
    """As half of the public ones: optimizer and weights on the CPU."""
    config: dict[str, Any] = ds_config(precision, stage=3, **more)
    config["zero_optimization"] |= {"offload_param": {"device": "cpu"}, **GATHERS}
    return config


ALL: dict[str, dict[str, Any]] = {
    "exact": {"config": config_of(optimizer=ADAMW)},
    "late": {"config": config_of(zenflow=ZENFLOW, optimizer=ADAMW)},
    "accumulated": {"config": config_of(optimizer=ADAMW, gradient_accumulation_steps=2), "passes": 2},
    "bf16": {"config": config_of("bf16", optimizer=ADAMW), "backward": "direct"},
    "fp16": {"config": {**config_of("fp16", optimizer=ADAMW), "fp16": SCALED}},
    "reduced in fp32": {"config": config_of("bf16", optimizer=ADAMW, communication_data_type="fp32")},
    "odd": {"config": config_of(optimizer=ADAMW), "model": "odd"},
    "instance": {"config": config_of(), "optimizer": "instance", "scheduler": "instance"},
    "callable": {"config": config_of(), "optimizer": "callable", "scheduler": "callable"},
    "groups": {"config": config_of(optimizer=ADAMW), "optimizer": "groups"},
    "made in bf16": {"config": config_of("bf16", optimizer=ADAMW), "init": "bfloat16"},
    "made in bf16, odd": {"config": config_of("bf16", optimizer=ADAMW), "init": "bfloat16", "model": "odd"},
    "by parts": {"config": config_of(optimizer=ADAMW), "model": "odd", "parts": True},
    "by parts, late": {"config": config_of(zenflow=ZENFLOW, optimizer=ADAMW), "model": "odd", "parts": True},
    "twice": {"config": config_of(optimizer=ADAMW), "twice": True},
    "tuned online": {"config": config_of(optimizer=ADAMW, zftune={"online": True})},
}
CASES = fast(
    {name: ALL[name] for name in ("late", "accumulated", "fp16", "by parts", "instance", "made in bf16, odd")},
    all_of=ALL,
)
RANKS = fast((2,), all_of=(2, 4))
RESUMED_ON = fast((1, 2), all_of=(1, 2, 4))
ROUNDED = ("bf16", "fp16", "reduced in fp32", "made in bf16", "made in bf16, odd")
SAVED = {
    "late": ALL["late"],
    "odd bf16": {"config": config_of("bf16", zenflow=ZENFLOW, optimizer=ADAMW), "model": "odd"},
    "late at 2": {"config": ds_config(zenflow=ZENFLOW, optimizer=ADAMW)},
    "odd bf16 at 2": {"config": ds_config("bf16", zenflow=ZENFLOW, optimizer=ADAMW), "model": "odd"},
}
"""At stage 3, and at 2."""
REFUSED = {
    "scalar": "it has no dimension; at ZeRO stage 3 a parameter must have one or more",
    "empty": "it is of shape (0, 3), at ZeRO stage 3 on several ranks a parameter must have elements",
}
VISITED = {"config": config_of(optimizer=ADAMW), "model": "odd", "visit": 3}
SMALL = {"device_bytes": 10_000}
"""A device on which the weights do not stay."""
LATE = {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": True}
ALL_ON_HOST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "visited": (VISITED, VISITED),
    "one step late": (
        {"config": config_of(zenflow={}, optimizer=ADAMW)},
        {"config": config_of(zenflow=LATE, optimizer=ADAMW)},
    ),
    "accumulated": (ALL["accumulated"], ALL["accumulated"]),
    "fp16": (ALL["fp16"], ALL["fp16"]),
    "made in bf16, odd": (ALL["made in bf16, odd"], ALL["made in bf16, odd"]),
    "by parts": (ALL["by parts"], ALL["by parts"]),
}
"""Of a small device, and the same of a large one."""
ON_HOST = fast({name: ALL_ON_HOST[name] for name in ("visited", "one step late")}, all_of=ALL_ON_HOST)
SAID = {
    "too small": (
        {"config": config_of(optimizer=ADAMW), "device_bytes": 1000},
        "BadInputError: the weights at ZeRO stage 3 take 8.26 kB of a device (ranks: 2), of which 1 kB are free",
    ),
    "selecting": (
        {"config": config_of(zenflow=ZENFLOW, optimizer=ADAMW), **SMALL},
        "BadInputError: zero_optimization.zenflow.topk_ratio is 0.2 and the weights are on the host (offload_param),",
    ),
}
"""What is refused, and how."""


def on(ranks: int, cases: dict[str, Any]) -> dict[str, Any]:
    """Each rank has a part of the batch of 4."""
    return {
        name: {
            "steps": STEPS,
            "ours": True,
            **case,
            "config": {**case["config"], "train_micro_batch_size_per_gpu": 4 // ranks},
        }
        for name, case in cases.items()
    }


def on_host(ranks: int) -> dict[str, Any]:
    small = {f"{name} on host": {**case, **SMALL} for name, (case, _) in ON_HOST.items()}
    return on(ranks, {**small, **{f"{name} on device": case for name, (_, case) in ON_HOST.items()}})


def saving(folder: Path, ranks: int) -> dict[str, Any]:
    return {
        f"saved {name}": {**case, "save_after": SAVED_AFTER, "save": str(folder / f"of {ranks} {name}")}
        for name, case in on(ranks, SAVED).items()
    }


def resuming(folder: Path, ranks: int, source: int = 2) -> dict[str, Any]:
    return {
        f"{name} from {source}": {**case, "steps": STEPS - SAVED_AFTER, "load": str(folder / f"of {source} {name}")}
        for name, case in on(ranks, SAVED).items()
    }


EXPERTS = {"config": config_of(optimizer=ADAMW), "model": "experts"}
CHANGES = {
    "stage 3 to 2": ("late at 2", "of 2 late"),
    "stage 2 to 3": ("late", "of 2 late at 2"),
    "one rank to two at stage 2": ("late at 2", "of 1 late at 2"),
    "one rank at stage 2 to two at stage 3": ("late", "of 1 late at 2"),
}
"""What goes on from where, all of the same training; one rank has saved whole state in the model's file."""


def changing(folder: Path) -> dict[str, Any]:
    """On two ranks."""
    steps = STEPS - SAVED_AFTER
    return on(2, {name: {**SAVED[to], "steps": steps, "load": str(folder / of)} for name, (to, of) in CHANGES.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stage3")


@pytest.fixture(scope="module")
def by_ranks(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What each rank saw, by the number of ranks."""
    refused = on(2, {kind: {"config": config_of(optimizer=ADAMW), "model": kind} for kind in ("scalar", "empty")})
    refused |= on(2, {name: case for name, (case, _) in SAID.items()})
    two = {**on(2, {**CASES, "experts": EXPERTS}), **saving(folder, 2), **refused, **on_host(2)}
    found = {2: run_cases(folder / "two", two, ranks=2)}
    saved = {**on(1, {"saved": VISITED})["saved"], **SMALL, "save_after": SAVED_AFTER, "save": str(folder / "of host")}
    one = {**on(1, CASES), **resuming(folder, 1), **on_host(1), "saved on host": saved, **saving(folder, 1)}
    found[1] = run_cases(folder / "one", one)
    from_host = on(2, {"from host": {**VISITED, "visit": None, "steps": STEPS - SAVED_AFTER, "load": saved["save"]}})
    again = run_cases(folder / "again", {**resuming(folder, 2), **changing(folder), **from_host}, ranks=2)
    for seen, more in zip(found[2], again, strict=True):
        seen.update(more)
    if 4 in RANKS:
        found[4] = run_cases(folder / "four", {**on(4, CASES), **resuming(folder, 4)}, ranks=4)
    for ranks in found.values():
        for seen in ranks:
            for name, case in list(seen.items()):
                assert name in {**REFUSED, **SAID} or "error" not in case, f"{name}: {case['error']}"
                if name.endswith(" on device"):
                    seen[name.removesuffix(" on device")] = case
    return found


# One sample of a rank has other overflows than the mean of four.
PAIRS = [(name, ranks) for name in CASES for ranks in RANKS if (name, ranks) != ("fp16", 4)]


@pytest.mark.smoke
@pytest.mark.parametrize(("name", "ranks"), PAIRS)
def test_ranks_train_as_one(by_ranks: dict[int, list[dict[str, Any]]], name: str, ranks: int) -> None:
    alone, first = by_ranks[1][0][name], by_ranks[ranks][0][name]
    assert first["described"][0].endswith(", stage 3 in the ds_config, trained by zenflow over FSDP2")
    rounded = name in ROUNDED
    for other in by_ranks[ranks][1:]:
        assert other[name]["norms"] == first["norms"]
        torch.testing.assert_close(other[name]["flushed"], first["flushed"], rtol=0.0, atol=0.0)
    assert first["scales"] == alone["scales"]
    assert first["lrs"] == alone["lrs"]
    assert first["norms"] == pytest.approx(alone["norms"], rel=2e-2 if rounded else 1e-5, nan_ok=True)
    losses = [sum(parts) / ranks for parts in zip(*(one[name]["losses"] for one in by_ranks[ranks]), strict=True)]
    assert losses == pytest.approx(alone["losses"], rel=2e-2 if rounded else 1e-4)
    if not rounded:
        torch.testing.assert_close(first["flushed"], alone["flushed"], rtol=1e-4, atol=2e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("ranks", RESUMED_ON)
def test_it_goes_on_on_any_number_of_ranks(by_ranks: dict[int, list[dict[str, Any]]], name: str, ranks: int) -> None:
    for rank, seen in enumerate(by_ranks[ranks]):
        uninterrupted, resumed = by_ranks[2][rank % 2][f"saved {name}"], seen[f"{name} from 2"]
        assert resumed["client_state"]["mine"] == 7
        assert resumed["lrs"] == uninterrupted["lrs"][SAVED_AFTER:]
        if ranks == 2:
            assert resumed["losses"] == uninterrupted["losses"][SAVED_AFTER:]
        near = 0.0 if ranks == 2 else 4e-3 if "bf16" in name else 1e-5
        for weights in ("weights", "flushed"):
            torch.testing.assert_close(resumed[weights], uninterrupted[weights], rtol=0.0, atol=near)


@pytest.mark.usefixtures("by_ranks")
@pytest.mark.parametrize("name", ["odd bf16", "odd bf16 at 2"])
def test_the_files_are_those_of_deepspeed(folder: Path, tmp_path: Path, name: str) -> None:
    """With whole weights that lack no update, and fp32 ones that `zero_to_fp32` finds in the files of all ranks."""
    path = folder / f"of 2 {name}"
    tag = (path / "latest").read_text()
    saved = torch.load(path / tag / "mp_rank_00_model_states.pt", weights_only=False)  # it holds more than tensors
    model = make_model("odd")
    model.to(torch.bfloat16).load_state_dict(saved["module"])
    fork_server.run([path / "zero_to_fp32.py", path, tmp_path / "out"], check=True)
    whole = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert whole.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert whole[key].dtype == (torch.float32 if key != "frozen" else torch.bfloat16), key
        torch.testing.assert_close(whole[key].bfloat16(), value, rtol=0.0, atol=0.0, msg=key)
    assert not all(torch.equal(value, value.bfloat16().float()) for value in whole.values())
    assert saved["optimizer"] == {"in_folder": True, "steps": SAVED_AFTER}


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_asks_for_parts_of_zero_3_is_answered_as_it_is(
    by_ranks: dict[int, list[dict[str, Any]]], ranks: int
) -> None:
    """As trainers do before they generate, and in the model's forward."""
    for seen in by_ranks[ranks]:
        assert seen["visited"]["visit"]["zero"] == {
            "outside": ranks == 1,
            "in its forward": True,
            "gathered": True,
            "on its modules": False,
            "generates": True,
            "goes on": True,
        }


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_reads_whole_weights(by_ranks: dict[int, list[dict[str, Any]]], ranks: int) -> None:
    for seen in by_ranks[ranks]:
        found = seen["visited"]["visit"]["read"]
        expected = by_ranks[1][0]["visited"]["visit"]["read"]["outside"]
        torch.testing.assert_close(found["outside"], expected, rtol=0.0, atol=1e-5)
        assert found["shape"] == list(expected.shape)
        assert found["is a parameter"]
        assert found["is trained"]
        for name in ("detached", "copied", "saved"):
            assert torch.equal(found[name], found["outside"]), name
        assert torch.equal(found["context"]["inner.weight"], found["outside"])
        assert {name: value.shape for name, value in found["context"].items()} == {
            name: value.shape for name, value in make_model("odd").named_parameters()
        }
        torch.testing.assert_close(found["product"], found["outside"].sum(1))


def test_weights_in_16_bits(by_ranks: dict[int, list[dict[str, Any]]]) -> None:
    first, second = (seen["visited"]["visit"]["files"] for seen in by_ranks[2])
    context = by_ranks[2][0]["visited"]["visit"]["read"]["context"]
    assert first["gathers"]
    assert (first["told"], second["told"]) == (True, True)
    assert second["consolidated"] is None
    for found in (first["file"], first["consolidated"]):
        assert found.keys() == make_model("odd").state_dict().keys()
        for name, value in context.items():
            assert torch.equal(found[name], value), name
        assert found["again.weight"].data_ptr() == found["inner.weight"].data_ptr()  # tied


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_one_rank_writes_is_everybodys(by_ranks: dict[int, list[dict[str, Any]]], ranks: int) -> None:
    before = by_ranks[1][0]["visited"]["visit"]["read"]["outside"]
    for seen in by_ranks[ranks]:
        found = seen["visited"]["visit"]["written"]
        torch.testing.assert_close(found["shown"]["inner.weight"], before / 2, rtol=0.0, atol=1e-5)
        assert torch.equal(found["shown"]["inner.bias"], torch.full((13,), 0.25))
        assert torch.equal(found["masters"]["inner.weight"], found["shown"]["inner.weight"])
        if ranks > 1:  # ZeRO forgets what is written by nobody's leave
            torch.testing.assert_close(found["afterwards"], found["shown"], rtol=0.0, atol=0.0)


@pytest.mark.smoke
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rows_is_refused(by_ranks: dict[int, list[dict[str, Any]]], name: str) -> None:
    for seen in by_ranks[2]:
        assert REFUSED[name] in seen[name]["error"]


def test_ranks_use_different_experts(by_ranks: dict[int, list[dict[str, Any]]]) -> None:
    first, second = (seen["experts"] for seen in by_ranks[2])
    assert first["norms"] == second["norms"]
    torch.testing.assert_close(first["flushed"], second["flushed"], rtol=0.0, atol=0.0)
    torch.manual_seed(3)
    before = Experts().state_dict()
    assert not any(torch.equal(first["flushed"][f"0.{name}"], value) for name, value in before.items())


@pytest.mark.parametrize("name", CHANGES)
def test_stages_go_on_from_each_other(by_ranks: dict[int, list[dict[str, Any]]], name: str) -> None:
    for seen in by_ranks[2]:
        uninterrupted, resumed = seen["saved late"], seen[name]
        assert resumed["losses"] == pytest.approx(uninterrupted["losses"][SAVED_AFTER:], rel=1e-4)
        torch.testing.assert_close(resumed["flushed"], uninterrupted["flushed"], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_file_that_lacks_weights_is_refused(by_ranks: dict[int, list[dict[str, Any]]], ranks: int) -> None:
    for seen in by_ranks[ranks]:
        assert 'Missing key(s) in state_dict: "frozen", "scale", "inner.weight"' in seen["visited"]["visit"]["refused"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_accessors_know_the_state(by_ranks: dict[int, list[dict[str, Any]]], ranks: int) -> None:
    alone = by_ranks[1][0]["visited"]["visit"]["state"]
    rows = []
    for seen in by_ranks[ranks]:
        found = seen["visited"]["visit"]["state"]
        torch.testing.assert_close(found["master"], alone["master"], rtol=0.0, atol=1e-5)
        torch.testing.assert_close(found["exp_avg"], alone["exp_avg"], rtol=1e-4, atol=1e-6)
        assert torch.equal(found["set"], torch.full_like(alone["exp_avg"], 0.5))
        assert torch.equal(found["shown"], torch.full_like(alone["master"], 0.125))
        rows.append(found.get("local rows"))
    if ranks == 2:
        assert sum(rows) == len(alone["master"])


def test_training_goes_on_with_what_was_written(by_ranks: dict[int, list[dict[str, Any]]]) -> None:
    first, alone = by_ranks[2][0]["visited"], by_ranks[1][0]["visited"]
    torch.testing.assert_close(first["flushed"], alone["flushed"], rtol=1e-4, atol=2e-5)


@pytest.mark.usefixtures("by_ranks")
@pytest.mark.parametrize("name", ["late", "late at 2"])
def test_it_becomes_a_plain_checkpoint(folder: Path, tmp_path: Path, name: str) -> None:
    """With what was logged by rows applied, which takes masters and moments."""
    source = folder / f"of 2 {name}"
    with pytest.raises(BadInputError, match="lies by rows in the folder zenflow: give --trust"):
        export_checkpoint(str(source), str(tmp_path / "plain.pt"))
    export_checkpoint(str(source), str(tmp_path / "plain.pt"), trust=True)
    found = torch.load(tmp_path / "plain.pt", weights_only=True)
    tag = (source / "latest").read_text()
    saved = torch.load(source / tag / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    torch.testing.assert_close(found["model"], dict(saved), rtol=0.0, atol=0.0)
    assert {float(state["step"]) for state in found["optimizer"]["state"].values()} == {float(SAVED_AFTER)}


@pytest.mark.smoke
@pytest.mark.parametrize("name", ON_HOST)
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_do_not_fit_are_trained_on_the_host(
    by_ranks: dict[int, list[dict[str, Any]]], name: str, ranks: int
) -> None:
    """What scripts do with them included; one rank, too, which has all of them where they fit."""
    for seen in by_ranks[ranks]:
        found, expected = seen[f"{name} on host"], seen[f"{name} on device"]
        near = 0.0 if ranks == 2 else 1e-6
        torch.testing.assert_close(found["flushed"], expected["flushed"], rtol=0.0, atol=near)
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert found["topk_ratio"] == expected["topk_ratio"] == 0.0
        (line,) = [line for line in found["lines"] if "backend zenflow" in line]
        (other,) = [line for line in expected["lines"] if "backend zenflow" in line]
        sharded = f"; sharded by FSDP2 over {ranks} rank{'s' * (ranks > 1)}, whose "
        bytes_of = r"[1-9][\d.]* (MB|kB|bytes)"
        free = f"instead of a device, since {bytes_of} are free there and a step needs about {bytes_of} beside them"
        assert re.search(f"{sharded}{bytes_of} of weights each lie on the host {free}", line)
        assert other.endswith("stay on the device" if ranks == 1 else "stay on their devices")


@pytest.mark.parametrize("name", SAID)
def test_what_the_host_cannot_have_is_refused(by_ranks: dict[int, list[dict[str, Any]]], name: str) -> None:
    for seen in by_ranks[2]:
        assert seen[name]["error"].startswith(SAID[name][1])


def test_ranks_with_weights_on_the_device_go_on_from_one_with_weights_on_the_host(
    by_ranks: dict[int, list[dict[str, Any]]],
) -> None:
    uninterrupted = by_ranks[1][0]["saved on host"]
    for seen in by_ranks[2]:
        resumed = seen["from host"]
        assert resumed["client_state"]["mine"] == 7
        torch.testing.assert_close(resumed["flushed"], uninterrupted["flushed"], rtol=1e-4, atol=2e-5)
