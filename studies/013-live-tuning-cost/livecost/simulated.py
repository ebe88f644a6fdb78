"""The searches in simulated time: where their steps go, and what those outside measurements take."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from livecost.gaps import extra, gaps
from livecost.searching import PatientDesk, Run, Searched
from zftune.tuner.messages import sentence

ALLOWED = 0.01
KINDS = {
    "incumbent": "measured, the incumbent",
    "others": "measured, other settings",
    "discarded": "the first window after a change, which does not count",
    "waiting": "until the window's end, where knobs may change",
    "settling": "the incumbent, just after a change",
    "plain": "the incumbent, nobody thinks (of this study)",
    "thinking": "the incumbent, somebody thinks",
}

Figures = Mapping[str, Any]


def searched(seed: int, most: int, worker: type[PatientDesk] = PatientDesk) -> dict[str, Any]:
    """One search."""
    with tempfile.TemporaryDirectory() as folder, Run(seed, most, Path(folder), real_time=False) as run:
        return figures_of(run.search(worker))


def figures_of(found: Searched) -> dict[str, Any]:
    """What it showed."""
    counts: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for one in found.handed:
        for kind, times in (
            ("incumbent" if one.of_incumbent else "others", one.measured),
            ("discarded", one.discarded),
        ):
            counts[kind] += len(times)
            counts["waiting"] -= len(times)
            seconds[kind] += sum(times) / 1e3  # type: ignore[assignment] # counters count anything
            seconds["waiting"] -= sum(times) / 1e3  # type: ignore[assignment]
    for step in found.steps:
        kind = "waiting" if step.kind == "trial" else step.kind
        counts[kind] += 1
        seconds[kind] += step.ms / 1e3  # type: ignore[assignment]
    closes = [step.number for step in found.steps if step.closed]
    of_gaps = gaps(found.steps)
    search = found.prepared.search
    return {
        "steps": {kind: counts[kind] for kind in KINDS},
        "seconds": {kind: round(seconds[kind], 6) for kind in KINDS},
        "thinking": [known for gap in of_gaps if (known := _times(extra(gap, closes))) is not None],
        "settling": [known for gap in of_gaps if (known := _times(extra(gap, closes, "settling"))) is not None],
        "changes": found.changes,
        "migrated_bytes": sum(step.migrated_bytes for step in found.steps),
        "measurements": search.measurements,
        "spent_s": search.cost.spent_s,
        "elapsed_s": search.cost.elapsed_s,
        "weights": found.weights,
        "balanced": found.balanced,
        "stopped": sentence(search.notes[-1]),
    }


def _times(found: Mapping[str, float] | None) -> dict[str, float] | None:
    """Those that are simulated."""
    return None if found is None else {name: round(found[name], 6) for name in ("extra_ms", "expected_ms")}


def beyond(runs: Sequence[Figures], kind: str) -> float:
    """What steps of a kind take beyond plain ones, as a share."""
    gaps = [gap for run in runs for gap in run[kind]]
    return float(sum(gap["extra_ms"] for gap in gaps) / sum(gap["expected_ms"] for gap in gaps))


def verdicts(runs: Sequence[Figures]) -> list[tuple[str, bool]]:
    """Each promise, and whether it was kept."""
    thinking = beyond(runs, "thinking")
    balanced, weights = (sum(run[name] for run in runs) for name in ("balanced", "weights"))
    return [
        (f"a step outside a measurement takes {thinking:+.2%} while somebody thinks", thinking <= ALLOWED),
        (f"{balanced} of {weights} ledgers are balanced after the search", balanced == weights),
    ]


def lines(runs: Sequence[Figures]) -> list[str]:
    """What was counted."""
    total = sum(sum(run["seconds"].values()) for run in runs)
    found = []
    for kind, name in KINDS.items():
        count, took = (sum(run[part][kind] for run in runs) for part in ("steps", "seconds"))
        found.append(f"{name}: {count} steps, {took:.1f} s, {took / total:.1%}")
    changes, moved = (sum(run[part] for run in runs) for part in ("changes", "migrated_bytes"))
    spent, elapsed = (sum(run[part] for run in runs) for part in ("spent_s", "elapsed_s"))
    return [
        f"{len(runs)} searches, {sum(run['measurements'] for run in runs)} measurements, {total:.1f} s",
        *found,
        f"{changes} changes of knobs, which move {moved / 1e6:.1f} MB of columns and their state",
        f"just after a change the incumbent's steps take {beyond(runs, 'settling'):+.1%}",
        f"exploring cost {spent:.1f} s beyond the incumbent, {spent / elapsed:.1%} of {elapsed:.1f} s, by their books",
    ]
