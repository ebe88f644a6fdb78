"""Every knob of the runtime can be turned from the command line, or there is a reason why not."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import typer.main

from zenflow import ZenFlowConfig
from zftune.cli import app

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


def test_every_knob_has_a_flag_of_its_own_name_or_a_reason_for_none() -> None:
    knobs = {field.name for field in dataclasses.fields(ZenFlowConfig)}
    flags = profile_options()
    assert knobs - set(flags) == set(WITHOUT_A_FLAG)
    for knob in knobs & set(flags):
        assert flags[knob] == "--" + knob.replace("_", "-")


def test_help_lists_every_option_with_a_sentence() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", "from zftune.cli import main; main()", "profile", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200", "TERM": "dumb"},
    ).stdout
    for flag in profile_options().values():
        (line,) = (line for line in shown.splitlines() if f"{flag} " in line)
        assert line.rstrip("│ ").endswith((".", "]")), line


def test_the_daemons_commands_and_options_are_these() -> None:
    daemon = typer.main.get_command(app).commands["daemon"]  # type: ignore[attr-defined]
    found = {name: options_of(command) for name, command in {"": daemon, **daemon.commands}.items()}
    assert found == {
        "": {"--private", "--idle-exit-s", "--port", "--metrics-textfile"},
        "runs": {"--json"},
        "pause": {"--json"},
        "resume": {"--json"},
        "rollback": {"--json"},
        "logs": {"--follow", "--json"},
        "status": {"--json"},
        "stop": {"--json"},
        "open": {"--browser"},
    }


def test_the_options_of_run_are_these() -> None:
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    assert options_of(command) == {"--backend", "--preset", "--quality", "--online", "--schedule", "--export-schedule"}
    assert all(option.help.endswith(".") for option in command.params if option.param_type_name == "option")


def options_of(command: Any) -> set[str]:
    return {option.opts[0] for option in command.params if option.param_type_name == "option"}
