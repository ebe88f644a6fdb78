"""The figures of a run, one line each: what, how much, and where it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from zftune.profile.verdict import phase_names, thread_ms
from zftune.quality import LossSummary, expected_loss_percent, late_percent, loss_bound, moved_in_a_step, summarized
from zftune.text import ms, number, percent, size

Document = Mapping[str, Any]
_PUBLISHED = (0.1, 4.0)
"""k, and the mean staleness in steps at S = 4, of the ZenFlow paper."""


class Figure(NamedTuple):
    """A line: its name, the value with units, and the document's fields that it shows."""

    name: str
    value: str
    fields: tuple[str, ...]


def figures(document: Document, *, wide: bool) -> RenderableType:
    """All figures as a grid; the sources stand at the right where there is room, else under one another dim."""
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(ratio=1)
    if wide:
        grid.add_column(style="dim italic", justify="right")
    for figure in _lines(document):
        sources = _sources(document, figure.fields)
        if wide:
            grid.add_row(figure.name, Text(figure.value), Text(sources))
        else:
            grid.add_row(figure.name, Text.assemble(figure.value, (f"  {sources}", "dim italic")))
    return grid


def _sources(document: Document, fields: tuple[str, ...]) -> str:
    """Where the fields come from, without repetition: the most specific entry that each has."""
    found: dict[str, None] = {}
    for field in fields:
        exact = [source for name, source in document["sources"].items() if name.startswith(f"{field}.")]
        whole = document["sources"].get(field)
        found.update(dict.fromkeys([whole] if whole is not None else []) | dict.fromkeys(exact))
    return f"[{', '.join(found)}]" if found else ""


def _lines(document: Document) -> Iterator[Figure]:
    if document["command"] is not None and document["command"]["systems"]:
        yield Figure("system", "; ".join(document["command"]["systems"]), ())
    settings = [] if document["knobs"] is None else [_knobs(document["knobs"])]
    if rates := (document["command"] or {}).get("learning_rates"):
        settings.append(f"learning rate {', '.join(f'{rate:g}' for rate in rates)} in the first measured step")
    if settings:
        yield Figure("settings", " · ".join(settings), ())
    yield Figure("speed", _speed(document), ("throughput",))
    for name, show, fields in _GROUPS:
        value = " · ".join(part for part in show(document) if part)
        if value:
            yield Figure(name, value, fields)


def _knobs(knobs: Mapping[str, Any]) -> str:
    names = ("update_interval", "select_interval")
    intervals = {name: f"{'auto: ' if name in knobs['auto'] else ''}{knobs[name]}" for name in names}
    shown = [f"topk_ratio {knobs['topk_ratio']:g}", *(f"{name} {value}" for name, value in intervals.items())]
    shown.append(f"offload_ratio {knobs['offload_ratio']:g}")
    if knobs["apply_lag"] is not None:
        shown.append(f"apply_lag {knobs['apply_lag']}")
    if knobs["look_ahead"] != "none":
        shown.append(f"look_ahead {knobs['look_ahead']}")
    if knobs["window_phase"] != "together":
        shown.append(f"window_phase {knobs['window_phase']}")
    shown += [f"overlap_step {'on' if knobs['overlap_step'] else 'off'}", f"pipeline {knobs['pipeline']}"]
    return " · ".join(shown)


def _speed(document: Document) -> str:
    rate, steps = document["throughput"], document["steps"]
    tokens = rate["tokens_per_s"]
    parts = [f"{number(rate['steps_per_s'])} steps/s"]
    if tokens is not None:
        parts.append(f"{number(tokens)} tokens/s{_of_ranks(document)}")
    parts.append(f"{steps['measured']} steps, {steps['discarded']} more discarded")
    return " · ".join(parts)


def _of_ranks(document: Document) -> str:
    known = len(document["ranks"])
    world = (document["command"] or {}).get("ranks", known)
    return "" if world == 1 else f" on {known if known == world else f'{known} of {world}'} ranks (data parallel)"


def _phases(document: Document) -> list[str]:
    phases = document["phases_ms"] or {}
    names = phase_names(document)
    parts = [f"{names.get(name, name)} {number(value)}" for name, value in phases.items() if value is not None]
    return [", ".join(parts) + " ms"] if parts else []


