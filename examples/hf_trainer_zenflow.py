"""Train a small Llama on Python's own sources with the Trainer of Hugging Face transformers and ZenFlow.

On several ranks it is sharded over FSDP2.

python examples/hf_trainer_zenflow.py --steps 80
torchrun --nproc-per-node 2 examples/hf_trainer_zenflow.py --steps 80
python examples/hf_trainer_zenflow.py --steps 2000 --tune    # looks for better knobs meanwhile
"""

import argparse
import json
import logging
import os
import tempfile
import time
from pathlib import Path

import torch
from accelerate.utils import DistributedType
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import zenflow
from zftune.integrations.huggingface import ZFTuneCallback, zenflow_class, zenflow_optimizer


class Text(Dataset):
    """Windows of bytes; the model shifts the labels itself."""

    def __init__(self, data, length):
        self.data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.length = length

    def __len__(self):
        return len(self.data) // self.length

    def __getitem__(self, index):
        window = self.data[index * self.length : (index + 1) * self.length].long()
        return {"input_ids": window, "labels": window}


class Stopwatch(TrainerCallback):
    """The time of each step, from the end of the one before."""

    def __init__(self):
        self.step_ms = []
        self.last = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.last = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.step_ms.append(1e3 * (now - self.last))
        self.last = now


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--output", help="folder for the model; none: it is thrown away")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in that folder")
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("zftune").setLevel(logging.INFO)

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=args.length,
        )
    )
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    data = Text(b"".join(source.read_bytes() for source in sources), args.length)
    stopwatch = Stopwatch()
    sharded = int(os.environ.get("WORLD_SIZE", "1")) > 1
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            output_dir=args.output or folder,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=3e-4,
            logging_steps=10,
            save_strategy="steps" if args.output else "no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            fsdp=sharded,
            fsdp_config={"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"} if sharded else None,
        )
        if sharded and training.device.type == "cpu":
            training.distributed_state.distributed_type = DistributedType.MULTI_GPU  # else CPUs are not sharded over
        config = zenflow.ZenFlowConfig(topk_ratio=0.1, update_interval=4)
        if sharded:
            ours = {"optimizer_cls_and_kwargs": zenflow_class(model, training, config)}
        else:
            ours = {"optimizers": (zenflow_optimizer(model, training, config), None)}
        trainer = Trainer(
            model=model,
            args=training,
            train_dataset=data,
            **ours,  # the one line
            callbacks=[stopwatch, ZFTuneCallback(tune=args.tune, sequence=args.length)],
        )
        trainer.train(resume_from_checkpoint=args.resume)
        if args.output:
            trainer.save_model()  # holds every update: the callback has seen to that
    if trainer.is_world_process_zero():
        print(json.dumps({"step_ms": stopwatch.step_ms}))


if __name__ == "__main__":
    main()
