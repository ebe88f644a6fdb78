"""The Trainer of Hugging Face transformers without DeepSpeed: an optimizer from its arguments, a callback that tunes.

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data,
        optimizers=(zenflow_optimizer(model, args), None),
        callbacks=[ZFTuneCallback()],
    )

With FSDP2 (`fsdp=True`) instead of `optimizers`: `optimizer_cls_and_kwargs=zenflow_class(model, args)`.

Needs transformers, which nothing else of this package imports. With Accelerate alone, with FSDP2 or without, the model
on its device before:

    model, optimizer = accelerator.prepare(model, AccelerateAdamW(model.parameters(), lr=1e-5, module=model))
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

import zftune
from zenflow import ConfigError, ZenFlowAdamW, ZenFlowConfig
from zenflow.checkpoint_format import HEADER
from zenflow.late_weights import Untraced, leave_no_trace
from zenflow.optimizer import ZenFlowOptimizer
from zenflow.sharded import are_sharded
from zftune.attaching import check_counts
from zftune.errors import BadInputError, MissingPackageError
from zftune.store.types import QUALITIES, Quality
from zftune.text import one_of
from zftune.tracking import Figures, innermost
from zftune.tuner.tuner import Tuner

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import CallbackHandler
except ModuleNotFoundError as error:
    raise MissingPackageError("transformers", __name__) from error

__all__ = ["AccelerateAdamW", "ZFTuneCallback", "zenflow_class", "zenflow_optimizer"]

_ADAMW = ("adamw_torch", "adamw_torch_fused")
_logger = logging.getLogger("zftune")


class AccelerateAdamW(ZenFlowAdamW):
    """`ZenFlowAdamW` for Accelerate, and with it for the Trainer.

    Where it prepares an optimizer, Accelerate saves its state, moves it to the device and loads it again, over FSDP2
    that of the whole model. So before the first step there is none: state of the host's size would not fit there.

    Over FSDP2 Accelerate and the Trainer save by torch's functions, which know torch's own state: it is AdamW's there,
    for any number of ranks. What is pending has to be applied before: by `flush()`, in the Trainer by `ZFTuneCallback`.
    """

    _save_advice = f"{ZenFlowAdamW._save_advice}; with the Trainer, callbacks=[ZFTuneCallback()] does that"
    _saves_room = False

    def state_dict(self) -> dict[str, Any]:
        if not are_sharded(self.param_groups):
            return super().state_dict()
        try:
            with self.torch_state():
                return super().state_dict()
        except ConfigError as error:
            raise BadInputError(
                "a checkpoint is saved while updates are pending, which are not in its weights: over FSDP2 "
                "call flush() first, or give the Trainer callbacks=[ZFTuneCallback()] (with tune=False where nothing "
                "is to be tuned)"
            ) from error

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the runtime's; what torch's AdamW has saved is taken up as well, so that its training is gone on with."""
        sharded = are_sharded(self.param_groups)
        is_torchs = sharded or _is_torchs(state_dict)
        with self.torch_state() if is_torchs else contextlib.nullcontext():
            super().load_state_dict(state_dict)
        if is_torchs and not sharded:
            _logger.info("The checkpoint is of torch's AdamW: its moments and its step count go on.")


def _is_torchs(state_dict: object) -> bool:
    groups = state_dict.get("param_groups", []) if isinstance(state_dict, Mapping) else []
    return bool(groups) and not any(HEADER in group for group in groups)


def zenflow_class(
    model: nn.Module, args: Any, config: ZenFlowConfig | None = None
) -> tuple[type[AccelerateAdamW], dict[str, Any]]:
    """What a Trainer makes its optimizer of, for the argument `optimizer_cls_and_kwargs`; with FSDP2 too.

    With FSDP the Trainer takes no optimizer that was made before. The arguments' values, as of `zenflow_optimizer`.

    Args:
        model: that the Trainer gets too.
        args: its `TrainingArguments`.
        config: the knobs; None takes the defaults. Where FSDP keeps the weights on the host, `topk_ratio` has to be 0.

    Raises:
        BadInputError: the arguments ask for another optimizer, or for several GPUs in one process; the config is none.
    """
    optim = str(getattr(args.optim, "value", args.optim))
    if optim not in _ADAMW:
        raise BadInputError(f"optim is {optim!r}; it must be {' or '.join(_ADAMW)}: the optimizer is an AdamW")
    _refuse_data_parallel(args)
    if config is not None and not isinstance(config, ZenFlowConfig):
        raise BadInputError(f"config is a {type(config).__name__}; it must be a zenflow.ZenFlowConfig")
    config = config or ZenFlowConfig()
    if config.gradient_accumulation_steps == 1:
        config = dataclasses.replace(config, gradient_accumulation_steps=args.gradient_accumulation_steps)
    betas = (args.adam_beta1, args.adam_beta2)
    values = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, "config": config, "module": model}
    return AccelerateAdamW, values


