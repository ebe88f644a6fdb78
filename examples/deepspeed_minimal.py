"""Train a small network with DeepSpeed's minimal client loop: everything else stands in the ds_config.

deepspeed examples/deepspeed_minimal.py --deepspeed --deepspeed_config examples/ds_config.json
"""

import argparse

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    """A regression; its output is the loss."""

    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x.to(self.layers[0].weight.dtype)).float(), y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=40)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(4 * args.steps, 64)
    data = TensorDataset(x, torch.tanh(x.flip(1)))
    net = Net()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=net.parameters(), training_data=data
    )
    for step, batch in enumerate(loader):
        loss = engine(*(part.to(engine.device) for part in batch))
        engine.backward(loss)
        engine.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":  # DeepSpeed's overlapped ZenFlow has a process that reads this file again
    main()
