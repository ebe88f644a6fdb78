"""The claims as rows of docs/claims.md and README, every figure from a record."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from studykit import ROOT, missing, of_study, write_json

from claims.rigs import FROM_PUBLISHED
from claims.tables import (
    USUAL,
    WANTED_LESS_STALL,
    WANTED_TIMES,
    Figures,
    cells_of,
    less_stall,
    of,
    reaching,
    selecting_share,
    times,
    upstreams,
)
from claims.twinflow import TOKENS

HOLDS, PART, NOT = "holds", "holds in part", "does not hold"
RIGS, PLANNED, COUNTED, CPU, GPU = "rigs", "planned", "counted", "this CPU", "one H200"
SEARCHES, SIDE_BY_SIDE = "004-tuner-regret", "005-upstream-side-by-side"
ACCURACY, LONGER = "023-accuracy", "023-accuracy/results/480-steps"
ON_GPU = "gpu"
_ON_GPU_AGAIN = "gpu/run_all.py --size 1B"
_ON_GPU_OF = "1.16B parameters, 4 x 1,024 tokens a step"
_RATIOS_ON_GPU_AGAIN = "gpu/run_all.py --parts link adamw ratios"
SAME = 0.01
"""Steps that differ by less are as long."""
STUDIES = ("024-claims", SEARCHES, SIDE_BY_SIDE, ACCURACY, LONGER)
"""Sources of the rows, besides the figures of the GPU; longer fine-tuning has a folder of its own."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim on one kind of ground."""

    claim: str
    found: str
    on: str
    """Rigs (simulated), planned, counted, this CPU, or the one GPU that was measured."""
    verdict: str
    short: str = ""
    """What README says of it; empty: nothing."""
    again: str = ""
    """What measures it again, in studies/, with its arguments."""

    @property
    def row(self) -> str:
        """Of the page."""
        return f"| {self.claim} | {self.found} | {self.on} | {self.verdict} | `python studies/{self.again}` |"

    @property
    def short_row(self) -> str:
        """Of README."""
        return f"| {self.claim} | {self.short} | {self.on} | {self.verdict} |"


