"""The environment of a trial."""

from __future__ import annotations

from pathlib import Path

from zftune.restarts.process import harmless


def test_trackers_are_offline_and_write_into_the_scratch_folder(tmp_path: Path) -> None:
    base = {"PATH": "/bin", "WANDB_MODE": "online", "WANDB_API_KEY": "secret", "MLFLOW_TRACKING_URI": "http://server",
            "HF_HOME": "/cache", "WANDB_DIR": "/home"}  # fmt: skip
    found = harmless(base, tmp_path, tmp_path / "work")
    assert (found["WANDB_MODE"], found["COMET_MODE"], found["CLEARML_OFFLINE_MODE"]) == ("offline", "offline", "1")
    assert (found["HF_HUB_OFFLINE"], found["TRANSFORMERS_OFFLINE"]) == ("1", "1")
    assert "WANDB_API_KEY" not in found
    assert found["MLFLOW_TRACKING_URI"] == f"file://{tmp_path}/mlflow"
    assert found["WANDB_DIR"] == f"{tmp_path}/wandb"
    assert Path(found["WANDB_DIR"]).is_dir()
    assert (found["PATH"], found["HF_HOME"]) == ("/bin", "/cache")  # models load from where they are
    assert found["PWD"] == str(tmp_path / "work")
