"""What was found as tables, a part each, from the figures of its measurements by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from claims import shapes

Figures = Mapping[str, Any]
Row = Sequence[str]
WANTED_TIMES, WANTED_LESS_STALL = 5.0, 0.85
_GIB = 1 << 30
USUAL = str(shapes.USUAL)
"""Tokens of a step on each GPU."""


def of(figures: Figures, prefix: str) -> dict[str, Any]:
    """The figures whose names begin so, by the rest of the name."""
    return {name.removeprefix(prefix): one for name, one in figures.items() if name.startswith(prefix)}


def times(found: Mapping[str, Any], system: str = "published") -> float:
    """How many times as fast as ZeRO-Offload a system is."""
    return float(found["ZeRO-Offload"]["step_ms"] / found[system]["step_ms"])


def less_stall(found: Mapping[str, Any], system: str = "published") -> float:
    """Share of ZeRO-Offload's stall that a system does not have."""
    return 1 - float(found[system]["stall_ms"] / found["ZeRO-Offload"]["stall_ms"])


def upstreams(found: Mapping[str, Any]) -> tuple[float, float]:
    """The same two of DeepSpeed's own ZenFlow, by its schedule: beside its own ZeRO-Offload; of a rig or a cell."""
    theirs, compute = found["upstream"], found["systems"]["no offload"]["step_ms"]
    zero, zen = theirs["ZeRO-Offload"], theirs["ZenFlow"]
    return zero / zen, 1 - (zen - compute) / (zero - compute)


RIG_HEADS = (
    "rig",
    "no offload, ms",
    "ZeRO-Offload",
    "exact",
    "k = 0.1, S = 4",
    "S = 16",
    "times ZeRO-Offload",
    "S = 16",
    "at most",
    "waits for",
    "less stall",
    "DeepSpeed's ZenFlow, times",
    "less stall",
)


def rig_rows(figures: Figures) -> Iterator[Row]:
    """Every rig."""
    for rig, found in of(figures, "rig--").items():
        systems = found["systems"]
        steps = [f"{systems[name]['step_ms']:,.0f}" for name in systems]
        theirs, their_stall = upstreams(found)
        most = systems["ZeRO-Offload"]["step_ms"] / systems["no offload"]["step_ms"]
        yield (
            rig,
            *steps,
            f"{times(systems):.2f}",
            f"{times(systems, 'S = 16'):.2f}",
            f"{most:.2f}",
            systems["published"]["bound_by"],
            f"{less_stall(systems):.1%}",
            f"{theirs:.2f}",
            f"{their_stall:.0%}",
        )


SHAPE_HEADS = (
    "model",
    "machine",
    "GPUs",
    "no offload, ms",
    "ZeRO-Offload",
    "k = 0.1, S = 4",
    "times",
    "S = 16, times",
    "waits for",
    "less stall",
    "most times, tokens",
    "five times at S = 4",
    "at S = 16",
    "DeepSpeed's ZenFlow, ms",
    "times its ZeRO-Offload",
)


def cells_of(figures: Figures) -> Iterator[tuple[str, str, int, Mapping[str, Any]]]:
    """Model, machine, GPUs, and what was planned by tokens."""
    for name, found in of(figures, "shape--").items():
        model, _, machine = name.partition("--")
        for gpus, by_tokens in found["gpus"].items():
            yield model, machine, int(gpus), by_tokens


def reaching(by_tokens: Mapping[str, Any], system: str) -> list[int]:
    """Tokens of a step at which a system is five times as fast as ZeRO-Offload."""
    return [int(tokens) for tokens, one in by_tokens.items() if times(one["systems"], system) >= WANTED_TIMES]


