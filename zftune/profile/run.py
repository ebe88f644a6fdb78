"""`zftune profile`: measure the given knobs and the baselines, one after the other."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zenflow import ConfigError, ZenFlowConfig
from zenflow.device import default_torch_device, device_name
from zftune.ds_config.text import load
from zftune.emulation.machines import DEFAULT_RIG, load_rig
from zftune.errors import BadInputError, ProfileError
from zftune.profile.companions import TorchAdamW, several_ranks
from zftune.profile.document import BASELINES, build_document, everybodys
from zftune.profile.measure import Measurement, OnStep, System, Task, measure
from zftune.profile.sampling import Sampling
from zftune.text import one_of
from zftune.workload import load_text

OWN = "this run"
SYNCHRONOUS_STEPS = 8
"""Measured steps of the baselines: each of their steps is alike."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_SEEDS = 1 << 63  # as many as torch's generators take, from 0

OnSystem = Callable[[str], OnStep]
"""Told the name of a system before it is measured; returns what is told about its steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """What the command line asks for; None means that it follows from the device."""

    config: ZenFlowConfig
    steps: int = 24
    model: str | None = None
    text: str | None = None
    dtype: str = "bf16"
    micro_batch: int | None = None
    sequence: int | None = None
    seed: int = 0
    rig: str | None = None
    """A name, a file or "none"; None: the default rig where there is no GPU."""
    ranks: int = 1
    """Each on a rig of its own, with its rows of the model (FSDP2)."""
    real_time: bool = False
    """Whether a rig pads real work by the machine's clock, and does not simulate time."""
    baselines: bool = True


def profile(options: ProfileOptions, on_system: OnSystem) -> dict[str, Any]:
    """Measure and return the profile document.

    Raises:
        BadInputError: an option is not allowed.
        ProfileError: the run could not be accepted (see `measure`).
    """
    task, name_of_device = task_of(options)
    options = dataclasses.replace(options, config=task.scaled(options.config))
    others = partial(_measure_beside, options)
    with (
        Sampling(lambda: [os.getpid()], simulated=task.simulated) as sampling,
        several_ranks(options.ranks, others),
    ):
        runs = _runs(task, options, on_system)
        own = runs[options.config]
        ranks = everybodys(task, own) if own is not None else []
    if own is None:
        raise ProfileError("the run does not fit into the GPU's memory; use a smaller --micro-batch or --sequence")
    baselines = {name: runs[_systems(options)[name]] for name in BASELINES} if options.baselines else None
    return build_document(task, own, baselines, ranks, device_name=name_of_device, sampling=sampling)


def _systems(options: ProfileOptions) -> dict[str, System]:
    own: dict[str, System] = {OWN: options.config}
    return own | (_baselines(options.config) if options.baselines else {})


def _runs(task: Task, options: ProfileOptions, on_system: OnSystem) -> dict[System, Measurement | None]:
    runs: dict[System, Measurement | None] = {}
    for name, system in _systems(options).items():
        if system not in runs:
            steps = options.steps if name == OWN else min(options.steps, SYNCHRONOUS_STEPS)
            runs[system] = _measure_if_it_fits(task, system, steps, on_system(name))
    return runs


def _measure_beside(options: ProfileOptions, rank: int) -> None:
    task = dataclasses.replace(task_of(options)[0], rank=rank)
    own = _runs(task, options, lambda _name: lambda _done, _total: None)[options.config]
    if own is not None:
        everybodys(task, own)


def _measure_if_it_fits(task: Task, system: System, steps: int, on_step: OnStep) -> Measurement | None:
    """None where the GPU's memory is too small: for no offloading that is a finding, not a failure."""
    try:
        return measure(task, system, steps, on_step)
    except torch.cuda.OutOfMemoryError:
        return None


