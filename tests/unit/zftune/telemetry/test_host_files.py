"""The kernel's files, in its own formats, in folders that stand for "/"."""

from __future__ import annotations

from pathlib import Path

import pytest

from zftune.telemetry.host_sampler import (
    Throttling,
    cpu_folders,
    nodes_used,
    numa_pages,
    pressure_file,
    pressure_us,
    throttling,
)

PRESSURE = "some avg10=1.20 avg60=0.40 avg300=0.10 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_throttling_of_version_2_and_its_parents(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/slice/job\n")
    group = tmp_path / "sys/fs/cgroup/slice/job"
    write(group / "cpu.stat", "usage_usec 9\nnr_periods 40\nnr_throttled 10\nthrottled_usec 123456\n")
    write(group.parent / "cpu.stat", "usage_usec 9\n")  # without a quota of its own it does not count
    assert throttling(cpu_folders(tmp_path)) == {group: Throttling(40, 10)}


def test_throttling_of_version_1(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "4:cpu,cpuacct:/job\n")
    group = tmp_path / "sys/fs/cgroup/cpu,cpuacct/job"
    write(group / "cpu.stat", "nr_periods 8\nnr_throttled 2\nthrottled_time 99000\n")
    assert throttling(cpu_folders(tmp_path)) == {group: Throttling(8, 2)}


@pytest.mark.parametrize("text", ["", "nr_periods x\nnr_throttled 1\n", "nr_periods 8\n"])
def test_a_group_that_does_not_tell_about_throttling(tmp_path: Path, text: str) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/job\n")
    write(tmp_path / "sys/fs/cgroup/job/cpu.stat", text)
    assert throttling(cpu_folders(tmp_path)) == {}


def test_pressure_of_the_group_comes_before_the_machines(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/job\n")
    write(tmp_path / "proc/pressure/memory", PRESSURE.format(1))
    machine = pressure_file("memory", cpu_folders(tmp_path), tmp_path)
    assert machine == tmp_path / "proc/pressure/memory"
    write(tmp_path / "sys/fs/cgroup/job/memory.pressure", PRESSURE.format(2))
    group = pressure_file("memory", cpu_folders(tmp_path), tmp_path)
    assert group is not None
    assert pressure_us(group) == 2
    assert pressure_file("io", cpu_folders(tmp_path), tmp_path) is None


def test_pressure_that_is_switched_off_reads_as_unknown(tmp_path: Path) -> None:
    write(tmp_path / "cpu", "")
    assert pressure_us(tmp_path / "cpu") is None


def test_pages_of_a_process_by_node_without_its_files(tmp_path: Path) -> None:
    write(
        tmp_path / "proc/42/numa_maps",
        "7f0000000000 default anon=500 dirty=500 N0=300 N1=200 kernelpagesize_kB=4\n"
        "7f1000000000 default file=/usr/lib/libc.so mapped=90 N3=90 kernelpagesize_kB=4\n"
        "7f2000000000 bind:1 anon=99500 dirty=99500 active=0 N1=99500 kernelpagesize_kB=4\n"
        "7ffc00000000 default stack anon=3 dirty=3 N0=3 kernelpagesize_kB=4\n",
    )
    pages = numa_pages(42, tmp_path)
    assert pages == {0: 303, 1: 99700}
    assert nodes_used(pages) == 1  # node 0 holds less than a hundredth
    assert nodes_used({0: 2000, 1: 99700}) == 2
    assert numa_pages(43, tmp_path) == {}
