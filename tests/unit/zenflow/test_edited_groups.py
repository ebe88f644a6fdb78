"""`param_groups` as scripts edit them themselves: what is trained is what torch's AdamW would train."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.support.tiers import repeated
from zenflow import ConfigError, UnsupportedError, ZenFlowAdamW, ZenFlowConfig, ZenFlowError

SETTINGS: dict[str, dict[str, Any]] = {
    "synchronous": {"topk_ratio": 0.2, "update_interval": 1, "overlap_step": False},
    "all deferred": {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False},
    "on the device": {"offload_ratio": 0.0},
}


class Run:
    """Training of some weights, of which the optimizer has those in its groups."""

    def __init__(self, make: Callable[[list[Any]], torch.optim.Optimizer]) -> None:
        self.weights = [nn.Parameter(torch.randn(size)) for size in ((8, 12), (12, 8), (9,), (12, 12), (3, 5), (8, 8))]
        self.optimizer = make([{"params": self.weights[:2]}, {"params": self.weights[2:4], "lr": 2e-2}])
        self.held: dict[Tensor, Tensor] = {}
        """By weight, a moment that was once asked for."""

    @property
    def lists(self) -> list[list[Tensor]]:
        return [group["params"] for group in self.optimizer.param_groups]

    def extend(self, chance: random.Random) -> None:
        known = {id(one) for of_group in self.lists for one in of_group}
        self.lists[chance.randrange(len(self.lists))].extend(one for one in self.weights if id(one) not in known)

    def replace(self, chance: random.Random) -> None:
        if of_group := chance.choice(self.lists):
            place = chance.randrange(len(of_group))
            fresh = nn.Parameter(torch.cat([of_group[place].detach(), torch.ones_like(of_group[place])[:1]]))
            self.optimizer.state.pop(of_group[place], None)
            of_group[place] = fresh
            self.weights.append(fresh)

    def delete(self, chance: random.Random) -> None:
        of_group = chance.choice(self.lists)
        if len(of_group) > 1:
            self.optimizer.state.pop(of_group.pop(chance.randrange(len(of_group))), None)

    def pop(self, _: random.Random) -> None:
        if len(self.lists) > 1:
            for gone in self.optimizer.param_groups.pop(0)["params"]:
                self.optimizer.state.pop(gone, None)

    def swap(self, _: random.Random) -> None:
        self.optimizer.param_groups.reverse()

    def resize(self, chance: random.Random) -> None:
        """Gaussian splatting: moments go over to a longer or shorter Parameter by hand."""
        of_group = chance.choice(self.lists)
        if not of_group or not self.optimizer.state.get(of_group[-1]):
            return
        old, state = of_group[-1], self.optimizer.state[of_group[-1]]
        rows = torch.tensor(sorted(chance.choices(range(len(old)), k=len(old) + chance.randint(-1, 1))))
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name][rows]
        del self.optimizer.state[old]
        of_group[-1] = fresh = nn.Parameter(old.detach()[rows])
        self.optimizer.state[fresh] = state
        self.weights.append(fresh)

    def scale(self, chance: random.Random) -> None:
        """ReLoRA: moments are changed in place, whole or in part."""
        for weight in chance.choice(self.lists):
            if state := self.optimizer.state.get(weight):
                state["exp_avg"].mul_(0.25)
                state["exp_avg"][0] = 0.0
                torch._foreach_mul_([state["exp_avg_sq"].view(-1)[1:]], 1.5)
                state["exp_avg_sq"].data.clamp_(min=1e-6)
                state["step"] -= 1.0 if state["step"] > 2 else 0.0

    def hold(self, _: random.Random) -> None:
        """Moments that were asked for steps ago are those of today, as torch's are."""
        for weight in [one for of_group in self.lists for one in of_group]:
            if state := self.optimizer.state.get(weight):
                held = self.held.setdefault(weight, state["exp_avg"])
                torch.testing.assert_close(held, state["exp_avg"], atol=1e-6, rtol=1e-5)
                held.view(-1)[:5].mul_(0.5)

    def assign(self, chance: random.Random) -> None:
        for weight in chance.choice(self.lists):
            moments = {name: torch.rand_like(weight, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[weight] = {"step": torch.tensor(float(chance.randint(1, 9))), **moments}

    def forget(self, chance: random.Random) -> None:
        ways: list[Callable[[], object]] = [
            self.optimizer.state.clear,
            lambda: setattr(self.optimizer, "state", defaultdict(dict)),
            lambda: self.optimizer.state.update({weight: {} for weight in self.lists[0]}),
        ]
        chance.choice(ways)()


EDITS = [
    Run.extend,
    Run.replace,
    Run.delete,
    Run.pop,
    Run.swap,
    Run.resize,
    Run.scale,
    Run.hold,
    Run.assign,
    Run.forget,
]


Edit = Callable[[Run, random.Random], None]


def edit(run: Run, chance: random.Random, besides: Sequence[Edit]) -> None:
    chosen = chance.choice([one for one in EDITS if one not in besides])
    if chosen not in (Run.swap, Run.scale, Run.hold):
        run.held.clear()  # torch may have other tensors afterwards
    chosen(run, chance)


def trained(
    seed: int, make: Callable[[list[Any]], torch.optim.Optimizer], besides: Sequence[Edit] = ()
) -> list[Tensor]:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    run = Run(make)
    for step in range(12):
        for weight in run.weights:
            (weight * torch.randn_like(weight)).sum().backward()
        if step % 3 == 2:  # gradients have left
            edit(run, chance, besides)
        run.optimizer.step()
        for weight in run.weights:
            weight.grad = None
        if step % 4 == 1 or run.held:
            edit(run, chance, besides)
    if isinstance(run.optimizer, ZenFlowAdamW):
        assert len(run.optimizer.state_dict()["state"]) == sum(map(len, run.lists))
        run.optimizer.flush()
        run.optimizer.close()
    return [weight.detach() for weight in run.weights]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", range(repeated(24)))
def test_what_is_in_the_groups_is_trained(seed: int, setting: str) -> None:
    config = ZenFlowConfig(**SETTINGS[setting])
    ours = trained(seed, lambda groups: ZenFlowAdamW(groups, lr=1e-2, config=config))
    theirs = trained(seed, lambda groups: torch.optim.AdamW(groups, lr=1e-2))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=3e-6, rtol=0.0)


@pytest.mark.parametrize("seed", range(repeated(12)))
def test_late_updates_are_applied_before_the_groups_change(seed: int) -> None:
    """Gradients do not depend on the weights here: what is late comes to the same."""
    config = ZenFlowConfig(topk_ratio=0.2, update_interval=3)
    reading = (Run.replace, Run.resize, Run.scale, Run.hold)  # what is late is not in what they read
    ours = trained(seed, lambda groups: ZenFlowAdamW(groups, lr=1e-2, config=config), besides=reading)
    theirs = trained(seed, lambda groups: torch.optim.AdamW(groups, lr=1e-2), besides=reading)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=3e-6, rtol=0.0)


