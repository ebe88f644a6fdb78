"""All idioms, by what they are called in the table."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from compatibility.idioms.script import Idiom

NAMES = {
    "average by name": "averages.by_name",
    "average of `state_dict`s": "averages.of_state_dicts",
    "`AveragedModel` (SWA)": "averages.swa",
    "`AveragedModel` (EMA)": "averages.ema_of_torch",
    "`ModelEma` (deep copy, timm)": "averages.ema_of_timm",
    "average in another thread": "averages.in_a_thread",
    "average swapped in and back, `copy_`": "averages.swapped_by_copies",
    "average swapped in and back, `.data`": "averages.swapped_by_data",
    "mean teacher": "averages.mean_teacher",
    "BYOL": "averages.byol",
    "DINO": "averages.dino",
    "DQN, hard target updates": "averages.dqn",
    "MoCo, key encoder and queue": "averages.moco",
    "actor in another process, `share_memory`": "averages.actor",
    "GAN, two engines": "pairs.two_engines",
    "GAN, two engines, one frozen at a time": "pairs.two_engines_frozen",
    "GAN, engine and `torch.optim.Adam`": "pairs.engine_and_torch",
    "WGAN, clipped weights": "pairs.clipped_critic",
    "WGAN-GP, `create_graph`": "pairs.penalised_critic",
    "L2-SP, before the forward": "losses.l2_sp",
    "EWC": "losses.ewc",
    "orthogonality penalty": "losses.orthogonal",
    "double backward": "losses.double_backward",
    "MAML, `functional_call`": "losses.maml",
    "`weight_norm`, hook": "computed.weight_norm_hook",
    "`weight_norm`, parametrization": "computed.weight_norm",
    "`spectral_norm`, hook": "computed.spectral_norm_hook",
    "`spectral_norm`, parametrization": "computed.spectral_norm",
    "parametrization, made final": "computed.parametrization",
    "masks after each step": "computed.masks",
    "`prune`, and `prune.remove`": "computed.pruning",
    "BinaryConnect": "computed.quantised",
    "hypernetwork": "computed.from_a_generator",
    "LoRA, merged and unmerged": "written.lora_merge",
    "ReLoRA": "written.relora",
    "model soup": "written.soup",
    "SAM": "written.sam",
    "SAM, by `autograd.grad`": "written.sam_of_autograd",
    "Lookahead": "written.lookahead",
    "Reptile": "written.reptile",
    "nGPT, normalised rows": "written.hypersphere",
    "`renorm` before the forward": "written.max_norm",
    "noise, shrink and perturb": "written.noise_on_weights",
    "new head": "written.new_head",
    "checkpoint of the model loaded": "written.checkpoint",
    "`vector_to_parameters`": "written.vectors",
    "freeze and thaw": "written.freeze_and_thaw",
    "gradual unfreezing, `add_param_group`": "written.gradual_unfreezing",
    "Trainer, average in a callback": "trainers.averaging",
    "Trainer, writes in a callback": "trainers.writing",
    "Trainer, evaluation with the average": "trainers.evaluating",
    "Accelerate, average and clipping": "trainers.accelerated",
}
"""Module and function of each."""


def idiom(name: str) -> Idiom:
    """The function of an idiom."""
    module, _, function = NAMES[name].partition(".")
    return cast("Idiom", getattr(importlib.import_module(f"compatibility.idioms.{module}"), function))
