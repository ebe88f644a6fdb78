"""Rigs: descriptions of an emulated accelerator, as TOML files.

A rig has a `name`, an optional `source` (where its figures come from) and one of two tables. Rates are taken as
they are; a timeline is a published synchronous step of some model, from which rates are derived so that the
workload at hand has the same ratios.

    [rates]     link_d2h_gbps  link_h2d_gbps  host_gbps  device_gbps  forward_ms  backward_ms
                (comm_gbps  network_gbps  comm_latency_us: of what is between ranks, and between replicas of
                their rows (HSDP); without them it takes no time)
    [timeline]  forward_ms  backward_ms  d2h_ms  host_ms  h2d_ms  scale  (device_ms)

A table `[effects]` may add what rates do not tell, each of it optional:

    slow_core        speed of the slowest of the host's cores, of the others' (1: none is slow); all wait for it
    link_contention  share by which the host is slower while the link moves data (0: not at all)
    link_noise       standard deviation of the logarithm of a copy's time (0: all copies take theirs)

A table `[thread]` gives the training thread's time, each entry optional and in microseconds: `weight_us` for each
weight that a step looks at, `bucket_us` for each bucket of gradients that is sent, `job_us` for each host job that is
submitted, `launch_us` for each kernel launch that is counted by itself. Without the table the thread takes no time.

A table `[noise]` says how step times scatter: see `zftune.emulation.noise`.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zenflow.errors import ConfigError
from zftune.emulation.noise import Noise

_RATES = ("link_d2h_gbps", "link_h2d_gbps", "host_gbps", "device_gbps", "forward_ms", "backward_ms")
_COMM = ("comm_gbps", "network_gbps", "comm_latency_us")
_EFFECTS = {"slow_core": (0.0, 1.0), "link_contention": (0.0, 10.0), "link_noise": (0.0, 2.0)}  # above, at most
_THREAD = ("weight_us", "bucket_us", "job_us", "launch_us")
_TIMELINE = ("forward_ms", "backward_ms", "d2h_ms", "host_ms", "h2d_ms", "scale")
# Bytes that a timeline's times stand for, per element: a 2-byte gradient or weight, and one AdamW update on a
# host (or a device) with 2-byte gradient and result.
_LINK_BYTES = 2
_UPDATE_BYTES = 28


@dataclass(frozen=True, slots=True)
class Rig:
    """An emulated accelerator for one workload: compute time of a step and rates in 10^9 bytes/s."""

    name: str
    source: str
    forward_ms: float
    backward_ms: float
    link_d2h_gbps: float
    link_h2d_gbps: float
    host_gbps: float
    device_gbps: float | None
    """None: the runtime's own device kernels take no time."""
    scale: float
    slow_core: float = 1.0
    link_contention: float = 0.0
    link_noise: float = 0.0
    comm_gbps: float | None = None
    """What a rank sends to the others; None: the network takes no time for bytes."""
    network_gbps: float | None = None
    """What a rank sends to those that have the same rows (HSDP), which are on other machines; None: as `comm_gbps`."""
    comm_latency_us: float = 0.0
    """Of a collective."""
    thread_weight_us: float = 0.0
    """Of the training thread, for a weight that a step looks at."""
    thread_bucket_us: float = 0.0
    """For a bucket of gradients that is sent: launch, copy and event."""
    thread_job_us: float = 0.0
    """For a host job that is submitted."""
    thread_launch_us: float = 0.0


