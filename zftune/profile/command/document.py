"""The profile document of a command, from what its agents recorded."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zftune.profile import derive
from zftune.profile.command.records import Rank
from zftune.profile.command.runtime import Runtime, runtime_of
from zftune.profile.command.timeline import timeline_of
from zftune.profile.sampling import Sampling
from zftune.profile.schema import PHASES, SCHEMA_NAME, validate
from zftune.profile.verdict import verdict

_RUNTIME_FIELDS = ("link", "host", "selection", "staleness", "knobs")
_NOT_SWITCHED = "only the built-in workload can be switched to other systems"
_NO_RUNTIME = "only zenflow's own optimizer tells that"
_NO_STREAM = "plain CPU: there is no device stream whose waits could be called stalls"
_NOT_RECORDED = "the agent recorded none"
_NO_BATCH = "no torch DataLoader gave a batch: getting them is counted with the forward pass"


@dataclass(frozen=True, slots=True)
class Ended:
    """How the command ended."""

    exit_code: int | None
    stopped: bool


def build_document(ranks: Sequence[Rank], ended: Ended, sampling: Sampling) -> dict[str, Any]:
    """Put the profile of a command together and check it against its schema.

    Args:
        ranks: a process of each rank, in their order; each has measured steps. The first one's are the main figures.
        ended: how the command ended.
        sampling: what was sampled meanwhile.

    Raises:
        ProfileError: the document breaks its own schema.
    """
    from zftune.telemetry import hardware, hw_id, software

    main = ranks[0]
    missing = dict(main.missing)
    machine, runtime = hardware(), runtime_of(main)
    rig = None if runtime is None else runtime.rig
    document: dict[str, Any] = {
        "schema": SCHEMA_NAME,
        "device": (main.header.get("device") or "cpu") + ("" if rig is None else " (emulated accelerator)"),
        "command": _command(main, ended),
        "seed": None,
        "workload": _workload(main.model),
        "fingerprint": {
            "hw_id": hw_id(machine, rig=None if rig is None else rig["name"]),
            "model_id": main.model.get("model_id"),
        },
        "hardware": machine,
        "software": {**software(), **_versions(main)},
        "rig": rig,
        "steps": {"measured": len(main.steps), "discarded": main.discarded},
        **_measured(main, missing),
        "throughput": _throughput(ranks, missing),
        **_of_runtime(runtime, missing),
        "practicality": None,
        "baselines": None,
        "ranks": [_rank(rank) for rank in ranks],
        "per_step": _per_step(main),
        "missing": missing,
        **sampling.fields(main.begin_ns, main.end_ns, missing, uuids=_uuids(ranks)),
    }
    document["timeline"] = timeline_of(main, None if runtime is None else runtime.timeline)
    document["roofs"] = derive.roofs(document, missing)
    _explain(document, ranks)
    document["sources"] = _sources(document, main) | sampling.sources(document)
    document["verdict"] = verdict(document)
    validate(document)
    return document


def _command(main: Rank, ended: Ended) -> dict[str, Any]:
    script, systems = main.header.get("script"), main.model.get("systems")
    return {
        "script": script.rpartition("/")[2] if isinstance(script, str) and script else None,
        "systems": [str(system) for system in systems or ()],
        "ranks": main.header["world_size"],
        "exit_code": ended.exit_code,
        "stopped": ended.stopped,
    }


def _workload(model: Mapping[str, Any]) -> dict[str, Any]:
    names = ("model", "parameters", "trainable", "dtype", "micro_batch", "sequence")
    return {**{name: model.get(name) for name in names}, "text": None}


def _versions(main: Rank) -> dict[str, str]:
    """What the command itself ran on, which may be another installation."""
    return {name: main.header[name] for name in ("python", "torch") if isinstance(main.header.get(name), str)}


def _measured(main: Rank, missing: dict[str, str]) -> dict[str, Any]:
    """The figures that every agent records."""
    step_ms = derive.step_ms(step["step_ms"] for step in main.steps)
    stall = derive.stall([step["stall_ms"] for step in main.steps], step_ms["mean"])
    hidden = main.mean("hidden_ms")
    if stall is None:
        missing.setdefault("stall", _NOT_RECORDED if main.header.get("has_stream") else _NO_STREAM)
    if hidden is None:
        missing.setdefault("hidden_ms_per_step", missing.get("stall", _NOT_RECORDED))
    return {
        "step_ms": step_ms,
        "phases_ms": _phases(main),
        "stall": stall,
        "hidden_ms_per_step": hidden,
        "waits_ms": derive.mean_of([step["waits_ms"] for step in main.steps]),
        "overhead_fraction": sum(step.get("overhead_ms", 0.0) for step in main.steps)
        / sum(step["step_ms"] for step in main.steps),
    }


def _throughput(ranks: Sequence[Rank], missing: dict[str, str]) -> dict[str, float | None]:
    """Steps of the first rank, tokens of all of them: each is taken to train on batches of its own."""
    tokens = [known for rank in ranks if (known := rank.tokens_per_s) is not None]
    if len(tokens) < len(ranks):
        missing.setdefault("throughput.tokens_per_s", "the shape of the batches is not known")
    steps_per_s = 1e3 / derive.step_ms(step["step_ms"] for step in ranks[0].steps)["mean"]
    return {"steps_per_s": steps_per_s, "tokens_per_s": sum(tokens) if len(tokens) == len(ranks) else None}


def _phases(rank: Rank) -> dict[str, float | None]:
    return _known_phases(rank, derive.mean_of([step["phases_ms"] for step in rank.steps]))


def _known_phases(rank: Rank, phases: Mapping[str, float]) -> dict[str, float | None]:
    """Every phase; no "data" where nobody saw it: a generator's work is then in the forward pass."""
    unknown = () if rank.has_batches else ("data",)
    return {phase: None if phase in unknown else phases.get(phase, 0.0) for phase in PHASES}


