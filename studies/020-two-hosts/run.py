"""Does the planner know what two hosts take with a slow network between them? See the README.md beside."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from studykit import Results, code_digest, parser, write_json  # noqa: E402
from training import CONFIGS, workload_of  # noqa: E402

from zenflow import ZenFlowConfig  # noqa: E402
from zftune.planner.closed_form import collective_ms  # noqa: E402
from zftune.planner.model import ModelFacts  # noqa: E402
from zftune.planner.rates import Rates  # noqa: E402
from zftune.planner.simulate import simulate  # noqa: E402
from zftune.planner.split import split_of  # noqa: E402

METHOD = 2  # raise it when a change here changes what is measured
SYSTEMS = ("FSDP2", *CONFIGS)
QUICK_SYSTEMS = ("FSDP2", "published")
ON_DEVICE = ZenFlowConfig.zero_offload(offload_ratio=0.0, pipeline="bucket")
NETWORK, ADDRESSES, PORT = "10.213.7", (1, 2), 29713
BURST_KB = 512
"""Of the token bucket. TCP hands over 64 kB at a time: two of them (128 kB) leave the cable idle between them."""
PATIENCE_S = 600
"""Two hosts of `torchrun` may wait 300 s for each other when they end: both were there, one saw it too late."""
FIGURES = ("forward_s", "backward_s", "optimizer_s", "step_s", "network_gbps", "sent_bytes")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    hidden: int
    layers: int
    steps: int
    mbits: tuple[int, ...]
    """Of the network, each way."""
    turns: int
    """In which everything is run once, one after the other."""


FULL, QUICK = Size(256, 6, 12, (200, 400), 3), Size(128, 2, 8, (100,), 1)


# --- hosts ------------------------------------------------------------------------------------------------------------


def refusal() -> str | None:
    """Why this machine cannot be two hosts; None: it can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)}: not installed; the study needs a machine with iproute2"
    made = subprocess.run(["ip", "netns", "add", f"zftune-{os.getpid()}"], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"namespaces of the network cannot be made ({made.stderr.strip()}); the study must run as root"
    _ip("netns", "del", f"zftune-{os.getpid()}")
    return None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def hosts(mbits: int | None) -> Iterator[tuple[str, str]]:
    """Two namespaces with a cable between them; None: as fast as it goes."""
    names = (f"zftune-{os.getpid()}-a", f"zftune-{os.getpid()}-b")
    with ExitStack() as undone:
        for name in names:
            _ip("netns", "add", name)
            undone.callback(_ip, "netns", "del", name)
        _ip("link", "add", "zftune0", "netns", names[0], "type", "veth", "peer", "name", "zftune0", "netns", names[1])
        for name, number in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{NETWORK}.{number}/24", "dev", "zftune0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "zftune0", "up")
            if mbits is not None:
                shape = f"tc qdisc add dev zftune0 root tbf rate {mbits}mbit burst {BURST_KB}kb latency 100ms"
                subprocess.run(["ip", "netns", "exec", name, *shape.split()], check=True, capture_output=True)
        yield names


def trained(size: Size, system: str, mbits: int | None, *, alone: bool = False) -> dict[str, Any]:
    """What the first of two hosts saw, or one that is alone; each is started by its own `torchrun`."""
    with hosts(mbits) as names, tempfile.TemporaryDirectory() as folder:
        begun = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run",
                 f"--nnodes={1 if alone else 2}", f"--node-rank={rank}", "--nproc-per-node=1",
                 f"--master-addr={NETWORK}.1", f"--master-port={PORT}", str(HERE / "training.py"), folder, system,
                 f"--hidden={size.hidden}", f"--layers={size.layers}", f"--steps={size.steps}"],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "zftune0", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for rank, name in enumerate(names[: 1 if alone else 2])
        ]  # fmt: skip
        try:
            said = [process.communicate(timeout=PATIENCE_S)[1] for process in begun]
        finally:
            for process in begun:
                process.kill()
        for process, text in zip(begun, said, strict=True):
            if process.returncode:
                raise RuntimeError(
                    f"{system} at {mbits} Mbit/s: a host ended with {process.returncode}: {text[-2000:]}"
                )
        found: dict[str, Any] = json.loads(Path(folder, f"{system}.json").read_text(encoding="utf-8"))
        return found


# --- what is told -----------------------------------------------------------------------------------------------------


def rates_of(plain: Mapping[str, Any], gbps: float) -> Rates:
    """Of a rank; two of them on one processor each, over gloo."""
    return Rates(
        forward_ms=1e3 * plain["forward_s"],
        backward_ms=1e3 * plain["backward_s"],
        d2h_gbps=1e3,
        h2d_gbps=1e3,
        host_gbps=1e3,
        comm_gbps=gbps,
        ranks=2,
        gloo=True,
        element_bytes=4,
    )


