"""`ReferenceAdamW` and its siblings: what the optimizers of `zenflow.family` compute, written as plainly as possible.

No device, no thread, no overlap: every state is one fp32 matrix a weight (`zenflow.reference_weight`), every rule is
one loop (`zenflow.reference_weight`). It is slow and exists to be read and to be compared with, bit for bit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zenflow.config import AUTO_SELECT_INTERVAL, AUTO_SELECT_OVERLAP, AUTO_UPDATE_INTERVAL, ZenFlowConfig
from zenflow.errors import UnsupportedError
from zenflow.reference_weight import (
    ADAGRAD,
    ADAM,
    ADAMW,
    LION,
    SGD,
    Energy,
    Entry,
    Hyper,
    Moments,
    ReferenceRule,
    Weight,
    importance_of,
    matrix,
    plan,
)


class ReferenceOptimizer(torch.optim.Optimizer):
    """The oracle of one optimizer of the family: the same weights after every step.

    `events` counts what has happened, so that a test can tell that it exercised something; `closing_steps` are those in
    which a window closed.

    Args:
        params: parameters or groups, as in torch.
        config: the knobs; None means `ZenFlowConfig()`.
        module: the model; gives the order of the plan and tells which weights are in Conv1D layout.
        hyper: the rule's hyperparameters by name; those that are not given are torch's.

    Raises:
        TypeError: the rule has no such hyperparameter.
    """

    rule: ClassVar[ReferenceRule]
    _step_supports_amp_scaling = True  # GradScaler then sets grad_scale and found_inf instead of skipping step()

    def __init__(
        self,
        params: Iterable[Any],
        *,
        config: ZenFlowConfig | None = None,
        module: nn.Module | None = None,
        **hyper: Any,
    ) -> None:
        if unknown := sorted(hyper.keys() - self.rule.defaults.keys()):
            raise TypeError(f"there is no hyperparameter {unknown[0]}: there are {', '.join(self.rule.defaults)}")
        self.config = (config or ZenFlowConfig()).resolved()
        self.events: Counter[str] = Counter()
        self.closing_steps: list[int] = []
        self._next: ZenFlowConfig | None = None  # the knobs after the next step, where they were changed
        self._module = module
        self._weights: list[Weight] = []
        self._hypers: list[Hyper] = []  # of each group, in the last step
        self._step = 0
        self._window_steps = 0
        super().__init__(params, {**self.rule.defaults, **hyper})

    def set_knobs(self, **knobs: Any) -> int:
        """Change knobs; the next step closes the window under the old ones, and then the new ones hold.

        Before the first step they hold at once. Several calls before one step add up.

        Returns:
            The step after which the new knobs hold, from 1.

        Raises:
            ConfigError: a knob is none that can be changed, or its value is not allowed; nothing has changed then.
        """
        changed = (self._next or self.config).changed(knobs)
        if self._step == 0:
            self.config = changed
        else:
            self._next = changed
        return self._step + 1

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; after the first step this flushes and plans the whole model anew.

        Raises:
            ValueError: a parameter is in another group already; as in torch.
        """
        super().add_param_group(param_group)
        if self._step > 0:
            self.flush()
            self._plan_anew(self.config)
            self.events["groups added"] += 1

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step: the resident and selected columns now, the deferred ones logged, due updates made visible.

        Raises:
            UnsupportedError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(p.grad is not None and p.grad.is_sparse for group in self.param_groups for p in group["params"]):
            raise UnsupportedError("sparse gradients are not supported; use torch.optim.SparseAdam for that parameter")
        if self._step == 0:
            self._weights = plan(self.param_groups, self.config, self._module, self.rule)
        self._follow_writes()
        self._step += 1
        self._window_steps += 1
        self._hypers = [self.rule.hyper(group) for group in self.param_groups]
        full = self._window_is_full()  # before this step's gradients count: "auto" decides on those of the steps before
        factor, skipped = self._factor_and_skip()
        for weight in self._weights:
            if weight.param.grad is None:
                self.events["void, no gradient"] += weight.master is not None
            else:
                self._take(weight, weight.param.grad, factor, skipped)
        self._end_step(full)
        self._leave_weights()
        return loss

    @torch.no_grad()
    def flush(self) -> None:
        """Close the window here and make everything visible."""
        self._follow_writes()
        self._close(at_once=True)
        self._show_due()
        self._leave_weights()

    def pending_entries(self) -> list[tuple[Tensor, int]]:
        """(parameter, step) of every logged gradient that the host has not applied."""
        return [(weight.param, entry.step) for weight in self._weights for entry in weight.log if not entry.skipped]

    def selected(self, param: Tensor) -> list[int]:
        """Columns of this parameter that are selected now, ascending."""
        return sorted(self._weight(param).selected)

    def in_flight(self, param: Tensor) -> list[int]:
        """Columns that the host has updated and the weight does not show yet, ascending."""
        return sorted(self._weight(param).due)

    def columns_state(self, param: Tensor) -> tuple[Tensor, Moments, list[int]]:
        """Master, moments (each `[rows, columns]` fp32, copies) and the columns' update counts."""
        weight = self._weight(param)
        assert weight.master is not None, "the parameter has had no gradient"
        return weight.master.clone(), tuple(moment.clone() for moment in weight.moments), list(weight.counts)

    def _follow_writes(self) -> None:
        """What somebody else has written to weights since the last step counts; pending updates come on top of it."""
        for weight in self._weights:
            in_flight = bool(weight.due)
            self.events["written, in flight" if in_flight else "written"] += weight.follow_writes()

    def _leave_weights(self) -> None:
        for weight in self._weights:
            weight.leave()

    def _weight(self, param: Tensor) -> Weight:
        return next(weight for weight in self._weights if weight.param is param)

    def _factor_and_skip(self) -> tuple[Tensor | None, bool]:
        norms = [weight.norm(weight.param.grad) for weight in self._weights if weight.param.grad is not None]
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        factor = None if grad_scale is None else 1.0 / grad_scale
        skipped = found_inf is not None and bool(found_inf != 0)
        if norms and (self.config.max_grad_norm is not None or self.config.skip_nonfinite):
            norm = torch.linalg.vector_norm(torch.stack(norms))
            if factor is not None:
                norm = norm * factor
            if self.config.skip_nonfinite:
                skipped = skipped or not bool(norm.isfinite())
            if self.config.max_grad_norm is not None:
                coef = (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
                factor = coef if factor is None else factor * coef
        return factor, skipped

    def _take(self, weight: Weight, raw: Tensor, factor: Tensor | None, skipped: bool) -> None:
        grad = matrix(raw, weight.transposed)
        importance = importance_of(grad)
        every = AUTO_SELECT_INTERVAL if self.config.select_interval == "auto" else self.config.select_interval
        if weight.master is None:
            weight.start()
            weight.select(weight.top(importance))
        elif weight.selects and (self._step - 1) % every == 0:
            weight.pending = set(weight.selected) if skipped else weight.top(importance)
        grad = grad.float().clone() if factor is None else grad.float() * factor
        hyper = self._hypers[weight.group]
        if weight.slot:
            weight.log.append(Entry(self._step, grad, hyper, skipped))
        if skipped:
            self.events["void, skipped"] += 1
            return
        if weight.selects or self._splits_anew():
            weight.scores = importance
        if weight.selects:
            grad_scale = getattr(self, "grad_scale", None)
            weight.gather(importance, 1.0 if grad_scale is None else 1.0 / float(grad_scale))
        now = [*range(weight.resident), *sorted(weight.selected)]
        weight.update(now, grad, hyper, self.rule.decay(hyper))
        weight.show(now)

    def _window_is_full(self) -> bool:
        if self.config.update_interval != "auto":
            return self._window_steps >= self.config.update_interval
        if self._window_steps >= self.config.max_update_interval:
            return True
        seen = [weight.energy for weight in self._weights if weight.energy.steps > 0]
        if not seen:
            return self._window_steps >= min(AUTO_UPDATE_INTERVAL, self.config.max_update_interval)
        self.events["decisions on an ulp"] += any(energy.hinges_on_an_ulp for energy in seen)
        agree = sum(energy.agrees for energy in seen) / len(seen) >= self.config.auto_ratio
        self.events["closed by agreement" if agree else "kept open by disagreement"] += 1
        return agree and self._window_steps >= 2

    def _splits_anew(self) -> bool:
        new = self._next or self.config
        return (new.topk_ratio, new.offload_ratio) != (self.config.topk_ratio, self.config.offload_ratio)

    def _end_step(self, full: bool) -> None:
        warming_up = self._step <= self.config.full_warm_up_rounds
        if warming_up or full or self._next is not None:
            self.closing_steps.append(self._step)
            if self._splits_anew():
                assert self._next is not None
                self._plan_anew(self._next)
                self.events["splits changed"] += 1
            else:
                self._close(at_once=warming_up or not self.config.overlap_step)
                self.events["knobs changed"] += self._next is not None
                self.config = self._next or self.config
            self._next = None
        self._show_due()

    def _plan_anew(self, config: ZenFlowConfig) -> None:
        """Close the window, make everything visible and go on with these knobs."""
        planned = plan(self.param_groups, config, self._module, self.rule)
        known = {weight.param: weight for weight in self._weights}
        for new in planned:
            if new.param in known and not new.planned_like(known[new.param]):
                known[new.param].pending = None  # it is going to choose among other columns
        self._close(at_once=True)
        self.config = config
        for new in planned:
            if new.param in known:
                self.events["plans changed"] += not new.planned_like(known[new.param])
                known[new.param].replan(new)
        self._weights = [known.get(new.param, new) for new in planned]

    def _close(self, at_once: bool) -> None:
        lag = min(self.config.apply_lag or self.config.longest_window, self._window_steps)
        buckets = sum(weight.bucket_count for weight in self._weights)
        self._drop_selections_like_the_old()
        for weight in self._weights:
            weight.energy = Energy()
            self.events["in flight at a close"] += bool(weight.due)
            weight.show(weight.due)
            weight.due = {}
            if self._window_steps:
                self._apply(weight)
                for column, slot in weight.slot.items():
                    bucket = weight.first_bucket + slot // weight.bucket_slots
                    leaving = weight.pending is not None and column in weight.pending
                    later = self._step + 1 + bucket * lag // buckets
                    weight.due[column] = self._step if at_once or leaving else later
                weight.show([column for column, step in weight.due.items() if step <= self._step])
                self.events["columns moved"] += weight.reselect()
        self._window_steps = 0

    def _drop_selections_like_the_old(self) -> None:
        """With an "auto" interval a selection changes only where too little of it would stay."""
        pending = [weight for weight in self._weights if weight.pending is not None]
        if not pending or self.config.select_interval != "auto":
            return
        kept = sum(len(weight.selected.intersection(weight.pending or ())) for weight in pending)
        like_the_old = kept / sum(weight.selected_count for weight in pending) >= AUTO_SELECT_OVERLAP
        self.events["selections dropped" if like_the_old else "selections taken"] += 1
        if like_the_old:
            for weight in pending:
                weight.pending = None

    def _apply(self, weight: Weight) -> None:
        columns = sorted(weight.slot)
        entries = [entry for entry in weight.log if not entry.skipped]
        self.events["entries applied"] += len(entries)
        decays = [self.rule.decay(entry.hyper) for entry in entries] if self.rule.decoupled else []
        weight.due_decay = math.prod(decays)
        if self.config.deferred_update == "replay":
            for entry in entries:
                weight.update(columns, entry.grad, entry.hyper, self.rule.decay(entry.hyper))
        elif entries:
            total, decay = entries[0].grad, self.rule.decay(entries[0].hyper)
            for entry in entries[1:]:
                total, decay = total + entry.grad, decay * self.rule.decay(entry.hyper)
            weight.update(columns, total / len(entries), self._hypers[weight.group], decay)
        weight.log = []

    def _show_due(self) -> None:
        for weight in self._weights:
            columns = [column for column, step in weight.due.items() if step <= self._step]
            weight.show(columns)
            for column in columns:
                del weight.due[column]
            self.events["in flight after a step"] += bool(weight.due)


class ReferenceAdamW(ReferenceOptimizer):
    """The oracle of `ZenFlowAdamW`."""

    rule = ADAMW


class ReferenceAdam(ReferenceOptimizer):
    """The oracle of `ZenFlowAdam`."""

    rule = ADAM


class ReferenceAdagrad(ReferenceOptimizer):
    """The oracle of `ZenFlowAdagrad`."""

    rule = ADAGRAD


class ReferenceLion(ReferenceOptimizer):
    """The oracle of `ZenFlowLion`."""

    rule = LION


class ReferenceSGD(ReferenceOptimizer):
    """The oracle of `ZenFlowSGD`."""

    rule = SGD
