"""All checks, area by area."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from zftune.doctor.check import Area, Check

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
        from zftune.doctor import software

        return software.checks()

    def _gpu(self) -> Iterator[Check]:
        from zftune.doctor import gpu, nvml
        from zftune.telemetry.nvml import gpus

        missing: dict[str, str] = {}
        self._gpus = gpus(missing)
        for check in gpu.checks(None if self._gpus is None else [str(found["name"]) for found in self._gpus]):
            self._has_cuda |= check.name == "CUDA" and check.status == "ok"
            yield check
        yield from nvml.checks(self._gpus, missing.get("gpus", "no reason given"))

    def _deepspeed(self) -> Iterable[Check]:
        from zftune.doctor import deepspeed

        return deepspeed.checks()

    def _host(self) -> Iterable[Check]:
        from zftune.doctor import host

        return host.checks()

    def _bandwidth(self) -> Iterable[Check]:
        from zftune.doctor import bandwidth

        first = self._gpus[0] if self._gpus else {}
        generation, width = first.get("pcie_gen"), first.get("pcie_width")
        return bandwidth.checks(self._has_cuda, (generation, width) if generation and width else None)

    def _store(self) -> Iterable[Check]:
        from zftune.doctor import store

        return store.checks()
