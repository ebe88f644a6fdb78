"""DeepSpeed's own ZeRO-Offload and ZenFlow: bytes on the link, counted while its code runs, and its steps from them.

DeepSpeed trains on its CPU accelerator, where host and device are the same memory. So every copy between tensors is
looked at, and counts where one side lies in what its optimizer keeps on the host and the other does not. A copy that
changes the dtype moves the device's: on the way up torch converts on the host, on the way down it copies first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, cast

import torch
from studykit import Job, code_digest, of_study
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zftune.planner.rates import Rates

WINDOW: Final = 4
_KNOBS = {
    "topk_ratio": 0.1,
    "update_interval": WINDOW,
    "select_strategy": "step",
    "select_interval": 64 * WINDOW,
    "full_warm_up_rounds": WINDOW,
    "pt_reserved_cores_perc": 0.5,
}
SYSTEMS: Mapping[str, dict[str, Any] | None] = {
    "ZeRO-Offload": None,
    "ZenFlow, sequential": {**_KNOBS, "overlap_step": False},
    "ZenFlow, overlapped": {**_KNOBS, "overlap_step": True},
}
ZERO_DOWN, ZERO_UP = 4.0, 2.0
ZEN_DOWN, ZEN_UP = 3.0, 2.0
"""Bytes an element and step, as counted (a test compares them with the record)."""
_UPDATE, _ZEN_UPDATE, _CAST = 28.0, 36.0, 6.0
"""Bytes of host memory an element: an update, ZenFlow's, and casting its result to bf16 (study 012, part 2)."""
_ROWS, _COLUMNS, _WEIGHTS, _WINDOWS = 96, 160, 4, 3
CODE = ("studies/024-claims/claims/upstream.py", "studies/002-upstream-defects/defects/upstream.py")


def job() -> Job:
    """Count all three."""
    inputs = {"systems": dict(SYSTEMS), "weights": [_WEIGHTS, _ROWS, _COLUMNS], "code": code_digest(*CODE)}
    return Job("upstream", inputs, figures, ())


class LinkBytes(TorchDispatchMode):
    """Counts copies between host and device, where both are the same memory.

    Args:
        on_host: everything that lies on the host, now.
    """

    def __init__(self, on_host: Callable[[], Iterable[Tensor]]) -> None:
        cast("Any", super()).__init__()  # torch's is not typed
        self._on_host = on_host
        self.down_bytes = 0
        self.up_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._count(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _count(self, target: Tensor, source: Tensor) -> None:
        host = {one.untyped_storage().data_ptr() for one in self._on_host()}
        to_host, from_host = (one.untyped_storage().data_ptr() in host for one in (target, source))
        if to_host and not from_host:
            self.down_bytes += source.numel() * source.element_size()
        elif from_host and not to_host:
            self.up_bytes += target.numel() * target.element_size()


def host_tensors(optimizer: Any) -> Iterator[Tensor]:
    """What DeepSpeed's optimizer of stages 1 and 2 keeps on the host."""
    yield from getattr(optimizer, "accumulated_grads_in_cpu", {}).values()
    yield from optimizer.param_buffer_of_bit16_for_cpu_offload_groups
    yield optimizer.temp_grad_buffer_for_cpu_offload
    for part in optimizer.single_partition_of_fp32_groups:
        yield part
        if part.grad is not None:
            yield part.grad
        yield from getattr(part, "overlap_grad", ())
        if hasattr(part, "stale_param"):
            yield part.stale_param


def figures() -> dict[str, Any]:
    """Of each system: bytes an element and step, down and up, and over the model's size."""
    theirs = of_study("002-upstream-defects", "defects.upstream")
    weights = [torch.randn(_ROWS, _COLUMNS).bfloat16() for _ in range(_WEIGHTS)]
    elements = _WEIGHTS * _ROWS * _COLUMNS
    found = {}
    with theirs.prepared():
        for name, knobs in SYSTEMS.items():
            with ExitStack() as stack:
                run = theirs.Upstream(weights, theirs.settings(knobs, lr=1e-3, dtype="bf16"))
                stack.callback(run.end)
                gradients = [torch.ones(_ROWS, _COLUMNS, dtype=torch.bfloat16) for _ in weights]
                for _ in range(2 * WINDOW):  # the warm-up, and a window in which buffers are made
                    run.step(gradients)
                link = stack.enter_context(LinkBytes(partial(host_tensors, run.optimizer)))
                for _ in range(_WINDOWS * WINDOW):
                    run.step(gradients)
            each = elements * _WINDOWS * WINDOW
            down, up = link.down_bytes / each, link.up_bytes / each
            found[name] = {"down": down, "up": up, "over_model_bytes": (down + up) / 2}
    return found


def steps_ms(rates: Rates, elements: float, waiting_ms: float = 0.0) -> dict[str, float]:
    """Of upstream's systems at a rank's rates: nothing overlaps but ZenFlow's update, if its window is long enough.

    Args:
        rates: of one rank.
        elements: of the model that are the rank's own.
        waiting_ms: what the rank waits for others, whatever is offloaded.
    """
    compute = rates.compute_ms + waiting_ms
    host = elements / rates.host_gbps / 1e6
    zero = compute + _link_ms(rates, elements, ZERO_DOWN, ZERO_UP) + _UPDATE * host
    shown = compute + _link_ms(rates, elements, ZEN_DOWN, ZEN_UP) + _CAST * host / WINDOW
    return {"ZeRO-Offload": zero, "ZenFlow": max(shown, _ZEN_UPDATE * host / WINDOW)}


def _link_ms(rates: Rates, elements: float, down: float, up: float) -> float:
    return (down / rates.d2h_gbps + up / rates.h2d_gbps) * elements / 1e6