def records(folder: Path) -> dict[str, Any]:
    """The figures of all records of a folder, by name."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    return {name: record["figures"] for name, record in found.items()}


def every_record() -> dict[str, Figures]:
    """The records of all studies that the rows are made of, by study; LookupError if a study has none here."""
    folders = {name: ROOT / "studies" / name for name in STUDIES}
    found = {name: records(path if "/" in name else path / "results") for name, path in folders.items()}
    if lost := sorted({name.partition("/")[0] for name, one in found.items() if not one}):
        raise LookupError(missing(*lost))
    gpu = json.loads((ROOT / "studies" / ON_GPU / "figures.json").read_text(encoding="utf-8"))
    return {**found, ON_GPU: gpu["h200"]}


def write_rows(path: Path) -> None:
    """Put the rows into figures.json, with which a test compares docs/claims.md and README."""
    rows = claims(every_record())
    document = json.loads(path.read_text(encoding="utf-8"))
    document["quotes"]["docs/claims.md"] = [one.row for one in rows]
    document["quotes"]["README.md"] = [one.short_row for one in rows if one.short]
    write_json(path, document)


def claims(found: Mapping[str, Figures]) -> list[Claim]:
    """All of them, in order.

    Args:
        found: the figures of records by name, by study.
    """
    figures = found["024-claims"]
    return [
        *_speed(figures),
        _speed_on_cpu(found[SIDE_BY_SIDE]),
        _speed_on_gpu(found[ON_GPU]["1B"], found[ON_GPU]["1B-16k"]),
        *_stall(figures),
        _stall_on_gpu(found[ON_GPU]["1B"]),
        *_traffic(figures),
        *_selection(figures),
        _accuracy(found[ACCURACY], found[LONGER]),
        *_tuned(figures, found[SEARCHES]),
        *_twin_flow(figures),
        _twin_flow_on_gpu(found[ON_GPU]["machine"]["ratios"]),
        *_both(figures),
        _both_on_gpu(found[ON_GPU]["machine"]["ratios"]),
    ]


def _parts(*names: str) -> str:
    """Of this study; a measurement that is there already is left out without --again."""
    return f"024-claims/run.py {' '.join(f'--part {name}' for name in names)} --again"


def series(values: Sequence[str]) -> str:
    """Values in words."""
    return f"{', '.join(values[:-1])} and {values[-1]}" if len(values) > 1 else values[0]


def _usual(figures: Figures) -> list[Mapping[str, Any]]:
    """Of every shape that fits, the step of the usual tokens."""
    return [by_tokens[USUAL] for *_, by_tokens in cells_of(figures) if USUAL in by_tokens]


def _speed(figures: Figures) -> list[Claim]:
    claim = "Up to 5 times as fast as ZeRO-Offload"
    rigs = of(figures, "rig--")
    published = [rigs[name]["systems"] for name in FROM_PUBLISHED]
    reached = [f"{times(one):.1f}" for one in published]
    bounds = [one["published"]["bound_by"] for one in published]
    most = [f"{one['ZeRO-Offload']['step_ms'] / one['no offload']['step_ms']:.1f}" for one in published]
    others = [one["systems"] for name, one in rigs.items() if name not in FROM_PUBLISHED]
    five = sum(times(one) >= WANTED_TIMES for one in others)
    theirs = [f"{upstreams(rigs[name])[0]:.1f}" for name in FROM_PUBLISHED]
    usual = _usual(figures)
    gains = sorted(times(one["systems"]) for one in usual)
    cells = [by_tokens for *_, by_tokens in cells_of(figures) if by_tokens]
    at_four, at_sixteen = (sum(bool(reaching(one, system)) for one in cells) for system in ("published", "S = 16"))
    their_gains = sorted(upstreams(one)[0] for one in usual)
    their_most = max(upstreams(one)[0] for by_tokens in cells for one in by_tokens.values())
    longer = max(one["upstream"]["ZenFlow"] / one["systems"]["published"]["step_ms"] for one in usual)
    where = series(sorted({machine for _, machine, _, one in cells_of(figures) if reaching(one, "published")}))
    bound = Counter(one["systems"]["published"]["bound_by"] for one in usual).most_common(1)[0][0]
    return [
        Claim(
            claim,
            f"{series(reached)} times on the rigs after published steps ({series(FROM_PUBLISHED)}), where not "
            "offloading "
            f"is {series(most)} times as fast as ZeRO-Offload; 5 on {five} of {len(others)} made-up rigs. A "
            f"step is bound by {series(bounds)}",
            RIGS,
            NOT if max(map(float, reached)) < WANTED_TIMES else HOLDS,
            f"{series(reached)} times on three rigs after published steps; not offloading is {series(most)} times",
            again=_parts("rigs"),
        ),
        Claim(
            claim,
            f"DeepSpeed's own ZenFlow by its schedule and bytes: {series(theirs)} times its own ZeRO-Offload on the "
            "same rigs",
            RIGS,
            NOT if max(map(float, theirs)) < WANTED_TIMES else HOLDS,
            again=_parts("rigs", "traffic"),
        ),
        Claim(
            claim,
            f"{gains[0]:.1f} to {gains[-1]:.1f} times at 2,048 tokens over {len(gains)} shapes (1.5B to 70B on 1 to 8 "
            f"GPUs), most often bound by {bound}. 5 times in {at_four} of {len(cells)} at S = 4, in steps of at most "
            f"{longest(cells, 'published')} tokens ({where}); in {at_sixteen} at S = 16, of at most "
            f"{longest(cells, 'S = 16')} tokens",
            PLANNED,
            PART if at_four or at_sixteen else NOT,
            f"{gains[0]:.1f} to {gains[-1]:.1f} times at 2,048 tokens over {len(gains)} shapes of 1.5B to 70B; 5 in "
            f"{at_four}, in steps of at most {longest(cells, 'published')} tokens",
            again=_parts("shapes"),
        ),
        Claim(
            claim,
            f"DeepSpeed's own ZenFlow by its schedule and bytes: {their_gains[0]:.1f} to {their_gains[-1]:.1f} times "
            f"its own ZeRO-Offload on the same shapes at 2,048 tokens, at most {their_most:.1f} at any; its steps are "
            f"up to {longer:.1f} times as long as this runtime's",
            PLANNED,
            NOT if their_most < WANTED_TIMES else PART,
            again=_parts("shapes", "traffic"),
        ),
    ]


def _speed_on_cpu(figures: Figures) -> Claim:
    """Of study 005: real steps without a GPU, where what is hidden is the host's update alone."""
    largest = [one["systems"] for name, one in figures.items() if name.startswith("58M-")]
    step = {name: fmean(ms for one in largest for turn in one[name]["steps_ms"] for ms in turn) for name in largest[0]}
    ours, exact, theirs, none = (
        f"{step['ZeRO-Offload'] / step[name]:.1f}"
        for name in ("this, replay", "this, exact", "ZenFlow, sequential", "no offload")
    )
    return Claim(
        "Up to 5 times as fast as ZeRO-Offload",
        f"{ours} times DeepSpeed's ZeRO-Offload, with nothing late {exact}; DeepSpeed's own ZenFlow {theirs}, not "
        "offloading "
        f"{none} (58M parameters, 16 tokens a step, two cores, no link)",
        CPU,
        NOT if float(ours) < WANTED_TIMES else HOLDS,
        f"{ours} times DeepSpeed's, its own ZenFlow {theirs}; not offloading is {none} times",
        again=f"{SIDE_BY_SIDE}/run.py --again",
    )


