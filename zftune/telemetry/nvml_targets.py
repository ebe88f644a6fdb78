"""Which GPUs and MIG devices to look at: `CUDA_VISIBLE_DEVICES` as CUDA reads it, matched by UUID."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from zftune.telemetry.nvml import mig_instances
from zftune.telemetry.nvml_session import Nvml, NvmlError

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ORDER = (
    "GPUs of several kinds: indices count in the order of the PCI bus, CUDA's only with CUDA_DEVICE_ORDER=PCI_BUS_ID"
)


@dataclass(frozen=True, slots=True)
class Target:
    """One GPU, or one MIG device of a GPU."""

    handle: Any
    uuid: str | None
    gpu: Any
    """Handle of the whole GPU."""
    gpu_uuid: str | None
    instance: int | None = None
    """Number of the GPU instance that a MIG device belongs to."""

    @property
    def is_mig(self) -> bool:
        """Whether it is a part of a GPU."""
        return self.instance is not None


def visible_devices(environment: Mapping[str, str]) -> list[str] | None:
    """The entries of `CUDA_VISIBLE_DEVICES`; None where the variable is not set: all devices are visible."""
    value = environment.get(_VARIABLE)
    if value is None:
        return None
    return [entry.strip() for entry in value.split(",") if entry.strip()]


def find_targets(nvml: Nvml, devices: Sequence[str] | None) -> tuple[list[Target], dict[str, str]]:
    """The devices that are meant, each once.

    Args:
        nvml: an open session.
        devices: indices, "GPU-" or "MIG-" UUIDs or beginnings of them, UUIDs without the prefix as torch gives them;
            None: all of the machine. As in CUDA, an entry that matches nothing hides those after it, and of a divided
            GPU an index means the first MIG device. Indices count in the order of the PCI bus.

    Returns:
        The devices, and reasons under "devices" for those that are left out.

    Raises:
        NvmlError: the driver lists no devices at all.
    """
    missing: dict[str, str] = {}
    machine = _machine(nvml, missing)
    if devices is None:
        return [target for parts in machine for target in parts], missing
    if any(entry.isdecimal() for entry in devices) and len(_names(nvml, machine)) > 1:
        missing["devices"] = _ORDER
    found: dict[Any, Target] = {}
    for entry in devices:
        target = _match(entry, machine) or _by_uuid(nvml, entry)
        if target is None:
            missing["devices"] = f"no GPU or MIG device matches '{entry}'; what follows it is left out, as in CUDA"
            break
        found.setdefault(target.uuid or id(target), target)
    return list(found.values()), missing


def _machine(nvml: Nvml, missing: dict[str, str]) -> list[list[Target]]:
    """For each GPU of the machine itself, or its MIG devices."""
    machine = []
    for index in range(nvml.call("nvmlDeviceGetCount")):
        try:
            handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
            machine.append(_parts(nvml, handle))
        except NvmlError as error:
            missing["devices"] = f"GPU {index} is left out: {error}"
            machine.append([])
    return machine


def _parts(nvml: Nvml, handle: Any) -> list[Target]:
    uuid = _uuid(nvml, handle)
    try:
        instances = mig_instances(nvml, handle)
    except NvmlError:  # a driver before MIG, or a container that may not ask
        instances = None
    if instances is None:
        return [Target(handle, uuid, handle, uuid)]
    return [_mig_target(nvml, instance, handle, uuid) for instance in instances]


def _mig_target(nvml: Nvml, instance: Any, gpu: Any, gpu_uuid: str | None) -> Target:
    number = nvml.call("nvmlDeviceGetGpuInstanceId", instance)
    return Target(instance, _uuid(nvml, instance), gpu, gpu_uuid, number)


def _names(nvml: Nvml, machine: list[list[Target]]) -> set[str]:
    names = set()
    for parts in machine:
        with suppress(NvmlError):  # a GPU without a name is like any other
            names |= {nvml.call("nvmlDeviceGetName", target.gpu) for target in parts}
    return names


def _uuid(nvml: Nvml, handle: Any) -> str | None:
    try:
        return str(nvml.call("nvmlDeviceGetUUID", handle))
    except NvmlError:
        return None  # such a device can still be asked for by its index


def _match(entry: str, machine: list[list[Target]]) -> Target | None:
    if entry.isdecimal():
        parts = machine[int(entry)] if int(entry) < len(machine) else []
        return parts[0] if parts else None
    everything = [target for parts in machine for target in parts]
    if entry.upper().startswith("MIG-GPU-"):  # drivers before 470: the GPU's UUID, GPU instance, compute instance
        uuid, _, instances = entry[4:].partition("/")
        meant = [
            target
            for target in everything
            if target.gpu_uuid == uuid and str(target.instance) == instances.partition("/")[0]
        ]
        return meant[0] if meant else None
    for prefix in ("", "GPU-", "MIG-"):
        meant = [target for target in everything if _begins(target.uuid, prefix + entry)]
        if len(meant) == 1:
            return meant[0]
    parts = [target for target in everything if target.is_mig and _begins(target.gpu_uuid, entry)]
    return parts[0] if len({target.gpu_uuid for target in parts}) == 1 else None


def _begins(uuid: str | None, text: str) -> bool:
    return uuid is not None and uuid.casefold().startswith(text.casefold())


def _by_uuid(nvml: Nvml, entry: str) -> Target | None:
    """A MIG device that its GPU does not list: so it is in a container that was given no more than the device."""
    if not entry.upper().startswith("MIG-"):
        return None
    try:
        handle = nvml.call("nvmlDeviceGetHandleByUUID", entry)
        gpu = nvml.call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        return _mig_target(nvml, handle, gpu, _uuid(nvml, gpu))
    except NvmlError:
        return None
