"""`zftune run` before anything starts: what a dry run tells, and how quiet a run is to be."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.tiers import combinations
from tests.zftune.integrations.ds_worker import make_model
from tests.zftune.store.examples import KNOBS, PRESET
from zftune.agent import show_lines
from zftune.cli import run as module
from zftune.cli.main import main
from zftune.errors import BadInputError
from zftune.integrations.deepspeed import backend
from zftune.integrations.deepspeed.section import Section
from zftune.profile.command import run as profiling
from zftune.store import open_store
from zftune.store.types import Backend
from zftune.telemetry.fingerprint import hardware, hw_id
from zftune.variables import RUN

DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "zenflow": {"topk_ratio": 0.05, "update_interval": 4, "overlap_step": True},
    },
}


@pytest.fixture(autouse=True)
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The environments of what was started; its arguments are the last one's."""
    found: list[dict[str, str]] = []

    def start(_program: str, _command: list[str], environment: dict[str, str]) -> None:
        found.append(environment)
        raise SystemExit(0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZFTUNE_DB", str(tmp_path / "zftune.db"))
    monkeypatch.setattr(os, "execvpe", start)
    monkeypatch.setattr(module, "_require_daemon", lambda _: None)
    (tmp_path / "ds.json").write_text(json.dumps(DS_CONFIG))
    (tmp_path / "train.py").touch()
    for program in ("deepspeed", "accelerate", "torchrun"):
        (tmp_path / program).touch(mode=0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return found


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command(context_settings={"allow_interspersed_args": False})(module.run)
    return CliRunner().invoke(app, arguments)


def test_a_dry_run_tells_what_would_train_and_starts_nothing(started: list[Any]) -> None:
    done = invoke("--dry-run", "--online", "--", "deepspeed", "train.py", "--deepspeed", "ds.json")
    assert done.exit_code == 0, done.output
    assert started == []
    lines = done.output.splitlines()
    assert lines[0] == "Would run: deepspeed train.py --deepspeed ds.json"
    assert lines[1] == "ds.json: trains on zenflow, quality published."
    assert lines[2].startswith("  settings of the ds_config: topk_ratio 0.05, update_interval 4, ")
    assert lines[3] == "  a preset for exactly this model and hardware in $ZFTUNE_DB would come before them"
    assert lines[4].startswith("Tuned while it trains, by the daemon at ")
    assert lines[-1] == "Nothing was started."


@pytest.mark.parametrize(
    ("options", "script", "told"),
    [
        (["--quality", "exact"], "import torch", "there --quality does nothing without --online"),
        (["--quality", "exact", "--preset", "best"], "import torch", "there --preset and --quality do nothing"),
        (["--quality", "exact", "--online"], "import torch", None),
        ([], "import torch", None),
        (["--quality", "exact"], "import torch, deepspeed", None),
        (["--quality", "exact"], "import torch, of_its_own", None),
    ],
)
def test_options_that_a_loop_of_its_own_does_not_follow_are_named_before_it_trains(
    started: list[Any], tmp_path: Path, options: list[str], script: str, told: str | None
) -> None:
    (tmp_path / "train.py").write_text(script)
    done = invoke(*options, "--", "python", "train.py")
    assert len(started) == 1
    assert ("trains without DeepSpeed" in done.output) == (told is not None)
    assert (told or "") in done.output


@pytest.mark.parametrize(
    ("options", "variable", "where"),
    [
        ([], "", "in its own process; "),
        ([], "daemon", "by the daemon at "),
        (["--online"], "", "by the daemon at "),
    ],
)
def test_a_dry_run_tells_who_tunes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], variable: str, where: str
) -> None:
    (tmp_path / "own.json").write_text(json.dumps({**DS_CONFIG, "zftune": {"online": True}}))
    monkeypatch.setenv("ZFTUNE_ONLINE", variable)
    done = invoke("--dry-run", *options, "--", "deepspeed", "train.py", "--deepspeed", "own.json")
    assert f"Tuned while it trains, {where}" in done.output


