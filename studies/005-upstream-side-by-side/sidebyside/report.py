"""Tables: for the terminal and for the README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from sidebyside.analysis import Claim, Estimate, Records, Row
from sidebyside.setting import NO_OFFLOAD, SYSTEMS

HEADS = (
    "",
    "step ms, mean",
    "processor ms",
    "p50",
    "p95",
    "p95/p50",
    "of windows",
    "forward, backward ms",
    "host bytes an element",
    "loss, equal steps",
    "loss, equal time",
)
_VERDICTS = {True: "holds", False: "FAILS", None: "not judged"}


def title_of(name: str, records: Records) -> str:
    """What a size's table is about."""
    first = next(iter(records[0]["systems"].values()))
    plain = sum(record["systems"][NO_OFFLOAD]["held_out"]["0"] for record in records) / len(records)
    seeds = "one seed" if len(records) == 1 else f"{len(records)} seeds"
    return (
        f"{name}: {first['elements'] / 1e6:.1f} million parameters, {len(first['losses'])} steps, {seeds}; "
        f"held-out loss before {plain:.4f}"
    )


def cells(rows: Mapping[str, Row]) -> list[list[str]]:
    """A line for each system."""
    return [
        [
            name,
            f"{row.mean_ms:.1f}",
            f"{row.processor_ms:.1f}",
            f"{row.p50_ms:.1f}",
            f"{row.p95_ms:.1f}",
            f"{row.spread:.2f}",
            f"{row.window_spread:.2f}",
            f"{row.backward_ms:.1f}",
            f"{row.bytes_per_element:.1f}",
            _loss(row.losses),
            _loss(row.at_equal_time),
        ]
        for name, row in rows.items()
    ]


def _loss(found: Estimate) -> str:
    return f"{found.mean:.4f}" if found.error is None else f"{found.mean:.4f} ± {found.error:.4f}"


def table_of(name: str, records: Records, rows: Mapping[str, Row]) -> Table:
    """One size."""
    table = Table(title=title_of(name, records))
    for head in HEADS:
        table.add_column(head, justify="right" if head else "left")
    for line in cells(rows):
        table.add_row(*line)
    return table


def claims_table(claims: Sequence[Claim]) -> Table:
    """What should hold."""
    table = Table(title="At the largest size")
    for head in ("claim", "found", ""):
        table.add_column(head)
    for claim in claims:
        table.add_row(claim.text, claim.found, _VERDICTS[claim.holds])
    return table


def markdown(sizes: Mapping[str, tuple[Records, Mapping[str, Row]]], claims: Sequence[Claim], where: str) -> str:
    """All of it, for `results/table.md`."""
    lines = [where, ""]
    for name, (records, rows) in sizes.items():
        lines += [f"**{title_of(name, records)}**", "", _line(HEADS), _line(["---", *["---:"] * (len(HEADS) - 1)])]
        lines += [*(_line(line) for line in cells(rows)), ""]
    lines += [_line(("at the largest size", "found", "")), _line(["---"] * 3)]
    lines += [_line((claim.text, claim.found, _VERDICTS[claim.holds])) for claim in claims]
    return "\n".join(lines) + "\n"


def where_of(provenance: Mapping[str, Any], shares: Sequence[float], deepspeed: str) -> str:
    """Machine, versions, threads, and what others did meanwhile."""
    hardware, software = provenance["hardware"], provenance["software"]
    threads = "; ".join(
        f"{name} {system.torch_threads}" + (f" + {system.host_threads}" if system.overlapped else "")
        for name, system in SYSTEMS.items()
    )
    return (
        f"{hardware['cpu_model']}, {hardware['usable_cores']} cores; torch {software['torch']}, DeepSpeed {deepspeed}. "
        f"Threads (training + host update where they run side by side): {threads}. "
        f"Other processes took {min(shares):.1%} to {max(shares):.1%} of the processors."
    )


def _line(parts: Sequence[str]) -> str:
    return "| " + " | ".join(parts) + " |"