def _speed_on_gpu(figures: Figures, wide: Figures) -> Claim:
    """Of one model on one GPU: p50 of a step, and the mean, which has its selections too.

    Args:
        figures: of 4 sequences a step.
        wide: of 16.
    """
    step, mean = (
        {name: one["step_ms"][key] for name, one in figures.items() if key in one.get("step_ms", {})}
        for key in ("p50", "mean")
    )
    several = [step["zenflow"], *figures["zenflow"]["other_trainings_p50_ms"].values()]
    ours, theirs = (
        f"{step[name] / max(several):.1f} to {step[name] / min(several):.1f}"
        for name in ("zero-offload", "deepspeed-zero-offload")
    )
    none = f"{step['zero-offload'] / step['adamw']:.1f}"
    by_mean = f"{mean['zero-offload'] / mean['zenflow']:.1f}"
    model = figures["model"]
    trained = f"{model['parameters'] / 1e9:.2f}B parameters, {model['batch']} x {model['sequence']:,} tokens a step"
    without = _beside(wide, "adamw")
    upstream = _beside(wide, "deepspeed-zenflow")
    return Claim(
        "Up to 5 times as fast as ZeRO-Offload",
        f"By the median of a step {ours} times this runtime's ZeRO-Offload and {theirs} times DeepSpeed's, where not "
        f"offloading is {none} times as fast; by the mean {by_mean} times, as a new selection takes longer "
        f"({trained}, k = 0.05, S = 4; {len(several)} trainings, {min(several):.0f} to {max(several):.0f} ms). Most "
        f"of a step are the training thread's own calls: with {wide['model']['batch']} sequences a step it "
        f"has {without[0]:.0%} of the speed without offloading (by the mean {without[1]:.0%}), and {upstream[0]:.1f} "
        f"times that of DeepSpeed's ZenFlow (by the mean {upstream[1]:.1f})",
        GPU,
        NOT if step["zero-offload"] / min(several) < WANTED_TIMES else HOLDS,
        f"{ours} times, by the mean {by_mean}, and {theirs} times DeepSpeed's ({trained}); not offloading is {none} "
        f"times. With {wide['model']['batch']} x {model['sequence']:,} tokens {without[0]:.0%} of the speed without "
        "offloading",
        again=_ON_GPU_AGAIN,
    )


def _beside(figures: Figures, other: str) -> tuple[float, float]:
    """Another system's step over zenflow's: of the medians, and of the means."""
    theirs, ours = (figures[name]["step_ms"] for name in (other, "zenflow"))
    return theirs["p50"] / ours["p50"], theirs["mean"] / ours["mean"]


