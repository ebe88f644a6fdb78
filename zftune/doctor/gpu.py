"""CUDA as torch sees it, Triton, and what NVML tells and may not tell."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zftune.doctor.check import Check
from zftune.doctor.software import at_least
from zftune.telemetry.fingerprint import installed

_PROBE_S = 0.6  # GPM wants two samples more than 100 ms apart
_GPM = ("sm_utilisation_percent", "sm_occupancy_percent", "dram_percent")
_PERMISSION = "Insufficient Permissions"


def nvml_checks(devices: Sequence[Mapping[str, Any]] | None, reason: str) -> Iterator[Check]:
    """NVML, the figures that it does not give, GPM."""
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
    """What half a second of sampling says."""
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


_TRITON = "3.0"
_WITHOUT = "Profiles run on an emulated accelerator"


def gpu_checks(gpu_names: list[str] | None) -> Iterator[Check]:
    """CUDA and Triton.

    Args:
        gpu_names: the GPUs that the driver lists; None where there is no driver.
    """
    import torch

    cuda = cuda_check(torch.__version__, torch.version.cuda, _use_cuda(), gpu_names)
    yield cuda
    yield triton_check(installed("triton"), cuda.status == "ok")


def _use_cuda() -> str | list[str]:
    import torch

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if not torch.cuda.is_available():  # a driver that is too old is a warning
                return str(caught[0].message).partition("(")[0].strip() if caught else []
        devices = range(torch.cuda.device_count())
        for device in devices:
            torch.ones(1, device=f"cuda:{device}").add_(1).item()
        return [torch.cuda.get_device_name(device) for device in devices]
    except RuntimeError as error:
        return str(error).partition("\n")[0]


def cuda_check(torch_version: str, cuda: str | None, used: str | list[str], gpu_names: list[str] | None) -> Check:
    """What to say of CUDA.

    Args:
        gpu_names: the GPUs that the driver lists; None where there is no driver.
    """
    name = "CUDA"
    if cuda is None and gpu_names:
        return Check(
            name=name,
            status="broken",
            finding=f"There is a GPU, and torch {torch_version} is built without CUDA.",
            fix="Install torch for CUDA: https://pytorch.org/get-started/locally",
        )
    if cuda is None:
        return Check(name=name, status="absent", finding=f"torch {torch_version} is built without it. {_WITHOUT}.")
    if isinstance(used, str):
        return Check(
            name=name,
            status="broken",
            finding=f"CUDA {cuda} is there and does not work: {used.rstrip('.')}.",
            fix="Check nvidia-smi; a driver too old for CUDA, or a GPU too new for this torch, ends like this.",
        )
    if used:
        devices = ", ".join(f"{used.count(device)} x {device}" for device in dict.fromkeys(used))
        return Check(name=name, status="ok", finding=f"{devices}, CUDA {cuda}.")
    if gpu_names:
        return Check(
            name=name,
            status="broken",
            finding="The driver lists a GPU, and CUDA sees none.",
            fix="Look at CUDA_VISIBLE_DEVICES, and in a container at the rights to /dev/nvidia*.",
        )
    return Check(name=name, status="absent", finding=f"torch is built for CUDA {cuda}; there is no GPU. {_WITHOUT}.")


def triton_check(version: str | None, has_cuda: bool) -> Check:
    """What to say of Triton."""
    name, fix = "Triton", f"pip install 'triton>={_TRITON}'"
    if version is None and not has_cuda:
        return Check(name=name, status="absent", finding="It is not installed; without a GPU nothing needs it.")
    if version is None:
        finding = "It is not installed: the device kernels run in PyTorch, which is slower."
        return Check(name=name, status="absent", finding=finding, fix=fix)
    if not at_least(version, _TRITON):
        finding = f"{version} is too old: the device kernels run in PyTorch, which is slower."
        return Check(name=name, status="note", finding=finding, fix=fix)
    if not has_cuda:
        return Check(name=name, status="ok", finding=f"{version}; without a GPU nothing uses it.")
    return _triton_kernels(version)


def _triton_kernels(version: str) -> Check:
    import torch

    from zenflow import ConfigError
    from zenflow.kernels import kernels_for

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            chosen = kernels_for(torch.device("cuda")).name
    except ConfigError as error:
        finding = f"{version}: {_without_paths(str(error))}."
        return Check(name="Triton", status="broken", finding=finding, fix="unset ZENFLOW_KERNELS")
    if caught and chosen != "triton":
        return Check(
            name="Triton",
            status="broken",
            finding=f"{version}: {_without_paths(str(caught[-1].message))}.",
            fix="Triton needs a C compiler and Python's headers at run time: apt install gcc python3-dev",
        )
    if chosen != "triton":
        return Check(name="Triton", status="note", finding=f"{version} is not used: ZENFLOW_KERNELS is {chosen!r}.")
    return Check(name="Triton", status="ok", finding=f"{version} runs the device kernels.")


def _without_paths(text: str) -> str:
    return re.sub(r"(?<![\w.])(?:/[^\s/'\":]+)*/(?=[^\s/'\":])", "", text)
