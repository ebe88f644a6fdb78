"""`zftune check` as a command: exit codes, files, what is on the screen."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.zftune.check.asked import ask
from tests.support.zftune.check.cases import CASES, safe
from tests.support.zftune.store.examples import PRESET
from zftune.cli import main as cli
from zftune.integrations.deepspeed.check.checking import check
from zftune.integrations.deepspeed.check.findings import render
from zftune.store import open_store

Run = Callable[..., tuple[object, str, str]]

BAD: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.0}},
    "gradient_clipping": 0,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "zenflow": {"topk_ratio": 0.05, "update_interval": 4, "overlap_step": True},
    },
}


@pytest.fixture
def zftune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr("zftune.integrations.deepspeed.asking.Asker", lambda: contextlib.nullcontext(ask))

    def run(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["zftune", "check", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


def written(folder: Path, config: Any, name: str = "ds_config.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(config))
    return path


def test_nothing_found_is_0(zftune: Run, tmp_path: Path) -> None:
    code, out, err = zftune(written(tmp_path, safe("zero2-offload")))
    assert (code, err) == (0, "")
    assert "No fault found." in out


def test_json(zftune: Run, tmp_path: Path) -> None:
    code, out, err = zftune(written(tmp_path, BAD), "--json", "-", "--backend", "deepspeed")
    found = json.loads(out)
    assert (code, found["schema"], found["ok"], found["backend"]) == (1, "zftune.check/1", False, "deepspeed")
    assert "full_warm_up_rounds" in err  # the screen's part
    (warm_up,) = (one for one in found["findings"] if one["rule"] == "overlap-without-warm-up")
    path = "zero_optimization.zenflow.full_warm_up_rounds"
    assert (warm_up["path"], warm_up["given"], warm_up["severity"]) == (path, False, "wrong")
    assert warm_up["changes"] == [{"path": path, "remove": False, "value": 4}]
    assert warm_up["backends"] == ["deepspeed"]
    assert found["fixed"] is None
    assert str(tmp_path) not in out


def test_every_finding_is_json(tmp_path: Path) -> None:
    for case in CASES:
        json.dumps(check(case.config, backend=None, version=case.version).document("0"), allow_nan=False)


def test_fix_writes_another_file(zftune: Run, tmp_path: Path) -> None:
    bad, good = written(tmp_path, BAD), tmp_path / "good.json"
    code, out, _ = zftune(bad, "--fix", "-o", good, "--json", tmp_path / "found.json")
    assert code == 0
    assert json.loads(bad.read_text()) == BAD
    assert "changed in" in out
    assert "full_warm_up_rounds = 4" in out
    assert zftune(good)[0] == 0
    assert json.loads((tmp_path / "found.json").read_text())["fixed"]["ok"] is True


def test_fix_overwrites_what_is_named(zftune: Run, tmp_path: Path) -> None:
    bad = written(tmp_path, BAD)
    assert zftune(bad, "--fix", "-o", bad)[0] == 0
    assert json.loads(bad.read_text())["zero_optimization"]["zenflow"]["full_warm_up_rounds"] == 4


def test_fix_says_what_it_cannot_mend(zftune: Run, tmp_path: Path) -> None:
    bad = written(tmp_path, {**BAD, "bf16": {"enabled": True}})
    code, out, _ = zftune(bad, "--fix", "-o", tmp_path / "out.json", "--backend", "deepspeed")
    assert code == 1
    assert "Left as it is, since what is right is not for zftune to say" in out
    assert "bf16.enabled = true" in out.partition("Left as it is")[2]


SLOW = (
    '{"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},\r\n'
    ' "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": false}}}\r\n'
)


def test_fix_with_nothing_to_mend_writes_the_same_text(zftune: Run, tmp_path: Path) -> None:
    slow, other = tmp_path / "slow.json", tmp_path / "other.json"
    slow.write_bytes(SLOW.encode())
    code, out, _ = zftune(slow, "--fix", "-o", other)
    assert code == 0
    assert "not pinned stop the GPU" in out  # it was found
    assert "nothing to change, the same text is written" in out
    assert "changed in" not in out
    assert other.read_bytes() == SLOW.encode()


def test_fix_with_nothing_to_mend_leaves_its_own_file_alone(zftune: Run, tmp_path: Path) -> None:
    slow = tmp_path / "slow.json"
    slow.write_bytes(SLOW.encode())
    before = slow.stat()
    code, out, _ = zftune(slow, "--fix", "-o", slow)
    assert code == 0
    assert "nothing to change, the file stays as it is" in out
    assert (slow.read_bytes(), slow.stat().st_ino) == (SLOW.encode(), before.st_ino)


def test_fix_writes_plain_json_where_that_is_all(zftune: Run, tmp_path: Path) -> None:
    pytest.importorskip("hjson", reason="comes with DeepSpeed")
    file = tmp_path / "commented.json"
    file.write_text("// a comment\n" + json.dumps(safe("zero2-offload")))
    code, out, _ = zftune(file, "--fix", "-o", file)
    assert code == 0
    assert "written as plain JSON" in out
    assert json.loads(file.read_text()) == safe("zero2-offload")


@pytest.mark.parametrize(
    ("preset", "sentence"), [("bset", "preset 'bset' is not in the store"), ("./nowhere.json", "nowhere.json")]
)
def test_a_preset_that_is_not_there_is_named(
    zftune: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str, sentence: str
) -> None:
    monkeypatch.setenv("ZFTUNE_DB", str(tmp_path / "z.db"))
    file = written(tmp_path, {**safe("zero2-offload"), "zftune": {"preset": preset}})
    code, out, _ = zftune(file, "--json", tmp_path / "found.json")
    assert code == 1
    (finding,) = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert (finding["rule"], finding["path"], finding["value"]) == ("zftune-preset", "zftune.preset", preset)
    assert sentence in finding["reason"]
    assert '"best"' in finding["safe"]
    assert finding["backends"] == ["deepspeed", "zenflow"]
    code, out, _ = zftune(file, "--fix", "-o", tmp_path / "fixed.json")
    assert code == 1
    assert "Left as it is, since what is right is not for zftune to say" in out


def test_a_preset_that_is_there_is_no_fault(zftune: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZFTUNE_DB", str(tmp_path / "z.db"))
    assert zftune(written(tmp_path, {**safe("zero2-offload"), "zftune": {"preset": "best"}}))[0] == 0
    assert not (tmp_path / "z.db").exists()  # nothing to look up
    with open_store() as store:
        store.save_preset(replace(PRESET, name="mine"))
    assert zftune(written(tmp_path, {**safe("zero2-offload"), "zftune": {"preset": "mine"}}))[0] == 0
    code, out, _ = zftune(written(tmp_path, {**safe("zero2-offload"), "zftune": {"preset": "mnie"}}))
    assert code == 1
    assert "there are mine" in " ".join(out.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ("none.json",),
        ("ds_config.json", "--fix"),
        ("ds_config.json", "-o", "x.json"),
        ("ds_config.json", "--fix", "-o", "nowhere/x.json"),
        ("ds_config.json", "--fix", "-o", "-"),
        ("ds_config.json", "--fix", "-o", "x.json", "--json", "x.json"),
        ("ds_config.json", "--backend", "fsdp"),
        ("broken.json",),
        ("list.json",),
    ],
)
def test_bad_input_is_a_sentence_and_2(
    zftune: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, BAD)
    written(tmp_path, [], "list.json")
    (tmp_path / "broken.json").write_text("{]")
    before = sorted(tmp_path.iterdir())
    code, out, err = zftune(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("zftune: ")
    assert err.count("\n") == 1
    assert re.search("must be|allowed|give|needs|there is no", err)
    assert sorted(tmp_path.iterdir()) == before
    assert json.loads((tmp_path / "ds_config.json").read_text()) == BAD


@pytest.mark.parametrize("width", [80, 200])
def test_lines_fit(width: int) -> None:
    for case in CASES:
        stream = io.StringIO()
        Console(file=stream, width=width).print(render(check(case.config, backend=None, version=case.version)))
        assert max(len(line) for line in stream.getvalue().splitlines()) <= min(width, 110)


def test_settings_are_shown_as_they_are() -> None:
    config = {"zero_optimization": {"stage": 2, "[red]\x1b[31mx": 1}}
    stream = io.StringIO()
    Console(file=stream, width=80).print(render(check(config, backend=None, version=None, ask=ask)))
    assert "zero_optimization.[red]?[31mx = 1" in stream.getvalue()
    assert "DeepSpeed is not installed" in stream.getvalue()


def test_without_deepspeed_what_is_known_is_checked(
    zftune: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("zftune.telemetry.fingerprint"), "installed", lambda _: None)
    code, out, _ = zftune(written(tmp_path, BAD))
    assert (code, out.count("DeepSpeed is not installed: only what zftune")) == (1, 1)
    assert "safe: zero_optimization.zenflow.full_warm_up_rounds = 4" in " ".join(out.split())


def test_a_misspelt_setting_is_not_set_to_something_else(zftune: Run, tmp_path: Path) -> None:
    fixed = tmp_path / "fixed.json"
    zenflow = {"topk_ratoi": 0.1, "update_interval": 4}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_cliping": 1.0,
        "zero_optimization": {"stage": 2, "zenflow": zenflow, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    out = zftune(written(tmp_path, config), "--fix", "-o", fixed)[1]
    assert "did you mean gradient_clipping" in out
    assert "gradient_clipping" not in json.loads(fixed.read_text())


def test_the_last_line_knows_of_what_crashes(zftune: Run, tmp_path: Path) -> None:
    config = {**safe("zero2-offload"), "train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}
    out = zftune(written(tmp_path, config))[1]
    assert "Under zftune run it crashes as above; once that is mended it" in " ".join(out.split())
