"""Random small models, machines and knobs; each is trained for a few steps and its allocations are replayed."""

from __future__ import annotations

import gc
import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch

from planning.allocator import replay
from planning.record import RecordedAccelerator, Recorder, leave_out_host, leave_out_importance
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zftune.emulation import Rig
from zftune.planner.choosing import LEAST_HEADROOM_BYTES, choose
from zftune.planner.closed_form import predict
from zftune.planner.memory import CONTEXT_BYTES
from zftune.planner.model import Job, Machine, ModelFacts, Prediction
from zftune.planner.rates import Rates

MIB = 1 << 20
STEPS = 6


@dataclass(frozen=True, slots=True)
class Case:
    """One random model on one random machine."""

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    seq: int
    micro_batch: int
    checkpointing: bool
    compute_ms: float
    link_share: float
    """Time of a whole model's gradients on the link, over compute."""
    host_share: float
    memory_share: float
    """Of the predicted need: the device's memory."""
    config: ZenFlowConfig


def random_case(seed: int) -> Case:
    """Of a seed always the same."""
    draw = random.Random(seed)
    window = draw.choice([1, 2, 3])
    overlap = draw.random() < 0.8
    return Case(
        layers=draw.randint(2, 5),
        hidden=64 * draw.randint(1, 6),
        intermediate=64 * draw.randint(2, 16),
        vocabulary=256 * draw.randint(1, 16),
        seq=32 * draw.randint(1, 6),
        micro_batch=draw.randint(1, 4),
        checkpointing=draw.random() < 0.5,
        compute_ms=draw.choice([20.0, 60.0]),
        link_share=draw.uniform(0.1, 1.5),
        host_share=draw.uniform(0.2, 2.0),
        memory_share=draw.uniform(0.7, 1.4),
        config=ZenFlowConfig(
            topk_ratio=draw.choice([0.0, 0.05, 0.1, 0.3]),
            offload_ratio=draw.choice([1.0, 1.0, 1.0, 0.7, 0.3, 0.0]),
            update_interval=window,
            apply_lag=draw.choice([None, 1]) if overlap else None,
            overlap_step=overlap,
            pipeline=draw.choice(["bucket", "bucket", "none"]),
            stream=draw.random() < 0.8,
            bucket_bytes=1 << draw.randint(14, 23),
            staging_bytes=1 << draw.randint(16, 30),
            select_interval=1 << 20,
            host_threads=1,
        ),
    )


def build(case: Case) -> torch.nn.Module:
    """The case's model, in bf16 and in training mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = case.hidden // 32
    module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=case.vocabulary,
            hidden_size=case.hidden,
            intermediate_size=case.intermediate,
            num_hidden_layers=case.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    module.train()
    if case.checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return module


def facts_of(case: Case, module: torch.nn.Module) -> ModelFacts:
    """What the planner is told."""
    shapes, stages = [], []
    for name, parameter in module.named_parameters():
        shapes.append(tuple(parameter.shape))
        parts = name.split(".")
        stages.append(int(parts[2]) if parts[1] == "layers" else 0 if "embed" in name else case.layers)
    elements = sum(math.prod(shape) for shape in shapes)
    return ModelFacts(
        name="random",
        parameters=elements,
        trainable=elements,
        layers=case.layers,
        hidden=case.hidden,
        weights=tuple(shapes),
        dtype="bf16",
        stages=tuple(stages),
        before_layers=sum("embed" in name for name, _ in module.named_parameters()),
        heads=case.hidden // 32,
        intermediate=case.intermediate,
        vocabulary=case.vocabulary,
        key_value_width=case.hidden,
    )


def rig_of(case: Case, model: ModelFacts) -> Rig:
    """The case's machine as a rig."""
    elements = sum(math.prod(shape) for shape in model.weights if len(shape) > 1)
    link = 2 * elements / (case.link_share * case.compute_ms * 1e-3) / 1e9
    host = 28 * elements / (case.host_share * case.compute_ms * 1e-3) / 1e9
    thirds = case.compute_ms / 3
    return Rig("random", "", thirds, 2 * thirds, link, link, host, None, 1.0)


def machine_of(rig: Rig, device_memory_bytes: int) -> Machine:
    """The case's machine as the planner is told it."""
    return Machine(
        name="random",
        source={},
        gpu="random",
        gpus=1,
        device_memory_bytes=device_memory_bytes,
        device_gbps=1e3,
        compute_tflops=1.0,
        compute_share=1.0,
        link_d2h_gbps=rig.link_d2h_gbps,
        link_h2d_gbps=rig.link_h2d_gbps,
        host_gbps=rig.host_gbps,
        host_update_gelements_s=1e6,
        cores=1,
        host_memory_bytes=1 << 40,
        comm_gbps=1.0,
    )


def run_case(case: Case, steps: int = STEPS, *, chosen: bool = False) -> dict[str, Any]:
    """Predict, train, replay.

    Args:
        case: the model, the machine and its knobs.
        steps: to train.
        chosen: take the knobs that the planner chooses for a machine of that memory, which leaves nothing else to it.
    """
    torch.manual_seed(0)
    module = build(case)
    model = facts_of(case, module)
    rig = rig_of(case, model)
    job = Job(seq=case.seq, micro_batch=case.micro_batch, checkpointing=case.checkpointing)
    rates = Rates.of_rig(rig)
    predicted = predict(model, machine_of(rig, 1 << 40), job, case.config, rates=rates)
    if chosen:
        room = LEAST_HEADROOM_BYTES + CONTEXT_BYTES + round(max(1.0, case.memory_share) * _need(predicted))
        machine = machine_of(rig, room)
        found = choose(model, machine, job, budget=math.inf, memory_headroom=0.0, rates=rates)
        if not found:
            return {"proposed": False, "chosen": True}
        config, predicted = found[0]
        case = replace(case, config=config)
    events, host = train(case, module, rig, steps)
    allocator = replay(events)
    need = _need(predicted)
    return {
        "chosen": chosen,
        "predicted_bytes": need,
        "reserved_bytes": allocator.peak_reserved,
        "allocated_bytes": allocator.peak_allocated,
        "by_use": dict(predicted.memory.device_by_use),
        "parameters": model.parameters,
        "events": len(events),
        "host_predicted": dict(predicted.memory.host_by_use),
        "host_allocated": host,
        "proposed": chosen or case.memory_share >= 1,
    }


def _need(predicted: Prediction) -> int:
    """Of the allocator, the context left out."""
    return predicted.memory.device_bytes - CONTEXT_BYTES


def train(
    case: Case, module: torch.nn.Module, rig: Rig, steps: int
) -> tuple[list[tuple[int, int, str]], dict[str, int]]:
    """Allocations of some steps, the first one included, and the host memory by use."""
    recorder = Recorder()
    device = RecordedAccelerator(rig)
    device.recorder = recorder
    device.attach(module)
    optimizer = ZenFlowAdamW(module.parameters(), lr=1e-4, config=case.config, module=module, device=device)
    leave_out_importance(optimizer._training.runtime.kernels, recorder)
    leave_out_host(optimizer._training.runtime.memory, recorder)
    gc.collect()
    gc.freeze()
    try:
        for tensor in (*module.parameters(), *module.buffers()):
            recorder.add(tensor.detach(), "compute")
        with recorder:
            for _ in range(steps):
                tokens = torch.randint(case.vocabulary, (case.micro_batch, case.seq))
                module(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        host = optimizer.host_bytes()
    finally:
        gc.unfreeze()
        optimizer.abandon()
        device.close()
    return recorder.events, host