def shape_rows(figures: Figures) -> Iterator[Row]:
    """Every model, machine and number of GPUs at the usual tokens; None fits at others."""
    for model, machine, gpus, by_tokens in cells_of(figures):
        if USUAL not in by_tokens:
            yield model, machine, str(gpus), "does not fit", *[""] * (len(SHAPE_HEADS) - 4)
            continue
        systems = by_tokens[USUAL]["systems"]
        most = max(by_tokens, key=lambda tokens: times(by_tokens[tokens]["systems"]))
        five = [", ".join(map(str, reaching(by_tokens, system))) or "never" for system in ("published", "S = 16")]
        without = systems["no offload"]
        yield (
            model,
            machine,
            str(gpus),
            f"{without['step_ms']:,.0f}" + ("" if without["fits"] else " (does not fit)"),
            f"{systems['ZeRO-Offload']['step_ms']:,.0f}",
            f"{systems['published']['step_ms']:,.0f}",
            f"{times(systems):.1f}",
            f"{times(systems, 'S = 16'):.1f}",
            systems["published"]["bound_by"],
            f"{less_stall(systems):.0%}",
            f"{times(by_tokens[most]['systems']):.1f} at {most}",
            *five,
            f"{by_tokens[USUAL]['upstream']['ZenFlow']:,.0f}",
            f"{upstreams(by_tokens[USUAL])[0]:.1f}",
        )


TRAFFIC_HEADS = ("", "bytes a step over the model's", "(1 - k) (1 + 1 / S)")


def traffic_rows(figures: Figures) -> Iterator[Row]:
    """This runtime's settings, then upstream's systems."""
    for name, one in figures.get("traffic", {}).items():
        yield name, f"{one['over_model_bytes']:.3f}", f"{one['should_be']:.3f}"
    for name, one in figures.get("upstream", {}).items():
        detail = f"{one['down']:.2f} B an element down, {one['up']:.2f} up"
        yield f"DeepSpeed's {name}", f"{one['over_model_bytes']:.3f}", detail


SELECTION_HEADS = ("", "selection, bytes a step", "gradients, bytes", "times", "numbers a column")


def selection_rows(figures: Figures) -> Iterator[Row]:
    """Counted on ranks, then of the public models' shapes."""
    for ranks, one in of(figures, "selection--").items():
        yield (
            f"tiny, {ranks} ranks, counted",
            f"{one['selection_bytes']:,}",
            f"{one['gradient_bytes']:,}",
            f"{one['cheaper']:.0f}",
            "",
        )
    seen = set()
    for name, found in of(figures, "shape--").items():
        model = name.partition("--")[0]
        if model not in seen:
            seen.add(model)
            yield model, "", "", f"{found['cheaper_in_bytes']:,.0f}", f"{found['elements_a_column']:,.0f}"


SHARE_HEADS = ("model", "machine", "GPUs", "energies, ms", "reading gradients, ms", "of a step")


def selecting_share(cell: Mapping[str, Any]) -> float:
    """What choosing columns takes of a published setting's step."""
    taken = cell["selecting"]
    return float((taken["energies_ms"] + taken["reading_ms"]) / cell["systems"]["published"]["step_ms"])


def share_rows(figures: Figures) -> Iterator[Row]:
    """Of each shape of several GPUs."""
    for model, machine, gpus, by_tokens in cells_of(figures):
        if gpus > 1 and USUAL in by_tokens:
            taken = by_tokens[USUAL]["selecting"]
            shown = f"{taken['energies_ms']:.3f}", f"{taken['reading_ms']:.2f}"
            yield model, machine, str(gpus), *shown, f"{selecting_share(by_tokens['2048']):.2%}"


TUNED_HEADS = (
    "on",
    "published setting, ms",
    "tuned",
    "shorter",
    "tuned to",
    "late, steps (by hand)",
    "found after, s",
    "ended after, s",
    "steps",
    "measurements",
    "exploring cost, s",
)


