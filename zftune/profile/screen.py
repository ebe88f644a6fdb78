"""A profile on one screen: verdict, where a step's time goes, the systems beside each other, the figures.

Fits 100 columns, and narrower terminals with fewer of the table's columns. Nothing is told by colour alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from zftune.bars import CAUSE_KINDS, COMPUTE, Bar, Kind, StackedBar
from zftune.profile.figures import figures
from zftune.profile.schema import PHASES
from zftune.profile.verdict import do_not_offload, phase_names, place, thread_ms
from zftune.text import amount, ms, number, percent, size, times
from zftune.words import CAUSES

_BASELINES = {
    "no_offload": "no offload",
    "zero_offload": "ZeRO-Offload",
    "zero_offload_pipelined": "ZeRO-Offload, pipelined",
}


@dataclass(frozen=True, slots=True)
class System:
    """One measured system. What was not measured is None."""

    name: str
    style: str
    mean_ms: float
    p50_ms: float
    p95_ms: float
    stall_fraction: float | None
    stall_ms: float | None
    by_cause: Mapping[str, float] | None
    phases: Mapping[str, float | None] | None
    against_zero_offload: float | None
    """Speed relative to ZeRO-Offload in DeepSpeed's order."""
    practicality: float | None
    """Speed relative to no offloading."""


def systems(document: Document) -> list[System]:
    """This run first, then every baseline that there is."""
    baselines = {name: run for name, run in (document["baselines"] or {}).items() if run is not None}
    name = "this run" if document["knobs"] is None else f"this run: {_label(document)}"
    rows = [_system(document, name, "bold", baselines)]
    for key, familiar in _BASELINES.items():
        if key in baselines:  # torch's optimizer has no knobs
            shown = familiar if "knobs" in baselines[key] else f"{familiar}: fused AdamW"
            rows.append(_system(baselines[key], shown, "", baselines))
    return rows


def _label(document: Document) -> str:
    name = label(document["knobs"])
    return "zenflow, exact" if document["command"] is not None and name.startswith("ZeRO-Offload") else name


def label(knobs: Mapping[str, Any]) -> str:
    """The familiar name of a point of the knob space."""
    if knobs["offload_ratio"] == 0:
        return "no offload"
    if knobs["topk_ratio"] > 0:
        return "ZenFlow"
    if knobs["offload_ratio"] < 1:
        return "Twin-Flow"
    if knobs["update_interval"] > 1 or knobs["overlap_step"]:
        return "delayed updates"
    return "ZeRO-Offload" if knobs["pipeline"] == "none" else "ZeRO-Offload, pipelined"


def _system(run: Mapping[str, Any], name: str, style: str, baselines: Mapping[str, Any]) -> System:
    step, stall = run["step_ms"], run["stall"]
    return System(
        name=name,
        style=style,
        mean_ms=step["mean"],
        p50_ms=step["p50"],
        p95_ms=step["p95"],
        stall_fraction=None if stall is None else stall["fraction"],
        stall_ms=None if stall is None else stall["ms_per_step"],
        by_cause=None if stall is None else stall["by_cause"],
        phases=run.get("phases_ms"),
        against_zero_offload=_speed(baselines.get("zero_offload"), step["mean"]),
        practicality=_speed(baselines.get("no_offload"), step["mean"]),
    )


def _speed(baseline: Mapping[str, Any] | None, mean_ms: float) -> float | None:
    return None if baseline is None else float(baseline["step_ms"]["mean"]) / mean_ms


Rank = Mapping[str, Any]

MAX_RANKS = 8
"""Ranks that are shown; of more, the first and the slowest."""
# Fills and letters tell the phases apart where there is no colour.
PHASE_KINDS = {
    "data": Kind("data", "·", "L", "bright_black"),
    "forward": Kind("forward", "█", "#", "green"),
    "backward": Kind("backward", "▓", "B", "blue"),
    "optimizer": Kind("optimizer", "▒", "O", "red"),
    "other": Kind("other", "░", "X", "magenta"),
}


def phases_bar(phases: Mapping[str, float | None]) -> Bar:
    """A bar of the phases that are known."""
    return Bar([(PHASE_KINDS[name], value) for name in PHASES if (value := phases[name]) is not None])


