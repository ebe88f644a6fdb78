"""A document of `zftune explain` or `zftune tune` in sentences."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from zenflow import ZenFlowConfig
from zftune.errors import BadInputError
from zftune.quality import allowed_loss_percent, loss_bound, most_late_steps, moved_in_a_step
from zftune.store.account import saved_in_words, within_noise
from zftune.text import number, percent
from zftune.tuner import messages
from zftune.tuner.space import Setting
from zftune.tuner.states import UNSEARCHED
from zftune.words import ROLES, TRIALS, seconds, shares, value

Document = Mapping[str, Any]
_TRIED = ("measured", "crashed")
_FIGURE = re.compile(r"\d+(?:\.\d+)?")


def _setting(knobs: Mapping[str, Any]) -> Setting | None:
    try:
        known = Setting.from_knobs(knobs)
        str(known)
    except (BadInputError, TypeError, ValueError):  # of another backend, or not written by a search
        return None
    return known


def setting(knobs: Mapping[str, Any]) -> str:
    """Knobs in words."""
    known = _setting(knobs)
    return str(known) if known is not None else ", ".join(f"{name} {value(one)}" for name, one in knobs.items())


def identity(knobs: Mapping[str, Any]) -> Hashable:
    """The same for knobs that are one setting, and for these alone."""
    return _setting(knobs) or json.dumps(dict(knobs), sort_keys=True)


def differences(knobs: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """The knobs that differ from `others`, in words; "": none."""
    one, other = _setting(knobs), _setting(others)
    if one is not None and other is not None:
        return one.differences(other)
    changed = (name for name in knobs if name not in others or knobs[name] != others[name])
    return ", ".join(f"{name} {value(knobs[name])}" for name in changed)


def staleness_steps(knobs: Mapping[str, Any], settings: Mapping[str, Any]) -> float | None:
    """Mean staleness in a run with these settings; None: not known."""
    known, phase = _setting(knobs), settings.get(UNSEARCHED, {}).get("window_phase")
    return None if known is None else known.late_steps(staggered=phase == "staggered")


# --- the verdict ------------------------------------------------------------------------------------------------------


def verdict(document: Document) -> list[str]:
    """The result."""
    best, start = document["best"], document["start"]
    if best is None:
        return ["The search had not begun."]
    is_counted = document["cost"].get("steps") is not None  # also where nothing was measured
    sentences = [cost_and_gain(document)] if is_counted or is_measured(document) else []
    changed = differences(best["knobs"], start["knobs"])
    if changed:
        keeps = "It ended with" if within_noise(document["gain"]) else "Keep"
        sentences += [f"{keeps} {changed}; all else as it was at the start.", *to_copy(document)]
    else:
        sentences.append(nothing_adopted(document))
    state = document["run"]["state"]
    if state == "running":
        doing = "running" if document["run"]["tuned"] else "training, and nothing tunes it until a daemon does"
        sentences.append(f"It is still {doing}: this is known so far.")
    elif document["interrupted"] or state == "ended":  # by its last step, by Ctrl-C, or killed
        sentences.append("It ended before its search did: this was found until then.")
    return sentences


def to_copy(document: Document) -> list[str]:
    """The best knobs as code and as a section of a ds_config; the rest is that of the training, else the defaults."""
    best = _setting(document["best"]["knobs"])
    if best is None:
        return []
    config = best.config(ZenFlowConfig(**document["run"]["settings"].get(UNSEARCHED, {})))
    section = json.dumps(config.to_ds_config().get("zero_optimization", {}))
    return [f"in Python: {config.to_python()}", f'in a ds_config for zftune run: "zero_optimization": {section}']


def is_measured(document: Document) -> bool:
    """Whether anything was."""
    return any(trial["step_ms"] is not None or trial["state"] in _TRIED for trial in document["trials"])


def nothing_adopted(document: Document) -> str:
    """The result if the best setting is the first one."""
    start = {identity(document["start"]["knobs"])} if document["start"] is not None else set()
    tried = {identity(trial["knobs"]) for trial in document["trials"] if trial["state"] in _TRIED} - start
    kinds = {note["kind"] for note in document["decisions"]}
    result = messages.nothing_adopted(measured=is_measured(document), tried=len(tried), kinds=kinds)
    return f"{result}. {'Keep what it began with' if tried else 'It began with'}: {setting(document['best']['knobs'])}."


def lateness_bound(document: Document) -> str:
    """How far the weights move, and what the quality makes of it; "": that is not known, or nothing may be late."""
    budget, quality = document["budget"], document["quality"]
    if budget is None or budget["movement_percent"] is None:
        return ""
    moved, rate = budget["movement_percent"], budget["movement_learning_rate"]
    guesses: bool = document["run"]["settings"].get("guesses", False)
    most = most_late_steps(quality, moved, guesses=guesses)
    loss, why = allowed_loss_percent(quality, moved, guesses=guesses)
    late = f"updates may come {number(most)} steps late on average" + (f" ({why})" if why else "")
    return f"{moved_in_a_step(moved, rate)}: {late}, which adds {loss_bound(loss, most, guesses=guesses)}"


def cost_and_gain(document: Document) -> str:
    """What exploring cost, what it gained, and when the one had paid for the other."""
    cost, gain = document["cost"], document["gain"]
    spent, elapsed = seconds(cost["spent_s"]), seconds(cost["elapsed_s"])
    parts = [f"Spent nothing in {elapsed}"]
    if cost["spent_s"] > 0 and cost["elapsed_s"] > 0:
        parts = [f"Spent {percent(cost['spent_s'] / cost['elapsed_s'])} of the run ({spent} of {elapsed})"]
    left_s = cost["remaining_s"] if cost["spent_s"] > 0 and not within_noise(gain) else None
    more = [] if left_s is None else [f"not yet broken even: {seconds(left_s)} more under these settings pay for it"]
    if gain is not None or not differences(document["best"]["knobs"], document["start"]["knobs"]):
        parts += _gained(gain, cost["saved_s"])
    return ", ".join([*parts, *saved_in_words(cost, gain), *more]) + "."


def _gained(gain: Mapping[str, Any] | None, saved_s: float) -> list[str]:
    if gain is None:  # what was saved before it was rolled back stays saved
        return [] if saved_s else ["gained nothing"]
    size = shares(abs(gain["share"]), gain["error"])
    if within_noise(gain):
        return [f"gained nothing beyond noise ({shares(gain['share'], gain['error'])})"]
    if gain["share"] < 0:
        return [f"gave up {size} for earlier updates or less memory"]
    return [f"gained {size}" + (f" over {over(gain)}" if gain["reference"] else "")]


def over(gain: Mapping[str, Any]) -> str:
    """What a gain of a document is over, in words."""
    return messages.reference(setting(gain["reference"]) if gain.get("reference") else None)


# --- single things ----------------------------------------------------------------------------------------------------


def measurement(document: Document, one: Mapping[str, Any]) -> str:
    """A measurement: its role, its setting, its steps and its step time."""
    what = f"{ROLES.get(one['role'], one['role'])}, {one['steps']} step{'' if one['steps'] == 1 else 's'}"
    if one["step_ms"] is not None:
        what += f", {number(one['step_ms'])} ms a step"
    if one["status"] != "measured":
        what += f", {TRIALS.get(one['status'], one['status'])}: {one['reason'] or 'no reason given'}"
    return f"{what} (setting {one['trial']}: {setting(document['trials'][one['trial']]['knobs'])})"


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
    """Why settings were never applied: {"reason", "count"}, most first; of like reasons the newest."""
    groups: dict[str, list[str]] = defaultdict(list)
    for trial in unseen(trials):
        reason = trial["reason"] or "no reason given"
        groups[_FIGURE.sub("#", reason)].append(reason)
    found = [{"reason": reasons[-1], "count": len(reasons)} for reasons in groups.values()]
    return sorted(found, key=lambda one: -one["count"])