_COLLECTIVES = {"gather": "all-gathers", "reduce_scatter": "reduce-scatters", "all_reduce": "own all-reduce"}


def _collectives(document: Document) -> list[str]:
    found = (document["stall"] or {}).get("collectives") or {}
    parts = [f"{_COLLECTIVES[name]} {number(value)}" for name, value in found.items()]
    return [", ".join(parts) + " ms"] if parts else []


def _waits(document: Document) -> list[str]:
    waits = {cause: value for cause, value in (document["waits_ms"] or {}).items() if value >= 0.005}
    text = ", ".join(f"{cause} {number(value)}" for cause, value in waits.items())
    hidden = document["hidden_ms_per_step"]
    parts = [f"{text} ms in the training thread"] if waits else []
    of_what = "them" if parts else "the training thread's waits"
    return parts if hidden is None else [*parts, f"{ms(hidden)} of {of_what} run beside compute"]


def _idle(document: Document) -> list[str]:
    idle = document.get("idle")
    if idle is None:
        return []
    causes = ", ".join(f"{cause} {number(value)}" for cause, value in idle["by_cause"].items())
    return [f"{ms(idle['ms_per_step'])} a step without a kernel: {causes}"]


def _roofs(document: Document) -> list[str]:
    roofs = document["roofs"]
    if roofs is None:
        return []
    names = ("compute", "d2h", "h2d", "host")
    parts = [f"{name} {number(roofs[f'{name}_ms'])}" for name in names if roofs[f"{name}_ms"] is not None]
    idle = "" if thread_ms(document) is None else ", unless launches leave the device idle for less"
    return [f"{ms(roofs['least_step_ms'])} at the least: {', '.join(parts)}{idle}"]


def _link(document: Document) -> list[str]:
    link = document["link"] or {}
    parts = [f"{title} {size(link[key])}" for title, key in _DIRECTIONS if link.get(key) is not None]
    if link.get("bytes_over_model_bytes") is not None:
        parts.append(f"{number(link['bytes_over_model_bytes'])} × the model")
    return parts


_DIRECTIONS = (("D2H", "d2h_bytes_per_step"), ("H2D", "h2d_bytes_per_step"), ("other", "other_bytes_per_step"))


def _host(document: Document) -> list[str]:
    host = document["host"] or {}
    parts = [f"{ms(host['update_ms'])} a pass" if host.get("update_ms") is not None else ""]
    gbps, ceiling = host.get("gbps"), host.get("ceiling_gbps")
    if gbps is not None and ceiling is not None:
        parts.append(f"{number(gbps)} of {number(ceiling)} GB/s ({percent(gbps / ceiling)})")
    elif gbps is not None:
        parts.append(f"{number(gbps)} GB/s")
    if host.get("bytes_per_element") is not None:
        parts.append(f"{number(host['bytes_per_element'])} B/element")
    return parts


def _loss(document: Document) -> list[str]:
    found, steps = document.get("loss"), document["steps"]
    if found is None:
        return []
    whole = {name: found[name] for name in ("first", "last", "error", "trend", "count")}
    more = [f"not a finite number in {found['not_finite']} steps"] if found["not_finite"] else []
    first, last = steps["discarded"] + 1, steps["discarded"] + steps["measured"]
    return [f"{LossSummary(**whole)} ({summarized(found['count'])} of steps {first} to {last})", *more]


def _selection(document: Document) -> list[str]:
    selection = document["selection"] or {}
    parts = []
    if selection.get("coverage") is not None:
        parts.append(f"covers {percent(selection['coverage'])} of the gradient energy")
    if selection.get("churn") is not None:
        parts.append(f"{percent(selection['churn'])} new each time")
    return parts


def _staleness(document: Document) -> list[str]:
    staleness, coverage = document["staleness"], (document["selection"] or {}).get("coverage")
    if staleness is None:
        return []
    parts = [f"mean {number(staleness['mean'])} steps", f"most {staleness['max']} steps"]
    return parts if coverage is None else [*parts, f"weighted {number((1 - coverage) * staleness['mean'])} steps"]


