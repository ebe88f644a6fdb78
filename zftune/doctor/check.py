"""The answer of one check, and the examination that runs all of them, area by area."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_NAME = "zftune.doctor/1"

Status = Literal["ok", "note", "broken", "absent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What one check found."""

    name: str
    status: Status
    """In a word. "ok": works. "note": works, with something to know. "broken": is there and does not work, or harms.
    "absent": is not there."""
    finding: str
    fix: str | None = None
    """What to do about it; None where there is nothing to do."""
    required: bool = False
    stops_training: bool = False
    """Whether trainings on this machine hang until it is mended, with zftune or without."""
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_fault(self) -> bool:
        """Whether something that is required does not work, or stops trainings: exit code 1."""
        return self.stops_training or (self.required and self.status in ("broken", "absent"))


@dataclass(frozen=True, slots=True)
class Area:
    """Checks that belong together."""

    name: str
    checks: tuple[Check, ...]


def document(areas: Iterable[Area], version: str) -> dict[str, Any]:
    """The checks as JSON: no host name, no user and no path.

    Returns:
        {"schema", "zftune", "ok", "checks": [{"area", "name", "status", "finding", "fix", "required", "stops_training",
        "figures"}]}; "ok" is false where the command ends with exit code 1.
    """
    checks = [
        {
            "area": area.name,
            "name": check.name,
            "status": check.status,
            "finding": check.finding,
            "fix": check.fix,
            "required": check.required,
            "stops_training": check.stops_training,
            "figures": dict(check.figures),
        }
        for area in areas
        for check in area.checks
    ]
    ok = not any(check.is_fault for area in areas for check in area.checks)
    return {"schema": SCHEMA_NAME, "zftune": version, "ok": ok, "checks": checks}


_Checks = Callable[[], Iterable[Check]]


class Examination:
    """Runs the areas one after another; those on the GPU share what they find out."""

    def __init__(self) -> None:
        self._gpus: Sequence[Mapping[str, Any]] | None = None
        self._has_cuda = False
        self.areas: Mapping[str, _Checks] = {
            "software": self._software,
            "GPU": self._gpu,
            "DeepSpeed": self._deepspeed,
            "host": self._host,
            "bandwidth": self._bandwidth,
            "store": self._store,
        }

    def run(self) -> Iterator[Area]:
        """The areas, each as soon as it is known. A check that fails itself is a finding, not the end."""
        for name, checks in self.areas.items():
            found: list[Check] = []
            try:
                found.extend(checks())
            except Exception as error:  # noqa: BLE001 - one area that cannot be examined must not hide the others
                reason = str(error).partition("\n")[0] or "no reason given"
                finding = f"It could not be examined: {type(error).__name__}: {reason.rstrip('.')}."
                found.append(Check(name=name, status="broken", finding=finding))
            yield Area(name, tuple(found))

    def _software(self) -> Iterable[Check]:
        from zftune.doctor.software import software_checks

        return software_checks()

    def _gpu(self) -> Iterator[Check]:
        from zftune.doctor.gpu import gpu_checks, nvml_checks
        from zftune.telemetry.nvml import gpus

        missing: dict[str, str] = {}
        self._gpus = gpus(missing)
        for check in gpu_checks(None if self._gpus is None else [str(found["name"]) for found in self._gpus]):
            self._has_cuda |= check.name == "CUDA" and check.status == "ok"
            yield check
        yield from nvml_checks(self._gpus, missing.get("gpus", "no reason given"))

    def _deepspeed(self) -> Iterable[Check]:
        from zftune.doctor.software import deepspeed_checks

        return deepspeed_checks()

    def _host(self) -> Iterable[Check]:
        from zftune.doctor.host import host_checks

        return host_checks()

    def _bandwidth(self) -> Iterable[Check]:
        from zftune.doctor.host import bandwidth_checks

        first = self._gpus[0] if self._gpus else {}
        generation, width = first.get("pcie_gen"), first.get("pcie_width")
        return bandwidth_checks(self._has_cuda, (generation, width) if generation and width else None)

    def _store(self) -> Iterable[Check]:
        from zftune.doctor.software import store_checks

        return store_checks()
