"""Trials of real trainings: DeepSpeed 0.19.6 on the CPU, and the Trainer of transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import upstream_ops
from tests.process.conftest import is_running
from tests.zftune.agent.children import environ, run, script
from tests.zftune.restarts import training
from zftune.agent.trial import TRIAL
from zftune.integrations.deepspeed.presets import Wish, apply_preset
from zftune.profile.command.records import Rank
from zftune.restarts.document import RestartOptions, run_restarting
from zftune.restarts.process import Asked, Interrupts, Plan, ProcessTrial
from zftune.restarts.upstream import Upstream
from zftune.store import open_store
from zftune.store.types import TrialState
from zftune.tuner.space import Setting


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a training, in which this process is."""
    upstream_ops.need()
    folder = training.project(tmp_path / "project", training.ds_config())
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ZFTUNE_DB", str(tmp_path / "zftune.db"))
    for name, value in training.environment().items():
        monkeypatch.setenv(name, value)
    return folder


def command(project: Path) -> list[str]:
    notes = project.parent / "notes.jsonl"
    notes.touch()
    return ["train.py", "--deepspeed_config", "ds.json", "--notes", str(notes)]


def test_a_search_over_upstreams_zenflow(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_fault: None
) -> None:
    """The user's interval of 2 is made slow, so that another one is adopted; nothing of the trials is left."""
    monkeypatch.setenv("TEST_SLEEPS", json.dumps({"2": 0.1}))
    before = training.content(project)
    options = RestartOptions(steps=8, most_measurements=5, quality="loose", sampler="none", timeout_s=200)
    with open_store() as store:
        document = run_restarting([sys.executable, *command(project)], options, store=store)
    assert training.content(project) == before
    noted = training.notes(tmp_path / "notes.jsonl")
    tried = {trial["number"]: trial["knobs"] for trial in document["trials"]}
    assert document["best"]["number"] == 1, document["decisions"]
    assert document["gain"]["share"] > 0.3
    assert [one["zenflow"]["update_interval"] for one in noted] == [2, tried[1]["update_interval"], 2]
    for one, number in zip(noted, (0, 1, 0), strict=True):
        for name in ("topk_ratio", "overlap_step", "select_interval"):
            assert one["zenflow"][name] == tried[number][name]
        assert Path(one["cwd"]) != project
        assert not Path(one["cwd"]).exists()
        assert not is_running(one["pid"])
        assert (one["wandb"], one["key"]) == ("offline", False)
    assert (document["workload"]["model"], document["workload"]["dtype"]) == ("Sequential", "bfloat16")
    assert document["software"]["deepspeed"] == "0.19.6"
    with open_store() as store:
        (found,) = store.runs()
        assert (found.key.backend, found.key.stage, found.key.world_size) == ("deepspeed", 2, 1)
        rows = store.trials(found.run_id)
        assert [row.state for row in rows][:2] == [TrialState.MEASURED, TrialState.MEASURED]
        assert [one.role for one in store.measurements(rows[0].trial_id)] == ["start", "a2"]
        (preset,) = store.presets()
        applied = apply_preset(store, "ds.json", Wish(preset=preset.name))
    section = applied.config["zero_optimization"]["zenflow"]
    assert section["update_interval"] == tried[1]["update_interval"]
    assert section == document["ds_config"]["zero_optimization"]["zenflow"]


