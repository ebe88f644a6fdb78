"""The command as a whole, on this machine and with scripted drivers."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.nvml.scripted import HOPPER, NO_PERMISSION, Machine
from zftune.doctor.check import SCHEMA_NAME

PATH = os.environ.get("PYTHONPATH", "")
COMMAND = """
import typer
from zftune.cli.doctor import doctor
app = typer.Typer(pretty_exceptions_enable=False)
app.command()(doctor)
app()
"""


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,  # about 5 s where nothing else runs
        env={**os.environ, "COLUMNS": "80", "TORCH_EXTENSIONS_DIR": os.devnull, **environment},  # no lock is here
    )


def by_name(found: Any) -> dict[str, Any]:
    return {check["name"]: check for check in found["checks"]}


def test_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    data = tmp_path / "data"
    done = doctor("--json", str(file), XDG_DATA_HOME=str(data))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not data.exists()
    found = json.loads(file.read_text())
    assert (found["schema"], found["ok"]) == (SCHEMA_NAME, True)
    assert set(found) == {"schema", "zftune", "ok", "checks"}
    checks = by_name(found)
    assert {"Python", "packages", "native module", "compiler", "CUDA", "Triton", "NVML"} <= set(checks)
    assert {"DeepSpeed", "cores", "NUMA", "memory", "pinned memory", "host memory", "store"} <= set(checks)
    host = checks["host memory"]
    assert host["figures"]["gbps"] > 0
    assert f"{host['figures']['gbps_max']:.1f} in the fastest (a profile's ceiling)" in host["finding"]
    for check in found["checks"]:
        assert check["status"] in ("ok", "note", "broken", "absent")
        assert check["finding"].endswith(".")
        assert "could not be examined" not in check["finding"]
        for text in (check["finding"], check["fix"] or ""):
            assert text.isascii(), text
            assert str(Path.home()) not in text or str(Path.home()) == "/"
            assert str(tmp_path) not in text
    everything = json.dumps(found)
    if len(socket.gethostname()) > 4:
        assert socket.gethostname() not in everything
    assert len(getpass.getuser()) <= 4 or getpass.getuser() not in everything
    for check in found["checks"]:
        assert check["name"] in done.stdout


@pytest.mark.smoke
def test_json_on_standard_output_is_nothing_but_json() -> None:
    done = doctor("--json", "-")
    assert json.loads(done.stdout)["schema"] == SCHEMA_NAME
    assert "zftune works here" in done.stderr


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import zftune.cli.doctor\nzftune.cli.doctor._examine = lambda _: exit('it examines')"
    )
    done = doctor("--json", str(tmp_path / "missing" / "x.json"), PYTHONPATH=f"{tmp_path}{os.pathsep}{PATH}")
    assert "it examines" not in done.stderr
    assert done.returncode != 0
    assert "give a file in a folder that exists" in done.stderr
    done = doctor("--json", str(tmp_path / "x.json"), PYTHONPATH=f"{tmp_path}{os.pathsep}{PATH}")
    assert "it examines" in done.stderr


def test_something_required_that_is_broken_is_exit_code_1(tmp_path: Path) -> None:
    """An import of the native module that fails."""
    package = tmp_path / "sitecustomize.py"
    package.write_text("import sys\nsys.modules['zenflow._native'] = None\n")
    done = doctor("--json", "-", PYTHONPATH=str(tmp_path), ZENFLOW_NATIVE="auto")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is False
    native = by_name(found)["native module"]
    assert (native["status"], native["required"]) == ("broken", True)
    assert "zftune cannot work here: native module" in done.stderr


def test_a_gpu_whose_gpm_is_forbidden(machine: Machine, nvml_library: Path) -> None:
    machine.write(HOPPER, errors=[("nvmlGpmSampleGet", NO_PERMISSION, 0, -1)])
    environment = {"LD_LIBRARY_PATH": str(nvml_library.parent), "NVML_SCRIPT": str(machine.script)}
    done = doctor("--json", "-", **environment)
    checks = by_name(json.loads(done.stdout))
    assert checks["NVML"]["finding"] == "NVIDIA H200: every figure."
    assert checks["GPM"]["status"] == "note"
    assert "Insufficient Permissions" in checks["GPM"]["finding"]
    assert checks["CUDA"]["status"] in ("ok", "broken")  # a GPU, and a torch that may not know it
    assert done.returncode == 0


def test_help_is_quick_and_touches_nothing() -> None:
    code = COMMAND.replace(
        "app()", "import sys\ntry:\n    app()\nexcept SystemExit:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout
