"""Several ranks: their gradients are averaged before anything else, and they never part."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

from zenflow import ConfigError, ZenFlowAdamW, ZenFlowConfig, knobs, runtime
from zenflow.errors import HostMemoryError
from zenflow.ranks import Ranks

STEPS, RANKS, BATCH = 11, 2, 6


def _model(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(13, 20), nn.Tanh(), nn.LayerNorm(20), nn.Linear(20, 7), nn.Linear(7, 7)).to(dtype)


def _batches(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(BATCH, 13, generator=generator).to(dtype), torch.randn(BATCH, 7, generator=generator).to(dtype))
        for _ in range(STEPS)
    ]


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], part: slice, step: int) -> torch.Tensor:
    x, y = batch[0][part], batch[1][part]
    last = model[4]  # type: ignore[index]
    features = model[:4](x)  # type: ignore[index]
    # Every third step the last layer has a gradient on no rank, every fifth on the first only.
    uses = step % 3 != 2 and (step % 5 != 4 or part.start == 0)
    loss: torch.Tensor = (((last(features) if uses else features) - y) ** 2).mean()
    return loss


def _train(config: ZenFlowConfig, dtype: torch.dtype, part: slice, seed: int) -> dict[str, Any]:
    model = _model(seed, dtype)
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, config=config, module=model)
    norms = []
    for step, batch in enumerate(_batches(dtype)):
        optimizer.zero_grad()
        _loss(model, batch, part, step).backward()
        optimizer.step()
        if optimizer.grad_norm is not None:
            norms.append(float(optimizer.grad_norm))
    optimizer.close()
    return {"weights": model.state_dict(), "norms": norms}


def _child(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    here = Path(folder)
    torch.distributed.init_process_group("gloo", init_method=f"file://{here / 'store'}", rank=rank, world_size=RANKS)
    results = {}
    for name, work in WORK.items():
        try:
            results[name] = work(rank)
        except Exception as error:  # noqa: BLE001 - told to the parent
            results[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    torch.save(results, here / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


class _Half:
    """A rank's part of every batch; its own beginning, which must not count."""

    def __init__(self, config: ZenFlowConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype

    def __call__(self, rank: int) -> dict[str, Any]:
        half = BATCH // RANKS
        return _train(self.config, self.dtype, slice(rank * half, (rank + 1) * half), seed=rank)


Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank found, by the name of the work."""
    folder = tmp_path_factory.mktemp("ranks")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    spawn(_child, (str(folder),), nprocs=RANKS, join=True)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


EXACT = ZenFlowConfig.zero_offload(bucket_bytes=700, max_grad_norm=0.5)
OVERLAPPED = ZenFlowConfig(topk_ratio=0.3, update_interval=3, select_interval=4, bucket_bytes=700)
AUTO = ZenFlowConfig(topk_ratio=0.3, update_interval="auto", select_interval="auto", max_update_interval=5)


CONFIGS = {"exact": EXACT, "overlapped": OVERLAPPED, "auto": AUTO}


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_are_one_with_the_whole_batch(ranks: Results, name: str) -> None:
    first, second = (results[name] for results in ranks)
    assert "error" not in first, first
    config = CONFIGS[name]
    # One rank's losses are means over halves where a half does not use the last layer: take the mean of both halves.
    model = _model(0)
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, config=config, module=model)
    half = BATCH // RANKS
    for step, batch in enumerate(_batches(torch.float32)):
        optimizer.zero_grad()
        parts = [_loss(model, batch, slice(rank * half, (rank + 1) * half), step) for rank in range(RANKS)]
        (sum(parts) / RANKS).backward()  # type: ignore[union-attr]
        optimizer.step()
    optimizer.close()
    for key, alone in model.state_dict().items():
        assert torch.equal(first["weights"][key], second["weights"][key]), key
        torch.testing.assert_close(first["weights"][key], alone, rtol=1e-4, atol=1e-5, msg=key)
    assert first["norms"] == second["norms"]


def test_ranks_stay_equal_in_bf16(ranks: Results) -> None:
    first, second = (results["bf16"] for results in ranks)
    assert "error" not in first, first
    for name in first["weights"]:
        assert torch.equal(first["weights"][name], second["weights"][name]), name


def _overflow_on_one(rank: int) -> dict[str, Any]:
    model = _model(0)
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-2, config=EXACT, module=model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.tensor(float(rank == 1))  # type: ignore[attr-defined]
    optimizer.step()
    same = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    optimizer.step()
    moved = any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    optimizer.abandon()
    return {"same": same, "moved": moved}


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Results) -> None:
    for results in ranks:
        assert results["overflow"] == {"same": True, "moved": True}


def _no_room_on_one(rank: int) -> dict[str, Any]:
    model = _model(0)
    optimizer = ZenFlowAdamW(model.parameters(), lr=1e-2, config=OVERLAPPED, module=model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if rank == 1:

        def refuse(*_: object) -> None:
            raise HostMemoryError("no room here")

        patch = pytest.MonkeyPatch()
        patch.setattr(knobs, "require_host_bytes", refuse)
        patch.setattr(runtime, "require_host_bytes", refuse)
    try:
        optimizer.set_knobs(topk_ratio=0.6)
    except Exception as error:  # noqa: BLE001 - it is the result
        said = str(error)
    else:
        said = "nothing"
    optimizer.step()
    kept = optimizer.config.topk_ratio
    optimizer.abandon()
    return {"said": said, "kept": kept}


def test_knobs_change_on_all_ranks_or_on_none(ranks: Results) -> None:
    first, second = (results["no room"] for results in ranks)
    assert first == {"said": "another rank failed at this, and says why; nothing has changed here", "kept": 0.3}
    assert second == {"said": "no room here", "kept": 0.3}


def _given_masters(rank: int) -> dict[str, Any]:
    whole = _model(rank)
    model = _model(rank).to(torch.bfloat16)
    optimizer = ZenFlowAdamW(model.parameters(), lr=0.0, weight_decay=0.0, config=OVERLAPPED, module=model)
    optimizer.give_masters(dict(zip(model.parameters(), (p.detach() for p in whole.parameters()), strict=True)))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.flush()
    state = optimizer.state_dict()
    optimizer.abandon()
    return {"weights": model.state_dict(), "masters": [entry["master"] for entry in _columns(state)]}


def _columns(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in state["state"].values() if "master" in entry]


def test_given_masters_are_those_of_the_first_rank(ranks: Results) -> None:
    first, second = (results["masters"] for results in ranks)
    assert "error" not in first, first
    assert first["masters"]
    for one, other in zip(first["masters"], second["masters"], strict=True):
        assert torch.equal(one, other)
    assert any(not torch.equal(one, one.bfloat16().float()) for one in first["masters"])


def _large_gradients(rank: int) -> dict[str, Any]:
    sizes = [(shape, dtype) for dtype in (torch.float16, torch.float32) for shape in ((3, 5), (7,))]
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in sizes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 40_000.0 + 8_000.0 * rank)
    found = Ranks.of(OVERLAPPED)
    assert found is not None
    found.reduce(parameters)
    return {"gradients": [parameter.grad for parameter in parameters]}


def test_gradients_become_their_mean_and_fp16_does_not_overflow_on_its_way(ranks: Results) -> None:
    """AdamW would not tell a sum from a mean. The sum of the two is 88,000, and fp16 ends at 65,504."""
    for results in ranks:
        assert "error" not in results["large"], results["large"]
        assert all(bool((gradient == 44_000.0).all()) for gradient in results["large"]["gradients"])


WORK: dict[str, Callable[[int], Any]] = {
    **{name: _Half(config, torch.float32) for name, config in CONFIGS.items()},
    "bf16": _Half(OVERLAPPED, torch.bfloat16),
    "overflow": _overflow_on_one,
    "masters": _given_masters,
    "large": _large_gradients,
    "no room": _no_room_on_one,  # last: it leaves the second rank without room
}


@pytest.mark.parametrize("offload_ratio", [0.0, 0.5, 1.0])
def test_masters_begin_with_what_is_given(offload_ratio: float) -> None:
    whole = _model(3)
    model = _model(3).to(torch.bfloat16)
    changed = model[0].weight  # type: ignore[index]
    with torch.no_grad():
        changed.view(-1)[0] += 1  # written to since: what was given does not round to it
    config = ZenFlowConfig(topk_ratio=0.3, update_interval=2, offload_ratio=offload_ratio)
    optimizer = ZenFlowAdamW(model.parameters(), lr=0.0, weight_decay=0.0, config=config, module=model)
    given = {p: w.detach().clone() for p, w in zip(model.parameters(), whole.parameters(), strict=True)}
    optimizer.give_masters(given)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    for number, (parameter, master) in enumerate(given.items()):
        expected = master.clone()
        if parameter is changed:
            expected.view(-1)[0] = parameter.detach().float().view(-1)[0]
        found = state[number]["master"]
        assert torch.equal(found.reshape(-1).sort().values, expected.reshape(-1).sort().values)
        assert torch.equal(parameter.detach(), expected.to(torch.bfloat16))
    with pytest.raises(ConfigError, match="give_masters\\(\\) was called after step 1, allowed is before the first"):
        optimizer.give_masters(given)
    optimizer.abandon()


def test_masters_of_another_shape_are_refused() -> None:
    model = _model(0)
    optimizer = ZenFlowAdamW(model.parameters(), config=EXACT, module=model)
    with pytest.raises(ConfigError, match=r"allowed is torch.float32 of its parameter's shape \(20, 13\)"):
        optimizer.give_masters({next(model.parameters()): torch.zeros(2)})
    optimizer.abandon()
