"""The Trainer with DeepSpeed, in a process of its own.

python -m tests.support.zftune.integrations.trainer_run FOLDER CONFIG [CHECKPOINT]

It trains into FOLDER, from CHECKPOINT on if there is one, and leaves what it saw in FOLDER/seen.pt, of another rank
than the first in seen.RANK.pt. Of a folder FOLDER/../model the model is loaded.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

STEPS, SAVE_EVERY = 8, 3


def main() -> None:
    folder, config, *checkpoint = sys.argv[1:]
    torch.set_num_threads(1)
    from deepspeed.utils import safe_get_full_fp32_param

    from tests.support.zftune.integrations.trainers import trainer

    ds_config: dict[str, Any] = json.loads(config)
    made = trainer(
        Path(folder),
        None,
        deepspeed=ds_config,
        bf16="bf16" in ds_config,
        max_steps=STEPS,
        pretrained=place if (place := Path(folder).parent / "model").is_dir() else None,
        save_strategy="steps",
        save_steps=SAVE_EVERY,
    )
    was_cut_up = any(hasattr(parameter, "ds_id") for parameter in made.model.parameters())
    for part in made.model.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.3  # losses need the random numbers that the checkpoint has
    made.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
    seen = {
        "log": [entry for entry in made.state.log_history if "loss" in entry],
        "step": made.state.global_step,
        "optimizer": type(made.deepspeed.optimizer).__name__,
        "masters": {name: safe_get_full_fp32_param(p).clone() for name, p in made.model.named_parameters()},
        "was cut up": was_cut_up,
    }
    rank = os.environ.get("RANK", "0")
    torch.save(seen, Path(folder, "seen.pt" if rank == "0" else f"seen.{rank}.pt"))


if __name__ == "__main__":
    main()
