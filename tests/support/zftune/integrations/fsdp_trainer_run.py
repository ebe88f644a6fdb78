"""A Trainer over FSDP2, a rank of several in a process of its own.

python -m tests.support.zftune.integrations.fsdp_trainer_run FOLDER WHO [CHECKPOINT]

WHO makes the optimizer: "torch", or "exact" or "late" of zenflow; "killed" is exact, and the second rank is killed
after a checkpoint. What a rank saw is left in FOLDER/seen.RANK.pt. However many there are, they share the same
batches.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.tiers import fast

STEPS, SAVE_EVERY = fast(8, all_of=20), 3
BATCH, SAMPLES = 12, 60
FSDP = {
    "fsdp_version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "state_dict_type": "SHARDED_STATE_DICT",
}


def main() -> None:
    folder, who, *checkpoint = sys.argv[1:]
    torch.set_num_threads(1)
    from accelerate.utils import DistributedType
    from transformers import Trainer, TrainerCallback

    from tests.support.zftune.integrations.trainers import EXACT, LATE, Tokens, arguments, tiny_model
    from zftune.integrations.huggingface import ZFTuneCallback, zenflow_class

    class Killed(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
        def on_step_begin(self, args: Any, state: Any, control: Any, **of: Any) -> None:
            if state.global_step == SAVE_EVERY + 2 and args.process_index == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    args = arguments(
        Path(folder),
        fsdp=True,
        fsdp_config=FSDP,
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=SAVE_EVERY,
        per_device_train_batch_size=BATCH // int(os.environ["WORLD_SIZE"]),
    )
    args.distributed_state.distributed_type = DistributedType.MULTI_GPU  # else Accelerate does not shard on CPUs
    model = tiny_model()
    more: dict[str, Any] = {}
    if who != "torch":
        more["optimizer_cls_and_kwargs"] = zenflow_class(model, args, LATE if who == "late" else EXACT)
        more["callbacks"] = [ZFTuneCallback(tune=False), *([Killed()] if who == "killed" else [])]
    trainer = Trainer(model=model, args=args, train_dataset=Tokens(SAMPLES), **more)
    trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    seen: dict[str, Any] = {name: [entry[name] for entry in entries] for name in ("loss", "grad_norm", "learning_rate")}
    seen["weights"] = {name: value.full_tensor().clone() for name, value in trainer.model.state_dict().items()}
    seen["optimizer"] = type(trainer.optimizer.optimizer).__name__
    torch.save(seen, Path(folder, f"seen.{torch.distributed.get_rank()}.pt"))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
