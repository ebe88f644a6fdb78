"""Presets on the screen. All text of a preset is shown as text: no markup, and nothing that steers a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zftune.profile.units import number, percent
from zftune.store.document import escaped
from zftune.store.types import Preset, PresetState

_BASELINES = {
    "start": "the starting point",
    "planner": "the planner's setting",
    "zero_offload": "ZeRO-Offload",
    "no_offload": "no offloading",
    "deepspeed": "DeepSpeed's ZenFlow",
}


def listed(presets: Iterable[Preset], hw_id: str | None) -> RenderableType:
    """A table of presets; those of this machine are marked."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("preset", "model", "hardware", "quality"):
        table.add_column(title, overflow="fold")
    for title in ("step", "gain"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for preset in presets:
        here = " (here)" if preset.key.hw_id == hw_id else ""
        cells = (
            preset.name,
            preset.model.name or preset.key.model_id,
            machine(preset) + here,
            preset.key.quality,
            f"{number(preset.evidence.step_ms)} ms",
            gain(preset),
            state(preset),
        )
        table.add_row(*(Text(escaped(cell)) for cell in cells))
    return table if table.row_count else Text("There are no presets yet.")


def shown(preset: Preset) -> RenderableType:
    """Everything about a preset."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="dim", overflow="fold")
    table.add_column(overflow="fold")
    for name, value in facts(preset).items():
        table.add_row(Text(escaped(name)), Text(escaped(value)))
    return Group(Text(escaped(preset.name), style="bold"), table)


def differences(a: Preset, b: Preset) -> list[dict[str, str | None]]:
    """What two presets do not have in common: {"name", "a", "b"}."""
    of_a, of_b = facts(a), facts(b)
    names = list(dict.fromkeys([*of_a, *of_b]))
    rows = [{"name": name, "a": of_a.get(name), "b": of_b.get(name)} for name in names]
    return [row for row in rows if row["a"] != row["b"]]


def compared(rows: list[dict[str, str | None]], titles: tuple[str, str]) -> RenderableType:
    """Differences as a table."""
    if not rows:
        return Text("They do not differ.")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("", *titles):
        table.add_column(Text(escaped(title)), overflow="fold")
    for row in rows:
        table.add_row(*(Text(escaped(row[name] or "–")) for name in ("name", "a", "b")))
    return table


def facts(preset: Preset) -> dict[str, str]:
    """Everything about a preset but its name, in words."""
    key, evidence = preset.key, preset.evidence
    found = {
        "state": state(preset),
        "model": f"{preset.model.name or 'unnamed'} ({key.model_id})",
        "hardware": f"{machine(preset)} ({key.hw_id})",
        "backend": key.backend,
        "ZeRO stage": str(key.stage),
        "dtype": key.dtype,
        "ranks": key.ranks,
        "micro-batch": str(key.micro_batch),
        "sequence": f"up to {key.sequence} tokens",
        "checkpointing": "yes" if key.checkpointing else "no",
        "quality": key.quality,
    }
    found |= {f"knob {name}": _value(value) for name, value in preset.knobs.items()}
    found |= {
        "step": f"{number(evidence.step_ms)} ms",
        "against": f"{number(evidence.baseline_step_ms)} ms, {_BASELINES[evidence.baseline]}",
        "gain": gain(preset),
        "measured": f"{_day(evidence.measured_unix_s)}, {evidence.measurements} measurements, {evidence.steps} steps",
    }
    if preset.usable_cores is not None:
        found["usable cores"] = f"{preset.usable_cores:g}"
    if preset.ratios is not None:
        found["host over compute"] = f"{preset.ratios.host_over_compute:.3g}"
        found["link over compute"] = f"{preset.ratios.link_over_compute:.3g}"
    return found | {f"version {name}": value for name, value in sorted(preset.versions.items())}


def gain(preset: Preset) -> str:
    """The saved share of the baseline's step, with its error."""
    share, error = preset.evidence.gain, preset.evidence.gain_error
    sign = "−" if share < 0 else ""
    return f"{sign}{percent(abs(share))}" + ("" if error is None else f" ± {percent(error)}")


def state(preset: Preset) -> str:
    """In words."""
    if preset.state is PresetState.WITHDRAWN:
        return f"withdrawn after {preset.lost_comparisons} lost comparisons"
    return "provisional (imported)" if preset.imported else "measured"


def machine(preset: Preset) -> str:
    """The rig, the GPU or the CPU."""
    found = preset.hardware
    return f"rig {found.rig}" if found.rig else found.gpu or found.cpu_model or found.hw_id


def as_json(preset: Preset, document: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's document with what only this store knows of it."""
    return {
        **document,
        "state": preset.state.value,
        "provisional": preset.imported,
        "lost_comparisons": preset.lost_comparisons,
        "created_unix_s": preset.created_unix_s,
        "gain": preset.evidence.gain,
    }


def _day(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(unix_s))


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
