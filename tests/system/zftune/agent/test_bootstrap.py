"""The `sitecustomize` that comes first: it disturbs nobody, and says why where it does not arm."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zftune
from tests.support.zftune.agent.children import Child, environ, run, script, train
from zftune import agent

STEPS = """
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for (ids,) in loader(12):
        loss_of(model, ids).backward()
        optimizer.step()
"""


def python(folder: Path, code: str, *, other: Path | None = None, flags: tuple[str, ...] = ()) -> tuple[Child, Child]:
    folder.mkdir(exist_ok=True)
    with_us = environ(folder) if other is None else environ(folder, PYTHONPATH=str(other))
    without = {name: value for name, value in with_us.items() if not name.startswith("ZFTUNE_")}
    without["PYTHONPATH"] = "" if other is None else str(other)
    command = [sys.executable, *flags, "-c", code]
    started = run(command, folder, with_us, check=False, started=True)
    return started, run(command, folder, without, check=False, started=True)


def raised(child: Child) -> list[str]:
    return [line for line in child.stderr.splitlines() if re.match(r"\w+(Error|Exit): ", line)]


@pytest.mark.smoke
def test_the_environment() -> None:
    found = agent.environment(Path("/x"), warmup=3, steps=7, base={"A": "b"})
    assert found == {
        "A": "b",
        "PYTHONPATH": str(agent.BOOTSTRAP),
        "ZFTUNE_AGENT_DIR": "/x",
        "ZFTUNE_AGENT_VERSION": zftune.__version__,
        "ZFTUNE_AGENT_WARMUP": "3",
        "ZFTUNE_AGENT_STEPS": "7",
    }
    kept = agent.environment(Path("/x"), warmup=0, steps=1, base={"PYTHONPATH": "/mine"})["PYTHONPATH"]
    assert kept == f"{agent.BOOTSTRAP}{os.pathsep}/mine"
    assert agent.environment(Path("/x"), warmup=0, steps=1, base={"PYTHONPATH": ""})["PYTHONPATH"] == str(
        agent.BOOTSTRAP
    )


@pytest.mark.smoke
def test_it_is_python_3_6() -> None:
    source = (agent.BOOTSTRAP / "sitecustomize.py").read_text()
    ast.parse(source, feature_version=(3, 6))


@pytest.mark.smoke
def test_the_next_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("MINE = 7\nimport sys\nsys.mine = __file__")
    with_us, without = python(
        tmp_path / "r", "import sys, sitecustomize; print(sitecustomize.MINE, sys.mine, sys.path)", other=tmp_path
    )
    assert with_us.stdout == without.stdout != ""
    assert with_us.stderr == without.stderr == ""


@pytest.mark.parametrize("text", ["1 / 0", "raise SystemExit(5)", "import nowhere_to_be_found", "syntax error"])
@pytest.mark.parametrize("flags", [(), ("-v",)])  # verbose, Python prints a traceback
def test_a_next_sitecustomize_that_raises_is_told_by_python(tmp_path: Path, text: str, flags: tuple[str, ...]) -> None:
    (tmp_path / "sitecustomize.py").write_text(text)
    with_us, without = python(tmp_path / "r", "print('on')", other=tmp_path, flags=flags)
    assert (with_us.returncode, with_us.stdout) == (without.returncode, without.stdout)
    if "Traceback" in without.stderr:  # with a frame of ours in it
        assert "Traceback" in with_us.stderr
        assert raised(with_us) == raised(without)
    else:
        assert with_us.stderr == without.stderr


def test_none_at_all_leaves_ours(tmp_path: Path) -> None:
    with_us, without = python(tmp_path / "r", "import sys; print(sys.path)")
    assert with_us.stdout == without.stdout
    assert with_us.stderr == ""


def test_torch_is_only_looked_for_not_imported(tmp_path: Path) -> None:
    with_us, _ = python(
        tmp_path / "r",
        "import sys, importlib.util; importlib.util.find_spec('torch'); print('torch' in sys.modules, "
        "'zftune' in sys.modules)",
    )
    assert with_us.stdout.strip() == "False False"


def test_torch_keeps_its_loader(tmp_path: Path) -> None:
    code = "import torch; loader = torch.__spec__.loader; print(type(loader), vars(loader), torch.__loader__ is loader)"
    with_us, without = python(tmp_path / "r", code)
    assert with_us.stdout == without.stdout != ""


@pytest.mark.smoke
def test_a_torch_that_cannot_be_imported_fails_as_it_would(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('broken torch')")
    code = "try:\n    import torch\nexcept ImportError as error:\n    print(error)\nimport torch"
    with_us, without = python(tmp_path / "r", code, other=tmp_path)
    assert (with_us.returncode, with_us.stdout) == (without.returncode, without.stdout) == (1, "broken torch\n")
    assert with_us.files == []


@pytest.mark.smoke
def test_switched_off(tmp_path: Path) -> None:
    assert train(tmp_path, STEPS, ZFTUNE_DISABLE="1").files == []


@pytest.mark.smoke
def test_another_zftune_is_named_and_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    env = environ(folder) | {"ZFTUNE_AGENT_VERSION": "9.9"}
    child = run([sys.executable, script(tmp_path, STEPS)], folder, env)
    error = child.only("end")["error"]
    assert error == f"this Python has zftune {zftune.__version__}, the profile is made by 9.9"
    assert child.steps == []


@pytest.mark.smoke
def test_a_python_without_zftune_is_named(tmp_path: Path) -> None:
    base = sys.base_prefix + "/bin/python3"
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "torch.py").write_text("")
    folder = tmp_path / "records"
    folder.mkdir()
    env = environ(folder, PYTHONPATH=str(bare), RANK="1")
    assert subprocess.run([base, "-c", "import zftune"], cwd=tmp_path, capture_output=True, check=False).returncode
    child = run([base, "-c", "import torch; print('fine')"], folder, env)
    assert child.stdout == "fine\n"
    assert child.stderr == ""
    assert "has no zftune" in child.only("end")["error"]
    assert child.only("header")["rank"] == 1