def rank_bars(ranks: Sequence[Rank]) -> Iterator[tuple[str, str, Bar]]:
    """Name, style and phases of each rank that is shown."""
    for rank in _shown(ranks):
        name = "a step" if len(ranks) == 1 else f"rank {rank['rank']}"
        phases = rank["phases_ms"] or {**dict.fromkeys(PHASES), "other": rank["step_ms"]["mean"]}
        yield name, "bold" if rank is ranks[0] else "", phases_bar(phases)


def ranks_table(ranks: Sequence[Rank], *, stall: Mapping[str, Any] | None, wide: bool) -> RenderableType:
    """Step times and phases of each rank that is shown, in milliseconds."""
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim")
    stalls = () if stall is None else ("stall",)
    for title in ("rank", "steps", "step ms: mean", "p50", "p95", *stalls, *(PHASES if wide else ())):
        table.add_column(title, justify="right", no_wrap=True)
    for rank in _shown(ranks):
        step, phases = rank["step_ms"], rank["phases_ms"] or {}
        cells = [str(rank["rank"]), str(rank["steps"]), *(number(step[name]) for name in ("mean", "p50", "p95"))]
        if stall is not None:
            cells.append(percent(stall["fraction"]) if rank is ranks[0] else "–")
        if wide:
            cells += ["–" if phases.get(name) is None else number(phases[name]) for name in PHASES]
        table.add_row(*(Text(cell) for cell in cells), style="bold" if rank is ranks[0] else "")
    return table


def _shown(ranks: Sequence[Rank]) -> list[Rank]:
    if len(ranks) <= MAX_RANKS:
        return list(ranks)
    slowest = sorted(ranks[1:], key=lambda rank: -float(rank["step_ms"]["mean"]))[: MAX_RANKS - 1]
    return [ranks[0], *sorted(slowest, key=lambda rank: int(rank["rank"]))]


Document = Mapping[str, Any]

_WIDE = 96
_MAX_WIDTH = 110
MIN_WIDTH = 40
"""Below it the screen is no use: lines are better left to wrap."""
_KINDS = tuple(dict.fromkeys((COMPUTE, *CAUSE_KINDS.values(), *PHASE_KINDS.values())))
_RAW = ("per_step.", "series.")  # no figures of this screen
_FEW_LINES = 3
"""Lines of Python that are shown, of a thread that bounds the step."""
_FEW = 2
"""Lines about what is missing; one more says how to see the rest."""
_WANTED = (
    "nvml.devices",
    "stall",
    "loss",
    "throughput",
    "selection",
    "nvml",
    "phases_ms",
    "memory",
    "host",
    "link",
    "system",
)
"""Figures whose absence matters, the most first: a device that fails in mid-run is no missing feature."""
_VISIBLE = 0.004  # share of the longest bar: what is shorter is not in the legend


SHOWS_ALL = "zftune profile -v shows which, and why"


def render(document: Document, *, verbose: bool = False, shows_all: str = SHOWS_ALL) -> RenderableType:
    """The whole screen of a valid profile document, to be printed by a rich console."""
    return _Screen(document, verbose=verbose, shows_all=shows_all)


class _Screen:
    def __init__(self, document: Document, *, verbose: bool, shows_all: str) -> None:
        self._document, self._verbose, self._shows_all = document, verbose, shows_all

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _MAX_WIDTH)
        rows = systems(self._document)
        parts = (
            _verdict(self._document, width),
            _heading("where a step's time goes, on one scale"),
            _bars(rows, self._document),
            *self._beside(rows, wide=width >= _WIDE),
            *self._lines(wide=width >= _WIDE),
            _heading("this run in figures"),
            figures(self._document, wide=width >= _WIDE),
            Text(),
            Group(*_note_lines(self._document, verbose=self._verbose, shows_all=self._shows_all)),
        )
        yield from console.render(Group(*parts), options.update_width(width))

    def _beside(self, rows: list[System], *, wide: bool) -> Iterator[RenderableType]:
        sources = _table_sources(self._document)
        ranks = self._document["ranks"]
        if self._document["command"] is None:
            yield _heading(f"this run beside its baselines{sources}")
            yield _table(rows, wide=wide)
        else:
            yield _heading(f"{'the ranks' if len(ranks) > 1 else 'its steps'}{sources}")
            yield ranks_table(ranks, stall=self._document["stall"], wide=wide)

    def _lines(self, *, wide: bool) -> Iterator[RenderableType]:
        """The lines of Python that held the training thread; of a thread that bounds no step, on request."""
        sampled = self._document.get("thread_lines")
        if sampled is None or not (self._verbose or thread_ms(self._document) is not None):
            return
        when = "while the device idled" if sampled["of"] == "idle" else "in a step"
        yield _heading(f"lines that held the training thread {when} · {sampled['samples']:,} samples")
        yield _lines_table(sampled["lines"][: None if self._verbose else _FEW_LINES], wide=wide)