def test_a_dry_run_has_the_settings_of_the_quality(started: list[Any]) -> None:
    done = invoke("--dry-run", "--quality", "exact", "--", "deepspeed", "train.py", "--deepspeed", "ds.json")
    told = next(line for line in done.output.splitlines() if "settings of the ds_config" in line)
    assert told.startswith("  settings of the ds_config, with what quality exact needs: ")
    assert "update_interval 1, " in told
    assert "overlap_step off" in told
    assert started == []


def test_a_dry_run_tells_how_late_a_ds_config_lets_updates_come(started: list[Any], tmp_path: Path) -> None:
    zenflow = {"topk_ratio": 0.05, "update_interval": 4, "overlap_step": True, "apply_lag": 2}
    zero = {**DS_CONFIG["zero_optimization"], "zenflow": zenflow}
    (tmp_path / "lag.json").write_text(json.dumps({**DS_CONFIG, "zero_optimization": zero}))
    done = invoke("--dry-run", "--", "deepspeed", "train.py", "--deepspeed", "lag.json")
    assert "topk_ratio 0.05, update_interval 4, apply_lag 2, select_interval" in done.output, done.output
    assert started == []


@pytest.mark.parametrize(("quality", "steps"), [("published", 4), ("loose", 8)])
def test_a_dry_run_knows_where_late_settings_come_from_that_no_ds_config_has(
    started: list[Any], tmp_path: Path, quality: str, steps: int
) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "plain.json").write_text(json.dumps({**DS_CONFIG, "zero_optimization": zero}))
    done = invoke("--dry-run", "--quality", quality, "--", "deepspeed", "train.py", "--deepspeed", "plain.json")
    told = next(line for line in done.output.splitlines() if line.startswith("  settings"))
    assert told.startswith("  settings: the planner's, after ")
    assert f"update_interval {steps}, apply_lag {steps}" in told
    assert "overlap_step off" not in told
    assert started == []


@pytest.mark.parametrize(
    ("offload", "unknown"),
    [({"device": "nvme", "nvme_path": "/nvme"}, False), ({"device": "cpu", "ratio": "auto"}, True)],
)
def test_a_dry_run_calls_unknown_only_what_somebody_fills_in(
    started: list[Any], tmp_path: Path, offload: dict[str, Any], unknown: bool
) -> None:
    (tmp_path / "d.json").write_text(
        json.dumps({**DS_CONFIG, "zero_optimization": {"stage": 3, "offload_optimizer": offload}})
    )
    done = invoke("--dry-run", "--backend", "deepspeed", "--", "python", "train.py", "--deepspeed", "d.json")
    told = next(line for line in done.output.splitlines() if line.startswith("  settings"))
    assert told.startswith("  settings: those of the ds_config, not all of which are known") == unknown
    assert (told == "  settings: those of the ds_config") != unknown
    assert started == []


def test_a_dry_run_has_the_presets_knobs(started: list[Any]) -> None:
    with open_store() as store:
        name = store.save_preset(PRESET).name
    done = invoke("--dry-run", "--preset", name, "--", "deepspeed", "train.py", "--deepspeed", "ds.json")
    assert f"  settings of preset {name}, which come before them, provisional: " in done.output
    assert "it was proven for something else (hardware 8899aabbccddeeff instead of " in done.output
    assert "): topk_ratio 0.1, " in done.output
    assert started == []
    with open_store() as store:
        here = replace(PRESET.hardware, hw_id=hw_id(hardware()))
        name = store.save_preset(replace(PRESET, key=replace(PRESET.key, hw_id=here.hw_id), hardware=here)).name
    done = invoke("--dry-run", "--preset", name, "--", "deepspeed", "train.py", "--deepspeed", "ds.json")
    assert f"  settings of preset {name}, which come before them: topk_ratio 0.1, " in done.output


_NO_OVERLAP: dict[str, Any] = {"topk_ratio": 0.05, "update_interval": 4}
_SECTIONS: tuple[dict[str, Any] | None, ...] = (
    None,
    {},
    _NO_OVERLAP,
    {**_NO_OVERLAP, "overlap_step": False},
    {**_NO_OVERLAP, "overlap_step": True},
)


