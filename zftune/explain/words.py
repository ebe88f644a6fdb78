"""What a document of a tuned run says, in sentences: of `zftune explain` and of `zftune tune` alike."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from zenflow import ZenFlowConfig
from zftune.errors import BadInputError
from zftune.quality import allowed_loss_percent, loss_bound, most_late_steps, moved_in_a_step
from zftune.store.account import saved_in_words, within_noise
from zftune.text import number, percent
from zftune.tuner import messages as of_search
from zftune.tuner.space import Setting
from zftune.tuner.states import OF_INCUMBENT, REFERENCES, UNSEARCHED
from zftune.words import ROLES, TRIALS, seconds, shares, value

Document = Mapping[str, Any]

_UNCOMPARED = "not compared"
_TRIED = ("measured", "crashed")
_FIGURE = re.compile(r"\d+(?:\.\d+)?")


def setting(knobs: Mapping[str, Any]) -> str:
    """Knobs in words."""
    known = _setting(knobs)
    return str(known) if known is not None else ", ".join(f"{name} {value(one)}" for name, one in knobs.items())


def identity(knobs: Mapping[str, Any]) -> Hashable:
    """What is the same for knobs that are one setting, and for these alone."""
    return _setting(knobs) or json.dumps(dict(knobs), sort_keys=True)


def differences(knobs: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """What is set otherwise than in `others`, in words; "" where nothing is."""
    one, other = _setting(knobs), _setting(others)
    if one is not None and other is not None:
        return one.differences(other)
    changed = (name for name in knobs if name not in others or knobs[name] != others[name])
    return ", ".join(f"{name} {value(knobs[name])}" for name in changed)


def staleness_steps(knobs: Mapping[str, Any]) -> float | None:
    """Mean staleness; None: the knobs do not tell."""
    known = _setting(knobs)
    return None if known is None else known.mean_staleness_steps


def _setting(knobs: Mapping[str, Any]) -> Setting | None:
    try:
        known = Setting.from_knobs(knobs)
        str(known)
    except (BadInputError, TypeError, ValueError):  # of another backend, or not written by a search
        return None
    return known


# --- the verdict ------------------------------------------------------------------------------------------------------


def verdict(document: Document) -> list[str]:
    """What came of it."""
    if document["best"] is None:
        return ["The search had not begun."]
    counted = document["cost"].get("steps") is not None  # also where nothing was measured
    sentences = [cost_and_gain(document)] if counted or is_measured(document) else []
    changed = differences(document["best"]["knobs"], document["start"]["knobs"])
    if changed:
        keeps = "It ended with" if within_noise(document["gain"]) else "Keep"
        keep = [f"{keeps} {changed}; all else as it was at the start.", *too_late_at_the_peak(document)]
        sentences += [" ".join(keep), *to_copy(document)]
    else:
        sentences.append(nothing_adopted(document))
    return [*sentences, *ending(document)]


def to_copy(document: Document) -> list[str]:
    """The best knobs of our optimizer as code and as a section of a ds_config."""
    best = _setting(document["best"]["knobs"])
    if best is None:
        return []
    config = best.config(_base(document))
    section = json.dumps(config.to_ds_config().get("zero_optimization", {}))
    return [f"in Python: {config.to_python()}", f'in a ds_config for zftune run: "zero_optimization": {section}']


def _base(document: Document) -> ZenFlowConfig:
    """What no search changes of the training's configuration, and else the defaults."""
    return ZenFlowConfig(**document["run"]["settings"].get(UNSEARCHED, {}))


def is_measured(document: Document) -> bool:
    """Whether anything was."""
    return any(trial["step_ms"] is not None or trial["state"] in _TRIED for trial in document["trials"])


def nothing_adopted(document: Document) -> str:
    """What may be said where the best setting is the first one."""
    start = identity(document["start"]["knobs"]) if document["start"] is not None else None
    others = [trial for trial in document["trials"] if identity(trial["knobs"]) != start]
    tried = distinct(trial for trial in others if trial["state"] in _TRIED)
    known = is_measured(document)
    kinds = {note["kind"] for note in document["decisions"]}
    kept = setting(document["best"]["knobs"])
    crashed = distinct(trial for trial in others if trial["state"] == "crashed")
    if crashed and crashed == tried:
        what = "The one other setting that was tried" if tried == 1 else f"All {tried} other settings that were tried"
        return f"{what} crashed, so that nothing is known of how fast others are. It began with: {kept}."
    said = of_search.nothing_adopted(measured=known, tried=tried, kinds=kinds)
    return f"{said}. {'Keep what it began with' if tried else 'It began with'}: {kept}."