def longest(cells: Sequence[Mapping[str, Any]], system: str) -> str:
    """Most tokens of a step with which a system is five times as fast anywhere."""
    return f"{max((tokens for one in cells for tokens in reaching(one, system)), default=0):,}"


def _stall(figures: Figures) -> list[Claim]:
    claim = "Over 85% less stall"
    rigs = of(figures, "rig--")
    published = [f"{less_stall(rigs[name]['systems']):.1%}" for name in FROM_PUBLISHED]
    everywhere = {name: less_stall(one["systems"]) for name, one in rigs.items()}
    below = sorted(name for name, less in everywhere.items() if less <= WANTED_LESS_STALL)
    missed = f"; not on {series(below)} (from {min(everywhere.values()):.0%} on)" if below else ""
    planned = [less_stall(one["systems"]) for one in _usual(figures)]
    kept = sum(less > WANTED_LESS_STALL for less in planned)
    return [
        Claim(
            claim,
            f"{series(published)} less on the rigs after published steps{missed}",
            RIGS,
            HOLDS if all(everywhere[name] > WANTED_LESS_STALL for name in FROM_PUBLISHED) else PART,
            f"{series(published)} less on three rigs after published steps",
            again=_parts("rigs"),
        ),
        Claim(
            claim,
            f"In {kept} of {len(planned)} shapes at 2,048 tokens, k = 0.1 and S = 4",
            PLANNED,
            HOLDS if kept == len(planned) else PART,
            again=_parts("shapes"),
        ),
    ]


def _stall_on_gpu(figures: Figures) -> Claim:
    """By the runtime's own events, beside what the profiler sees of the same training."""
    zero, ours = figures["zero-offload"], figures["zenflow"]
    before, after = (sum(one["stall"]["ms"].values()) for one in (zero, ours))
    idle, idle_before = (one["stall_beside_idle"]["profiler_idle"] for one in (ours, zero))
    less = f"{1 - after / before:.1%} less by the runtime's own events"
    idle_said = f"the GPU is idle for {idle:.0%} of a step (ZeRO-Offload: {idle_before:.0%})"
    return Claim(
        "Over 85% less stall",
        f"{less} ({after:.1f} of {before:.0f} ms a step), but the profiler says that {idle_said}: it waits for the "
        "training thread, which no event of the runtime sees",
        GPU,
        NOT if 1 - idle / idle_before < WANTED_LESS_STALL else HOLDS,
        f"{less}, but {idle_said}",
        again=_ON_GPU_AGAIN,
    )


def _traffic(figures: Figures) -> list[Claim]:
    ours, theirs = figures["traffic"], figures["upstream"]
    zen, zero = ours["k = 0.1, S = 4"]["over_model_bytes"], ours["ZeRO-Offload"]["over_model_bytes"]
    their_zero = theirs["ZeRO-Offload"]["over_model_bytes"]
    their_zen = theirs["ZenFlow, overlapped"]["over_model_bytes"]
    return [
        Claim(
            "About 2 times less PCIe traffic, 1.13 times the model a step",
            f"{zen:.2f} times the model's bytes at k = 0.1 and S = 4, {zero / zen:.1f} times less than this runtime's "
            f"ZeRO-Offload ({zero:.2f}), {their_zero / zen:.1f} times less than DeepSpeed's ({their_zero:.2f}). "
            f"DeepSpeed's own ZenFlow moves {their_zen:.2f}, {their_zero / their_zen:.1f} times less than its "
            "ZeRO-Offload",
            COUNTED,
            HOLDS,
            f"{zen:.2f} times the model, {zero / zen:.1f} times less; DeepSpeed's own ZenFlow moves {their_zen:.2f}",
            again=_parts("traffic"),
        )
    ]