def _told(lines: list[str]) -> tuple[float, int, bool]:
    """What of topk_ratio, update_interval and overlap_step the settings of a dry run come to on a plain CPU."""
    found: dict[str, str] = {}
    for line in lines:
        if line.startswith("  settings"):
            found |= dict(re.findall(r"(topk_ratio|update_interval|apply_lag|overlap_step) ([\w.]+)", line))
    overlaps = "apply_lag" in found or found["overlap_step"] == "on"
    return float(found["topk_ratio"]), int(found["update_interval"]), overlaps


@pytest.mark.parametrize(
    ("zenflow", "quality", "tuned", "with_preset"),
    combinations(
        zenflow=_SECTIONS,
        quality=[None, "exact", "published", "loose"],
        tuned=["", "--online", "--schedule"],
        with_preset=[False, True],
    ),
)
def test_a_dry_run_has_the_settings_that_the_engine_begins_with(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started: list[Any],
    zenflow: Any,
    quality: Any,
    tuned: str,
    with_preset: bool,
) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {**DS_CONFIG, "zero_optimization": zero if zenflow is None else {**zero, "zenflow": zenflow}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    asked: dict[str, Any] = {"quality": quality} if quality else {}
    if with_preset:
        waits = {"update_interval": 1, "overlap_step": False} if quality in (None, "exact") else {"update_interval": 3}
        with open_store() as store:
            asked["preset"] = store.save_preset(replace(PRESET, knobs={**KNOBS, "topk_ratio": 0.2, **waits})).name
    options = [part for name, value in asked.items() for part in (f"--{name}", value)]
    if tuned == "--online":
        options.append(tuned)
    elif tuned:
        monkeypatch.setattr("zftune.agent.schedule.read_schedule", lambda _: None)
        options += [tuned, "schedule.json"]
    done = invoke("--dry-run", *options, "--", "torchrun", "train.py", "--deepspeed", "ds.json")
    assert done.exit_code == 0, done.output
    replayed = tuned == "--schedule"
    assert ("late updates included: those of the schedule" in done.output) == replayed
    assert ("ds.json: trains on zenflow.\n" in done.output) == replayed
    monkeypatch.setenv("ZFTUNE_ONLINE", "nobody" if tuned == "--schedule" else "")
    plan = backend.plan(config, Section(**asked, online=tuned == "--online"))
    begun = backend.Making(plan, backend.recipe_of(config, None), None, make_model("plain"), None)._chosen()
    assert _told(done.output.splitlines()) == (begun.topk_ratio, begun.update_interval, begun.overlap_step)
    assert started == []


def test_a_dry_run_of_a_command_without_a_ds_config_says_what_it_cannot_know(started: list[Any]) -> None:
    done = invoke("--dry-run", "--", "python", "train.py")
    assert "It names no ds_config" in done.output
    assert started == []


def test_a_dry_run_tells_what_a_plain_python_lacks_under_deepspeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    command, told = ("--dry-run", "--", "python", "train.py"), "It ends without mpi4py, unless what train.py imports"
    assert told not in invoke(*command).output  # not one of DeepSpeed's
    (tmp_path / "train.py").write_text("import torch\nfrom deepspeed import initialize\n")
    done = invoke(*command)
    assert (done.exit_code, told in done.output) == (0, True)
    assert "sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: it starts DeepSpeed, and they" in done.output
    examples = Path(__file__).resolve().parents[2] / "examples"
    for example in ("deepspeed_zero_offload.py", "deepspeed_zenflow.py"):  # which set them
        assert "mpi4py" not in invoke("--dry-run", "--", "python", str(examples / example)).output
    for launched in ("deepspeed train.py", "python -m torch.distributed.run train.py"):
        assert told not in invoke("--dry-run", "--", *launched.split()).output
    monkeypatch.setattr(module, "find_spec", lambda name: name)  # mpi4py is there
    assert told not in invoke(*command).output


def test_a_dry_run_is_silent_where_a_rank_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("import deepspeed\n")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    assert "mpi4py" not in invoke("--dry-run", "--", "python", "train.py").output
    monkeypatch.delenv("MASTER_PORT")
    assert "and that is set neither here nor in it" in invoke("--dry-run", "--", "python", "train.py").output
    (tmp_path / "train.py").write_text("import deepspeed, torch\ntorch.distributed.init_process_group('gloo')\n")
    assert "mpi4py" not in invoke("--dry-run", "--", "python", "train.py").output


@pytest.mark.parametrize(
    ("command", "size", "wrong"),
    [
        ("python train.py", "8", 'train_micro_batch_size_per_gpu "8", unless the script changes it: it must be an int'),
        ("python train.py", 8, ""),
        ("torchrun --nproc_per_node=2 train.py", 8, "train_batch_size 24, unless the script changes it: it must be"),
        ("torchrun --nproc-per-node 3 train.py", 8, ""),
        ("torchrun --nnodes 3 --nproc_per_node 1 train.py", 8, ""),
        ("deepspeed --num_gpus 2 train.py", 8, "train_batch_size 24, unless the script changes it: it must be"),
        ("deepspeed --num_nodes 2 --num_gpus 2 train.py", 8, ""),
        ("deepspeed -H hosts --num_gpus 2 train.py", 8, ""),
        ("python train.py --num_gpus 2", 8, ""),  # the script's own option
    ],
)
def test_a_dry_run_tells_batch_sizes_that_deepspeed_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, size: Any, wrong: str
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    sizes = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": 1}
    (tmp_path / "sized.json").write_text(json.dumps({**DS_CONFIG, **sizes}))
    done = invoke("--dry-run", "--", *command.split(), "--deepspeed_config", "sized.json")
    assert done.exit_code == 0, done.output
    assert (f"DeepSpeed refuses {wrong}" in done.output) if wrong else ("DeepSpeed refuses" not in done.output)


def test_a_lock_with_which_the_training_may_hang_is_told_before_it_starts(
    tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "lock").touch()
    told = 'a training that needs it hangs; remove it: rm "$TORCH_EXTENSIONS_DIR"/cpu_adam/lock'
    trains = ("--", "python", "train.py", "--deepspeed", "ds.json")
    assert told in invoke(*trains).stderr
    assert len(started) == 1
    assert told not in invoke("--", "python", "train.py").stderr  # not one of DeepSpeed's
    (tmp_path / "own.py").write_text("import deepspeed\ndeepspeed.initialize(config=made())\n")
    assert told in invoke("--", "python", "own.py").stderr
    monkeypatch.setenv("RANK", "1")
    assert told not in invoke(*trains).stderr


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("nosuch train.py --deepspeed ds.json", "CMD 'nosuch': there is no such program"),
        ("deepspeed nosuch.py --deepspeed ds.json", "CMD 'deepspeed': there is no script 'nosuch.py'"),
        ("deepspeed train.py --deepspeed --deepspeed_config no.json", "--deepspeed_config 'no.json': there is no such"),
        ("deepspeed train.py --deepspeed=no.json", "--deepspeed 'no.json': there is no such file"),
        ("accelerate launch --config_file no.yaml train.py", "--config_file 'no.yaml': there is no such file"),
    ],
)
def test_a_dry_run_refuses_what_is_not_there(command: str, named: str) -> None:
    done = invoke("--dry-run", "--", *command.split())
    assert isinstance(done.exception, BadInputError)
    assert str(done.exception).startswith(named)


