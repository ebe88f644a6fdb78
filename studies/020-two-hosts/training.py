"""One rank of a training over FSDP2, as `torchrun` starts it: python training.py FOLDER SYSTEM [--hidden N ...]

SYSTEM is "FSDP2" (torch's fused AdamW), "exact" or "published". The first rank leaves FOLDER/SYSTEM.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zenflow import ZenFlowAdamW, ZenFlowConfig
from zftune.integrations.fsdp2 import units_of
from zftune.workload import ByteTokenizer, Workload, batches, load_text

TOKENS, LR, GATHERS = 16, 5e-5, 12
COUNTER = Path("/sys/class/net/zftune0/statistics/tx_bytes")
CONFIGS = {
    "exact": ZenFlowConfig.zero_offload(pipeline="bucket"),
    "published": ZenFlowConfig(topk_ratio=0.1, update_interval=4, select_interval=32),
}


def workload_of(hidden: int, layers: int) -> Workload:
    """A Llama over bytes in fp32, the same on every host."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=ByteTokenizer.vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(0)
    module: nn.Module = LlamaForCausalLM(config)
    return Workload("study", module.train(), torch.float32, ByteTokenizer(), ByteTokenizer.vocabulary, TOKENS)


def network_gbps(unit: nn.Module) -> float:
    """What a rank sends in all-gathers of a layer's size, one behind the other as in a step, in GB/s; 0 on one rank."""
    ranks = torch.distributed.get_world_size()
    if ranks == 1:
        return 0.0
    own = torch.ones(sum(parameter.numel() for parameter in unit.parameters()) // ranks)
    whole = torch.empty(ranks * own.numel())
    seconds = []
    torch.distributed.barrier()
    for _ in range(GATHERS):
        began = time.perf_counter()
        torch.distributed.all_gather_into_tensor(whole, own)
        seconds.append(time.perf_counter() - began)
    return (ranks - 1) * own.nbytes / statistics.median(seconds) / 1e9


def sent_bytes() -> int:
    """That have gone over the cable, with all that protocols add."""
    return int(COUNTER.read_text()) if COUNTER.exists() else 0


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("system")
    arguments.add_argument("--hidden", type=int, default=384)
    arguments.add_argument("--layers", type=int, default=6)
    arguments.add_argument("--steps", type=int, default=12)
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    work = workload_of(asked.hidden, asked.layers)
    gbps = network_gbps(units_of(work.module)[0])
    if ranks > 1:
        work.shard()
    parameters = list(work.module.parameters())
    optimizer: Any
    if asked.system == "FSDP2":
        optimizer = torch.optim.AdamW(parameters, lr=LR, fused=True)
    else:
        optimizer = ZenFlowAdamW(parameters, lr=LR, config=CONFIGS[asked.system], module=work.module)
    feed = batches(ByteTokenizer().encode(load_text(None).data), micro_batch=1, sequence=TOKENS, seed=rank)
    marks, sent = [], []
    for _ in range(asked.steps):
        sent.append(sent_bytes())
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = work.loss(next(feed))
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        marks.append((forward - began, backward - forward, time.perf_counter() - backward))
    sent.append(sent_bytes())
    mean = loss.detach() / ranks
    torch.distributed.all_reduce(mean)
    measured = marks[4:]  # the first make the state, and FSDP2's buffers
    names = ("forward_s", "backward_s", "optimizer_s")
    found: dict[str, Any] = {
        name: statistics.fmean(parts) for name, parts in zip(names, zip(*measured, strict=True), strict=True)
    }
    steps = [sum(parts) for parts in measured]
    # Steps of a window differ: the mean is of whole windows.
    found |= {"step_s": statistics.fmean(steps), "steps_s": steps, "loss": float(mean), "network_gbps": gbps}
    found["sent_bytes"] = (sent[-1] - sent[4]) / len(measured)  # a step
    if rank == 0:
        (asked.folder / f"{asked.system}.json").write_text(json.dumps(found))
    if asked.system != "FSDP2":
        optimizer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