def test_state_that_ranks_share_is_set_by_assignment_alone() -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model: Any = fully_shard(nn.Linear(6, 8))
        optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(topk_ratio=0.2), module=model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(2, 6)).sum().backward()
            optimizer.step()
        moment = optimizer.state[model.weight]["exp_avg"]
        assert moment.to_local().any()
        optimizer.state[model.weight]["exp_avg"] = torch.zeros_like(moment)
        assert not optimizer.state[model.weight]["exp_avg"].to_local().any()
        del optimizer.state[model.weight]
        with pytest.raises(UnsupportedError, match=r"which ranks share: use add_param_group"):
            optimizer.step()
        optimizer.abandon()
    finally:
        torch.distributed.destroy_process_group()


def test_two_parameters_over_one_memory_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight.data = model[0].weight.data
    optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(topk_ratio=0.1), module=model)
    model(torch.randn(2, 6)).sum().backward()
    with pytest.raises(UnsupportedError, match=r"parameters 0\.weight and 1\.weight use the same memory"):
        optimizer.step()
    optimizer.close()


def test_of_two_optimizers_over_one_weight_the_first_says_why_it_has_ended() -> None:
    trunk, head = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    first = ZenFlowAdamW([trunk])
    with pytest.warns(UserWarning, match="trained some of these parameters"):
        second = ZenFlowAdamW([trunk, head])
    with pytest.raises(ZenFlowError, match="another optimizer had taken over some of its parameters"):
        first.step()
    second.close()


