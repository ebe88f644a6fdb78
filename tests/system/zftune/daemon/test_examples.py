"""The examples for service managers: what they call exists, and the batch script does what it says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.zftune.daemon.daemons import SOON_S
from tests.support.zftune.daemon.in_process import teller

EXAMPLES = Path(__file__).parents[4] / "examples"
ZFTUNE = Path(sys.executable).with_name("zftune")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_takes_the_unit(folder: Path) -> None:
    unit = (EXAMPLES / "systemd" / "zftune.service").read_text()
    assert "ExecStart=%h/.venv/bin/zftune daemon start\n" in unit
    (folder / "zftune.service").write_text(unit.replace("%h/.venv/bin/zftune", str(ZFTUNE)))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", str(folder / "zftune.service")],
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
    )
    assert [line for line in verified.stderr.splitlines() if "zftune" in line] == []


def test_the_batch_script_has_a_daemon_while_it_trains_and_not_after(folder: Path) -> None:
    tools = folder / "bin"
    tools.mkdir()
    (tools / "srun").write_text(  # in place of Slurm's, which is not here
        '#!/bin/bash\necho "$@" > asked\nzftune daemon status > status\ndirname "$ZFTUNE_SOCKET" > where\nexit 3\n'
    )
    (tools / "srun").chmod(0o755)
    (tools / "zftune").symlink_to(ZFTUNE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ZFTUNE_", "XDG_"))}
    job = f"test{os.getpid()}"
    ended = subprocess.run(
        ["bash", EXAMPLES / "slurm" / "train.sbatch"],
        cwd=folder,
        env={**environment, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": job, "ZFTUNE_DB": "sqlite://"},
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
    )
    assert ended.returncode == 3, ended.stderr  # the training's own
    assert (folder / "asked").read_text().startswith("--ntasks=1 zftune run --online -- ")
    assert " serves no run on /tmp/zftune-" in (folder / "status").read_text()
    assert '"message": "ended"' in (folder / f"zftune-{job}.log").read_text()
    assert not Path((folder / "where").read_text().strip()).exists()


@pytest.mark.smoke
def test_the_pod_has_one_user_and_one_socket(capsys: pytest.CaptureFixture[str]) -> None:
    spec = yaml.safe_load((EXAMPLES / "kubernetes" / "pod.yaml").read_text())["spec"]
    (daemon,), (training,) = spec["initContainers"], spec["containers"]
    assert daemon["restartPolicy"] == "Always"
    assert spec["securityContext"]["runAsUser"] == 1000
    sockets = [one["value"] for part in (daemon, training) for one in part["env"] if one["name"] == "ZFTUNE_SOCKET"]
    assert sockets == ["/run/zftune/zftune.sock"] * 2
    assert daemon["volumeMounts"] == training["volumeMounts"] == [{"name": "zftune", "mountPath": "/run/zftune"}]
    commands = [
        daemon["command"],
        training["command"],
        *(daemon[probe]["exec"]["command"] for probe in daemon if "Probe" in probe),
    ]
    assert "--online" in training["command"]  # else it would not ask its daemon
    for command in commands:
        assert command[0] == "zftune"
        own = command[: command.index("--")] if "--" in command else command
        assert teller(capsys)(*own[1:], "--help")[0] == 0, own