_LOOP = "import deepspeed\nengine, *_ = deepspeed.initialize(config='ds.json')\n"


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("field", ["train_batch_size", "lr"])
def test_auto_that_nobody_fills_in_never_starts(tmp_path: Path, started: list[Any], field: str, dry: bool) -> None:
    """In the words of `zftune check --script`; who may fill it in starts."""
    config: dict[str, Any] = {**DS_CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    (config["optimizer"]["params"] if field == "lr" else config)[field] = "auto"
    (tmp_path / "ds.json").write_text(json.dumps(config))
    (tmp_path / "train.py").write_text(_LOOP)
    command = (*(["--dry-run"] if dry else []), "--", "python", "train.py", "--deepspeed", "ds.json")
    done = invoke(*command)
    assert isinstance(done.exception, BadInputError)
    where = "optimizer.params.lr" if field == "lr" else field
    told = f"'ds.json': {where} is \"auto\"; it must be a value of your own: only Hugging Face's"
    assert str(done.exception).startswith(told)
    assert "train.py uses neither: DeepSpeed is given the word itself" in str(done.exception)
    assert started == []
    (tmp_path / "train.py").write_text(f"{_LOOP}import accelerate\n")
    assert invoke(*command).exit_code == 0


_PASSES = "import deepspeed\nfrom pathlib import Path\n"


@pytest.mark.parametrize(
    ("script", "seen"),
    [
        ("CONFIG = Path(__file__).with_name('own.json')\ndeepspeed.initialize(config=str(CONFIG))\n", True),
        ("deepspeed.initialize(model, config='own.json')\n", True),
        ("if __name__ == '__main__':\n    deepspeed.initialize(config='own.json')\n", True),
        ("if args.use_deepspeed:\n    deepspeed.initialize(config='own.json')\n", False),
        ("engine = deepspeed.initialize(config='own.json') if wanted else None\n", False),
        ("config = 'own.json'\nconfig = changed(config)\ndeepspeed.initialize(config=config)\n", False),
        ("deepspeed.initialize(config=changed('own.json'))\n", False),
        ("config = 'own.json'\ndef main(config): deepspeed.initialize(config=config)\n", False),
        ("json.dump(made, file)\ndeepspeed.initialize(config='own.json')\n", False),
        ("deepspeed.initialize(config=json.load(open('own.json')))\n", False),
        ("def main():\n    args = parse()\n    deepspeed.initialize(config='own.json')\nmain()\n", True),
        ("def main():\n    deepspeed.initialize(config='own.json')\nif args.ds:\n    main()\n", False),
        (
            "def main():\n    if not args.ds:\n        return\n    deepspeed.initialize(config='own.json')\nmain()\n",
            False,
        ),
        ("if not args.ds:\n    plain()\n    sys.exit()\ndeepspeed.initialize(config='own.json')\n", False),
        ("def made(): return deepspeed.initialize(config='own.json')\n{'ds': made}.get(how, plain)()\n", False),
        ("if big: deepspeed.initialize(config='big.json')\nelse: deepspeed.initialize(config='own.json')\n", False),
        ("if __name__ == '__main__' and ds:\n    deepspeed.initialize(config='own.json')\n", False),
        ("if __name__ == '__main__':\n    plain()\nelse:\n    deepspeed.initialize(config='own.json')\n", False),
        ("def stop(): sys.exit()\nif plain: stop()\ndeepspeed.initialize(config='own.json')\n", False),
        ("def main():\n    return\n    deepspeed.initialize(config='own.json')\nmain()\n", False),
        ("if not args.ds: parser.exit()\ndeepspeed.initialize(config='own.json')\n", False),
        ("def main():\n    deepspeed.initialize(config='own.json')\nsys.exit(main())\n", True),
        ("try:\n    plain()\nexcept OSError:\n    deepspeed.initialize(config='own.json')\n", False),
    ],
)
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_ds_config_whose_path_the_script_passes_is_judged_before_it_starts(
    tmp_path: Path, started: list[Any], script: str, seen: bool, launcher: str
) -> None:
    """What the script may change is seen only when the engine starts."""
    (tmp_path / "own.json").write_text(json.dumps({**DS_CONFIG, "amp": {"enabled": True}}))
    (tmp_path / "train.py").write_text(_PASSES + script)
    done = invoke("--dry-run", "--", launcher, "train.py")
    assert isinstance(done.exception, BadInputError) == seen, done.output
    assert ("own.json': amp.enabled is True; it must be false" in str(done.exception)) == seen
    assert ("It names no ds_config" in done.output) != seen
    assert started == []


@pytest.mark.parametrize("word", ["export X=" + 300 * "x" + "; python train.py", "cat a\0b.py", "folder.py"])
def test_a_word_that_is_no_file_is_the_trainings_own_matter(tmp_path: Path, started: list[Any], word: str) -> None:
    (tmp_path / "folder.py").mkdir()
    for told in (["-c", word], ["-lc", word], ["-c", "true", word]):
        done = invoke("--dry-run", "--", "bash", *told)
        assert (done.exit_code, done.exception, started) == (0, None, [])
        assert "It names no ds_config" in done.output


def test_a_script_that_cannot_be_read_is_the_trainings_own_matter(tmp_path: Path, started: list[Any]) -> None:
    (tmp_path / "train.py").unlink()
    (tmp_path / "train.py").symlink_to("/proc/self/mem")  # which is a file that root cannot read either
    assert invoke("--dry-run", "--", "python", "train.py").exit_code == 0


@pytest.mark.parametrize("dry", [True, False])
def test_a_late_preset_never_starts_where_every_update_is_waited_for(started: list[Any], dry: bool) -> None:
    with open_store() as store:
        name = store.save_preset(PRESET).name
    command = ["--", "python", "train.py", "--deepspeed", "ds.json"]
    asked = [*(["--dry-run"] if dry else []), "--preset", name]
    done = invoke(*asked, "--quality", "exact", *command)
    assert isinstance(done.exception, BadInputError)
    assert 'under which updates come late; quality "exact" waits for every one' in str(done.exception)
    assert started == []
    assert invoke(*asked, *command).exit_code == 0  # "published", since the file has a zenflow section


_AUTO = {**DS_CONFIG["zero_optimization"]["zenflow"], "update_interval": "auto", "overlap_step": False}


@pytest.mark.parametrize("dry", [True, False])
def test_what_ends_deepspeeds_own_runtime_never_starts(tmp_path: Path, started: list[Any], dry: bool) -> None:
    """As the training itself would refuse it, seconds later; a preset may bring what works."""
    zero = {**DS_CONFIG["zero_optimization"], "zenflow": _AUTO}
    (tmp_path / "ds.json").write_text(json.dumps({**DS_CONFIG, "zero_optimization": zero}))
    command = ["--", "python", "train.py", "--deepspeed", "ds.json"]
    asked = [*(["--dry-run"] if dry else []), "--backend", "deepspeed"]
    done = invoke(*asked, *command)
    assert isinstance(done.exception, BadInputError)
    what = "'ds.json': zero_optimization.zenflow.update_interval is \"auto\", which the backend deepspeed refuses"
    assert str(done.exception).startswith(what)
    assert started == []
    with open_store() as store:
        name = store.save_preset(replace(PRESET, key=replace(PRESET.key, backend="deepspeed"))).name
    assert invoke(*asked, *command).exit_code == 0  # which may be for this model
    assert invoke(*asked, "--preset", name, *command).exit_code == 0


@pytest.mark.parametrize("backend", ["zenflow", "deepspeed"])
def test_what_deepspeed_cannot_divide_by_never_starts(tmp_path: Path, started: list[Any], backend: str) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({**DS_CONFIG, "zero_optimization": zero, "steps_per_print": 0}))
    done = invoke("--backend", backend, "--", "python", "train.py", "--deepspeed", "ds.json")
    assert isinstance(done.exception, BadInputError)
    assert "steps_per_print is 0" in str(done.exception)
    assert started == []


