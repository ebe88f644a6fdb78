"""A system's own process: `python worker.py ASK_FD ANSWER_FD`. One JSON line asks, one answers."""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # upstream's overlapped update begins by reading this file again, and needs nothing of it
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

if TYPE_CHECKING:
    from sidebyside.contenders import Contender


def make(ask: dict[str, Any]) -> Contender:
    """The contender that the first line asks for."""
    import torch

    from sidebyside.contenders import Ours, Plain, Upstream
    from sidebyside.setting import SYSTEMS

    system = SYSTEMS[ask["system"]]
    torch.set_num_threads(system.torch_threads)
    warnings.simplefilter("ignore")
    folder, seed = Path(ask["folder"]), ask["seed"]
    if system.kind == "plain":
        return Plain(folder, seed)
    return Upstream(system, folder, seed, ask["port"]) if system.kind == "upstream" else Ours(system, folder, seed)


def answer(contender: Contender, ask: dict[str, Any]) -> Any:
    """What is asked for, done."""
    match ask["do"]:
        case "train":
            return contender.train(ask["steps"])
        case "evaluate":
            return contender.evaluate(ask["sequences"])
        case "freeze":
            # Else Python's full collection, 100 ms and more, falls into a step of whoever has made the most objects.
            gc.collect()
            return gc.freeze()
        case "bytes":
            return {"elements": contender.workload.parameters, "bytes": contender.host_bytes()}
        case "end":
            return contender.close()
        case unknown:
            raise ValueError(f"do is {unknown!r}, allowed are train, evaluate, freeze, bytes and end")


def main() -> None:
    """Answer until there is nothing more to read."""
    asks, answers = (os.fdopen(int(number), mode) for number, mode in zip(sys.argv[1:], "rw", strict=True))

    def say(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    with asks, answers:
        contender = make(json.loads(asks.readline()))
        say({"answer": None})
        for line in asks:
            say({"answer": answer(contender, json.loads(line))})


if __name__ == "__main__":
    main()
