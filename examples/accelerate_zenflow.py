"""Fine-tune a small Llama on instructions with Hugging Face Accelerate and ZenFlow; on several ranks over FSDP2.

As TRL's SFTTrainer does it: prompts are masked, and a loss is the mean over the answers' tokens of a step, on all ranks
and in all passes. Functions of Python's own library are the prompts, what their docstrings say is the answers.

python examples/accelerate_zenflow.py --steps 80
torchrun --nproc-per-node 2 examples/accelerate_zenflow.py --steps 80
accelerate launch --config_file examples/accelerate_fsdp2.yaml examples/accelerate_zenflow.py --steps 80
zftune run --online -- accelerate launch ...    # looks for better knobs meanwhile
"""

import argparse
import json
import os
import re
import time
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, GradientAccumulationPlugin
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import zenflow
import zftune
from zftune.integrations.huggingface import AccelerateAdamW

FUNCTION = re.compile(rb'^ *(def .+:)\n +"""(.+?)(?:"""|$)', re.MULTILINE)
IGNORED = -100
END = 0


def instructions(length):
    """Prompt and answer as bytes: a function's head, and the first line of its docstring."""
    found = []
    for source in sorted(Path(os.__file__).parent.glob("*.py")):
        for head, said in FUNCTION.findall(source.read_bytes()):
            if len(head) + len(said) + 2 <= length:
                found.append((head + b"\n", said))
    return found


def batch_of(samples):
    """Padded token ids and labels; what belongs to a prompt is no label."""
    tokens = [torch.tensor([*prompt, *answer, END]) for prompt, answer in samples]
    labels = [torch.tensor([IGNORED] * len(prompt) + [*answer, END]) for prompt, answer in samples]
    mask = [torch.ones(len(one), dtype=torch.int64) for one in tokens]
    parts = {"input_ids": (tokens, END), "labels": (labels, IGNORED), "attention_mask": (mask, 0)}
    return {name: pad_sequence(part, batch_first=True, padding_value=fill) for name, (part, fill) in parts.items()}


def endless(loader):
    """Its batches, one epoch after the other."""
    while True:
        yield from loader


def accelerator_of(args):
    """Over FSDP2 where there are several ranks, on GPUs or without one."""
    on_gpu = torch.cuda.is_available()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    if not on_gpu and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU  # else Accelerate does not shard on CPUs
    return Accelerator(
        cpu=not on_gpu,
        fsdp_plugin=plugin,
        mixed_precision=args.precision,
        log_with=args.report_to,
        project_dir="runs",
        gradient_accumulation_plugin=GradientAccumulationPlugin(args.passes, sync_with_dataloader=False),
        step_scheduler_with_optimizer=False,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=8, help="samples of each rank in a pass")
    parser.add_argument("--length", type=int, default=128, help="tokens of the longest sample")
    parser.add_argument("--passes", type=int, default=1, help="backward passes before a step")
    parser.add_argument("--precision", default="no", choices=["no", "bf16"])
    parser.add_argument("--report-to", choices=["tensorboard", "wandb", "mlflow"], help="a tracker that is installed")
    parser.add_argument("--save", help="folder for a checkpoint at the end, for any number of ranks")
    parser.add_argument("--resume", help="folder of such a checkpoint")
    args = parser.parse_args()

    accelerator = accelerator_of(args)
    if args.report_to:
        accelerator.init_trackers("instructions")
    torch.manual_seed(0)
    samples, order = instructions(args.length), torch.Generator().manual_seed(0)
    loader = DataLoader(samples, args.batch, shuffle=True, generator=order, drop_last=True, collate_fn=batch_of)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=args.length,
        )
    ).to(accelerator.device)  # before the optimizer, which splits what is there
    config = zenflow.ZenFlowConfig(topk_ratio=0.1, update_interval=4, gradient_accumulation_steps=args.passes)
    optimizer = AccelerateAdamW(model.parameters(), lr=1e-3, config=config, module=model)
    scheduler = get_cosine_schedule_with_warmup(optimizer, args.steps // 10, args.steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if args.resume:
        accelerator.load_state(args.resume)

    step_ms = []
    batches = endless(loader)
    last = time.perf_counter()
    for step in range(args.steps):
        passes = [next(batches) for _ in range(args.passes)]
        answers = accelerator.reduce(sum((one["labels"] != IGNORED).sum() for one in passes))
        mean = torch.zeros((), device=accelerator.device)
        for batch in passes:
            with accelerator.accumulate(model):
                loss = model(**batch, num_items_in_batch=answers).loss
                # Accelerate takes the mean over passes and FSDP2 over ranks, where the sum is meant.
                accelerator.backward(loss * args.passes * accelerator.num_processes)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            mean += loss.detach()
        scheduler.step()
        mean = accelerator.reduce(mean)
        zftune.log_loss(mean)  # for `zftune run --online`, which may then change how late updates come
        if step % 10 == 0:
            accelerator.print(f"step {step}: loss {mean.item():.3f}", flush=True)
            accelerator.log({"loss": mean.item(), **zftune.stats()}, step=step)  # knobs, stall by cause, coverage, gain
        now = time.perf_counter()
        step_ms.append(1e3 * (now - last))
        last = now
    optimizer.optimizer.flush()  # before it is saved: every pending host update becomes visible
    if args.save:
        accelerator.save_state(args.save)
    whole = sum(p.numel() for p in model.parameters())
    own = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    accelerator.print(f"rank 0 of {accelerator.num_processes} has {own:,} of {whole:,} parameters")
    accelerator.print(json.dumps({"step_ms": step_ms}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
