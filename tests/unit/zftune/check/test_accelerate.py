"""Accelerate's YAMLs: what its own launcher and plugin make of them, and how they are judged."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.zftune.check.asked import ask
from zftune.cli import main as cli
from zftune.ds_config.reading import given, read
from zftune.errors import BadInputError
from zftune.integrations.deepspeed.check.checking import check
from zftune.integrations.deepspeed.check.findings import Report
from zftune.integrations.deepspeed.command_line import named_by

ROOT = Path(__file__).parents[4]
HEAD = """
compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
num_machines: 1
num_processes: 1
rdzv_backend: static
same_network: true
use_cpu: false
"""


class Yaml(NamedTuple):
    """One of Accelerate's, and what is to be said of it."""

    text: str
    does: str
    says: str
    """In the last line, or in the sentence that ends it."""
    faults: tuple[str, ...] = ()
    """What is shown, with its value."""


def deepspeed(precision: str, *settings: str) -> str:
    section = "".join(f"  {line}\n" for line in settings)
    return f"{HEAD}distributed_type: DEEPSPEED\nmixed_precision: {precision}\ndeepspeed_config:\n{section}"


YAMLS = {
    "stage 1": Yaml(
        deepspeed("'no'", "zero_stage: 1", "gradient_accumulation_steps: 3"),
        "left",
        "deepspeed_config.offload_optimizer_device is not there",
    ),
    "stage 2 on the CPU": Yaml(
        deepspeed(
            "bf16",
            "deepspeed_multinode_launcher: standard",
            "gradient_accumulation_steps: 4",
            "gradient_clipping: 1.0",
            "offload_optimizer_device: cpu",
            "offload_param_device: none",
            "zero3_init_flag: false",
            "zero_stage: 2",
        ),
        "trains",
        "trains on zenflow, quality exact",
    ),
    "stage 2 in fp16": Yaml(
        deepspeed("fp16", "zero_stage: '2'", "offload_optimizer_device: CPU", "gradient_clipping: null"),
        "trains",
        "trains on zenflow, quality exact",
    ),
    "no device": Yaml(
        deepspeed("fp8", "zero_stage: 2", "offload_optimizer_device: none", "offload_param_device: none"),
        "left",
        'deepspeed_config.offload_optimizer_device is "none"',
    ),
    "stage 3 on the CPU": Yaml(
        deepspeed(
            "bf16",
            "offload_optimizer_device: cpu",
            "offload_param_device: cpu",
            "zero3_init_flag: true",
            "zero3_save_16bit_model: true",
            "zero_stage: 3",
        ),
        "trains",
        "trains on zenflow, quality exact",
    ),
    "NVMe": Yaml(
        deepspeed(
            "bf16", "zero_stage: 3", "offload_optimizer_device: nvme", "offload_optimizer_nvme_path: /local_nvme"
        ),
        "refused",
        'deepspeed_config.offload_optimizer_device is "nvme"; it must be "cpu"',
        ("deepspeed_config.offload_optimizer_nvme_path = /local_nvme",),
    ),
    "NVMe on weights": Yaml(
        deepspeed(
            "bf16",
            "zero_stage: 3",
            "offload_optimizer_device: cpu",
            "offload_param_device: nvme",
            "offload_param_nvme_path: /local_nvme",
        ),
        "refused",
        'deepspeed_config.offload_param_device is "nvme"; it must be "none" or "cpu"',
        ("deepspeed_config.offload_param_device = nvme",),
    ),
    "a stage that is none": Yaml(
        deepspeed("'no'", "zero_stage: 4", "offload_optimizer_device: cpu"),
        "refused",
        "deepspeed_config.zero_stage is 4",
        ("deepspeed_config.zero_stage = 4",),
    ),
    "a device that is none": Yaml(
        deepspeed("'no'", "zero_stage: 2", "offload_optimizer_device: gpu"),
        "refused",
        'deepspeed_config.offload_optimizer_device is "gpu"',
        ("deepspeed_config.offload_optimizer_device = gpu",),
    ),
    "a negative norm": Yaml(
        deepspeed("'no'", "gradient_clipping: -0.5", "zero_stage: 2", "offload_optimizer_device: cpu"),
        "refused",
        "deepspeed_config.gradient_clipping is -0.5",
        ("deepspeed_config.gradient_clipping = -0.5",),
    ),
    "an empty section": Yaml(
        HEAD + "distributed_type: DEEPSPEED\nmixed_precision: 'no'\ndeepspeed_config: {}\n",
        "left",
        "deepspeed_config.offload_optimizer_device is not there",
    ),
}


