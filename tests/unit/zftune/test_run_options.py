"""`zftune run` before anything starts: what is refused, what a dry run shows, and what the command is given."""

from __future__ import annotations

import base64
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.support.zftune.store.examples import PRESET
from zenflow import ZenFlowError
from zftune import agent
from zftune.agent import show_lines, show_refusals
from zftune.cli import run as module
from zftune.errors import BadInputError, ZftuneError
from zftune.store import open_store
from zftune.variables import RUN

DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "zenflow": {"topk_ratio": 0.05, "update_interval": 4, "overlap_step": True},
    },
}
TRAIN = ("--", "python", "train.py", "--deepspeed", "ds.json")
Started = list[dict[str, str]]


@pytest.fixture(autouse=True)
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    found: Started = []

    def start(_program: str, _command: list[str], environment: dict[str, str]) -> None:
        found.append(environment)
        raise SystemExit(0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZFTUNE_DB", str(tmp_path / "zftune.db"))
    monkeypatch.setattr(os, "execvpe", start)
    monkeypatch.setattr(module, "_require_daemon", lambda _: None)
    (tmp_path / "ds.json").write_text(json.dumps(DS_CONFIG))
    (tmp_path / "s.json").write_text('{"zftune_schedule": 1, "steps": []}')
    return found


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command(context_settings={"allow_interspersed_args": False})(module.run)
    return CliRunner().invoke(app, arguments)


def wanted(environment: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(environment[RUN]))
    return found


ZERO = DS_CONFIG["zero_optimization"]
REFUSED: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "a backend": (("--backend", "torch"), None, "--backend is 'torch'; it must be zenflow or deepspeed"),
    "a quality": (("--quality", "best"), None, "--quality is 'best'; it must be exact, published or loose"),
    "a preset": (("--preset", "mine"), None, "preset 'mine' is not in the store"),
    "a preset's file": (("--preset", "./mine.json"), None, "mine.json"),
    "fresh alone": (("--fresh",), None, "--fresh needs --online, whose search begins anew then"),
    "two sources": (("--schedule", "s.json", "--online"), None, "--online and --schedule exclude each other"),
    "no schedule": (("--schedule", "none.json"), None, "--schedule 'none.json': cannot be read"),
    "what is none": (("--schedule", "ds.json"), None, "--schedule 'ds.json'"),
    "no folder": (("--export-schedule", "none/s.json"), None, "--export-schedule 'none/s.json' cannot be written"),
    "no file": (("--export-schedule", "/dev/null"), None, "--export-schedule '/dev/null' is not a regular file"),
    "upstream's": (("--schedule", "s.json", "--backend", "deepspeed"), None, "--schedule 's.json' needs --backend"),
    "upstream's, by the file": (
        ("--export-schedule", "o.json"),
        {**DS_CONFIG, "zftune": {"backend": "deepspeed"}},
        "--export-schedule 'o.json' needs --backend zenflow, whose settings it holds",
    ),
    "no JSON": ((), "{]", "ds_config 'ds.json' cannot be read: it is neither JSON"),
    "the section": (
        (),
        {**DS_CONFIG, "zftune": {"quality": "best"}},
        "'ds.json': zftune.quality is 'best'; it must be exact",
    ),
    "the section's preset": ((), {**DS_CONFIG, "zftune": {"preset": "theirs"}}, "preset 'theirs' is not in the store"),
    "what zenflow lacks": (
        (),
        {**DS_CONFIG, "zero_optimization": {**ZERO, "stage": 3, "zero_hpz_partition_size": 2}},
        "'ds.json': zero_optimization.zero_hpz_partition_size is 2; it must be left out",
    ),
}


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_never_starts(tmp_path: Path, started: Started, name: str, dry: bool) -> None:
    options, config, sentence = REFUSED[name]
    if config is not None:
        (tmp_path / "ds.json").write_text(config if isinstance(config, str) else json.dumps(config))
    done = invoke(*options, *(["--dry-run"] if dry else []), *TRAIN)
    assert isinstance(done.exception, ZftuneError), done.output
    assert sentence in str(done.exception)
    assert started == []


def test_near_names_of_a_preset_are_named() -> None:
    with open_store() as store:
        name = store.save_preset(PRESET).name
    done = invoke("--preset", f"{name}x", *TRAIN)
    assert isinstance(done.exception, BadInputError)
    assert f"there are {name}" in str(done.exception)


def test_what_deepspeed_refuses_itself_is_left_to_it(tmp_path: Path, started: Started) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({**DS_CONFIG, "flops_profiler": {"enabled": "perhaps"}}))
    assert invoke(*TRAIN).exit_code == 0
    assert len(started) == 1


