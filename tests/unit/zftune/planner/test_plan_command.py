"""`zftune plan`: its screen, its document, its page, and bad input as one sentence."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from tests.support.tiers import fast
from zenflow import ZenFlowConfig
from zftune.cli.plan import plan
from zftune.errors import BadInputError
from zftune.planner.choosing import LEAST_HEADROOM_BYTES, budget_of, choose, fits, least_gpu, limits
from zftune.planner.closed_form import predict
from zftune.planner.model import Job, Machine, ModelFacts
from zftune.planner.plan import SCHEMA, SMALLEST, curves, make_plan, of_nothing, of_ranks, remedies
from zftune.planner.screen import render
from zftune.text import byte_count, size_up

APP = typer.Typer()
APP.command()(plan)
MODEL, MACHINE = "0.3B,2,2048", "rtx3090"  # few layers: seconds less


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    model, machine, job = small_model(), Machine.load(MACHINE), Job(seq=512)
    found = make_plan(model, machine, job, quality="published")
    found["curves"] = curves(model, machine, job, found["proposal"])
    return found


def small_model() -> ModelFacts:
    return ModelFacts.from_text(MODEL)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(APP, ["--model", MODEL, "--hardware", MACHINE, *arguments])


def test_the_document_is_plain_and_complete(document: dict[str, Any]) -> None:
    assert json.loads(json.dumps(document, allow_nan=False))["schema"] == SCHEMA
    best = document["proposal"]
    assert best["fits"]
    assert best["step_ms"] == pytest.approx(best["compute_ms"] + sum(best["stall_ms_by_cause"].values()))
    assert best["memory"]["device_bytes"] == sum(best["memory"]["device_by_use"].values())
    assert best["memory"]["device_bytes"] <= document["limits"]["device_bytes"]
    assert set(document["baselines"]) == {"no_offload", "zero_offload"}
    assert document["baselines"]["no_offload"]["memory"]["host_bytes"] == 0
    assert document["baselines"]["zero_offload"]["step_ms"] > best["step_ms"]
    assert len(document["curves"]) == 8


@pytest.mark.parametrize("width", [80, 100])
def test_the_screen_fits_and_says_what_to_do(document: dict[str, Any], width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render(document, width))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for word in ("proposed", "no offloading", "ZeRO-Offload", "least S", "estimates", document["verdict"][0][:40]):
        assert word in text, word
    *_, row = (line for line in text.splitlines() if line.startswith("ZeRO-Offload"))  # the table stands last
    assert "serial" in row
    assert document["baselines"]["zero_offload"]["knobs"]["pipeline"] == "none"


def test_ranks_need_together_what_one_would() -> None:
    model, config = small_model(), ZenFlowConfig(topk_ratio=0.1, update_interval=3)
    machine, job = Machine.load("a100-80-sxm"), Job(seq=512, gpus=2, reshard=False)
    alone, together = (predict(model, machine, one, config).memory.host_bytes for one in (replace(job, gpus=1), job))
    assert alone <= together < 1.001 * alone  # but for the counts of columns
    assert not of_ranks(model, machine, Job(gpus=1), [])
    assert of_ranks(model, machine, job, [])


def test_each_stage_is_told_what_the_other_would_take() -> None:
    """Averaging and gathering are beside no compute at stage 2; they take 3 x (N - 1) / N of the weights at stage 3."""
    model, config = ModelFacts.from_text("0.5B,4,2048"), ZenFlowConfig(topk_ratio=0.1)
    machine = Machine.load("a100-80-sxm")
    jobs = [Job(seq=512, gpus=4, stage=stage) for stage in (3, 2, 1)]
    sharded, whole, first = (predict(model, machine, job, config) for job in jobs)
    assert whole == first
    assert whole.memory.host_by_use == sharded.memory.host_by_use
    weights = model.element_bytes * model.parameters
    uses = predict(model, machine, replace(jobs[1], seq=16), config).memory.device_by_use  # hardly any activations
    assert weights <= uses["weights"] < 1.3 * weights  # in segments
    assert weights < uses["gradients"] < 1.9 * weights  # of the embeddings, a quarter of it, there is more than one
    assert (uses["gathered"], uses["state"]) == (0, sharded.memory.device_by_use["state"])
    sent_ms = 2 * weights * 3 / 4 / machine.comm_gbps / 1e6
    assert whole.stall_ms_by_cause["comm"] == pytest.approx(sent_ms, rel=0.01)
    assert whole.stall_ms_by_cause["comm"] > sharded.stall_ms_by_cause["comm"]
    sharded_job, whole_job = (replace(job, seq=16) for job in jobs[:2])
    need = predict(model, machine, whole_job, SMALLEST).memory.device_bytes
    short = replace(machine, device_memory_bytes=need + LEAST_HEADROOM_BYTES - 1)
    assert not fits(predict(model, short, whole_job, SMALLEST), short)
    assert fits(predict(model, short, sharded_job, SMALLEST), short)
    assert "--stage 3" in [one.option for one in remedies(model, short, whole_job)]


def test_machines_share_a_model_over_their_network() -> None:
    """Each has its part of the host memory; on a slow network a step is what goes over it: see study 020."""
    model, machine, config = small_model(), Machine.load("a100-80-sxm"), ZenFlowConfig(topk_ratio=0.1)
    one = predict(model, machine, Job(seq=512, gpus=8), config)
    job = Job(seq=512, gpus=4, nodes=2, network_gbps=0.5)
    two = predict(model, machine, job, config)
    assert two.memory.host_bytes == pytest.approx(one.memory.host_bytes / 2, rel=1e-6)
    assert two.memory.device_bytes == pytest.approx(one.memory.device_bytes, rel=0.02)
    part_ms = model.element_bytes * model.parameters * 7 / 8 / 0.5e6
    assert 2.5 * part_ms < two.step_ms < 3.05 * part_ms  # what lies in no layer is kept for backward
    assert two.bound_by == "comm"
    fast = predict(model, machine, Job(seq=512, gpus=4, nodes=2, network_gbps=1e6), config)
    assert fast.step_ms < one.step_ms  # two hosts update, with half of the ranks each


def test_replicas_have_a_machine_each_and_send_gradients_alone() -> None:
    model, machine, config = small_model(), Machine.load("a100-80-sxm"), ZenFlowConfig(topk_ratio=0.1)
    one = predict(model, machine, Job(seq=512, gpus=4), config)
    job = Job(seq=512, gpus=4, nodes=2, network_gbps=0.5, replicate=True)
    two = predict(model, machine, job, config)
    assert two.memory.host_by_use == one.memory.host_by_use
    assert two.memory.device_bytes == pytest.approx(one.memory.device_bytes, rel=0.03)
    # A GPU adds up a quarter of all gradients with its like, both ways, and has a quarter of the network for it.
    between_ms = model.element_bytes * model.parameters / 0.5e6
    assert between_ms < two.step_ms < 1.05 * between_ms + one.step_ms
    assert two.bound_by == "comm"
    fast = predict(model, machine, replace(job, network_gbps=1e6), config)
    assert fast.step_ms == pytest.approx(one.step_ms, rel=1e-3)  # each host updates all of the model
    where = ("--hardware", "a100-80-sxm", "--quality", "exact", "--gpus", "4", "--nodes", "2", "--network-gbps", "9")
    told = run(*where, "--replicate")
    assert told.exit_code == 0
    assert "HSDP" in told.output


def test_longer_windows_are_no_slower(document: dict[str, Any]) -> None:
    for curve in document["curves"]:
        steps = curve["step_ms"]
        assert steps[-1] <= steps[0] * 1.001
        assert curve["update_interval"][0] == 1


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    result = run("--seq", "512", "--json", str(target))
    assert result.exit_code == 0, result.output
    assert "zftune plan" in result.output
    assert json.loads(target.read_text())["model"]["name"] == MODEL


def test_json_to_standard_output_is_all_of_it() -> None:
    result = run("--json", "-", "--quality", "exact")
    document = json.loads(result.stdout)
    assert document["quality"]["name"] == "exact"
    assert document["proposal"]["staleness_steps"] == 0


def test_what_does_not_fit_ends_with_1_and_says_what_is_missing() -> None:
    result = CliRunner().invoke(APP, ["--model", "50B,2,36864", "--hardware", "rtx3090"])
    assert result.exit_code == 1
    assert "Nothing fits" in result.output
    assert "more of a GPU's memory than the 23.2 GB that it may use" in unwrapped(result.output)


def unwrapped(output: str) -> str:
    return re.sub(r"[\s│]+", " ", output)


def with_options(job: Job, options: str) -> Job:
    said = dict(re.findall(r"--(\S+) ?(\d+)?", options))
    numbers: dict[str, Any] = {name.replace("-", "_"): int(value) for name, value in said.items() if value}
    return replace(job, checkpointing=job.checkpointing or "checkpointing" in said, **numbers)


UNFITTING = [
    ("Qwen2.5-3B", "rtx4090", Job(seq=4096, micro_batch=2)),
    ("Qwen2.5-7B", "rtx4090", Job(checkpointing=True)),
    ("Qwen2.5-3B", "rtx4090", Job(seq=16384, checkpointing=True)),
    ("Llama-2-13B", "a100-80-sxm", Job(micro_batch=4)),
    ("Llama-2-70B", "a100-80-sxm", Job(gpus=4)),
]


@pytest.mark.parametrize(("model", "machine", "job"), fast(UNFITTING[:2], all_of=UNFITTING))
def test_what_would_do_does_and_less_of_it_would_not(model: str, machine: str, job: Job) -> None:
    facts, place = ModelFacts.from_name(model), Machine.load(machine)
    device, _ = limits(place)

    def needs(options: str) -> int:
        return predict(facts, place, with_options(job, options), SMALLEST).memory.device_bytes

    assert needs("") > device
    found = remedies(facts, place, job)
    assert bool(found) == (model != "Qwen2.5-7B")
    for one in found:
        assert needs(one.option) == one.device_bytes <= device
        assert not (job.checkpointing and "--checkpointing" in one.option)
        option, _, value = one.option.rpartition(" ")
        if option and not option.endswith("--gpus"):
            assert needs(f"{option} {2 * int(value)}") > device
        elif option and int(value) // 2 > job.gpus:
            assert needs(f"{option} {int(value) // 2}") > device


SMALL_HOSTS = [
    ("Llama-3-8B", "h100-sxm", Job(), "With these GPUs"),
    ("Llama-2-13B", "rtx4090", Job(seq=1024, checkpointing=True), "Even --micro-batch 1"),
    ("Qwen2.5-14B", "a100-80-sxm", Job(micro_batch=8), "What would do with"),
    ("Qwen2.5-7B", "h100-sxm", Job(gpus=1), "With these GPUs"),
    ("Llama-2-13B", "h100-sxm", Job(gpus=2), "With these GPUs"),
    ("Qwen2.5-14B", "h100-sxm", Job(gpus=2), "With these GPUs"),
    ("Qwen2.5-32B", "h100-sxm", Job(gpus=4, checkpointing=True), "With these GPUs"),
    ("Llama-2-13B", "h100-sxm", Job(gpus=2, stage=2, checkpointing=True), "With these GPUs"),
    ("Llama-2-70B", "rtx4090", Job(), "Even --micro-batch 1"),
    ("Llama-2-7B", "h100-sxm", Job(seq=16384), "What would do: "),
]


@pytest.mark.parametrize(("model", "machine", "job", "says"), fast(SMALL_HOSTS[:2], all_of=SMALL_HOSTS))
def test_memory_that_is_named_where_the_host_is_too_small_is_enough(
    model: str, machine: str, job: Job, says: str
) -> None:
    facts, place = ModelFacts.from_name(model), replace(Machine.load(machine), host_memory_bytes=round(64e9))

    def having(**memory: float) -> Machine:
        given: dict[str, Any] = {name: round(value) for name, value in memory.items()}
        return replace(place, **given)

    def fit(job: Job, **memory: float) -> bool:
        return make_plan(facts, having(**memory), job, quality="exact")["proposal"] is not None

    def none_fits(**memory: float) -> bool:
        return not choose(facts, having(**memory), job, budget=budget_of("published"))

    def figure(before: str) -> float:
        found = re.search(rf"{before} ([\d.]+ [GT]B)", sentences)
        return byte_count("", found[1]) if found else 0.0

    sentences = " ".join(of_nothing(facts, place, job))
    assert says in sentences
    gpu, host = figure("each GPU needs"), figure("With these GPUs the host needs")
    assert fit(job, device_memory_bytes=gpu)
    assert none_fits(device_memory_bytes=0.98 * gpu)
    assert bool(host) == (says == "With these GPUs")
    if host:
        assert fit(job, host_memory_bytes=host)
        assert none_fits(host_memory_bytes=0.98 * host)
    else:  # whatever the host has
        assert none_fits(host_memory_bytes=1e15)
    if least := re.search(r"Even (.*?) takes", sentences):
        memory = {"device_memory_bytes": figure("takes GPUs of"), "host_memory_bytes": figure("takes GPUs of .*? with")}
        assert fit(with_options(job, least[1]), **memory)
    do = re.search(r"What would do[^:]*: (.*?)\.(?: |$)", sentences)
    with_host = figure("What would do with") or 64e9
    for option in do[1].split(" or ") if do else ():
        assert fit(with_options(job, option.partition(" (")[0]), host_memory_bytes=with_host)


@pytest.mark.parametrize(
    "needed", [1, 999, 1_001, 999_600_000, 5_004_000_000, 19_000_000_001, 70_123_456_789, 2_345_678_901_234]
)
def test_memory_that_is_named_is_rounded_up_and_leaves_enough_free(needed: int) -> None:
    named = byte_count("", size_up(needed))
    assert needed <= named <= 1.011 * needed
    gpu = math.ceil(least_gpu(needed))
    limit, _ = limits(replace(Machine.load(MACHINE), device_memory_bytes=gpu))
    assert needed <= limit <= needed + 2


def test_advice_takes_no_more_of_the_host_than_there_is() -> None:
    facts, place, job = ModelFacts.from_name("Qwen2.5-7B"), Machine.load("rtx4090"), Job(checkpointing=True)
    weights = 2 * facts.parameters
    least = predict(facts, place, job, SMALLEST).memory
    needed = round((least.host_bytes + least.migration_bytes + weights) / 0.9)

    def said(host_bytes: int) -> str:
        return " ".join(of_nothing(facts, replace(place, host_memory_bytes=host_bytes), job))

    roomy, short = said(needed + 2), said(needed - weights // 2)
    assert '"offload_param": {"device": "cpu"}' in roomy
    assert "offload_param" not in short


def test_a_7b_model_fits_24_gb_but_not_with_accumulation() -> None:
    arguments = ["--model", "Llama-2-7B", "--hardware", "rtx4090", "--checkpointing"]
    fits = CliRunner().invoke(APP, arguments)
    assert fits.exit_code == 0
    short = CliRunner().invoke(APP, [*arguments, "--accumulation", "8"])
    assert short.exit_code == 1
    said = unwrapped(short.output)
    assert "(13.5 GB of that for gradients, which --accumulation 8 keeps from pass to pass)" in said
    assert "What would do: --accumulation 1 (19.1 GB of each GPU)." in said


def test_passes_take_their_compute_and_send_once() -> None:
    facts, place = ModelFacts.from_name("Qwen2.5-1.5B"), Machine.load("a100-80-sxm")
    one, four = (predict(facts, place, Job(accumulation=passes), SMALLEST) for passes in (1, 4))
    assert four.loads_ms["d2h"] == one.loads_ms["d2h"]
    assert four.compute_ms > 3.5 * one.compute_ms
    assert four.step_ms - four.compute_ms < one.step_ms - one.compute_ms + 1e-6  # more of it is hidden
    measured = predict(facts, place, Job(accumulation=4, compute_ms=400.0), SMALLEST)
    assert measured.compute_ms == pytest.approx(predict(facts, place, Job(compute_ms=400.0), SMALLEST).compute_ms)


def test_memory_that_is_given_counts_instead_of_the_machines() -> None:
    result = run("--host-memory", "4GB", "--gpu-memory", "6", "--seq", "512", "--json", "-")
    assert json.loads(result.stdout)["limits"]["host_bytes"] == round(0.9 * 4e9)
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpus", "0"], "--gpus is 0; it must be an integer from 1"),
        (["--gpus", "2"], "--gpus is 2; it must be an integer from 1 to 1"),
        (["--no-reshard"], "--no-reshard needs --gpus 2 or more"),
        (["--accumulation", "0"], "--accumulation is 0; it must be an integer from 1"),
        (["--hardware", "h100-sxm", "--gpus", "2", "--accumulation", "2"], "--accumulation 2 needs one GPU"),
        (["--nodes", "0"], "--nodes is 0; it must be an integer from 1"),
        (["--nodes", "2"], "--nodes 2 needs --network-gbps"),
        (["--network-gbps", "3"], "--network-gbps 3 needs --nodes 2 or more"),
        (["--nodes", "2", "--network-gbps", "0"], "--network-gbps is 0.0; it must be a number above 0"),
        (["--stage", "0"], "--stage is 0; it must be 1, 2 or 3"),
        (["--stage", "2", "--no-reshard"], "--no-reshard needs --stage 3"),
        (["--stage", "1", "--replicate"], "--replicate needs --stage 3"),
        (["--replicate"], "--replicate needs --gpus 2 or more of each of --nodes 2 or more"),
        (["--seq", "-1"], "--seq is -1"),
        (["--micro-batch", "0"], "--micro-batch is 0"),
        (["--dtype", "int8"], "--dtype is 'int8'; it must be bf16, fp16 or fp32"),
        (["--quality", "best"], "--quality is 'best'; it must be exact, published or loose"),
        (["--compute-ms", "nan"], "--compute-ms is nan"),
        (["--compute-ms", "0"], "--compute-ms is 0"),
        (
            ["--gpu-memory", "nan"],
            "--gpu-memory is 'nan'; it must be a number of GB above 0, or one with its unit, such as 64GB",
        ),
        (["--host-memory", "0"], "--host-memory is '0'; it must be a number of GB above 0"),
        (["--hardware", "abacus"], "--hardware 'abacus'"),
        (["--hardware", "4xH100"], "must be a machine without a number: --hardware h100-sxm --gpus 4"),
        (["--gpu", "2 x 4090"], "must be a machine without a number: --hardware rtx4090 --gpus 2"),
        (["--model", "abacus"], "--model 'abacus'"),
        (["--json", "/no/such/folder/x.json"], "--json '/no/such/folder/x.json'"),
    ],
)
def test_bad_input_is_a_sentence(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, BadInputError), result.output
    assert says in str(result.exception)
    assert "\n" not in str(result.exception)
    assert result.stdout == ""


@pytest.mark.parametrize(("gpus", "stage"), [(1, None), (4, 3), (4, 2)])
def test_the_section_has_the_stage_that_was_planned(gpus: int, stage: int | None) -> None:
    job = Job(seq=512, gpus=gpus, stage=stage or 3)
    found = make_plan(small_model(), Machine.load("a100-40-sxm"), job, quality="published")
    shown = (found["proposal"], *found["alternatives"], *found["baselines"].values())
    assert {one["ds_config"].get("stage") for one in shown} == {stage}
