"""Upstream's knobs as settings of a search, and back: which ones it has, and what they mean there.

Facts are those of DeepSpeed 0.19.6. Under `overlap_step` upstream hands a window to its optimizer process when the
window closes, and applies what came of it when the next one closes: a whole window later. There is no `apply_lag`;
the settings here have `apply_lag` = `update_interval`. Each window is one update with its mean gradient.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zftune.doctor.software import defects
from zftune.ds_config.facts import GOOD, ZENFLOW_DEFAULTS, scrambles
from zftune.ds_config.reading import offloads, stage_of
from zftune.errors import BadInputError, ProfileError
from zftune.integrations.deepspeed.named import named_by, script_of, written_in
from zftune.integrations.deepspeed.presets import apply
from zftune.quality import assumed_coverage
from zftune.store.types import QUALITIES, STALENESS, Quality
from zftune.telemetry.fingerprint import installed
from zftune.text import one_of
from zftune.tuner import space as tuning
from zftune.tuner.space import (
    OFFLOAD_RATIOS,
    TOPK_RATIOS,
    UPDATE_INTERVALS,
    Dimension,
    Setting,
    Space,
    upstream_staleness_steps,
)

PUBLISHED = replace(tuning.PUBLISHED, deferred_update="mean")
"""The published setting as upstream trains it: the budget where a ds_config has no `zenflow` section."""
_KEPT = ("full_warm_up_rounds", "pt_reserved_cores_perc", "auto_ratio")
"""Knobs of the user's `zenflow` section that no trial changes."""
_SHARE = ("topk_ratio", "overlap_step")


