"""Train a small Llama on Python's own sources with DeepSpeed: ZeRO stage 2, optimizer on the host.

deepspeed examples/deepspeed_zero_offload.py --steps 80
"""

import argparse
import json
import os
import socket
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = Path(__file__).with_name("ds_config.json")


class Text(Dataset):
    """Windows of bytes; the model shifts the labels itself."""

    def __init__(self, data, length):
        self.data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.length = length

    def __len__(self):
        return len(self.data) // self.length

    def __getitem__(self, index):
        return self.data[index * self.length : (index + 1) * self.length].long()


def alone():
    """What a launcher would have set: one rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    defaults = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in defaults.items():
        os.environ.setdefault(name, str(value))
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    alone()

    import deepspeed  # looks for its accelerator when it is imported

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
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=str(CONFIG), dist_init_required=True
    )
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    data = Text(b"".join(source.read_bytes() for source in sources), args.length)
    loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), shuffle=True, drop_last=True)

    step_ms = []
    batches = iter(loader)
    last = time.perf_counter()
    for step in range(args.steps):
        tokens = next(batches).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
        now = time.perf_counter()
        step_ms.append(1e3 * (now - last))
        last = now
    print(json.dumps({"step_ms": step_ms}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
