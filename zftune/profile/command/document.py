"""The profile document of a command: phases, figures, timeline, and the reasons for what could not be measured."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zftune.doctor.software import extension_locks, free_bytes
from zftune.profile import derive
from zftune.profile.command.records import Rank, Row, read_records
from zftune.profile.sampling import Sampling
from zftune.profile.schema import PHASES, SCHEMA_NAME, validate
from zftune.profile.verdict import verdict
from zftune.variables import DISABLE

if TYPE_CHECKING:
    from zenflow import StepStats, ZenFlowConfig


_STEPS = 4
_LANES = {"forward": "compute", "backward": "compute", "optimizer": "compute", "data": "data"}
_OF_RUNTIME = ("d2h", "h2d", "host", "stall")

Lanes = dict[str, list[list[Any]]]


def timeline_of(main: Rank, runtime: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The document's "timeline": the window that the runtime recorded, else the first four steps' phases.

    Args:
        runtime: the runtime's own timeline, its first step numbered as the rows are, from 0; None if there is none.
    """
    if runtime is not None:
        first, count = runtime["first_step"], runtime["steps"]
        steps = [step for step in main.steps if first <= step["index"] < first + count]
        if len(steps) == count:  # else the window is not wholly among the measured steps
            stalls = runtime["lanes"].get("stall", [])
            recorded = {lane: runtime["lanes"][lane] for lane in _OF_RUNTIME if lane in runtime["lanes"]}
            return {
                "first_step": first + 1,
                "steps": count,
                "length_ms": runtime["length_ms"],
                "lanes": {**_phase_lanes(steps, stalls), **recorded},
            }
    steps = main.steps[:_STEPS]
    lanes = _phase_lanes(steps, [])
    if not any(lanes.values()):
        return None
    length_ms = sum(step["step_ms"] for step in steps)
    return {"first_step": steps[0]["index"] + 1, "steps": len(steps), "length_ms": length_ms, "lanes": lanes}


def _phase_lanes(steps: Sequence[Row], stalls: Sequence[Sequence[Any]]) -> Lanes:
    """Lanes of the phases, the stalls taken out of those of the compute stream; one step begins where another ends."""
    without = _without(stalls)
    lanes: Lanes = {lane: [] for lane in dict.fromkeys(_LANES.values())}
    offset_ms = 0.0
    for step in steps:
        for name, begin_ms, end_ms in step.get("spans") or ():
            if name in _LANES and begin_ms < end_ms:
                lane = _LANES[name]
                whole = (offset_ms + begin_ms, offset_ms + end_ms)
                parts = without(*whole) if lane == "compute" else [whole]
                lanes[lane] += [[begin, end, name] for begin, end in parts]
        offset_ms += step["step_ms"]
    return lanes


def _without(stalls: Sequence[Sequence[Any]]) -> Callable[[float, float], list[tuple[float, float]]]:
    """Takes the stalls out of a span; imports torch only where there are some: in a folder that is gone that fails."""
    if not stalls:
        return lambda begin_ms, end_ms: [(begin_ms, end_ms)]
    from zenflow.history import Span, without

    gaps = [Span(begin_ms, end_ms, cause) for begin_ms, end_ms, cause in stalls]
    return lambda begin_ms, end_ms: list(without(begin_ms, end_ms, gaps))