def test_all_ranks_have_the_knobs_and_stop_at_the_same_step(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_fault: None
) -> None:
    """Two ranks under torchrun, with overlap: each has an optimizer process."""
    launcher = str(Path(sys.executable).with_name("torchrun"))
    argv = [launcher, "--standalone", "--nproc-per-node", "2", *command(project)]
    setting = Setting(topk_ratio=0.2, update_interval=4, apply_lag=4, select_interval=8, deferred_update="mean")
    before = training.content(project)
    upstream = Upstream(training.ds_config(), "0.19.6")
    asked: list[Asked] = []
    seen: list[Rank] = []

    def plan(ranks: Sequence[Rank]) -> Plan:
        seen.extend(ranks)
        return Plan(9, 8)

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name)
    with Interrupts() as interrupts:
        trial = ProcessTrial(argv, upstream.knobs(setting), 2, interrupts, asked.append, plan, timeout_s=200)
        ended = trial.run()
    assert ended.status == "measured", ended
    assert (len(ended.discarded_ms), len(ended.steps_ms)) == (8, 8)
    assert len(ended.losses) >= 17
    assert asked[0].config["zero_optimization"]["zenflow"]["update_interval"] == 2
    noted = training.notes(tmp_path / "notes.jsonl")
    assert sorted(one["rank"] for one in noted) == [0, 1]
    for one in noted:
        section = one["zenflow"]
        assert (section["topk_ratio"], section["update_interval"], section["overlap_step"]) == (0.2, 4, True)
        assert not is_running(one["pid"])
    assert [rank.header["world_size"] for rank in seen] == [2, 2]
    assert training.content(project) == before


FORMS = """
    import base64, torch
    from tests.zftune.restarts.training import ds_config
    from zftune.agent.bootstrap.sitecustomize import Watcher
    from zftune.agent.session import Patches
    from zftune.agent.trial import install

    class Trial:
        def __init__(self):
            self.patches, self.asked, self.losses = Patches(), [], []

        def config(self, config, version):
            self.asked.append((config, version))
            return {**config, "gradient_clipping": 0.25}

        def loss(self, loss):
            self.losses.append(float(loss))

        def holds(self, lock):
            self.held = lock

        released = holds

    trial, watcher = Trial(), Watcher()
    install(trial, watcher.when_imported)
    import deepspeed

    config = ds_config(None)
    text = json.dumps(config)
    open("ds.json", "w").write(text)
    said = []
    for form in (config, "ds.json", base64.urlsafe_b64encode(text.encode()).decode()):
        model = nn.Linear(8, 8)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=form)
        engine.backward(engine(torch.ones(4, 8, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
        said.append([engine.gradient_clipping(), engine.save_checkpoint("saved"), engine.save_16bit_model("saved")])
    other, *_ = deepspeed.initialize(
        model=nn.Linear(8, 8), config={"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5}
    )
    said.append(other.gradient_clipping())
    same = all(asked == config and version == deepspeed.__version__ for asked, version in trial.asked)
    torch.distributed.destroy_process_group()
    print(json.dumps({"said": said, "asked": len(trial.asked), "same": same, "untouched": json.dumps(config) == text,
                      "losses": len(trial.losses), "saved": os.path.exists("saved")}))
"""


def test_a_config_in_any_form_is_overridden_in_a_copy(tmp_path: Path) -> None:
    upstream_ops.need()
    root = str(Path(__file__).parents[4])
    environment = {**training.environment(), "PYTHONPATH": root, "ZFTUNE_DISABLE": "1"}
    child = run([sys.executable, script(tmp_path, FORMS)], tmp_path, environment, timeout=200)
    assert child.said == {
        "said": [[0.25, True, True]] * 3 + [0.5],
        "asked": 3,
        "same": True,
        "untouched": True,
        "losses": 3,
        "saved": False,
    }


def test_the_trainer_saves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    folder = tmp_path / "records"
    folder.mkdir(mode=0o700)
    (folder / TRIAL).write_text(json.dumps({"knobs": None, "stage": 0}))
    path = script(
        tmp_path,
        """
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

        config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                             num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32)
        rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (80, 24))]
        arguments = TrainingArguments(
            output_dir="out", per_device_train_batch_size=4, max_steps=6, report_to=[], use_cpu=True, save_steps=2,
            push_to_hub=True, hub_model_id="nobody/nothing", disable_tqdm=True,
        )
        trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)
        trainer.train()
        trainer.save_model("out/final")
        trainer.push_to_hub()
        print(json.dumps({"steps": trainer.state.global_step}))
        """,
    )
    environment = {**environ(folder, warmup=0, steps=1000), "ZFTUNE_AGENT_TRIAL": "1", "HF_HUB_OFFLINE": "1"}
    child = run([sys.executable, path], folder, environment)
    assert child.said == {"steps": 6}
    assert [str(file) for file in folder.rglob("*") if "checkpoint" in str(file) or "model" in str(file)] == []
