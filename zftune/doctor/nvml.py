"""NVML and GPM: what the profiler will be able to say about the GPUs, tried for half a second."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zftune.doctor.check import Check
from zftune.doctor.versions import installed

_PROBE_S = 0.6  # GPM wants two samples more than 100 ms apart
_GPM = ("sm_utilisation_percent", "sm_occupancy_percent", "dram_percent")
_PERMISSION = "Insufficient Permissions"


def checks(devices: Sequence[Mapping[str, Any]] | None, reason: str) -> Iterator[Check]:
    """NVML, the figures that it does not give, GPM.

    Args:
        devices: the GPUs that NVML lists; None where it lists none.
        reason: why it does not.
    """
    yield from _binding()
    if devices is None:
        yield _no_driver(reason)
        return
    from zftune.telemetry import NvmlSampler

    sampler = NvmlSampler()
    begin_ns = time.monotonic_ns()
    sampler.start()
    time.sleep(_PROBE_S)
    end_ns = time.monotonic_ns()
    sampler.stop()
    figures, missing = sampler.summary(begin_ns, end_ns)
    yield from findings(devices, figures, missing)


def _binding() -> Iterator[Check]:
    version = installed("pynvml")
    if version is not None:
        yield Check(
            name="pynvml",
            status="note",
            finding=f"The deprecated distribution pynvml {version} is installed; every import of NVML warns of it.",
            fix="pip uninstall pynvml && pip install --force-reinstall nvidia-ml-py",
        )


def _no_driver(reason: str) -> Check:
    fix = "On a machine with a GPU: install NVIDIA's driver, or give it to the container (docker run --gpus all)."
    if "nvidia-ml-py" in reason:
        fix = "pip install nvidia-ml-py"
    return Check(name="NVML", status="absent", finding=f"Not here: {reason}.", fix=fix)


def findings(
    devices: Sequence[Mapping[str, Any]], figures: Mapping[str, Any] | None, missing: Mapping[str, str]
) -> Iterator[Check]:
    """What half a second of sampling says.

    Args:
        devices: the GPUs that NVML lists.
        figures: the sampler's summary.
        missing: its reasons.
    """
    names = ", ".join(str(device["name"]) for device in devices)
    if figures is None:
        reason = missing.get("", "it gives no figure")
        yield Check(name="NVML", status="broken", finding=f"{names}: {reason}.", fix="Check nvidia-smi.")
        return
    gone = {name: reason for name, reason in missing.items() if name not in _GPM}
    if gone:
        what = "; ".join(f"{', '.join(fields)} ({reason})" for reason, fields in _by_reason(gone).items())
        yield Check(name="NVML", status="note", finding=f"{names}. Without {what}.", fix=_fix(gone.values()))
    else:
        yield Check(name="NVML", status="ok", finding=f"{names}: every figure.")
    yield _gpm({name: missing[name] for name in _GPM if name in missing})
    yield from _co_tenants(figures)
    yield from _throttling(figures)


def _gpm(missing: Mapping[str, str]) -> Check:
    if not missing:
        return Check(name="GPM", status="ok", finding="Two live samples give SM and memory activity.")
    reason = next(iter(missing.values()))
    status = "note" if _PERMISSION in reason else "absent"
    finding = f"No SM and memory activity: {reason.rstrip('.')}."
    return Check(name="GPM", status="note" if status == "note" else "absent", finding=finding, fix=_fix([reason]))


def _co_tenants(figures: Mapping[str, Any]) -> Iterator[Check]:
    others = figures["other_processes"]
    if others:
        yield Check(
            name="other processes",
            status="note",
            finding=f"Other processes are on a GPU ({others}): what is measured there is not yours alone.",
            fix="Measure when the GPU is free, or hide it with CUDA_VISIBLE_DEVICES.",
            figures={"other_processes": others},
        )


def _throttling(figures: Mapping[str, Any]) -> Iterator[Check]:
    reasons = [reason for reason in figures["throttle_reasons"] or [] if reason != "applications_clocks_setting"]
    if reasons:
        yield Check(
            name="clocks",
            status="note",
            finding=f"The clocks are held back: {', '.join(reasons)}.",
            fix="Look at power limit and cooling: nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE",
        )


def _by_reason(missing: Mapping[str, str]) -> dict[str, list[str]]:
    fields: dict[str, list[str]] = {}
    for name, reason in missing.items():
        fields.setdefault(reason.rstrip("."), []).append(name)
    return fields


def _fix(reasons: Any) -> str | None:
    if any(_PERMISSION in reason for reason in reasons):
        return "Run it as root or outside the container; or let the administrator lift the driver's restriction."
    if any("installed driver has no" in reason for reason in reasons):
        return "Update NVIDIA's driver."
    if any("binding has no" in reason for reason in reasons):
        return "pip uninstall pynvml && pip install --force-reinstall nvidia-ml-py"
    return None
