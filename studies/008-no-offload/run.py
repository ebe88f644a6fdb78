"""What does a step without offloading cost: `offload_ratio=0` beside torch's fused AdamW?

See README.md beside this file.
"""

from __future__ import annotations

import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Results, code_digest, parser, spread, write_json  # noqa: E402
from torch import Tensor  # noqa: E402

from zenflow import ZenFlowAdamW, ZenFlowConfig  # noqa: E402
from zenflow.device import default_torch_device, device_for  # noqa: E402
from zenflow.kernels import kernels_for  # noqa: E402
from zftune.workload import Batch, batches, build_model, load_text  # noqa: E402

ALLOWED = 1.05
HYPER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OURS, RIVAL, CONTROL = "zenflow, offload_ratio=0", "torch fused AdamW", "torch fused AdamW again"
CODE = ("studies/008-no-offload/run.py", "runtime/zenflow", "zftune/workload", "csrc/matrix.cpp", "csrc/kernel.cpp")
_ULPS = 4


class DisagreementError(Exception):
    """A contender does not compute what the others do."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained, and how long a repetition is."""

    model: str
    dtype: str
    micro_batch: int
    sequence: int
    steps: int
    """In a repetition."""

    @property
    def name(self) -> str:
        """Of its record."""
        return f"{self.model}-{self.dtype}-{self.micro_batch}x{self.sequence}"


def settings(device: torch.device, *, quick: bool) -> list[Setting]:
    """The one that is judged, then such in which the optimizer, and what surrounds its arithmetic, weighs more."""
    if quick:
        return [Setting("tiny", dtype, 1, 64, 3) for dtype in DTYPES]
    if device.type == "cpu":
        cases = (("small", 4, 3), ("small", 1, 3), ("tiny", 1, 30))
        return [Setting(model, dtype, batch, 64, steps) for model, batch, steps in cases for dtype in DTYPES]
    return [Setting(model, dtype, 4, 512, n) for model, n in (("medium", 10), ("small", 20)) for dtype in DTYPES]


class Contender(ABC):
    """A model of its own and one way to step it."""

    def __init__(self, setting: Setting, torch_device: torch.device) -> None:
        workload = build_model(setting.model, dtype=DTYPES[setting.dtype], seed=0)
        self.workload = workload
        self.module = workload.module.to(torch_device)
        self.parameters = list(self.module.parameters())
        tokens = workload.encode(load_text(None))
        self._batches: Iterator[Batch] = batches(
            tokens, micro_batch=setting.micro_batch, sequence=setting.sequence, seed=0
        )
        self._device = device_for(torch_device)

    @abstractmethod
    def step(self) -> None:
        """Update the weights from `.grad`."""

    def close(self) -> None:  # noqa: B027 - not every contender starts something
        """End what it has started."""

    def train(self, steps: int) -> tuple[float, float]:
        """Milliseconds of a step, and of `step()` in it: mean over some steps."""
        device, spans = self._device, []
        device.wait_for(device.mark())
        began = time.perf_counter()
        for _ in range(steps):
            batch = Batch(*(part.to(device.torch_device) for part in next(self._batches)))
            self.workload.loss(batch).backward()
            mark = device.mark()
            self.step()
            spans.append((mark, device.mark()))
            for parameter in self.parameters:
                parameter.grad = None
        device.wait_for(device.mark())
        whole_s = time.perf_counter() - began
        return 1e3 * whole_s / steps, 1e3 * sum(device.elapsed_s(*span) for span in spans) / steps


class FusedAdamW(Contender):
    """torch's own; below fp32 on fp32 masters, with the casts that this takes."""

    def __init__(self, setting: Setting, torch_device: torch.device) -> None:
        super().__init__(setting, torch_device)
        narrow = setting.dtype != "fp32"
        self._masters = [parameter.detach().float() for parameter in self.parameters] if narrow else []
        self._optimizer = torch.optim.AdamW(self._masters or self.parameters, fused=True, **HYPER)

    def step(self) -> None:
        pairs = list(zip(self._masters, self.parameters, strict=False))
        for master, parameter in pairs:
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        self._optimizer.step()
        with torch.no_grad():
            for master, parameter in pairs:
                parameter.copy_(master)


class NoOffload(Contender):
    """This runtime with all state on the device."""

    def __init__(self, setting: Setting, torch_device: torch.device) -> None:
        super().__init__(setting, torch_device)
        self._optimizer = ZenFlowAdamW(
            self.parameters, **HYPER, config=ZenFlowConfig(offload_ratio=0), module=self.module
        )

    def step(self) -> None:
        self._optimizer.step()

    def close(self) -> None:
        self._optimizer.abandon()