def _selection(figures: Figures) -> list[Claim]:
    counted = of(figures, "selection--")
    exact = all(one["selection_bytes"] == one["should_be_bytes"] for one in counted.values())
    by_model = {name.partition("--")[0]: one for name, one in of(figures, "shape--").items()}
    numbers = sorted((one["elements_a_column"], name) for name, one in by_model.items())
    in_bytes = sorted(one["cheaper_in_bytes"] for one in by_model.values())
    over = [name for value, name in numbers if value > 4000]
    shares = [
        selecting_share(by_tokens[USUAL])
        for *_, gpus, by_tokens in cells_of(figures)
        if gpus > 1 and USUAL in by_tokens
    ]
    small = next(iter(counted.values()))
    return [
        Claim(
            "Selection over 4,000 times cheaper than gathering gradients",
            f"{numbers[0][0]:,.0f} to {numbers[-1][0]:,.0f} times fewer numbers from 1.5B to 70B, over 4,000 of "
            f"{series(over)}; {in_bytes[0]:,.0f} to {in_bytes[-1]:,.0f} times fewer bytes, since energies are fp32. "
            f"On {series(list(counted))} ranks a small model sends "
            f"{'exactly' if exact else 'not'} the bytes that follow from its shapes, {small['cheaper']:.0f} times "
            f"fewer. Choosing takes at most {max(shares):.1%} of a step of several GPUs",
            f"{COUNTED}, {PLANNED}",
            PART,
            f"{numbers[0][0]:,.0f} to {numbers[-1][0]:,.0f} times fewer numbers, {in_bytes[0]:,.0f} to "
            f"{in_bytes[-1]:,.0f} times fewer bytes, from 1.5B to 70B",
            again=_parts("selection", "shapes"),
        )
    ]


def _accuracy(figures: Figures, longer: Figures) -> Claim:
    """Of study 023: what a fine-tuned encoder's accuracy is less AdamW's at the same seed, in points."""
    report = of_study(ACCURACY, "accuracy.report")
    runs, long_runs = _runs(figures), _runs(longer)
    tasks = [name for name in runs if name != "language"]

    def lost(variant: str, of: Mapping[str, Any] = runs, names: Sequence[str] = tasks) -> list[Any]:
        each = [report.paired(of, task, variant, "accuracy", 100.0) for task in names]
        return [report.Interval.of(list(points.values())) for points in each]

    late = lost("replay")
    kept = sum(one.no_worse(report.MARGIN_POINTS) for one in late)
    worst = tasks[min(range(len(tasks)), key=lambda place: late[place].mean)]
    (after,) = lost("replay", long_runs, [worst])  # the others have fewer seeds
    steps = f"{min(-one.mean for one in late):.1f} to {max(-one.mean for one in late):.1f}"
    mean, theirs = (
        f"{min(-one.mean for one in lost(variant)):.1f} to {max(-one.mean for one in lost(variant)):.1f}"
        for variant in ("mean", "DeepSpeed")
    )
    longer_kept = "within" if after.no_worse(report.MARGIN_POINTS) else "not within"
    synchronous = max(abs(one.mean) for one in lost("Twin-Flow"))
    over = {
        variant: report.mean_of(runs["language"][variant], "loss") / report.mean_of(runs["language"]["AdamW"], "loss")
        for variant in ("replay", "mean", "DeepSpeed")
    }
    seeds = len(runs[worst]["replay"])
    return Claim(
        "No accuracy loss on GLUE",
        "Three text tasks as in GLUE, not GLUE itself, a pretrained encoder fine-tuned at 1e-4 (5.3M trained "
        f"parameters, {seeds} seeds): after 120 steps replay loses {steps} points and is within one of AdamW on {kept} "
        f"of {len(tasks)}; after 480 on the one that lost most, {worst}, {after.text(2)} points, {longer_kept} one. "
        f"The paper's rule loses {mean}, DeepSpeed's own ZenFlow {theirs}, Twin-Flow at most {synchronous:.2f}. A "
        f"language model hardly pretrained ends {over['replay'] - 1:.1%} above AdamW's loss, by the paper's rule "
        f"{over['mean'] - 1:.0%}, with DeepSpeed's {over['DeepSpeed'] - 1:.0%}",
        CPU,
        HOLDS if kept == len(tasks) else NOT,
        f"replay is within one point of AdamW on {kept} of {len(tasks)} text tasks after 120 steps, {longer_kept} "
        f"one after 480 on the one that lost most; the paper's rule loses {mean} points, DeepSpeed's ZenFlow {theirs}",
        again=f"{ACCURACY}/run.py --again",
    )


