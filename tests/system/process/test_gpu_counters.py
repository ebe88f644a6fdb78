"""What NVML tells while a command is profiled, from a scripted driver: counters, and a GPU that is lost in mid-run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.nvml.scripted import HOPPER, LOST, SECOND_GPU, Clock, Machine, machine, nvml_library
from tests.support.process.fixtures import Run
from tests.support.tiers import everything

__all__ = ["machine", "nvml_library"]

# Nine steps, each of which goes on until the driver was asked once more.
CODE = """
import pathlib, time, training

def asked():
    return calls.read_text().count("nvmlDeviceGetUtilizationRates") if calls.exists() else 0

def sampled():
    before = asked()
    while asked() <= before:
        time.sleep(0.01)

training.train(at={step: sampled for step in range(9)})
"""


def code(machine: Machine, text: str = CODE) -> str:
    return text.replace("calls.", f"pathlib.Path({str(machine.log)!r}).")


def driver(library: Path, machine: Machine, **more: str) -> Mapping[str, str]:
    return {"LD_LIBRARY_PATH": str(library.parent), "NVML_SCRIPT": str(machine.script), **more}


def test_counters_are_in_the_report(python: Run, machine: Machine, nvml_library: Path) -> None:
    row = {"t": 0.0, "util": 37.0, "rx_gbps": 3.0, "tx_gbps": 6.0, "power_w": 410.0}
    machine.write(HOPPER, timeline=[row, {**row, "t": 600.0}])
    ended = python(code(machine), options=("--warmup", 2), env=driver(nvml_library, machine)).is_clean()
    assert ended.document is not None
    nvml = ended.document["nvml"]
    assert nvml["devices"] == 1
    assert nvml["utilisation_percent"] == pytest.approx(37, abs=1)
    assert nvml["pcie_rx_gbps"] == pytest.approx(3, rel=0.05)
    assert nvml["pcie_tx_gbps"] == pytest.approx(6, rel=0.05)
    assert ended.document["sources"]["nvml"] == "NVML"
    assert len(ended.document["series"]["nvml"]) >= 3


def test_a_gpu_lost_in_mid_run_is_told(python: Run, machine: Machine, nvml_library: Path, tmp_path: Path) -> None:
    lines = (*HOPPER, f"gpu NVIDIA_H200 {SECOND_GPU}", "capability 9 0")
    clock = Clock(tmp_path / "clock.txt")
    machine.write(lines, errors=[("*", LOST, 1.0, 0)], clock=clock.file, from_start=True)
    lose = f"pathlib.Path({str(clock.file)!r}).write_text('2.0')"
    text = CODE.replace("range(9)}", f"range(9)}} | {{4: lambda: ({lose}, sampled())}}")
    ended = python(code(machine, text), options=("--warmup", 2), env=driver(nvml_library, machine)).is_clean()
    assert ended.document is not None
    assert ended.document["nvml"]["devices"] == 2
    assert ended.document["nvml"]["utilisation_percent"] is not None
    assert ended.document["missing"]["nvml.devices.0"].endswith("GPU is lost"), ended.document["missing"]
    assert "GPU is lost" in ended.err


@pytest.mark.skipif(not everything(), reason="before a release: it trains once more")
def test_a_hidden_gpu_is_not_watched(python: Run, machine: Machine, nvml_library: Path) -> None:
    machine.write(HOPPER)
    env = driver(nvml_library, machine, CUDA_VISIBLE_DEVICES="")
    ended = python("import training\ntraining.train()", options=("--warmup", 2), env=env).is_clean()
    assert ended.document is not None
    assert ended.document["nvml"] is None
    assert ended.document["missing"]["nvml"] == "CUDA_VISIBLE_DEVICES hides every GPU"
