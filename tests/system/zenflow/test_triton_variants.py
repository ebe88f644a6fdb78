"""How many variants of the Triton kernels are compiled, by Triton's own keys: each stalls the step that needs it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.tiers import VARIABLE

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton cannot be imported here")

TRAINING = """
import json, re
from unittest import mock
import torch
from torch import nn
from tests.support.zenflow.small import Block, tokens_of
from tests.support.zenflow.triton_variants import CountedKernels
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zenflow.host.native import load_native
from zenflow.kernels.native import NativeKernels
kernels = CountedKernels(NativeKernels(load_native()))
seen = []
with mock.patch("zenflow.runtime.kernels_for", lambda *_: kernels):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(64, 48), Block(48), Block(48), nn.Linear(48, 64)).bfloat16()
    optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(**KNOBS), module=model, lr=0.05)
    def train(step):
        tokens = tokens_of(step)
        nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for step in range(24):
        train(step)
        seen.append((len(kernels.variants), optimizer.history(wait=True)[-1].churn))
    optimizer.set_knobs(topk_ratio=0.07, update_interval=3)
    for step in range(9):
        train(step)
    optimizer.close()
biases = kernels.compiled(90, lambda _, constants: constants["BLOCK_N"] == 1)
single = [re.findall(r"(?:ld|st)\\.global\\.b16", ptx) for ptx in biases]
print(json.dumps({"seen": seen, "end": len(kernels.variants), "of_each": kernels.of_each, "single": single}))
"""


def counted(script: str) -> Any:
    """What a script prints last, in a process where Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = forked.run(script, environment=environment, warnings="ignore")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


PART: dict[str, Any] = {"max_grad_norm": 0.5, "offload_ratio": 0.66}


@pytest.mark.parametrize("knobs", [{}, PART])
def test_a_training_compiles_few_and_none_once_it_has_reselected(knobs: dict[str, Any]) -> None:
    every = {"topk_ratio": 0.2, "update_interval": 2, "select_interval": 2, **knobs}
    found = counted(f"KNOBS = {every}\n{TRAINING}")
    print(found)
    churns = [churn for _, churn in found["seen"]]
    first = next(step for step, churn in enumerate(churns) if churn)
    later = {churn for churn in churns[first + 1 :] if churn}
    assert len(later) > 2, "too few other selections for n to change"
    after = {variants for variants, _ in found["seen"][first:]}
    assert after == {found["end"]}
    assert 3 < found["end"] < 10
    assert found["single"] == [[]], "a parameter in one column is read or written element by element"


SUITE = """
import json
from pathlib import Path
import pytest
import torch
from tests.system.gpu.test_kernels_gpu import TestOnAGpu as Cases
from tests.support.zenflow.triton_variants import CountedKernels
from zenflow.kernels.base import EagerKernels

@pytest.fixture(scope="session")
def counted():
    counted = CountedKernels(EagerKernels())
    yield counted
    compiled = [len(counted.compiled(sm, lambda number, _: number % EACH == sm // 10 % EACH)) for sm in (80, 90)]
    Path(__file__).with_suffix(".json").write_text(json.dumps([counted.of_each, compiled]))

class TestCounted(Cases):
    test_nothing_waits_for_the_device = None

    @pytest.fixture
    def device(self):
        return torch.device("cpu")

    @pytest.fixture
    def kernels(self, counted):
        return counted
"""


def test_the_cases_of_a_gpu_compile_few_and_they_compile(tmp_path: Path) -> None:
    """Each takes up to half a second there, of minutes. The cases of a day; every fifth variant for an architecture."""
    file = tmp_path / "test_counted.py"
    file.write_text(SUITE.replace("EACH", "5"))
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", VARIABLE)}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout
    of_each, compiled = json.loads(file.with_suffix(".json").read_text())
    print(of_each, compiled)
    assert len(of_each) == 4
    assert sum(of_each.values()) < 200
    assert all(number > 20 for number in compiled)