@pytest.mark.parametrize(("backend", "is_there"), [("zenflow", True), ("deepspeed", False)])
def test_a_dry_run_says_where_there_is_no_best_preset(backend: Backend, is_there: bool) -> None:
    command = ("--dry-run", "--preset", "best", "--", "deepspeed", "train.py", "--deepspeed", "ds.json")
    told = "  no preset for this hardware is in $ZFTUNE_DB yet (run --online makes one): it would train with these\n"
    assert told in invoke(*command).output
    with open_store() as store:
        here = replace(PRESET.hardware, hw_id=hw_id(hardware()))
        key = replace(PRESET.key, backend=backend, hw_id=here.hw_id)
        store.save_preset(replace(PRESET, key=key, hardware=here))
    assert (told not in invoke(*command).output) == is_there


def test_a_dry_run_names_the_presets_that_may_come_and_none_that_is_not_wanted(tmp_path: Path) -> None:
    end, told = ("--", "deepspeed", "train.py", "--deepspeed", "ds.json"), "would come before them"
    with open_store() as store:
        here = replace(PRESET.hardware, hw_id=hw_id(hardware()))
        name = store.save_preset(replace(PRESET, key=replace(PRESET.key, hw_id=here.hw_id), hardware=here)).name
    shown = invoke("--dry-run", *end).output
    assert f"{told} (for this hardware there are {name}; --preset none takes none)\n" in shown
    for none in (("--preset", "none"), ("--online", "--fresh")):
        shown = invoke("--dry-run", *none, *end).output
        assert "  settings of the ds_config: topk_ratio 0.05" in shown
        assert told not in shown


