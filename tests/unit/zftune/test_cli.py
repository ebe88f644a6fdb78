"""Bad input is one sentence and exit code 2, before anything is trained or written; so are the other endings."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.privileges import with_no_right_over_modes
from tests.support.zftune.fixtures import MINI_POSITIONS, MINI_TIMELINE, rig_text
from zftune.cli import main as cli
from zftune.cli.main import main
from zftune.cli.profile import _say_it_ends

ZFTUNE = Path(sys.executable).with_name("zftune")


@dataclass(frozen=True)
class Ended:
    code: object
    out: str
    err: str

    def is_sentence(self, code: int) -> None:
        assert self.code == code, self.err
        assert self.out == ""
        assert self.err.startswith("zftune: ")
        assert self.err.endswith("\n")
        assert self.err.count("\n") == 1, self.err
        assert not self.err.endswith(".\n")


Run = Callable[..., Ended]


@pytest.fixture
def zftune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["zftune", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Ended(ended.value.code, captured.out, captured.err)

    return run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mini_model: Path) -> Path:
    """The current folder, with every kind of wrong file."""
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    zenflow = {**offload["zero_optimization"], "zenflow": {"topk": 0.1}}
    files: dict[str, str | bytes] = {
        "short.txt": "nine char",
        "binary.bin": b"\0\1\2\3",
        "binary.json": b"\xff\xfe\0",
        "half.json": '{"zero_optimization": ',
        "list.json": "[1, 2]",
        "field.json": json.dumps({"zero_optimization": zenflow}),
        "nvme.json": json.dumps({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}),
        "good.json": json.dumps(offload),
        "missing.toml": rig_text("r", **{key: value for key, value in MINI_TIMELINE.items() if key != "host_ms"}),
        "negative.toml": rig_text("r", **{**MINI_TIMELINE, "host_ms": -1}),
        "unknown.toml": rig_text("r", **MINI_TIMELINE, disk_ms=3),
        "half.toml": "name = ",
        "binary.toml": b"\xff\xfe\0",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for name in ("empty", "hollow"):
        (tmp_path / name).mkdir()
    (tmp_path / "hollow" / "config.json").write_text("{}")
    (tmp_path / "mini").symlink_to(mini_model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def forbid(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError(f"{name} was called")

    monkeypatch.setattr(f"zftune.profile.measure.{name}", refuse)


LONG = "x" * 300

# The command line, and what the sentence must name: the field, the value, what is allowed.
WITHOUT_A_MODEL = [
    ("--topk-ratio 1.5", "topk_ratio is 1.5", "from 0 to 1"),
    ("--topk-ratio nan", "topk_ratio is nan", "from 0 to 1"),
    ("--update-interval 0", "update_interval is 0", '>= 1 or "auto"'),
    ("--update-interval often", "update_interval is 'often'", '>= 1 or "auto"'),
    ("--update-interval=--5", "update_interval is '--5'", '>= 1 or "auto"'),
    ("--select-interval 0", "select_interval is 0", '>= 1 or "auto"'),
    ("--apply-lag 5", "apply_lag is 5", "from 1 to update_interval (4)"),
    ("--apply-lag 3 --update-interval 2", "apply_lag is 3", "from 1 to update_interval (2)"),
    ("--offload-ratio -1", "offload_ratio is -1.0", "from 0 to 1"),
    ("--deferred-update median", "deferred_update is 'median'", '"replay" or "mean"'),
    ("--full-warm-up-rounds -1", "full_warm_up_rounds is -1", ">= 0"),
    ("--pipeline fast", "pipeline is 'fast'", '"bucket" or "none"'),
    ("--bucket-bytes 0", "--bucket-bytes is '0'", "such as 64GB"),
    ("--max-grad-norm 0", "max_grad_norm is 0.0", "> 0"),
    ("--steps 0", "--steps is 0", ">= 1"),
    ("--micro-batch 0", "--micro-batch is 0", ">= 1"),
    ("--sequence 1", "--sequence is 1", ">= 2"),
    ("--seed -1", "--seed is -1", "from 0"),
    (f"--seed {1 << 63}", f"--seed is {1 << 63}", f"to {(1 << 63) - 1}"),
    ("--dtype int8", "--dtype is 'int8'", "bf16 or fp32"),
    ("--config nonesuch.json", "ds_config 'nonesuch.json' cannot be read", "No such file"),
    ("--config empty", "ds_config 'empty' cannot be read", "Is a directory"),
    ("--config binary.json", "ds_config 'binary.json' cannot be read", "not UTF-8 text"),
    ("--config half.json", "ds_config 'half.json' cannot be read", "neither JSON"),
    ("--config list.json", "ds_config 'list.json' cannot be read", "JSON object"),
    ("--config field.json", "zero_optimization.zenflow.topk is 0.1", "topk_ratio"),
    ("--config nvme.json", "zero_optimization.offload_optimizer.device is 'nvme'", '"cpu" or "none"'),
    ("--config good.json --topk-ratio 2", "topk_ratio is 2.0", "from 0 to 1"),
    ("--rig nonesuch", "--rig is 'nonesuch'", "llama2-7b-4xa100, "),
    (f"--rig {LONG}", f"--rig is '{LONG}'", "or a TOML file"),
    ("--rig empty", "--rig is 'empty'", "or a TOML file"),
    ("--rig missing.toml", "rig 'missing.toml' has no timeline.host_ms", "needed are forward_ms"),
    ("--rig negative.toml", "timeline.host_ms = -1", "a number > 0"),
    ("--rig unknown.toml", "timeline.disk_ms = 3", "a number > 0, as must forward_ms"),
    ("--rig half.toml", "rig 'half.toml' cannot be read", "it is not TOML"),
    ("--rig binary.toml", "rig 'binary.toml' cannot be read", "it is not TOML"),
    ("--text nonesuch.txt", "--text 'nonesuch.txt'", "neither a file nor a folder"),
    ("--text empty", "--text 'empty'", "UTF-8 text"),
    ("--text binary.bin", "--text 'binary.bin'", "UTF-8 text"),
    ("--json nonesuch/profile.json", "--json 'nonesuch/profile.json'", "a folder that exists"),
    ("--json short.txt/profile.json", "--json 'short.txt/profile.json'", "a folder that exists"),
    ("--json empty", "--json 'empty'", "a file in a folder"),
    (f"--json {LONG}.json", f"--json '{LONG}.json'", "a file in a folder"),
]
WITH_A_MODEL = [
    ("--model nonesuch", "--model is 'nonesuch'", "tiny, small, medium, or a directory"),
    ("--model empty", "--model is 'empty'", "a directory that holds a config.json"),
    ("--model hollow", "--model 'hollow'", "a causal language model"),
    (
        f"--model mini --sequence {MINI_POSITIONS + 1}",
        f"--sequence is {MINI_POSITIONS + 1}",
        f"model's {MINI_POSITIONS}",
    ),
    ("--model mini --text short.txt --sequence 10", "--sequence is 10", "the text's length of 9 tokens"),
]


@pytest.mark.parametrize(("arguments", "named", "allowed"), WITHOUT_A_MODEL + WITH_A_MODEL)
def test_a_bad_option_is_refused_before_the_model_is_built_or_trained(
    zftune: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, named: str, allowed: str
) -> None:
    is_built = (arguments, named, allowed) in WITH_A_MODEL
    forbid(monkeypatch, "ZenFlowAdamW" if is_built else "build_model")
    # A bad --json takes the place of the good one that all the others get.
    output = () if "--json" in arguments else ("--json", "profile.json")
    before = contents(folder)
    ended = zftune("profile", *output, *arguments.split())
    ended.is_sentence(2)
    assert named in ended.err
    assert allowed in ended.err
    assert contents(folder) == before


def test_the_guard_against_training_sees_training(zftune: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, "ZenFlowAdamW")
    with pytest.raises(AssertionError, match="ZenFlowAdamW was called"):
        zftune("profile", "--model", "mini", "--sequence", "8")


@pytest.mark.parametrize(
    ("option", "name"), [("--config", "good.json"), ("--text", "short.txt"), ("--json", "empty/p")]
)
def test_what_may_not_be_read_or_written_is_refused(zftune: Run, folder: Path, option: str, name: str) -> None:
    for part in ("good.json", "short.txt", "empty"):
        (folder / part).chmod(0)
    try:
        ended = with_no_right_over_modes(lambda: zftune("profile", option, name))
    finally:
        (folder / "empty").chmod(0o700)
    ended.is_sentence(2)
    assert name in ended.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("profile --nonesuch 1", ["No such option", "--nonesuch", "zftune profile --help"]),
        ("--nonesuch", ["No such option", "--nonesuch", "zftune --help"]),
        ("profile --steps many", ["--steps is 'many'", "it must be an integer"]),
        ("profile --topk-ratio=much", ["--topk-ratio is 'much'", "it must be a number"]),
        ("profile --", ["command ''", "nothing stands behind --", "give a program"]),
        ("profile --json p --html ./p", ["--html './p'", "of --json too", "another"]),
        ("run --", ["CMD is missing: give a program"]),
        ("check a\x1bb", ["ds_config 'a\\x1bb' cannot be read"]),
        ("compare a.json", ["argument 'B.json'", "usage: zftune compare", "A.json B.json"]),
        ("doctor x", ["(x)", "usage: zftune doctor"]),
        ("profil", ["'profil' (Did you mean 'profile'?)"]),
        ("profile --seed", ["--seed", "requires an argument"]),
        ("nonesuch", ["No such command", "nonesuch"]),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    zftune: Run, monkeypatch: pytest.MonkeyPatch, arguments: str, words: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    ended = zftune(*arguments.split())
    ended.is_sentence(2)
    for word in words:
        assert word in ended.err


PAGES = "--html needs plotly, which is not installed: pip install 'zftune[report]'"


@pytest.mark.parametrize("arguments", ["profile {} -- false", "tune {}", "explain {}"])
def test_a_page_without_plotly_is_refused_at_once(zftune: Run, monkeypatch: pytest.MonkeyPatch, arguments: str) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    ended = zftune(*arguments.format("--html x.html").split())
    ended.is_sentence(1)
    assert ended.err == f"zftune: {PAGES}\n"


def test_a_rig_that_is_too_fast_is_named_with_its_cause(zftune: Run, folder: Path) -> None:
    (folder / "fast.toml").write_text(rig_text("warp", **{**MINI_TIMELINE, "scale": 1e-4}))
    before = contents(folder)
    ended = zftune(
        *("profile", "--rig", "fast.toml", "--real-time", "--model", "mini", "--sequence", 8, "--text", "good.json"),
        *("--steps", 4, "--no-baselines", "--json", "profile.json"),
    )
    *progress, sentence = ended.err.splitlines(keepends=True)
    assert progress == ["measuring this run: 12 steps\n"] * 3
    replace(ended, err=sentence).is_sentence(1)
    assert "rig 'warp'" in ended.err
    assert re.search(r"the host was \S+% slower than the rig's in each of 3 runs", ended.err)
    assert "larger scale" in ended.err
    assert contents(folder) == before


def test_a_working_directory_that_is_gone_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr("sys.argv", ["zftune", "plan", "Qwen2.5-1.5B", "a100-80-sxm", "--json", "x.json"])
    with pytest.raises(SystemExit) as ended:
        main()
    told = "zftune: the working directory is gone or cannot be read: cd to one that is there\n"
    assert (ended.value.code, capsys.readouterr().err) == (2, told)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--json -", "--json '-': standard output is the command's; "),
        ("--json p --trace ./p", "--trace './p'"),
        ("--steps abc", "--steps is 'abc'; it must be an integer"),
        ("--steps 0", "--steps is 0; it must be an integer >= 1"),
        ("--warmup -1", "--warmup is -1; it must be an integer >= 0"),
        ("--html missing/x.html", "--html 'missing/x.html'"),
        ("--trace -", "--trace '-'"),
        ("--with-baselines", "--with-baselines"),
        ("--topk-ratio 0.5", "--topk-ratio '0.5'"),
        ("--model tiny", "--model 'tiny'"),
        ("--rig none", "--rig 'none'"),
    ],
)
def test_options_that_a_command_has_no_use_for_are_refused_before_it_runs(
    zftune: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = zftune("profile", *options.split(), "--", "touch", "it-ran")
    assert (ended.code, ended.err.startswith(f"zftune: {sentence}")) == (2, True), ended.err


@pytest.mark.parametrize(
    ("command", "whose"),
    [
        ("/bin/torchrun train.py", "; what torchrun prints of a signal from here on is its own, and no failure"),
        ("python -m torch.distributed.run train.py", "; what torch.distributed.run prints of a signal from"),
        ("python train.py", "\n"),
    ],
)
def test_what_a_launcher_says_of_its_end_is_announced(
    command: str, whose: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _say_it_ends(command.split())
    assert capsys.readouterr().err.startswith(f"zftune: all steps are measured, ending the command{whose}")
