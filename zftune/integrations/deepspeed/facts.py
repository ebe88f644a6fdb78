"""What is known of DeepSpeed's versions, and what its ZenFlow takes where a file says nothing."""

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
NEWEST_KNOWN = TESTED[-1]
ZENFLOW_DEFAULTS: dict[str, Any] = {
    "topk_ratio": 0.1,
    "select_strategy": "auto",
    "select_interval": "auto",
    "update_interval": "auto",
    "overlap_step": False,
    "offload": False,
    "full_warm_up_rounds": 0,
}
OWN_KNOBS = ("deferred_update", "apply_lag", "pipeline", "skip_nonfinite", "host_threads")
"""Which the runtime of `zftune run` takes beside, in the section of ZenFlow."""
