"""Carries out a worker's requests in a training loop: knobs change through `set_knobs`, without a restart.

Nothing here waits: step times come from the optimizer's own history, two steps late, and a worker (see
`zftune.tuner.worker`) answers when it can, while training goes on under the incumbent's knobs.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from zenflow import ConfigError, Device, HostMemoryError, StepStats, ZenFlowConfig
from zenflow.device import Transfer
from zenflow.errors import HostThreadsError, RankError
from zenflow.optimizer import ZenFlowOptimizer
from zftune.emulation import EmulatedAccelerator
from zftune.emulation.lateness import LateDisturbance
from zftune.errors import BadInputError
from zftune.quality import LossGuard, at_full_rate, movement_percent, rate_at_full, rates, went_wrong
from zftune.store.account import Counter
from zftune.telemetry import NvmlSampler
from zftune.telemetry.disturbance import GpuDisturbance
from zftune.tuner.evidence import Gain, block_value
from zftune.tuner.pace import Pace
from zftune.tuner.record import StoreRecorder
from zftune.tuner.search import Search
from zftune.tuner.setup import device_limit
from zftune.tuner.space import Setting
from zftune.tuner.states import LEAST_STEPS, OF_INCUMBENT, Outcome, Request, UnmeasuredSteps
from zftune.tuner.worker import Answer, DeskMaker, SearchWorker, ThreadWorker

Change = Callable[[int, Mapping[str, Any]], None]
"""Called with the step after which new knobs hold (before the first step: that with which they do), and the knobs."""
REFUSALS = (ConfigError, HostMemoryError, HostThreadsError, RankError, MemoryError, torch.OutOfMemoryError)
"""Of knobs: nothing has changed then, and the training goes on."""
_INTERVAL = 4  # S where the configuration leaves it to the runtime
_MOST_EARLY = 512
_KEPT_STEPS = 32
"""Of the incumbent: by their mean a challenger's cost is counted."""
_logger = logging.getLogger("zftune")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a requested change; `step`: after which the knobs hold, 0: from the first on, None: they do not."""

    step: int | None = None
    refused: str = ""
    void: str = ""


def change_knobs(optimizer: ZenFlowOptimizer, knobs: Mapping[str, Any]) -> Verdict:
    """Change knobs, unless they are refused; with several ranks all call this after the same step."""
    begun = optimizer.steps > 0
    try:
        step = optimizer.set_knobs(**knobs)
    except REFUSALS as error:
        return Verdict(refused=str(error) or type(error).__name__)
    return Verdict(step if begun else 0)


def counted(config: ZenFlowConfig) -> ZenFlowConfig:
    """A configuration whose windows have a known length: where it has none, what a search begins from."""
    return replace(config, update_interval=_INTERVAL, apply_lag=None) if config.update_interval == "auto" else config


def holds(config: ZenFlowConfig, knobs: Mapping[str, Any]) -> bool:
    """Whether knobs are in force."""
    one = config.changed(knobs)
    return replace(one, apply_lag=one.lag) == replace(config, apply_lag=config.lag)


def leave_tried(
    optimizer: ZenFlowOptimizer,
    on_change: Change | None,
    agree: Callable[[Mapping[str, Any]], Verdict | None] | None = None,
) -> str:
    """Leave settings that were being tried when the loaded state was saved; with several ranks all call it, and `agree`
    changes knobs where all do, else returns None. Returns a sentence; "": none were tried.
    """
    kept, config = optimizer.kept_knobs, optimizer.config
    verdict = None if kept is None else (agree or partial(change_knobs, optimizer))(kept)
    if verdict is not None and verdict.step is None:
        optimizer.kept_knobs = None
        _logger.warning("The settings that the checkpoint was saved with stay: %s.", verdict.refused)
    if verdict is None or verdict.step is None or kept is None:
        return ""
    optimizer.kept_knobs = kept  # they are not what the user asks for
    if on_change is not None:
        on_change(verdict.step or 1, kept)
    best, tried = (Setting.of(counted(one)) for one in (config.changed(kept), config))
    changes = best.differences(tried) or str(best)
    return f"Back to the best settings so far ({changes}): the checkpoint was saved while others were tried."


class Changes:
    """Changes an optimizer's knobs, one request at a time: at once. No call waits but as training itself does."""

    def __init__(self, optimizer: ZenFlowOptimizer) -> None:
        self._optimizer = optimizer
        self._verdict: Verdict | None = None

    def ask(self, knobs: Mapping[str, Any]) -> None:
        """Request a change; not before the last verdict was taken."""
        self._verdict = change_knobs(self._optimizer, knobs)

    def verdict(self) -> Verdict | None:
        """The result of the last request, once; None: not yet."""
        verdict, self._verdict = self._verdict, None
        return verdict

    def withdraw(self) -> None:
        """The change is no longer wanted; there is a verdict all the same."""

    def ranks_ms(self) -> tuple[float, ...]:
        """Duration of the last steps of each rank without its waits in collectives; (): not known."""
        return ()


