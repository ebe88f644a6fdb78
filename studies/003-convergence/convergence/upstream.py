"""DeepSpeed's own ZenFlow on the same batches, each run in a process of its own: `python upstream.py FILE.json`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # an overlapped update's process begins by reading this file again
    sys.path.insert(0, str(Path(__file__).parents[1]))

if TYPE_CHECKING:
    from convergence.setting import Setting
    from convergence.train import World

BUILD = Path(__file__).parents[3] / "build" / "torch-extensions"
COMPILING_S, LIMIT_S = 900.0, 300.0

# The tutorial's section (deepspeed.ai/tutorials/zenflow). "auto" selects once, at the first step. The repaired one does
# what a setting can do: no overlap, a first synchronous step, and a selection every 32 steps as in the other runs.
SECTIONS: dict[str, dict[str, Any]] = {
    "deepspeed": {
        "topk_ratio": 0.05,
        "select_strategy": "auto",
        "select_interval": "auto",
        "update_interval": 4,
        "full_warm_up_rounds": 0,
        "overlap_step": True,
    },
    "deepspeed repaired": {
        "topk_ratio": 0.05,
        "select_strategy": "step",
        "select_interval": 32,
        "update_interval": 4,
        "full_warm_up_rounds": 1,
        "overlap_step": False,
    },
}


def document(setting: Setting, batch: int) -> dict[str, Any]:
    """DeepSpeed's configuration for a setting."""
    from convergence.train import ADAMW

    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 0.0,  # left out, DeepSpeed clips the norm to 1
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": setting.lr, **ADAMW, "betas": [0.9, 0.999]}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "zenflow": SECTIONS[setting.method],
        },
    }


def versions() -> str:
    """The installed DeepSpeed and torch, which name the folder of what DeepSpeed compiles."""
    return "-".join(f"{package}-{metadata.version(package)}" for package in ("deepspeed", "torch"))


def compiled() -> bool:
    """Whether DeepSpeed has its operations for these versions already."""
    return all((BUILD / versions() / name / f"{name}.so").exists() for name in ("cpu_adam", "deepspeed_shm_comm"))


def run_apart(world: World, setting: Setting) -> dict[str, Any]:
    """A run in another process, which is ended with all that it started.

    Returns:
        held_out, training, document, versions, seconds; or `ended`, how the process ended without a result.
    """
    from convergence.train import pretrained

    began = time.perf_counter()
    pretrained(world, setting.seed)  # made here, read there
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "run.json", Path(folder) / "log"
        ask = {"setting": asdict(setting), "scale": asdict(world.scale), "cache": str(world.cache)}
        file.write_text(json.dumps(ask), encoding="utf-8")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, __file__, file],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(LIMIT_S if compiled() else COMPILING_S)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # the workers too, which DeepSpeed leaves behind
                process.wait()
        figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if "held_out" not in figures:
            last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
            return {"ended": "no answer in time" if code is None else f"exit status {code}", "log": last}
    return {**figures, "seconds": time.perf_counter() - began}


def prepare() -> None:
    """What DeepSpeed needs around it: one rank of gloo, and a folder for what it compiles."""
    (BUILD / versions()).mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        DS_ACCELERATOR="cpu",
        TORCH_EXTENSIONS_DIR=str(BUILD / versions()),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
    )
    tools = str(Path(sys.executable).parent)
    if tools not in os.environ["PATH"].split(os.pathsep):  # another ninja would compile everything again
        os.environ["PATH"] = os.pathsep.join((tools, os.environ["PATH"]))
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def main(file: Path) -> None:
    """The other process: one run, whose result takes the place of what was asked for."""
    import torch

    from convergence.data import texts
    from convergence.setting import Setting
    from convergence.train import Scale, World

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ask = json.loads(file.read_text(encoding="utf-8"))
    setting = Setting(**ask["setting"])
    world = World(Scale(**ask["scale"]), texts(), Path(ask["cache"]))
    prepare()
    file.write_text(json.dumps(_train(world, setting)), encoding="utf-8")


def _train(world: World, setting: Setting) -> dict[str, Any]:
    import deepspeed

    from convergence.train import feed_of, held_out_loss, start

    model, scale = start(world, setting.regime, setting.seed), world.scale
    asked = document(setting, scale.batch)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=asked)
    feed, losses = feed_of(world, setting), []
    for _ in range(scale.steps):
        loss = engine(next(feed))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    sequences = world.texts[setting.regime].evaluation(scale.sequences)
    return {
        "held_out": held_out_loss(engine.module, sequences),
        "training": [sum(losses[i : i + 20]) / 20 for i in range(0, len(losses) - 19, 20)],
        "document": asked,
        "versions": versions(),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
