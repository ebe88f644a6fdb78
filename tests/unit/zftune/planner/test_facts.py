"""Models and machines: published parameter counts, the runtime's own shapes, and files that are wrong."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zftune.errors import BadInputError
from zftune.planner.machine import FIGURES, machine_names, parse_machine, thread_unit_us
from zftune.planner.model import Machine, ModelFacts, model_facts
from zftune.workload import build_model

# As the models' own pages give them; ties count once.
PUBLISHED = {
    "Llama-2-7B": 6_738_415_616,
    "Llama-2-13B": 13_015_864_320,
    "Llama-3-8B": 8_030_261_248,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Llama-3-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Mistral-7B": 7_241_732_096,
    "Llama-2-70B": 68_976_648_192,
    "OPT-13B": 12_853_473_280,
    "OPT-30B": 29_974_540_288,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_public_models_have_their_parameters(name: str) -> None:
    facts = ModelFacts.from_name(name.lower())
    assert facts.name == name
    assert facts.parameters == PUBLISHED[name]
    assert len(facts.stages) == len(facts.weights)
    assert list(facts.stages) == sorted(facts.stages)
    assert set(facts.stages) == set(range(facts.layers + 1))


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("meta-llama/Llama-3-8B", "Llama-3-8B"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "Llama-3-8B"),
        ("meta-llama/Llama-3.1-8B", "Llama-3-8B"),
        ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7B"),
        ("llama2-7b", "Llama-2-7B"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B"),
        ("mistralai/Mistral-7B-v0.1", "Mistral-7B"),
        ("facebook/opt-13b", "OPT-13B"),
    ],
)
def test_a_model_by_the_name_that_a_hub_has_for_it(said: str, meant: str) -> None:
    assert model_facts(said).name == meant


@pytest.mark.parametrize(
    ("said", "near"),
    [("Llama-2-8B", "Llama-2-7B"), ("Qwen2.5-8B", "Qwen2.5-7B"), ("meta-llama/Lama-3-8B", "Llama-3-8B")],
)
def test_a_misspelt_model_is_told_the_near_ones(said: str, near: str) -> None:
    with pytest.raises(BadInputError, match=rf"or P,layers,hidden; did you mean .*{re.escape(near)}"):
        model_facts(said)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("h100", "h100-sxm"),
        ("H100-SXM", "h100-sxm"),
        ("4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("a100", "a100-80-sxm"),
        ("a100-40gb", "a100-40-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-80-sxm"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
    ],
)
def test_a_machine_by_a_short_name_or_its_gpus(said: str, meant: str) -> None:
    assert Machine.load(said) == Machine.load(meant)


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_own_sizes_are_those_of_the_workload(size: str) -> None:
    module = build_model(size, dtype=torch.bfloat16, seed=0).module
    facts = ModelFacts.from_name(size)
    assert list(facts.weights) == [tuple(p.shape) for p in module.parameters()]
    assert ModelFacts.from_module(size, module) == facts


def test_only_what_is_trained_counts() -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7, bias=False))
    module[0].requires_grad_(requires_grad=False)
    facts = ModelFacts.from_module("part", module)
    assert (facts.parameters, facts.trainable, facts.weights, facts.dtype) == (55, 35, ((7, 5),), "fp32")
    module.requires_grad_(requires_grad=False)
    with pytest.raises(BadInputError, match="requires a gradient"):
        ModelFacts.from_module("none", module)
    with pytest.raises(BadInputError, match=r"torch\.float64"):
        ModelFacts.from_module("wide", nn.Linear(2, 2).double())


def test_a_directory_is_built_without_reading_weights(mini_model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((mini_model / "config.json").read_text())
    facts = ModelFacts.from_dir(bare)
    assert (facts.name, facts.parameters, facts.layers, facts.hidden) == ("bare", 51_392, 1, 64)
    # Embedding, seven projections and two norms of the layer, the last norm; the output is the embedding again.
    assert facts.stages == (0, *[0] * 9, 1)
    assert facts.weights[0] == (256, 64)


def test_weights_that_are_stored_transposed_are_known(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the huggingface extra is not installed")
    transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=256).save_pretrained(tmp_path)
    facts = ModelFacts.from_dir(tmp_path)
    transposed = [facts.weights[number] for number in sorted(facts.transposed)]
    assert transposed == [(64, 192), (64, 64), (64, 256), (256, 64)] * 2


def test_a_size_makes_about_as_many_parameters() -> None:
    facts = model_facts("7B,32,4096")
    assert facts.layers == 32
    assert facts.parameters == pytest.approx(7e9, rel=1e-3)
    assert sum(math.prod(shape) for shape in facts.weights) == facts.parameters
    assert model_facts("7e9,32,4096").weights == facts.weights == model_facts("7000M,32,4096").weights


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpt-5", "it must be tiny"),
        ("7B,32", "P,layers,hidden"),
        ("7B,32,4096,1", "P,layers,hidden"),
        ("nan,32,4096", "P,layers,hidden"),
        ("inf,32,4096", "P,layers,hidden"),
        ("0,32,4096", "1 to 1e13 parameters"),
        ("7B,0,4096", "1 to 1000 layers"),
        ("", "it must be tiny"),
        ("1M,32,4096", "it must have at least 2147876864 parameters"),
        ("x" * 5000, "it must be tiny"),
        ("/", "config.json"),
    ],
)
def test_a_wrong_model_is_a_sentence(text: str, says: str) -> None:
    with pytest.raises(BadInputError, match=r"^--model '") as found:
        model_facts(text)
    assert says in str(found.value)
    assert "\n" not in str(found.value)


def test_a_configuration_that_cannot_be_built_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no such model"}')
    with pytest.raises(BadInputError, match="cannot be built") as found:
        ModelFacts.from_dir(tmp_path)
    assert "\n" not in str(found.value)


def test_every_machine_says_where_its_figures_come_from() -> None:
    names = machine_names()
    kinds = ("a100-40-pcie", "a100-40-sxm", "a100-80-pcie", "a100-80-sxm", "h100-pcie", "h100-sxm", "h200-sxm")
    assert {*kinds, "rtx3090", "rtx4090", "rtx5090", "l40s", "gh200"} <= set(names)
    for name in names:
        machine = Machine.load(name.upper())
        assert machine.name == name
        assert set(machine.source) == set(FIGURES)
        assert all(len(source) > 5 for source in machine.source.values())
        assert machine.source["host_gbps"].startswith("estimate")


def test_host_rates_are_shares_of_what_the_memory_can_do() -> None:
    # DGX A100: 16 channels of DDR4-3200, 25.6 GB/s each, of which 70%.
    assert Machine.load("a100-40-sxm").host_gbps == pytest.approx(0.70 * 16 * 25.6, abs=0.05)
    # Two channels of DDR5-5600, 44.8 GB/s each, of which 75%.
    assert Machine.load("rtx5090").host_gbps == pytest.approx(0.75 * 2 * 44.8, abs=0.05)


def text_of(**changes: Any) -> str:
    figures: dict[str, Any] = dict.fromkeys(FIGURES, 1) | {"compute_share": 0.5} | changes
    rows = "".join(f"{name} = {value}\n" for name, value in figures.items() if value is not None)
    sources = "".join(f'{name} = "made up"\n' for name in FIGURES)
    return f'name = "m"\ngpu = "g"\n[figures]\n{rows}[source]\n{sources}'


def test_a_machine_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text_of(host_gbps=42.5))
    assert Machine.load(str(file)).host_gbps == 42.5
    file.write_text(text_of(thread_unit_us=None, thread_layer_us=None))
    assert (Machine.load(str(file)).thread_unit_us, Machine.load(str(file)).thread_layer_us) == (None, None)


def test_this_machine_measures_a_call_of_the_thread() -> None:
    assert 0 < thread_unit_us() < 1e4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "it is not TOML"),
        (text_of(host_gbps=None), "figures.host_gbps is None"),
        (text_of(host_gbps=0), "figures.host_gbps is 0; it must be a number > 0"),
        (text_of(host_gbps="nan"), "figures.host_gbps is nan"),
        (text_of(host_gbps="inf"), "figures.host_gbps is inf"),
        (text_of(host_gbps="true"), "figures.host_gbps is True"),
        (text_of(gpus=1.5), "figures.gpus is 1.5; it must be an integer > 0"),
        (text_of(thread_unit_us=0), "figures.thread_unit_us is 0; it must be a number > 0"),
        (text_of(compute_share=1.1), "a number above 0, at most 1"),
        (text_of(warp_speed=9), "figures.warp_speed"),
        (text_of().replace('cores = "made up"\n', ""), "source.cores is None"),
        (text_of() + "[more]\n", "'more'"),
        ('name = "m"\n', "gpu is None"),
        ('name = "m"\ngpu = "g"\n', "has no [figures]"),
    ],
)
def test_a_wrong_machine_is_a_sentence(text: str, says: str) -> None:
    with pytest.raises(BadInputError, match=r"^--hardware 'x\.toml'") as found:
        parse_machine(text, "x.toml")
    assert says in str(found.value)


@pytest.mark.parametrize("name", ["abacus", "", "/", "y" * 5000, "h100-sxn"])
def test_an_unknown_machine_names_those_that_there_are_and_the_near_ones(name: str) -> None:
    near = ".* or a TOML file; did you mean h100-sxm" if name == "h100-sxn" else ""
    with pytest.raises(BadInputError, match=f"it must be here, a100-40-pcie{near}"):
        Machine.load(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_here_needs_a_gpu() -> None:
    with pytest.raises(BadInputError, match="no GPU"):
        Machine.here()