def zenflow_optimizer(model: nn.Module, args: Any, config: ZenFlowConfig | None = None) -> AccelerateAdamW:
    """The optimizer that a Trainer would make for these arguments, as `ZenFlowAdamW`; the model goes to its device.

    Learning rate, betas, eps and weight decay are the arguments', and biases and norms do not decay, as in the Trainer.
    The Trainer itself clips (`max_grad_norm`), accumulates and makes the scheduler: give it `optimizers=(this, None)`.

    Args:
        model: that the Trainer gets too.
        args: its `TrainingArguments`.
        config: the knobs; None takes the defaults.

    Raises:
        BadInputError: the arguments ask for another optimizer, for several GPUs in one process, or for FSDP; or the
            config is none.
    """
    if args.fsdp:
        raise BadInputError(
            "args.fsdp is on, with which the Trainer takes no optimizer: use "
            "Trainer(optimizer_cls_and_kwargs=zenflow_class(model, args))"
        )
    kind, values = zenflow_class(model, args, config)
    model.to(args.device)  # the Trainer would do that later, when the optimizer has seen where the weights are
    return kind(_groups(model, args.weight_decay), **values)


class ZFTuneCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Tunes a Trainer's `zenflow` optimizer while it trains, and lets no update be missing from the final model.

    - The tuner is attached when training begins and ends with it; it sees the loss of every step.
    - After the last step, before evaluation and saving, every pending host update is applied. A checkpoint in mid-run
      holds the weights that training sees; what is pending lies in its `optimizer.pt`, so it is resumed exactly. Over
      FSDP2 it is applied before each save.
    - With each loss the Trainer's log history, and what it reports to (`report_to`), get the figures of `zftune.stats`:
      knobs, stall by cause, coverage, the tuner's gain. Knobs are of that step; the other figures are means of steps
      since the last entry, and two steps late: a step's times are known when the device has passed its marks, and
      nothing waits for that.

    Args:
        tune: False: nothing but the rest; `zftune run --online` tunes all the same.
        quality: as of `zftune.attach`.
        sequence: tokens of a sequence, where all are padded to the same length: the planner then knows more.
        attach: other arguments of `zftune.attach`.

    Raises:
        BadInputError: an argument is not allowed, or a quality is given though it does not tune.
        TypeError: `zftune.attach` has no such argument.
    """

    def __init__(
        self, tune: bool = True, quality: Quality | None = None, sequence: int | None = None, **attach: Any
    ) -> None:
        inspect.signature(zftune.attach).bind(None, quality=quality, sequence=sequence, **attach)
        if not isinstance(tune, bool):
            raise BadInputError(f"tune is {tune!r}; it must be True or False")
        if quality is not None:
            one_of("quality", quality, QUALITIES)
        check_counts(sequence=sequence)
        if quality is not None and not tune:
            raise BadInputError(
                f"quality is {quality!r} with tune=False; it must be None: what is late is then up to the optimizer's "
                "settings, such as zenflow_optimizer(model, args, ZenFlowConfig(update_interval=1, overlap_step=False))"
            )
        self.tuner: Tuner | None = None
        """What follows the training that goes on, or followed the last one."""
        self._tune, self._attach = tune, {"quality": quality, "sequence": sequence, **attach}
        self._optimizer: ZenFlowOptimizer | None = None
        self._losses: _Losses | None = None
        self._figures: Figures | None = None
        self._early: _Early | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        """Begin.

        Raises:
            BadInputError: the Trainer's optimizer is not of zenflow, or an argument of `attach` is not allowed.
        """
        self._end()  # of a training that an error ended
        _refuse_data_parallel(args)
        self._optimizer = _zenflow(of.get("optimizer"))
        self._figures = Figures(self._optimizer)
        self._figures.skip()
        self._early = _Early.before_reporters(self)
        self._losses = _Losses(None if getattr(args, "torch_compile", False) else of.get("model"))
        if self._tune:
            self.tuner = zftune.attach(self._optimizer, **self._sizes(args))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        loss = None if self._losses is None else self._losses.take()
        if loss is not None:
            zftune.log_loss(loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        if control.should_training_stop or state.global_step >= state.max_steps:
            self._end()
        self._flush_before_save(control.should_save)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        if control.should_training_stop:  # after an evaluation, by another callback
            self._end()
        self._flush_before_save(control.should_save)

    def on_evaluate(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        self._flush_before_save(str(getattr(args.save_strategy, "value", args.save_strategy)) == "best")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **of: Any) -> None:
        if logs and "loss" in logs and self._losses is not None and not self._losses.seen:
            zftune.log_loss(logs["loss"])  # such as one that the model does not give
        if self._early is None:
            self.add_figures(state, logs)
        if control.should_training_stop:  # before the best model is loaded
            self._end()

    def on_train_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        self._end()
        if self._early is not None:
            self._early.leave()
        self._optimizer = self._figures = self._early = None

    def add_figures(self, state: Any, logs: dict[str, Any] | None) -> None:
        """Put the figures into a log entry of a loss, and into the history, which has a copy."""
        if self._figures is None or not logs or "loss" not in logs or not state.log_history:
            return
        figures = self._figures.take()
        logs.update(figures)
        state.log_history[-1].update(figures)

    def _flush_before_save(self, saves: bool) -> None:
        """Over FSDP2 a checkpoint has no place for what is pending."""
        if saves and self._optimizer is not None and are_sharded(self._optimizer.param_groups):
            self._optimizer.flush()

    def _sizes(self, args: Any) -> dict[str, Any]:
        """What the tuner is told of a step, where the user has not."""
        sequence, batch = self._attach["sequence"], args.train_batch_size
        tokens = None if sequence is None else batch * args.gradient_accumulation_steps * sequence
        return {"micro_batch": batch, "tokens": tokens, **self._attach}

    def _end(self) -> None:
        if self._losses is None:
            return
        self._losses.close()
        self._losses = None
        if self._figures is not None:
            self._figures.look()
        if self.tuner is not None:
            self.tuner.close()
        if self._optimizer is not None:
            self._optimizer.flush()


class _Early(TrainerCallback):  # type: ignore[misc]
    """Puts figures into the Trainer's entries before its reporters see them: a Trainer calls those first."""

    def __init__(self, callback: ZFTuneCallback, handler: CallbackHandler) -> None:
        self._callback, self._handler = callback, handler

    @classmethod
    def before_reporters(cls, callback: ZFTuneCallback) -> _Early | None:
        """Put one before all other callbacks of the Trainer that is calling.

        No argument of a callback leads to its Trainer, so it is looked for among the callers.
        """
        handler = _caller(callback)
        if handler is None:
            return None
        early = cls(callback, handler)
        rest = [one for one in handler.callbacks if not (isinstance(one, cls) and one._callback is callback)]
        handler.callbacks = [early, *rest]  # another list: the one that is being gone through stays
        return early

    def leave(self) -> None:
        self._handler.callbacks = [one for one in self._handler.callbacks if one is not self]

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **of: Any) -> None:
        self._callback.add_figures(state, logs)


