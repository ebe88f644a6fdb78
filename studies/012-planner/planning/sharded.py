"""Part 4: published steps of several GPUs, beside what `zftune plan` says of the machine that is named.

Of FSDP2 alone every set-up is known but the share of a GPU's rate that its compute reaches, and that is also
taken from one of the rows. Where tokens are not published, compute is: as published, or what the same source's step
without offloading leaves of it. DeepSpeed's steps are not this runtime's: planned is what ours would take there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zenflow import ZenFlowConfig
from zftune.planner.closed_form import predict
from zftune.planner.model import Job, Machine, ModelFacts, model_facts
from zftune.planner.plan import BASELINES
from zftune.planner.rates import Rates

PUBLISHED = ZenFlowConfig(topk_ratio=0.1, update_interval=4)
PIPELINED = ZenFlowConfig.zero_offload(pipeline="bucket")
SYSTEMS = {"FSDP2": BASELINES["no_offload"], "ZeRO-Offload": BASELINES["zero_offload"]}
SYSTEMS |= {"ZenFlow": PUBLISHED, "full offload": PIPELINED}
UNNAMED_GBPS = 160.0
"""The network of the 64 A100s is not named: from 20 GB/s of a machine on it is hidden, within 4% of a step."""
LEFT_OUT = {
    "Twin-Flow: OPT-30B, 8 H100, 6x; OPT-13B, 8 A100-40, 3x": "neither ratio nor batch are published",
    "ZenFlow: up to 5x, and 6.3x over ZeRO-Infinity": "model, batch and host of the greatest gain are not named",
    "ZenFlow: Llama-2-7B, 4 A100, 0.5 s without offloading": "no batch; its backward pass with offloading takes 2 s",
    "DeepSpeedExamples: Llama-2-7B, 2 GPUs, 0.7 and 1.9 s": "neither GPU, host nor tokens are named (part 2 has it)",
    "SuperOffload: Llama-70B, 4 GH200": "no step of it is published",
    "RoundPipe: 8 RTX 4090, 1.48 to 2.16x": "pipelined stages on stateless GPUs, another schedule than any here",
    "Megatron-LM: FSDP2 with a CPU's AdamW, 1,227 s and 15.5 s": "8 ranks of one thread each, which no plan proposes",
    "torchtitan with float8, tensor or pipeline parallelism": "other arithmetic and collectives",
    "prime-rl: 32K and 64K tokens": "a range, or before the author's correction",
}


@dataclass(frozen=True, slots=True)
class Step:
    """A published figure, in ms, and what the planner says."""

    what: str
    published_ms: float
    planned_ms: float
    given_ms: float | None
    """What it says with the compute that another row shows; None: compute is given already."""
    note: str

    @property
    def off(self) -> float:
        """Relative."""
        return self.planned_ms / self.published_ms - 1

    @property
    def off_given(self) -> float | None:
        """Relative, with compute given."""
        return None if self.given_ms is None else self.given_ms / self.published_ms - 1


def steps() -> list[Step]:
    """All of them."""
    return [*_fsdp2(), _more_machines(), *_deepspeed(), *_prime_rl()]


def planned_ms(model: ModelFacts, machine: Machine, job: Job, system: str) -> float:
    """A step of one of SYSTEMS."""
    return predict(model, machine, job, SYSTEMS[system]).step_ms


# --- FSDP2 without offloading: torchtitan ----------------------------------------------------------------------------


def _fsdp2() -> list[Step]:
    """64 A100 of 80 GB; tokens a second and GPU as published (docs/performance.md of torchtitan)."""
    machine = Machine.load("a100-80-sxm")
    job = Job(seq=4096, micro_batch=2, gpus=8, nodes=8, network_gbps=UNNAMED_GBPS)
    longer = replace(job, seq=8192, micro_batch=1)
    llama, longest = ModelFacts.from_name("Llama-2-13B"), ModelFacts.from_name("Llama-2-70B")
    eight = ModelFacts.from_name("Llama-3-8B")
    first = 1e3 * job.tokens / 2162
    given = replace(machine, compute_share=machine.compute_share * planned_ms(llama, machine, job, "FSDP2") / first)
    found = []
    for what, model, of, recomputed, rate in (
        ("Llama-2-13B", llama, job, 0.0, 2162),
        ("Llama-2-13B, every second layer recomputed", llama, job, 0.5, 1914),
        ("Llama-2-70B, recomputed", longest, job, 1.0, 353),
        ("Llama-3-8B, every second layer recomputed", eight, longer, 0.5, 2904),
    ):
        ends = [replace(of, checkpointing=checkpointing) for checkpointing in (False, True)]
        as_it_is, with_share = (
            sum(
                share * planned_ms(model, one, end, "FSDP2")
                for share, end in zip((1 - recomputed, recomputed), ends, strict=True)
            )
            for one in (machine, given)
        )
        note = f"{of.micro_batch} x {of.seq} tokens"
        own = None if what == "Llama-2-13B" else with_share
        found.append(Step(f"FSDP2, 64 A100: {what}", 1e3 * of.tokens / rate, as_it_is, own, note))
    return found


def _more_machines() -> Step:
    """Llama-3.1-8B on 128 H100 by its step on 8 (torchtitan, end of 2024, with torch.compile; 400 Gbit/s a GPU)."""
    machine, model = Machine.load("h100-sxm"), ModelFacts.from_name("Llama-3-8B")
    one = Job(seq=8192, micro_batch=2, gpus=8)
    eight_ms, many_ms = 1e3 * one.tokens / 6667, 1e3 * one.tokens / 6514
    more = eight_ms
    for _ in range(4):  # the compute with which eight take what is published
        more += eight_ms - planned_ms(model, machine, replace(one, compute_ms=more), "FSDP2")
    many = replace(one, compute_ms=more, nodes=16, network_gbps=320.0)
    note = "compute from its step on 8 H100"
    return Step("FSDP2, 128 H100: Llama-3.1-8B", many_ms, planned_ms(model, machine, many, "FSDP2"), None, note)


# --- DeepSpeed, whose steps are not this runtime's -------------------------------------------------------------------


def _deepspeed() -> list[Step]:
    """Two A100 of a DGX (core-binding blog), and figure 3 of ZenFlow's blog, whose host is taken for a DGX's."""
    machine = Machine.load("a100-40-sxm")
    small, middle, seven = (ModelFacts.from_name(name) for name in ("Qwen2.5-1.5B", "Qwen2.5-3B", "Llama-2-7B"))
    compute_ms = 240.0 - _update_ms(small, machine, 2)  # ZeRO-2 without offloading takes 240
    two = {model: Job(gpus=2, compute_ms=compute_ms * model.parameters / small.parameters) for model in (small, middle)}
    four = Job(gpus=4, forward_ms=45.0, backward_ms=2000.0)
    found = []
    for model, job, system, published_ms in (
        (small, two[small], "ZeRO-Offload", 1365.0),
        (middle, two[middle], "ZeRO-Offload", 2497.0),
        (small, two[small], "ZenFlow", 569.0),
        (middle, two[middle], "ZenFlow", 1116.0),
        (seven, four, "ZeRO-Offload", 7145.0),
    ):
        what = f"{system}, {job.gpus} A100: {model.name}"
        found.append(
            Step(what, published_ms, planned_ms(model, machine, job, system), None, "DeepSpeed's; ours planned")
        )
    return found


def _prime_rl() -> list[Step]:
    """8 H200 (PRs 3234 and 3248 of prime-rl): AdamW's pass on the host, and steps beside those without offloading."""
    machine = Machine.load("h200-sxm")
    proxy = 171e9
    rates = Rates.of(ModelFacts.from_name("Llama-2-70B"), machine, Job(gpus=8))
    host = Step("full offload, 8 H200: the host's pass for 171B", 12_800.0, rates.host_ms(proxy / 8, 1), None, "")
    experts = model_facts("30.5B,48,2048")  # Qwen3-30B-A3B by its size
    found = [replace(host, note="GLM-5 of 20 layers; the host is taken for a DGX H200's")]
    for seq, without_ms, with_ms in ((8192, 3390.0, 3950.0), (16384, 6230.0, 5910.0)):
        job = Job(gpus=8, seq=seq, compute_ms=without_ms - _update_ms(experts, machine, 8))
        planned = planned_ms(experts, machine, job, "full offload")
        note = "theirs updates during backward and cannot clip; compute from its step without offloading"
        found.append(Step(f"full offload, 8 H200: Qwen3-30B-A3B, {seq:,} tokens", with_ms, planned, None, note))
    return found


def _update_ms(model: ModelFacts, machine: Machine, gpus: int) -> float:
    """Of AdamW on the GPUs, 28 bytes an element."""
    return 28 * model.parameters / gpus / machine.device_gbps / 1e6
