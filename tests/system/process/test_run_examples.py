"""DeepSpeed under `zftune run`: the examples with upstream's ZeRO-Offload and our runtime; Accelerate's launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support import fork_server, upstream_ops
from tests.support.tiers import fast

ROOT = Path(__file__).parents[3]
SCRIPTS = {
    "minimal": ("examples/deepspeed_minimal.py", "--deepspeed", "--deepspeed_config", "examples/ds_config.json"),
    "zero_offload": ("examples/deepspeed_zero_offload.py",),
    "zenflow": ("examples/deepspeed_zenflow.py",),
    "trainer": ("examples/hf_trainer.py", "--deepspeed", "examples/ds_hf.json"),
}
STAGE_3 = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: cpu
  offload_param_device: none
  gradient_accumulation_steps: 1
  gradient_clipping: 1.0
  zero3_init_flag: false
num_machines: 1
num_processes: 2
mixed_precision: "no"
main_process_port: 0
"""
ACCELERATED = """
import sys, torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from tests.system.process.test_run_examples import data, network
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(*data()), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
assert all(hasattr(parameter, "placements") for parameter in model.parameters())
for inputs, targets in loader:
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), "mean")
    accelerator.print("loss:", float(mean))
accelerator.save_state(sys.argv[1])
accelerator.end_training()
"""
LOSS = re.compile(r"loss'?:? '?([0-9.]+)")


def losses(tmp_path: Path, script: str, *options: str) -> tuple[list[float], str]:
    """What a script says of its losses, and all that it says."""
    words = [*SCRIPTS[script], "--steps", "21"]
    environment = {**os.environ, **upstream_ops.environment(), "ZFTUNE_DB": str(tmp_path / "zftune.db")}
    line = ["-c", fork_server.MAIN, "run", *options, "--", sys.executable, *words]
    (rank,) = fork_server.ranks(1, line, env=environment, cwd=ROOT, exec_in_place=True)
    with rank:
        assert rank.wait(300) == 0, rank.stdout[-2000:] + rank.stderr[-4000:]
        out, errors = rank.stdout, rank.stderr
    found = [float(value) for value in LOSS.findall(out) if value]
    assert len(found) >= 2
    return found, out + errors


@pytest.mark.parametrize("script", fast(["minimal"], all_of=["minimal", "zero_offload", "trainer"]))
def test_an_example_trains_alike_with_both_backends(tmp_path: Path, script: str) -> None:
    upstream_ops.need()
    ours, said = losses(tmp_path, script, "--backend", "zenflow")
    theirs, also_said = losses(tmp_path, script, "--backend", "deepspeed")
    assert "zftune: backend zenflow, quality exact" in said
    assert said.count("zftune: on a plain CPU there is nothing to hide the updates behind") == 1
    assert "zftune: backend deepspeed, quality exact" in also_said
    assert ours == pytest.approx(theirs, rel=1e-2)


def test_upstreams_zenflow_example_trains_with_ours(tmp_path: Path) -> None:
    upstream_ops.need()
    ours, said = losses(tmp_path, "zenflow", "--backend", "zenflow")
    assert "zftune: backend zenflow, quality published" in said
    assert ours[-1] < 0.9 * ours[0]


def data() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(64, 16, generator=made), torch.randn(64, 4, generator=made)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 4))


def test_accelerate_launch_begins_ranks_at_stage_3(tmp_path: Path) -> None:
    """In interpreters of their own, under `zftune run`; each rank has half of a batch."""
    upstream_ops.need()
    (tmp_path / "stage3.yaml").write_text(STAGE_3)
    (tmp_path / "train.py").write_text(ACCELERATED)
    own = {"ZFTUNE_DB": str(tmp_path / "zftune.db"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **upstream_ops.environment(), **own, "PYTHONPATH": path}
    launch = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", "stage3.yaml"]
    done = subprocess.run(
        [sys.executable, "-c", fork_server.MAIN, "run", "--", sys.executable, *launch, "train.py", "saved"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "sharded by FSDP2 over 2 ranks" in done.stdout + done.stderr
    module, expected = network(), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for inputs, targets in zip(*(part.split(8) for part in data()), strict=True):
        loss = nn.functional.mse_loss(module(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        expected.append(float(loss.detach()))
    assert [float(value) for value in LOSS.findall(done.stdout)] == pytest.approx(expected, rel=1e-4)
    assert (tmp_path / "saved" / "pytorch_model" / "zenflow" / ".metadata").is_file()