def waited_ms() -> float | None:
    """How long this thread has waited for a core so far, by the kernel's count; None: it is not counted here."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e6
    except (OSError, ValueError, IndexError):  # not Linux, or a kernel that does not count it
        return None


Watch = GpuDisturbance | LateDisturbance


def disturbance_of(device: Device, *, sampled: bool = True) -> Watch | None:
    """The watch over measurements on a device; `sampled=False` where the daemon samples its GPU."""
    if isinstance(device, EmulatedAccelerator):
        return LateDisturbance(device)
    uuid = gpu_uuid(device.torch_device) if sampled else None
    if uuid is None:
        return None
    sampler = NvmlSampler()
    sampler.start()
    return GpuDisturbance(sampler, uuid)


def gpu_uuid(device: torch.device) -> str | None:
    """Of a GPU; None for other devices, and where torch does not tell it."""
    uuid = None if device.type == "cpu" else getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


class Losses:
    """Takes losses and gives them to a guard once they have arrived."""

    def __init__(self, device: Device, guard: LossGuard) -> None:
        self._device, self._guard = device, guard
        self._waiting: deque[tuple[int, torch.Tensor | float, Transfer | None]] = deque()
        early: deque[tuple[int, float]] = deque(maxlen=_MOST_EARLY)
        self._early = early
        self._hear: Callable[[int, float], None] = lambda step, loss: early.append((step, loss))

    def listen(self, hear: Callable[[int, float], None]) -> None:
        """Call `hear` with each step and its loss, the last of those that have arrived before, too."""
        self._hear = hear
        while self._early:
            hear(*self._early.popleft())

    def add(self, step: int, loss: torch.Tensor | float) -> None:
        """Take a loss, a scalar on any device or a number; does not wait for the device. Raises BadInputError: it is
        more than one number.
        """
        arrived: torch.Tensor | float
        transfer = None
        if not isinstance(loss, torch.Tensor):
            arrived = float(loss)
        elif loss.numel() != 1:
            raise BadInputError(f"loss has the shape {tuple(loss.shape)}; it must be a scalar")
        elif loss.device.type == "cpu":
            arrived = float(loss.item())  # it is there already
        elif loss.device != self._device.torch_device:
            arrived = loss.detach().reshape(1).clone()
        else:
            arrived = self._device.host_empty((1,), loss.dtype)
            transfer = self._device.d2h(loss.detach().reshape(1), arrived)
        self._waiting.append((step, arrived, transfer))

    def forget(self) -> None:
        self._waiting.clear()
        self._guard.forget()

    def judge(self) -> str | None:
        """Look at the losses that have arrived; a sentence where training goes wrong, else None."""
        while self._waiting and (self._waiting[0][2] is None or self._waiting[0][2].done()):
            step, arrived, _ = self._waiting.popleft()
            loss = float(arrived)
            self._hear(step, loss)
            if (reason := self._guard.add(loss)) is not None:
                return went_wrong(step, reason)
        return None


@dataclass(frozen=True, slots=True)
class Resting:
    """Nothing is measured: the incumbent runs while the next request is chosen, or to its end. -> Changing, Over"""


@dataclass(frozen=True, slots=True)
class Changing:
    """Knobs are about to change, or stay to the window's end. -> Block where `request` is still wanted, else Resting"""

    setting: Setting
    request: Request | None
    """What is measured then; None: nothing, it only has to run."""
    stays: bool = False
    """Whether these are the knobs already, so that nothing but the window's end is waited for."""


