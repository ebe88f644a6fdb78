"""Part 3: predicted memory beside a replay of what 200 random models allocated."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from studykit import Results, code_digest, percentile

from planning.cases import random_case, run_case

CASES, QUICK_CASES = 200, 4
CHOSEN_EACH = 4
_PARTS = ("choosing", "closed_form", "memory", "rates", "simulate", "split")
CODE = (
    "runtime/zenflow",
    *(f"zftune/planner/{part}.py" for part in _PARTS),
    *(f"studies/012-planner/planning/{part}.py" for part in ("allocator", "cases", "record")),
)


def study(
    results: Results, *, quick: bool, again: bool, tell: Callable[[str, int, int], None]
) -> list[Mapping[str, Any]]:
    """Run the cases that are not there yet."""
    digest, found = code_digest(*CODE), []
    count = QUICK_CASES if quick else CASES
    for seed in range(count):
        inputs = {"seed": seed, "case": dataclasses.asdict(random_case(seed)), "code": digest}
        record = None if again else results.load(f"memory-{seed:03}", inputs)
        if record is None:
            tell(f"memory: case {seed}", seed, count)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # transformers renames its options
                figures = run_case(random_case(seed), chosen=seed % CHOSEN_EACH == 0)
            record = results.save(f"memory-{seed:03}", inputs, figures)
        found.append(record["figures"])
    return found


def verdicts(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]]:
    """Each promise and whether it was kept."""
    ran = [one for one in found if "reserved_bytes" in one]
    chosen = [one for one in ran if one["chosen"]]
    over = [one for one in ran if one["reserved_bytes"] > one["predicted_bytes"]]
    state = [one for one in ran if _differs(one)]
    log = [one for one in ran if one["host_allocated"]["log"] > one["host_predicted"]["log"]]
    return [
        (f"reserved memory above its prediction in {len(over)} of {len(ran)} cases", not over),
        (f"of {len(chosen)} settings that the planner chose, {sum(map(over.count, chosen))} ran out", not over),
        (f"the host's state and staging other than predicted in {len(state)} cases", not state),
        (f"the host's log larger than predicted in {len(log)} cases", not log),
    ]


def _differs(one: Mapping[str, Any]) -> bool:
    return any(one["host_allocated"][use] != one["host_predicted"][use] for use in ("state", "staging"))


def summary(found: Sequence[Mapping[str, Any]]) -> str:
    """How much is predicted too much; the allowance for segments, which only small models notice, left out."""
    ran = [one for one in found if "reserved_bytes" in one]
    bare = sorted((one["predicted_bytes"] - one["by_use"]["segments"]) / one["allocated_bytes"] for one in ran)
    share = [f"{percentile(bare, part):.2f}" for part in (0.05, 0.5, 0.95)]
    return f"predicted without the allowance for segments, over allocated: median {share[1]} ({share[0]} to {share[2]})"
