"""The examples, unchanged: their steps as their own stopwatches see them, and phases that are the step."""

from __future__ import annotations

import json
import os
import re
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests import upstream_ops, zygote
from tests.process.conftest import PYTHON, Run
from tests.tiers import by_day

ROOT = Path(__file__).parents[2]
RANKS = "fsdp2_zenflow.py"
EXAMPLES = ["deepspeed_zenflow.py", "deepspeed_zero_offload.py", "hf_trainer.py", "plain_pytorch.py"]
RUN_ELSEWHERE = {
    "accelerate_zenflow.py": "tests/zftune/integrations",
    "deepspeed_minimal.py": "tests/process/test_run_examples.py",
    "hf_trainer_zenflow.py": "tests/zftune/integrations",
    "tune_plain_loop.py": "tests/zftune/tuner/test_attach.py",
}
STEPS, ALL_STEPS = 20, 32


@pytest.fixture
def env() -> dict[str, str | None]:
    """Where DeepSpeed's operations are; the examples choose its accelerator themselves."""
    return {**upstream_ops.environment(), "DS_ACCELERATOR": None, "PYTHONPATH": None}


def test_every_example_is_run_somewhere() -> None:
    assert sorted(path.name for path in (ROOT / "examples").glob("*.py")) == sorted([*EXAMPLES, *RUN_ELSEWHERE, RANKS])
    for place in RUN_ELSEWHERE.values():
        assert (ROOT / place).exists()


@pytest.mark.parametrize("name", by_day(["plain_pytorch.py"], all_of=EXAMPLES))
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
    assert document["command"] | {"systems": []} == {
        "script": name, "systems": [], "ranks": 1, "exit_code": 0, "stopped": False
    }  # fmt: skip
    stopwatch = stopwatch_ms(ended.out)
    assert len(stopwatch) == ALL_STEPS
    steps = [row["step"] for row in document["per_step"]]
    assert document["step_ms"]["mean"] == pytest.approx(statistics.fmean(stopwatch[i] for i in steps), rel=0.02)
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
    words: list[str | Path] = [ROOT / "examples" / RANKS, "--steps", "11", "--batch", "2", "--length", "64"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    said: dict[int, str] = {}
    for ranks in (1, 2):
        with ExitStack() as stack:
            begun = [stack.enter_context(one) for one in zygote.ranks(ranks, words, env=environment)]
            assert [one.wait(120) for one in begun] == [0] * ranks, [one.stderr[-4000:] for one in begun]
            assert not any(one.stdout for one in begun[1:])
            said[ranks] = begun[0].stdout
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