def _caller(callback: ZFTuneCallback) -> CallbackHandler | None:
    frame = inspect.currentframe()
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and any(one is callback for one in handler.callbacks):
            return handler
        frame = frame.f_back
    return None


class _Losses:
    """The loss of each step, from what the model returns in training.

    It is summed over the passes of a step: as the Trainer reports it, or a constant multiple of that.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.seen = False
        self._sum: torch.Tensor | None = None
        self._hook = None if model is None else model.register_forward_hook(Untraced(self._see))
        if model is not None:
            leave_no_trace(model._forward_hooks)

    def take(self) -> torch.Tensor | None:
        """The loss since the last call; None where there was none."""
        taken, self._sum = self._sum, None
        return taken

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _see(self, module: nn.Module, _: Any, output: Any) -> None:
        loss = _loss_of(output) if module.training and torch.is_grad_enabled() else None
        if loss is not None:
            self.seen = True
            self._sum = loss.detach() if self._sum is None else self._sum + loss.detach()


def _loss_of(output: Any) -> torch.Tensor | None:
    """Where the Trainer looks for it; None where something else is there."""
    if isinstance(output, Mapping):
        found = output.get("loss")
    else:
        found = output[0] if isinstance(output, tuple) and output else None
    return found if isinstance(found, torch.Tensor) and found.numel() == 1 else None


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The Trainer's own two groups: those that decay, by its rule, and the others."""
    decaying = set(Trainer.get_decay_parameter_names(None, model))  # asks nothing of the Trainer itself

    def trained(*, decays: bool) -> Iterator[nn.Parameter]:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and (name in decaying) == decays:
                yield parameter

    return [
        {"params": list(trained(decays=True)), "weight_decay": weight_decay},
        {"params": list(trained(decays=False)), "weight_decay": 0.0},
    ]


def _zenflow(optimizer: Any) -> ZenFlowOptimizer:
    inner = innermost(optimizer)
    if not isinstance(inner, ZenFlowOptimizer):
        raise BadInputError(
            f"the Trainer's optimizer is a {type(inner).__qualname__}; it must be one of zenflow: "
            "Trainer(optimizers=(zenflow_optimizer(model, args), None))"
        )
    return inner


def _refuse_data_parallel(args: Any) -> None:
    """DataParallel copies the weights without asking their layers, updates in flight or not."""
    if args.n_gpu > 1:
        raise BadInputError(
            f"args.n_gpu is {args.n_gpu}; it must be 1: show the process one GPU (CUDA_VISIBLE_DEVICES=0)"
        )
