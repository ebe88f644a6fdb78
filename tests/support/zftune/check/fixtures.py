"""What DeepSpeed itself makes of ds_configs, in one process of its own for all tests of this folder."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server, upstream_ops
from tests.support.once import once
from tests.support.tiers import everything, fast
from tests.support.zftune.check.cases import CASES, SAFE, Bad, safe
from tests.support.zftune.check.shapes import PUT_TO_IT
from zftune.ds_config.reading import filled

PUT = fast(dict(islice(PUT_TO_IT.items(), 0, None, max(1, len(PUT_TO_IT) // 10))), all_of=PUT_TO_IT)
"""What `check` and DeepSpeed are to agree about."""
ROOT = Path(__file__).parents[4]
# The others: DeepSpeed has no fp16 on a CPU, and an overlapped worker takes 15 s to begin.
TRAINED = ("zero1", "zero2-offload", "zero3-offload", "twin-flow", "zenflow-sequential", "scheduler", "hugging-face")


def _at_stage(config: dict[str, Any], stage: int) -> dict[str, Any]:
    config["zero_optimization"]["stage"] = stage
    return config


class Outcomes:
    """What was raised, and figures, by the case and by the name of a safe ds_config."""

    def __init__(self, folder: Path) -> None:
        jobs: list[dict[str, Any]] = []
        self._index: dict[str, int] = {}
        if everything():
            self._add_known(jobs)
        for name, config in PUT.items():  # last, since some leave DeepSpeed changed
            self._add(jobs, f"put {name}", config, "initialize")
        (folder / "jobs.json").write_text(json.dumps(jobs))
        module = "tests.support.zftune.check.upstream_worker"
        words: list[str | Path] = ["-m", module, folder / "jobs.json", folder / "results.json"]
        environment = {**os.environ, **upstream_ops.environment(), "OMP_NUM_THREADS": "1"}
        done = fork_server.run(words, cwd=ROOT, env=environment, timeout=800)
        assert done.returncode == 0, done.stderr[-2000:]
        self._results = json.loads((folder / "results.json").read_text())

    def _add_known(self, jobs: list[dict[str, Any]]) -> None:
        for case in CASES:
            if case.proof == "elsewhere":
                continue
            self._add(jobs, f"bad {case}", case.config, case.proof)
            if case.mended:
                self._add(jobs, f"mended {case}", case.config, case.proof, mended=case.version)
        for path in SAFE.glob("*.json"):
            self._add(jobs, f"parsed {path.stem}", filled(safe(path.stem)), "parse")
            if path.stem in TRAINED:
                self._add(jobs, f"safe {path.stem}", filled(safe(path.stem)), "train")
        doubles = {"enabled": True, "loss_scale": 0, "initial_scale_power": 4, "loss_scale_window": 3}
        for stage in (1, 2):
            doubling, selection = {**safe("fp16-offload"), "fp16": doubles}, safe("zenflow-sequential")
            self._add(jobs, f"doubling {stage}", _at_stage(doubling, stage), "moves")
            self._add(jobs, f"selection {stage}", _at_stage(selection, stage), "selection")

    def _add(
        self, jobs: list[dict[str, Any]], name: str, config: dict[str, Any], proof: str, mended: str | None = None
    ) -> None:
        self._index[name] = len(jobs)
        jobs.append({"config": config, "proof": proof, "mended": mended})

    def bad(self, case: Bad) -> dict[str, Any]:
        return self.of(f"bad {case}")

    def mended(self, case: Bad) -> dict[str, Any]:
        return self.of(f"mended {case}")

    def of(self, name: str) -> dict[str, Any]:
        result: dict[str, Any] = self._results[self._index[name]]
        return result


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Skips where DeepSpeed's operations are not compiled."""
    upstream_ops.need()
    return once(tmp_path_factory, "check", Outcomes)
