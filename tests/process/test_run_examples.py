"""The DeepSpeed examples, unchanged, under `zftune run`: with upstream's ZeRO-Offload and with our runtime."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests import upstream_ops, zygote

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "minimal": ("examples/deepspeed_minimal.py", "--deepspeed", "--deepspeed_config", "examples/ds_config.json"),
    "zero_offload": ("examples/deepspeed_zero_offload.py",),
    "zenflow": ("examples/deepspeed_zenflow.py",),
    "trainer": ("examples/hf_trainer.py", "--deepspeed", "examples/ds_hf.json"),
}
LOSS = re.compile(r"loss'?:? '?([0-9.]+)")


def losses(tmp_path: Path, script: str, *options: str) -> tuple[list[float], str]:
    """What a script says of its losses, and all that it says."""
    words = [*SCRIPTS[script], "--steps", "21"]
    environment = {**os.environ, **upstream_ops.environment(), "ZFTUNE_DB": str(tmp_path / "zftune.db")}
    line = ["-c", zygote.MAIN, "run", *options, "--", sys.executable, *words]
    (rank,) = zygote.ranks(1, line, env=environment, cwd=ROOT, exec_in_place=True)
    with rank:
        assert rank.wait(300) == 0, rank.stdout[-2000:] + rank.stderr[-4000:]
        out, errors = rank.stdout, rank.stderr
    found = [float(value) for value in LOSS.findall(out) if value]
    assert len(found) >= 2
    return found, out + errors


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "zenflow"])
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
