"""Hooks that an integration puts on a model are in no copy or pickle of it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from zftune.integrations.deepspeed.precision import cast_inputs
from zftune.integrations.huggingface import _Losses


def double(_: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (2 * args[0],)


@pytest.mark.parametrize("hook", [lambda model: cast_inputs(model, torch.float32), _Losses])
def test_a_copy_has_the_hooks_of_others_alone(hook: Callable[[nn.Module], object]) -> None:
    model = nn.Linear(3, 2)
    model.register_forward_pre_hook(double)
    hook(model)
    inputs = torch.randn(4, 3)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [*other._forward_pre_hooks.values()] == [double]
        assert not other._forward_hooks
        assert torch.equal(other(inputs), model(inputs))
