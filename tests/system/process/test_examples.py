"""The examples, unchanged: their steps as their own stopwatches see them, and phases that are the step."""

from __future__ import annotations

import json
import os
import re
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server, upstream_ops
from tests.support.process.fixtures import PYTHON, Run
from tests.support.tiers import fast

ROOT = Path(__file__).parents[3]
RANKS = "fsdp2_zenflow.py"
HUGGING_FACE = ["accelerate_zenflow.py", "hf_trainer_zenflow.py"]
EXAMPLES = ["deepspeed_zenflow.py", "deepspeed_zero_offload.py", "hf_trainer.py", "plain_pytorch.py"]
RESTARTS = "tune_by_restarts.py"
RUN_ELSEWHERE = {
    "deepspeed_minimal.py": "tests/system/process/test_run_examples.py",
    "tune_plain_loop.py": "tests/system/zftune/tuner/test_attached.py",
}
STEPS, ALL_STEPS = 20, 32


@pytest.fixture
def env() -> dict[str, str | None]:
    """Where DeepSpeed's operations are; the examples choose its accelerator themselves."""
    return {**upstream_ops.environment(), "DS_ACCELERATOR": None, "PYTHONPATH": None}


@pytest.mark.smoke
def test_every_example_is_run_somewhere() -> None:
    run = [*EXAMPLES, *RUN_ELSEWHERE, *HUGGING_FACE, RANKS, RESTARTS]
    assert sorted(path.name for path in (ROOT / "examples").glob("*.py")) == sorted(run)
    for place in RUN_ELSEWHERE.values():
        assert (ROOT / place).exists()


@pytest.mark.smoke
@pytest.mark.parametrize("name", fast(["plain_pytorch.py"], all_of=EXAMPLES))
def test_an_example(profile: Run, tmp_path: Path, env: dict[str, str | None], name: str) -> None:
    if name.startswith("deepspeed"):
        upstream_ops.need()
    html, trace = tmp_path / "profile.html", tmp_path / "trace.json"
    options = ("--steps", STEPS, "--html", html, "--trace", trace)
    ended = profile(PYTHON, ROOT / "examples" / name, "--steps", ALL_STEPS, options=options, env=env).is_clean()
    assert ended.code == 0, ended.err
    document = ended.document
    assert document is not None
    assert document["steps"] == {"measured": STEPS, "discarded": 5}
    given = {"script": name, "systems": [], "ranks": 1, "exit_code": 0, "stopped": False}
    assert given.items() <= (document["command"] | {"systems": []}).items()
    stopwatch = stopwatch_ms(ended.out)
    assert len(stopwatch) == ALL_STEPS
    # The example looks at its watch between a step's end and the next one's: each step lies within two of its times,
    # and two of ours have one of its within them (`test_children.py` has closer bounds).
    steps_ms = {row["step"]: row["step_ms"] for row in document["per_step"]}
    assert list(steps_ms) == list(range(min(steps_ms), min(steps_ms) + STEPS))
    for step, step_ms in steps_ms.items():
        assert step_ms <= stopwatch[step - 2] + stopwatch[step - 1] + 0.001
        assert step + 1 not in steps_ms or step_ms + steps_ms[step + 1] + 0.001 >= stopwatch[step - 1]
    for run in (document, *document["ranks"]):
        assert sum(run["phases_ms"].values()) == pytest.approx(run["step_ms"]["mean"], rel=1e-6)
    for row in document["per_step"]:
        assert sum(row["phases_ms"].values()) == pytest.approx(row["step_ms"], rel=1e-6)
    for phase in ("data", "forward", "backward", "optimizer"):
        assert document["phases_ms"][phase] > 0
    assert document["overhead_fraction"] < 0.1
    knows_its_system(document, name)
    assert html.stat().st_size > 1000
    assert json.loads(trace.read_text())


def test_the_example_for_several_ranks() -> None:
    """Rank 0 speaks for both, each of which has half of the model and of its state."""
    said = {ranks: said_on(ranks, RANKS, "--batch", "2", "--length", "64") for ranks in (1, 2)}
    found: dict[int, list[int]] = {}
    for ranks, text in said.items():
        first, last = re.findall(r"^step \d+: loss ([0-9.]+)$", text, re.MULTILINE)
        assert float(last) < 0.9 * float(first)
        numbers = re.search(rf"rank 0 of {ranks} has ([0-9,]+) of ([0-9,]+) parameters, and took ([0-9,]+) bytes", text)
        assert numbers is not None, text
        found[ranks] = [int(number.replace(",", "")) for number in numbers.groups()]
        assert len(stopwatch_ms(text.encode())) == 11
    (own, whole, state), (half, whole_again, half_state) = found[1], found[2]
    assert own == whole == whole_again == 2 * half
    assert half_state == pytest.approx(state / 2, rel=0.05)


