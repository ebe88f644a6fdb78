"""What README and docs/ show runs: their Python and their commands."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server, upstream_ops
from tests.support.governance.documents import PAGES, ROOT, blocks

SMOKE = ("python", "README.md")


def pages_with(language: str) -> Iterator[Any]:
    for page in PAGES:
        if any(one.language == language and not one.mark for one in blocks(page)):
            name = str(page.relative_to(ROOT))
            yield pytest.param(page, id=name, marks=[pytest.mark.smoke] if (language, name) == SMOKE else [])


@pytest.mark.parametrize("page", list(pages_with("python")))
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    parts = [block.text for block in blocks(page) if block.language == "python" and block.mark in ("", "hidden")]
    code = "\n".join(["import warnings; warnings.simplefilter('error')", *parts])
    env = {**os.environ, "ZFTUNE_DB": str(tmp_path / "zftune.db")}
    result = fork_server.run(["-c", code], cwd=tmp_path, env=env)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What commands of the documents find: the examples on short samples, a training script, a ds_config."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for example in (tmp_path / "examples").glob("*.py"):
        text = re.sub(r'("--length", type=int, default)=\d+', r"\1=32", example.read_text(encoding="utf-8"))
        example.write_text(text, encoding="utf-8")
    script = (tmp_path / "examples" / "plain_pytorch.py").read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(script.replace("default=80", "default=30"), encoding="utf-8")
    shutil.copy(ROOT / "examples" / "ds_config.json", tmp_path / "ds_config.json")
    return tmp_path


def lines_of(page: Path) -> list[str]:
    text = "".join(block.text for block in blocks(page) if block.language == "sh" and not block.mark)
    return re.sub(r" +#.*$", "", text.replace("\\\n", " "), flags=re.MULTILINE).splitlines()


def is_alone(line: str) -> bool:
    """Whether no other command reads what this one leaves, so that it is run on the first of its pages alone."""
    return line.startswith(("zftune plan ", "zftune profile "))


def run_line(line: str, folder: Path, environment: dict[str, str]) -> None:
    """Run a command as a shell does; what is of Python in a fork, which needs no import of DeepSpeed."""
    words = shlex.split(line)
    count = next((place for place, word in enumerate(words) if not re.match(r"(export$|[A-Z_]+=)", word)), len(words))
    own = dict(word.split("=", 1) for word in words[:count] if "=" in word)
    program, *rest = [sys.executable if word == "python" else word for word in words[count:]] or ["true"]
    if words[0] == "export":
        environment |= own
    how: dict[str, Any] = {"cwd": folder, "env": {**environment, **own}}
    done: subprocess.CompletedProcess[str]
    if program == "zftune":
        done = fork_server.zftune(*rest, timeout=400, **how)
    elif program == sys.executable:
        done = fork_server.run(rest, timeout=400, **how)
    else:
        path = shutil.which(program, path=environment["PATH"]) or program
        done = subprocess.run([path, *rest], capture_output=True, text=True, check=False, **how)
    assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


@pytest.mark.parametrize("page", list(pages_with("sh")))
def test_all_commands_of_a_page_run(page: Path, folder: Path) -> None:
    programs = folder / "bin"
    programs.mkdir()
    for name, code in (("zftune", fork_server.MAIN), ("torchrun", "from torch.distributed.run import main; main()")):
        (programs / name).write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    environment = {**os.environ, **upstream_ops.environment()}  # or DeepSpeed compiles for minutes
    environment |= {
        "PATH": f"{programs}{os.pathsep}{environment['PATH']}",
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "ZFTUNE_DB": str(folder / "zftune.db"),
        "ZFTUNE_SOCKET": str(folder / "zftune.sock"),
    }
    before = {line for earlier in PAGES[: PAGES.index(page)] for line in lines_of(earlier)}
    for line in lines_of(page):
        if line.strip() and not (line in before and is_alone(line)):
            run_line(line, folder, environment)


def test_each_step_of_the_setup_says_what_it_does_and_how_long_that_takes() -> None:
    shown = subprocess.run(
        ["make", "--dry-run", "--always-make", "setup"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    long = [place for place, line in enumerate(shown) if re.search(r"-m (venv|pip) ", line)]
    assert len(long) == 3
    for number, place in enumerate(long, 1):
        told = next(line for line in reversed(shown[:place]) if line.startswith("echo "))
        assert re.match(rf'echo "setup {number}/3: .+ \(.*(second|minute)', told), told
