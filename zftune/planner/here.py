"""This machine's figures, measured: host memory, link, device memory, and what its matrix products reach."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from zftune.errors import BadInputError, ZftuneError
from zftune.planner.facts import Machine

_LINK_BYTES = 1 << 28
_MATRIX = 8192
_REPEATS = 5
_TRAINING_SHARE = 0.6
"""Of what a large product reaches: a step also has attention, norms and gaps between kernels."""
_UPDATES_A_CORE = 1.2
"""10^9 a second: what half an AVX-512 core does (study 001), so that no machine is thought too fast."""
_COMM_SHARE = 0.7


def machine_here() -> Machine:
    """Measure this machine; takes seconds.

    Raises:
        BadInputError: there is no GPU.
        ZftuneError: a measurement failed.
    """
    import torch

    from zftune.telemetry import hardware

    if not torch.cuda.is_available():
        raise BadInputError("--hardware 'here': this machine has no GPU, allowed is a machine's name or a TOML file")
    found = hardware()
    down, up = _link_gbps()
    cores = int(found["usable_cores"] or found["logical_cores"] or 1)
    host, threads = _host_gbps()
    free, total = torch.cuda.mem_get_info()
    used = total - free
    figures: dict[str, tuple[Any, str]] = {
        "gpus": (torch.cuda.device_count(), "the GPUs that CUDA sees"),
        "device_memory_bytes": (total, f"the driver; {used} bytes of it are in use now"),
        "device_gbps": (device_gbps(), "measured: copies within device memory"),
        "compute_tflops": (_product_tflops(), f"measured: a bf16 product of {_MATRIX} x {_MATRIX} matrices"),
        "compute_share": (_TRAINING_SHARE, "estimate: of a large product's rate; give --compute-ms to replace it"),
        "link_d2h_gbps": (down, "measured: copies to pinned memory"),
        "link_h2d_gbps": (up, "measured: copies from pinned memory"),
        "host_gbps": (host, f"measured: zenflow.host_bandwidth() on {threads} threads"),
        "host_update_gelements_s": (
            _UPDATES_A_CORE * max(1, cores // 2),
            f"estimate: half of the cores with {_UPDATES_A_CORE}e9 element updates a second each (study 001)",
        ),
        "cores": (cores, "affinity and control group"),
        "host_memory_bytes": (_host_memory(found), "what this process may still allocate"),
        "comm_gbps": (_COMM_SHARE * min(down, up), "estimate: 70% of the measured link; NVLink is not measured"),
    }
    return Machine(
        name="here",
        gpu=torch.cuda.get_device_name(),
        source={name: source for name, (_, source) in figures.items()},
        **{name: value for name, (value, _) in figures.items()},
    )


def _host_memory(found: Any) -> int:
    from zenflow.host.limits import available_host_bytes

    return available_host_bytes() or int(found["ram_bytes"])


def _host_gbps() -> tuple[float, int]:
    from zenflow import HostEngineError, host_bandwidth

    try:
        measured = host_bandwidth(repeats=_REPEATS)
    except (HostEngineError, MemoryError) as error:
        raise ZftuneError(f"--hardware 'here': the host's memory could not be measured: {error}") from error
    return measured.gbps, measured.threads


def _link_gbps() -> tuple[float, float]:
    """Down and up."""
    import torch

    near = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    far = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=torch.device(torch.cuda.current_device()))
    down = _LINK_BYTES / _median_ms(lambda: near.copy_(far, non_blocking=True)) / 1e6
    return down, _LINK_BYTES / _median_ms(lambda: far.copy_(near, non_blocking=True)) / 1e6


def device_gbps(nbytes: int = _LINK_BYTES) -> float:
    """Of the current GPU's memory, by copies within it.

    Args:
        nbytes: of each; twice as much is taken.
    """
    import torch

    source = torch.empty(nbytes, dtype=torch.uint8, device=torch.device(torch.cuda.current_device()))
    target = torch.empty_like(source)
    return 2 * nbytes / _median_ms(lambda: target.copy_(source)) / 1e6


def _product_tflops() -> float:
    import torch

    device = torch.device(torch.cuda.current_device())
    matrix = torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device=device)
    return 2 * _MATRIX**3 / _median_ms(lambda: matrix @ matrix) / 1e9


def _median_ms(work: Callable[[], Any]) -> float:
    import torch

    times: list[float] = []
    for _ in range(_REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:])  # the first one wakes the device up
