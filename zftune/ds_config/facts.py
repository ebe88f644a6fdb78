"""What is known of DeepSpeed: its versions, its defaults, and settings that are safe where its own are not.

`tables.json` has the rest: the type, the bounds and the default of every setting, by version.
"""

from __future__ import annotations

from typing import Any

GOOD = "0.19.6"
"""The version to use where there is a choice: the last one whose own ZenFlow leaves weights as they are."""

TESTED = ("0.19.6", "0.19.7", "0.19.8")
"""With which the backend zenflow was tested."""

TESTED_UPSTREAM = ("0.19.6",)
"""With which its own ZenFlow and Twin-Flow were."""

SCRAMBLING = ("0.19.7", "0.19.8")
"""That scramble every 2-D weight at initialisation, under ZenFlow at ZeRO stages 1 and 2."""

CLIPS_SINCE = (0, 19)
"""From this release on gradients are clipped to 1.0 where a ds_config has no "gradient_clipping"."""

FILES_SINCE = "0.16.0"
"""Checkpoints have looked the same since."""

ZENFLOW_DEFAULTS: dict[str, Any] = {
    "topk_ratio": 0.1,
    "select_strategy": "auto",
    "select_interval": "auto",
    "update_interval": "auto",
    "overlap_step": False,
    "offload": False,
    "auto_ratio": 0.99,
    "full_warm_up_rounds": 0,
    "pt_reserved_cores_perc": 0.5,
}

SAFE_UPDATE_INTERVAL = 4
"""For "auto", which turns all weights into NaN."""

RARE_SELECTION_STEPS = 128
"""Every selection resets moments and truncates masters: where our runtime would watch, one must be rare."""

ZENFLOW_OPTIMIZERS = ("adam", "adamw")
"""Types of the optimizers that ZenFlow works with, in small letters."""

OWN_KNOBS = ("deferred_update", "apply_lag", "pipeline", "skip_nonfinite", "host_threads", "staging_bytes")
"""Which the runtime of `zftune run` takes beside, in the section of ZenFlow."""


def scrambles(version: str) -> bool:
    """Whether a version of DeepSpeed, such as "0.19.7+cu128", scrambles weights under ZenFlow at stages 1 and 2."""
    return version.partition("+")[0] in SCRAMBLING