def config_of(system: str) -> ZenFlowConfig:
    """That stands for it; torch's own optimizer is one whose state is on the device."""
    return ON_DEVICE if system == "FSDP2" else CONFIGS[system]


def predicted_s(size: Size, system: str, alone: Mapping[str, Any], gbps: float) -> float:
    """By the planner, from what one host takes without the other, and the network's rate.

    Host and device are the same processor here, and nothing is copied between them: what the optimizer takes on one
    host is halved, and comes behind the step.
    """
    plain, own = alone["FSDP2"], alone[system]
    rates, config = rates_of(plain, gbps), config_of(system)
    split = split_of(ModelFacts.from_module("study", workload_of(size.hidden, size.layers).module), config)
    beside = own["step_s"] - plain["forward_s"] - plain["backward_s"]
    return float(simulate(rates, split, config).step_ms / 1e3 + beside / 2)


def predicted_bytes(size: Size, system: str, alone: Mapping[str, Any]) -> float:
    """What a rank sends in a step."""
    rates = rates_of(alone["FSDP2"], 1e-6)  # 1 ms a byte
    split = split_of(ModelFacts.from_module("study", workload_of(size.hidden, size.layers).module), config_of(system))
    return collective_ms(rates, split)


def medians(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of what was measured in each turn; steps as they were, at least and at most."""
    found: dict[str, Any] = {name: statistics.median(one[name] for one in turns) for name in FIGURES}
    return found | {"between_s": [fold(one["step_s"] for one in turns) for fold in (min, max)]}


def table_of(runs: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row for each network and system."""
    table = Table(title="two hosts, a step")
    for column in ("Mbit/s", "all-gather, Mbit/s", "system", "sent MB", "planned MB", "step s", "planned s", "apart"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for one in runs.values():
        table.add_row(
            str(one["mbits"]),
            f"{8e3 * one['network_gbps']:.0f}",
            one["system"],
            f"{one['sent_bytes'] / 1e6:.1f}",
            f"{one['planned_bytes'] / 1e6:.1f}",
            f"{one['step_s']:.3f} ({one['between_s'][0]:.3f} to {one['between_s'][1]:.3f})",
            f"{one['planned_s']:.3f}",
            f"{one['planned_s'] / one['step_s'] - 1:+.1%}",
        )
    return table


def turn(
    results: Results, size: Size, systems: Sequence[str], inputs: Mapping[str, Any], *, again: bool
) -> Mapping[str, Any]:
    """Everything once: one host alone, then two for each network and system."""
    name = f"turn-{inputs['turn']}"
    record = None if again else results.load(name, inputs)
    if record is None:
        alone = {system: trained(size, system, None, alone=True) for system in systems}
        two = {
            f"{system} at {mbits}": {"mbits": mbits, "system": system, **trained(size, system, mbits)}
            for mbits in size.mbits
            for system in systems
        }
        record = results.save(name, inputs, {"alone": alone, "two": two})
    return dict(record["figures"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, and print; 1 where a full run has the planner off by 15%, 2 where it cannot run."""
    arguments = parser(__doc__ or "").parse_args(argv)
    if (why := refusal()) is not None:
        sys.stderr.write(f"020-two-hosts: {why}\n")
        return 2
    results = Results.of(HERE, arguments)
    size, systems = (QUICK, QUICK_SYSTEMS) if arguments.quick else (FULL, SYSTEMS)
    inputs = {**asdict(size), "method": METHOD, "code": code_digest("runtime/zenflow", "zftune/workload")}
    turns = [
        turn(results, size, systems, {**inputs, "turn": number}, again=arguments.again) for number in range(size.turns)
    ]
    alone = {system: medians([one["alone"][system] for one in turns]) for system in systems}
    runs = {}
    for name, first in turns[0]["two"].items():
        one = medians([each["two"][name] for each in turns]) | {key: first[key] for key in ("mbits", "system")}
        one["planned_s"] = predicted_s(size, one["system"], alone, one["network_gbps"])
        one["planned_bytes"] = predicted_bytes(size, one["system"], alone)
        runs[name] = one
    Console(width=None if sys.stdout.isatty() else 120).print(table_of(runs))
    if arguments.json:
        write_json(arguments.json, {"study": HERE.name, "quick": arguments.quick, "runs": runs})
    return int(not arguments.quick and any(abs(one["planned_s"] / one["step_s"] - 1) > 0.15 for one in runs.values()))


if __name__ == "__main__":
    raise SystemExit(main())