def _runs(figures: Figures) -> dict[str, dict[str, Any]]:
    """Study 023's runs by problem, variant and seed."""
    found: dict[str, dict[str, Any]] = {}
    for name, one in figures.items():
        problem, _, variant = name.partition("-")
        if "runs" in one:
            found.setdefault(problem, {})[variant] = one["runs"]
    return found


def _tuned(figures: Figures, searches: Figures) -> list[Claim]:
    """Live searches of this study, on every rig and on this CPU; and study 004's, which are many on six rigs."""
    claim = "Auto-tuned, nothing by hand"
    found = {name: one["searches"] for name, one in searches.items() if name.endswith("--0.03--tuner")}
    gains = sorted(-one["over_start"] for rig in found.values() for one in rig)
    used = sorted(one["measurements"] for rig in found.values() for one in rig)
    lost = max(one["lost_steps"] for rig in found.values() for one in rig)
    return [
        _tuned_on_rigs(claim, of(figures, "tuned--")),
        Claim(
            claim,
            f"From the published setting the search saves {gains[0]:.0%} to {gains[-1]:.0%} of a step within the same "
            f"quality, {median(gains):.0%} in the median of {len(gains)} searches with noise of 3% on {len(found)} "
            f"rigs, with {used[0]} to {used[-1]} measurements that lose at most {lost:.0f} steps' time; "
            f"{sum(gain < 0 for gain in gains)} end slower",
            RIGS,
            HOLDS if gains[0] >= 0 else PART,
            again=f"{SEARCHES}/run.py --again",
        ),
        _tuned_on_cpu(claim, list(of(figures, "tuned-on-cpu--").values())),
    ]


def _tuned_on_rigs(claim: str, rigs: Figures) -> Claim:
    saved = {name: 1 - one["tuned_ms"] / one["published_ms"] for name, one in rigs.items()}
    faster = {name: rigs[name] for name, share in saved.items() if share > SAME}
    slower = sum(share < -SAME for share in saved.values())
    alike = [rigs[name] for name, share in saved.items() if abs(share) <= SAME]
    earlier = sum(one["late_steps"] < one["late_steps_by_hand"] for one in alike)
    shares = sorted(saved[name] for name in faster)
    reached, spent = (
        sorted(1e3 * one[key] / one["published_ms"] for one in faster.values()) for key in ("reached_s", "spent_s")
    )
    repaid = sorted(1e3 * one["spent_s"] / (one["published_ms"] - one["tuned_ms"]) for one in faster.values())
    return Claim(
        claim,
        f"`zftune tune` beside the published setting (k = 0.1, S = 4) set by hand, on each of {len(rigs)} rigs: "
        f"{shares[0]:.0%} to {shares[-1]:.0%} shorter steps within the same quality on {len(faster)}, as long within "
        f"1% on {len(alike)} (on {earlier} of these less late), longer on {slower}. Found after the time of "
        f"{reached[0]:.0f} to {reached[-1]:.0f} steps; exploring costs that of {spent[0]:.0f} to {spent[-1]:.0f}, "
        f"which {repaid[0]:,.0f} to {repaid[-1]:,.0f} steps pay for",
        RIGS,
        PART if slower or not faster else HOLDS,
        f"beside the published setting, steps are {shares[0]:.0%} to {shares[-1]:.0%} shorter on {len(faster)} of "
        f"{len(rigs)} rigs, longer on {slower}; {repaid[0]:,.0f} to {repaid[-1]:,.0f} steps pay for the search",
        again=_parts("tuned"),
    )