FIELDS = ("link", "host", "selection", "staleness", "movement", "knobs", "memory")
"""Of the profile document, that only our own optimizer fills."""
_OTHER = "only zenflow's own optimizers report it"
_LOST = "zenflow's optimizer trained, but what it recorded of the measured steps cannot be read"
_MAY_BE_NONE = (
    "step_ms", "hidden_ms", "staleness_mean_steps", "staleness_max_steps", "coverage", "churn", "change_norm",
    "weight_norm",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Runtime:
    """The optimizer's own account of the measured steps."""

    config: ZenFlowConfig
    stats: list[StepStats]
    model_bytes: int
    engine: tuple[str, int]
    host_bytes: Mapping[str, int]
    timeline: Mapping[str, Any] | None
    """Of one window, as the profile document has it, but for the lanes that the agent fills."""
    rig: Mapping[str, Any] | None
    """The emulated accelerator that it ran on, as the profile document has it."""


def runtime_of(rank: Rank, missing: dict[str, str]) -> Runtime | None:
    """The runtime's account of the steps that it could tell; None where another optimizer trains, or it is lost."""
    knobs = rank.model.get("knobs")
    if not isinstance(knobs, Mapping):
        missing |= {name: missing.get(name, _OTHER) for name in FIELDS}
        return None
    from zenflow import ConfigError, ZenFlowConfig

    rows = [row for step in rank.steps if isinstance(row := step.get("runtime"), Mapping)]
    newest: dict[str, Any] = {}
    for row in rows:
        newest |= row
    try:
        name, threads = newest["host_engine"]
        host_bytes = newest["host_memory"]
        return Runtime(
            config=ZenFlowConfig(**knobs),
            stats=[_stats(row) for row in rows],
            model_bytes=rank.model["model_bytes"],
            engine=(str(name), int(threads)),
            host_bytes={use: int(host_bytes[use]) for use in ("state", "log", "staging", "peak")},
            timeline=newest.get("timeline"),
            rig=newest.get("rig"),
        )
    except (ConfigError, KeyError, TypeError, ValueError):  # no row has any
        missing |= dict.fromkeys(FIELDS, _LOST)
        return None


def _stats(row: Mapping[str, Any]) -> StepStats:
    from zenflow import StepStats

    names = {field.name for field in dataclasses.fields(StepStats)} - {"coverage_curve", "comm_ms", "pin_ms"}
    values: dict[str, Any] = {name: row[name] for name in names}
    for name, value in values.items():
        allowed = (int, float, type(None)) if name in _MAY_BE_NONE else (int, float)
        if name != "stall_ms" and not isinstance(value, allowed):
            raise TypeError(f"{name} is no number")
    return StepStats(**values, coverage_curve=None)


_WITHOUT_SITE = {"I": "isolates the interpreter", "E": "ignores PYTHONPATH", "S": "leaves the site module out"}
_FULL_BYTES = 64 << 10
_NO_STEP = (
    "no optimizer of torch took a step in a Python that takes up zftune's agent; where a wrapper clears PYTHONPATH or "
    "runs Python elsewhere, write zftune profile within the wrapper, before python"
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of a command beside its records."""

    left: int = 0
    """Processes that it had left in the background at its end, and that were ended then."""
    full: Path | None = None
    """Where the records are, and no room is any more."""

    @classmethod
    def of(cls, folder: Path, *, left: int = 0) -> Seen:
        return cls(left, None if (free_bytes(folder) or 0) > _FULL_BYTES else folder.parent)


def nothing_recorded(command: Sequence[str], ranks: Sequence[Rank], status: int | None, warmup: int, seen: Seen) -> str:
    """The likely reason why no step was measured."""
    if os.environ.get(DISABLE) == "1":
        return f"nothing was recorded: {DISABLE}=1 turns the agent off"
    if seen.full is not None:
        return f"nothing was recorded: {_full(seen.full)}"
    errors = [rank.error for rank in ranks if rank.error is not None]
    if errors:
        return f"nothing was recorded: the agent failed: {errors[0]}"
    steps = max((rank.discarded for rank in ranks if rank.seen), default=0)
    if steps:
        return (
            f"nothing was measured: the training ended after {steps} step{'s' if steps > 1 else ''}, all of them "
            f"discarded as warm-up (--warmup {warmup}; the first step never counts)"
        )
    reasons = [rank.missing["step_ms"] for rank in ranks if "step_ms" in rank.missing]
    if reasons:
        return f"nothing was recorded: {reasons[0]}"
    if any(rank.end == "exit" for rank in ranks):
        return "nothing was measured: the training ended after its first step, whose beginning is not known"
    flag = interpreter_flag(command)
    if flag is not None:
        return (
            f"nothing was recorded: python -{flag} {_WITHOUT_SITE[flag]}, so zftune's agent cannot start; "
            "run the script without it"
        )
    if status is None or status < 0:
        signal = "" if status is None else f" by signal {-status}"
        return f"nothing was recorded: the command was killed{signal} before a training step ended"
    if status > 0:
        return f"nothing was recorded: the command ended with exit code {status} before a training step ended"
    if seen.left:
        return (
            f"nothing was recorded: the command ended and left {_processes(seen.left)} in the background, which "
            f"{_were(seen.left)} ended with it; run the training in the foreground"
        )
    return f"nothing was recorded: {_NO_STEP}"


def waits_for(folder: Path, warmup: int) -> str | None:
    """What a profile waits for that has seen no step to measure; None: it has seen one."""
    ranks = read_records(folder)
    if any(rank.steps for rank in ranks):
        return None
    seen = max((rank.seen for rank in ranks), default=0)
    if ranks:
        return f"still waiting for a step to measure: {seen + 1} so far, of which --warmup discards {warmup}"
    return f"still waiting for the first optimizer step of a Python that zftune's agent can enter{_compiling()}"


def _compiling() -> str:
    """What keeps a training from its first step that needs one of torch's extensions; "" where none is locked."""
    lock = next(iter(extension_locks(os.environ)), None)
    if lock is None:
        return ""
    if lock.is_left_over:
        return f"; {lock.sentence}: whatever needs it hangs. End this run, remove it ({lock.removal}), and start again"
    return f"; {lock.sentence}"


def _full(folder: Path) -> str:
    return f"'{folder}', where the records are, is full; make room there, or set TMPDIR to a folder that has some"


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


def _were(count: int) -> str:
    return "were" if count > 1 else "was"


def remarks(ranks: Sequence[Rank], chosen: Sequence[Rank], steps: int, seen: Seen) -> Iterator[str]:
    """What else a person should know about the records."""
    for rank in chosen:
        if rank.error is not None:
            yield f"rank {rank.rank}: the agent failed: {rank.error}"
    short = [rank for rank in chosen if len(rank.steps) < steps]
    if short:
        reason = "the training ended before"
        if seen.full is not None:
            reason = _full(seen.full)
        elif seen.left:
            reason = (
                f"the command had ended, and {_processes(seen.left)} in the background {_were(seen.left)} ended with it"
            )
        yield f"{len(short[0].steps)} of {steps} steps were measured: {reason}"
    world = max((rank.header["world_size"] for rank in chosen), default=0)
    if 0 < len(chosen) < world:
        yield f"{len(chosen)} of {world} ranks were recorded here"
    left_out = sum(bool(rank.steps) for rank in ranks) - len(chosen)
    if left_out > 0:
        yield f"{left_out} more training process{'es' if left_out > 1 else ''} of the same rank left out of the profile"
    unreadable = sum(rank.unreadable for rank in ranks)
    if unreadable:
        yield f"{unreadable} line{'s' if unreadable > 1 else ''} of the records could not be read"


def interpreter_flag(command: Sequence[str]) -> str | None:
    """The flag of a Python interpreter that keeps the agent out, such as "I"; looks at the command itself only."""
    program = Path(command[0]).name
    if not program.startswith("python") or shutil.which(command[0]) is None:
        return None
    for argument in command[1:]:
        if not argument.startswith("-") or argument in ("-c", "-m", "-"):
            return None
        letters = re.split("[WXcm]", argument[1:], maxsplit=1)[0]  # what follows these is their value
        found = next((flag for flag in letters if flag in _WITHOUT_SITE), None)
        if not argument.startswith("--") and found is not None:
            return found
    return None


_NOT_SWITCHED = "only the built-in workload can be switched to other systems"
_NOT_PROFILED = "a command is not run under torch.profiler, which would slow it down"
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

    Raises:
        ProfileError: the document breaks its own schema.
    """
    from zftune.telemetry import hardware, hw_id, software

    main = ranks[0]
    missing = dict(main.missing)
    machine, runtime = hardware(), runtime_of(main, missing)
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
        "loss": derive.loss([step.get("loss") for step in main.steps], missing),
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
        **{name: main.model[name] for name in ("loader_workers", "learning_rates") if name in main.model},
    }


def _workload(model: Mapping[str, Any]) -> dict[str, Any]:
    names = ("model", "parameters", "trainable", "dtype", "micro_batch", "sequence")
    return {**{name: model.get(name) for name in names}, "text": None}


def _versions(main: Rank) -> dict[str, str]:
    """What the command itself ran on, which may be another installation."""
    return {name: main.header[name] for name in ("python", "torch") if isinstance(main.header.get(name), str)}


def _measured(main: Rank, missing: dict[str, str]) -> dict[str, Any]:
    step_ms = derive.step_ms(step["step_ms"] for step in main.steps)
    stall = derive.stall([step["stall_ms"] for step in main.steps], step_ms["mean"])
    hidden = main.mean("hidden_ms")
    if stall is None:
        missing.setdefault("stall", _NOT_RECORDED if main.header.get("has_stream") else derive.NO_STREAM)
    if hidden is None:
        missing.setdefault("hidden_ms_per_step", missing.get("stall", _NOT_RECORDED))
    return {
        "step_ms": step_ms,
        "phases_ms": _phases(main),
        "stall": stall,
        "idle": None,
        "thread_lines": derive.thread_lines(main.lines, step_ms["mean"]),
        "hidden_ms_per_step": hidden,
        "waits_ms": derive.mean_of([step["waits_ms"] for step in main.steps]),
        "overhead_fraction": sum(step.get("overhead_ms", 0.0) for step in main.steps)
        / sum(step["step_ms"] for step in main.steps)
        + (main.lines or {}).get("cost", 0.0),
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
    memory: dict[str, Any] = {"device_peak_bytes": None}
    if runtime is None:
        uses = ("state", "log", "staging", "peak")
        return {**dict.fromkeys(FIELDS), "memory": memory | {f"host_{use}_bytes": None for use in uses}}
    missing["memory.device_peak_bytes"] = _NOT_RECORDED
    rig_gbps = None if runtime.rig is None else runtime.rig["host_gbps"]
    return {
        "knobs": derive.knobs(runtime.config, runtime.stats),
        "link": derive.link(runtime.stats, runtime.model_bytes),
        "host": derive.host(runtime.stats, rig_gbps, runtime.engine, missing),
        "selection": derive.selection(runtime.stats, missing),
        "staleness": derive.staleness(runtime.stats, missing),
        "movement": derive.movement(runtime.stats, runtime.config, missing),
        "memory": {**memory, **derive.host_memory(runtime.host_bytes)},
    }


def _rank(rank: Rank) -> dict[str, Any]:
    step_ms = derive.step_ms(step["step_ms"] for step in rank.steps)
    return {"rank": rank.rank, "steps": len(rank.steps), "step_ms": step_ms, "phases_ms": _phases(rank)}


def _per_step(main: Rank) -> list[dict[str, Any]]:
    return [
        {
            "step": step["index"] + 1,
            "begin_ms": begin_ms,
            "step_ms": step["step_ms"],
            "phases_ms": _known_phases(main, step["phases_ms"]),
            "stall_ms": step["stall_ms"],
            "waits_ms": step["waits_ms"],
            "loss": derive.finite(step.get("loss")),
        }
        for step, begin_ms in zip(main.steps, _begins_ms(main), strict=True)
    ]


def _begins_ms(main: Rank) -> list[float]:
    """When steps began: with a stream on its timeline, as their lengths are, else by the thread's clock."""
    if main.header.get("has_stream"):
        return [0.0, *itertools.accumulate(step["step_ms"] for step in main.steps[:-1])]
    return [(step["begin_ns"] - main.begin_ns) / 1e6 for step in main.steps]


def _uuids(ranks: Sequence[Rank]) -> list[str] | None:
    uuids = [rank.header.get("device_uuid") for rank in ranks]
    return [str(uuid) for uuid in uuids] if all(uuids) else None


def _explain(document: dict[str, Any], ranks: Sequence[Rank]) -> None:
    main, missing = ranks[0], document["missing"]
    if not main.has_batches:
        missing |= dict.fromkeys(("phases_ms.data", "per_step.phases_ms.data"), _NO_BATCH)
    if not all(rank.has_batches for rank in ranks):
        missing["ranks.phases_ms.data"] = _NO_BATCH
    missing |= {
        "seed": "the command seeds itself",
        "workload.text": "the command reads its own data",
        "idle": _NOT_PROFILED,
        "practicality": _NOT_SWITCHED,
        "baselines": _NOT_SWITCHED,
    }
    if document["thread_lines"] is None:
        missing["thread_lines"] = _NOT_RECORDED if document["rig"] is None else derive.SIMULATED_THREAD
    if any(step["stall_ms"] is None for step in main.steps):
        missing["per_step.stall_ms"] = missing.get("stall", _NOT_RECORDED)
    if any(step["loss"] is None for step in document["per_step"]):
        missing["per_step.loss"] = missing.get("loss", "some steps had none that is a finite number")
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
    sources["thread_lines"] = "sampled frames"
    sources |= {"waits_ms": "wall clock", "overhead_fraction": "wall clock", "host": "wall clock", "roofs": clock}
    sources |= dict.fromkeys(("link", "selection", "staleness", "movement"), "count")
    sources["loss"] = next((step["loss_source"] for step in main.steps if step.get("loss_source")), "backward")
    known = {name: source for name, source in sources.items() if document[name] is not None}
    if document["host"] is not None:
        known["host.bytes_per_element"] = "count"
        if document["host"]["ceiling_gbps"] is not None:
            known["host.ceiling_gbps"] = "rig" if document["rig"] is not None else "bandwidth probe"
    if document["knobs"] is not None:
        known["memory"] = "count"
    return known
