"""What is refused behind `initialize`, under `zftune run`: a sentence and 2 where nobody catches it, and no frame."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import upstream_ops, zygote

REFUSE = "from zftune.errors import BadInputError\ndef refuse(): raise BadInputError('stage is 9; it must be 2')\n"
SENTENCE = "zftune: stage is 9; it must be 2\n"


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(code)
    environment = {**os.environ, **upstream_ops.environment(), "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return zygote.zftune("run", "--", sys.executable, "script.py", env=environment, cwd=folder)


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A folder with a module `deepspeed`, and one that refuses."""
    (tmp_path / "deepspeed.py").write_text("__version__ = '0.19.6'\ndef initialize(model=None, config=None): pass\n")
    (tmp_path / "refusing.py").write_text(REFUSE)
    return tmp_path


BEGIN = "import deepspeed, refusing, sys\n"


@pytest.mark.parametrize(
    ("code", "ended", "parts"),
    [
        ("refusing.refuse()", 2, [SENTENCE]),
        ("from zenflow import CheckpointError\nraise CheckpointError('it is cut')", 2, ["zftune: it is cut\n"]),
        (
            "try:\n    refusing.refuse()\nexcept Exception as error:\n    sys.exit(f'caught {error}')",
            1,
            ["caught stage"],
        ),
    ],
    ids=["refused", "a checkpoint", "caught"],
)
def test_no_frame_is_shown(fake: Path, code: str, ended: int, parts: list[str]) -> None:
    done = run(fake, BEGIN + code)
    assert done.returncode == ended, done.stderr
    assert "Traceback" not in done.stderr
    assert all(part in done.stderr for part in parts)


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("sys.exit.nothing", ["AttributeError"]),
        (
            "try:\n    refusing.refuse()\nexcept Exception as error:\n    raise KeyError('mine') from error",
            ["KeyError"],
        ),
        ("try:\n    {}['mine']\nexcept KeyError:\n    refusing.refuse()", ["KeyError: 'mine'", "stage is 9"]),
        ("from zenflow import ZenFlowError\nraise ZenFlowError('it broke')", ["it broke"]),
    ],
    ids=["its own", "made from ours", "ours behind its own", "no refusal"],
)
def test_the_scripts_own_errors_keep_their_traceback(fake: Path, code: str, parts: list[str]) -> None:
    done = run(fake, BEGIN + code)
    assert done.returncode == 1, done.stderr
    assert "Traceback" in done.stderr
    assert all(part in done.stderr for part in parts)


def test_a_ds_config_that_is_not_there_ends_in_a_sentence(fake: Path) -> None:
    """DeepSpeed would take its name for base64."""
    done = run(fake, "import deepspeed\ndeepspeed.initialize(model=object(), config='folder/no.json')")
    assert (done.returncode, done.stderr) == (2, "zftune: ds_config 'folder/no.json': there is no such file\n")


def test_the_scripts_own_hook_is_asked_for_other_errors(fake: Path) -> None:
    hook = "def hook(kind, error, frames): print('mine', error)\nimport sys\nsys.excepthook = hook\n"
    done = run(fake, hook + BEGIN + "raise ValueError('odd')")
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (1, "mine odd\n", False)


ZERO = """
import os, socket, sys
import deepspeed, torch
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")

def engine(zero):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, **zero},
    }
    model = torch.nn.Linear(8, 8)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

plain = engine({"reduce_bucket_size": 1000, "allgather_bucket_size": 1000})
plain.save_checkpoint("saved")
ours = engine({"offload_optimizer": {"device": "cpu"}})
try:
    ours.load_checkpoint("saved")
finally:
    print("the script's own finally")
"""


def test_a_checkpoint_of_zero_is_refused_in_a_sentence(tmp_path: Path) -> None:
    upstream_ops.need()
    done = run(tmp_path, ZERO)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert "the script's own finally" in done.stdout
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("zftune: the checkpoint")]
    assert "zftune checkpoint import" in sentence
