"""`zftune presets`, as it is called."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from tests.support.zftune.store import rows as store_rows
from tests.support.zftune.store.examples import HARDWARE, KEY, KNOBS, MODEL, PRESET, measurement, other
from tests.unit.zftune.store.test_apply import DS_CONFIG
from zftune.cli.main import _Commands
from zftune.cli.presets import presets as commands
from zftune.store import open_store
from zftune.store.opening import backups
from zftune.store.preset_file import document_of
from zftune.store.store import Store
from zftune.store.types import Preset, TrialState
from zftune.telemetry.fingerprint import hardware, hw_id

HERE = hw_id(hardware())

app = typer.Typer(cls=_Commands)
app.add_typer(commands)


@app.command()
def _another() -> None:
    """A typer of one group alone would be that group."""


@pytest.fixture(autouse=True)
def database(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZFTUNE_DB", str(path))
    monkeypatch.setenv("COLUMNS", "200")
    return path


def call(*arguments: object, code: int = 0, **more: Any) -> Result:
    result = CliRunner().invoke(app, ["presets", *map(str, arguments)], **more)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def fails(*arguments: object, code: int = 2, **more: Any) -> str:
    result = call(*arguments, code=code, **more)
    sentence = result.stderr.splitlines()[-1]
    assert sentence.startswith("zftune: ")
    return sentence.removeprefix("zftune: ")


def saved(*presets: Preset) -> list[str]:
    with open_store() as store:
        return [store.save_preset(preset).name for preset in presets]


def local(**more: Any) -> Preset:
    return replace(other(hw_id=HERE), **more)


def upstreams() -> Preset:
    """One of stock DeepSpeed's, measured on this machine."""
    preset = local()
    return replace(preset, key=replace(preset.key, backend="deepspeed"))


def ds_config(folder: Path, **more: Any) -> Path:
    path = folder / "ds_config.json"
    path.write_text(json.dumps({**DS_CONFIG, **more}))
    return path


def test_an_empty_store() -> None:
    assert "There are no presets yet." in call("list").output
    assert fails("show", "mine") == (
        "preset 'mine' is not in the store, which has no presets yet: `zftune run --online` makes one where it finds "
        "faster settings"
    )


def test_list_and_show(tmp_path: Path) -> None:
    saved(replace(PRESET, name="theirs", imported=True), local(name="mine"))
    shown = call("list", "--json", tmp_path / "list.json").output
    assert "NVIDIA A100-SXM4-40GB (here)" in shown
    assert "provisional (imported)" in shown
    listed = json.loads((tmp_path / "list.json").read_text())
    assert {(one["name"], one["provisional"]) for one in listed["presets"]} == {("mine", False), ("theirs", True)}
    one = call("show", "theirs", "--json", "-")
    assert json.loads(one.stdout)["knobs"] == KNOBS
    assert "2,000 ms, ZeRO-Offload" in one.stderr
    assert "60% ± 2.0%" in one.stderr


def test_markup_in_a_name_of_a_model_is_text() -> None:
    saved(replace(PRESET, name="theirs", model=replace(MODEL, name="[red]Llama [link=x]")))
    assert "[red]Llama [link=x]" in call("show", "theirs").output
    assert "[red]Llama [link=x]" in call("list").output


def test_an_unknown_name_gives_the_near_ones() -> None:
    saved(*(replace(PRESET, name=name) for name in ("llama-a100", "llama-h100", "qwen-l40s", "opt")))
    sentence = fails("show", "llama-a10")
    assert sentence == "preset 'llama-a10' is not in the store; there are llama-a100, llama-h100"
    assert "those that `zftune presets list` shows" in fails("rm", "zzzzz", "--yes")


def test_diff(tmp_path: Path) -> None:
    (name,) = saved(replace(PRESET, name="mine"))
    file = tmp_path / "other.json"
    file.write_text(json.dumps(document_of(replace(PRESET, name="other", knobs={**KNOBS, "update_interval": 8}))))
    shown = call("diff", name, file, "--json", tmp_path / "diff.json")
    rows = json.loads((tmp_path / "diff.json").read_text())["differences"]
    assert {"name": "update_interval", "a": "4", "b": "8"} in rows
    assert "update_interval" in shown.output
    assert "They do not differ." in call("diff", name, name).output


