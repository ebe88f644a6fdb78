from __future__ import annotations

import json
import os
import platform
import socket
from pathlib import Path

import pytest

from zftune.telemetry import cpu_quota, hardware, software
from zftune.telemetry.fingerprint import _cpu_model
from zftune.telemetry.host_sampler import numa_node_count


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_nothing_is_zero_and_what_is_null_has_a_reason() -> None:
    for found in (hardware(), software()):
        nulls = {name for name, value in found.items() if value is None}
        assert nulls == {name for name in found["missing"] if "." not in name}
        assert all(value != 0 for value in found.values())
        json.dumps(found)


def test_no_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "the-name-of-this-host"
    system = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((system[0], name, *system[2:])))
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setattr(platform, "_uname_cache", None)
    assert platform.node() == name
    assert name not in json.dumps([hardware(), software()])


def test_quota_of_version_2_is_the_least_of_all_parents(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{
            "proc/self/cgroup": "0::/slice/job\n",
            "sys/fs/cgroup/slice/job/cpu.max": "max 100000\n",
            "sys/fs/cgroup/slice/cpu.max": "150000 100000\n",
        },
    )
    assert cpu_quota(tmp_path) == 1.5


def test_quota_of_version_1_in_a_container_sees_only_the_mount_point(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{
            "proc/self/cgroup": "5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/cpu.max": "1 1\n",  # not a CPU controller: not read
        },
    )
    assert cpu_quota(tmp_path) == 4


@pytest.mark.parametrize("quota", ["-1", "max", "nonsense", "0"])
def test_no_limit_is_none(tmp_path: Path, quota: str) -> None:
    write(
        tmp_path,
        **{
            "proc/self/cgroup": "1:cpu:/\n0::/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota,
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu.max": f"{quota} 100000",
        },
    )
    assert cpu_quota(tmp_path) is None


def test_a_machine_without_proc_and_sys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert (cpu_quota(tmp_path), numa_node_count(tmp_path), _cpu_model(tmp_path)) == (None, None, None)


def test_cpu_and_nodes_from_files(tmp_path: Path) -> None:
    write(tmp_path, **{"proc/cpuinfo": "processor\t: 0\nmodel name\t: Fine CPU\n"})
    for node in ("node0", "node1", "possible"):
        (tmp_path / "sys/devices/system/node" / node).mkdir(parents=True)
    assert (_cpu_model(tmp_path), numa_node_count(tmp_path)) == ("Fine CPU", 2)
