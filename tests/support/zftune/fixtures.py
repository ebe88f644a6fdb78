"""A model and a rig that are small enough to profile in a second or two, and a store in memory."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from tests.support import fork_server
from zftune.store import open_store
from zftune.store.store import Store

# In milliseconds. The pads are more than ten times as long as the mini model's real work: a busy machine keeps up.
MINI_TIMELINE = {"forward_ms": 40, "backward_ms": 40, "d2h_ms": 20, "host_ms": 80, "h2d_ms": 20, "scale": 1}
MINI_POSITIONS = 128


class Clock:
    """Wall clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def context() -> ForkServerContext:
    return fork_server.context()


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store("sqlite://", environment={"HOME": "/nowhere"}) as store:
        yield store


@pytest.fixture
def timed(clock: Clock) -> Iterator[Store]:
    with open_store("sqlite://", environment={"HOME": "/nowhere"}, clock=clock) as store:
        yield store


@pytest.fixture(scope="session")
def mini_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model of 51,392 parameters, one layer, 128 positions, and bytes as tokens."""
    pytest.importorskip("transformers", reason="the huggingface extra is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=MINI_POSITIONS,
    )
    folder = tmp_path_factory.mktemp("models") / "mini"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def mini_rig(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rig file whose ZeRO-Offload step takes a fifth of a second."""
    file = tmp_path_factory.mktemp("rigs") / "mini.toml"
    file.write_text(rig_text("mini", **MINI_TIMELINE))
    return file


def rig_text(name: str, **timeline: float) -> str:
    return f'name = "{name}"\n[timeline]\n' + "".join(f"{key} = {value}\n" for key, value in timeline.items())