def _baselines(own: ZenFlowConfig) -> dict[str, System]:
    common: dict[str, Any] = {
        "max_grad_norm": own.max_grad_norm,
        "skip_nonfinite": own.skip_nonfinite,
        "bucket_bytes": own.bucket_bytes,
        "host_threads": own.host_threads,
        "pt_reserved_cores_perc": own.pt_reserved_cores_perc,
        "select_interval": own.select_interval,
    }
    return {
        "no_offload": TorchAdamW(own.max_grad_norm, own.skip_nonfinite),
        # Resolved as this run's, which may be one of them.
        "zero_offload": ZenFlowConfig.zero_offload(**common).resolved(),
        "zero_offload_pipelined": ZenFlowConfig.zero_offload(pipeline="bucket", **common).resolved(),
    }


def task_of(options: ProfileOptions) -> tuple[Task, str]:
    """What the options train, and the name of the device.

    Raises:
        BadInputError: an option is not allowed.
    """
    _check(options)
    torch_device = _torch_device(options.rig)
    if options.real_time and (options.rig == "none" or torch_device.type != "cpu"):
        raise BadInputError("--real-time: allowed only on a rig, a device has no other time")
    if options.ranks > 1 and (options.rig == "none" or torch_device.type != "cpu" or options.real_time):
        raise BadInputError(
            f"--ranks {options.ranks}: allowed only on a rig in simulated time; ranks on devices are those of a "
            "command of your own (torchrun ...)"
        )
    on_gpu = torch_device.type != "cpu"
    rig_name = None if options.rig == "none" or on_gpu else options.rig or DEFAULT_RIG
    rig = None if rig_name is None else load_rig(rig_name)  # before the text, which takes longer to read
    task = Task(
        model=options.model or ("medium" if on_gpu else "tiny"),
        corpus=load_text(options.text),
        dtype=DTYPES[options.dtype],
        micro_batch=options.micro_batch if options.micro_batch is not None else (4 if on_gpu else 1),
        sequence=_sequence(options, on_gpu, rig is not None),
        seed=options.seed,
        torch_device=torch_device,
        rig=rig,
        ranks=options.ranks,
        real_time=options.real_time,
    )
    return task, device_name(torch_device) + ("" if rig is None else " (emulated accelerator)")


def _sequence(options: ProfileOptions, on_gpu: bool, emulated: bool) -> int:
    if options.sequence is not None:
        return options.sequence
    if emulated:
        return 16  # CPUs without AVX-512 multiply bfloat16 slowly: 64 tokens fill the pads of a forward pass
    return 1024 if on_gpu else 64


def _check(options: ProfileOptions) -> None:
    for name, value, least in (
        ("steps", options.steps, 1),
        ("ranks", options.ranks, 1),
        ("micro-batch", options.micro_batch, 1),
        ("sequence", options.sequence, 2),
    ):
        if value is not None and value < least:
            raise BadInputError(f"--{name} is {value}; it must be an integer >= {least}")
    if not 0 <= options.seed < _SEEDS:
        raise BadInputError(f"--seed is {options.seed}; it must be an integer from 0 to {_SEEDS - 1}")
    one_of("--dtype", options.dtype, list(DTYPES))


def _torch_device(rig: str | None) -> torch.device:
    """The GPU if there is one; a rig that was asked for runs on the CPU."""
    return torch.device("cpu") if rig not in (None, "none") else default_torch_device()


def read_config(path: str | None, knobs: dict[str, Any]) -> ZenFlowConfig:
    """The knobs of a ds_config (or the defaults of `zftune profile`), changed by flags.

    Raises:
        BadInputError: the file or a knob is not allowed.
    """
    try:
        if path is None:
            base = ZenFlowConfig(topk_ratio=0.05, update_interval=4, select_interval=16)
        else:
            base = ZenFlowConfig.from_ds_config(load(path))
        return dataclasses.replace(base, **knobs).resolved()
    except ConfigError as error:
        raise BadInputError(str(error)) from error
