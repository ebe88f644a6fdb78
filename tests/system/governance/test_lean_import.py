"""Importing costs little and touches no device: each import is tried in an interpreter of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import zftune
from zftune.errors import EXTRAS

ROOT = Path(__file__).parents[3]
TUNING_STACK = {"alembic", "deepspeed", "optuna", "plotly", "pynvml", "scipy", "sqlalchemy", "transformers"}
SERVING_STACK = {"fastapi", "prometheus_client", "pydantic", "starlette", "uvicorn"}
COMMAND_LINE_STACK = TUNING_STACK | SERVING_STACK | {"torch", "numpy"}
# torch.cuda imports pynvml where it is installed; that zenflow does not is for the linter to say.
RUNTIME_UNWANTED = (TUNING_STACK - {"pynvml"}) | SERVING_STACK | {"zftune"}
# It runs inside training processes, beside whatever they have.
CLIENT_UNWANTED = COMMAND_LINE_STACK | {"h11", "rich", "typer", "zenflow"}
HELP = """
import contextlib, io, zftune.cli.main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    zftune.cli.main.app(["--help"])
"""

PROBE = """
import json, sys
{statement}
torch = sys.modules.get("torch")
print(json.dumps({{
    "modules": sorted({{name.partition(".")[0] for name in sys.modules}}),
    "cuda": bool(torch and torch.cuda.is_initialized()),
}}))
"""


def probe(statement: str) -> tuple[set[str], bool]:
    """Top-level modules that are loaded after `statement`, and whether CUDA was initialised."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE.format(statement=statement)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return set(found["modules"]), found["cuda"]


def test_what_serves_deepspeed_loads_nothing_that_serves_other_scripts() -> None:
    """An import of zenflow calls back into `agent.steering`, which must not be half imported then."""
    code = "import sys, zftune.agent.running; sys.exit('zftune.agent.steering' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        pytest.param("import zenflow", RUNTIME_UNWANTED, marks=pytest.mark.smoke),
        ("import zenflow.distributed", RUNTIME_UNWANTED),
        ("import zftune", COMMAND_LINE_STACK),
        ("import zftune; zftune.attach", RUNTIME_UNWANTED - {"zftune"}),
        pytest.param(HELP, COMMAND_LINE_STACK, marks=pytest.mark.smoke),
        ("import zftune.daemon.client.http", CLIENT_UNWANTED),
        ("import zftune.report.compare, zftune.report.trace", {"plotly"}),
        ("import zftune.cli.run, zftune.doctor.software", {"numpy", "sqlalchemy", "torch"}),
    ],
)
def test_import_is_lean(statement: str, unwanted: set[str]) -> None:
    modules, cuda = probe(statement)
    assert not modules & unwanted
    assert not cuda


def test_the_probe_sees_what_it_looks_for() -> None:
    modules, _ = probe("import sqlalchemy")
    assert "sqlalchemy" in modules


@pytest.mark.smoke
def test_the_version_is_the_packages() -> None:
    from importlib.metadata import version

    assert version("zftune") == zftune.__version__


@pytest.mark.smoke
def test_typed_packages_and_native_module_are_installed() -> None:
    from importlib.resources import files

    import zenflow
    from zenflow import _native

    assert zenflow.__name__ == "zenflow"
    assert callable(_native.bandwidth)
    for package in ("zenflow", "zftune"):
        assert files(package).joinpath("py.typed").is_file()


@pytest.mark.smoke
def test_rigs_are_found_in_the_package() -> None:
    from importlib.resources import files

    packaged = {entry.name for entry in files("zftune").joinpath("rigs").iterdir() if entry.name.endswith(".toml")}
    assert packaged == {path.name for path in (ROOT / "zftune" / "rigs").glob("*.toml")} > {"host-bound.toml"}


@pytest.mark.smoke
def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [
        *project["project"]["dependencies"],
        *(requirement for name in extras if name != "all" for requirement in extras[name]),
        *project["build-system"]["requires"],
    ]
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    names = {re.split(r"[\[;>]", requirement)[0].strip().lower() for requirement in wanted}
    assert names <= pinned


NOT_IN_ALL = {"all", "dev", "test-all"}


@pytest.mark.smoke
def test_all_brings_every_extra_but_that_of_developers() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["all"] == [f"zftune[{','.join(name for name in extras if name not in NOT_IN_ALL)}]"]
    assert set(EXTRAS.values()) == set(extras) - NOT_IN_ALL
    for package, extra in EXTRAS.items():
        assert any(requirement.startswith(package) for requirement in extras[extra])
