"""torch.compile of blocks and of the whole model, whose gradients leave during backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from tests.support.tiers import fast
from tests.support.zenflow.small import Block, tokens_of
from tests.support.zenflow.stream_cases import Pair
from zenflow import ZenFlowAdamW, ZenFlowConfig


# torch looks at .grad of a compiled block's input, which is no leaf.
@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("model", "compiled"),
    fast(
        [("stack", "blocks")],
        all_of=list(product(("stack", "stack, non-reentrant", "shared"), ("blocks", "whole"))),
    ),
)
def test_torch_compile(pair: Callable[..., Pair], model: str, compiled: str) -> None:
    torch._dynamo.reset()
    both = pair(model)

    def compile_it(model: Any) -> None:
        for block in [part for part in model.modules() if isinstance(part, Block)] if compiled == "blocks" else [model]:
            block.compile(backend="aot_eager")

    both.each(compile_it)
    for passes in (1, 1, 2, 2):
        for micro in range(passes):
            both.backward(micro)
        both.step()
    torch._dynamo.reset()
    staged, restored = both.streams.counts
    assert staged == 4 * both.streams.deferring
    assert restored == both.streams.deferring


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("compiled", "trains"),
    list(product(("blocks", "whole"), (False, True))),
)
def test_torch_compile_meets_a_gradient_that_has_left(pair: Callable[..., Pair], compiled: str, trains: bool) -> None:
    torch._dynamo.reset()
    both = pair()
    both.backward(1)
    for block in both.ours.layers if compiled == "blocks" else [both.ours]:
        block.compile(backend="aot_eager")
    if trains:
        both.backward(2)
    else:
        with torch.no_grad():
            assert torch.equal(both.ours(tokens_of(2)), both.plain(tokens_of(2)))
    both.step()
    torch._dynamo.reset()


@pytest.mark.smoke
@pytest.mark.parametrize("compiled", fast(["train step"], all_of=["train step", "step()"]))
@pytest.mark.parametrize(
    "knobs", [{"pipeline": "bucket", "topk_ratio": 0.0}, {"topk_ratio": 0.2}, {"offload_ratio": 0.0}]
)
def test_the_runtime_is_not_traced(knobs: dict[str, Any], compiled: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    ended = []
    for ours in (True, False):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        config = ZenFlowConfig(**knobs, update_interval=1, overlap_step=False)
        optimizer: Any = (
            ZenFlowAdamW(model.parameters(), lr=1e-2, module=model, config=config)
            if ours
            else torch.optim.AdamW(model.parameters(), lr=1e-2)
        )
        inputs = torch.randn(4, 16)
        step = torch.compile(optimizer.step, backend="eager") if compiled == "step()" and ours else optimizer.step

        def train() -> None:
            optimizer.zero_grad()  # noqa: B023 - called in this round
            model(inputs).square().mean().backward()  # noqa: B023
            step()  # noqa: B023

        train_step = torch.compile(train, backend="eager") if compiled == "train step" and ours else train
        for _ in range(4):
            train_step()
        ended.append([parameter.detach() for parameter in model.parameters()])
    traced = {metrics.co_filename for metrics in torch._dynamo.utils.get_compilation_metrics()}
    torch._dynamo.reset()
    assert traced <= {__file__, inspect.getsourcefile(torch.optim.Optimizer)}
    for one, other in zip(*ended, strict=True):
        torch.testing.assert_close(one, other, atol=3e-6, rtol=0.0)