def _movement(document: Document) -> list[str]:
    found = document.get("movement")
    if found is None:
        return []
    is_late = bool(found["late_percent"])
    late = found["late_percent"] or late_percent(found["percent"], *_PUBLISHED)
    moved = moved_in_a_step(found["percent"], document["workload"].get("learning_rate"))
    if is_late:
        knobs = document["knobs"]
        soon = knobs["window_phase"] == "staggered" and knobs["apply_lag"] in (None, 1)
        guesses = soon and knobs["look_ahead"] == "guess"
        costs = loss_bound(found["expected_loss_percent"], late / found["percent"], guesses=guesses)
        return [f"{moved}, {number(late)}% before late updates arrive", costs]
    costs = loss_bound(expected_loss_percent(late), late / found["percent"] if late else 0.0)
    return [f"{moved}, and no update is late", f"as late as published: {number(late)}% before they arrive, {costs}"]


def _memory(document: Document) -> list[str]:
    memory = document["memory"]
    names = {
        "device_peak_bytes": "device peak",
        "host_state_bytes": "host state",
        "host_log_bytes": "gradient log",
        "host_staging_bytes": "staging",
        "host_peak_bytes": "host peak",
    }
    return [f"{title} {size(memory[key])}" for key, title in names.items() if memory[key] is not None]


def _nvml(document: Document) -> list[str]:
    nvml = document["nvml"] or {}
    units = {
        "utilisation_percent": "% busy",
        "sm_utilisation_percent": "% of the SMs",
        "pcie_rx_gbps": " GB/s H2D",
        "pcie_tx_gbps": " GB/s D2H",
        "sm_clock_mhz": " MHz",
        "power_w": " W",
        "energy_j": " J",
        "temperature_c": " °C",
    }
    parts = [f"{number(nvml[key])}{unit}" for key, unit in units.items() if nvml.get(key) is not None]
    used, total = nvml.get("memory_used_bytes"), nvml.get("memory_total_bytes")
    if used is not None:
        parts.append(f"{size(used)}{'' if total is None else f' of {size(total)}'} in use")
    gen, width = nvml.get("pcie_gen"), nvml.get("pcie_width")
    if gen is not None and width is not None:
        parts.append(f"PCIe {gen:.0f} x{width:.0f}")
    return [*parts, *(nvml.get("throttle_reasons") or ())]


def _host_load(document: Document) -> list[str]:
    system = document["system"] or {}
    parts = []
    if system.get("cpu_percent") is not None:
        most = system.get("affinity_cores")
        parts.append(f"{number(system['cpu_percent'] / 100)}{'' if most is None else f' of {number(most)}'} cores")
    if system.get("machine_cpu_percent") is not None:
        parts.append(f"machine {percent(system['machine_cpu_percent'] / 100)} busy")
    if system.get("rss_bytes") is not None:
        parts.append(f"{size(system['rss_bytes'])} resident")
    pressed = {name: system.get(f"psi_{name}_percent") for name in ("cpu", "memory", "io")}
    waits = [f"{name} {percent(value / 100)}" for name, value in pressed.items() if value is not None and value >= 1]
    if waits:
        parts.append(f"pressure: {', '.join(waits)}")
    if system.get("throttled_fraction"):
        parts.append(f"throttled {percent(system['throttled_fraction'])}")
    return parts


def _overhead(document: Document) -> list[str]:
    overhead = document["overhead_fraction"]
    return [f"measuring takes {percent(overhead)} of a step"] if overhead is not None else []


_GROUPS = (
    ("phases", _phases, ("phases_ms",)),
    ("waits", _waits, ("waits_ms", "hidden_ms_per_step")),
    ("idle", _idle, ("idle",)),
    ("collectives", _collectives, ("stall",)),
    ("link a step", _link, ("link",)),
    ("host update", _host, ("host",)),
    ("loss", _loss, ("loss",)),
    ("selection", _selection, ("selection",)),
    ("staleness", _staleness, ("staleness",)),
    ("movement", _movement, ("movement",)),
    ("memory", _memory, ("memory",)),
    ("lower bound", _roofs, ("roofs",)),
    ("NVML", _nvml, ("nvml",)),
    ("processes", _host_load, ("system",)),
    ("overhead", _overhead, ("overhead_fraction",)),
)
