"""Stands for a training under the agent, where a test needs the parent's part and not torch: it keeps to the protocol.

    python stand_in.py BEHAVIOUR.json        {"ms": {"4": 10.0, ..}, "crashes": [8], "nan": [6], ...}

Step times are what the file says of each update interval; the steps themselves take a moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ZENFLOW = {
    "topk_ratio": 0.1,
    "select_strategy": "step",
    "select_interval": 16,
    "update_interval": 4,
    "overlap_step": False,
    "full_warm_up_rounds": 0,
}
SLEEP_S = 0.002


def main() -> None:
    behaviour: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(os.environ["ZFTUNE_AGENT_DIR"])
    config: dict[str, Any] = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, **behaviour.get("zero", {})},
    }
    if behaviour.get("sectioned", True):
        config["zero_optimization"] |= {"zenflow": {**ZENFLOW, **behaviour.get("zenflow", {})}}
    asked = {"rank": 0, "world_size": 1, "version": behaviour.get("version", "0.19.6"), "config": config}
    print("a line of the training")
    if "before" in behaviour:
        raise OSError(behaviour["before"])
    if not behaviour.get("plain"):
        write(folder / f"asked-{os.getpid()}.json", json.dumps(asked))
        wait_for(folder / "apply")
    knobs = json.loads((folder / "trial.json").read_text())["knobs"]
    zenflow = dict(config["zero_optimization"].get("zenflow") or {}) if knobs is None else knobs
    interval = zenflow.get("update_interval", 1)
    if "spawn" in behaviour:
        started = subprocess.Popen(["sleep", "300"], start_new_session=True)
        with Path(behaviour["spawn"]).open("a") as pids:
            pids.write(f"{started.pid} {os.getpid()}\n")
    if knobs is not None and "lacks" in behaviour:
        raise RuntimeError(behaviour["lacks"])
    if interval in behaviour.get("memory", ()):
        raise MemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    train(folder, behaviour, zenflow, interval)


def train(folder: Path, behaviour: dict[str, Any], zenflow: dict[str, Any], interval: int) -> None:
    """Take steps until the parent says which is the last."""
    with (folder / f"agent-{os.getpid()}.jsonl").open("a") as file:

        def tell(kind: str, **values: Any) -> None:
            file.write(json.dumps({"kind": kind, **values}) + "\n")
            file.flush()

        now = time.monotonic_ns()
        tell("header", pid=os.getpid(), rank=0, local_rank=0, world_size=1, script="stand_in.py", device="cpu",
             device_uuid=None, has_stream=False, source="wall clock", began_ns=now)  # fmt: skip
        tell("trial", has_loss=behaviour.get("loss", True))
        told = {name: zenflow[name] for name in ("topk_ratio", "update_interval", "overlap_step") if name in zenflow}
        told |= behaviour.get("engine", {})
        name = {} if behaviour.get("nameless") else {"model_id": "0123456789abcdef"}
        tell("model", **name, model="Net", parameters=10, trainable=10, dtype="bfloat16", model_bytes=20,
             optimizer="Adam", systems=[], micro_batch=2, sequence=8, tokens_per_step=16,
             knobs=None, checkpointing=False,
             deepspeed={"version": "0.19.6", "stage": 2, "micro_batch": 2, "offload_ratio": 1.0, "sub_groups": 0,
                        "has_scheduler": False, "zenflow": told if zenflow else None})  # fmt: skip
        step_ms, losses = behaviour.get("ms", {}).get(str(interval), 10.0), []
        for index in range(1, behaviour.get("ends", {}).get(str(interval), behaviour.get("steps", 100_000))):
            time.sleep(behaviour.get("sleep_s", SLEEP_S))
            if interval in behaviour.get("crashes", ()) and index == 5:
                raise RuntimeError("these knobs do not work")
            losses.append(None if interval in behaviour.get("nan", ()) else 3.0 - index / 1000)
            tell("step", index=index, measured=True, begin_ns=now, end_ns=now + 1, step_ms=step_ms, phases_ms={},
                 spans=[], stall_ms=None, hidden_ms=None, waits_ms={}, overhead_ms=0.0, tokens=16,
                 runtime=None)  # fmt: skip
            if (folder / "stop").exists() and index >= int((folder / "stop").read_text()):
                tell("trial", losses=losses, device_bytes=None)
                tell("end", reason="measured", ns=time.monotonic_ns())
                wait_for(folder / "exit")
                os._exit(0)


def write(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.005)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
