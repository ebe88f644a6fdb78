"""Train a small byte-level transformer on Python's own sources on several ranks, sharded by FSDP2, with ZenFlow.

torchrun --nproc-per-node 2 examples/fsdp2_zenflow.py --steps 80
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

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

    def forward(self, tokens, targets):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        logits = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=8, help="windows of each rank")
    parser.add_argument("--length", type=int, default=128)
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    data = Text(b"".join(source.read_bytes() for source in sources), args.length)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler, drop_last=True)
    model = Model(length=args.length).to(device)
    for unit in (*model.blocks.layers, model):
        fully_shard(unit)
    config = zenflow.ZenFlowConfig(topk_ratio=0.1, update_interval=4)
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=3e-4, config=config, module=model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    step_ms = []
    batches = iter(loader)
    last = time.perf_counter()
    for step in range(args.steps):
        inputs, targets = (part.to(device) for part in next(batches))
        loss = model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # by the norm of all ranks' rows
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            mean = loss.detach() / ranks
            distributed.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: loss {mean.item():.3f}", flush=True)
        now = time.perf_counter()
        step_ms.append(1e3 * (now - last))
        last = now
    if rank == 0:
        whole = sum(parameter.numel() for parameter in model.parameters())
        own = sum(parameter.to_local().numel() for parameter in model.parameters())
        host = optimizer.host_bytes()["peak"]
        print(f"rank 0 of {ranks} has {own:,} of {whole:,} parameters, and took {host:,} bytes of host memory")
        print(json.dumps({"step_ms": step_ms}))
    optimizer.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