def test_a_command_is_asked_for(started: Started) -> None:
    assert "CMD is missing" in str(invoke().exception)
    assert started == []


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ((), {}),
        (("--quality", "exact", "--quiet"), {"quality": "exact", "quiet": True}),
        (("--online",), {"online": True}),
        (("--online", "--fresh"), {"online": True}),
    ],
)
def test_what_the_command_is_given(started: Started, options: tuple[str, ...], given: dict[str, Any]) -> None:
    assert invoke(*options, *TRAIN).exit_code == 0
    (environment,) = started
    assert {name: value for name, value in wanted(environment).items() if name != "version"} == given
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(agent.BOOTSTRAP)
    assert environment.get("ZFTUNE_ONLINE") == ("daemon" if "--online" in options else None)
    assert environment.get("ZFTUNE_FRESH") == ("1" if "--fresh" in options else None)


def test_disabled_the_command_is_given_nothing(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZFTUNE_DISABLE", "1")
    assert invoke("--online", *TRAIN).exit_code == 0
    assert RUN not in started[0]
    assert str(agent.BOOTSTRAP) not in started[0].get("PYTHONPATH", "")


@pytest.mark.parametrize(
    ("options", "config", "lines"),
    [
        (
            (),
            DS_CONFIG,
            [
                "ds.json: trains on zenflow, quality published.",
                "  settings: those of a preset in $ZFTUNE_DB for this model and hardware, else of the ds_config",
            ],
        ),
        (
            ("--quality", "exact", "--preset", "none"),
            DS_CONFIG,
            ["ds.json: trains on zenflow, quality exact.", "  settings: those of the ds_config"],
        ),
        (("--schedule", "s.json"), DS_CONFIG, ["ds.json: trains on zenflow.", "  settings: those of the schedule"]),
        (("--preset", "NAME"), DS_CONFIG, ["  settings: those of preset NAME"]),
        ((), {"zero_optimization": {"stage": 1}}, ["ds.json: is left to DeepSpeed: "]),
        (("--online",), DS_CONFIG, ["Tuned while it trains, by the daemon at "]),
        ((), {**DS_CONFIG, "zftune": {"online": True}}, ["Tuned while it trains, in its own process; results go to "]),
    ],
)
def test_a_dry_run(
    tmp_path: Path, started: Started, options: tuple[str, ...], config: dict[str, Any], lines: list[str]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(config))
    with open_store() as store:
        name = store.save_preset(PRESET).name
    options = tuple(name if word == "NAME" else word for word in options)
    lines = [line.replace("NAME", name) for line in lines]
    done = invoke("--dry-run", *options, *TRAIN)
    assert done.exit_code == 0, done.exception
    shown = done.output.splitlines()
    assert shown[0] == "Would run: python train.py --deepspeed ds.json"
    assert all(any(line.startswith(one) for line in shown) for one in lines), shown
    assert shown[-1] == "Nothing was started."
    assert started == []


def test_a_dry_run_of_what_is_not_there_or_names_no_ds_config() -> None:
    assert "It names no ds_config" in invoke("--dry-run", "--", "python", "train.py").output
    assert str(invoke("--dry-run", "--", "nosuch").exception) == "CMD 'nosuch': there is no such program"


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger("zftune")
    before = found.level, list(found.handlers), found.propagate
    yield found
    found.level, found.handlers, found.propagate = before


@pytest.mark.parametrize("quiet", [False, True])
def test_a_quiet_run_prints_warnings_alone(logger: logging.Logger, quiet: bool) -> None:
    show_lines(quiet=quiet)
    assert logger.isEnabledFor(logging.INFO) != quiet
    assert logger.isEnabledFor(logging.WARNING)


REFUSE = "from zftune.errors import BadInputError\ndef refuse(): raise BadInputError('stage is 9')\n"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("refuse()", "zftune: stage is 9\n"),
        ("from zenflow import CheckpointError\nraise CheckpointError('it is cut')", "zftune: it is cut\n"),
        ("raise ValueError('its own')", None),
        ("try:\n    refuse()\nexcept Exception as error:\n    raise KeyError('mine') from error", None),
        ("try:\n    {}['mine']\nexcept KeyError:\n    refuse()", None),
        ("from zenflow import ZenFlowError\nraise ZenFlowError('it broke')", None),
    ],
    ids=["refused", "a checkpoint", "its own", "made from ours", "ours behind its own", "no refusal"],
)
def test_no_frame_is_shown_of_what_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str, told: str | None
) -> None:
    """The hook that was there is asked for other errors."""
    others: list[BaseException] = []
    monkeypatch.setattr("sys.excepthook", lambda _kind, error, _frames: others.append(error))
    monkeypatch.setattr("sys.__stderr__", None)
    show_refusals()

    with pytest.raises((ZenFlowError, ZftuneError, KeyError, ValueError)) as found:
        exec(REFUSE + code, {})
    raised = found.value
    if told is None:
        sys.excepthook(type(raised), raised, raised.__traceback__)
        assert others == [raised]
    else:
        with pytest.raises(SystemExit) as ended:
            sys.excepthook(type(raised), raised, raised.__traceback__)
        assert (ended.value.code, capsys.readouterr().err, others) == (2, told, [])
