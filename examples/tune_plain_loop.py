"""Train a small byte-level transformer on Python's own sources in plain PyTorch, with ZenFlow, and tune it meanwhile.

python examples/tune_plain_loop.py --steps 2000
"""

import argparse
import logging
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import zenflow
import zftune


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


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--length", type=int, default=64)
args = parser.parse_args()
logging.basicConfig(format="%(message)s")
logging.getLogger("zftune").setLevel(logging.INFO)

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
sources = sorted(Path(os.__file__).parent.glob("*.py"))
data = torch.frombuffer(bytearray(b"".join(source.read_bytes() for source in sources)), dtype=torch.uint8)
model = Model(length=args.length).to(device)
optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=3e-4, module=model)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

zftune.attach(optimizer, micro_batch=args.batch, sequence=args.length)  # the one line

for step in range(args.steps):
    begins = torch.randint(len(data) - args.length - 1, (args.batch,)).tolist()
    windows = torch.stack([data[begin : begin + args.length + 1] for begin in begins]).long().to(device)
    loss = functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    loss.backward()
    zftune.log_loss(loss)  # lets knobs change that change the trajectory: a guard watches
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
