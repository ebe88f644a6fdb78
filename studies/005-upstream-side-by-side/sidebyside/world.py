"""Text, pretrained weights, batches and the held-out loss: the same for every system."""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sidebyside.setting import METHOD, TOKENS, WEIGHT_DECAY, Size
from zftune.workload import Batch, ByteTokenizer, Workload, batches, build_model, load_text

CHUNK, HELD_OUT = 4096, 8  # every eighth chunk of so many bytes is held out
PRETRAIN_BATCH, PRETRAIN_TOKENS, PRETRAIN_LR = 4, 64, 1e-3


def texts() -> tuple[Tensor, Tensor, Tensor]:
    """What a model is pretrained on (Python's standard library), trained on, and evaluated on (Python's C headers)."""
    encode = ByteTokenizer().encode
    chunks = encode(load_text(Path(sysconfig.get_path("include"))).data).split(CHUNK)
    train = torch.cat([chunk for place, chunk in enumerate(chunks) if place % HELD_OUT])
    return encode(load_text().data), train, torch.cat(list(chunks[::HELD_OUT]))


def digest() -> str:
    """Tells one pair of texts from another: figures on different texts do not compare."""
    found = hashlib.sha256()
    for text in texts():
        found.update(text.numpy().tobytes())
    return found.hexdigest()[:16]


def feed(train: Tensor, seed: int) -> Iterator[Batch]:
    """Endless micro-batches of one sequence."""
    return batches(train, micro_batch=1, sequence=TOKENS, seed=2000 + seed)


def held_out_loss(module: nn.Module, held_out: Tensor, sequences: int) -> float:
    """Mean loss in nats a byte over evenly spaced sequences, the same in every run."""
    starts = torch.linspace(0, held_out.numel() - TOKENS, sequences).long()
    tokens = held_out[starts[:, None] + torch.arange(TOKENS)].long()
    with torch.no_grad():
        parts = tokens.split(8)
        losses = [float(module(input_ids=part, labels=part, use_cache=False).loss) * len(part) for part in parts]
    return math.fsum(losses) / sequences


def load(folder: Path) -> Workload:
    """The pretrained model in bf16, in training mode."""
    return build_model(folder, dtype=torch.bfloat16, seed=0)


def pretrained(size: Size, cache: Path, say: Callable[[str], None]) -> Path:
    """Folder of a model that plain AdamW trained in fp32 for a while; kept in `cache`."""
    text, *_ = texts()
    mark = hashlib.sha256(text.numpy().tobytes()).hexdigest()[:12]
    folder = cache / f"{size.name}-{size.hidden}x{size.layers}-{size.pretrain_steps}-{mark}-{METHOD}"
    if (folder / "config.json").exists():
        return folder
    module = _fresh(size)
    optimizer = torch.optim.AdamW(module.parameters(), lr=PRETRAIN_LR, weight_decay=WEIGHT_DECAY, fused=True)
    drawn = batches(text, micro_batch=PRETRAIN_BATCH, sequence=PRETRAIN_TOKENS, seed=1000)
    for step in range(size.pretrain_steps):
        say(f"{size.name}: pretraining, step {step + 1} of {size.pretrain_steps}")
        share = min(
            (step + 1) / (0.05 * size.pretrain_steps), 0.5 + 0.5 * math.cos(math.pi * step / size.pretrain_steps)
        )
        optimizer.param_groups[0]["lr"] = PRETRAIN_LR * min(1.0, share)
        batch = next(drawn)
        module(input_ids=batch.input_ids, labels=batch.labels, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    partial = folder.with_name(folder.name + ".part")
    _save(module, partial)
    partial.replace(folder)
    return folder


def _save(module: Any, folder: Path) -> None:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        module.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()


def _fresh(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=ByteTokenizer.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        intermediate_size=size.hidden * 11 // 4,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=size.hidden // 64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        module: nn.Module = LlamaForCausalLM(config)
    return module.train()
