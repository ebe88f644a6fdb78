"""Train a small byte-level transformer on Python's own sources with Hugging Face Accelerate and ZenFlow.

python examples/accelerate_zenflow.py --steps 80
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import zenflow


class Text(Dataset):
    """Windows of bytes; the targets are the same bytes, one later."""

    def __init__(self, data, length):
        self.data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.length = length

    def __len__(self):
        return (len(self.data) - 1) // self.length

    def __getitem__(self, index):
        begin = index * self.length
        window = self.data[begin : begin + self.length + 1].long()
        return window[:-1], window[1:]


class Model(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, width=128, layers=2, heads=4, length=128):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--passes", type=int, default=1, help="backward passes before a step")
    parser.add_argument("--precision", default="no", choices=["no", "bf16"])
    parser.add_argument("--save", help="folder for a checkpoint at the end")
    parser.add_argument("--resume", help="folder of such a checkpoint")
    args = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=args.passes, mixed_precision=args.precision)
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    data = Text(b"".join(source.read_bytes() for source in sources), args.length)
    loader = DataLoader(data, batch_size=args.batch, shuffle=True, drop_last=True)
    model = Model(length=args.length).to(accelerator.device)  # before the optimizer, which splits what is there
    config = zenflow.ZenFlowConfig(topk_ratio=0.1, update_interval=4, gradient_accumulation_steps=args.passes)
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=3e-4, config=config, module=model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    # No device placement for the optimizer: its state belongs to the host.
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader, scheduler, device_placement=[True, False, True, True]
    )
    if args.resume:
        accelerator.load_state(args.resume)

    step_ms = []
    batches = iter(loader)
    last = time.perf_counter()
    for step in range(args.steps):
        for _ in range(args.passes):
            inputs, targets = next(batches)
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if step % 10 == 0:
            accelerator.print(f"step {step}: loss {loss.item():.3f}", flush=True)
        now = time.perf_counter()
        step_ms.append(1e3 * (now - last))
        last = now
    if args.save:
        accelerator.save_state(args.save)  # resumes bit for bit, in the middle of a window too
    optimizer.optimizer.flush()  # before the model is kept alone: every pending host update becomes visible
    accelerator.print(json.dumps({"step_ms": step_ms}))


if __name__ == "__main__":
    main()