def test_a_dry_run_names_no_preset_of_another_quality_and_makes_no_store(tmp_path: Path) -> None:
    end, told = ("--", "deepspeed", "train.py", "--deepspeed", "ds.json"), "for this hardware there are"
    assert told not in invoke("--dry-run", *end).output
    assert not (tmp_path / "zftune.db").exists()
    with open_store() as store:
        here = replace(PRESET.hardware, hw_id=hw_id(hardware()))
        store.save_preset(replace(PRESET, key=replace(PRESET.key, hw_id=here.hw_id), hardware=here))
    assert told in invoke("--dry-run", *end).output
    assert told not in invoke("--dry-run", "--quality", "loose", *end).output


@pytest.mark.parametrize("option", ["--schedule", "--export-schedule"])
def test_deepspeeds_own_runtime_takes_no_schedule_wherever_it_is_asked_for(
    tmp_path: Path, started: list[Any], option: str
) -> None:
    (tmp_path / "s.json").write_text('{"zftune_schedule": 1, "steps": []}')
    (tmp_path / "ds.json").write_text(json.dumps({**DS_CONFIG, "zftune": {"backend": "deepspeed"}}))
    done = invoke(option, "s.json", "--", "python", "train.py", "--deepspeed", "ds.json")
    assert isinstance(done.exception, BadInputError)
    assert str(done.exception) == f"{option} 's.json' needs --backend zenflow, whose settings it holds"
    assert started == []


