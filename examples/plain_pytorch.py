"""Train a small byte-level transformer on Python's own sources, in plain PyTorch.

python examples/plain_pytorch.py --steps 80
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


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
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    data = Text(b"".join(source.read_bytes() for source in sources), args.length)
    loader = DataLoader(data, batch_size=args.batch, shuffle=True, drop_last=True)
    model = Model(length=args.length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    step_ms = []
    batches = iter(loader)
    last = time.perf_counter()
    for step in range(args.steps):
        inputs, targets = (part.to(device) for part in next(batches))
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
        now = time.perf_counter()
        step_ms.append(1e3 * (now - last))
        last = now
    print(json.dumps({"step_ms": step_ms}))


if __name__ == "__main__":
    main()