def _tuned_on_cpu(claim: str, runs: Sequence[Mapping[str, Any]]) -> Claim:
    ratios = [f"{one['ratio']:.2f} ± {one['ratio_error']:.2f}" for one in runs]
    faster = sum(one["ratio"] + one["ratio_error"] < 1 for one in runs)
    slower = sum(one["ratio"] - one["ratio_error"] > 1 for one in runs)
    reached, spent, ended = (series([f"{one[key]:.0f}" for one in runs]) for key in ("reached_s", "spent_s", "ended_s"))
    loads = sorted(one["load_15min"] for one in runs)
    return Claim(
        claim,
        f"A small model without a GPU, {len(runs)} searches by the clock of two cores with a load of {loads[0]:.0f} to "
        f"{loads[-1]:.0f}, then tuned and published by turns: a step takes {series(ratios)} of the published "
        f"setting's, so {faster} of {len(runs)} end faster and {slower} slower. Found after {reached} s; exploring "
        f"cost {spent} of {ended} s",
        CPU,
        HOLDS if faster == len(runs) else PART if faster else NOT,
        f"{series(ratios)} of the published setting's step, in {len(runs)} searches beside much other work",
        again=_parts("tuned"),
    )


_TWIN_FLOW = "Twin-Flow: up to 6 times as fast, faster as the ratio falls, to the memory bound"


def _twin_flow(figures: Figures) -> list[Claim]:
    found = of(figures, "twin-flow--")
    on_rigs = {name: one["rows"] for name, one in found.items() if "sub_groups" not in one}
    planned = {name: one for name, one in found.items() if "sub_groups" in one}
    rise = max(row["step_ms"] / before["step_ms"] - 1 for rows in on_rigs.values() for before, row in pairwise(rows))
    off = max(abs(row["planned_ms"] / row["step_ms"] - 1) for rows in on_rigs.values() for row in rows)
    gains = [f"{rows[0]['in_turn_ms'] / rows[-1]['step_ms']:.1f}" for rows in on_rigs.values()]
    reached, most = [], []
    for name, one in planned.items():
        rows = one["rows"]
        zero = rows[0]["by_sub_groups_ms"]
        ours = min((row for row in rows if row["fits"]), key=lambda row: row["step_ms"])
        theirs = min((row for row in rows if row["by_sub_groups_fits"]), key=lambda row: row["by_sub_groups_ms"])
        most.append(zero / ours["step_ms"])
        model, _, machine = name.partition("--")
        reached.append(
            f"{model} on {machine.replace('-', ' ', 1)}: {most[-1]:.1f} times at ratio {ours['ratio']:g}, with "
            f"DeepSpeed's {one['sub_groups']} sub-groups {zero / theirs['by_sub_groups_ms']:.1f}"
        )
    return [
        Claim(
            _TWIN_FLOW,
            f"Each of 21 ratios is at least as fast as the one above it (within {max(rise, 0):.1%}), to "
            f"{series(gains)} times ZeRO-Offload without any ({series(list(on_rigs))}); planned within {off:.1%}",
            RIGS,
            HOLDS if rise < 0.01 else PART,
            again=_parts("twin-flow"),
        ),
        Claim(
            _TWIN_FLOW,
            f"The fastest that fits, {TOKENS} tokens on each GPU. {'; '.join(reached)}. At ratio 0 nothing is "
            "offloaded: there 6 times is what not offloading wins",
            PLANNED,
            HOLDS if f"{max(most):.1f}" >= "6.0" else PART,
            f"at most {max(most):.1f} times, where nothing has to be offloaded; {min(most):.1f} times where it has",
            again=_parts("twin-flow"),
        ),
    ]


def _over_ratios(figures: Figures, system: str) -> dict[float, Mapping[str, float]]:
    """Of one system on the GPU, by offload ratio, the highest first."""
    return {float(name.split()[-1]): one for name, one in figures.items() if name.startswith(f"{system}, ")}


