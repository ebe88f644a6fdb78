"""DeepSpeed's own ZenFlow on the same batches, each run in a process of its own: `python upstream.py FILE.json`."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # an overlapped update's process begins by reading this file again
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import deepspeedkit

if TYPE_CHECKING:
    from accuracy.training import World

LIMIT_S = 1800.0


def run_apart(world: World, name: str, seed: int) -> dict[str, Any]:
    """A run in another process, which is ended with all that it started.

    Returns:
        As `training.train`, without what only this runtime knows; or `ended`, how it ended without a result.
    """
    world.problem(name)  # made here, read there
    place = {"cache": str(world.cache), "encoder": None if world.encoder is None else str(world.encoder)}
    ask = {"scale": asdict(world.scale), "name": name, "seed": seed, **place}
    return deepspeedkit.run_apart(Path(__file__), ask, LIMIT_S)


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
    deepspeedkit.prepare()
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
    return {**found, "training": tenths(losses), "moved": movement.found, "versions": deepspeedkit.versions()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
