"""CUDA as torch sees it, and Triton."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from zftune.doctor.check import Check
from zftune.doctor.versions import at_least, installed

_TRITON = "3.0"
_WITHOUT = "Profiles run on an emulated accelerator"


def checks(gpu_names: list[str] | None) -> Iterator[Check]:
    """CUDA and Triton.

    Args:
        gpu_names: the GPUs that the driver lists; None where there is no driver.
    """
    import torch

    cuda = cuda_check(torch.__version__, torch.version.cuda, _use_cuda(), gpu_names)
    yield cuda
    yield triton_check(installed("triton"), cuda.status == "ok")


def _use_cuda() -> str | list[str]:
    """What CUDA is used for: the names of the devices, each of which took a tensor, or why that failed."""
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
        torch_version: of the installed torch.
        cuda: the CUDA version that torch was built for.
        used: names of the devices that were used, or the error of trying.
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
            fix="Check nvidia-smi; a driver older than CUDA needs, or a GPU newer than torch knows, ends like this.",
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
        chosen = kernels_for(torch.device("cuda")).name
    except ConfigError as error:
        return Check(name="Triton", status="broken", finding=f"{version}: {error}.", fix="unset ZENFLOW_KERNELS")
    if chosen != "triton":
        return Check(
            name="Triton",
            status="broken",
            finding=f"{version} is installed and cannot be used: the device kernels run in {chosen}.",
            fix="python -c 'import triton' says why.",
        )
    return Check(name="Triton", status="ok", finding=f"{version} runs the device kernels.")
