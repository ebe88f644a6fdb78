"""When windows close, when their buckets become visible, when columns are selected. Pure integers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from zenflow.config import AUTO_SELECT_INTERVAL, Auto, ZenFlowConfig


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the schedule says about one step."""

    step: int
    window_steps: int
    """n_w so far: steps in the open window, this one included."""
    closes: bool
    synchronous: bool
    """Whether a window that closes here is applied here (warm-up, or no overlap)."""
    exact: bool = False
    """Whether weights that become visible here are what their masters round to, whatever looks ahead."""

    def missing(self, due: int) -> float:
        """Updates that what closes here and is visible after the step `due` lacks in the mean while it is."""
        return 0.0 if self.exact else (self.window_steps - 1) / 2 + due - self.step


class WindowClock:
    """Counts steps and closes windows; owned by one optimizer."""

    def __init__(self, config: ZenFlowConfig) -> None:
        self.config = config
        """The knobs in force; may be replaced between two steps."""
        self.step = 0
        """Number of the last step that began (0 before the first)."""
        self.window_steps = 0
        """Steps in the open window."""

    def advance(self, *, close: bool = False, at_once: bool = False) -> StepPlan:
        """Begin the next step; where `close`, its window closes in any case, and is applied in it where `at_once`.

        A window that closes here must be ended with `close()`.
        """
        self.step += 1
        self.window_steps += 1
        warm = self.step <= self.config.full_warm_up_rounds
        closes = warm or close or self.window_steps >= self.config.longest_window
        synchronous = warm or at_once or not self.config.overlap_step
        return StepPlan(self.step, self.window_steps, closes, synchronous, exact=at_once)

    def close(self) -> None:
        """End the open window; the next step begins a new one."""
        self.window_steps = 0


def due_step(close_step: int, window_steps: int, lag: int, *, bucket: int, buckets: int) -> int:
    """The step after which a bucket of an overlapped window becomes visible, if no window closes before.

    `e_w + 1 + floor(b * min(L, n_w) / B)`: spread over the lag, so that H2D makes no spike. b is from 0 to B - 1.
    """
    return close_step + 1 + bucket * min(lag, window_steps) // buckets


def selects(step: int, select_interval: int | Auto) -> bool:
    """Whether a step computes a new selection: 1, 1 + R, 1 + 2R, ... ("auto" only looks whether one is needed).

    One step after a multiple of R, so that with R a multiple of S the new columns are known on the host
    long before the close at which they take effect.
    """
    return (step - 1) % (AUTO_SELECT_INTERVAL if select_interval == "auto" else select_interval) == 0
