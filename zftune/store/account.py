"""The account of a run: what it took, spent and gained. There is one, and every screen, sentence and document reads it.

Who counts: the process that trains, and nobody else (`Counter`), by the clock of its device, from the moment on at
which its optimizer is followed. It gives out totals, never differences: a message that is lost, or that comes twice,
changes nothing, and of two counts of one process the later one holds.

Where it is kept: in the run's row (`Account`), which whoever writes the run's rows (the daemon, or the process itself)
brings up to date with each of them. The process that trains moreover writes its count into a file beside the database
about once a second, and holds a lock on it for as long as it lives (`Pulse`). So neither a daemon nor a training that
is killed takes more than that with it, a training whose daemon is gone is still known to live, and what it was doing
when it ended is known, too. Readers take both (`Store.account`); `Store.reap` moves a dead process's last count into
the row. On a database server, which has no such file, the row alone counts: it is as old as the last row or renewal of
the lease.

What it counts: while a setting is the incumbent whose gain over the starting point is g, a second of training under it
saves g / (1 - g) seconds: the starting point would have taken 1 / (1 - g). One that nobody compared, since it took its
place for the quality or for memory, saves nothing, and what is adopted after it saves against it. Trying a setting
costs the time of its steps beyond the incumbent's time for as many, if that is more than nothing, once the try is over.
A run has broken even where the savings have caught up with the cost for good.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from zftune.store.locks import RunLocks
from zftune.words import seconds

BEAT_S = 1.0
"""Between two beats of a training that searches in its own process."""
_SUFFIX = ".training"
_BYTES = 512
"""Of the file, always: a shorter text is filled up with blanks, so that no reader sees two of them mixed."""
_SAME_RATE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Totals of one process, or of several one after the other. They only grow; `saved_s` may not, see `Counter`.

    The learning rates of several are those of the last one; with those before it where it may follow their schedule.
    """

    steps: int = 0
    seconds: float = 0.0
    """That passed on the clock of the training: what a stopwatch beside it shows."""
    tokens: int = 0
    spent_s: float = 0.0
    """By exploring: beyond what the incumbent would have taken."""
    saved_s: float = 0.0
    """By the incumbents, against the setting that the search began from."""
    lowest_rate: float = 0.0
    """Of the learning rates of its steps, each at its highest as far as the optimizer keeps that."""
    highest_rate: float = 0.0
    """Of the same; 0: none is known."""

    def __post_init__(self) -> None:
        if min(self.steps, self.seconds, self.tokens, self.spent_s) < 0:
            raise ValueError("a count is below 0")

    def __add__(self, other: Count) -> Count:
        found = {one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)}
        rates = [(one.lowest_rate, one.highest_rate) for one in (self, other) if one.highest_rate]
        if len(rates) == 2 and not self.has_learned_at(other.highest_rate):
            del rates[0]
        found["lowest_rate"] = min((lowest for lowest, _ in rates), default=0.0)
        found["highest_rate"] = max((highest for _, highest in rates), default=0.0)
        return Count(**found)

    @property
    def tokens_told(self) -> int | None:
        """Its tokens; None: nobody told of more than one a step."""
        return self.tokens if self.tokens > self.steps else None

    def has_learned_at(self, rate: float) -> bool:
        """Whether a learning rate, at its highest, is among its own: an unsaved schedule may have reached it again."""
        return self.lowest_rate * (1 - _SAME_RATE) <= rate <= self.highest_rate * (1 + _SAME_RATE)

    def trained(self, seconds: float, gain: float) -> Count:
        """With time under the incumbent, whose gain is a share of the starting point's time."""
        return replace(self, saved_s=self.saved_s + seconds * gain / (1 - gain))

    def tried(self, seconds: float, incumbent_s: float, gain: float) -> Count:
        """With time under another setting, for which the incumbent would have taken `incumbent_s`."""
        spent_s = max(0.0, seconds - incumbent_s)
        return replace(self.trained(seconds - spent_s, gain), spent_s=self.spent_s + spent_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Of a run, over all processes that have trained it. A document of it is what `dataclasses.asdict` makes."""

    process: str = ""
    """The last one that counted; random."""
    earlier: tuple[str, ...] = ()
    """Those before it: what is still heard of one of them, such as a file of it, was counted."""
    before: Count = Count()
    """By those before it."""
    now: Count = Count()
    """By it."""
    even_s: float | None = None
    """When the savings caught up with the cost; None: they are behind, or there was no cost."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Account:
        """From a document. Raises TypeError, ValueError, KeyError: it is none."""
        before, now = (Count(**document[name]) for name in ("before", "now"))
        earlier = tuple(document["earlier"])
        return cls(process=document["process"], earlier=earlier, before=before, now=now, even_s=document["even_s"])

    @property
    def total(self) -> Count:
        """Of all processes."""
        return self.before + self.now

    def taken(self, process: str, count: Count) -> Account:
        """With a process's totals; an older count of it, or none at all, changes nothing."""
        if count == Count() or process in self.earlier:
            return self
        if process == self.process and count.seconds < self.now.seconds:
            return self
        if process != self.process:
            earlier = (*self.earlier, self.process) if self.process else ()
            found = replace(self, process=process, earlier=earlier, before=self.total, now=count)
        else:
            found = replace(self, now=count)
        return replace(found, even_s=_even_s(self.total, found.total, self.even_s))

    @property
    def break_even_s(self) -> float | None:
        """After how many seconds it broke even; None: it has not, or nothing was saved."""
        total = self.total
        if total.saved_s <= 0 or total.saved_s < total.spent_s:
            return None
        return self.even_s if self.even_s is not None else 0.0

    def remaining_s(self, gain: float) -> float | None:
        """Training under the incumbent until it breaks even; None: it has, or never will.

        `gain` is a share of the starting point's time.
        """
        missing_s = self.total.spent_s - self.total.saved_s
        return missing_s * (1 - gain) / gain if gain > 0 and missing_s > 0 else None


def _even_s(old: Count, new: Count, even_s: float | None) -> float | None:
    """When savings caught up with the cost, as if both had grown evenly from one count to the next."""
    before, after = old.saved_s - old.spent_s, new.saved_s - new.spent_s
    if after < 0:
        return None
    if before >= 0:
        return even_s
    return old.seconds + (new.seconds - old.seconds) * before / (before - after)


_UNEVEN = 1.5
"""How often an error to one side is the other's before both are told."""
_MOST = 0.99
"""Of a gain, at its upper end."""


def saved_in_words(found: Mapping[str, Any], gain: Mapping[str, float] | None) -> list[str]:
    """What a run's settings saved, and whether that has made up for exploring, as parts of a sentence.

    `found` has "spent_s", "saved_s" and "break_even_s"; `gain` is that of `saved_with_error`.
    """
    spent_s, saved_s, even_s = found["spent_s"], found["saved_s"], found["break_even_s"]
    parts = []
    if saved_s and within_noise(gain):
        return ["saved nothing beyond noise"]
    if abs(saved_s) >= 0.001:
        text = saved_with_error(saved_s, gain)
        parts.append(f"saved {text}" if saved_s > 0 else f"gave up {text} for earlier updates or less memory")
    if saved_s and spent_s and even_s is not None:
        probably = "probably " if (_ends_s(saved_s, gain) or (saved_s,))[0] < spent_s else ""
        parts.append(probably + (f"broke even after {seconds(even_s)}" if even_s else "broke even at once"))
    return parts


def within_noise(gain: Mapping[str, Any] | None) -> bool:
    """Whether noise may explain a gain."""
    return gain is not None and abs(gain["share"]) <= gain["error"]


def saved_with_error(saved_s: float, gain: Mapping[str, float] | None) -> str:
    """A saved time, or one that was given up, with the error of its gain, such as "32 +/- 23 s" or "156 s (42 to 700)".

    Args:
        saved_s: seconds; below 0: given up.
        gain: of the incumbent over the starting point, "share" and its "error" (two standard errors); None: there is
            none any more, so that the error is not known ("about 31.9 s").
    """
    ends_s = _ends_s(saved_s, gain)
    if ends_s is None:
        return f"about {seconds(abs(saved_s))}"
    saved_s, low_s, high_s = (saved_s, *ends_s) if saved_s > 0 else (-saved_s, -ends_s[1], -ends_s[0])
    below_s, above_s = saved_s - low_s, high_s - saved_s
    if below_s < 0.0005:  # of simulated time
        return seconds(saved_s)
    digits = min(3, max(0, 1 - math.floor(math.log10(below_s))))
    if above_s > _UNEVEN * below_s:
        return f"{saved_s:,.{digits}f} s ({low_s:,.{digits}f} to {high_s:,.{digits}f})"
    return f"{saved_s:,.{digits}f} +/- {(below_s + above_s) / 2:,.{digits}f} s"


def _ends_s(saved_s: float, gain: Mapping[str, float] | None) -> tuple[float, float] | None:
    """Of a time that was saved at this gain g: it is T g / (1 - g), where T is what training took. None: not at it."""
    if gain is None or saved_s * gain["share"] <= 0:
        return None
    share, error = gain["share"], gain["error"]
    took_s = saved_s * (1 - share) / share
    low, high = (took_s * end / (1 - end) for end in (share - error, min(share + error, _MOST)))
    return low, high


class Counter:
    """Counts in the process that trains. The training thread calls it; any thread may read `count`.

    A try is counted as a whole once it is over, since its first steps alone, which move state, would show a cost that
    its later ones win back. Where the incumbent is slower than the starting point (less stale, or smaller), savings
    shrink. All `now_s` are on the clock of the training.
    """

    def __init__(self, now_s: float) -> None:
        self.count = Count()
        self.last_step = 0
        """The optimizer's own number of the last step that is over."""
        self._began_s = now_s
        self._part = ""
        self._tried_s = self._incumbent_s = self._gain = 0.0

    def step(self, now_s: float, steps: int, tokens: int, rate: float = 0.0) -> None:
        """A step is over; `steps` is 0 for one that a gradient scaler left out, `rate` its highest learning rate, 0 if
        unknown.
        """
        count = self.count
        self.count = replace(
            count,
            steps=count.steps + steps,
            tokens=count.tokens + steps * tokens,
            seconds=max(count.seconds, now_s - self._began_s),
            lowest_rate=min(count.lowest_rate, rate) if count.highest_rate and rate else rate or count.lowest_rate,
            highest_rate=max(count.highest_rate, rate),
        )

    def trained(self, step_s: float, gain: float) -> None:
        """A step was the incumbent's."""
        self._end_part()
        self.count = self.count.trained(step_s, gain)

    def tried(self, part: str, step_s: float, incumbent_step_s: float | None, gain: float) -> None:
        """A step was another setting's; each `part` (a change of knobs, the measurement) is counted by itself.

        `incumbent_step_s` None: not known, nothing is spent.
        """
        if part != self._part:
            self._end_part()
        self._part, self._gain = part, gain
        self._tried_s += step_s
        self._incumbent_s += step_s if incumbent_step_s is None else incumbent_step_s

    def _end_part(self) -> None:
        if self._part:
            self.count = self.count.tried(self._tried_s, self._incumbent_s, self._gain)
        self._part, self._tried_s, self._incumbent_s = "", 0.0, 0.0


# --- beside the database ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a process that trains has last said of itself."""

    process: str
    count: Count
    trial: int | None
    """That ran instead of the incumbent; None: none did."""
    at_unix_s: float


class Pulse:
    """The file of a process that trains: its last count, under a lock that ends with it.

    Args:
        living: the locks of an open store, which end with it at the latest; or of its file, where another process has
            the store open.
    """

    def __init__(self, living: RunLocks, run_id: str, process: str) -> None:
        self._living, self._name, self._process = living, run_id + _SUFFIX, process
        # Whose name has no lock's file here is a run of another folder that has the same path in the daemon's eyes.
        self._holds = self._living.has(run_id) and self._living.hold(self._name)

    def beat(self, count: Count, trial: int | None) -> bool:
        """Write down what was counted, and what runs; before another setting than the incumbent does. Returns whether
        the lock is held; else there is no file, or it is somebody else's by now.
        """
        if not self._holds:
            return False
        beat = Beat(process=self._process, count=count, trial=trial, at_unix_s=time.time())
        return self._living.write(self._name, json.dumps(asdict(beat)).ljust(_BYTES), durable=trial is not None)

    def close(self, *, remove: bool) -> None:
        """Release the lock; `remove`: the count is in the run's row."""
        if self._holds and remove:
            self._living.release(self._name)
        elif self._holds:
            self._living.close(self._name)
        self._holds = False


class Heart:
    """Beats for a training that searches in its own process, in a thread, so that no step waits for a file."""

    def __init__(self, pulse: Pulse, counted: Callable[[], Count]) -> None:
        self._pulse, self._counted = pulse, counted
        self._trial: int | None = None
        self._beating = threading.Lock()
        """So that no beat says what ran before, after one that says what is about to."""
        self._ended = threading.Event()
        if pulse.beat(counted(), None):
            threading.Thread(target=self._run, name="zftune-pulse", daemon=True).start()

    def tries(self, trial: int | None) -> None:
        """Write down the trial that runs from now on, before it does; None: the incumbent."""
        with self._beating:
            self._trial = trial
            self._pulse.beat(self._counted(), trial)

    def end(self, *, remove: bool) -> None:
        """Stop beating; `remove`: the count is in the run's row."""
        self._ended.set()
        with self._beating:
            self._pulse.close(remove=remove)

    def _run(self) -> None:
        beats = True
        while beats and not self._ended.wait(BEAT_S):
            with self._beating:
                beats = self._pulse.beat(self._counted(), self._trial)


def beat_of(living: RunLocks, run_id: str) -> Beat | None:
    """The last beat of the process that trains a run; None: nothing, or it is not known."""
    text = living.read(run_id + _SUFFIX)
    try:
        found = json.loads(text)
        return Beat(**{**found, "count": Count(**found["count"])})
    except (ValueError, TypeError, KeyError):
        return None


def trains(living: RunLocks, run_id: str) -> bool:
    """Whether the process that trains a run lives, whoever tunes it; False also where that is not known."""
    return living.lives(run_id + _SUFFIX) is True


def died(living: RunLocks, run_id: str) -> bool:
    """Whether the process that trains a run is known to have ended without goodbye."""
    return living.lives(run_id + _SUFFIX) is False


def runs_with_pulse(living: RunLocks) -> list[str]:
    """Runs whose training has written something down."""
    return [one.removesuffix(_SUFFIX) for one in living.files() if one.endswith(_SUFFIX)]
