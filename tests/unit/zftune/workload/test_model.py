from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from zftune.errors import BadInputError
from zftune.workload import TextCorpus, Workload, batches, build_model, load_text

pytest.importorskip("transformers", reason="the huggingface extra is not installed")


@pytest.fixture(scope="module")
def tiny() -> Workload:
    return build_model("tiny", dtype=torch.bfloat16, seed=0)


def save(folder: Path, **changes: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(**{**sizes, "num_attention_heads": 2, "num_key_value_heads": 2, **changes})
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_tiny_has_enough_columns_and_layers(tiny: Workload) -> None:
    assert (tiny.parameters, tiny.trainable) == (869_504, 869_504)
    weights = [parameter for parameter in tiny.module.parameters() if parameter.dim() == 2]
    assert min(weight.shape[1] for weight in weights) >= 128
    assert {parameter.dtype for parameter in tiny.module.parameters()} == {torch.bfloat16}
    assert tiny.module.training


def test_rotary_frequencies_keep_their_precision(tiny: Workload) -> None:
    assert {buffer.dtype for buffer in tiny.module.buffers() if buffer.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_size_trains_as_transformers_llama_does_to_the_bit(dtype: torch.dtype) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=2,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        theirs = LlamaForCausalLM(config).train()
    for parameter in theirs.parameters():
        parameter.data = parameter.data.to(dtype)
    ours = build_model("tiny", dtype=dtype, seed=5)
    batch = next(batches(ours.encode(load_text(max_bytes=5_000)), micro_batch=2, sequence=32, seed=0))
    losses = ours.loss(batch), theirs(input_ids=batch.input_ids, labels=batch.labels, use_cache=False).loss
    assert losses[0].item() == losses[1].item()
    for loss in losses:
        loss.backward()
    pairs = zip(ours.module.named_parameters(), theirs.named_parameters(), strict=True)
    for (name, parameter), (their_name, their_parameter) in pairs:
        assert name == their_name
        assert torch.equal(parameter, their_parameter)
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, their_parameter.grad)


def test_tiny_learns(tiny: Workload) -> None:
    feed = batches(tiny.encode(load_text(max_bytes=50_000)), micro_batch=2, sequence=32, seed=0)
    model = build_model("tiny", dtype=torch.float32, seed=0)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss = model.loss(next(feed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.55, abs=0.2)  # ln(256): nothing learned yet
    assert losses[-1] < losses[0] - 1


def test_seed_fixes_the_weights_and_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (build_model("tiny", dtype=torch.float32, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    weights = [torch.cat([p.flatten() for p in workload.module.parameters()]) for workload in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_describe_is_the_workload_of_a_profile(tiny: Workload) -> None:
    assert tiny.describe(micro_batch=1, sequence=64, text="notes") == {
        "model": "tiny",
        "parameters": 869_504,
        "trainable": 869_504,
        "dtype": "bfloat16",
        "micro_batch": 1,
        "sequence": 64,
        "text": "notes",
    }


def test_a_directory_is_loaded_with_its_weights(tmp_path: Path) -> None:
    folder = save(tmp_path / "my-model", tie_word_embeddings=True)
    first, again = (build_model(folder, dtype=torch.float32, seed=seed) for seed in (0, 1))
    assert first.name == "my-model"
    assert all(map(torch.equal, first.module.parameters(), again.module.parameters()))
    tokens = first.encode(TextCorpus("t", b"some text", 1, False))
    assert tokens.tolist() == list(b"some text")
    loss = first.loss(next(batches(tokens, micro_batch=1, sequence=8, seed=0)))
    assert loss.isfinite()


def test_a_directory_brings_its_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the huggingface extra is not installed")
    from transformers import PreTrainedTokenizerFast

    folder = save(tmp_path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "hello": 1, "far": 299}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    workload = build_model(folder, dtype=torch.float32, seed=0)
    assert workload.encode(TextCorpus("t", b"hello big far", 1, False)).tolist() == [1, 0, 299]


def test_a_vocabulary_without_room_for_bytes_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, vocab_size=100)
    with pytest.raises(BadInputError, match="vocabulary of 100; bytes as tokens need 256"):
        build_model(folder, dtype=torch.float32, seed=0)


@pytest.mark.parametrize("name", ["foo", "", "/nowhere/at/all"])
def test_an_unknown_name_is_one_sentence(name: str) -> None:
    with pytest.raises(BadInputError) as caught:
        build_model(name, dtype=torch.float32, seed=0)
    assert str(caught.value) == (
        f"--model is '{name}'; it must be tiny, small, medium, or a directory that holds a config.json"
    )


@pytest.mark.parametrize("config", ["not json", "{}", '{"model_type": "nonesuch"}', '{"model_type": "llama"}'])
def test_a_broken_directory_is_one_sentence(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(BadInputError, match=r"^--model '.*': cannot be loaded \(.*\); give") as caught:
        build_model(tmp_path, dtype=torch.float32, seed=0)
    assert "\n" not in str(caught.value)
