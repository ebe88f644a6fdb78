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
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

if TYPE_CHECKING:
    from accuracy.training import World

BUILD = Path(__file__).parents[3] / "build" / "torch-extensions"
LIMIT_S = 1800.0


def versions() -> str:
    """The installed DeepSpeed and torch, which name the folder of what DeepSpeed compiles."""
    return "-".join(f"{package}-{metadata.version(package)}" for package in ("deepspeed", "torch"))


def run_apart(world: World, name: str, seed: int) -> dict[str, Any]:
    """A run in another process, which is ended with all that it started.

    Returns:
        As `training.train`, without what only this runtime knows; or `ended`, how it ended without a result.
    """
    began = time.perf_counter()
    world.problem(name)  # made here, read there
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "run.json", Path(folder) / "log"
        place = {"cache": str(world.cache), "encoder": None if world.encoder is None else str(world.encoder)}
        file.write_text(
            json.dumps({"scale": asdict(world.scale), "name": name, "seed": seed, **place}), encoding="utf-8"
        )
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
                code: int | None = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # the workers too, which DeepSpeed leaves behind
                process.wait()
        figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if "loss" not in figures:
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

    from accuracy.language import LanguageScale
    from accuracy.training import Scale, World

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ask = json.loads(file.read_text(encoding="utf-8"))
    scale = Scale(**{**ask["scale"], "language": LanguageScale(**ask["scale"]["language"])})
    world = World(scale, Path(ask["cache"]), None if ask["encoder"] is None else Path(ask["encoder"]))
    prepare()
    file.write_text(json.dumps(_train(world, ask["name"], ask["seed"])), encoding="utf-8")


def _train(world: World, name: str, seed: int) -> dict[str, Any]:
    import deepspeed

    from accuracy.training import Movement, document, rate_at, started, tenths

    steps, batch, lr = world.size(name)
    problem = world.problem(name)
    model = started(problem, seed, world.dtype).float()
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=document(batch, lr, world.scale.dtype)
    )
    feed, losses, movement = problem.batches(batch, 2000 + seed), [], Movement(engine.module, steps)
    for number in range(1, steps + 1):
        movement.look(number - 1)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(lr, number, steps)
        loss = engine(*next(feed))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    movement.look(steps)
    found = problem.evaluate(engine.module)
    return {**found, "training": tenths(losses), "moved": movement.found, "versions": versions()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
