"""A Trainer over FSDP2, a rank of several in a process of its own.

python -m tests.zftune.integrations.fsdp_trainer_run FOLDER WHO [CHECKPOINT]

WHO makes the optimizer: "torch", or "exact" or "late" of zenflow. What a rank saw is left in FOLDER/seen.RANK.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

STEPS, SAVE_EVERY = 8, 3
FSDP = {
    "fsdp_version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "state_dict_type": "SHARDED_STATE_DICT",
}


def shard_on_cpus() -> None:
    """By a look at the devices Accelerate takes another way than FSDP on a CPU; now it takes that of GPUs."""
    from accelerate.state import AcceleratorState, DistributedType

    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if kwargs.get("fsdp_plugin") is not None:
            AcceleratorState._shared_state.update(
                distributed_type=DistributedType.FSDP, fsdp_plugin=kwargs["fsdp_plugin"]
            )

    AcceleratorState.__init__ = init


def main() -> None:
    folder, who, *checkpoint = sys.argv[1:]
    torch.set_num_threads(1)
    from transformers import Trainer

    from tests.zftune.integrations.trainers import EXACT, LATE, Tokens, arguments, tiny_model
    from zftune.integrations.huggingface import ZFTuneCallback, zenflow_class

    torch.distributed.init_process_group("gloo")
    shard_on_cpus()
    args = arguments(
        Path(folder), fsdp=True, fsdp_config=FSDP, max_steps=STEPS, save_strategy="steps", save_steps=SAVE_EVERY
    )
    model = tiny_model()
    more: dict[str, Any] = {}
    if who != "torch":
        more["optimizer_cls_and_kwargs"] = zenflow_class(model, args, EXACT if who == "exact" else LATE)
        more["callbacks"] = [ZFTuneCallback(tune=False)]
    trainer = Trainer(model=model, args=args, train_dataset=Tokens(), **more)
    trainer.accelerator.device_placement = False
    trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    seen: dict[str, Any] = {name: [entry[name] for entry in entries] for name in ("loss", "grad_norm", "learning_rate")}
    seen["weights"] = {name: value.full_tensor().clone() for name, value in trainer.model.state_dict().items()}
    seen["optimizer"] = type(trainer.optimizer.optimizer).__name__
    torch.save(seen, Path(folder, f"seen.{torch.distributed.get_rank()}.pt"))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
