"""A rank's part in a trial."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.zftune.agent.children import environ, run, script
from tests.zftune.restarts.training import ZENFLOW, ds_config
from zftune.agent.trial import APPLY, TRIAL, Trial
from zftune.profile.command.keeper import release_locks
from zftune.restarts.upstream import Upstream
from zftune.tuner.space import Setting

LOCKS = """
    from torch.utils.file_baton import FileBaton
    done = FileBaton("done/lock")
    done.try_acquire()
    done.release()
    FileBaton("compiling/lock").try_acquire()
    os.kill(os.getpid(), 9)
"""


def test_a_lock_of_a_compilation_that_was_killed_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    for name in ("records", "done", "compiling"):
        (tmp_path / name).mkdir()
    (folder / TRIAL).write_text(json.dumps({"knobs": None, "stage": 2}))
    environment = {**environ(folder), "ZFTUNE_AGENT_TRIAL": "1"}
    killed = run([sys.executable, script(tmp_path, LOCKS)], tmp_path, environment, check=False)
    assert killed.returncode == -9, killed.stderr
    assert len(list(folder.glob("lock-*"))) == 1
    assert (tmp_path / "compiling" / "lock").exists()
    release_locks(str(folder))
    assert not (tmp_path / "compiling" / "lock").exists()
    assert (tmp_path / "compiling").is_dir()


def trial(folder: Path, knobs: Any) -> Trial:
    (folder / TRIAL).write_text(json.dumps({"knobs": knobs, "stage": 2}))
    (folder / APPLY).touch()
    return Trial(folder, cast("Any", SimpleNamespace(after_step=None)))


@pytest.mark.parametrize("changes", [True, False])
def test_the_knobs_go_into_a_copy_and_nothing_is_monitored(tmp_path: Path, changes: bool) -> None:
    config = {**ds_config(), "tensorboard": {"enabled": True, "output_path": "/elsewhere"}, "wandb": {"enabled": True}}
    before = copy.deepcopy(config)
    setting = Setting(topk_ratio=0.3, update_interval=4, apply_lag=4, select_interval=8, deferred_update="mean")
    knobs = Upstream(config, "0.19.6").knobs(setting) if changes else None
    given = trial(tmp_path, knobs).config(config, "0.19.6")
    assert config == before
    assert given["tensorboard"] == {"enabled": False, "output_path": "/elsewhere"}
    assert given["wandb"] == {"enabled": False}
    section = given["zero_optimization"]["zenflow"]
    wanted = (0.3, 4, True) if changes else tuple(ZENFLOW[n] for n in ("topk_ratio", "update_interval", "overlap_step"))
    assert (section["topk_ratio"], section["update_interval"], section["overlap_step"]) == wanted
    asked = json.loads((tmp_path / f"asked-{os.getpid()}.json").read_text())
    assert asked == {"rank": 0, "world_size": 1, "version": "0.19.6", "config": config}
