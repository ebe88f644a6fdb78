"""`zftune run --quality` on a script with a plain ds_config: which knobs it trains with, and what a line says of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support import fork_server, upstream_ops
from tests.support.tiers import fast
from zftune.hiding import NOTHING_TO_HIDE_BEHIND

SCRIPT = """
import deepspeed, torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
engine, optimizer, _, _ = deepspeed.initialize(model=model, config="ds_config.json")
for _ in range(20):
    engine.backward(engine(torch.randn(4, 32)).square().mean())
    engine.step()
config = engine.optimizer.config
print("knobs", config.topk_ratio, config.update_interval, config.lag, config.overlap_step)
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


BACKEND = "zftune: backend zenflow, quality "
EXACT = f"{BACKEND}exact: the weights are those of the plain optimizer; the settings are the ds_config's"
PUBLISHED = (
    f"{BACKEND}published: updates of unimportant columns may come late; the settings are the default of this quality "
    "(topk_ratio 0.1, update_interval 4, apply_lag 4, select_interval auto), since on a plain CPU there is nothing to "
    "plan; what they cost is not bounded here: compare the loss with that of quality exact"
)


CASES = [
    ("published", "0.1 4 4 True", [PUBLISHED]),
    ("", "0.0 1 1 False", [EXACT, f"zftune: {NOTHING_TO_HIDE_BEHIND}"]),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("quality", "knobs", "lines"), fast(CASES[:1], all_of=CASES))
def test_a_plain_config_on_a_plain_cpu(tmp_path: Path, quality: str, knobs: str, lines: list[str]) -> None:
    upstream_ops.need()
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    environment = {**os.environ, **upstream_ops.environment(), "ZFTUNE_DB": str(tmp_path / "z.db")}
    options = ["--quality", quality] if quality else []
    words = ["-c", fork_server.MAIN, "run", *options, "--", sys.executable, "train.py"]
    (rank,) = fork_server.ranks(1, words, env=environment, cwd=tmp_path, exec_in_place=True)
    with rank:
        assert rank.wait(120) == 0, rank.stderr[-4000:]
        out, errors = rank.stdout, rank.stderr
    assert f"knobs {knobs}\n" in out
    assert [line for line in errors.splitlines() if line.startswith("zftune: ")] == lines
