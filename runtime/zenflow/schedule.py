"""When windows close, when their buckets become visible, when columns are selected. Pure integers, no tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zenflow.config import AUTO_SELECT_INTERVAL, Auto, ZenFlowConfig


@dataclass(frozen=True, slots=True)
class BucketWindow:
    """The window of one bucket that a step closes."""

    steps: int
    """n_w: its steps, the closing one included."""
    due: int
    """The step after which its updates become visible, if none of the bucket's windows closes before."""

    def missing(self, closed: int) -> float:
        """Updates that what is visible after `due` lacks in the mean until the next window is."""
        return (self.steps - 1) / 2 + self.due - closed


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the schedule says about one step."""

    step: int
    window_steps: int
    """Steps since all windows closed, this one included."""
    closes: bool
    """Whether the windows of all buckets close."""
    synchronous: bool
    """Whether a window that closes here is applied here (warm-up, or no overlap)."""
    turns: int = 0
    """S where buckets close by turns; 0: all close together."""
    exact: bool = False
    """Whether weights that become visible here are what their masters round to, whatever looks ahead."""

    @property
    def ends_a_cycle(self) -> bool:
        """Whether every bucket has closed since the last such step; the first ones close here."""
        return self.closes or (self.turns > 0 and self.window_steps % self.turns == 0)

    def window(self, bucket: int, buckets: int, lag: int) -> BucketWindow | None:
        """The window of bucket b of B that closes here; None: it stays open.

        By turns it closes where the steps since all closed are floor(b S / B) more than a multiple of S.
        """
        turn = bucket * self.turns // buckets
        if not self.closes and (not self.turns or (self.window_steps - turn) % self.turns):
            return None
        if self.turns:
            steps = self.window_steps - _last_turn(self.window_steps - 1, turn, self.turns)
            due = self.step + min(lag, steps)
        else:
            steps = self.window_steps
            due = due_step(self.step, steps, lag, bucket=bucket, buckets=buckets)
        return BucketWindow(steps, self.step if self.synchronous else due)


class WindowClock:
    """Counts steps and closes windows; owned by one optimizer."""

    def __init__(self, config: ZenFlowConfig) -> None:
        self.config = config
        """The knobs in force; may be replaced between two steps."""
        self.step = 0
        """Number of the last step that began (0 before the first)."""
        self.window_steps = 0
        """Steps since all windows closed."""

    def advance(self, *, close: bool = False, at_once: bool = False) -> StepPlan:
        """Begin the next step; where `close`, all windows close in any case, and are applied in it where `at_once`.

        A step that closes all windows must be ended with `close()`.
        """
        self.step += 1
        self.window_steps += 1
        warm = self.step <= self.config.full_warm_up_rounds
        turns = self.config.longest_window if self.config.staggers else 0
        closes = warm or close or (not turns and self.window_steps >= self.config.longest_window)
        synchronous = warm or at_once or not self.config.overlap_step
        return StepPlan(self.step, self.window_steps, closes, synchronous, turns, exact=at_once)

    def close(self) -> None:
        """End all open windows; the next step begins new ones."""
        self.window_steps = 0


def _last_turn(steps: int, turn: int, turns: int) -> int:
    """The last of the first `steps` steps in which a bucket's turn was; 0: none."""
    return max(0, turn + turns * ((steps - turn) // turns))


def due_step(close_step: int, window_steps: int, lag: int, *, bucket: int, buckets: int) -> int:
    """The step after which a bucket of an overlapped window becomes visible, if no window closes before.

    `e_w + 1 + floor(b * min(L, n_w) / B)`: spread over the lag, so that H2D makes no spike. b is from 0 to B - 1.
    """
    return close_step + 1 + bucket * min(lag, window_steps) // buckets


def turn_of(config: ZenFlowConfig, bucket: int, buckets: int) -> int:
    """The steps after a multiple of S, since all windows closed, in which that of a bucket closes."""
    return bucket * config.longest_window // buckets if config.staggers else 0


def usually_missing(config: ZenFlowConfig, bucket: int, buckets: int) -> float:
    """Updates that a bucket lacks in the mean while it is visible, after windows of S steps."""
    steps, lag = config.longest_window, min(config.lag, config.longest_window)
    if not config.overlap_step:
        return (steps - 1) / 2
    due = lag if config.staggers else due_step(0, steps, lag, bucket=bucket, buckets=buckets)
    return (steps - 1) / 2 + due


def logged_bytes(config: ZenFlowConfig, entries: Iterable[tuple[int, int]]) -> int:
    """Most bytes that the open windows hold, given turn and bytes of one step's entry of each bucket."""
    interval, by_turn = config.longest_window, Counter[int]()
    for turn, nbytes in entries:
        by_turn[turn] += nbytes
    return max(
        sum(nbytes * (step - _last_turn(step - 1, turn, interval)) for turn, nbytes in by_turn.items())
        for step in range(interval, 2 * interval)  # a whole cycle, which no first window outlasts
    )


def log_bytes(config: ZenFlowConfig, entries: Sequence[tuple[int, int]], buckets: int) -> int:
    """Bytes of the log: of all open windows, and of one of the largest bucket: what draining one frees, others fill.

    Args:
        entries: number and bytes of one step's entry of each of the buckets that there are.
        buckets: B.
    """
    held = logged_bytes(config, ((turn_of(config, bucket, buckets), nbytes) for bucket, nbytes in entries))
    return held + config.longest_window * max((nbytes for _, nbytes in entries), default=0)


def selects(step: int, select_interval: int | Auto) -> bool:
    """Whether a step computes a new selection: 1, 1 + R, 1 + 2R, ... ("auto" only looks whether one is needed).

    One step after a multiple of R, so that with R a multiple of S the new columns are known on the host
    long before the close at which they take effect.
    """
    return (step - 1) % (AUTO_SELECT_INTERVAL if select_interval == "auto" else select_interval) == 0
