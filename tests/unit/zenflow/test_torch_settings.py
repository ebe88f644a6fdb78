"""What a user sets for all of torch is for the user's tensors: an optimizer works under it, to the same bits."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.tiers import fast
from tests.support.zenflow.cases import same_bits
from tests.support.zenflow.small import Stack, seeded, tokens_of
from zenflow import ZenFlowAdamW, ZenFlowConfig

WINDOWS: dict[str, Any] = {"topk_ratio": 0.3, "update_interval": 3, "select_interval": 2, "bucket_bytes": 300}
AUTO: dict[str, Any] = {**WINDOWS, "update_interval": "auto", "select_interval": "auto", "max_update_interval": 5}
KNOBS: dict[str, dict[str, Any]] = {
    "windows": {**WINDOWS, "max_grad_norm": 0.5, "ledger": True},
    "auto": AUTO,
    "part": {**AUTO, "offload_ratio": 0.6, "deferred_update": "mean", "skip_nonfinite": True, "stream": False},
    "zero-offload": {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False, "pipeline": "none"},
}


@contextmanager
def default_device(name: str | None) -> Iterator[None]:
    if name is None:
        yield
        return
    before_dtype = torch.get_default_dtype()
    torch.set_default_device(name)
    torch.set_default_dtype(torch.float64)  # likewise for the user's alone
    try:
        yield
    finally:
        torch.set_default_device(None)  # torch's own, which asks no function: one that is set is asked in each call
        torch.set_default_dtype(before_dtype)


def trained(default: str | None, knobs: dict[str, Any]) -> list[Tensor]:
    """The weights after each step: saved, loaded, knobs changed, a group added, all under a default device."""
    config = ZenFlowConfig(**knobs)
    model, other = (seeded(Stack, torch.bfloat16, width=9) for _ in range(2))
    late = torch.nn.Parameter(torch.ones(5, 7))
    arguments: dict[str, Any] = {"lr": 0.02, "config": config}
    with default_device(default):
        optimizer = ZenFlowAdamW(model.parameters(), module=model, **arguments)
    seen = []
    for step in range(1, 15):
        loss = model(tokens_of(step))
        late.grad = torch.full_like(late, float(step))
        with default_device(default):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 4:
                optimizer.set_knobs(topk_ratio=0.5, offload_ratio=0.9)
            if step == 6:
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                optimizer.abandon()
        if step == 6:
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=True)
            model = other
            with default_device(default):
                optimizer = ZenFlowAdamW(model.parameters(), module=model, **arguments)
                optimizer.load_state_dict(loaded["optimizer"])
                model.load_state_dict(loaded["model"])
        with default_device(default):
            if step == 9:
                optimizer.add_param_group({"params": [late]})
            if step == 11:
                optimizer.flush()
            optimizer.history(wait=True)
            if knobs.get("ledger"):
                assert all(balance.balanced for balance in optimizer.ledger().values())
        seen += [parameter.detach().clone() for parameter in (*model.parameters(), late)]
    with default_device(default):
        optimizer.close()
    return [*seen, *(parameter.detach().clone() for parameter in (*model.parameters(), late))]


@pytest.mark.parametrize("name", fast(["part"], all_of=list(KNOBS)))
def test_it_is_for_the_users_tensors(name: str) -> None:
    plain, under = (trained(default, KNOBS[name]) for default in (None, "meta"))
    assert all(bool(same_bits(a, b).all()) for a, b in zip(plain, under, strict=True))


class Deterministic(TorchDispatchMode):
    """Refuses on the CPU what `torch.use_deterministic_algorithms(True)` refuses on a GPU, by what torch says of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        _, _, refused = str(torch.use_deterministic_algorithms.__doc__).partition("operations will throw")
        self._refused = set(re.findall(r":func:`torch\.(?:Tensor\.)?(\w+)`", refused))
        assert {"cumsum", "put_", "histc", "bincount", "median"} <= self._refused

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in self._refused and (name != "cumsum" or args[0].is_floating_point()):
            raise RuntimeError(f"{name} has no deterministic implementation")
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", fast(["part"], all_of=["windows", "auto", "part"]))
def test_there_are_deterministic_algorithms_for_all_that_it_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trained(None, KNOBS[name])
    monkeypatch.setenv("ZENFLOW_KERNELS", "eager")  # whose operations are torch's
    with Deterministic():
        under = trained(None, KNOBS[name])
    assert all(bool(same_bits(a, b).all()) for a, b in zip(plain, under, strict=True))
