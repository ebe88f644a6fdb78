"""What each check says of machines that are not this one."""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.privileges import with_no_right_over_modes
from zftune.doctor import software
from zftune.doctor.check import Check, Status
from zftune.doctor.gpu import cuda_check, findings, triton_check
from zftune.doctor.host import cores_check, link_check, numa_check, pinned_check, throttled
from zftune.doctor.software import at_least, defects, extras, numbers, packages, requirements, store_check
from zftune.ds_config.facts import GOOD
from zftune.telemetry.fingerprint import installed

H200 = {"name": "NVIDIA H200"}
FIGURES: dict[str, Any] = {"other_processes": 0, "throttle_reasons": []}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def told(checks: Any) -> dict[str, Status]:
    return {check.name: check.status for check in checks}


@pytest.mark.parametrize(
    ("version", "least", "expected"),
    [
        ("2.13.0+cpu", "2.4", True),
        ("2.4", "2.13", False),
        ("2", "2.0", True),
        ("2.0.0", "2", True),
        ("5.0.0rc1", "5.0", True),
        ("garbage", "1", False),
    ],
)
def test_versions_are_compared_as_numbers(version: str, least: str, expected: bool) -> None:
    assert at_least(version, least) is expected


def test_requirements_are_those_of_the_package_without_extras() -> None:
    found = requirements("zftune")
    assert found["optuna"] == "5.0"
    assert found["numpy"] is None
    assert "mypy" not in found
    assert requirements("no-such-distribution") == {}


def test_a_torch_that_cannot_be_imported_is_no_good_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_written(name: str) -> None:
        raise EOFError("marshal data too short")

    monkeypatch.setattr("zftune.doctor.software.import_module", half_written)
    found = {check.name: check for check in packages({"torch": None, "rich": "1"})}
    assert (found["torch"].status, found["torch"].required) == ("broken", True)
    assert found["torch"].finding.endswith(" is installed and cannot be imported: EOFError: marshal data too short.")
    assert "torch" not in found["packages"].finding


def test_packages_that_are_missing_or_too_old_are_required() -> None:
    numpy = installed("numpy")
    assert numpy is not None
    major = numbers(numpy)[0] + 1
    found = list(packages({"numpy": f"{major}.0", "no-such-package": "1", "rich": "1", "torch": None}))
    assert told(found) == {"numpy": "broken", "no-such-package": "absent", "packages": "ok"}
    assert [check.name for check in found if check.is_fault] == ["numpy", "no-such-package"]
    assert found[0].fix == f"pip install 'numpy>={major}.0'"
    assert found[2].finding.startswith("torch ")


def test_extras_that_are_missing_come_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("plotly", "psycopg", "deepspeed"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setenv("ZFTUNE_DB", "/tmp/zftune.db")  # PostgreSQL is for those who name a server
    assert (extras().finding, extras().fix) == ("Not installed: report.", "pip install 'zftune[report]'")
    monkeypatch.setenv("ZFTUNE_DB", "postgresql://user@host/zftune")
    check = extras()
    assert (check.status, check.is_fault, check.finding) == ("absent", False, "Not installed: postgres, report.")
    assert check.fix == "pip install 'zftune[postgres,report]'"


def test_extras_that_are_there_are_named_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "find_spec", lambda name: object())
    monkeypatch.setenv("ZFTUNE_DB", "/tmp/zftune.db")
    local = extras().finding
    assert local.startswith("Installed: ")
    assert "report" in local
    assert not re.search("deepspeed|postgres", local)
    monkeypatch.setenv("ZFTUNE_DB", "postgresql://user@host/zftune")
    assert "postgres" in extras().finding


def test_a_deepspeed_that_is_not_there_is_pinned_for_its_own_zenflow_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "installed", lambda name: None)
    (absent,) = software.deepspeed_checks()
    command, _, rest = str(absent.fix).partition(";")
    assert command == "pip install 'zftune[deepspeed]'"
    assert rest == " to train with DeepSpeed's own ZenFlow too, add deepspeed==0.19.6"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.19.6", {"ZenFlow 'auto'": "note"}),
        ("0.19.7", {"ZenFlow weights": "broken", "ZenFlow 'auto'": "note"}),
        ("0.19.8+cu128", {"ZenFlow weights": "broken", "ZenFlow 'auto'": "note"}),
        ("0.19.9", {}),
        ("1.0.0", {}),
    ],
)
def test_defects_of_deepspeed(version: str, expected: dict[str, Status]) -> None:
    found = list(defects(version))
    assert told(found) == expected
    assert all(check.fix is not None for check in found)


def test_what_is_wrong_with_its_own_zenflow_alarms_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "installed", lambda name: "0.19.8")
    found = {check.name: check for check in software.deepspeed_checks()}
    weights = found["ZenFlow weights"]
    assert weights.status == "note"
    assert weights.fix == "Only to train with DeepSpeed's own ZenFlow: pip install deepspeed==0.19.6"