def distinct(trials: Iterable[Mapping[str, Any]]) -> int:
    """How many settings they are: one that is tried again, as after the search began again, is one."""
    return len({identity(trial["knobs"]) for trial in trials})


def lateness_bound(document: Document) -> str:
    """How far the weights move, and what the quality makes of it; "": that is not known, or nothing may be late."""
    budget = document["budget"]
    if budget is None or budget.get("movement_percent") is None:
        return ""
    quality, now = document["quality"], (budget["movement_percent"], budget["movement_learning_rate"])
    peak = budget["peak_movement_percent"], budget["peak_learning_rate"]
    percent, rate = now if peak[0] is None else peak
    most = most_late_steps(quality, percent)
    loss, why = allowed_loss_percent(quality, percent)
    late = f"updates may come {number(most)} steps late on average" + (f" ({why})" if why else "")
    said = f"{moved_in_a_step(percent, rate)}: {late}, which adds {loss_bound(loss, most)}"
    if peak[0] is None:
        return said
    return f"{said}; at the last {moved_in_a_step(*now)}, which allows {number(most_late_steps(quality, now[0]))} steps"


def too_late_at_the_peak(document: Document) -> Iterator[str]:
    """That the quality allows the best setting only with the steps of a training's end, which are small."""
    budget, late = document["budget"] or {}, document["best"].get("quality_cost_steps")
    percent = budget.get("peak_movement_percent")
    if late is None or percent is None:
        return
    most = most_late_steps(document["quality"], percent)
    if late > most * (1 + 1e-9):
        small = moved_in_a_step(budget["movement_percent"], budget["movement_learning_rate"])
        at_last = most_late_steps(document["quality"], budget["movement_percent"])
        large = moved_in_a_step(percent, budget["peak_learning_rate"])
        yield (
            f"For the beginning of another training it may come too late: {number(late)} steps, where the quality "
            f"allows {number(most)} while {large}, and {number(at_last)} while {small}."
        )


def fates(document: Document) -> dict[int, str]:
    """What became of each setting, by number, in a word or two; nothing is claimed of one that was not compared."""
    decided: dict[int, set[str]] = defaultdict(set)
    for note in document["decisions"]:
        if note["trial"] is not None:
            decided[note["trial"]].add(note["kind"])
    return {trial["number"]: _fate(document, trial, decided[trial["number"]]) for trial in document["trials"]}


def _fate(document: Document, trial: Mapping[str, Any], decided: set[str]) -> str:
    if trial["state"] != "measured":
        return TRIALS.get(trial["state"], str(trial["state"]))
    if trial["number"] == document["best"]["number"]:
        return "kept"
    if trial["source"] == "start":
        return "start"
    if "rollback" in decided:
        return "rolled back"
    if trial["source"] in REFERENCES and "keep" in decided:
        return "compared again"
    if "adopt" in decided or "keep" in decided:
        return "adopted before" if "adopt" in decided else "not adopted"
    return _UNCOMPARED


def ending(document: Document) -> list[str]:
    """How the run ended, where it did not simply end."""
    run = document["run"]
    state = run["state"]
    if state == "running" and not run["tuned"]:
        return ["It is still training, and nothing tunes it until a daemon does: this is what is known so far."]
    if state == "running":
        return ["It is still running: this is what is known so far."]
    if document["interrupted"] or state == "ended":  # by its last step, by Ctrl-C, or killed
        return ["It ended before its search did: this is what was found until then."]
    return []


def cost_and_gain(document: Document) -> str:
    """What exploring cost, what it won, and when the one had paid for the other."""
    cost = document["cost"]
    if cost["spent_s"] > 0 and cost["elapsed_s"] > 0:
        share, spent, elapsed = (
            cost["spent_s"] / cost["elapsed_s"],
            seconds(cost["spent_s"]),
            seconds(cost["elapsed_s"]),
        )
        parts = [f"Spent {percent(share)} of the run ({spent} of {elapsed})"]
    else:
        parts = [f"Spent nothing in {seconds(cost['elapsed_s'])}"]
    left_s = cost["remaining_s"] if cost["spent_s"] > 0 and not within_noise(document["gain"]) else None
    more = [] if left_s is None else [f"not yet broken even: {seconds(left_s)} more under these settings pay for it"]
    compared = document["gain"] is not None or not differences(document["best"]["knobs"], document["start"]["knobs"])
    parts += _gained(document) if compared else []
    return ", ".join([*parts, *saved_in_words(cost, document["gain"]), *more]) + "."


