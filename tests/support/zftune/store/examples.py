"""Presets, machines and runs to put into a store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zftune.store.types import Evidence, Hardware, Key, Measurement, Model, Preset, Ratios

KNOBS: dict[str, Any] = {
    "topk_ratio": 0.1,
    "select_strategy": "step",
    "select_interval": 32,
    "update_interval": 4,
    "full_warm_up_rounds": 0,
    "overlap_step": True,
    "offload_ratio": 1.0,
    "deferred_update": "replay",
    "host_threads": 6,
}
KEY = Key(
    model_id="00112233445566aa",
    hw_id="8899aabbccddeeff",
    backend="zenflow",
    stage=2,
    dtype="bfloat16",
    world_size=1,
    micro_batch=4,
    sequence=1024,
    checkpointing=True,
    quality="published",
)
MODEL = Model(model_id=KEY.model_id, name="Llama-2-7b-hf", parameters=7_000_000_000, trainable=7_000_000_000)
HARDWARE = Hardware(
    hw_id=KEY.hw_id,
    gpu="NVIDIA A100-SXM4-40GB",
    gpu_memory_bytes=40 << 30,
    cpu_model="AMD EPYC 7742",
    numa_nodes=2,
    ram_bytes=512 << 30,
)
EVIDENCE = Evidence(
    step_ms=800.0,
    baseline="zero_offload",
    baseline_step_ms=2000.0,
    gain_error=0.02,
    measurements=3,
    steps=72,
    measured_unix_s=1_790_000_000.0,
)
PRESET = Preset(
    key=KEY,
    knobs=KNOBS,
    evidence=EVIDENCE,
    model=MODEL,
    hardware=HARDWARE,
    ratios=Ratios(2.0, 0.5),
    versions={"zftune": "0.1.0", "torch": "2.13.0"},
    usable_cores=8.0,
)


def other(
    *, model_id: str = KEY.model_id, hw_id: str = KEY.hw_id, ratios: Ratios | None = PRESET.ratios, **key: Any
) -> Preset:
    return replace(
        PRESET,
        key=replace(KEY, model_id=model_id, hw_id=hw_id, **key),
        model=replace(MODEL, model_id=model_id),
        hardware=replace(HARDWARE, hw_id=hw_id),
        ratios=ratios,
    )


def measurement(step_ms: float = 800.0, **more: Any) -> Measurement:
    return Measurement(role="explore", steps=24, step_ms=step_ms, began_unix_s=1_790_000_000.0, **more)
