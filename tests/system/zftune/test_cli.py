"""The installed command: its exit code and sentences are those of the command line in a process of the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import fork_server
from zftune import __version__
from zftune.errors import EXTRAS

ZFTUNE = Path(sys.executable).with_name("zftune")
URL = "postgresql://me@localhost:1/x"
WITHOUT = [
    ("torch", "profile", "zftune profile needs torch, which is not installed: pip install zftune"),
    (
        "transformers",
        "profile --model .",
        "--model '.' needs transformers, which is not installed: pip install 'zftune[huggingface]'",
    ),
]
IMPORTED_WITHOUT = [
    ("transformers", "import zftune.integrations.huggingface", "integrations.huggingface needs transformers"),
    (
        "deepspeed",
        "import zftune.integrations.deepspeed as it; it.enable()",
        "integrations.deepspeed.enable() needs deepspeed",
    ),
    ("psycopg", f"import zftune.store as it; exit(it.open_store({URL!r}).notices[0])", "PostgreSQL needs psycopg"),
]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (["--version"], 0, f"zftune {__version__}\n", ""),
        (
            ["profile", "--max-grad-norm", "0"],
            2,
            "",
            "zftune: max_grad_norm is 0.0; it must be a number > 0, or none\n",
        ),
    ],
    ids=["version", "refusal"],
)
def test_the_installed_command(tmp_path: Path, arguments: list[str], code: int, out: str, err: str) -> None:
    done = subprocess.run([ZFTUNE, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("package", "arguments", "sentence"), WITHOUT)
def test_a_missing_package_is_a_sentence_with_the_command(
    tmp_path: Path, package: str, arguments: str, sentence: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    code = f"import sys; sys.modules['{package}'] = None\n{fork_server.MAIN}"
    command = [sys.executable, "-c", code, *arguments.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"zftune: {sentence}\n")


@pytest.mark.parametrize(("package", "code", "sentence"), IMPORTED_WITHOUT)
def test_a_missing_package_is_an_error_with_the_command(package: str, code: str, sentence: str) -> None:
    program = [sys.executable, "-c", f"import sys; sys.modules['{package}'] = None; {code}"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    told = f"{sentence}, which is not installed: pip install 'zftune[{EXTRAS[package]}]'"
    assert told in done.stderr.strip().splitlines()[-1]