MAKERS: Mapping[str, Callable[[Setting, torch.device], Contender]] = {
    OURS: NoOffload,
    RIVAL: FusedAdamW,
    CONTROL: FusedAdamW,
}


def check_first_step(setting: Setting, contenders: Mapping[str, Contender]) -> None:
    """Let each take a step; from equal weights and gradients their weights must be equal but for rounding.

    Raises:
        DisagreementError: they are not.
    """
    for contender in contenders.values():
        contender.train(1)
    for ours, theirs in zip(contenders[OURS].parameters, contenders[RIVAL].parameters, strict=True):
        if not _agree(ours.detach().double(), theirs.detach().double(), DTYPES[setting.dtype]):
            raise DisagreementError(f"{setting.name}: {OURS} and {RIVAL} differ after one step")


def _agree(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    ulp = torch.finfo(torch.float32).eps
    bound = _ULPS * ulp * torch.maximum(theirs.abs(), torch.full_like(theirs, 8 * HYPER["lr"]))
    if dtype != torch.float32:
        bound = bound + torch.finfo(dtype).eps * theirs.abs()  # the other side of one rounding
    return bool(((ours - theirs).abs() <= bound).all())


def measure(setting: Setting, torch_device: torch.device, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Times of each contender, round after round in random order, and their ratios to the rival's."""
    contenders = {name: make(setting, torch_device) for name, make in MAKERS.items()}
    try:
        check_first_step(setting, contenders)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for contender in contenders.values():
            contender.train(setting.steps)
        for number in range(rounds):
            say(f"{setting.name}: round {number + 1} of {rounds}")
            for name in random.sample(sorted(contenders), len(contenders)):
                found[name].append(contenders[name].train(setting.steps))
    finally:
        for contender in contenders.values():
            contender.close()
    rows = {name: _row(times, found[RIVAL]) for name, times in found.items()}
    parameters = contenders[OURS].parameters
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "tensors": len(parameters),
        "rows": rows,
        "verdict": rows[OURS]["ratio"]["median"] <= ALLOWED,
    }


def _row(times: Sequence[tuple[float, float]], rival: Sequence[tuple[float, float]]) -> dict[str, Any]:
    return {
        "step_ms": spread(whole for whole, _ in times),
        "optimizer_ms": spread(part for _, part in times),
        "ratio": spread(mine / theirs for (mine, _), (theirs, _) in zip(times, rival, strict=True)),
        "optimizer_ratio": spread(mine / theirs for (_, mine), (_, theirs) in zip(times, rival, strict=True)),
    }


def table_of(setting: Mapping[str, Any], figures: Mapping[str, Any]) -> Table:
    """One setting."""
    table = Table(
        title=f"{setting['model']}, {setting['dtype']}: {figures['parameters'] / 1e6:.2f} million parameters in "
        f"{figures['tensors']} tensors, {setting['micro_batch']} × {setting['sequence']} tokens"
    )
    table.add_column("")
    for name in ("step ms", "ratio", "5 - 95%", "step() ms", "ratio", "5 - 95%"):
        table.add_column(name, justify="right")
    for name, row in figures["rows"].items():
        cells = []
        for ms, ratio in (("step_ms", "ratio"), ("optimizer_ms", "optimizer_ratio")):
            of = row[ratio]
            cells += [f"{row[ms]['median']:.2f}", f"{of['median']:.3f}", f"{of['p5']:.3f} - {of['p95']:.3f}"]
        table.add_row(name, *cells)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and print it; 1 if a contender is wrong."""
    arguments = parser(__doc__ or "").parse_args(argv)
    results = Results.of(HERE, arguments)
    device = default_torch_device()
    console = Console(width=None if sys.stdout.isatty() else 120)
    records = {}
    with Console(stderr=True).status("") as status:
        for setting in settings(device, quick=arguments.quick):
            inputs = {
                **asdict(setting),
                "rounds": 3 if arguments.quick else 9,
                "device": str(device),
                "kernels": kernels_for(device).name,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "code": code_digest(*CODE),
            }
            record = None if arguments.again else results.load(setting.name, inputs)
            try:
                record = record or results.save(
                    setting.name, inputs, measure(setting, device, inputs["rounds"], status.update)
                )
            except DisagreementError as error:
                console.print(str(error))
                return 1
            records[setting.name] = record
    for record in records.values():
        console.print(table_of(record["inputs"], record["figures"]))
    if arguments.json:
        write_json(arguments.json, {"study": HERE.name, "quick": arguments.quick, "records": records})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
