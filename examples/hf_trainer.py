"""Train a small Llama on Python's own sources with the Trainer of Hugging Face transformers, with DeepSpeed or without.

python examples/hf_trainer.py --steps 80
torchrun --standalone examples/hf_trainer.py --steps 80 --deepspeed examples/ds_hf.json
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


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
    parser.add_argument("--deepspeed", help="a ds_config")
    args = parser.parse_args()

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
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=args.steps,
                per_device_train_batch_size=args.batch,
                learning_rate=3e-4,
                warmup_steps=1,  # for "auto" in a ds_config: DeepSpeed refuses 0
                logging_steps=10,
                save_strategy="no",
                deepspeed=args.deepspeed,
                bf16=args.deepspeed is not None,
                use_cpu=not torch.cuda.is_available(),
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=data,
            callbacks=[stopwatch],
        )
        trainer.train()
    print(json.dumps({"step_ms": stopwatch.step_ms}))


if __name__ == "__main__":
    main()