@pytest.mark.parametrize("name", fast(HUGGING_FACE[:1], all_of=HUGGING_FACE))
def test_with_hugging_face_two_ranks_train_as_one(name: str) -> None:
    alone = said_on(1, name, "--batch", "4", "--length", "64")
    both = said_on(2, name, "--batch", "2", "--length", "64")
    assert losses(both) == pytest.approx(losses(alone), abs=2e-3)
    assert len(stopwatch_ms(both.encode())) == 11
    if name.startswith("accelerate"):
        first, last = losses(both)
        assert last < 0.95 * first
        assert "rank 0 of 2 has 246,080 of 492,160 parameters" in both


def test_with_accelerate_passes_of_two_ranks_are_one_batch() -> None:
    alone = said_on(1, HUGGING_FACE[0], "--batch", "8", "--length", "64")
    both = said_on(2, HUGGING_FACE[0], "--batch", "2", "--passes", "2", "--length", "64")
    assert losses(both) == pytest.approx(losses(alone), abs=2e-3)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_with_hugging_face_it_goes_on_on_three_ranks(tmp_path: Path, name: str) -> None:
    save, resume = ("--save", "--resume") if name.startswith("accelerate") else ("--output", "--output")
    more = [] if name.startswith("accelerate") else ["--resume"]
    first = said_on(2, name, "--batch", "2", "--length", "64", save, str(tmp_path / "saved"))
    again = said_on(3, name, "--batch", "2", "--length", "64", resume, str(tmp_path / "saved"), *more, steps=21)
    assert losses(again)[0] < 0.95 * losses(first)[0]


def test_the_launchers_begin_them() -> None:
    """In interpreters of their own, as a user begins them."""
    launch: list[str | Path] = [
        "accelerate.commands.launch",
        "--config_file",
        ROOT / "examples" / "accelerate_fsdp2.yaml",
    ]
    launched: dict[str, list[str | Path]] = {
        HUGGING_FACE[0]: [*launch, "--main_process_port", "0"],
        HUGGING_FACE[1]: ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"],
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for name, words in launched.items():
        command = [PYTHON, "-m", *words, ROOT / "examples" / name, "--steps", "1", "--batch", "2", "--length", "64"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        assert len(stopwatch_ms(done.stdout.encode())) == 1


TRAINING = """
import argparse, json, time
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed")
with open(parser.parse_args().deepspeed) as file:
    settings = json.load(file)["zero_optimization"]["zenflow"]
weight = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([weight])
for step in range(100):
    weight.sum().backward()
    time.sleep(0.001 if settings["topk_ratio"] == 0.1 else 0.05)
    optimizer.step()
"""


def test_tuning_by_restarts_finds_the_fastest_setting(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    given = {"stage": 2, "zenflow": {"topk_ratio": 0.05, "update_interval": 2, "overlap_step": True}}
    (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": given}))
    command: list[str | Path] = [PYTHON, ROOT / "examples" / RESTARTS, "ds.json", "--trials", "3", "--steps", "4"]
    command += ["--seed", "3", "--output", "best.json", "--", PYTHON, "train.py", "--deepspeed", "ds.json"]
    path = os.pathsep.join((str(Path(PYTHON).parent), os.environ["PATH"]))
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("trial 0: {'topk_ratio': 0.05, 'update_interval': 2, 'overlap_step': True}: ")
    assert "'topk_ratio': 0.1" in last
    best = json.loads((tmp_path / "best.json").read_text())
    assert best["bf16"] == {"enabled": True}
    assert best["zero_optimization"]["zenflow"]["topk_ratio"] == 0.1


def said_on(ranks: int, name: str, *words: str, steps: int = 11) -> str:
    """What rank 0 prints; the others say nothing."""
    command: list[str | Path] = [ROOT / "examples" / name, "--steps", str(steps), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        begun = [stack.enter_context(one) for one in fork_server.ranks(ranks, command, env=environment)]
        assert [one.wait(120) for one in begun] == [0] * ranks, [one.stderr[-4000:] for one in begun]
        assert not any(one.stdout for one in begun[1:])
        return begun[0].stdout


def losses(said: str) -> list[float]:
    return [float(value) for value in re.findall(r"(?<!train_)loss'?:? '?([0-9.]+)", said)]


def stopwatch_ms(out: bytes) -> list[float]:
    """What the script says of its steps, in its last line of JSON."""
    lines = [line for line in out.decode().splitlines() if line.startswith('{"step_ms"')]
    return [float(value) for value in json.loads(lines[-1])["step_ms"]]


def knows_its_system(document: dict[str, Any], name: str) -> None:
    systems = " ".join(document["command"]["systems"])
    assert ("DeepSpeed" in systems) == name.startswith("deepspeed")
    assert ("ZenFlow" in systems) == ("zenflow" in name)
    assert document["workload"]["model"] == ("Model" if name.startswith("plain") else "LlamaForCausalLM")
    assert document["workload"]["parameters"] > 400_000
