"""DeepSpeed scripts as people write them, which are the same with zftune and without.

    python -m tests.support.zftune.integrations.ds_scripts SCRIPT CASES.json OUT

SCRIPT is a name in `SCRIPTS`. CASES.json holds {name: case}. A case has "config", the ds_config for as many ranks as
there are, and may have "init" (the model is made under `deepspeed.zero.Init`, by the Trainer from the folder "model"
beside), "optimizer" (the script makes its own), "save" (a folder, after `SAVED_AFTER` steps; training then ends soon,
without a goodbye), "dies" (by kill -9 then), "load" (a folder to go on from) and "args" (of the Trainer alone).
OUT.RANK.json gets {name: losses, or an error} after each case.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.support import upstream_ops

STEPS, SAVED_AFTER, ENDS_AFTER = 20, 10, 12
BATCH, WIDTH = 4, 24
LR = 5e-3
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """A regression; given what to find, its output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = x.to(self.last.weight.dtype)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.last(x)
        return found if y is None else nn.functional.mse_loss(found.float(), y)


def model_of(case: dict[str, Any]) -> Net:
    import deepspeed

    torch.manual_seed(3)
    if not case.get("init"):
        return Net()
    dtype = next((DTYPES[name] for name in DTYPES if name in case["config"]), torch.float32)
    with deepspeed.zero.Init(config_dict_or_path=case["config"], dtype=dtype):
        return Net()


def engine_of(case: dict[str, Any], **more: Any) -> Any:
    """What `initialize` returns, of a script that leaves the optimizer to its ds_config or makes its own."""
    import deepspeed

    model = model_of(case)
    made = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1) if case.get("optimizer") else None
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), optimizer=made, **more)


def data(passes: int) -> TensorDataset:
    x = torch.randn(BATCH * passes * STEPS, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, torch.tanh(x.flip(1)))


def plain_loop(case: dict[str, Any], folder: Path) -> list[float]:
    """Its own batches, each rank's part of them, and its own loss."""
    engine, *_ = engine_of(case, config=case["config"])
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    passes = engine.gradient_accumulation_steps()
    x, y = (whole[rank::ranks].split(BATCH // ranks) for whole in data(passes).tensors)

    def losses() -> Iterator[Tensor]:
        for part in range(passes * engine.global_steps, passes * STEPS):
            yield (engine(x[part]).float() - y[part]).square().mean()

    return trained(engine, case, losses)


def minimal_client(case: dict[str, Any], folder: Path) -> list[float]:
    """Everything stands in the ds_config, and DeepSpeed loads the data."""
    path = folder / f"ds_config.{os.environ['RANK']}.json"
    path.write_text(json.dumps(case["config"]))
    args = argparse.Namespace(deepspeed_config=str(path), local_rank=int(os.environ["LOCAL_RANK"]))
    passes = case["config"].get("gradient_accumulation_steps", 1)
    engine, _, loader, _ = engine_of(case, args=args, training_data=data(passes))

    def losses() -> Iterator[Tensor]:
        for number, batch in enumerate(loader):
            if number >= passes * engine.global_steps:
                yield engine(*batch)

    return trained(engine, case, losses)


def trained(engine: Any, case: dict[str, Any], losses: Callable[[], Iterator[Tensor]]) -> list[float]:
    """Losses of its steps, from a checkpoint on if the case has one."""
    if case.get("load"):
        engine.load_checkpoint(case["load"])
    found: list[float] = []
    passes = engine.gradient_accumulation_steps()
    for loss in losses():
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
        if case.get("save") and engine.is_gradient_accumulation_boundary():
            if engine.global_steps == SAVED_AFTER:
                engine.save_checkpoint(case["save"])
            elif engine.global_steps == ENDS_AFTER:
                end(case)
                break
    engine.destroy()
    return [sum(found[at : at + passes]) / passes for at in range(0, len(found), passes)]


def trainer(case: dict[str, Any], folder: Path) -> list[float]:
    """Hugging Face's, with its own batches; losses are means over the ranks."""
    from accelerate.state import AcceleratorState
    from transformers import LlamaForCausalLM, Trainer, TrainerCallback
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from tests.support.zftune.integrations.trainers import Tokens, arguments, tiny_model

    class Ends(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if case.get("save") and state.global_step == ENDS_AFTER:
                end(case)
                control.should_training_stop = True

    config = case["config"]
    given = config.get("gradient_accumulation_steps", 1)
    passes = 1 if given == "auto" else given
    args = arguments(
        Path(case.get("save") or folder / "trainer"),
        deepspeed=config,
        max_steps=STEPS,
        learning_rate=LR,
        per_device_train_batch_size=BATCH // torch.distributed.get_world_size(),
        gradient_accumulation_steps=passes,
        **({"save_strategy": "steps", "save_steps": SAVED_AFTER} if case.get("save") else {}),
        **case.get("args", {name: True for name in DTYPES if name in config}),
    )
    try:
        model = LlamaForCausalLM.from_pretrained(folder / "model") if case.get("init") else tiny_model()
        made = Trainer(model=model, args=args, train_dataset=Tokens(2 * BATCH * passes), callbacks=[Ends()])
        load = case.get("load")
        made.train(resume_from_checkpoint=load and str(Path(load, f"checkpoint-{SAVED_AFTER}")))
        losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
        return losses[SAVED_AFTER:] if load else losses  # the first ones are in the checkpoint
    finally:
        unset_hf_deepspeed_config()
        AcceleratorState._reset_state()


SCRIPTS = {"plain loop": plain_loop, "minimal client": minimal_client, "Trainer": trainer}


def end(case: dict[str, Any]) -> None:
    if case.get("dies"):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    import deepspeed

    script, cases, out = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    upstream_ops.allow_fp16()
    found: dict[str, Any] = {}
    for name, case in json.loads(cases.read_text()).items():
        try:
            found[name] = SCRIPTS[script](case, cases.parent)
        except Exception as error:  # noqa: BLE001 - told to the parent
            found[name] = f"{type(error).__name__}: {error}"
        Path(f"{out}.{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
