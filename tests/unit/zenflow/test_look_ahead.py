"""Look-ahead: what deferred weights show while updates are missing, and that nothing else ever knows of it.

That runs with it are the oracle's to a bit is tested with all other knobs (test_invariants, test_scripts).
"""

from __future__ import annotations

import copy
import ctypes
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.seeds import fresh_seeds
from tests.support.zenflow.family_cases import OURS
from zenflow import CheckpointError, ConfigError, ZenFlowAdamW, ZenFlowConfig, ZenFlowOptimizer
from zenflow.kernels.base import EagerKernels, GuessedColumns, address_of
from zenflow.kernels.tables import BucketTables
from zenflow.rules import RULES

AHEAD = ("coast", "guess")
SETTINGS: dict[str, dict[str, Any]] = {
    "windows": {"update_interval": 4},
    "soon": {"update_interval": 4, "apply_lag": 1},
    "one step late": {"update_interval": 1},
    "waited for": {"update_interval": 4, "overlap_step": False},
    "all deferred": {"update_interval": 3, "topk_ratio": 0.0},
    "staggered": {"update_interval": 4, "window_phase": "staggered", "bucket_bytes": 60},
    "staggered, waited for": {"update_interval": 4, "window_phase": "staggered", "overlap_step": False},
    "twin flow": {"update_interval": 3, "offload_ratio": 0.6},
}


@pytest.fixture(params=[f"{one}, {name}" for one in AHEAD for name in SETTINGS])
def ahead(request: pytest.FixtureRequest) -> ZenFlowConfig:
    """Knobs with which some updates are missing, and are looked ahead of."""
    look_ahead, _, name = request.param.partition(", ")
    knobs = {"topk_ratio": 0.2, "select_interval": 4, "bucket_bytes": 200, **SETTINGS[name]}
    return ZenFlowConfig(**knobs, look_ahead=look_ahead, host_threads=1)


def weights(seed: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((7, 12), (5,), (3, 9))]


def steps_of(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int, seed: int) -> Iterator[None]:
    """Steps with gradients that do not depend on the weights, which drift in one direction."""
    generator = torch.Generator().manual_seed(seed)
    drift = [torch.randn(one.shape, generator=generator) for one in parameters]
    for _ in range(steps):
        for parameter, mean in zip(parameters, drift, strict=True):
            gradient = mean + torch.randn(mean.shape, generator=generator)
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
        yield


