"""The agent beside whole systems: Hugging Face Trainer, DeepSpeed, this package's runtime, torch.compile."""

from __future__ import annotations

import socket
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.support import upstream_ops
from tests.support.tiers import fast
from tests.support.zftune.agent.children import Child, environ, run, script, train

ROOT = Path(__file__).parents[4]

LANES = ["data", "forward", "backward", "optimizer"]


def lanes_of(child: Child) -> list[list[str]]:
    return [[lane for lane, _, _ in step["spans"] if lane != "other"] for step in child.steps]


@pytest.mark.parametrize("backend", ["eager", "inplace"])
def test_a_compiled_model(tmp_path: Path, backend: str) -> None:
    """It compiles what it compiles without us, and nobody is warned of hooks."""
    body = f"""
        import torch._dynamo.utils
        torch._dynamo.config.suppress_errors = False

        model = Small()
        compiled = torch.compile(model, backend="eager") if "{backend}" == "eager" else model
        if compiled is model:
            model.compile(backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for (ids,) in loader(12):
            loss_of(compiled, ids).backward()
            optimizer.step()
        counters = torch._dynamo.utils.counters
        print(json.dumps({{kind: sum(counters[kind].values()) for kind in ("frames", "graph_break", "stats")}}))
    """
    child = train(tmp_path, body)
    (tmp_path / "off").mkdir()
    alone = train(tmp_path / "off", body, ZFTUNE_DISABLE="1")
    assert child.said == alone.said
    assert child.stderr == alone.stderr
    assert lanes_of(child) == [LANES] * 6
    assert child.only("model")["model"] == "Small"
    assert child.only("model")["systems"] == (["torch.compile"] if backend == "eager" else [])


def test_a_compiled_training_step_is_left_alone_and_named(tmp_path: Path) -> None:
    body = """
        model = Small()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        step = torch.compile(optimizer.step, backend="eager")
        for (ids,) in loader(5):
            loss_of(model, ids).backward()
            step()
        print(json.dumps(checksum(model)))
    """
    child = train(tmp_path, body)
    (tmp_path / "off").mkdir()
    alone = train(tmp_path / "off", body, ZFTUNE_DISABLE="1")
    assert child.stdout == alone.stdout
    assert child.steps == []
    assert "compiled" in child.missing["step_ms"]


@pytest.mark.smoke
def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    child = train(
        tmp_path,
        f"""
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

        config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                             num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32)
        rows = [{{"input_ids": ids, "labels": ids}} for ids in torch.randint(0, 64, (80, 24))]
        arguments = TrainingArguments(
            output_dir={str(tmp_path)!r}, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=10,
            report_to=[], use_cpu=True, save_strategy="no", logging_steps=1, disable_tqdm=True,
        )
        Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows).train()
        """,
    )
    assert child.only("end")["reason"] == "measured"
    model = child.only("model")
    assert (model["model"], model["micro_batch"], model["sequence"]) == ("LlamaForCausalLM", 4, 24)
    assert model["tokens_per_step"] == 2 * 4 * 24
    for lanes in lanes_of(child):
        assert lanes == ["data", "data", "forward", "backward", "forward", "backward", "optimizer"]
    assert all(3.5 < step["loss"] < 5.0 for step in child.steps)  # about ln 64, though each pass has half of it


ENGINE = """
        import deepspeed

        def main():
            zero = json.loads(sys.argv[1])
            config = {
                "train_micro_batch_size_per_gpu": 4,
                "optimizer": {
                    "type": "AdamW",
                    "params": {"lr": 1e-3, **({} if "offload_optimizer" in zero else {"torch_adam": True})},
                },
                "bf16": {"enabled": True},
                "zero_optimization": zero,
                **({} if "zenflow" in zero else {"gradient_accumulation_steps": 2}),
            }
            model = Small()
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
            for (ids,) in loader(40):
                logits = engine(ids[:, :-1]).float()
                engine.backward(nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:]))
                engine.step()
            process = getattr(engine.optimizer, "process", None)
            if process is not None:
                process.terminate()
                process.join()
            torch.distributed.destroy_process_group()

        if __name__ == "__main__":
            main()
"""


def engine(tmp_path: Path, zero: str) -> Child:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    upstream_ops.need()
    folder = tmp_path / "records"
    folder.mkdir()
    env = environ(
        folder,
        warmup=8,  # upstream's first overlapped updates are never waited for
        steps=8,
        **upstream_ops.environment(),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
    )
    return run([sys.executable, script(tmp_path, ENGINE), zero], folder, env, timeout=280)


@pytest.mark.smoke
def test_deepspeed_steps_at_the_boundaries_of_accumulation(tmp_path: Path) -> None:
    child = engine(tmp_path, '{"stage": 1}')
    assert child.only("end")["reason"] == "measured"
    assert lanes_of(child) == [["data", "forward", "backward", "optimizer"] * 2] * 15
    model = child.only("model")
    assert model["systems"] == [f"DeepSpeed {metadata.version('deepspeed')}, ZeRO stage 1"]
    assert (model["model"], model["dtype"], model["tokens_per_step"]) == ("Small", "bfloat16", 2 * 4 * 17)
    assert "host" not in {cause for step in child.steps for cause in step["waits_ms"]}
    assert all(step["loss"] > 1.0 for step in child.steps)
    assert {step["loss_source"] for step in child.steps} == {"backward"}


