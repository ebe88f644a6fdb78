"""What holds on a CUDA device beyond `device_cases`: nothing waits for it, and its own clock tells of stalls.

The cases run on a GPU in tests/system/gpu and on the simulated one in `test_simulated_cuda`.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import zenflow.device
from tests.support.oracle import ReferenceAdamW
from tests.support.tiers import combinations
from tests.support.zenflow.bucket_cases import Side, assert_alike, drawn
from tests.support.zenflow.device_cases import HYPER, KNOBS, WINDOWS, RuntimeCases, loss_of, model_on, weights_of
from tests.support.zenflow.kernel_cases import DTYPES, EAGER, Draw, KernelCases
from tests.support.zenflow.rule_cases import NAMES, random_group
from zenflow import Timeline, ZenFlowAdamW, ZenFlowConfig
from zenflow.device import HostSpan, device_for
from zenflow.kernels import Kernels
from zenflow.rules import RULES

WARM_UP = 6
REGISTERED = 1 << 22
"""Elements of fp32 that a fork leaves to the parent."""
CLOSELY_MS = 1.0
"""Within which the clocks of host and device are related, by what the training thread saw."""


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """torch raises where something waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class GpuCases(RuntimeCases):
    """A subclass has a fixture `device`."""

    @pytest.mark.parametrize("name", KNOBS)
    def test_step_does_not_synchronise_the_device(self, device: torch.device, name: str) -> None:
        model = model_on(device, torch.bfloat16)
        config = ZenFlowConfig(**{**KNOBS[name], "max_grad_norm": 0.5})
        optimizer = ZenFlowAdamW(model.parameters(), config=config, module=model, **HYPER)
        for step in range(8):
            loss_of(model, step).backward()
            if step < 2:  # allocations of the first steps
                optimizer.step()
            else:
                with no_synchronisation():
                    optimizer.step()
            optimizer.zero_grad()
        optimizer.close()

    def test_scaled_fp16_is_the_unscaled_run(self, device: torch.device) -> None:
        """torch refuses to unscale fp16 gradients in place: the optimizer takes the scale, and clips."""
        finals = []
        for scale in (1.0, 1024.0):
            model = model_on(device, torch.float16)
            config = ZenFlowConfig(**{**KNOBS["windows"], "max_grad_norm": 0.5})
            optimizer = ZenFlowAdamW(model.parameters(), config=config, module=model, **HYPER)
            scaler = torch.amp.GradScaler(device.type, init_scale=scale, growth_interval=1000)
            assert scaler.is_enabled()
            for step in range(6):
                scaler.scale(loss_of(model, step)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            optimizer.close()
            finals.append(weights_of(model))
        for ours, theirs in zip(*finals, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)

    def test_the_reference_follows_what_others_write(self, device: torch.device) -> None:
        def halve(optimizer: ZenFlowAdamW | ReferenceAdamW, step: int) -> None:
            with torch.no_grad():
                for parameter in optimizer.param_groups[0]["params"] if step in (2, 4) else ():
                    parameter.mul_(0.5)

        ours = self.trained(device, WINDOWS, torch.float32, on_step=halve)
        theirs = self.trained(device, WINDOWS, torch.float32, make=ReferenceAdamW, on_step=halve)
        for a, b in zip(ours[-1], theirs[-1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    def test_a_step_is_timed_with_its_stall(self, device: torch.device) -> None:
        model = model_on(device, torch.bfloat16)
        optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(**KNOBS["zero-offload"]), module=model)
        for step in range(5):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        last = optimizer.history(wait=True)[-1]
        optimizer.close()
        assert last.step_ms is not None
        assert last.stall_ms is not None
        assert 0 < sum(last.stall_ms.values()) < last.step_ms

    def test_the_lanes_of_one_window(self, device: torch.device) -> None:
        """Host work and copies follow each other on one axis, though the clock of the device is not the host's."""
        optimizer, timeline = recorded(device)
        last = timeline.first_step + timeline.steps
        stats = [one for one in optimizer.history(wait=True) if timeline.first_step <= one.step < last]
        assert (timeline.first_step, timeline.steps) == (WARM_UP + 1, WINDOWS["update_interval"])
        assert timeline.length_ms == pytest.approx(sum(one.step_ms or 0.0 for one in stats), rel=0.01, abs=0.1)
        assert list(timeline.lanes) == ["compute", "d2h", "h2d", "host", "stall"]
        assert all(timeline.lanes[lane] for lane in ("compute", "d2h", "h2d", "host"))
        stall_ms = sum(span.end_ms - span.begin_ms for span in timeline.lanes["stall"])
        assert stall_ms == pytest.approx(sum(sum((one.stall_ms or {}).values()) for one in stats), abs=0.05)
        # The window's first update of the host follows a gradient that came down, and precedes a weight that goes up.
        updates = [span for span in timeline.lanes["host"] if span.begin_ms > 0]
        assert updates
        assert max(span.end_ms for span in timeline.lanes["h2d"]) >= min(span.end_ms for span in updates) - CLOSELY_MS
        assert all(span.begin_ms > -CLOSELY_MS for span in updates)

    def test_a_forked_child_leaves_registered_memory_to_its_parent(self, device: torch.device) -> None:
        """What the parent writes while a child lives, the device reads; the child ends without unregistering it."""
        ended: list[int] = []
        unregister = zenflow.device._unregister

        def watched(*arguments: Any) -> None:
            ended.append(os.getpid())
            unregister(*arguments)

        with mock.patch.object(zenflow.device, "_unregister", watched):
            optimizer = ZenFlowAdamW(model_on(device, torch.bfloat16).parameters(), config=ZenFlowConfig(**WINDOWS))
            runtime = optimizer._training.runtime
            held = [runtime.memory.empty((REGISTERED,), torch.float32, "staging")]
            held[0].fill_(1)
            asked, asks = os.pipe()
            child = os.fork()
            if child == 0:
                os.read(asked, 1)
                held.clear()
                gc.collect()
                os._exit(len(ended))
            for value, tell in ((2.0, b"end"), (3.0, b"")):
                held[0].fill_(value)
                transfer, sent = runtime.device.h2d(held[0], HostSpan(), runtime.device.mark())
                runtime.device.block_on(transfer)
                runtime.device.join(transfer, sent)
                assert bool((sent == value).all())
                if tell:
                    os.write(asks, tell)
                    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            held.clear()
            assert ended == [os.getpid()]
            optimizer.close()


class GpuKernelCases(KernelCases):
    """A subclass has fixtures `kernels` and `device`."""

    large = (1531, 2063)
    """Rows and columns: many tiles, none of them full."""

    @pytest.mark.parametrize(("name", "dtype"), combinations(name=NAMES, dtype=DTYPES), ids=str)
    def test_large_updates_are_the_eager_ones(
        self, kernels: Kernels, device: torch.device, name: str, dtype: torch.dtype
    ) -> None:
        rule, draw, cpu = RULES[name], Draw(11, torch.device("cpu")), torch.device("cpu")
        weights = drawn(draw, rule, [self.large], dtype, odd=False)
        hypers = [rule.hyper(random_group(name, random.Random(seed))) for seed in (3, 4)]
        sides = Side(EAGER, rule, weights, cpu), Side(kernels, rule, weights, device)
        gradients = [draw.values(*weight.parameter.shape).to(dtype) for weight in weights]
        for side in sides:
            side.step(gradients, hypers, 0.37, None)
        assert_alike(*sides)

    def test_nothing_waits_for_the_device(self, kernels: Kernels, device: torch.device) -> None:
        draw, dtype = Draw(12, torch.device("cpu")), torch.bfloat16
        matrix, columns = draw.values(64, 96).bfloat16().to(device), draw.columns(20, 96).to(device)
        sides, given = [], [draw.values(64, 96).to(dtype), draw.values(96, 64).to(dtype), draw.values(64, 96).to(dtype)]
        for name in NAMES:
            rule = RULES[name]
            weights, send = drawn(draw, rule, [(64, 96)], dtype, odd=False), device_for(device).send
            side = Side(kernels, rule, weights, device, send=send)
            hypers = [rule.hyper(random_group(name, random.Random(4)))] * 2
            side.step(given, hypers, None, None)  # compiles
            sides.append((side, hypers))
        whole = [None, None, given[2].to(device)]
        with no_synchronisation():
            kernels.scatter(matrix, columns, kernels.pack(matrix, columns))
            kernels.energies(matrix)
            for side, hypers in sides:
                side.updates.run(side.parameters, whole, hypers)


def recorded(torch_device: torch.device) -> tuple[ZenFlowAdamW, Timeline]:
    """A training that has ended, and the timeline of one of its windows."""
    device = device_for(torch_device)
    model = model_on(torch_device, torch.bfloat16)
    optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(**WINDOWS), module=model, device=device, **HYPER)
    recorder = None
    for step in range(WARM_UP + 6):
        if step == WARM_UP - 1:
            recorder = optimizer.record_timeline()
        marks = [device.mark()]
        loss = loss_of(model, step)
        marks.append(device.mark())
        loss.backward()
        marks.append(device.mark())
        if step < WARM_UP:
            optimizer.step()
        else:
            with no_synchronisation():  # recording does not wait either
                optimizer.step()
        marks.append(device.mark())
        optimizer.zero_grad()
        if recorder is not None:
            for label, begin, end in zip(("forward", "backward", "optimizer"), marks, marks[1:], strict=False):
                recorder.compute(label, begin, end)
    timeline = optimizer.timeline()
    assert timeline is not None
    optimizer.close()
    return optimizer, timeline