@dataclass(frozen=True, slots=True)
class RigSpec:
    """A rig file that was read and checked."""

    name: str
    source: str
    table: str
    values: Mapping[str, float]
    effects: Mapping[str, float] = field(default_factory=dict)
    thread: Mapping[str, float] = field(default_factory=dict)
    noise: Noise = field(default_factory=Noise)

    @classmethod
    def load(cls, path: Path) -> RigSpec:
        """Read a rig file.

        Raises:
            ConfigError: the file cannot be read or a field is missing, unknown or not a positive number.
        """
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"rig '{path}' cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"rig '{path}' cannot be read: it is not TOML ({error})") from error
        return cls._from_document(document, path)

    @classmethod
    def _from_document(cls, document: Mapping[str, Any], path: Path) -> RigSpec:
        tables = [name for name in ("rates", "timeline") if isinstance(document.get(name), dict)]
        if len(tables) != 1:
            raise ConfigError(f"rig '{path}' has {len(tables)} of the tables [rates] and [timeline]; it must have one")
        unknown = set(document) - {"name", "source", "effects", "thread", "noise", *tables}
        if unknown or not isinstance(document.get("name"), str):
            what = f"the unknown key {min(unknown)!r}" if unknown else "no name"
            raise ConfigError(
                f"rig '{path}' has {what}; it may have name, source, one table, [effects], [thread] and [noise]"
            )
        required = _RATES if tables[0] == "rates" else _TIMELINE
        optional = _COMM if tables[0] == "rates" else ("device_ms",)
        table = document[tables[0]]
        for key in required:
            if key not in table:
                raise ConfigError(f"rig '{path}' has no {tables[0]}.{key}; needed are {', '.join(required)}")
        for key, value in table.items():
            if key not in required + optional or not _is_number(value) or not 0 < value <= sys.float_info.max:
                raise ConfigError(
                    f"rig '{path}' has {tables[0]}.{key} = {value!r}; "
                    f"it must be a number > 0, as must {', '.join(required + optional)}"
                )
        effects = _effects(document.get("effects", {}), path)
        thread = _thread(document.get("thread", {}), path)
        noise = Noise.of(document.get("noise", {}), path)
        return cls(document["name"], str(document.get("source", "")), tables[0], table, effects, thread, noise)

    def for_elements(self, elements: int) -> Rig:
        """The rig for a workload; `elements` are those that the timeline's times stand for: those that can be
        offloaded.
        """
        values = self.values
        if self.table == "rates":
            rates = {key: float(values[key]) for key in _RATES + _COMM if key in values}
            return Rig(self.name, self.source, scale=1.0, **rates, **self.effects, **self.thread)
        scale = values["scale"]

        def gbps(bytes_per_element: int, milliseconds: float) -> float:
            return bytes_per_element * elements / (milliseconds * scale * 1e-3) / 1e9

        device_ms = values.get("device_ms")
        return Rig(
            name=self.name,
            source=self.source,
            forward_ms=values["forward_ms"] * scale,
            backward_ms=values["backward_ms"] * scale,
            link_d2h_gbps=gbps(_LINK_BYTES, values["d2h_ms"]),
            link_h2d_gbps=gbps(_LINK_BYTES, values["h2d_ms"]),
            host_gbps=gbps(_UPDATE_BYTES, values["host_ms"]),
            device_gbps=None if device_ms is None else gbps(_UPDATE_BYTES, device_ms),
            scale=scale,
            **self.effects,
            **{key: us * scale for key, us in self.thread.items()},
        )


def _effects(table: Any, path: Path) -> Mapping[str, float]:
    if not isinstance(table, dict):
        raise ConfigError(f"rig '{path}' has effects = {table!r}; it must be a table")
    for key, value in table.items():
        if key not in _EFFECTS:
            raise ConfigError(f"rig '{path}' has effects.{key}; effects are {', '.join(_EFFECTS)}")
        above, most = _EFFECTS[key]
        if not _is_number(value) or not above < value <= most:
            raise ConfigError(
                f"rig '{path}' has effects.{key} = {value!r}; it must be above {above:g} and at most {most:g}"
            )
    return {key: float(value) for key, value in table.items()}


def _thread(table: Any, path: Path) -> Mapping[str, float]:
    if not isinstance(table, dict):
        raise ConfigError(f"rig '{path}' has thread = {table!r}; it must be a table")
    for key, value in table.items():
        if key not in _THREAD:
            raise ConfigError(f"rig '{path}' has thread.{key}; it may have {', '.join(_THREAD)}")
        if not _is_number(value) or not 0 <= value <= sys.float_info.max:
            raise ConfigError(f"rig '{path}' has thread.{key} = {value!r}; it must be a number >= 0")
    return {f"thread_{key}": float(value) for key, value in table.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