def _lines_table(lines: Sequence[Mapping[str, Any]], *, wide: bool) -> RenderableType:
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim")
    for title in ("ms a step", "share"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("line", *(("most often within",) if wide else ())):
        table.add_column(title, ratio=1)
    for line in lines:
        names = [place(line), *([place(line["within"])] if wide else [])]
        names = list(dict.fromkeys(names))  # a line that called nothing is named once
        table.add_row(*map(Text, (number(line["ms_per_step"]), percent(line["share"]), *names)))
    return table


def _table_sources(document: Document) -> str:
    sources = document["sources"]
    named = [
        f"{what} by {sources[field]}" for what, field in (("step", "step_ms"), ("stall", "stall")) if field in sources
    ]
    return f" · {', '.join(named)}" if named else ""


def _heading(text: str) -> RenderableType:
    return Rule(Text(text, style="bold"), align="left", style="dim")


def _verdict(document: Document, width: int) -> RenderableType:
    title = Text("zftune profile", style="bold")
    for part in _subject(document):
        if title.cell_len + len(part) + 3 <= width - 6:  # a part that does not fit is left out, not cut
            title.append(f" · {part}", style="not bold")
    sentences = [Text(sentence) for sentence in document["verdict"]] or [Text("No verdict.", style="dim")]
    sentences[0].stylize("bold")
    return Panel(
        Group(*sentences),
        title=title,
        title_align="left",
        subtitle=Text(_place(document, width - 6), style="dim"),
        subtitle_align="right",
        border_style=_verdict_color(document),
        box=box.ROUNDED,
        padding=(0, 1),
    )


def _subject(document: Document) -> Iterator[str]:
    workload, command = document["workload"], document["command"]
    if command is not None and command["script"] is not None:
        yield command["script"]
    ranks = len(document["ranks"]) if command is None else command["ranks"]
    if ranks > 1:
        yield f"{ranks} ranks"
    parameters = workload["parameters"]
    known = (workload["model"], None if parameters is None else f"{amount(parameters)} parameters", workload["dtype"])
    yield from (part for part in known if part is not None)
    if workload["micro_batch"] is not None and workload["sequence"] is not None:
        yield f"{workload['micro_batch']} × {workload['sequence']} tokens"


def _place(document: Document, width: int) -> str:
    machine = document["hardware"]
    cores = machine["usable_cores"]
    rest = [f"{cores:g} cores" if cores is not None else None, size(machine["ram_bytes"])]
    choices = ([document["device"], machine["cpu_model"], *rest], [document["device"], *rest])
    texts = [" · ".join(part for part in parts if part is not None) for parts in choices]
    return next((text for text in texts if len(text) <= width), document["device"])


def _verdict_color(document: Document) -> str:
    stall = document["stall"]
    if do_not_offload(document) is not None:
        return "red"
    if stall is None:
        return "bright_black"
    return "green" if stall["fraction"] < 0.05 else "yellow" if stall["fraction"] < 0.25 else "red"


def _bars(rows: list[System], document: Document) -> RenderableType:
    """A bar for each system, all on one time scale, and what the fills mean; phases where stalls are not known."""
    bars = [(row.name, row.style, _bar(row)) for row in rows]
    if document["knobs"] is None:
        stalled = [("waiting", "", bars[0][2])] if rows[0].by_cause is not None else []
        bars = [*rank_bars(document["ranks"]), *stalled]
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    scale = max(bar.total for _, _, bar in bars)
    for name, style, bar in bars:
        grid.add_row(Text(name, style=style), StackedBar(bar, scale), Text(f"{number(bar.total)} ms", style=style))
    seen = {kind: None for _, _, bar in bars for kind, length in bar.parts if length > _VISIBLE * scale}
    grid.add_row("", _Legend([kind for kind in _KINDS if kind in seen], _meanings(document)), "")
    return grid


def _bar(row: System) -> Bar:
    if row.by_cause is None and row.phases is not None:
        return phases_bar(row.phases)
    waits = row.by_cause or {}
    compute = max(0.0, row.mean_ms - sum(waits.values()))
    return Bar([(COMPUTE, compute), *((kind, waits[cause]) for cause, kind in CAUSE_KINDS.items() if cause in waits)])


def _meanings(document: Document) -> Mapping[str, str]:
    return {**CAUSES, **phase_names(document)}


class _Legend:
    def __init__(self, kinds: Sequence[Kind], meanings: Mapping[str, str]) -> None:
        self._kinds = kinds
        self._meanings = meanings

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = []
        for kind in self._kinds:
            fill = kind.ascii_fill if options.ascii_only else kind.fill
            parts.append(Text.assemble((fill * 2, kind.style), (f" {self._meanings.get(kind.name, kind.name)}", "dim")))
        yield Text("   ").join(parts)


def _table(rows: list[System], *, wide: bool) -> RenderableType:
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("\nrun", no_wrap=True)
    for title in ("step ms\np50", "\np95", "\nstall", "stall\nms"):
        table.add_column(title, justify="right", no_wrap=True)
    if wide:
        table.add_column("\nof which, ms", ratio=1)
    table.add_column("vs ZeRO-\nOffload", justify="right", no_wrap=True)
    table.add_column("speed vs no\noffload", justify="right", no_wrap=True)
    for row in rows:
        cells = [row.name, number(row.p50_ms), number(row.p95_ms)]
        cells += [_known(row.stall_fraction, percent), _known(row.stall_ms, number)]
        if wide:
            cells.append(_causes(row))
        cells += [_known(row.against_zero_offload, times), _known(row.practicality, percent)]
        table.add_row(*(Text(cell) for cell in cells), style=row.style)
    return table


def _causes(row: System) -> str:
    if row.by_cause is None:
        return "–"
    parts = [
        f"{cause} {value:.0f}" if value >= 1 else f"{cause} {number(round(value, 1))}"
        for cause, value in row.by_cause.items()
        if value >= 0.05
    ]
    return " · ".join(parts) or "–"


def _known(value: float | None, show: Any) -> str:
    return "–" if value is None else str(show(value))


def _note_lines(document: Document, *, verbose: bool, shows_all: str) -> Iterator[Text]:
    rig = document["rig"]
    if rig is not None:
        yield Text.assemble(
            (f"Emulated hardware (rig {rig['name']}): times do not come from a GPU:", "bold yellow"),
            f" {_rig(rig)}",
        )
        if (ranks := len(document["ranks"])) > 1:
            yield Text(
                f"Each of {ranks} ranks has such a device and its rows of the model; figures are those of rank 0."
            )
    by_reason: dict[str, list[str]] = {}
    for name, reason in document["missing"].items():
        if not name.startswith(_RAW):
            by_reason.setdefault(reason, []).append(name)
    shown = list(by_reason.items())
    if not verbose:
        shown.sort(key=lambda item: min(map(_weight, item[1])))
        shown = shown[:_FEW]
    for reason, names in shown:
        yield Text(f"missing  {', '.join(names)}: {reason}", style="dim")
    more = sum(map(len, by_reason.values())) - sum(len(names) for _, names in shown)
    if more:
        yield Text(f"{more} more figures are missing: {shows_all}", style="dim")


def _weight(name: str) -> int:
    return next((at for at, one in enumerate(_WANTED) if name.startswith(one)), len(_WANTED))


def _rig(rig: Mapping[str, Any]) -> str:
    source = f"{rig['source']}; " if rig["source"] else ""
    return (
        f"{source}forward {ms(rig['forward_ms'])}, backward {ms(rig['backward_ms'])}, "
        f"link {number(rig['link_d2h_gbps'])} GB/s down and {number(rig['link_h2d_gbps'])} up, "
        f"host {number(rig['host_gbps'])} GB/s. {_clock(rig)}"
    )


def _clock(rig: Mapping[str, Any]) -> str:
    slack = rig["slack"]
    if slack is None:
        worked = ms(1e3 * rig["real_work_s"])
        return f"Time is simulated: training was done for real, in {worked}, and counted at the emulated speed."
    again = f" (measured {rig['attempts']} times)" if rig["attempts"] > 1 else ""
    return (
        f"Real work fills {percent(slack['fraction_used_p50'])} of its padding: slack {ms(slack['p50_ms'])} median, "
        f"{ms(slack['min_ms'])} least, {rig['late_segments']:,} of {rig['segments']:,} segments late{again}."
    )
