"""NVML and the host, sampled while something is profiled, as fields of the profile document."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zftune.profile.schema import schema

_RATE_HZ = 5.0
_HIDDEN = "CUDA_VISIBLE_DEVICES hides every GPU"
_SIMULATED = "time is simulated, so that this machine's load is not part of it"
_NOT_TOLD = "the sampler does not tell"

Pids = Callable[[], Sequence[int]]


class Sampling:
    """Both samplers, from entering to leaving.

    Args:
        environment: of the run; its CUDA_VISIBLE_DEVICES says which GPUs count.
        simulated: whether the run's time is simulated; then nothing is sampled, as it would tell nothing of the run.
    """

    def __init__(self, pids: Pids, environment: Mapping[str, str] | None = None, *, simulated: bool = False) -> None:
        self._simulated = simulated
        from zftune.telemetry import HostSampler, NvmlSampler, visible_devices

        devices = visible_devices(os.environ if environment is None else environment)
        self._nvml = None if devices == [] or simulated else NvmlSampler(devices, rate_hz=_RATE_HZ)
        self._host = HostSampler(pids, rate_hz=_RATE_HZ)

    def __enter__(self) -> Sampling:
        if self._nvml is not None:
            self._nvml.start()
        if not self._simulated:
            self._host.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._simulated:
            self._host.stop()
        if self._nvml is not None:
            self._nvml.stop()

    def fields(
        self, begin_ns: int, end_ns: int, missing: dict[str, str], *, uuids: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """The document's "nvml", "system" and "series" for a span of CLOCK_MONOTONIC.

        Args:
            uuids: of the GPUs that the run used; None: all that it could see.
        """
        if self._simulated:
            missing |= dict.fromkeys(("nvml", "system", "series.nvml", "series.system"), _SIMULATED)
            return {"nvml": None, "system": None, "series": {"nvml": None, "system": None}}
        summary: dict[str, Any] | None = None
        reasons, rows = {"": _HIDDEN}, []
        if self._nvml is not None:
            summary, reasons = self._nvml.summary(begin_ns, end_ns, uuids)
            rows = self._nvml.series(begin_ns, end_ns, uuids)
        found: dict[str, Any] = {"nvml": _fit("nvml", summary, reasons, missing)}
        found["system"] = _fit("system", *self._host.summary(begin_ns, end_ns), missing)
        series = {"nvml": rows, "system": self._host.series(begin_ns, end_ns)}
        found["series"] = {name: taken or None for name, taken in series.items() if found[name] is not None}
        for name in series:
            if found["series"].setdefault(name, None) is None:
                missing[f"series.{name}"] = missing.get(name, "there was no sample in the measured steps")
        return found

    def sources(self, document: Mapping[str, Any]) -> dict[str, str]:
        """Where these fields come from."""
        names = {"nvml": "NVML", "system": "psutil"}
        return {name: source for name, source in names.items() if document[name] is not None} | {
            f"series.{name}": source for name, source in names.items() if document["series"][name] is not None
        }


def _fit(
    name: str, summary: Mapping[str, Any] | None, reasons: Mapping[str, str], missing: dict[str, str]
) -> dict[str, Any] | None:
    """The summary with exactly the schema's fields: a sampler that knows more or less must not cost a report."""
    if summary is None:
        missing[name] = reasons.get("", _NOT_TOLD)
        return None
    fields = schema()["properties"][name]["anyOf"][0]["required"]
    fitted = {field: summary.get(field) for field in fields}
    for field, value in fitted.items():
        if value is None:
            missing[f"{name}.{field}"] = reasons.get(field, reasons.get("", _NOT_TOLD))
    # A device that was left out or lost, a sampler that ended: figures are there, but not of everything.
    missing |= {f"{name}.{key}": why for key, why in reasons.items() if key.partition(".")[0] in ("devices", "samples")}
    return fitted