def test_export_replaces_no_file_unasked(tmp_path: Path) -> None:
    saved(replace(PRESET, name="mine"))
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    assert fails("export", "mine", "-o", file).startswith(f"--output '{file}' exists already: give a new file, or")
    assert file.read_text() == "mine"
    call("export", "mine", "-o", file, "--force")
    assert json.loads(file.read_text())["name"] == "mine"
    call("export", "mine", "-o", "/dev/null")


def test_export_and_import(tmp_path: Path, path: Path) -> None:
    saved(replace(PRESET, name="mine"))
    file = tmp_path / "mine.json"
    assert call("export", "mine", "-o", file).stderr == f"zftune: wrote '{file}', for zftune presets import\n"
    assert json.loads(call("export", "mine").stdout) == json.loads(file.read_text())
    assert "It is there already, as mine." in call("import", file).output
    call("rm", "mine", "--yes")
    assert "Kept as mine, provisional." in call("import", file).output
    with open_store() as store:
        assert store.presets()[0].imported
    file.write_text(file.read_text().replace('"topk_ratio": 0.1', '"topk_ratio": 9'))
    assert "knobs.topk_ratio" in fails("import", file)


def searched(store: Store) -> None:
    """A run with a trial in every state, and one of another machine."""
    run = store.begin_run(KEY, MODEL, HARDWARE, knobs=KNOBS)
    for number, state in enumerate(TrialState):
        varied = {"topk_ratio": number / 10, "update_interval": 2 + number, "host_threads": [None, 2][number % 2]}
        knobs = {**KNOBS, **varied}
        if state is TrialState.REJECTED:
            limits: Any = {"predicted_step_ms": 9.0, "constraint": 2.0, "rejected": "too large"}
            store_rows.add_trial(store, run, knobs, source="search", **limits)
            continue
        trial = store_rows.add_trial(store, run, knobs, source="search")
        if state is TrialState.MEASURED:
            for step_ms, void in ((700.0, None), (720.0, None), (9000.0, "throttled")):
                store_rows.add_measurement(
                    store, run, trial.trial_id, measurement(step_ms, void_reason=void), state=state
                )
        elif state is TrialState.IN_FLIGHT:
            store_rows.mark_in_flight(store, run, trial.trial_id)
        elif state is not TrialState.PLANNED:
            store_rows.add_measurement(
                store, run, trial.trial_id, measurement(900.0, void_reason="a reason"), state=state
            )
    elsewhere = replace(KEY, hw_id="1" * 16)
    store.begin_run(elsewhere, MODEL, replace(HARDWARE, hw_id="1" * 16), knobs=KNOBS)


def test_studies_for_the_dashboard(tmp_path: Path) -> None:
    import optuna

    with open_store() as store:
        store.save_preset(replace(PRESET, name="mine"))
        searched(store)
    file = tmp_path / "studies.db"
    assert "1 study written" in call("export", "mine", "--optuna", file).stderr
    assert "2 studies written" in call("export", "--optuna", tmp_path / "all.db").stderr
    assert "exists already; give a new file" in fails("export", "--optuna", file)
    assert "NAME is missing" in fails("export")

    (name,) = optuna.get_all_study_names(f"sqlite:///{file}")
    study = optuna.load_study(study_name=name, storage=f"sqlite:///{file}")
    assert study.user_attrs["value"] == "step_ms"
    assert study.best_trial.value == 710.0
    found = {trial.user_attrs["state"]: trial for trial in study.trials}
    assert {state: trial.state.name for state, trial in found.items()} == {
        "planned": "WAITING",
        "in_flight": "RUNNING",
        "measured": "COMPLETE",
        "rejected": "COMPLETE",
        "crashed": "FAIL",
        "void": "FAIL",
    }
    assert found["rejected"].constraints == {"planner": 2.0}
    assert found["rejected"].value == 9.0
    assert found["measured"].params == {"topk_ratio": 0.2, "update_interval": 4, "host_threads": None}


def test_apply_writes_a_ds_config(tmp_path: Path) -> None:
    saved(local(name="mine"))
    out, told = tmp_path / "tuned.json", tmp_path / "told.json"
    result = call("apply", ds_config(tmp_path), "-o", out, "--preset", "mine", "--model", MODEL.name, "--json", told)
    tuned = json.loads(out.read_text())
    assert tuned["zero_optimization"]["zenflow"]["update_interval"] == 4
    document = json.loads(told.read_text())
    assert (document["preset"], document["provisional"], document["ds_config"]) == ("mine", False, tuned)
    assert "note: upstream does not clip" in result.stderr
    assert "does not tell the sequence (--sequence), the number of GPUs" in result.stderr
    printed = call("apply", ds_config(tmp_path), "-o", "-", "--preset", "best")
    assert json.loads(printed.stdout) == tuned


