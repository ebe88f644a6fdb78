"""A training over ranks that saves as it goes, and a rank of which ends in the midst of it; or goes on from there.

python -m tests.support.zftune.integrations.ds_ends FOLDER STEPS [VICTIM --moment MOMENT] [--tag TAG] [--stage STAGE]

Each rank prints "step", number and loss as a line. VICTIM is a rank that gets SIGKILL where, after the first
checkpoint, it is about to open, write, move or remove something in FOLDER for the MOMENT-th time; a negative MOMENT is
a pass forward or backward instead. Where there is a checkpoint in FOLDER, it goes on from it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.support.zftune.integrations.ds_running import ADAMW, ZENFLOW, ds_config
from tests.support.zftune.integrations.ds_worker import batch, make_model

EVERY = 2
"""Steps between two checkpoints."""
TIMEOUT = timedelta(seconds=20)
"""After which a rank gives up the others."""
_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


class Moments:
    """Counts until this process is killed, at the moment `last` (0: never)."""

    def __init__(self, folder: Path, last: int) -> None:
        self.met = 0
        self._folder, self._last, self._saved = str(folder), last, False
        if last > 0:
            sys.addaudithook(self._see)
            self._save = torch.save
            vars(torch)["save"] = self._half_saved

    def saved(self) -> None:
        self._saved = True

    def passed(self, _module: object, _args: object, output: torch.Tensor) -> None:
        """A layer's pass forward, and later the one backward."""
        if self._last < 0 and self._saved:
            self._meet()
            output.register_hook(lambda _: self._meet())

    def _see(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _EVENTS and self._saved and str(args[0]).startswith(self._folder):
            self._meet()

    def _half_saved(self, values: object, file: Any, *args: Any, **kwargs: Any) -> None:
        """Two moments of `torch.save`, whose writes nobody hears of: before it, and when half of a file is there."""
        if self._saved and str(file).startswith(self._folder):
            self._meet()
        self._save(values, file, *args, **kwargs)
        if self._saved and str(file).startswith(self._folder):
            self._meet(half_of=file)

    def _meet(self, half_of: str | None = None) -> None:
        self.met += 1
        if self.met == abs(self._last):
            if half_of is not None:
                os.truncate(half_of, Path(half_of).stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("victim", type=int, nargs="?", default=-1)
    parser.add_argument("--moment", type=int, default=0)
    parser.add_argument("--tag")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--local_rank", help="as DeepSpeed's launcher tells it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    import deepspeed

    import zftune.integrations.deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False, timeout=TIMEOUT)
    zftune.integrations.deepspeed.enable()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    config = ds_config(stage=args.stage, zenflow=ZENFLOW, optimizer=ADAMW)
    config["train_micro_batch_size_per_gpu"] = 4 // ranks
    model = make_model("plain")
    moments = Moments(args.folder, args.moment if rank == args.victim else 0)
    for layer in model.children():
        layer.register_forward_hook(moments.passed)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    if (args.folder / "latest").exists():
        engine.load_checkpoint(str(args.folder))
    rows = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
    while engine.global_steps < args.steps:
        x = batch(engine.global_steps, rows)
        loss = (engine(x) - x).square().mean()
        engine.backward(loss)
        engine.step()
        print("step", engine.global_steps, loss.item(), flush=True)
        if engine.global_steps % EVERY == 0:
            engine.save_checkpoint(str(args.folder), tag=args.tag)
            moments.saved()
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