def _of_runtime(runtime: Runtime | None, missing: dict[str, str]) -> dict[str, Any]:
    """What only our own optimizer can tell."""
    memory: dict[str, Any] = {"device_peak_bytes": None}
    if runtime is None:
        for name in (*_RUNTIME_FIELDS, "memory"):
            missing.setdefault(name, _NO_RUNTIME)
        uses = ("state", "log", "staging", "peak")
        return {**dict.fromkeys(_RUNTIME_FIELDS), "memory": memory | {f"host_{use}_bytes": None for use in uses}}
    missing["memory.device_peak_bytes"] = _NOT_RECORDED
    rig_gbps = None if runtime.rig is None else runtime.rig["host_gbps"]
    return {
        "knobs": derive.knobs(runtime.config, runtime.stats),
        "link": derive.link(runtime.stats, runtime.model_bytes),
        "host": derive.host(runtime.stats, rig_gbps, runtime.engine, missing),
        "selection": derive.selection(runtime.stats, missing),
        "staleness": derive.staleness(runtime.stats, missing),
        "memory": {**memory, **derive.host_memory(runtime.host_bytes)},
    }


def _rank(rank: Rank) -> dict[str, Any]:
    step_ms = derive.step_ms(step["step_ms"] for step in rank.steps)
    return {"rank": rank.rank, "steps": len(rank.steps), "step_ms": step_ms, "phases_ms": _phases(rank)}


def _per_step(main: Rank) -> list[dict[str, Any]]:
    return [
        {
            "step": step["index"],
            "begin_ms": begin_ms,
            "step_ms": step["step_ms"],
            "phases_ms": _known_phases(main, step["phases_ms"]),
            "stall_ms": step["stall_ms"],
            "waits_ms": step["waits_ms"],
        }
        for step, begin_ms in zip(main.steps, _begins_ms(main), strict=True)
    ]


def _begins_ms(main: Rank) -> list[float]:
    """When steps began: with a stream on its timeline, as their lengths are, else by the thread's clock."""
    if main.header.get("has_stream"):
        return [0.0, *itertools.accumulate(step["step_ms"] for step in main.steps[:-1])]
    return [(step["begin_ns"] - main.begin_ns) / 1e6 for step in main.steps]


def _uuids(ranks: Sequence[Rank]) -> list[str] | None:
    """The GPUs of the ranks; None where one does not tell its own."""
    uuids = [rank.header.get("device_uuid") for rank in ranks]
    return [str(uuid) for uuid in uuids] if all(uuids) else None


def _explain(document: dict[str, Any], ranks: Sequence[Rank]) -> None:
    """Give a reason to what is null in every profile of a command, or for want of a record."""
    main, missing = ranks[0], document["missing"]
    if not main.has_batches:
        missing |= dict.fromkeys(("phases_ms.data", "per_step.phases_ms.data"), _NO_BATCH)
    if not all(rank.has_batches for rank in ranks):
        missing["ranks.phases_ms.data"] = _NO_BATCH
    missing |= {
        "seed": "the command seeds itself",
        "workload.text": "the command reads its own data",
        "practicality": _NOT_SWITCHED,
        "baselines": _NOT_SWITCHED,
    }
    if any(step["stall_ms"] is None for step in main.steps):
        missing["per_step.stall_ms"] = missing.get("stall", _NOT_RECORDED)
    if document["timeline"] is None:
        missing.setdefault("timeline", _NOT_RECORDED)
    for part in ("workload", "fingerprint"):
        for name, value in document[part].items():
            if value is None:
                missing.setdefault(f"{part}.{name}", _NOT_RECORDED)
    # The agent may give a reason for what another source knows, or for what no document has.
    for name in [name for name in missing if _known(document, name)]:
        del missing[name]


def _known(document: Mapping[str, Any], path: str) -> bool:
    """Whether a dotted name is that of a single value which is there."""
    value: Any = document
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return value is not None and not isinstance(value, (Mapping, list))


def _sources(document: Mapping[str, Any], main: Rank) -> dict[str, str]:
    clock = "rig" if document["rig"] is not None else main.header.get("source") or "wall clock"
    sources = dict.fromkeys(
        ("step_ms", "throughput", "phases_ms", "stall", "hidden_ms_per_step", "ranks", "per_step", "timeline"), clock
    )
    sources |= {"waits_ms": "wall clock", "overhead_fraction": "wall clock", "host": "wall clock", "roofs": clock}
    sources |= dict.fromkeys(("link", "selection", "staleness"), "count")
    known = {name: source for name, source in sources.items() if document[name] is not None}
    if document["host"] is not None:
        ceiling = "rig" if document["rig"] is not None else "bandwidth probe"
        known |= {"host.ceiling_gbps": ceiling, "host.bytes_per_element": "count"}
    if document["knobs"] is not None:
        known["memory"] = "count"
    return known