def copies(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [one.detach().clone() for one in parameters]


def masters(optimizer: ZenFlowOptimizer, parameters: list[nn.Parameter]) -> list[Tensor]:
    return [optimizer.full_state(one)["master"].clone() for one in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", fresh_seeds("look-ahead", 1))
def test_no_master_ever_knows_of_it(ahead: ZenFlowConfig, dtype: torch.dtype, seed: int) -> None:
    found: list[list[Tensor]] = []
    shown: list[list[Tensor]] = []
    for look_ahead in ("none", ahead.look_ahead):
        parameters = weights(seed, dtype)
        config = ahead.changed({"look_ahead": look_ahead})
        optimizer = ZenFlowAdamW(parameters, lr=1e-2, config=config)
        kept, seen = [], []
        for _ in steps_of(parameters, optimizer, 14, seed):
            kept += masters(optimizer, parameters)
            seen += copies(parameters)
        found.append(kept)
        shown.append(seen)
        optimizer.flush()
        for parameter, master in zip(parameters, masters(optimizer, parameters), strict=True):
            assert torch.equal(parameter, master.to(dtype))
        optimizer.close()
    assert all(map(torch.equal, *found))
    assert not all(map(torch.equal, *shown)), "nothing was predicted"


def test_what_is_shown_is_nearer_to_the_weights_without_lateness(ahead: ZenFlowConfig) -> None:
    """With gradients that drift, which momentum follows: the mean distance from torch's AdamW falls by a sixth."""
    distances = {}
    for look_ahead in ("none", ahead.look_ahead):
        ours, theirs = weights(5), weights(5)
        optimizer = ZenFlowAdamW(ours, lr=1e-2, config=ahead.changed({"look_ahead": look_ahead}))
        both = zip(
            steps_of(ours, optimizer, 40, 5),
            steps_of(theirs, torch.optim.AdamW(theirs, lr=1e-2), 40, 5),
            strict=True,
        )
        pairs = ((a, b) for _ in both for a, b in zip(copies(ours), copies(theirs), strict=True))
        distances[look_ahead] = sum(float((a - b).abs().sum()) for a, b in pairs)
        optimizer.close()
    assert distances[ahead.look_ahead] < 0.85 * distances["none"]


@pytest.mark.parametrize("missing", [1, 2, 5])
@pytest.mark.parametrize(
    ("rule", "torchs", "settings"),
    [
        ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "dampening": 0.0}),
        ("sgd", torch.optim.SGD, {"lr": 0.1}),
        ("adamw", torch.optim.AdamW, {"lr": 0.1, "betas": (0.8, 1 - 1e-9), "weight_decay": 0.0}),
        ("adam", torch.optim.Adam, {"lr": 0.1, "betas": (0.95, 1 - 1e-9)}),
    ],
    ids=["momentum", "plain sgd", "adamw", "adam"],
)
def test_it_is_what_further_steps_without_gradients_do(
    rule: str, torchs: Any, settings: dict[str, Any], missing: int
) -> None:
    """Of AdamW after many steps, with second moments that stay: what else would change in it is small."""
    weight = nn.Parameter(torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    optimizer = torchs([weight], **settings)
    for _ in range(400):
        weight.grad = torch.sin(torch.arange(50, dtype=torch.float64)) + 0.1
        before = weight.detach().clone()
        optimizer.step()
    after = weight.detach().clone()
    for _ in range(missing):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    ours = OURS[rule]([nn.Parameter(torch.zeros(1))], **settings)
    hyper = RULES[rule].hyper(ours.param_groups[0])
    ours.close()
    # Adam divides by what it has summed of its second moment, which grows by less than a part in 400 a step.
    predicted = RULES[rule].coast(hyper, missing) * (after - before)
    torch.testing.assert_close(weight.detach() - after, predicted, rtol=0.02, atol=1e-12)


def test_no_gradient_in_a_window_shows_the_masters(ahead: ZenFlowConfig) -> None:
    parameters = weights(7)
    optimizer = ZenFlowAdamW(parameters, lr=1e-2, config=ahead)
    for _ in steps_of(parameters, optimizer, 9, 7):
        pass
    for _ in range(3 * ahead.longest_window):
        parameters[0].grad, parameters[2].grad = None, None
        parameters[1].grad = torch.ones(5)
        optimizer.step()
    for parameter, master in zip(parameters, masters(optimizer, parameters), strict=True):
        assert torch.equal(parameter, master)
    optimizer.close()


@pytest.mark.parametrize("seed", fresh_seeds("look-ahead", 1))
def test_weights_that_are_swapped_and_brought_back_were_never_away(ahead: ZenFlowConfig, seed: int) -> None:
    found = []
    for swaps in (False, True):
        parameters = weights(seed, torch.bfloat16)
        optimizer = ZenFlowAdamW(parameters, lr=1e-2, config=ahead)
        for _ in steps_of(parameters, optimizer, 11, seed):
            held = copies(parameters)
            with torch.no_grad():
                for one, own in zip(parameters, held if swaps else (), strict=swaps):
                    one.mul_(0.5)
                    one.copy_(own)
        found.append([*parameters, *masters(optimizer, parameters)])
        optimizer.close()
    assert all(map(torch.equal, *found))


def test_the_mean_rule_has_no_last_update_to_go_on_with() -> None:
    with pytest.raises(ConfigError, match=re.escape('must be "none" with deferred_update "mean"')):
        ZenFlowConfig(look_ahead="coast", deferred_update="mean")
    optimizer = ZenFlowAdamW(weights(1), config=ZenFlowConfig(look_ahead="coast"))
    with pytest.raises(ConfigError, match="deferred_update"):
        optimizer.set_knobs(deferred_update="mean")
    optimizer.close()


def loaded(config: ZenFlowConfig, saved: dict[str, Any], shown: list[Tensor]) -> tuple[list[nn.Parameter], Any]:
    parameters = [nn.Parameter(one.clone()) for one in shown]
    optimizer = ZenFlowAdamW(parameters, lr=1e-2, config=config)
    optimizer.load_state_dict(copy.deepcopy(saved))
    return parameters, optimizer


@pytest.mark.parametrize("steps", [4, 5, 6])
def test_a_master_that_is_set_after_loading_leaves_the_others_alone(ahead: ZenFlowConfig, steps: int) -> None:
    first = weights(9)
    optimizer = ZenFlowAdamW(first, lr=1e-2, config=ahead)
    for _ in steps_of(first, optimizer, steps, 9):
        pass
    second, resumed = loaded(ahead, optimizer.state_dict(), copies(first))
    for parameters, one in ((first, optimizer), (second, resumed)):
        one.set_full_state(parameters[0], "master", masters(one, parameters)[0] + 1)
        for _ in steps_of(parameters, one, 2, 10):
            pass
    assert all(map(torch.equal, [*first, *masters(optimizer, first)], [*second, *masters(resumed, second)]))
    optimizer.close()
    resumed.close()


def test_nothing_is_ahead_after_a_flush_though_all_columns_of_a_bucket_left() -> None:
    generator = torch.Generator().manual_seed(0)
    both = [nn.Parameter(torch.randn(4, 4, generator=generator)) for _ in range(2)]
    config = ZenFlowConfig(
        topk_ratio=0.5, select_interval=2, update_interval=3, bucket_bytes=16, look_ahead="coast", host_threads=1
    )
    optimizer = ZenFlowAdamW(both, lr=1e-2, config=config)
    loud = torch.tensor([1.0, 1, 10, 10]), torch.tensor([10.0, 10, 1, 1])
    for step in range(1, 30):
        for weight in both:
            weight.grad = torch.randn(4, 4, generator=generator) * loud[step // 2 % 2]
        optimizer.step()
        if step % 3 and step > 4:
            optimizer.flush()
            header = json.loads(optimizer.state_dict()["param_groups"][0]["zenflow"])
            assert [weight["ahead"] for weight in header["weights"]] == [[], []]
            with optimizer.torch_state():
                optimizer.state_dict()
    optimizer.close()


def test_a_damaged_prediction_is_refused() -> None:
    config = ZenFlowConfig(topk_ratio=0.2, update_interval=4, bucket_bytes=200, look_ahead="coast", host_threads=1)
    parameters = weights(11)
    optimizer = ZenFlowAdamW(parameters, lr=1e-2, config=config)
    for _ in steps_of(parameters, optimizer, 5, 11):
        pass
    saved = optimizer.state_dict()
    optimizer.close()
    *others, coming = saved["state"][0]["shown"]
    for bad in (coming[:1], coming[:, :3], coming.double()):
        damaged = copy.deepcopy(saved)
        damaged["state"][0]["shown"] = (*others, bad)
        with pytest.raises(CheckpointError, match="of the buckets that are late"):
            loaded(config, damaged, copies(parameters))


@pytest.mark.parametrize("rule", OURS)
def test_knobs_in_force_say_whether_a_rule_guesses(rule: str) -> None:
    optimizer = OURS[rule]([{"params": weights(0), "lr": 1e-2}], config=ZenFlowConfig(look_ahead="guess"), module=None)
    in_force = "guess" if rule in ("adamw", "adam") else "coast"
    assert optimizer.config.look_ahead == optimizer.asked_config.look_ahead == in_force
    optimizer.close()


class ByAddress(EagerKernels):
    """Guesses and shows as Triton's kernels do, past torch."""

    by_address = True

    def guess(self, guesses: Sequence[GuessedColumns], *, factor: Tensor | None, skip: Tensor | None) -> None:
        for one in guesses:
            moved = copies(one.weights)
            super().guess([replace(one, weights=moved)], factor=factor, skip=skip)
            overwrite(one.weights, moved)

    def show_bucket(self, tables: BucketTables, weights: Sequence[Tensor | None], rows: Tensor) -> None:
        there = [weight for weight in weights if weight is not None]
        assert len(there) == len(weights)
        shown = copies(there)
        super().show_bucket(tables, shown, rows)
        overwrite(there, shown)


def overwrite(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        ctypes.memmove(address_of(weight), address_of(value), value.nbytes)


def masters_of_a_script(look_ahead: str, seed: int, **knobs: Any) -> Tensor:
    """The masters of a weight to which a script adds, also where no gradient comes."""
    config = ZenFlowConfig(
        update_interval=3,
        apply_lag=2,
        look_ahead=look_ahead,  # type: ignore[arg-type]
        window_phase="staggered",
        **knobs,
    )
    weight = nn.Parameter(torch.zeros(7, 13))
    optimizer = ZenFlowAdamW([weight], lr=0.125, betas=(0.0, 0.9), weight_decay=0.0, config=config)
    generator = torch.Generator().manual_seed(seed)
    for step in range(30):
        gradient = torch.randn(7, 13, generator=generator)
        weight.grad = gradient if step % 6 != 5 else None
        optimizer.step()
        if step % 3 == 2:  # as the first step after a warm-up of two
            weight.data.add_(0.5)
    (found,) = masters(optimizer, [weight])
    optimizer.close()
    return found


@pytest.mark.parametrize("seed", range(8))
def test_what_a_script_adds_moves_masters_by_no_guess(seed: int) -> None:
    """Also of columns that have just joined the host, whose guesses the window in flight does not replace."""
    knobs: dict[str, Any] = {"topk_ratio": 0.4, "select_strategy": "step", "select_interval": 1}
    knobs["bucket_bytes"] = 80
    without, guessed = (masters_of_a_script(look_ahead, seed, **knobs) for look_ahead in ("none", "guess"))
    torch.testing.assert_close(guessed, without, atol=1e-3, rtol=0)


@pytest.mark.parametrize("seed", range(8))
def test_guesses_that_torch_does_not_see_hide_no_write(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they where nothing was ahead before the step, so that nothing of the weight was kept."""
    knobs: dict[str, Any] = {"topk_ratio": 0.0, "full_warm_up_rounds": 2}
    seen = masters_of_a_script("guess", seed, **knobs)
    monkeypatch.setattr("zenflow.runtime.kernels_for", lambda *_, **__: ByAddress())
    assert torch.equal(masters_of_a_script("guess", seed, **knobs), seen)
