"""Parameters that are frozen at first: of any kind, ignored until they are thawed, and then trained as by torch."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.zenflow.cases import same_bits
from zenflow import ConfigError, UnsupportedError, ZenFlowAdamW, ZenFlowConfig

HYPER: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
CONFIGS: dict[str, ZenFlowConfig] = {
    "sync": ZenFlowConfig(topk_ratio=0.2, update_interval=1, select_interval=2, overlap_step=False),
    "windows": ZenFlowConfig(topk_ratio=0.2, update_interval=3, select_interval=2, bucket_bytes=100),
    "part": ZenFlowConfig(topk_ratio=0.2, update_interval=2, offload_ratio=0.5, max_grad_norm=1e9),
}


class Wrapper(Tensor):
    """A tensor without memory of its own, as some quantized weights are."""

    @staticmethod
    def __new__(cls) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, (6, 4), dtype=torch.bfloat16, requires_grad=False)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func.overloadpacket.__name__ == "detach":
            return args[0]
        raise NotImplementedError(str(func))


FROZEN: dict[str, Callable[[], Tensor]] = {
    "uint8": lambda: torch.arange(24, dtype=torch.uint8).view(12, 2),
    "float64": lambda: torch.ones(5, 3, dtype=torch.float64),
    "bool": lambda: torch.ones(4, dtype=torch.bool),
    "complex": lambda: torch.ones(4, 3, dtype=torch.complex64),
    "float8": lambda: torch.ones(4, 6).to(torch.float8_e4m3fn),
    "elsewhere": lambda: torch.empty(8, 9, dtype=torch.bfloat16, device="meta"),
    "wrapper": Wrapper,
    "empty": lambda: torch.empty(0, 7),
}


def frozen(kind: str) -> nn.Parameter:
    return nn.Parameter(FROZEN[kind](), requires_grad=False)


class Twins:
    """Parameters, and the same for an oracle; gradients do not depend on the weights."""

    def __init__(self, seed: int = 0, kinds: Sequence[str] = tuple(FROZEN)) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self.shapes = [(9, 13), (7, 11), (5,)]
        starts = [torch.randn(shape, generator=self._random) for shape in self.shapes]
        self.ours, self.theirs = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
        self.freeze(True)
        self.kept = [frozen(kind) for kind in kinds]
        # The first is elsewhere, and others lie between those that are trained.
        self.groups = [{"params": [*self.kept[::2], *self.ours[:2]]}, {"params": [*self.kept[1::2], self.ours[2]]}]

    def freeze(self, frozen: bool) -> None:
        for parameters in (self.ours, self.theirs):
            for parameter in parameters[1:]:
                parameter.requires_grad_(not frozen)

    def gradients(self) -> None:
        for one, other in zip(self.ours, self.theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=self._random) if one.requires_grad else None
            other.grad = None if one.grad is None else one.grad.clone()

    def assert_equal(self) -> None:
        for one, other in zip(self.ours, self.theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_they_are_ignored_until_they_are_thawed(name: str) -> None:
    twins = Twins()
    optimizer = ZenFlowAdamW(twins.groups, config=CONFIGS[name], **HYPER)
    oracle = torch.optim.AdamW([*twins.theirs, *(frozen(kind) for kind in FROZEN)], **HYPER)
    for step in range(1, 16):
        twins.freeze(step < 5 or 10 < step < 13)
        twins.gradients()
        optimizer.step()
        oracle.step()
        if step == 7:
            optimizer.set_knobs(topk_ratio=0.4, offload_ratio=0.8)
        if step == 9:
            optimizer.add_param_group({"params": [frozen("uint8"), frozen("elsewhere")]})
        if step in (4, 9, 12):
            optimizer.flush()
            twins.assert_equal()
    optimizer.close()
    twins.assert_equal()


@pytest.mark.parametrize("kind", ["float64", "elsewhere", "float8"])
def test_one_that_cannot_be_trained_is_refused_with_its_gradient(kind: str) -> None:
    twins = Twins(kinds=["uint8", kind])
    optimizer = ZenFlowAdamW(twins.groups, config=CONFIGS["windows"], **HYPER)
    oracle = torch.optim.AdamW(twins.theirs, **HYPER)
    thawed = twins.kept[1]
    for step in range(6):
        twins.gradients()
        if step == 3:
            thawed.requires_grad_(True)
            optimizer.step()  # without a gradient nobody asks for it
            oracle.step()
            twins.gradients()
            thawed.grad = torch.zeros_like(thawed)
            before = [one.detach().clone() for one in twins.ours]
            text = rf"parameter \d has a gradient and is {thawed.dtype} on {thawed.device}; it must be float32, "
            with pytest.raises(UnsupportedError, match=text):
                optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(before, twins.ours, strict=True))
            thawed.grad = None
            thawed.requires_grad_(False)
        optimizer.step()
        oracle.step()
    optimizer.close()
    twins.assert_equal()


@pytest.mark.parametrize("saved_after", [0, 2, 7])
def test_they_are_saved_as_a_shape_and_loaded(saved_after: int) -> None:
    config = CONFIGS["windows"]

    def run(until: int, twins: Twins, optimizer: ZenFlowAdamW, start: int = 0) -> None:
        for step in range(start, until):
            twins.freeze(step < 5)
            for number, one in enumerate(twins.ours):
                random = torch.Generator().manual_seed(100 * step + number)
                one.grad = torch.randn(one.shape, generator=random) if one.requires_grad else None
            optimizer.step()

    through, saved, loaded = Twins(), Twins(), Twins()
    first = ZenFlowAdamW(through.groups, config=config, **HYPER)
    run(12, through, first)
    second = ZenFlowAdamW(saved.groups, config=config, **HYPER)
    run(saved_after, saved, second)
    file = io.BytesIO()
    torch.save({"weights": saved.ours, "optimizer": second.state_dict()}, file)
    second.abandon()
    file.seek(0)
    document = torch.load(file, weights_only=True)
    state, kept = document["optimizer"]["state"], {id(one) for one in saved.kept}
    parameters = [one for group in saved.groups for one in group["params"]]
    assert len(state) == len(parameters)
    for number, parameter in enumerate(parameters):
        if id(parameter) in kept:
            assert state[number].keys() == {"shape"}
            assert state[number]["shape"].tolist() == list(parameter.shape)
    third = ZenFlowAdamW(loaded.groups, config=config, **HYPER)
    third.load_state_dict(document["optimizer"])
    with torch.no_grad():
        for mine, theirs in zip(loaded.ours, document["weights"], strict=True):
            mine.copy_(theirs)
    run(12, loaded, third, saved_after)
    first.close()
    third.close()
    assert all(bool(same_bits(a, b).all()) for a, b in zip(through.ours, loaded.ours, strict=True))


def test_what_is_trained_is_still_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"a parameter is torch\.float64; it must be float32, bfloat16 and float16"
    ):
        ZenFlowAdamW([frozen("uint8"), nn.Parameter(torch.ones(3, 3, dtype=torch.float64))])
    with pytest.raises(UnsupportedError, match="parameters are on meta"):
        ZenFlowAdamW([frozen("uint8"), nn.Parameter(torch.ones(3, 3, device="meta"))])
    with pytest.raises(ConfigError, match="params holds no parameter"):
        ZenFlowAdamW([{"params": []}])
    optimizer = ZenFlowAdamW([frozen("uint8"), frozen("float64")])  # one that has nothing to train yet
    optimizer.step()
    optimizer.abandon()
