"""Does the daemon bear 200 runs at 20 statistics a second each? See README.md beside this file."""

from __future__ import annotations

import json
import os
import resource
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import psutil  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from simulated import Counts, Run, train  # noqa: E402
from studykit import Results, code_digest, parser, percentile, write_json  # noqa: E402

from zenflow import ZenFlowAdamW, ZenFlowConfig  # noqa: E402
from zftune.daemon import PROTOCOL  # noqa: E402
from zftune.daemon.client.http import DaemonClient  # noqa: E402
from zftune.daemon.protocol.codec import encode  # noqa: E402
from zftune.daemon.protocol.messages import Hello  # noqa: E402
from zftune.errors import DaemonError  # noqa: E402
from zftune.tuner.search import SearchOptions  # noqa: E402
from zftune.tuner.setup import Reader, TrainingFacts, TuneRequest, WarmupStats  # noqa: E402

RUNS, QUICK_RUNS, CORES = 200, 40, 2
ALLOWED_P99_S = 0.05
ALLOWED_GROWTH = 0.02
"""Of the memory, in the time that counts: the rest is noise of the allocator."""
CODE = ("studies/015-daemon-load/run.py", "studies/015-daemon-load/simulated.py", "zftune/daemon", "zftune/tuner")
LENGTHS_S = {"courier": (30.0, 600.0), "single": (30.0, 120.0)}  # until all are there, and in all
QUICK_S = {"courier": (3.0, 8.0), "single": (3.0, 8.0)}
_SETTLED = 0.2  # of the time: what comes before does not count
_SOON_S = 60.0


def hellos(runs: int) -> list[dict[str, Any]]:
    """Of small trainings, all alike; each search has its own seed."""
    module = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(128, 16, bias=False))
    config = ZenFlowConfig(topk_ratio=0.1, update_interval=4, host_threads=1)
    found = []
    with closing(ZenFlowAdamW(module.parameters(), config=config, module=module)) as optimizer:
        for seed in range(runs):
            wishes = TuneRequest(quality="published", search=SearchOptions(seed=seed))
            facts = Reader(optimizer, wishes).facts(WarmupStats(optimizer.config, (), has_loss=True))
            found.append(_hello(facts))
    return found


def _hello(facts: TrainingFacts) -> dict[str, Any]:
    hello = Hello(
        protocol=PROTOCOL,
        run=secrets.token_hex(16),
        training=facts,
        pid=os.getpid(),
        began_unix_s=time.time(),
        argv=("train.py",),
    )
    found: dict[str, Any] = json.loads(encode(hello))
    return found


@contextmanager
def daemon(folder: Path) -> Iterator[tuple[psutil.Process, Path]]:
    """A daemon as users start it, with a store on disk; its process and its socket."""
    path = folder / "z.sock"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ZFTUNE_", "NOTIFY_"))}
    environment = {**kept, "ZFTUNE_SOCKET": str(path), "ZFTUNE_DB": f"sqlite:///{folder / 'z.db'}"}
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-c", "from zftune.cli.main import main; main()", "daemon", "start"]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait_for(path)
            yield psutil.Process(process.pid), path
        finally:
            process.terminate()
            process.wait(_SOON_S)


def _wait_for(path: Path) -> None:
    ends_s = time.monotonic() + _SOON_S
    with DaemonClient(path) as client:
        while True:
            try:
                client.get("/v1/health")
            except DaemonError:
                if time.monotonic() > ends_s:
                    raise
                time.sleep(0.1)
            else:
                return


class Watch:
    """Looks at the daemon once a second, in a thread: memory, and processor time of it and of who thinks for it."""

    def __init__(self, process: psutil.Process) -> None:
        self.rows: list[dict[str, float]] = []
        self._process = process
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(1.0):
            own = self._process.cpu_times()
            children = [_processor_s(child) for child in self._process.children()]
            own_s = own.user + own.system
            row = {"at_s": time.perf_counter(), "rss_bytes": self._process.memory_info().rss, "processor_s": own_s}
            self.rows.append({**row, "thinkers_processor_s": sum(children), "threads": self._process.num_threads()})

    def share(self, name: str, since_s: float) -> float:
        """Of a core."""
        rows = [row for row in self.rows if row["at_s"] >= since_s]
        return (rows[-1][name] - rows[0][name]) / (rows[-1]["at_s"] - rows[0]["at_s"])


def _processor_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def measure(mode: str, count: int, arrive_s: float, duration_s: float) -> dict[str, Any]:
    """Some runs under one daemon.

    Args:
        mode: "session": reports as agents batch them; "single": one for each statistic.
        count: of runs.
        arrive_s: until all are there.
        duration_s: in all.
    """
    counts = Counts()
    with tempfile.TemporaryDirectory(prefix="zft-") as folder, daemon(Path(folder)) as (process, path):
        runs = [Run(path, hello, counts, single=mode == "single") for hello in hellos(count)]
        begin_s, own_s = time.perf_counter(), time.process_time()
        try:
            with Watch(process) as watch:
                train(runs, arrive_s, duration_s)
            own_share = (time.process_time() - own_s) / (time.perf_counter() - begin_s)
            held = sum(run.measuring for run in runs)
            found = _read(path, runs)
        finally:
            for run in runs:
                run.connection.close()
    since_s = begin_s + max(arrive_s, _SETTLED * duration_s)
    figures = {**_latencies(counts, begin_s, since_s), **_memory(watch, since_s), **found}
    lost = counts.asked - counts.taken - counts.withdrawn - held
    return {
        **figures,
        "statistics_per_s": counts.statistics / duration_s,
        "processor_share": watch.share("processor_s", since_s),
        "thinkers_processor_share": watch.share("thinkers_processor_s", since_s),
        "generator_processor_share": own_share,
        "generator_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "decisions": {"asked": counts.asked, "taken": counts.taken, "withdrawn": counts.withdrawn, "under_way": held},
        "dropped_decisions": lost,
        "refusals": counts.refused[:10],
        "verdict": {
            "p99": figures["latency_s"]["p99"] < ALLOWED_P99_S,
            "memory": abs(figures["rss_growth"]) < ALLOWED_GROWTH,
            "decisions": lost == 0 and found["measurements"] >= counts.taken and not counts.refused,
        },
    }


