"""Putting the safe values in place."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from zftune.check.checking import check
from zftune.check.findings import Change, Finding, Report
from zftune.check.subject import FaultOfPreset
from zftune.integrations.deepspeed.ds_config import Source, at, put
from zftune.store.types import Backend

_MOST = 200  # far more than there are settings: a circle of changes must not go on for ever


def fix(
    source: Source,
    *,
    backend: Backend | None,
    version: str | None,
    world_size: int | None = None,
    fault_of_preset: FaultOfPreset | None = None,
) -> tuple[dict[str, Any], list[tuple[Change, Finding]], Report]:
    """Apply changes one finding after another, since one safe value may need another one.

    Args:
        source: the ds_config; not changed.
        backend: for which to judge.
        version: of DeepSpeed.
        world_size: number of ranks; None: any.
        fault_of_preset: as `check` takes it.

    Returns:
        The changed ds_config; every change with the finding that it mends; what is left to be found.
    """
    config = copy.deepcopy(source.config)
    done: list[tuple[Change, Finding]] = []
    for _ in range(_MOST):
        as_it_is = Source(config, hugging_face=source.hugging_face)
        report = check(
            as_it_is, backend=backend, version=version, world_size=world_size, fault_of_preset=fault_of_preset
        )
        helping = [finding for finding in report.findings if _helps(config, finding)]
        finding = min(helping, key=_moves, default=None)
        if finding is None:
            break
        for change in finding.changes:
            put(config, change.path, change.value)
            done.append((change, finding))
    return config, done, report


def _moves(finding: Finding) -> bool:
    """Whether it goes to another backend. That comes last: what can be mended for both is."""
    return any(change.path == ("zftune", "backend") for change in finding.changes)


def _helps(config: Mapping[str, Any], finding: Finding) -> bool:
    """Whether its changes are not made yet."""
    return any(at(config, change.path) != change.value for change in finding.changes)


def document(done: list[tuple[Change, Finding]], left: Report) -> dict[str, Any]:
    """What was changed, as JSON.

    Args:
        done: the changes.
        left: what was found after them.
    """
    return {
        "ok": left.ok,
        "changes": [{**change.document(), "rule": finding.rule} for change, finding in done],
        "left": [finding.document() for finding in left.findings if finding.is_fault],
    }
