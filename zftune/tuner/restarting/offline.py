"""The environment of a trial: trackers and hubs are offline, and what they write goes into the scratch folder.

Models and data sets load from their caches as ever. What a script asks for in so many words, such as
`wandb.init(mode="online")`, is stronger than the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_OFFLINE = {
    "HF_HUB_OFFLINE": "1",  # no upload, and no download either: the cache has what the training needs
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "offline",
    "COMET_MODE": "offline",
    "COMET_START_ONLINE": "0",
    "CLEARML_OFFLINE_MODE": "1",
    "NEPTUNE_MODE": "offline",
    "SWANLAB_MODE": "disabled",
    "DVC_STUDIO_OFFLINE": "true",
    "DVCLIVE_SAVE_DVC_EXP": "false",
}
_FOLDERS = {
    "WANDB_DIR": "wandb",
    "TENSORBOARD_LOGGING_DIR": "tensorboard",
    "COMET_OFFLINE_DIRECTORY": "comet",
    "CLEARML_CACHE_DIR": "clearml",
}
_SECRETS = ("WANDB_API_KEY", "COMET_API_KEY", "NEPTUNE_API_TOKEN", "CLEARML_API_SECRET_KEY", "SWANLAB_API_KEY")
"""Without them nothing is sent even where a script says online."""


def harmless(base: Mapping[str, str], trackers: Path, cwd: Path) -> dict[str, str]:
    """The environment of a trial.

    Args:
        base: the user's.
        trackers: a folder for what trackers write; exists.
        cwd: the directory in which the trial runs.
    """
    kept = {name: value for name, value in base.items() if name not in _SECRETS}
    kept |= _OFFLINE | {name: str(trackers / folder) for name, folder in _FOLDERS.items()}
    for name in ("WANDB_DIR", "COMET_OFFLINE_DIRECTORY", "TENSORBOARD_LOGGING_DIR", "CLEARML_CACHE_DIR"):
        (trackers / _FOLDERS[name]).mkdir(exist_ok=True)
    kept["MLFLOW_TRACKING_URI"] = (trackers / "mlflow").as_uri()
    kept["PYTHONDONTWRITEBYTECODE"] = "1"  # beside modules that are imported by an absolute path
    kept["PWD"] = str(cwd)
    return kept
