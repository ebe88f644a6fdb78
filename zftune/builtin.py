"""`zftune tune` on the built-in workload: `attach`, on a training of the project's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from zenflow import ZenFlowAdamW, ZenFlowConfig, ZenFlowError
from zenflow.signals import HeldSignals
from zftune.attaching import default_quality, start_tuner
from zftune.errors import BadInputError, ProfileError
from zftune.explain.summary import tune_document
from zftune.profile.companions import several_ranks
from zftune.profile.measure import Task, Training
from zftune.profile.run import ProfileOptions, read_config, task_of
from zftune.store.types import QUALITIES, Quality, ranks_in_words
from zftune.text import one_of
from zftune.tuner.executor import counted
from zftune.tuner.search import SearchOptions
from zftune.tuner.setup import TuneRequest
from zftune.tuner.tuner import Tuner

if TYPE_CHECKING:
    from zftune.store.store import Store

OnStep = Callable[[int, Tuner], None]
"""Told after each step: how many there were, and the tuner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneOptions:
    """What the command line asks for; None means that it follows from the device or the configuration."""

    config: str | None = None
    quality: str | None = None
    steps: int = 2000
    model: str | None = None
    text: str | None = None
    rig: str | None = None
    ranks: int = 1
    """Each on a rig of its own, with its rows of the model (FSDP2)."""
    real_time: bool = False
    """Whether a rig pads real work by the machine's clock, and does not simulate time."""
    seed: int = 0
    dtype: str = "bf16"
    micro_batch: int | None = None
    sequence: int | None = None
    search: SearchOptions = field(default_factory=SearchOptions)
    tune_memory: bool = False
    fresh: bool = False


def tune(options: TuneOptions, on_step: OnStep, store: Store) -> dict[str, Any]:
    """Train, search, and return the document.

    Ctrl-C ends it early: the document then holds what was found so far and says so.

    Raises:
        BadInputError: an option is not allowed; before any training.
        ProfileError: the runtime failed, or refused the model.
    """
    if options.steps < 1:
        raise BadInputError(f"--steps is {options.steps}; it must be an integer >= 1")
    config, quality = start_of(options)
    task, device_name = _task_of(options, config)
    if task.rig is None and task.torch_device.type == "cpu":
        raise BadInputError("--rig 'none': allowed only with a GPU, without one there is nothing to offload from")
    config = task.scaled(config)
    beside = partial(_train_beside, options, config, quality)
    try:
        with several_ranks(options.ranks, beside), Training(task, config) as training:
            tuner = _tuner(training, options, quality, store)
            steps, interrupted = _train(training, tuner, options.steps, on_step)
        about = {
            **_about(training, device_name), "quality": quality, "seed": options.seed, "steps": steps,
            "interrupted": interrupted,
        }  # fmt: skip
        notices = [one for one in tuner.notices if one != tuner.conclusion]
        return tune_document(store, tuner.run_id, about, notices, tuner.conclusion)
    except ZenFlowError as error:
        raise ProfileError(str(error)) from error


def _about(training: Training[ZenFlowAdamW], device_name: str) -> dict[str, Any]:
    from zftune.telemetry import hardware, software

    task, ranks = training.task, training.task.ranks
    shared = {"world_size": ranks, "nodes": 1, "shards": ranks, "ranks": ranks_in_words(ranks, 1, ranks)}
    return {
        "device": device_name,
        "rig": None if task.rig is None else {"name": task.rig.name, "source": task.rig.source},
        "workload": {**task.describe(training.workload), **shared},
        "hardware": hardware(),
        "software": software(),
    }


def start_of(options: TuneOptions) -> tuple[ZenFlowConfig, Quality]:
    """The knobs to begin with, and the quality.

    Raises:
        BadInputError: the file or the quality is not allowed.
    """
    config = counted(read_config(options.config, {}))
    quality = one_of("--quality", options.quality or default_quality(config), QUALITIES)
    # A search begins with steps that are like all others.
    return replace(config, full_warm_up_rounds=0), quality


def _train(training: Training[ZenFlowAdamW], tuner: Tuner, most: int, on_step: OnStep) -> tuple[int, bool]:
    """Take steps until the search is over, they are used up, or the user has had enough: how many, and whether so."""
    steps, interrupted = 0, False
    try:
        while tuner.searching and steps < most:
            tuner.log_loss(_step(training))
            steps += 1
            on_step(steps, tuner)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        tuner.close("Interrupted." if interrupted else f"All {most} steps are done.")
    while tuner.meets_ranks:  # the others hear in the next steps that it is over
        _step(training)
    return steps, interrupted


def _step(training: Training[ZenFlowAdamW]) -> torch.Tensor:
    with ExitStack() as held:
        if training.task.ranks > 1:
            held.enter_context(HeldSignals(patient=True))
        return training.step()


def _train_beside(options: TuneOptions, config: ZenFlowConfig, quality: Quality, rank: int) -> None:
    task = replace(_task_of(options, config)[0], rank=rank)
    with Training(task, config) as training, _tuner(training, options, quality, None) as follower:
        while follower.meets_ranks:
            follower.log_loss(training.step())


def _tuner(training: Training[ZenFlowAdamW], options: TuneOptions, quality: Quality, store: Store | None) -> Tuner:
    task = training.task
    wishes = TuneRequest(
        quality=quality, micro_batch=task.micro_batch, sequence=task.sequence, tune_memory=options.tune_memory,
        fresh=options.fresh, search=options.search,
    )  # fmt: skip
    return start_tuner(training.optimizer, wishes, tokens=training.tokens, store=store, name=training.workload.name)


def _task_of(options: TuneOptions, config: ZenFlowConfig) -> tuple[Task, str]:
    """At a rate of fine-tuning: at a higher one these weights, which are random, move too far for late updates."""
    task, device_name = task_of(
        ProfileOptions(
            config=config, model=options.model, text=options.text, dtype=options.dtype, seed=options.seed,
            micro_batch=options.micro_batch, sequence=options.sequence, rig=options.rig, ranks=options.ranks,
            real_time=options.real_time,
        )
    )  # fmt: skip
    return replace(task, learning_rate=2e-6), device_name