@dataclass(slots=True)
class Block:
    """Steps of a setting are measured. -> Resting once they are handed over"""

    request: Request
    rates: tuple[float, ...]
    """Learning rates of the groups when it began."""
    discarded: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    stats: list[StepStats] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    """What other processes took of each of them; shorter where that is not known of all."""
    pinning: bool = False
    """Whether nothing is measured before the window's end, since host memory was being pinned."""

    @property
    def begun(self) -> bool:
        return bool(self.discarded or self.steps)


@dataclass(frozen=True, slots=True)
class Over:
    """The search has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningContext:
    """What a search is carried out in."""

    optimizer: ZenFlowOptimizer
    tokens: int
    since: int = 0
    """After which step the present knobs hold; 0: since the training began."""
    disturbance: Callable[[], str | None] | None = None
    """Called at the end of a measurement: why it does not count, or None. What came before is over then."""
    losses: Losses | None = None
    on_change: Change | None = None
    counter: Counter | None = None
    """Counts what the run takes; None: the search has its own."""
    changes: Changes | None = None
    """How knobs change; None: at once."""


class Executor:
    """Measures what a worker requests; where training goes wrong, it sets `start`, which the search began from."""

    def __init__(self, scene: TuningContext, worker: SearchWorker, *, start: Setting, incumbent: Setting) -> None:
        self._optimizer = optimizer = scene.optimizer
        self._counts_steps = scene.counter is None
        self.counter = scene.counter or Counter(optimizer.device.clock.now())
        self.state: Resting | Changing | Block | Over = Resting()
        self.incumbent = incumbent
        """The best setting so far, as of the last answer."""
        self.gain: Gain | None = None
        """Of it over what the search began from, or over what had to take its place; None: it is one of these."""
        self.unmeasured = UnmeasuredSteps()
        """Since the last outcome."""
        self._runs: list[tuple[int, bool]] = []
        """From which step on another setting than the incumbent runs, or the incumbent."""
        self.losses = scene.losses
        if self.losses is not None:
            self.losses.listen(worker.hear_loss)
        self._start, self._tokens, self._worker = start, scene.tokens, worker
        self._disturbance, self._on_change = scene.disturbance or (lambda: None), scene.on_change
        self._changes = scene.changes or Changes(optimizer)
        self._handed = False
        """Whether the worker chooses the next request."""
        self._waited_ms = None if optimizer.device.clock.simulated else waited_ms()
        self._taken_ms: deque[tuple[int, float]] = deque(maxlen=_KEPT_STEPS)
        """What other processes took from the training thread, by step."""
        self._applied = Setting.known(optimizer.config)
        self._from = self._seen = optimizer.steps
        if scene.since and self._applied is not None:
            worker.applied(scene.since, self._applied)
        self._recounted = False
        """Whether steps have another number of tokens than what is measured began with."""
        self._of_incumbent_ms: deque[float] = deque(maxlen=_KEPT_STEPS)
        """The last steps that it took, measured or not."""
        self._incumbent_step_s: float | None = None
        """Duration of the incumbent's step when the last challenger began."""

    @property
    def request(self) -> Request | None:
        """What is measured, or about to be; None: nothing."""
        return self.state.request if isinstance(self.state, (Changing, Block)) else None

    @property
    def over(self) -> bool:
        return isinstance(self.state, Over)

    @property
    def steady_steps(self) -> int:
        return self._optimizer.steps - self._from

    @property
    def gain_share(self) -> float:
        return 0.0 if self.gain is None else self.gain.share

    def log_loss(self, step: int, loss: torch.Tensor | float) -> None:
        if self.losses is not None and not self.over:
            self.losses.add(step, loss)

    def log_tokens(self, tokens: int) -> None:
        if tokens != self._tokens:
            self._recounted = True
            self._of_incumbent_ms.clear()
        self._tokens = tokens

    def stop(self, reason: str, *, restores: bool = True) -> None:
        """End the search early (`reason` "": the training has ended), and set the incumbent's knobs if `restores`."""
        self.close()
        if not self.over:
            self._worker.stop(reason)
            if restores:
                self._end()

    def close(self) -> None:
        """End the worker, within seconds; the search may be read and written down from here on."""
        self._worker.close()

    def resume_from_saved(self) -> None:
        """After the first step of a state that was loaded: set the incumbent's knobs in it. What is measured is given
        up; a change that was on its way has gone with the state that it was for.
        """
        self._from = self._seen = self._optimizer.steps - 1
        self._applied = Setting.known(self._optimizer.config)
        self._runs = []  # steps are numbered otherwise from here on
        if self.request is None:
            self.state = Over() if self.over else Resting()
            self._restore()
        else:
            outcome = self._outcome("void", "a saved state was loaded")
            self.state = Resting()
            self._hand(replace(outcome, called_off=True))

    def on_step(self, loss: torch.Tensor | float | None = None) -> bool:
        """After each step, with its loss, a scalar on any device; whether the search goes on."""
        if self._counts_steps:
            self.counter.step(self._optimizer.device.clock.now(), 1, self._tokens)
        if self.over:
            return False
        if loss is not None:
            self.log_loss(self._optimizer.steps, loss)
        wrong = None if self.losses is None else self.losses.judge()
        if wrong is not None:
            self.go_back(wrong)
            return False
        if self._waited_ms is not None and (now_ms := waited_ms()) is not None:
            self._taken_ms.append((self._optimizer.steps, now_ms - self._waited_ms))
            self._waited_ms = now_ms
        self._settle()
        for stats in self._optimizer.history(after=self._seen):
            self._seen = stats.step
            self._worker.observe(stats)
            self._take(stats)
        recounted, self._recounted = self._recounted, False
        if recounted and self.request is not None:  # not all steps of the measurement are of one size
            self._hand(self._outcome("void", "the tokens of a step have changed"))
        self._give_up()
        if self.request is None and not self._handed:
            self._hand(None)
        while self._handed and isinstance(self.state, Resting):
            answer = self._worker.poll()
            if answer is None:
                break
            self._carry_out(answer)
        return not self.over

    # --- one request -------------------------------------------------------------------------------------------------

    def _carry_out(self, answer: Answer) -> None:
        self._handed = False
        self._start = answer.start or self._start
        self._adopt(answer.incumbent, answer.gain)
        request = answer.request
        if request is None:
            self._end()
            return
        if request.role not in OF_INCUMBENT:  # beside other work its times change: the newest whole windows count
            interval, newest_ms = self.incumbent.update_interval, request.incumbent_step_ms
            whole = list(self._of_incumbent_ms)[: len(self._of_incumbent_ms) // interval * interval]
            if len(whole) >= LEAST_STEPS:
                newest_ms = math.exp(block_value(whole, window=interval))
            self._incumbent_step_s = newest_ms / 1e3 if newest_ms else None
        self._ask(request.setting, request)

    def _adopt(self, incumbent: Setting, gain: Gain | None) -> None:
        (before, self.incumbent), self.gain = (self.incumbent, incumbent), gain
        if changes := incumbent.differences(before):
            self._of_incumbent_ms.clear()
            saves = f", which saves {gain} of the step time" if gain is not None and gain.share > 0 else ""
            _logger.info("zftune sets the best settings so far: %s%s.", changes, saves)

    def _ask(self, setting: Setting, request: Request | None = None) -> None:
        """Change knobs; where they run already, wait for the window's end: to watch a training is not to alter it."""
        is_pending = self._from > self._optimizer.steps  # they hold from the next step on
        stays = setting == self._applied and (is_pending or setting == Setting.known(self._optimizer.config))
        self.state = Changing(setting, request, stays)
        if not stays:
            self._changes.ask(setting.knobs())
            self._settle()

    def _begin(self, changing: Changing, step: int) -> None:
        """The knobs hold after a step: measure under them where that is still wanted."""
        self._from = step
        self._worker.applied(step, changing.setting)
        self.state = Resting()
        if changing.request is not None:
            self.state = Block(changing.request, rates(self._optimizer.param_groups))
            self._disturbance()  # what was before does not count

    def _settle(self) -> None:
        changing = self.state
        verdict = self._changes.verdict() if isinstance(changing, Changing) and not changing.stays else None
        if verdict is None or not isinstance(changing, Changing):
            return
        if verdict.step is not None:
            self._applied = changing.setting
            challenges = changing.setting != self.incumbent
            first = verdict.step if challenges else verdict.step + 1  # that step closes a window and moves columns
            self._runs = [*(run for run in self._runs if run[0] < first), (first, challenges)]
            self._begin(changing, verdict.step)
            if isinstance(self.state, Block) and not self.state.request.discard:
                self.state = replace(changing, stays=True)  # too fast: its first window waits for none before it
            if self._on_change is not None:
                self._on_change(verdict.step or 1, changing.setting.knobs())
        else:
            self.state = Resting()
        if verdict.step is None and changing.request is not None:
            self._hand(self._outcome("crashed" if verdict.refused else "void", verdict.refused or verdict.void))
        elif verdict.refused:
            _logger.warning("The settings %s stay: they could not be changed (%s).", self._applied, verdict.refused)
        elif changing.request is None and (verdict.void or self._applied != self.incumbent):
            self._restore()  # it was given up meanwhile

    def _take(self, stats: StepStats) -> None:
        """Count a step; measured ones begin with the window after it, or end with it."""
        block, step_ms = self.state, stats.step_ms or 0.0
        if not isinstance(block, Block) or stats.step <= self._from or self._is_made_ready(block, stats):
            self._count("change", step_ms, challenges=self._pass_unmeasured(stats.step, step_ms / 1e3))
            # The knobs stay, and it has closed a whole window of theirs: step `_from` closed one of other knobs.
            if isinstance(block, Changing) and block.stays and stats.closed and stats.step > self._from:
                self._begin(block, stats.step)
            return
        request = block.request
        self._count("measurement", step_ms, challenges=request.role not in OF_INCUMBENT)
        if len(block.discarded) < request.discard:
            block.discarded.append(step_ms)
            if len(block.discarded) == request.discard:
                self._disturbance()  # the change itself may look like one, and these do not count
        else:
            block.steps.append(step_ms)
            block.stats.append(stats)
            block.taken += [taken_ms for step, taken_ms in self._taken_ms if step == stats.step]
            if len(block.steps) == 1:
                self._optimizer.device.reset_peak_bytes()  # the setting before had a peak of its own
        if len(block.steps) >= request.steps or request.ends_early(block.discarded, block.steps):
            disturbed = self._disturbance()
            self._hand(self._outcome("measured" if disturbed is None else "void", disturbed or ""))

    def _pass_unmeasured(self, step: int, seconds: float) -> bool:
        """Count a step of no measurement; whether another setting than the incumbent ran."""
        begun = [challenges for first, challenges in self._runs if first <= step]
        del self._runs[: max(0, len(begun) - 1)]
        late, counted = bool(begun) and begun[-1], self.unmeasured
        more = (0.0, seconds, 1) if late else (seconds, 0.0, 0)
        self.unmeasured = UnmeasuredSteps(*map(sum, zip(astuple(counted), more, strict=True)))
        return late

    def _count(self, part: str, step_ms: float, *, challenges: bool) -> None:
        if challenges:
            self.counter.tried(part, step_ms / 1e3, self._incumbent_step_s, self.gain_share)
        else:
            self._of_incumbent_ms.append(step_ms)
            self.counter.trained(step_ms / 1e3, self.gain_share)

    def _is_made_ready(self, block: Block, stats: StepStats) -> bool:
        """Whether host memory was pinned for this setting beside a step, or in its window: measured are later ones."""
        if block.begun:
            return False
        found = block.pinning or stats.pin_ms > 0
        block.pinning = found and (stats.pin_ms > 0 or not stats.closed)
        return found

    def _outcome(self, status: Literal["measured", "void", "crashed"], reason: str) -> Outcome:
        """Of what is measured, or is about to be."""
        block, optimizer, groups = self.state, self._optimizer, self._optimizer.param_groups
        between, self.unmeasured = self.unmeasured, UnmeasuredSteps()
        nothing = Outcome(status, tokens=self._tokens, reason=reason, between=between)
        if not isinstance(block, Block):
            return nothing
        return replace(
            nothing,
            steps_ms=tuple(block.steps),
            discarded_ms=tuple(block.discarded),
            moves=tuple(one.coverage_curve is not None or one.churn is not None for one in block.stats),
            taken_ms=tuple(block.taken) if len(block.taken) == len(block.steps) else (),
            device_bytes=optimizer.device.peak_bytes(),
            pace=Pace.of(block.stats),
            ranks_ms=self._changes.ranks_ms(),
            movement_percent=at_full_rate(movement_percent(block.stats), groups, block.rates),
            movement_rate=rate_at_full(groups, block.rates),
        )

    def _hand(self, outcome: Outcome | None) -> None:
        if isinstance(self.state, Block):
            self.state = Resting()
        elif isinstance(self.state, Changing):
            self.state = replace(self.state, request=None)
        self._handed = True
        self._worker.hand(outcome)
        self._restore()

    def _give_up(self) -> None:
        recall = self._worker.recall()
        if recall is not None and recall.incumbent is not None:
            self._adopt(recall.incumbent, recall.gain)
        if recall is not None and self.request is None:
            self._restore()
        elif recall is not None:
            self._hand(replace(self._outcome("void", recall.reason), called_off=True))

    def _restore(self) -> None:
        """Have the incumbent run; a change under way has its verdict first."""
        if not self._optimizer.trains:
            return  # closed: no step will have them
        changing = self.state
        if isinstance(changing, Changing) and changing.stays:
            changing = self.state = Resting()
        if isinstance(changing, Changing):
            if changing.setting != self.incumbent:
                self._changes.withdraw()
        elif self._applied != self.incumbent:
            self._ask(self.incumbent)
            if isinstance(changing, Over):
                self.state = changing

    def _end(self) -> None:
        if isinstance(self.state, Changing) and not self.state.stays:
            self.state = replace(self.state, request=None)
        else:
            self.state = Resting()
        self._restore()
        self.state = Over()

    def go_back(self, reason: str) -> None:
        """Training goes wrong: end the search with the settings at the start."""
        self._worker.guard(reason)
        self.incumbent, self.gain = self._start, None
        self._end()


def live_search(
    scene: TuningContext, search: Search, *, recorder: StoreRecorder | None = None, worker: DeskMaker | None = None
) -> Executor:
    """An executor whose search runs in the process that trains, in a thread unless `worker` is given; read the search
    after `close()`.
    """
    search.device_limit_bytes = device_limit(scene.optimizer)
    worker = worker or partial(ThreadWorker, clock=scene.optimizer.device.clock)
    start, incumbent = search.book.trials[0].setting, search.book.incumbent.setting
    found = Executor(scene, worker(search, recorder), start=start, incumbent=incumbent)
    if recorder is not None:
        counted = found.counter  # not the executor: the recorder's thread would keep it and the tuner
        recorder.follow(lambda: counted.count)
    return found