def written(folder: Path, text: str, name: str = "acc.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def judged(path: str) -> Report:
    return check(read(path), version="0.19.6", ask=ask)


@pytest.mark.parametrize("name", YAMLS)
def test_it_is_judged_in_its_own_words(tmp_path: Path, name: str) -> None:
    yaml = YAMLS[name]
    report = judged(written(tmp_path, yaml.text))
    assert (report.outcome.kind, report.ok) == (yaml.does, not yaml.faults), report
    assert yaml.says in str(report.outcome)
    shown = {f"{'.'.join(one.path)} = {one.value}" for one in report.findings if one.is_fault}
    assert set(yaml.faults) <= shown
    document = report.document("0")
    assert "zero_optimization" not in str(document["run"]), document["run"]
    for one in document["findings"]:
        if one["path"].startswith("zero_optimization"):  # it has no such setting
            assert not one["given"], one
            assert one["safe"].endswith("in a file that deepspeed_config_file names"), one


def test_what_to_do_can_be_done_there(tmp_path: Path) -> None:
    report = judged(written(tmp_path, YAMLS["NVMe on weights"].text))
    (finding,) = (one for one in report.findings if one.is_fault and one.path[-1] == "offload_param_device")
    assert finding.safe == "zftune run --backend deepspeed"
    assert '"zftune"' not in f"{finding.reason} {report.outcome}"


class Launched(NamedTuple):
    environment: dict[str, str]
    precision: str


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The ds_config of Accelerate's plugin in a training that its launcher would begin."""
    launch = pytest.importorskip("accelerate.commands.launch", reason="the huggingface extra is not installed")
    from accelerate.utils import DeepSpeedPlugin
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda _: False)

    def made(*words: str) -> dict[str, Any]:
        launched: list[Launched] = []

        def launcher(args: Any) -> None:
            launched.append(Launched(prepare_deepspeed_cmd_env(args)[1], args.mixed_precision))

        monkeypatch.setattr(launch, "deepspeed_launcher", launcher)
        monkeypatch.setattr(launch, "is_fp8_available", lambda: True, raising=False)
        launch.launch_command(launch.launch_command_parser().parse_args([*words, "train.py"]))
        with monkeypatch.context() as training:
            for name, value in launched[0].environment.items():
                if name.startswith("ACCELERATE_"):
                    training.setenv(name, value)
            found = DeepSpeedPlugin()
            found.set_mixed_precision(launched[0].precision)
        config: dict[str, Any] = found.deepspeed_config
        return config

    return made


@pytest.mark.parametrize("name", YAMLS)
def test_it_is_what_the_plugin_makes_of_it(tmp_path: Path, plugin: Callable[..., dict[str, Any]], name: str) -> None:
    path = written(tmp_path, YAMLS[name].text.replace("fp8", "bf16"))  # which needs more to be installed
    assert read(path).config == plugin("--config_file", path)


@pytest.mark.parametrize(
    "options",
    [
        ("--zero_stage", "3"),
        ("--zero-stage=1", "--offload-optimizer-device", "none", "--gradient_clipping", "0.25"),
        ("--use_deepspeed", "--mixed_precision", "fp16", "--gradient_accumulation_steps=2"),
        ("--offload_param_device=cpu", "--zero3_save_16bit_model", "true"),
    ],
)
def test_options_come_before_it(
    tmp_path: Path, plugin: Callable[..., dict[str, Any]], options: tuple[str, ...]
) -> None:
    words = ("--config_file", written(tmp_path, YAMLS["stage 2 on the CPU"].text), *options)
    of_script = ("--mixed_precision", "no", "--gradient_accumulation_steps", "7")
    (source,) = named_by(["accelerate", "launch", *words, "train.py", *of_script], {})
    assert source.config == plugin(*words)


def test_a_setting_beside_a_file_ends_both(tmp_path: Path, plugin: Callable[..., dict[str, Any]]) -> None:
    named = str(ROOT / "examples/ds_hf.json")
    for text in (
        deepspeed("bf16", f"deepspeed_config_file: {named}"),
        deepspeed("null", f"deepspeed_config_file: {named}", "zero_stage: 2"),
    ):
        path = written(tmp_path, text)
        with pytest.raises(ValueError, match="deepspeed_config_file"):
            plugin("--config_file", path)
        with pytest.raises(BadInputError, match="beside a deepspeed_config_file"):
            read(path)


def test_a_file_that_it_names_is_judged(tmp_path: Path, plugin: Callable[..., dict[str, Any]]) -> None:
    named = ROOT / "examples/ds_hf.json"
    path = written(tmp_path, deepspeed("null", f"deepspeed_config_file: {named}", "zero3_init_flag: false"))
    source = read(path)
    assert (source.path, source.through, source.places) == (str(named), path, None)
    theirs = plugin("--config_file", path)
    assert given(source)["zero_optimization"] == theirs["zero_optimization"]
    assert str(judged(path).outcome) == "trains on zenflow, quality exact"


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("fsdp.yaml", HEAD + "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n", "distributed_type FSDP"),
        ("gpus.yaml", HEAD + "distributed_type: MULTI_GPU\nmixed_precision: bf16\n", "distributed_type MULTI_GPU"),
        ("none.yaml", HEAD + "deepspeed_config:\n  zero_stage: 2\n", "without distributed_type"),
        ("no.yaml", HEAD + "distributed_type: 'NO'\n", "distributed_type NO"),
        ("broken.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config: [\n", "is not YAML (line 3"),
        (
            "nowhere.yaml",
            deepspeed("null", "deepspeed_config_file: nowhere.json"),
            "'nowhere.json', which does not exist",
        ),
        ("recipe.yaml", "model: m\ndeepspeed: null\n", "is YAML without"),
        ("empty.yaml", "", "is YAML without"),
        ("config.json", '{"architectures": ["M"], "model_type": "m"}', "is a model's config.json"),
        ("package.json", '{"name": "m", "version": "1.0.0"}', "is a package.json"),
    ],
)
def test_what_is_none_is_a_sentence_and_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, text: str, part: str
) -> None:
    assert part in ended(monkeypatch, capsys, written(tmp_path, text, name))


def test_no_yaml_is_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = deepspeed("null", f"deepspeed_config_file: {ROOT / 'examples/ds_hf.json'}")
    for text in (YAMLS["stage 3 on the CPU"].text, names):
        path = written(tmp_path, text)
        assert "--fix of" in ended(monkeypatch, capsys, path, "--fix", "-o", path)
        assert Path(path).read_text() == text


def ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["zftune", "check", *words])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    out, err = capsys.readouterr()
    assert (exit_.value.code, out, err.count(os.linesep)) == (2, "", 1), err
    return err
