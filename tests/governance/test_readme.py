"""What the README says works: its example runs, its commands exist, its files are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zftune.rig_files import DEFAULT_RIG

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs(tmp_path: Path) -> None:
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]  # the others need a Trainer and its data
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert torch.load(tmp_path / "model.pt", weights_only=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("StepStats(step="), result.stdout


_OF_THE_MACHINE = (r"─ cpu \(emulated accelerator\) · .* ─╯", r"done for real, in\s+[\d,.]+\s+m?s,")
"""What of the demo's screen another machine, or another run, has otherwise."""


def test_the_demo_prints_what_it_says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from zftune import cli

    monkeypatch.setattr("sys.argv", ["zftune", "profile", "--rig", DEFAULT_RIG])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main()
    shown, said = (_of_any_machine(text) for text in (capsys.readouterr().out, README.split("```")[1]))
    assert shown.split() == said.split()  # lines may break elsewhere


def _of_any_machine(screen: str) -> str:
    for pattern in _OF_THE_MACHINE:
        screen, found = re.subn(pattern, "", screen)
        assert found == 1, pattern
    return screen


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:`|^ {4})make ([a-z-]+)", README, re.MULTILINE))))
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("option", sorted(set(re.findall(r"zftune profile.*?(?=\n)", README))))
def test_the_command_lines_use_options_that_exist(option: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", "from zftune.cli import main; main()", "profile", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "200", "TERM": "dumb", "PATH": ""},
    ).stdout
    own, _, _ = option.partition(" -- ")  # what follows is the command's
    flags = re.findall(r"--[a-z][a-z-]+", own)
    assert [flag for flag in flags if flag not in shown] == []


def test_the_files_that_it_names_exist() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
    tree = README.split("## How the parts fit")[1].split("```")[1]
    folder = ROOT
    for line in tree.splitlines():
        if not line.strip():
            continue
        if not line.startswith(" "):
            folder = ROOT / line.split()[0]
            assert folder.is_dir(), folder
        else:
            for name in re.findall(r"\b[a-z_]+\.py\b", line):
                assert (folder / name).is_file(), folder / name