def test_zero_offload_waits_for_the_host_and_for_its_copies(tmp_path: Path) -> None:
    child = engine(tmp_path, '{"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": false}}')
    assert child.only("end")["reason"] == "measured"
    for step in child.steps:
        waits = step["waits_ms"]
        assert waits["host"] > 0
        assert waits["h2d"] > 0
        assert waits["host"] + waits["h2d"] <= step["phases_ms"]["optimizer"]
    assert "optimizer offloaded to cpu" in child.only("model")["systems"][0]
    assert child.only("model")["optimizer"] == "DeepSpeedCPUAdam"


@pytest.mark.parametrize("overlap", fast(["false"], all_of=["true", "false"]))
def test_upstreams_zenflow(tmp_path: Path, overlap: str) -> None:
    """Its optimizer process is no training; every call of step() is a step, and one in four waits."""
    zenflow = (
        '{"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 8, "update_interval": 4, '
        f'"overlap_step": {overlap}, "full_warm_up_rounds": 0}}'
    )
    zero = f'{{"stage": 2, "offload_optimizer": {{"device": "cpu", "pin_memory": false}}, "zenflow": {zenflow}}}'
    child = engine(tmp_path, zero)
    assert child.only("end")["reason"] == "measured"
    measured = [step for step in child.steps if step["measured"]]
    assert [step["index"] for step in measured] == list(range(8, 16))
    waited = [bool(step["waits_ms"].get("host")) for step in measured]
    assert sum(waited) == 2
    assert [step["waits_ms"].get("h2d", 0) > 0 for step in measured] == waited
    assert any(step["waits_ms"].get("select") for step in measured)
    assert f"ZenFlow (topk_ratio 0.1, update_interval 4, select_interval 8, overlap_step {overlap})" in str(
        child.only("model")["systems"]
    )


RUNTIME = """
        from zenflow import ZenFlowAdamW, ZenFlowConfig
        from zftune.emulation import EmulatedAccelerator, RigSpec

        model = Small()
        timeline = {"forward_ms": 20, "backward_ms": 20, "d2h_ms": 5, "host_ms": 40, "h2d_ms": 5, "scale": 1}
        rig = RigSpec("mini", "", "timeline", timeline).for_elements(50 * 64 + 64 * 64)
        device = DEVICE
        if device is not None:
            device.attach(model)
        config = ZenFlowConfig(topk_ratio=0, update_interval=1, overlap_step=False, select_interval=4)
        optimizer = ZenFlowAdamW(model.parameters(), lr=1e-3, config=config, module=model, device=device)
        slept_ms = {}
        for step, (ids,) in enumerate(loader(14), start=1):
            slept_ms[step] = 20 * (1 + step % 4)
            time.sleep(slept_ms[step] / 1000)
            loss_of(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        truth = {stats.step: [stats.step_ms, stats.stall_ms, slept_ms[stats.step]]
                 for stats in optimizer.history(wait=True)}
        optimizer.close()
        print(json.dumps(truth))
        """


@pytest.mark.smoke
@pytest.mark.parametrize("device", ["None", "EmulatedAccelerator(rig)"])
def test_this_packages_runtime(tmp_path: Path, device: str) -> None:
    child = train(tmp_path, RUNTIME.replace("DEVICE", device), warmup=4, steps=6)
    assert child.only("end")["reason"] == "measured"
    model = child.only("model")
    assert model["optimizer"] == "ZenFlowAdamW"
    assert model["knobs"]["update_interval"] == 1
    assert model["systems"][0] == "zenflow runtime"
    measured = [step for step in child.steps if step["measured"]]
    for step in measured:
        number = str(step["index"] + 1)
        assert step["runtime"]["step"] == int(number)
        own_ms, stall_ms, slept_ms = child.said[number]
        assert min(step["step_ms"], own_ms) >= slept_ms  # neither is told of another step's
        if device != "None":
            assert {cause: step["stall_ms"][cause] for cause in stall_ms} == stall_ms
            assert sum(stall_ms.values()) > 20
        else:
            assert step["stall_ms"] is None
    assert "timeline" not in measured[-2]["runtime"]
    assert measured[-1]["runtime"]["host_memory"]["state"] > 0
    timeline = measured[-1]["runtime"]["timeline"]
    assert timeline["steps"] == 1  # a window
    assert timeline["first_step"] in [step["index"] for step in measured]
    assert [label for _, _, label in timeline["lanes"]["host"]]
    assert ("d2h" in timeline["lanes"]) == (device != "None")
    rig = measured[-1]["runtime"]["rig"]
    assert (rig is None) == (device == "None")
    assert rig is None or (rig["name"], rig["late_segments"] <= rig["segments"]) == ("mini", True)
    assert measured[-1]["runtime"]["host_engine"][1] >= 1
    header = child.only("header")
    assert (header["has_stream"], header["source"]) == ((False, "wall clock") if device == "None" else (True, "event"))