def test_optimizers_that_share_a_trunk_are_refused_by_its_name() -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("trunk", "actor", "critic")})
    first: Any = ZenFlowAdamW([*model["trunk"].parameters(), *model["actor"].parameters()], module=model)
    with pytest.raises(UnsupportedError, match=r"and others: trunk\.bias, trunk\.weight\. Make one optimizer"):
        ZenFlowAdamW([*model["trunk"].parameters(), *model["critic"].parameters()], module=model)
    model["trunk"](torch.randn(2, 4)).sum().backward()
    first.step()  # it goes on
    first.first = first  # a cycle, as a scheduler and its optimizer are
    del first
    ZenFlowAdamW([*model["trunk"].parameters(), *model["critic"].parameters()], module=model).close()


@pytest.mark.parametrize("knobs", [*SETTINGS.values(), {"topk_ratio": 0.3, "update_interval": 3}])
def test_a_moment_that_was_written_in_place_is_read_again(knobs: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.randn(6, 8))
    optimizer = ZenFlowAdamW([weight], config=ZenFlowConfig(**knobs))
    for _ in range(5):
        weight.grad = torch.randn(6, 8)
        optimizer.step()
    moment = optimizer.state[weight]["exp_avg"]
    copied = copy.deepcopy(moment)
    moment[:, 2:5].zero_()
    assert torch.equal(optimizer.state[weight]["exp_avg"], moment)
    assert not moment[:, 2:5].any()
    copied.zero_()
    assert torch.equal(optimizer.state[weight]["exp_avg"], moment)
    file = io.BytesIO()
    torch.save(moment, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)) is torch.Tensor
    before, part = moment.clone(), moment[1:3]
    for _ in range(4):
        weight.grad = torch.randn(6, 8)
        optimizer.step()
    assert torch.equal(moment, optimizer.state[weight]["exp_avg"])
    assert torch.equal(part, moment[1:3])
    assert not torch.equal(moment, before)
    optimizer.close()
    moment.zero_()  # which nothing follows any more


def test_a_moment_that_is_in_no_state_any_more_is_a_tensor_like_others() -> None:
    weight = nn.Parameter(torch.randn(6, 8))
    optimizer = ZenFlowAdamW([weight], config=ZenFlowConfig(**SETTINGS["synchronous"]))

    def step() -> None:
        optimizer.zero_grad()
        optimizer.param_groups[0]["params"][0].square().sum().backward()
        optimizer.step()

    step()
    held = optimizer.state[weight]["exp_avg"]
    step()
    assert torch.equal(copy.deepcopy(held), optimizer.state[weight]["exp_avg"])
    assert torch.equal(pickle.loads(pickle.dumps(held)), optimizer.state[weight]["exp_avg"])
    state = optimizer.state.pop(weight)
    optimizer.param_groups[0]["params"][0] = fresh = nn.Parameter(torch.randn(6, 8))
    optimizer.state[fresh] = state
    state["exp_avg"].zero_()  # by its new name, before a step
    gradient = 2 * fresh.detach()
    step()
    moment = optimizer.state[fresh]["exp_avg"]
    torch.testing.assert_close(moment, 0.1 * gradient)  # zeros, and one update
    before = held.clone()
    held.add_(1.0)
    assert torch.equal(held, before + 1.0)
    assert torch.equal(optimizer.state[fresh]["exp_avg"], moment)
    optimizer.close()


def test_a_moment_of_another_size_is_refused_where_its_parameter_stays() -> None:
    weight = nn.Parameter(torch.randn(4, 6))
    optimizer = ZenFlowAdamW([weight], config=ZenFlowConfig(topk_ratio=0.5))
    weight.grad = torch.randn(4, 6)
    optimizer.step()
    optimizer.state[weight]["exp_avg"] = torch.zeros(5, 6)
    with pytest.raises(ConfigError, match="exp_avg has 30 elements; it must have 24"):
        optimizer.step()
    optimizer.state[weight]["exp_avg"] = torch.zeros(4, 6)
    optimizer.step()
    optimizer.state[weight] = {"exp_avg": torch.zeros(4, 6)}
    with pytest.raises(ConfigError, match="has no exp_avg_sq, step; it must have"):
        optimizer.step()
    optimizer.abandon()


def test_a_loop_over_the_state_sets_what_it_has_read() -> None:
    weight = nn.Parameter(torch.randn(4, 6))
    optimizer = ZenFlowAdamW([weight], config=ZenFlowConfig(topk_ratio=0.5))
    weight.grad = torch.randn(4, 6)
    optimizer.step()
    before = optimizer.state_dict()["state"]
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.to("cpu")
    torch.testing.assert_close(optimizer.state_dict()["state"], before, rtol=0.0, atol=0.0)
    optimizer.close()
