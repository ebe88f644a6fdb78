"""What the agents wrote: a file of JSON lines for each training process (`zftune.agent` says what is in them).

The reader takes what it can use. A file ends where its process was killed or the disk was full, so a torn line is
dropped; what is no record at all is counted.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zftune.frames import MAX_LINES
from zftune.profile.schema import CAUSES, PHASES

Row = dict[str, Any]

_MAX_BYTES = 256 << 20
_DOTTED = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")
_MODEL_ID = re.compile(r"[0-9a-f]{16}")
_DEVICE = ("device", "device_uuid", "has_stream", "source")  # another training may be on another device
_COUNTS = ("parameters", "micro_batch", "sequence", "tokens_per_step", "model_bytes")
_TEXTS = ("model", "dtype")


@dataclass(slots=True)
class Rank:
    """One training process."""

    header: Row
    model: Row = field(default_factory=dict)
    steps: list[Row] = field(default_factory=list)
    """Measured ones only, in order."""
    seen: int = 0
    missing: dict[str, str] = field(default_factory=dict)
    lines: Row | None = None
    """What a `FrameSampler` saw."""
    end: str | None = None
    """"measured", "exit" or "failed"; None where the process was killed."""
    error: str | None = None
    unreadable: int = 0

    @property
    def rank(self) -> int:
        return int(self.header["rank"])

    @property
    def discarded(self) -> int:
        """Steps before the measured ones; the process's first one is not recorded."""
        return int(self.steps[0]["index"]) if self.steps else self.seen + 1

    @property
    def begin_ns(self) -> int:
        """When its first measured step began (CLOCK_MONOTONIC)."""
        return int(self.steps[0]["begin_ns"])

    @property
    def end_ns(self) -> int:
        return int(self.steps[-1]["end_ns"])

    @property
    def tokens_per_s(self) -> float | None:
        """Of this rank alone: the batches' own counts, else what the first of them held; None if not known."""
        counted = self.mean("tokens")
        tokens = self.model.get("tokens_per_step") if counted is None else counted
        mean_step_ms = sum(step["step_ms"] for step in self.steps) / len(self.steps)
        return 1e3 * tokens / mean_step_ms if tokens else None

    @property
    def has_batches(self) -> bool:
        """Whether a data loader was seen to give a batch in the measured steps."""
        return any(step[table].get("data") for step in self.steps for table in ("phases_ms", "waits_ms"))

    def mean(self, name: str) -> float | None:
        values = [step[name] for step in self.steps if step.get(name) is not None]
        return sum(values) / len(values) if len(values) == len(self.steps) else None


def read_records(folder: Path) -> list[Rank]:
    """All training processes that wrote, in the order of their ranks; processes of one rank in the order of time."""
    ranks = [rank for file in sorted(folder.glob("agent-*.jsonl")) if (rank := _read(file)) is not None]
    return sorted(ranks, key=lambda rank: (rank.rank, rank.header.get("began_ns", 0)))


def measured(ranks: Iterable[Rank]) -> list[Rank]:
    """One process of each rank: the one with the most measured steps, of those that have any."""
    best: dict[int, Rank] = {}
    for rank in ranks:
        if rank.steps and (rank.rank not in best or len(rank.steps) > len(best[rank.rank].steps)):
            best[rank.rank] = rank
    return [best[number] for number in sorted(best)]


def _read(file: Path) -> Rank | None:
    try:
        # The command may have put anything there: a pipe would never end to be opened, a link may lead anywhere.
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                return None
            lines = opened.read(_MAX_BYTES).split(b"\n")
    except OSError:
        return None
    rank: Rank | None = None
    unreadable = 0
    for line in lines[:-1]:  # the last one is empty, or torn
        row = _row(line)
        if rank is None and row is not None and row["kind"] == "header" and _is_header(row):
            rank = Rank(row)
        elif rank is None or row is None or not _take(rank, row):
            unreadable += 1
    if rank is not None:
        rank.unreadable = unreadable
    return rank


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("kind"), str) else None


