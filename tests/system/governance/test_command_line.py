"""Every knob of the runtime can be turned from the command line, or there is a reason why not."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from zenflow import ZenFlowConfig
from zftune.cli.main import app

WITHOUT_A_FLAG = {
    "select_strategy": "a profile has no epochs: --select-interval counts steps, --config converts",
    "steps_per_epoch": "goes with select_strategy",
    "pt_reserved_cores_perc": "--host-threads says it directly",
    "gradient_accumulation_steps": "a profile takes one backward pass a step",
    "reduce_gradients": "a profile of the built-in workload has one rank",
    "ledger": "checks the runtime, and costs time",
    "skip_nonfinite": "what a profile trains has finite gradients: there is nothing to skip",
}


def profile_options() -> dict[str, str]:
    """Flags of `zftune profile` by parameter name."""
    command = typer.main.get_command(app).commands["profile"]  # type: ignore[attr-defined]
    return {option.name: option.opts[0] for option in command.params if option.param_type_name == "option"}


@pytest.mark.smoke
def test_every_knob_has_a_flag_of_its_own_name_or_a_reason_for_none() -> None:
    knobs = {field.name for field in dataclasses.fields(ZenFlowConfig)}
    flags = profile_options()
    assert knobs - set(flags) == set(WITHOUT_A_FLAG)
    for knob in knobs & set(flags):
        assert flags[knob] == "--" + knob.replace("_", "-")


@pytest.mark.smoke
def test_help_lists_every_option_with_a_sentence() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", "from zftune.cli.main import main; main()", "profile", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200", "TERM": "dumb"},
    ).stdout
    for flag in profile_options().values():
        (line,) = (line for line in shown.splitlines() if f"{flag} " in line)
        assert line.rstrip("│ ").endswith((".", "]")), line


def leaves(command: Any, name: str = "zftune") -> Iterator[tuple[str, Any]]:
    """Every command that is no group, with its name."""
    below = getattr(command, "commands", {})
    for word, one in below.items():
        yield from leaves(one, f"{name} {word}")
    if not below:
        yield name, command


@pytest.mark.smoke
def test_json_goes_to_a_file_or_to_standard_output_whatever_the_command() -> None:
    found = {
        name: (option.metavar, option.help.endswith("'-': standard output."))
        for name, command in leaves(typer.main.get_command(app))
        for option in command.params
        if "--json" in option.opts
    }
    assert len(found) > 15
    assert set(found.values()) == {("PATH", True)}, found


def test_the_commands_of_the_daemon_and_of_runs_and_their_options_are_these() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {name: options_of(command) for name, command in commands["daemon"].commands.items()} == {
        "start": {"--private", "--idle-exit-s", "--port", "--metrics-textfile"},
        "status": {"--json"},
        "stop": {"--json"},
        "open": {"--browser"},
    }
    assert {name: options_of(command) for name, command in commands["runs"].commands.items()} == {
        "list": {"--all", "--json"},
        "show": {"--json"},
        "logs": {"--follow", "--json"},
        "pause": {"--json"},
        "resume": {"--json"},
        "rollback": {"--json"},
        "stop": {"--json"},
    }


@pytest.mark.parametrize("group", ["presets", "runs"])
def test_a_group_without_a_command_is_its_help_and_nothing_else(group: str) -> None:
    shown = CliRunner().invoke(app, [group])
    assert (shown.exit_code, shown.stderr) == (2, "")
    assert "Usage: " in shown.stdout


def test_json_without_a_file_tells_what_to_type() -> None:
    shown = CliRunner().invoke(app, ["daemon", "status", "--json"])
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert shown.stderr == "zftune: --json needs a file; for standard output, type: --json -\n"
    assert "No such option" in CliRunner().invoke(app, ["daemon", "open", "--json"]).stderr


@pytest.mark.smoke
def test_the_options_of_run_are_these() -> None:
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    own = {
        "--backend",
        "--preset",
        "--quality",
        "--online",
        "--fresh",
        "--schedule",
        "--export-schedule",
        "--dry-run",
        "--quiet",
    }
    assert options_of(command) == own
    assert all(option.help.endswith(".") for option in command.params if option.param_type_name == "option")


@pytest.mark.parametrize("words", ["", "profile", "run", "daemon", "daemon open", "runs", "runs logs", "presets list"])
def test_h_is_help(words: str) -> None:
    shown = CliRunner().invoke(app, [*words.split(), "-h"])
    assert shown.exit_code == 0
    assert "Usage: " in shown.output


def test_shells_can_complete_it() -> None:
    asked = {"_ZFTUNE_COMPLETE": "complete_bash", "COMP_WORDS": "zftune pro", "COMP_CWORD": "1"}
    shown = CliRunner().invoke(app, [], prog_name="zftune", env=asked)
    assert shown.output.split() == ["profile"]


def options_of(command: Any) -> set[str]:
    return {option.opts[0] for option in command.params if option.param_type_name == "option"}
