"""How DeepSpeed is asked, and which setting is blamed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.zftune.check.asked import ask
from tests.support.zftune.check.cases import safe
from tests.support.zftune.check.shapes import SHAPES, base
from zftune.cli import main as cli
from zftune.ds_config.facts import BATCH
from zftune.integrations.deepspeed import asking
from zftune.integrations.deepspeed.asking import Asker, Fault, ranks_that_fit


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("shape", "paths"),
    [
        ("the smallest", []),
        ("no batch size", ["train_micro_batch_size_per_gpu"]),
        ("whole is a word", ["train_batch_size"]),
        ("whole that is odd", ["train_batch_size"]),
        ("offloading is a word", ["zero_optimization.offload_optimizer"]),
        ("the old switch and the section", ["zero_optimization.cpu_offload"]),
        ("SGD with ZeRO", ["optimizer.type"]),
        ("compiled, as of old", ["compile.disable", "compile.backend"]),
        ("warm-up and decay without an end", ["scheduler.params.total_num_steps"]),
    ],
)
def test_the_setting_is_blamed(shape: str, paths: list[str]) -> None:
    assert [".".join(fault.path) for fault in ask(SHAPES[shape], 1)] == paths


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("section", "near"),
    [
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpuu"}}}, "did you mean cpu"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"pin_memry": True}}}, "did you mean pin_memory"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"ratio": 0.5}}}, ""),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_step": 3}}}, "did you mean warmup_num_steps"),
    ],
)
def test_a_near_name_is_found(section: dict[str, Any], near: str) -> None:
    assert [fault.near for fault in ask({**base(), **section}, 1)] == [near]


_SIZES = st.none() | st.integers(1, 8)


@pytest.mark.smoke
@given(whole=st.none() | st.integers(1, 64), micro=_SIZES, passes=_SIZES, parallel=_SIZES)
def test_ranks_that_fit_do(whole: int | None, micro: int | None, passes: int | None, parallel: int | None) -> None:
    given = {**dict(zip(BATCH, (whole, micro, passes), strict=True)), "sequence_parallel_size": parallel}
    ranks = ranks_that_fit({name: value for name, value in given.items() if value is not None})
    assert ranks % (parallel or 1) == 0
    if whole and micro and passes and whole % (micro * passes) == 0:
        assert whole == micro * passes * ranks // (parallel or 1)


def test_nothing_of_the_folder_that_it_is_asked_in_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in, whose import costs nothing, for the one that is installed."""
    installed, here = tmp_path / "installed", tmp_path / "here"
    runtime = installed / "deepspeed" / "runtime"
    for folder in (runtime, here):
        folder.mkdir(parents=True)
    for package in (runtime.parent, runtime):
        (package / "__init__.py").touch()
    (runtime / "config.py").write_text(
        "dist = None\nclass DeepSpeedConfig:\n    def __init__(self, config): raise ValueError('no')"
    )
    (here / "deepspeed.py").write_text("open('taken', 'w')")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(installed), os.environ.get("PYTHONPATH")))))
    with Asker() as asker:
        assert asker({}, 1) == [Fault((), "ValueError: no")]
    assert not (here / "taken").exists()


@pytest.mark.smoke
def test_a_section_that_lacks_what_was_left_out_of_it_is_not_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed reads the section first: without "enabled" its words are others than those about the batch."""

    def first_error(config: dict[str, Any], _: int) -> Exception | None:
        if "curriculum_learning" in config and "enabled" not in config["curriculum_learning"]:
            return KeyError("enabled")
        if config.get("level") == 9:
            return ValueError("level")
        return AssertionError("train_batch_size") if config.get("train_batch_size") == 7 else None

    monkeypatch.setattr(asking, "first_error", first_error)
    config = {"curriculum_learning": {"enabled": True}, "level": 9, "train_batch_size": 7}
    assert [one.path for one in asking.refusals(config, 2)] == [("level",), ("train_batch_size",)]


@pytest.mark.smoke
def test_deepspeed_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    """A terminal shows that meanwhile."""
    config = {**safe("zero2-offload"), "comms_logger": {"enabled": True, "prof_step": 1}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    code = (
        "import sys\nfrom zftune.cli.main import main\ntry:\n    main()\nexcept SystemExit:\n"
        "    print({'deepspeed', 'transformers', 'optuna'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "check", str(tmp_path / "ds.json")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "80", "FORCE_COLOR": "1"},
    )
    assert "asking DeepSpeed" in done.stdout
    assert "there is no such setting in" in done.stdout
    assert done.stdout.endswith("set()\n")


def test_a_deepspeed_that_does_not_import_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "installed" / "deepspeed"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('no such library')")
    (tmp_path / "ds.json").write_text(json.dumps({**safe("zero2-offload"), "gradient_cliping": 1.0}))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(broken.parent), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["zftune", "check", str(tmp_path / "ds.json")])
    with pytest.raises(SystemExit):
        cli.main()
    assert "could not be asked: ImportError: no such library" in " ".join(capsys.readouterr().out.split())