def _take(rank: Rank, row: Row) -> bool:
    match row["kind"]:
        case "model":
            rank.model = _model(row)
        case "step" if _is_step(row):
            if row["measured"]:
                rank.steps.append(row)
            else:
                rank.seen += 1
        case "lines" if _is_lines(row):
            rank.lines = row
        case "missing" if _DOTTED.fullmatch(str(row.get("field"))) and _is_text(row.get("reason")):
            rank.missing[row["field"]] = row["reason"]
        case "end" if _is_text(row.get("reason")):
            rank.end = row["reason"]
            rank.error = row["error"] if _is_text(row.get("error")) else None
        case "restart" if _is_device(row):  # another training took over: nothing of the one before is of this profile
            rank.header |= {name: row[name] for name in _DEVICE if name in row}
            rank.model, rank.missing, rank.seen, rank.lines = {}, {}, 0, None
            rank.steps.clear()
        case "header":  # the process replaced itself by another (exec) and began again
            rank.unreadable += 1
        case _:
            return False
    return True


def _model(row: Row) -> Row:
    naturals = {"trainable": _is_natural, "loader_workers": _is_natural}
    checks = dict.fromkeys(_COUNTS, _is_count) | dict.fromkeys(_TEXTS, _is_text) | naturals
    model = {name: row[name] for name, check in checks.items() if check(row.get(name))}
    if _MODEL_ID.fullmatch(str(row.get("model_id"))):
        model["model_id"] = row["model_id"]
    systems = row.get("systems")
    model["systems"] = [system for system in systems if _is_text(system)] if isinstance(systems, list) else []
    for name, kind in (("deepspeed", dict), ("checkpointing", bool)):
        if isinstance(row.get(name), kind):
            model[name] = row[name]
    rates = row.get("learning_rates")
    if isinstance(rates, list) and rates and all(_is_number(rate) for rate in rates):
        model["learning_rates"] = rates
    return {**model, "knobs": row.get("knobs")}


def _is_header(row: Row) -> bool:
    texts = row.get("script") is None or _is_text(row["script"])
    for name, alone in (("rank", 0), ("world_size", 1)):
        if row.get(name) is None:  # a process that could not even look
            row[name] = alone
    counts = _is_natural(row["rank"]) and _is_count(row["world_size"])
    return texts and _is_device(row) and counts and _is_natural(row.get("began_ns", 0))


def _is_device(row: Row) -> bool:
    return all(row.get(name) is None or _is_text(row[name]) for name in _DEVICE if name != "has_stream")


def _is_step(row: Row) -> bool:
    times = all(_is_natural(row.get(name)) for name in ("index", "begin_ns", "end_ns"))
    figures = _is_ms(row.get("step_ms")) and _is_ms(row.get("overhead_ms", 0.0)) and row["step_ms"] > 0
    tables = _is_table(row.get("phases_ms"), PHASES) and _is_table(row.get("waits_ms"), CAUSES)
    stall = row.setdefault("stall_ms", None) is None or _is_table(row["stall_ms"], CAUSES)
    spans = all(_is_span(span) for span in row.get("spans") or ())
    hidden = row.get("hidden_ms") is None or _is_ms(row["hidden_ms"])
    tokens = row.get("tokens") is None or _is_natural(row["tokens"])
    loss = row.get("loss") is None or isinstance(row["loss"], float)
    sources = row.get("loss_source") in (None, "backward", "log_loss")
    more = spans and hidden and tokens and loss and sources and isinstance(row.get("measured"), bool)
    return times and figures and tables and stall and more


def _is_lines(row: Row) -> bool:
    known = row.get("of") in ("idle", "step") and _is_natural(row.get("samples"))
    shares = all(_is_share(row.get(name)) for name in ("fraction", "cost"))
    lines = row.get("lines")
    return known and shares and isinstance(lines, list) and len(lines) <= MAX_LINES and all(map(_is_line, lines))


def _is_line(value: Any) -> bool:
    held = isinstance(value, dict) and _is_share(value.get("share")) and isinstance(value.get("within"), dict)
    return held and all(
        _is_text(one.get("file")) and _is_text(one.get("function")) and _is_natural(one.get("line"))
        for one in (value, value["within"])
    )


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_span(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and _is_text(value[0]) and all(map(_is_number, value[1:]))


def _is_table(value: Any, names: Iterable[str]) -> bool:
    return isinstance(value, Mapping) and set(value) <= set(names) and all(_is_ms(part) for part in value.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_ms(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_count(value: Any) -> bool:
    return _is_natural(value) and value > 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
