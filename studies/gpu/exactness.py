"""Bitwise at size: threads, a reference on the CPU, the ends of a run; and what changing knobs takes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from gpu.bench import SIZES, Bench, Decoder, Size, clones, differing
from gpu.parts import KNOBS
from gpu.record import Record, UnavailableError
from gpu.training import Loop, Ours, timed
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from zenflow import ZenFlowAdamW, ZenFlowConfig

_HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
_RTOL, _ATOL = 1e-5, 1e-6
_CHANGES: tuple[dict[str, Any], ...] = ({"update_interval": 8}, {"update_interval": 4}, {"offload_ratio": 0.5})


def exactness(record: Record, bench: Bench, size: Size) -> None:
    """What has to be the same, and what changes at runtime take."""
    with _repeatable():
        record.measure("threads", lambda: _threads(record, bench, size), needs_s=10)
        record.measure("ends", lambda: _ends(record, bench, size), needs_s=8)
    reference = size if bench.simulated else SIZES["50M"]
    record.measure("reference", lambda: _reference(record, bench, reference), needs_s=8)
    record.measure("changes", lambda: _changes(record, bench, size), needs_s=8)


@contextmanager
def _repeatable() -> Iterator[None]:
    """Forward and backward whose gradients are the same each time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with sdpa_kernel(SDPBackend.MATH):
        yield


def _trained(
    bench: Bench,
    size: Size,
    steps: int,
    end: Callable[[ZenFlowAdamW], object] = ZenFlowAdamW.close,
    **knobs: Any,
) -> list[Tensor]:
    """The weights, on the CPU, after some steps and an end."""
    model = bench.model(size)
    config = ZenFlowConfig(**KNOBS["zenflow"], **knobs)
    optimizer = ZenFlowAdamW(model.parameters(), config=config, module=model, device=bench.device(), **_HYPER)
    for step in range(steps):
        model(bench.tokens(size, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    end(optimizer)
    del optimizer
    gc.collect()
    return clones(model.parameters())


def _threads(record: Record, bench: Bench, size: Size) -> dict[str, Any]:
    """Bitwise the same on any number of the host's threads."""
    threads = max(2, min(16, (os.cpu_count() or 2) // 2))
    one, many = (_trained(bench, size, size.run, host_threads=count) for count in (1, threads))
    different = differing(one, many)
    if different and differing(one, _trained(bench, size, size.run, host_threads=1)):
        raise UnavailableError("gradients of this model do not repeat on this GPU, so that its weights cannot")
    record.hold(f"1 and {threads} host threads give the same weights", different == 0, f"{different} elements differ")
    return {"threads": [1, threads], "steps": size.run, "differing": different}


def _ends(record: Record, bench: Bench, size: Size) -> dict[str, int]:
    """Whoever closes (or only drops) an optimizer within a window and saves, saves what a flush would have made."""
    steps = size.run - 1  # a window is open then
    flushed = _trained(bench, size, steps, ZenFlowAdamW.flush)
    found: dict[str, int] = {}
    for name, end in (("close", ZenFlowAdamW.close), ("del", lambda _optimizer: None)):
        different = differing(flushed, _trained(bench, size, steps, end))
        record.hold(f"{name} and save is flush and save", different == 0, f"{different} elements differ")
        found[name] = different
    return found


def _reference(record: Record, bench: Bench, size: Size) -> dict[str, Any]:
    """With gradients that do not depend on weights, deferred updates are torch's AdamW on the CPU (I2b)."""
    torch.manual_seed(0)
    theirs = Decoder(size)
    ours = bench.model(size, torch.float32)
    ours.load_state_dict(theirs.state_dict())
    config = ZenFlowConfig(**KNOBS["zenflow"])
    optimizer = ZenFlowAdamW(ours.parameters(), config=config, module=ours, device=bench.device(), **_HYPER)
    plain = torch.optim.AdamW(theirs.parameters(), **_HYPER)
    for step in range(size.run):
        gradients = _gradients(theirs, step)
        terms = [(p * bench.put(g)).sum() for p, g in zip(ours.parameters(), gradients, strict=True)]
        torch.stack(terms).sum().backward()
        for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
    optimizer.close()
    pairs = list(zip(clones(ours.parameters()), clones(theirs.parameters()), strict=True))
    beyond = sum(int((~torch.isclose(a, b, rtol=_RTOL, atol=_ATOL)).sum()) for a, b in pairs)
    record.hold(
        "weights are those of AdamW on the CPU", beyond == 0, f"{beyond} elements beyond {_RTOL:g} and {_ATOL:g}"
    )
    return {
        "parameters": sum(a.numel() for a, _ in pairs),
        "largest_difference": max(float((a - b).abs().max()) for a, b in pairs),
        "bitwise_different": differing(*zip(*pairs, strict=True)),
    }


def _gradients(model: nn.Module, step: int) -> Sequence[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in model.parameters()]


def _changes(record: Record, bench: Bench, size: Size) -> None:
    """Seconds of each call, and of the steps behind it, with what they registered; on disk one by one."""
    trainee = Ours(bench, size, KNOBS["zenflow"])
    try:
        loop = Loop(trainee)
        loop.steps(size.warm)
        for knobs in _CHANGES:
            pinned = trainee.pins.nbytes, trainee.pins.seconds
            call_s = timed(lambda knobs=knobs: trainee.optimizer.set_knobs(**knobs))
            times = loop.figures(loop.steps(size.run))
            (name, value), *_ = knobs.items()
            record.note(
                f"to {name} {value}",
                {
                    "call_s": call_s,
                    "pinned_bytes": trainee.pins.nbytes - pinned[0],
                    "pinning_s": trainee.pins.seconds - pinned[1],
                    "step_ms": {"p50": times["p50"], "p95": times["p95"]},
                },
            )
    finally:
        trainee.close()