def tuned_rows(figures: Figures) -> Iterator[Row]:
    """Every rig, then this CPU."""
    on_cpu = {f"this CPU, {name}": one for name, one in of(figures, "tuned-on-cpu--").items()}
    for name, one in {**of(figures, "tuned--"), **on_cpu}.items():
        shorter = 1 - one.get("ratio", one["tuned_ms"] / one["published_ms"])
        yield (
            name,
            f"{one['published_ms']:,.1f}",
            f"{one['tuned_ms']:,.1f}",
            f"{shorter:.1%}" + (f" ± {one['ratio_error']:.1%}" if "ratio_error" in one else ""),
            one["chosen"],
            f"{one['late_steps']:.1f} ({one['late_steps_by_hand']:.1f})",
            f"{one['reached_s']:,.1f}" if one["adopted"] else "never",
            f"{one['ended_s']:,.1f}",
            f"{one['steps']:,}",
            str(one["measurements"]),
            f"{one['spent_s']:,.1f}",
        )


TWIN_RIG_HEADS = ("rig", "ratio", "step, ms", "planned", "in turn", "state on the device")


def twin_rig_rows(figures: Figures) -> Iterator[Row]:
    """Ratios, measured on rigs."""
    for name, found in of(figures, "twin-flow--").items():
        rows = found["rows"]
        if "state_bytes" in rows[0]:
            whole = max(row["state_bytes"] for row in rows)
            for row in rows:
                steps = [f"{row[key]:,.1f}" for key in ("step_ms", "planned_ms", "in_turn_ms")]
                yield name, f"{row['ratio']:.2f}", *steps, f"{row['state_bytes'] / whole:.1%}"


TWIN_HEADS = ("", "ratio", "step, ms", "each GPU, GiB", "fits", "DeepSpeed offloads", "its order, ms", "GiB", "fits")


def twin_rows(figures: Figures) -> Iterator[Row]:
    """Ratios, planned."""
    for name, found in of(figures, "twin-flow--").items():
        for row in found["rows"] if "sub_groups" in found else ():
            yield (
                name,
                f"{row['ratio']:.2f}",
                f"{row['step_ms']:,.0f}",
                f"{row['device_bytes'] / _GIB:.1f}",
                "yes" if row["fits"] else "no",
                f"{row['by_sub_groups']:.2f}",
                f"{row['by_sub_groups_ms']:,.0f}",
                f"{row['by_sub_groups_device_bytes'] / _GIB:.1f}",
                "yes" if row["by_sub_groups_fits"] else "no",
            )


BOTH_HEADS = ("rig", "state on the device at most", "Twin-Flow, ms", "ZenFlow", "both", "wins", "both: ratio, k, S")


def both_rows(figures: Figures) -> Iterator[Row]:
    """Limits on every rig."""
    for rig, found in of(figures, "both--").items():
        for limit, row in found["limits"].items():
            kinds = row["kinds"]
            steps = [
                f"{kinds[kind]['step_ms']:,.1f}" if kind in kinds else "-" for kind in ("Twin-Flow", "ZenFlow", "both")
            ]
            both = kinds.get("both")
            knobs = "" if both is None else f"{both['ratio']:g}, {both['topk']:g}, {both['interval']}"
            yield rig, f"{float(limit):.0%}", *steps, row["wins"], knobs


_TABLES: Sequence[tuple[str, Row, Callable[[Figures], Iterator[Row]]]] = (
    ("Rigs, trained in simulated time", RIG_HEADS, rig_rows),
    ("Shapes, planned, 2,048 tokens on each GPU", SHAPE_HEADS, shape_rows),
    ("Bytes on the link, counted", TRAFFIC_HEADS, traffic_rows),
    ("Selection beside gathering gradients", SELECTION_HEADS, selection_rows),
    ("Selection's share of a step, planned", SHARE_HEADS, share_rows),
    ("`zftune tune` beside the published setting", TUNED_HEADS, tuned_rows),
    ("Twin-Flow on rigs, nothing late", TWIN_RIG_HEADS, twin_rig_rows),
    ("Twin-Flow, planned", TWIN_HEADS, twin_rows),
    ("Both under a limit of device memory", BOTH_HEADS, both_rows),
)


def markdown(figures: Figures) -> str:
    """Every table of which there are figures."""
    parts = []
    for title, heads, rows_of in _TABLES:
        rows = list(rows_of(figures))
        if rows:
            lines = [heads, ["---"] * len(heads), *rows]
            parts.append(f"## {title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines))
    return "\n".join(parts)