@pytest.mark.parametrize(
    ("named", "unread"),
    [("", None), ("8.0 9.0+PTX", None), ("9.0a", "9.0a"), ("8.0;9.0a+PTX;Hopper", "9.0a+PTX, Hopper")],
)
def test_architectures_that_deepspeed_cannot_read(
    monkeypatch: pytest.MonkeyPatch, named: str, unread: str | None
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", named)
    monkeypatch.setattr(software, "installed", lambda _: GOOD)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    (found,) = (check for check in software.deepspeed_checks() if check.name == "CPU Adam")
    if unread is None:
        assert (found.status, found.fix) == ("ok", None)
    else:
        assert found.status == "note"
        assert found.finding.startswith(f"DeepSpeed cannot read {unread} in $TORCH_CUDA_ARCH_LIST:")


@pytest.mark.parametrize(
    ("cuda", "used", "gpus", "status", "words"),
    [
        (None, [], None, "absent", "built without it"),
        (None, [], ["NVIDIA H200"], "broken", "There is a GPU"),
        ("12.8", [], None, "absent", "there is no GPU"),
        ("12.8", [], ["NVIDIA H200"], "broken", "CUDA sees none"),
        ("12.8", "the driver is too old.", ["NVIDIA H200"], "broken", "the driver is too old."),
        ("12.8", ["NVIDIA H200", "NVIDIA H200"], ["NVIDIA H200"], "ok", "2 x NVIDIA H200, CUDA 12.8."),
    ],
)
def test_cuda(cuda: str | None, used: Any, gpus: list[str] | None, status: Status, words: str) -> None:
    check = cuda_check("2.13.0", cuda, used, gpus)
    assert (check.status, words in check.finding) == (status, True)
    assert (check.fix is not None) == (status == "broken")


@pytest.mark.parametrize(
    ("version", "has_cuda", "status"),
    [(None, False, "absent"), (None, True, "absent"), ("2.9", True, "note"), ("3.7.1", False, "ok")],
)
def test_triton(version: str | None, has_cuda: bool, status: Status) -> None:
    check = triton_check(version, has_cuda)
    assert check.status == status
    assert (check.fix is not None) == (has_cuda or version == "2.9")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here, on which Triton works")
@pytest.mark.parametrize(
    ("mode", "status", "words", "fix"),
    [
        ("auto", "broken", "device updates run in PyTorch, several times slower: triton cannot launch a kernel", "gcc"),
        ("triton", "broken", "ZENFLOW_KERNELS is 'triton'; it must be auto or eager: triton cannot launch", "unset"),
        ("eager", "note", "3.7.1 is not used: ZENFLOW_KERNELS is 'eager'.", None),
    ],
)
def test_triton_is_tried(
    mode: str, status: Status, words: str, fix: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the training's kernels say on a GPU that is not there."""
    monkeypatch.setenv("ZENFLOW_KERNELS", mode)
    pytest.importorskip("triton", reason="Triton cannot be imported here")
    check = triton_check("3.7.1", has_cuda=True)
    assert (check.status, words in check.finding) == (status, True), check.finding
    assert check.fix is None if fix is None else fix in str(check.fix)


def test_nvml_with_everything() -> None:
    assert told(findings([H200], FIGURES, {})) == {"NVML": "ok", "GPM": "ok"}


def test_nvml_names_what_is_missing_once_for_each_reason() -> None:
    denied = "NVML: Insufficient Permissions"
    nvml, gpm = findings([H200], FIGURES, {"power_w": denied, "energy_j": denied, "pcie_gen": "NVML: Not Supported"})
    assert nvml.status == "note"
    assert nvml.finding == (
        "NVIDIA H200. Without power_w, energy_j (NVML: Insufficient Permissions); pcie_gen (NVML: Not Supported)."
    )
    assert nvml.fix is not None
    assert "root" in nvml.fix
    assert gpm.status == "ok"


@pytest.mark.parametrize(
    ("reason", "status", "fix"),
    [
        ("this GPU has no GPM, which came with Hopper", "absent", None),
        ("NVML: Insufficient Permissions", "note", "administrator"),
        ("NVML: the installed driver has no nvmlGpmQueryDeviceSupport", "absent", "Update NVIDIA's driver."),
        ("the binding has no nvmlGpmQueryDeviceSupport: ..", "absent", "uninstall pynvml"),
    ],
)
def test_gpm(reason: str, status: Status, fix: str | None) -> None:
    missing = dict.fromkeys(("sm_utilisation_percent", "sm_occupancy_percent", "dram_percent"), reason)
    _, gpm = findings([H200], FIGURES, missing)
    assert gpm.status == status
    assert gpm.fix is None if fix is None else fix in (gpm.fix or "")


def test_co_tenants_and_throttling() -> None:
    figures = {"other_processes": 2, "throttle_reasons": ["applications_clocks_setting", "sw_power_cap"]}
    *_, others, clocks = findings([H200], figures, {})
    assert (others.name, others.figures) == ("other processes", {"other_processes": 2})
    assert clocks.finding == "The clocks are held back: sw_power_cap."


def test_nvml_that_gives_nothing_is_broken() -> None:
    assert told(findings([H200], None, {"": "NVML: GPU is lost"})) == {"NVML": "broken"}


def test_a_quota_below_the_affinity() -> None:
    check = cores_check([0, 1, 2, 3], 2.5)
    assert check.status == "note"
    assert "2.5 cores lies below the 4" in check.finding
    assert check.fix is not None
    assert "taskset -c 0-1 with OMP_NUM_THREADS=2" in check.fix


@pytest.mark.parametrize(
    ("allowed", "quota", "status"), [([0, 1], None, "ok"), ([0, 1], 2.0, "ok"), ([0], None, "note"), ([0], 0.5, "note")]
)
def test_cores(allowed: list[int], quota: float | None, status: Status) -> None:
    assert cores_check(allowed, quota).status == status


@pytest.mark.parametrize(("counts", "notes"), [((1000, 200), 1), ((1000, 5), 0), ((10, 9), 0), ((0, 0), 0)])
def test_a_group_that_was_throttled(tmp_path: Path, counts: tuple[int, int], notes: int) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/job\n")
    write(tmp_path / "sys/fs/cgroup/job/cpu.stat", "nr_periods {}\nnr_throttled {}\n".format(*counts))
    found = list(throttled(tmp_path))
    assert len(found) == notes
    assert all("20%" in check.finding for check in found)


def test_numa(tmp_path: Path) -> None:
    assert numa_check([0], tmp_path).status == "note"  # unknown
    nodes = tmp_path / "sys/devices/system/node"
    (nodes / "node0").mkdir(parents=True)
    assert numa_check([0, 1], tmp_path).status == "ok"
    (nodes / "node1").mkdir()
    for cpu, node in ((0, 0), (1, 1), (2, 1)):
        (tmp_path / f"sys/devices/system/cpu/cpu{cpu}/node{node}").mkdir(parents=True)
    assert numa_check([1, 2], tmp_path).finding == "The cores are all on node 1 of 2."
    spread = numa_check([0, 1, 2], tmp_path)
    assert (spread.status, spread.figures) == ("note", {"nodes": 2, "nodes_allowed": 2})


@pytest.mark.parametrize(
    ("limit", "status", "words"),
    [(resource.RLIM_INFINITY, "ok", "No limit"), (8 << 20, "note", "8 MiB may"), (64 << 10, "note", "64 KiB may")],
)
def test_pinned_memory(limit: int, status: Status, words: str) -> None:
    check = pinned_check(limit)
    assert check.status == status
    assert check.finding.startswith(words)


@pytest.mark.parametrize(
    ("down", "up", "pcie", "status"),
    [(52.0, 54.0, (5, 16), "ok"), (52.0, 20.0, (5, 16), "note"), (5.0, 5.0, None, "ok"), (5.0, 5.0, (9, 16), "ok")],
)
def test_the_link(down: float, up: float, pcie: tuple[int, int] | None, status: Status) -> None:
    check = link_check(down, up, pcie)
    assert check.status == status
    assert check.figures == {"d2h_gbps": down, "h2d_gbps": up}


def store(environment: dict[str, str], home: Path, root: Path = Path("/")) -> Check:
    return store_check(environment, home, root)


def test_the_store_by_default_is_in_the_home_and_is_not_created(tmp_path: Path) -> None:
    check = store({}, tmp_path)
    assert (check.status, check.finding) == ("ok", "~/.local/share/zftune/zftune.db can be created.")
    assert list(tmp_path.iterdir()) == []


def test_the_store_by_xdg_and_by_its_own_variable(tmp_path: Path) -> None:
    assert "$XDG_DATA_HOME" in store({"XDG_DATA_HOME": str(tmp_path)}, Path("/nowhere")).finding
    assert "~/" in store({"XDG_DATA_HOME": "relative"}, tmp_path).finding
    file = tmp_path / "z.db"
    file.write_text("")
    for value in (str(file), f"sqlite:///{file}", f"sqlite+pysqlite:///{file}?timeout=3"):
        check = store({"ZFTUNE_DB": value}, Path("/nowhere"))
        assert (check.status, check.finding) == ("ok", "$ZFTUNE_DB is there and can be written.")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=3, f_frsize=1_000_000))
    check = store({}, tmp_path)
    assert check.status == "broken"
    assert check.finding.startswith("The disk with ~/.local/share/zftune/zftune.db is full: 3 MB are free.")
    assert check.fix is not None
    assert "$ZFTUNE_DB" in check.fix


def test_a_server_is_named_without_its_password(tmp_path: Path) -> None:
    check = store({"ZFTUNE_DB": "postgresql+psycopg://me:secret@host/db"}, tmp_path)
    assert check.finding == "$ZFTUNE_DB names a postgresql server, which was not tried."


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for place in (file / "zftune.db", file / "folder" / "zftune.db", tmp_path):
        check = store({"ZFTUNE_DB": str(place)}, tmp_path)
        assert check.status == "broken", place
        assert check.fix is not None
        assert not check.is_fault


def test_a_folder_without_the_right_to_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    check = with_no_right_over_modes(lambda: store({"ZFTUNE_DB": str(tmp_path / "z.db")}, tmp_path))
    assert check.status == "broken"