def _read(path: Path, runs: Sequence[Run]) -> dict[str, Any]:
    """What the daemon itself knows of the runs."""
    measurements, states, dropped = 0, [], 0
    with DaemonClient(path, timeout_s=_SOON_S) as client:
        for run in runs:
            details = client.get(f"/v1/runs/{run.name}")
            measurements += sum(era["measurements"] for era in details["eras"])
            states.append(details["run"]["state"])
            dropped += details["run"]["dropped"]
    shown = {state: states.count(state) for state in sorted(set(states))}
    return {"measurements": measurements, "states": shown, "dropped_statistics": dropped}


def _latencies(counts: Counts, begin_s: float, since_s: float) -> dict[str, Any]:
    settled = [latency_s for due_s, latency_s in counts.latencies if due_s >= since_s]
    early = [latency_s for due_s, latency_s in counts.latencies if due_s < since_s]
    last_s = max(due_s for due_s, _ in counts.latencies)
    return {
        "latency_s": _shares(settled),
        "latency_while_runs_arrive_s": _shares(early),
        "requests_per_s": len(settled) / (last_s - since_s),
        "measured_s": last_s - begin_s,
    }


def _shares(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    shares = {"p50": 0.5, "p99": 0.99, "p99_9": 0.999, "max": 1.0}
    return {**{name: percentile(ordered, share) for name, share in shares.items()}, "n": len(ordered)}


def _memory(watch: Watch, since_s: float) -> dict[str, Any]:
    """Where it settles: the fitted line's growth over the time that counts, as a share."""
    rows = [row for row in watch.rows if row["at_s"] >= since_s]
    fitted = statistics.linear_regression([row["at_s"] for row in rows], [row["rss_bytes"] for row in rows])
    middle = statistics.fmean(row["rss_bytes"] for row in rows)
    seconds = rows[-1]["at_s"] - rows[0]["at_s"]
    every = max(1, len(watch.rows) // 120)
    return {
        "rss_bytes": middle,
        "rss_bytes_per_s": fitted.slope,
        "rss_growth": fitted.slope * seconds / middle,
        "threads": max(row["threads"] for row in rows),
        "rss_over_time_mib": [round(row["rss_bytes"] / 2**20, 1) for row in watch.rows[::every]],
    }


def table_of(records: dict[str, dict[str, Any]]) -> Table:
    """The figures of every mode."""
    (runs,) = {record["inputs"]["runs"] for record in records.values()}
    table = Table(title=f"{runs} runs, 20 statistics a second each, {CORES} cores with the load")
    for name in ("", *records):
        table.add_column(name, justify="right" if name else "left")
    all_figures = [record["figures"] for record in records.values()]
    for name in ("statistics_per_s", "requests_per_s"):
        table.add_row(name.replace("_", " "), *(f"{figures[name]:.0f}" for figures in all_figures))
    for key in ("latency_s", "latency_while_runs_arrive_s"):
        for share in ("p50", "p99", "max"):
            texts = (f"{1e3 * figures[key][share]:.1f} ms" for figures in all_figures)
            table.add_row(f"{key.removesuffix('_s').replace('_', ' ')} {share}", *texts)
    for name in ("processor_share", "thinkers_processor_share", "generator_processor_share"):
        table.add_row(name.replace("_", " "), *(f"{figures[name]:.2f}" for figures in all_figures))
    table.add_row("memory", *(f"{figures['rss_bytes'] / 2**20:.0f} MiB" for figures in all_figures))
    table.add_row("its growth", *(f"{figures['rss_growth']:+.1%}" for figures in all_figures))
    for name in ("asked", "taken", "withdrawn", "under_way"):
        table.add_row(f"decisions {name.replace('_', ' ')}", *(str(one["decisions"][name]) for one in all_figures))
    table.add_row("dropped", *(str(figures["dropped_decisions"]) for figures in all_figures))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and print it; 1 if what is promised does not hold with reports as agents send them."""
    arguments = parser(__doc__ or "").parse_args(argv)
    results = Results.of(HERE, arguments)
    usable = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, usable)  # the daemon and what thinks for it inherit them
    torch.set_num_threads(1)
    records = {}
    count = QUICK_RUNS if arguments.quick else RUNS
    for mode, (arrive_s, duration_s) in (QUICK_S if arguments.quick else LENGTHS_S).items():
        inputs = {"runs": count, "cores": len(usable), "mode": mode, "arrive_s": arrive_s, "duration_s": duration_s}
        inputs["code"] = code_digest(*CODE)
        record = None if arguments.again else results.load(mode, inputs)
        if record is None:
            with Console(stderr=True).status(f"{mode}: {duration_s:.0f} s"):
                record = results.save(mode, inputs, measure(mode, count, arrive_s, duration_s))
        records[mode] = record
    Console(width=None if sys.stdout.isatty() else 120).print(table_of(records))
    if arguments.json:
        write_json(arguments.json, {"study": HERE.name, "quick": arguments.quick, "records": records})
    return 0 if all(records["courier"]["figures"]["verdict"].values()) or arguments.quick else 1


if __name__ == "__main__":
    sys.exit(main())