def _twin_flow_on_gpu(figures: Figures) -> Claim:
    found = _over_ratios(figures, "zero-offload")
    p50, (first, *between, last) = {ratio: one["p50"] for ratio, one in found.items()}, found
    lowest = between[-1]
    reached = f"{p50[first] / p50[lowest]:.1f} times at ratio {lowest:g}"
    at_zero = f"{p50[first] / p50[last]:.1f} times at ratio {last:g}, where nothing is offloaded"
    off = [one["planned_ms"] / one["p50"] - 1 for one in found.values()]
    more = (found[last]["allocated"] - found[first]["allocated"]) / (len(found) - 1)
    falls = all(later <= before for before, later in pairwise(p50.values()))
    return Claim(
        _TWIN_FLOW,
        f"{p50[first]:.0f} ms a step as ZeRO-Offload, {series([f'{p50[ratio]:.0f}' for ratio in between])} ms at "
        f"ratios of {between[0]:g} to {lowest:g}, {p50[last]:.1f} at ratio {last:g}: {reached}, {at_zero}. Each "
        f"{first - between[0]:.1g} less takes {more / 1e9:.1f} GB more on the device ({_ON_GPU_OF}); planned within "
        f"{min(off):.0%} to {max(off):+.0%}",
        GPU,
        HOLDS if falls and p50[first] / p50[last] >= 6 else PART,
        f"{reached}, {at_zero} ({_ON_GPU_OF})",
        again=_RATIOS_ON_GPU_AGAIN,
    )


def _both_on_gpu(figures: Figures) -> Claim:
    alone, both = _over_ratios(figures, "zero-offload"), _over_ratios(figures, "zenflow")
    whole, *_ = both.values()
    shown = [ratio for ratio in both if 0 < ratio < 0.8]
    steps = series([f"{both[ratio]['p50']:.3g}" for ratio in shown])
    beside_twin_flow = series([f"{alone[ratio]['p50'] / both[ratio]['p50']:.1f}" for ratio in shown])
    beside_zenflow = series([f"{whole['p50'] / both[ratio]['p50']:.1f}" for ratio in shown])
    more = [(both[ratio]["allocated"] - whole["allocated"]) / 1e9 for ratio in shown]
    return Claim(
        "ZenFlow and Twin-Flow together",
        f"{steps} ms a step at ratios of {series([f'{ratio:g}' for ratio in shown])}: {beside_twin_flow} times as fast "
        f"as Twin-Flow alone, {beside_zenflow} times as fast as ZenFlow alone, for {min(more):.0f} to {max(more):.0f} "
        f"GB more on the device ({_ON_GPU_OF})",
        GPU,
        HOLDS if all(both[ratio]["p50"] < min(alone[ratio]["p50"], whole["p50"]) for ratio in shown) else PART,
        again=_RATIOS_ON_GPU_AGAIN,
    )


def _both(figures: Figures) -> list[Claim]:
    rows = [row for one in of(figures, "both--").values() for row in one["limits"].values()]
    wins = {kind: sum(row["wins"] == kind for row in rows) for kind in ("Twin-Flow", "ZenFlow", "both")}
    gains = [
        min(one["step_ms"] for kind, one in row["kinds"].items() if kind != "both") / row["kinds"]["both"]["step_ms"]
        for row in rows
        if row["wins"] == "both"
    ]
    rigs = len(of(figures, "both--"))
    where = {
        name: min(float(limit) for limit, row in one["limits"].items() if row["wins"] == "both")
        for name, one in of(figures, "both--").items()
        if any(row["wins"] == "both" for row in one["limits"].values())
    }
    most = f", by up to {max(gains) - 1:.0%}" if gains else ""
    if where:
        most += (
            f" (on {series(list(where))}, where {min(where.values()):.0%} of the state or more may stay on the device)"
        )
    return [
        Claim(
            "ZenFlow and Twin-Flow together",
            f"Of {len(rows)} cases ({rigs} rigs, five limits of device memory) both together win {wins['both']}{most}; "
            f"Twin-Flow alone, which is never late, is as fast in {wins['Twin-Flow']}, ZenFlow alone in "
            f"{wins['ZenFlow']}",
            PLANNED,
            PART,
            f"win {wins['both']} of {len(rows)} cases of {rigs} rigs and five limits of device memory",
            again=_parts("both"),
        )
    ]