@pytest.mark.parametrize(
    ("preset", "config", "options", "part"),
    [
        (other(), {}, (), f"hardware {KEY.hw_id} instead of {HERE}"),
        (local(), {}, ("--model", "another"), f"model {KEY.model_id} instead of another"),
        (local(), {}, ("--sequence", 4096), "sequence up to 1024 instead of 4096"),
        (local(), {"train_micro_batch_size_per_gpu": 2}, (), "micro_batch 4 instead of 2"),
        (local(), {"bf16": {"enabled": False}}, (), "dtype bfloat16 instead of float32"),
        (upstreams(), {"zero_optimization": {"stage": 1}}, (), "stage 2 instead of 1"),
    ],
)
def test_a_preset_for_something_else_is_refused_or_provisional(
    tmp_path: Path, preset: Preset, config: dict[str, Any], options: tuple[Any, ...], part: str
) -> None:
    saved(replace(preset, name="mine"))
    out = tmp_path / "tuned.json"
    arguments = ("apply", ds_config(tmp_path, **config), "-o", out, "--preset", "mine", *options)
    sentence = fails(*arguments)
    assert part in sentence
    assert "--provisional takes it" in sentence
    assert not out.exists()
    assert (
        f"note: provisional: the preset was proven for something else ({part})"
        in call(*arguments, "--provisional").stderr
    )
    assert out.exists()


def test_best_is_of_this_hardware_and_model(tmp_path: Path) -> None:
    def best(*options: object) -> tuple[object, ...]:
        return ("apply", ds_config(tmp_path), "-o", tmp_path / "tuned.json", "--preset", "best", *options)

    assert fails(*best()) == (
        "--preset 'best': the store has no presets yet: `zftune run --online` makes one where it finds faster "
        "settings, or give a preset's file"
    )
    saved(PRESET)
    assert "there is none for this hardware: give a name or a file; `zftune run --online` makes one" in fails(*best())
    elsewhere = local(name="opt", model=replace(MODEL, model_id="2" * 16, name="opt"))
    saved(local(name="mine"), replace(elsewhere, key=replace(elsewhere.key, model_id="2" * 16)))
    assert "--preset 'best' needs --model: Llama-2-7b-hf or opt" in fails(*best())
    call(*best("--model", "opt", "--json", tmp_path / "told.json"))
    assert json.loads((tmp_path / "told.json").read_text())["preset"] == "opt"
    assert "there is none for this hardware and model 'x'" in fails(*best("--model", "x"))


@pytest.mark.parametrize("value", ["opt", "./no-such.json", "../../etc/passwd", "\x1b[2J"])
def test_an_unknown_preset_writes_nothing(tmp_path: Path, value: str) -> None:
    saved(local(name="mine"))
    out = tmp_path / "tuned.json"
    fails("apply", ds_config(tmp_path), "-o", out, "--preset", value)
    assert not out.exists()


def test_paths_are_checked_first(tmp_path: Path) -> None:
    saved(local(name="mine"))
    config = ds_config(tmp_path)
    assert "--output" in fails("apply", config, "-o", "/no/such/folder/x", "--preset", "mine")
    assert "cannot be read" in fails("apply", tmp_path / "none.json", "-o", tmp_path / "x", "--preset", "mine")
    assert "--json is '-'" in fails("apply", config, "-o", "-", "--preset", "mine", "--json", "-")
    assert "--json" in fails("list", "--json", "/no/such/folder/x")


def test_rm_and_restore(path: Path, tmp_path: Path) -> None:
    saved(replace(PRESET, name="mine"))
    assert "--yes is needed" in fails("rm", "mine")
    call("rm", "mine", "--yes")
    assert "There are no presets yet." in call("list").output
    assert "--yes is needed" in fails("restore")
    listed = call("restore", "--list", "--json", tmp_path / "list.json").output
    names = json.loads((tmp_path / "list.json").read_text())["backups"]
    assert names == [backup.name for backup in backups(path)]
    assert f"1  {names[0]}" in listed
    assert "there is no backup '9': --list shows" in fails("restore", "9", "--yes")
    assert "--json needs --list" in fails("restore", "--yes", "--json", tmp_path / "list.json")
    assert f"{names[0]} is back" in call("restore", "--yes").output
    assert "mine" in call("list").output