@pytest.mark.parametrize("launcher", ["python", "torchrun --nproc-per-node 0"])
def test_no_rank_at_all_is_not_divided_by(launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    (tmp_path / "ds.json").write_text(json.dumps({**DS_CONFIG, **sizes}))
    monkeypatch.setenv("WORLD_SIZE", "0")
    done = invoke("--dry-run", "--", *launcher.split(), "train.py", "--deepspeed", "ds.json")
    assert done.exit_code == 0, done.exception


@pytest.mark.parametrize(
    ("command", "is_refused"),
    [("env -c 0 python no.py", True), ("bash -c 'python no.py'", False), ("python -c x.py", False)],
)
def test_what_a_shell_is_told_is_no_script_and_a_number_of_another_program_ends_no_look(
    command: str, is_refused: bool
) -> None:
    done = invoke("--dry-run", "--", *shlex.split(command))
    assert isinstance(done.exception, BadInputError) == is_refused


def test_a_ds_config_that_is_not_there_is_named_before_deepspeed_ends(started: list[Any]) -> None:
    """It starts: the file may be where another machine runs it."""
    for option in ("--deepspeed_config", "--deepspeed"):
        done = invoke("--", "python", "train.py", option, "no.json")
        assert done.stderr == f"zftune: {option} 'no.json': there is no such file here\n"
    assert len(started) == 2


def test_so_does_a_profile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(profiling, "profile_command", lambda _: profiling.Outcome(None, [], 3))
    monkeypatch.setattr("sys.argv", ["zftune", "profile", "--", "python", "train.py", "--deepspeed=no.json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3
    assert capsys.readouterr().err == "zftune: --deepspeed 'no.json': there is no such file here\n"


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger("zftune")
    before = found.level, list(found.handlers), found.propagate
    yield found
    found.level, found.handlers, found.propagate = before


@pytest.mark.parametrize("quiet", [False, True])
def test_a_quiet_run_prints_warnings_alone(started: list[Any], logger: logging.Logger, quiet: bool) -> None:
    invoke("--online", *(["--quiet"] if quiet else []), "--", "python", "train.py")
    (environment,) = started
    wanted = json.loads(base64.urlsafe_b64decode(environment[RUN]))
    assert bool(wanted.get("quiet")) == quiet
    show_lines(quiet=bool(wanted.get("quiet")))
    assert logger.isEnabledFor(logging.INFO) != quiet
    assert logger.isEnabledFor(logging.WARNING)