def _gained(document: Document) -> list[str]:
    """What the best settings gain, over what, and whether that is older than the last of the search's parts."""
    gain = document["gain"]
    if gain is None:  # what was saved before it was rolled back stays saved
        return [] if document["cost"]["saved_s"] else ["gained nothing"]
    if within_noise(gain):
        return [f"gained nothing beyond noise ({shares(gain['share'], gain['error'])})"]
    if gain["share"] >= 0:
        what = f" over {over(gain)}" if gain.get("reference") else ""
        return [f"gained {shares(gain['share'], gain['error'])}{what}"]
    return [f"gave up {shares(-gain['share'], gain['error'])} for earlier updates or less memory"]


def over(gain: Mapping[str, Any]) -> str:
    """What a gain of a document is over, in words."""
    reference = gain.get("reference")
    return of_search.required(setting(reference)) if reference else "the settings at the start"


# --- single things ----------------------------------------------------------------------------------------------------


def measurement(one: Mapping[str, Any]) -> str:
    """A measurement: its role, its steps and its step time."""
    role = ROLES.get(one["role"], one["role"])
    if one["role"] == "start" and one["number"] > 1:
        role = "the best so far, once more"
    what = f"{role}, {one['steps']} step{'' if one['steps'] == 1 else 's'}"
    if one["step_ms"] is not None:
        what += f", {number(one['step_ms'])} ms a step"
    if one["status"] == "measured":
        return what
    return f"{what}, {TRIALS.get(one['status'], one['status'])}: {one['reason'] or 'no reason given'}"


class Entry(NamedTuple):
    """One of a run's decisions, or measurements that nothing was decided by."""

    at_s: float
    note: Mapping[str, Any] | None
    """The decision; None: there is none."""
    reason: str
    measured: list[str]
    """The measurements behind it; those of another setting than the decision's say which."""


def entries(document: Document) -> Iterator[Entry]:
    """Decisions in their order, each with its measurements."""
    history = {one["number"]: one for one in document["history"]}
    used: set[int] = set()
    for note in document["decisions"]:
        used |= set(note["measured"])
        told = [] if note["kind"] != "crash" else [one for one in note["measured"] if not history[one]["steps"]]
        numbers = [one for one in note["measured"] if one not in told]  # its reason says it
        lines = [_of_trial(document, note["trial"], history[one]) for one in numbers]
        yield Entry(note["at_s"], note, note["reason"], lines)
    left = [one for number, one in history.items() if number not in used]
    if left:
        lines = [_of_trial(document, None, one) for one in left]
        yield Entry(left[-1]["ended_s"], None, "Nothing was decided since.", lines)


def _of_trial(document: Document, about: int | None, one: Mapping[str, Any]) -> str:
    if one["role"] in OF_INCUMBENT or one["trial"] == about:
        return measurement(one)
    return f"{measurement(one)} (setting {one['trial']}: {setting(document['trials'][one['trial']]['knobs'])})"


def candidate(trial: Mapping[str, Any], incumbent: Mapping[str, Any]) -> str:
    """A trial by what differs from the incumbent."""
    return differences(trial["knobs"], incumbent["knobs"]) or setting(trial["knobs"])


def unseen(trials: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last rejection of each setting that was never applied, however often it was thought of."""
    newest: dict[Hashable, Mapping[str, Any]] = {}
    applied = set()
    for trial in trials:
        if trial["state"] == "rejected":
            newest[identity(trial["knobs"])] = trial
        elif trial["state"] not in ("planned", "void"):
            applied.add(identity(trial["knobs"]))
    return [trial for one, trial in newest.items() if one not in applied]


def rejected(trials: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Why settings were never applied: {"reason", "count"}, most first; figures of like reasons as ranges."""
    groups: dict[str, list[str]] = defaultdict(list)
    for trial in unseen(trials):
        reason = trial["reason"] or "no reason given"
        groups[_FIGURE.sub("#", reason)].append(reason)
    found = [{"reason": _together(reasons), "count": len(reasons)} for reasons in groups.values()]
    return sorted(found, key=lambda one: -one["count"])


def _together(reasons: Sequence[str]) -> str:
    columns = list(zip(*(_FIGURE.findall(reason) for reason in reasons), strict=True))
    ranges = []
    for column in columns:
        least, most = min(column, key=float), max(column, key=float)
        ranges.append(least if float(least) == float(most) else f"{least} to {most}")
    left = iter(ranges)
    return _FIGURE.sub(lambda _: next(left), reasons[0])
