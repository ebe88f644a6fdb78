"""Whatever fails in the agent, the training goes on; it is said once."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.zftune.agent.children import environ, run, script, train
from zftune.agent.arming import hook, make_session
from zftune.agent.records import Settings

TAIL = """
    for number, (ids,) in enumerate(loader(12)):
        between(number)
        loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps({"checksum": checksum(model)}))
"""
QUIET = """
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    between = lambda number: None
"""


@pytest.mark.smoke
def test_an_optimizer_that_we_cannot_look_at(tmp_path: Path) -> None:
    child = train(
        tmp_path,
        """
    class Strange(torch.optim.SGD):
        @property
        def param_groups(self):
            if sys._getframe(1).f_code.co_filename.endswith("facts.py"):
                raise RuntimeError("look away\\nnow")
            return self._groups

        @param_groups.setter
        def param_groups(self, groups):
            self._groups = groups

    model = Small()
    optimizer = Strange(model.parameters(), lr=1e-3)
    between = lambda number: None
"""
        + TAIL,
    )
    (tmp_path / "plain").mkdir()
    plain = train(tmp_path / "plain", QUIET + TAIL)
    assert child.said == plain.said
    assert child.stderr == plain.stderr == ""
    error = child.only("end")["error"]
    assert error.startswith("RuntimeError: look away now (train.py:")
    assert child.steps == []


def test_a_folder_that_goes_away(tmp_path: Path) -> None:
    child = train(
        tmp_path,
        QUIET
        + """
    import shutil

    def between(number):
        if number == 0:
            shutil.rmtree(os.environ["ZFTUNE_AGENT_DIR"])
"""
        + TAIL,
    )
    assert child.files == []
    assert child.stderr == ""


def test_a_full_disk(tmp_path: Path) -> None:
    """No file may grow beyond some lines: writing raises, as on a disk that is full."""
    child = train(
        tmp_path,
        QUIET
        + """
    import resource, signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
"""
        + TAIL,
        torn=True,
    )
    (file,) = (tmp_path / "records").glob("*.jsonl")
    assert file.stat().st_size == 2000
    assert child.only("model")["model"] == "Small"
    assert child.stderr == ""
    assert "checksum" in child.said


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "value", "said"), [("ZFTUNE_AGENT_STEPS", "many", "ValueError"), ("ZFTUNE_AGENT_WARMUP", None, "KeyError")]
)
def test_a_broken_environment_is_named(tmp_path: Path, name: str, value: str | None, said: str) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    env = environ(folder)
    if value is None:
        del env[name]
    else:
        env[name] = value
    child = run([sys.executable, script(tmp_path, QUIET + TAIL)], folder, env)
    assert said in child.only("end")["error"]
    assert child.stderr == ""


def test_a_system_of_another_version_fails_no_import(tmp_path: Path) -> None:
    """It has not what is hooked: a figure is missing, or all that is recorded, and never the script's module."""
    imported: dict[str, list[Callable[[Any], None]]] = defaultdict(list)
    session = make_session(Settings(tmp_path, warmup=1, steps=1))
    hook(session, lambda name, callback: imported[name].append(callback))
    try:
        for callback in imported["deepspeed.ops.adam.cpu_adam"]:
            callback(SimpleNamespace())
        off_before = session.off
        assert "this DeepSpeed has no" in session.absent["waits_ms.host"]
        for callback in imported["deepspeed.runtime.engine"]:
            callback(SimpleNamespace())
        assert (off_before, session.off) == (False, True)
    finally:
        session.release()
    (file,) = tmp_path.glob("agent-*.jsonl")
    last = json.loads(file.read_text().splitlines()[-1])
    assert (last["kind"], last["reason"]) == ("end", "failed")
    assert "AttributeError: 'types.SimpleNamespace' object has no attribute 'DeepSpeedEngine'" in last["error"]
