"""The Trainer over FSDP2 with zenflow's AdamW: as with torch's, and each goes on from the other's checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the huggingface extra is not installed")

from tests.support import fork_server, upstream_ops
from tests.support.once import once
from tests.support.tiers import fast
from tests.support.zftune.integrations.fsdp_trainer_run import SAVE_EVERY

RUNS: dict[str, tuple[str, int, str | None]] = {
    "torch": ("torch", 2, None),
    "ours": ("exact", 2, None),
    "ours again": ("exact", 2, "ours"),
    "ours on three": ("exact", 3, "ours"),
    "torch from ours": ("torch", 2, "ours"),
    "ours from torch": ("exact", 2, "torch"),
    "killed": ("killed", 2, None),
    "ours from a killed one": ("exact", 2, "killed"),
    "late": ("late", 2, None),
    "late again": ("late", 2, "late"),
}
"""Who makes the optimizer, on how many ranks, and from whose checkpoint it goes on."""
TRIED = fast(["torch", "ours"], all_of=list(RUNS))


def run_all(folder: Path) -> Path:
    environment = {**os.environ, **upstream_ops.environment(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for name in TRIED:
        who, ranks, source = RUNS[name]
        (folder / name).mkdir()
        words: list[str | Path] = ["-m", "tests.support.zftune.integrations.fsdp_trainer_run", folder / name, who]
        words += [] if source is None else [folder / source / f"checkpoint-{SAVE_EVERY}"]
        with contextlib.ExitStack() as stack:
            begun = fork_server.ranks(ranks, words, env=environment)
            codes = [stack.enter_context(one).wait(300) for one in begun]
            if who == "killed":
                assert codes[1] == -signal.SIGKILL
                assert codes[0]
            else:
                assert codes == [0] * ranks, begun[0].stdout[-3000:] + begun[0].stderr[-6000:]
    return folder


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank saw."""
    folder = once(tmp_path_factory, "trainers-over-fsdp2", run_all)
    return {
        name: [torch.load(folder / name / f"seen.{rank}.pt", weights_only=True) for rank in range(RUNS[name][1])]
        for name in TRIED
        if name != "killed"
    }


@pytest.mark.smoke
@pytest.mark.parametrize("name", [name for name in TRIED if name.startswith("ours")])
def test_it_trains_as_torchs_adamw(seen: dict[str, list[dict[str, Any]]], name: str) -> None:
    expected = seen["torch"][0]
    for found in seen[name]:
        assert found["optimizer"] == "AccelerateAdamW"
        assert found["learning_rate"] == expected["learning_rate"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=0.0, atol=1e-5)


def test_torch_goes_on_from_ours(seen: dict[str, list[dict[str, Any]]]) -> None:
    for found in seen["torch from ours"]:
        assert found["optimizer"] == "AdamW"
        torch.testing.assert_close(found["weights"], seen["torch"][0]["weights"], rtol=0.0, atol=1e-5)


def test_late_updates_are_in_what_is_saved(seen: dict[str, list[dict[str, Any]]]) -> None:
    first, second = seen["late"]
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0.0, atol=0.0)
    assert first["loss"] != seen["ours"][0]["loss"]
    again = seen["late again"][0]["loss"]  # begins with the weights that were saved, with everything applied
    assert again[: SAVE_EVERY + 1] == first["loss"][: SAVE_EVERY + 1]
