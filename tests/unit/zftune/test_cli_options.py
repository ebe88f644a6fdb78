"""What the command line hands to the profile, and what it does with the document that comes back."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.zftune.profile.fixtures import EXAMPLE
from zenflow import ZenFlowConfig
from zftune.cli import main as cli
from zftune.profile import run
from zftune.profile.run import ProfileOptions

DEFAULT = ZenFlowConfig(topk_ratio=0.05, update_interval=4, select_interval=16, select_strategy="step")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ProfileOptions]:
    """The options of each profile that was asked for; the example stands for its result."""
    options: list[ProfileOptions] = []

    def profile(chosen: ProfileOptions, on_system: Any) -> Any:
        options.append(chosen)
        on_system("this run")(1, 2)
        return json.loads(EXAMPLE.read_text())

    monkeypatch.setattr(run, "profile", profile)
    return options


def invoke(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["zftune", "profile", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)


@pytest.mark.parametrize(
    ("arguments", "knob", "value"),
    [
        ("--topk-ratio 0.25", "topk_ratio", 0.25),
        ("--update-interval 7", "update_interval", 7),
        ("--select-interval 9", "select_interval", 9),
        ("--select-interval auto", "select_interval", "auto"),
        ("--update-interval auto", "update_interval", "auto"),
        ("--max-update-interval 9", "max_update_interval", 9),
        ("--auto-ratio 0.5", "auto_ratio", 0.5),
        ("--no-stream", "stream", False),
        ("--staging-bytes 4096", "staging_bytes", 4096),
        ("--offload-ratio 0.5", "offload_ratio", 0.5),
        ("--apply-lag 2", "apply_lag", 2),
        ("--deferred-update mean", "deferred_update", "mean"),
        ("--full-warm-up-rounds 3", "full_warm_up_rounds", 3),
        ("--no-overlap-step", "overlap_step", False),
        ("--look-ahead coast", "look_ahead", "coast"),
        ("--window-phase staggered", "window_phase", "staggered"),
        ("--pipeline none", "pipeline", "none"),
        ("--bucket-bytes 4096", "bucket_bytes", 4096),
        ("--bucket-bytes 4MiB", "bucket_bytes", 4 << 20),
        ("--max-grad-norm 1.5", "max_grad_norm", 1.5),
    ],
)
def test_a_flag_sets_its_knob_and_no_other(
    monkeypatch: pytest.MonkeyPatch, asked: list[ProfileOptions], arguments: str, knob: str, value: object
) -> None:
    invoke(monkeypatch, *arguments.split())
    default, changed = (dataclasses.asdict(config) for config in (DEFAULT, asked[0].config))
    assert default[knob] != value
    assert changed == {**default, knob: value}


def test_the_other_options_arrive(monkeypatch: pytest.MonkeyPatch, asked: list[ProfileOptions]) -> None:
    invoke(
        monkeypatch,
        *("--steps", 5, "--rig", "slow-link", "--no-baselines", "--model", "small", "--text", "notes.txt"),
        *("--dtype", "fp32", "--micro-batch", 2, "--sequence", 8, "--seed", 3),
    )
    assert asked == [
        ProfileOptions(
            config=DEFAULT,
            steps=5,
            rig="slow-link",
            baselines=False,
            model="small",
            text="notes.txt",
            dtype="fp32",
            micro_batch=2,
            sequence=8,
            seed=3,
        )
    ]


def test_flags_go_over_the_ds_config(
    monkeypatch: pytest.MonkeyPatch, asked: list[ProfileOptions], tmp_path: Path
) -> None:
    zero = {"offload_optimizer": {"device": "cpu"}, "zenflow": {"topk_ratio": 0.2, "update_interval": 8}}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero, "gradient_clipping": 2.0}))
    invoke(monkeypatch, "--config", tmp_path / "ds.json", "--update-interval", 2, "--overlap-step")
    config = asked[0].config
    assert (config.topk_ratio, config.update_interval, config.overlap_step) == (0.2, 2, True)
    assert config.max_grad_norm == 2.0


@pytest.fixture
def noted(tmp_path: Path) -> Path:
    """A ds_config with something to be said about it."""
    zero = {"offload_optimizer": {"device": "cpu"}, "zenflow": {"update_interval": 3, "offload": True}}
    path = tmp_path / "noted.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    return path


def test_a_warning_about_a_knob_is_a_note(
    monkeypatch: pytest.MonkeyPatch, asked: list[ProfileOptions], capsys: pytest.CaptureFixture[str], noted: Path
) -> None:
    invoke(monkeypatch, "--config", noted)
    assert "note: offload is ignored" in capsys.readouterr().out
    assert asked[0].config.update_interval == 3


@pytest.mark.usefixtures("asked")
def test_json_on_standard_output_is_all_that_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], noted: Path
) -> None:
    invoke(monkeypatch, "--config", noted, "--json", "-")
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads(EXAMPLE.read_text())
    assert "note: " in captured.err
    assert "ZeRO-Offload" in captured.err


@pytest.mark.usefixtures("asked")
def test_json_replaces_the_file_that_a_link_leads_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("previous")
    link.symlink_to(real)
    invoke(monkeypatch, "--json", link)
    assert link.is_symlink()
    assert json.loads(real.read_text()) == json.loads(EXAMPLE.read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]


@pytest.mark.usefixtures("asked")
def test_json_goes_into_a_pipe_and_leaves_it_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    invoke(monkeypatch, "--json", pipe)
    reader.join(timeout=30)
    assert json.loads(read[0]) == json.loads(EXAMPLE.read_text())
    assert pipe.is_fifo()


@pytest.mark.usefixtures("asked")
def test_a_file_that_cannot_be_written_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "profile.json"
    file.write_text("previous")
    monkeypatch.setattr(Path, "replace", full)
    monkeypatch.setattr(sys, "argv", ["zftune", "profile", "--json", str(file)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    sentence = f"zftune: --json '{file}': cannot be written (No space left on device)"
    assert capsys.readouterr().err.splitlines() == ["measuring this run: 2 steps", sentence]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"profile.json": "previous"}
