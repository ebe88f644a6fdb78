"""What a GPU can tell about this runtime in a few minutes: its invariants, and what offloading a 1B model costs.

Needs Python, torch and an NVIDIA GPU, and no network; pytest for the invariants, transformers for nothing. Where the
native module is missing it is built with CMake and nanobind if these are there, else PyTorch does the host's work and
the output says so.

    python studies/gpu/smoke.py [--json PATH] [--layers 20] [--hidden 2048] [--steps 24] [--skip-tests]

`--device cpu` with a small model is a dry run without a GPU: it shows that the script works, and no figure of worth.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "gpu-smoke"
SEQUENCE, VOCABULARY = 1024, 32000


def build_native() -> str:
    """Make sure that `zenflow` can be imported, with its native module if that can be had; says how."""
    if importlib.util.find_spec("zenflow") is None:
        sys.path.insert(0, str(ROOT / "runtime"))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "runtime"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    if importlib.util.find_spec("zenflow._native") is not None:
        return "native module: installed"
    if importlib.util.find_spec("nanobind") is None or shutil.which("cmake") is None:
        return "native module: none (nanobind or CMake is missing), PyTorch does the host's work"
    import nanobind

    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}"]
    for command in (configure, ["cmake", "--build", str(BUILD), "--parallel", "--target", "_native"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"native module: not built ({done.stderr.strip().splitlines()[-1:]}), PyTorch does the host's work"
    for module in BUILD.glob("**/_native*.so"):
        shutil.copy(module, ROOT / "runtime" / "zenflow" / module.name)
    return "native module: built"


def invariants() -> dict[str, Any]:
    """Run `tests/gpu`, which holds the invariants and the kernels to their oracles on the GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "tests/gpu"]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    print("\n".join(lines[-15:] if done.returncode else lines[-1:]), flush=True)
    return {"returncode": done.returncode, "summary": lines[-1:], "seconds": round(time.perf_counter() - began, 1)}


def make_model(hidden: int, layers: int, device: Any) -> Any:
    """A decoder of Llama's proportions in bf16, made on the device."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = max(1, hidden // 64)
            self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
            self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
            self.up, self.gate = (nn.Linear(hidden, hidden * 11 // 4, bias=False) for _ in range(2))
            self.down = nn.Linear(hidden * 11 // 4, hidden, bias=False)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
            inner = self.norm_2(x)
            return x + self.down(nn.functional.silu(self.gate(inner)) * self.up(inner))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, hidden)
            self.layers = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)

        def forward(self, tokens: Any) -> Any:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            logits = self.head(self.norm(x))
            return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    torch.manual_seed(0)
    with torch.device(device):
        return Decoder().to(torch.bfloat16)


def measure(name: str, config: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a few steps under some knobs; the first third is discarded."""
    import torch

    import zenflow

    device = torch.device(arguments.device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = make_model(arguments.hidden, arguments.layers, device)
    optimizer = zenflow.ZenFlowAdamW(model.parameters(), lr=1e-5, config=config, module=model)
    tokens = torch.randint(VOCABULARY, (4, arguments.sequence), device=device)
    began = time.perf_counter()
    for _ in range(arguments.steps):
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    history = optimizer.history(wait=True)[arguments.steps // 3 :]
    steps_ms = [stats.step_ms for stats in history if stats.step_ms is not None]
    stalls = [stats.stall_ms for stats in history if stats.stall_ms is not None]
    causes = {cause: statistics.fmean(stall[cause] for stall in stalls) for cause in (stalls[0] if stalls else {})}
    found = {
        "name": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "step_ms": {"p50": statistics.median(steps_ms), "max": max(steps_ms), "mean": statistics.fmean(steps_ms)},
        "stall_ms_by_cause": causes or None,
        "stall_fraction": sum(causes.values()) / statistics.fmean(steps_ms) if causes else None,
        "device_peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "host_bytes": optimizer.host_bytes(),
        "host_engine": list(optimizer.host_engine),
        "d2h_bytes_per_step": statistics.fmean(stats.d2h_bytes for stats in history),
        "h2d_bytes_per_step": statistics.fmean(stats.h2d_bytes for stats in history),
        "seconds": round(time.perf_counter() - began, 1),
    }
    optimizer.abandon()
    return found


def main() -> int:
    """Run it all; 1 where an invariant is broken, 2 where there is no GPU."""
    arguments = parse()
    how = build_native()
    import torch

    from zenflow import ZenFlowConfig

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: there is no NVIDIA GPU here, allowed is --device cpu with a small model", file=sys.stderr)
        return 2
    gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else "none (dry run)"
    print(
        f"{gpu}, torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPUs; {how}",
        flush=True,
    )
    tests = None if arguments.skip_tests else invariants()
    systems = {
        "no offload": ZenFlowConfig.zero_offload(offload_ratio=0.0, pipeline="bucket"),
        "ZeRO-Offload": ZenFlowConfig.zero_offload(),
        "ZenFlow k=0.05 S=4": ZenFlowConfig(topk_ratio=0.05, update_interval=4, select_interval=16),
    }
    rows = []
    for name, config in systems.items():
        rows.append(measure(name, config, arguments))
        print(line(rows[-1]), flush=True)
    document = {"gpu": gpu, "torch": torch.__version__, "native": how, "invariants": tests, "systems": rows}
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if tests is not None and tests["returncode"] else 0


def line(row: dict[str, Any]) -> str:
    """One system for a terminal."""
    stall = "no device stream" if row["stall_fraction"] is None else f"stall {row['stall_fraction']:.1%}"
    causes = ", ".join(f"{cause} {ms:.1f} ms" for cause, ms in (row["stall_ms_by_cause"] or {}).items() if ms >= 0.05)
    peak = "" if row["device_peak_bytes"] is None else f", GPU {row['device_peak_bytes'] / 2**30:.1f} GiB"
    host = f"host {row['host_bytes']['peak'] / 2**30:.1f} GiB, {row['host_engine'][0]} x {row['host_engine'][1]}"
    step = f"{row['parameters'] / 1e9:.2f}B, step {row['step_ms']['p50']:.1f} ms (max {row['step_ms']['max']:.1f})"
    return f"{row['name']:20} {step}, {stall}{f' ({causes})' if causes else ''}{peak}, {host}"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Invariants, step time and stall on an NVIDIA GPU, in a few minutes.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write everything to this file")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--sequence", type=int, default=SEQUENCE)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--skip-tests", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
