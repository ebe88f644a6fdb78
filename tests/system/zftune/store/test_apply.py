"""Stock DeepSpeed trains with what a preset makes of a ds_config."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.support import fork_server, upstream_ops
from tests.unit.zftune.store.test_apply import applied


def test_stock_deepspeed_trains_with_it(tmp_path: Path) -> None:
    upstream_ops.need()
    cases: dict[str, dict[str, Any]] = {  # overlap comes last: it takes cores away from what comes after it
        "without selection": {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False},
        "in turn": {"overlap_step": False, "update_interval": "auto", "select_interval": 8},
        "overlapped": {"update_interval": 3, "select_interval": 6},
    }
    paths = [tmp_path / f"{name}.json" for name in cases]
    for path, knobs in zip(paths, cases.values(), strict=True):
        path.write_text(json.dumps(applied(**knobs).config))
    more = {**upstream_ops.environment(), "OMP_NUM_THREADS": "1"}
    words = [Path(__file__).parents[3] / "support" / "zftune" / "store" / "upstream.py", *paths]
    done = fork_server.run(words, env={**os.environ, **more}, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    for one in told:
        assert one["finite"]
        assert one["losses"][-1] < 0.5 * one["losses"][0]
    assert [(one["interval"], one["overlapped"]) for one in told] == [(None, False), (4, False), (3, True)]
