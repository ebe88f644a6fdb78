"""Real child processes under the agent: small scripts, and the records that they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import fork_server
from zftune import agent

Line = dict[str, Any]

COMMON = """
import json, os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.inner = nn.Linear(64, 64)
        self.head = nn.Linear(64, 50)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.relu(self.inner(self.embed(ids))))


def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])


def loader(batches, micro_batch=4, sequence=17, **options):
    data = TensorDataset(torch.randint(0, 50, (batches * micro_batch, sequence)))
    return DataLoader(data, batch_size=micro_batch, **options)


def checksum(model):
    return sum(float(p.detach().double().sum()) for p in model.parameters())
"""


@dataclass(frozen=True)
class Child:
    returncode: int
    stdout: str
    stderr: str
    files: list[list[Line]]
    """The records of each process that left some."""

    @property
    def lines(self) -> list[Line]:
        assert len(self.files) == 1, (self.files, self.stderr)
        return self.files[0]

    def only(self, kind: str) -> Line:
        found = [line for line in self.lines if line["kind"] == kind]
        assert len(found) == 1, (kind, self.lines, self.stderr)
        return found[0]

    @property
    def steps(self) -> list[Line]:
        return steps_of(self.lines)

    @property
    def missing(self) -> dict[str, str]:
        return {line["field"]: line["reason"] for line in self.lines if line["kind"] == "missing"}

    @property
    def said(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return said


def steps_of(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["kind"] == "step"]


def script(folder: Path, body: str, *, name: str = "train.py", common: bool = True) -> Path:
    path = folder / name
    path.write_text((COMMON if common else "") + textwrap.dedent(body))
    return path


def environ(folder: Path, *, warmup: int = 2, steps: int = 5, **more: str) -> dict[str, str]:
    """The environment of a recorded child; `more` is what it would have had besides this process's own."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("ZFTUNE_")}
    base |= {"OMP_NUM_THREADS": "1", **more}
    return agent.environment(folder, warmup=warmup, steps=steps, base=base)


def run(
    command: Sequence[str | Path],
    folder: Path,
    env: Mapping[str, str],
    *,
    timeout: float = 120,
    check: bool = True,
    torn: bool = False,
    started: bool = False,
) -> Child:
    """What the processes of a command recorded in `folder`. Python is forked from the fork_server, unless `started`."""
    if command[0] == sys.executable and not started:
        done = fork_server.run(command, env=env, cwd=folder, timeout=timeout)
    else:
        words = [str(part) for part in command]
        done = subprocess.run(
            words, env=dict(env), cwd=folder, capture_output=True, text=True, timeout=timeout, check=False
        )
    assert done.returncode == 0 or not check, done.stderr
    files = []
    for path in sorted(folder.glob("agent-*.jsonl")):
        lines = path.read_text().splitlines()
        files.append([json.loads(line) for line in (lines[:-1] if torn else lines)])
    return Child(done.returncode, done.stdout, done.stderr, files)


def train(
    tmp_path: Path, body: str, *, check: bool = True, torn: bool = False, warmup: int = 2, steps: int = 5, **more: str
) -> Child:
    folder = tmp_path / "records"
    folder.mkdir(mode=0o700, exist_ok=True)
    env = environ(folder, warmup=warmup, steps=steps, **more)
    return run([sys.executable, script(tmp_path, body)], folder, env, check=check, torn=torn)