@dataclass(frozen=True, slots=True)
class Upstream:
    """A ds_config as the script passes it to DeepSpeed.

    Args:
        config: all of it.
        version: of DeepSpeed.
    """

    config: Mapping[str, Any]
    version: str

    @property
    def zero(self) -> Mapping[str, Any]:
        """Its section `zero_optimization`."""
        found = self.config.get("zero_optimization")
        return found if isinstance(found, Mapping) else {}

    @property
    def section(self) -> Mapping[str, Any] | None:
        """Its `zenflow` section; None: it has none."""
        found = self.zero.get("zenflow")
        return found if isinstance(found, Mapping) else None

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return int(self.zero.get("stage", 0))

    def start(self) -> Setting:
        """The setting that it has.

        Raises:
            BadInputError: upstream cannot train with it.
        """
        section = self.section
        if section is None:
            ratio = self.zero["offload_optimizer"].get("ratio", 1.0)
            return replace(PUBLISHED, topk_ratio=0.0, update_interval=1, apply_lag=1, overlap_step=False,
                           offload_ratio=ratio)  # fmt: skip
        interval = section.get("update_interval", "auto")
        if not isinstance(interval, int):
            raise BadInputError(
                f"zero_optimization.zenflow.update_interval is {interval!r}; it must be an integer: upstream's "
                "automatic interval turns all weights into NaN"
            )
        select = section.get("select_interval", "auto")
        counted = section.get("select_strategy") == "step" and isinstance(select, int)
        return replace(
            PUBLISHED,
            update_interval=interval,
            apply_lag=interval,
            select_interval=select if counted else "auto",
            **{name: section.get(name, ZENFLOW_DEFAULTS[name]) for name in _SHARE},
        )

    def knobs(self, setting: Setting) -> dict[str, Any]:
        """What a trial's ds_config is made with: the setting, and what the user has beside it."""
        section = self.section or {}
        return {**{name: section.get(name, ZENFLOW_DEFAULTS[name]) for name in _KEPT}, **setting.knobs()}

    def applied(self, setting: Setting) -> tuple[dict[str, Any], list[str]]:
        """The ds_config with a setting, and what is to be known about it.

        Raises:
            BadInputError: upstream cannot train with it.
        """
        applied = apply(self.config, self.knobs(setting), stage=self.stage, backend="deepspeed")
        return applied.config, applied.notes

    def warm_up(self, setting: Setting) -> int:
        """Steps before the first window of a setting."""
        section = self.section
        if setting != self.start():
            section = self.applied(setting)[0]["zero_optimization"].get("zenflow")
        return int((section or {}).get("full_warm_up_rounds", 0))

    def quality(self, asked: str | None) -> Quality:
        """What the user asked for, or what follows from the ds_config.

        Raises:
            BadInputError: it is none.
        """
        if asked is None:
            return "exact" if self.section is None else "published"
        return one_of("--quality", asked, QUALITIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamSpace(Space):
    """A space whose staleness is that of upstream's schedule."""

    def mean_staleness_steps(self, setting: Setting) -> float:
        return upstream_staleness_steps(setting)


def refuse_early(upstream: Upstream, asked: str | None) -> None:
    """Refuse what cannot be tuned whatever an engine makes of it, before anything trains.

    Args:
        upstream: the ds_config, and the version of DeepSpeed that trains with it.
        asked: quality, if one was asked for.

    Raises:
        BadInputError: nothing is tunable; says what to do.
        ProfileError: the version damages the model.
    """
    quality, version = upstream.quality(asked), upstream.version
    has_scheduler = upstream.config.get("scheduler") is not None
    if quality == "exact" and not _ratios(upstream, has_scheduler=has_scheduler, sub_groups=2):
        raise BadInputError(_nothing_exact(upstream, asked))
    upstream.start()
    broken = next((found for found in defects(version) if found.status == "broken"), None)
    if broken is not None and upstream.stage != 3 and (upstream.section is not None or quality != "exact"):
        raise ProfileError(f"{broken.finding} {broken.fix or ''}".strip().rstrip("."))


def refuse_before_a_run(argv: Sequence[str], asked: str | None) -> None:
    """Refuse by what the command names, and by the DeepSpeed that is installed beside it.

    Args:
        argv: the command and its arguments.
        asked: quality, if one was asked for.

    Raises:
        BadInputError, ProfileError: as of `refuse_early`.
    """
    version, program = installed("deepspeed"), shutil.which(argv[0])
    is_here = program is not None and Path(program).parent == Path(sys.executable).parent
    sources = [source.config for source in named_by(argv, os.environ)] or list(written_in(script_of(argv)))
    offloading = [config for config in sources if stage_of(config) in (1, 2, 3) and offloads(config)]
    if version is not None and is_here and len(offloading) == len(sources) == 1:
        refuse_early(Upstream(offloading[0], version), asked)


def space_for(upstream: Upstream, asked: str | None, *, has_loss: bool, has_scheduler: bool, sub_groups: int) -> Space:
    """The space of a quality.

    Args:
        upstream: the ds_config.
        asked: quality, if one was asked for.
        has_loss: whether the loss is seen, so that training that goes wrong is.
        has_scheduler: whether a scheduler changes the learning rate.
        sub_groups: of the optimizer: upstream splits between them.

    Raises:
        BadInputError: nothing is tunable; says what to do.
    """
    quality, start = upstream.quality(asked), upstream.start()
    space = UpstreamSpace(base=start, quality=quality, dimensions=(), budget=0.0, coverage=assumed_coverage)
    if quality == "exact":
        ratios = _ratios(upstream, has_scheduler=has_scheduler, sub_groups=sub_groups)
        if not ratios:
            raise BadInputError(_nothing_exact(upstream, asked))
        return replace(space, dimensions=(Dimension("offload_ratio", ratios),), fixed_because=_EXACT)
    if not has_loss:
        raise BadInputError(
            f"--quality '{quality}': the script passes no loss to engine.backward(), so that a training that goes "
            "wrong would not be noticed, and nothing else is tunable"
        )
    upstream.applied(PUBLISHED)
    budget = space.cost(PUBLISHED if upstream.section is None else start)
    dimensions = (
        Dimension("topk_ratio", tuple(sorted({*TOPK_RATIOS[1:], *([start.topk_ratio] if start.topk_ratio else [])}))),
        Dimension("update_interval", UPDATE_INTERVALS),
        Dimension("overlap_step", (False, True)),
    )
    return replace(space, dimensions=dimensions, budget=STALENESS[quality] * budget)


_EXACT = "exact keeps the plain optimizer's trajectory"


def _ratios(upstream: Upstream, *, has_scheduler: bool, sub_groups: int) -> tuple[float, ...]:
    """Choices of Twin-Flow's ratio: upstream has it at stage 3 only, in whole sub-groups, and without a scheduler."""
    possible = upstream.section is None and upstream.stage == 3 and not has_scheduler and sub_groups > 1
    return OFFLOAD_RATIOS if possible else ()


def _nothing_exact(upstream: Upstream, asked: str | None) -> str:
    default = " (the default where a ds_config has no zenflow section)" if asked is None else ""
    broken = scrambles(upstream.version) and upstream.stage != 3
    needs = f", for which {upstream.version} is not to be used: pip install deepspeed=={GOOD}" if broken else ""
    return (
        f"--quality 'exact'{default}: upstream's DeepSpeed has no setting at ZeRO stage {upstream.stage} here that "
        "changes only its speed; give --quality published or loose, which let it apply gradients later "
        f"(ZenFlow{needs})"
    )


def seeds(space: Space) -> Sequence[Setting]:
    """What is tried first, best first: upstream moves and updates everything whatever k is, so long windows win."""
    allowed = [setting for setting in space.settings() if setting.overlap_step or setting.topk_ratio == 0]
    longest = sorted(allowed, key=lambda one: (-one.update_interval, one.topk_ratio))[:1]
    half = [one for one in allowed if longest and one.update_interval <= longest[0].update_interval / 2]
    return [*longest, *sorted(half, key=lambda one: (-one.update_interval, one.topk_ratio))[:1]]
