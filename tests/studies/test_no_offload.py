"""Study 008: its contenders do the same, a wrong one is found, and ratios are of the same round."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

RUN = Path(__file__).parents[2] / "studies" / "008-no-offload" / "run.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def study() -> Any:
    spec = importlib.util.spec_from_file_location("study_008_no_offload", RUN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def setting(study: Any, dtype: str) -> Any:
    return study.Setting("tiny", dtype, 1, 16, 1)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_contenders_take_the_same_first_step(study: Any, dtype: str) -> None:
    figures = study.measure(setting(study, dtype), CPU, 2, lambda text: None)
    assert figures["tensors"] == 39
    assert set(figures["rows"]) == {study.OURS, study.RIVAL, study.CONTROL}
    for row in figures["rows"].values():
        assert 0 < row["optimizer_ms"]["median"] < row["step_ms"]["median"]
    assert figures["rows"][study.RIVAL]["ratio"] == {"median": 1.0, "p5": 1.0, "p95": 1.0, "n": 2}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_wrong_contender_is_found(study: Any, dtype: str) -> None:
    of = setting(study, dtype)

    class Forgetful(study.FusedAdamW):  # type: ignore[misc]
        """Leaves one weight of a million as it was."""

        def step(self) -> None:
            last = self.parameters[-1].detach()
            before = last[0, 0].clone()
            super().step()
            last[0, 0] = before + 1e-2

    contenders = {study.OURS: Forgetful(of, CPU), study.RIVAL: study.FusedAdamW(of, CPU)}
    with pytest.raises(study.DisagreementError, match="differ after one step"):
        study.check_first_step(of, contenders)


def test_the_judged_model_comes_first(study: Any) -> None:
    assert [of.name for of in study.settings(CPU, quick=False)] == [
        "small-fp32-4x64",
        "small-bf16-4x64",
        "small-fp32-1x64",
        "small-bf16-1x64",
        "tiny-fp32-1x64",
        "tiny-bf16-1x64",
    ]
    assert {of.model for of in study.settings(CPU, quick=True)} == {"tiny"}
