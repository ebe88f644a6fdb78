"""Where the control groups of this process are found: versions, mounts, containers, damaged files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.zenflow.machine import Machine
from zenflow.host.limits import cgroups, read_text


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def folders(machine: Machine, controller: str) -> list[str]:
    """Version and folder of each group found."""
    return [
        f"v{group.version} /{group.folder.relative_to(machine.root)}" for group in cgroups(controller, machine.root)
    ]


def test_a_group_mounted_twice_counts_once_a_folder(machine: Machine) -> None:
    machine.group("", "/mine")
    machine.mount("/sys/fs/cgroup")
    machine.mount("/sys/fs/cgroup")
    machine.mount("/again", root="/mine")
    assert folders(machine, "cpu") == ["v2 /sys/fs/cgroup/mine", "v2 /sys/fs/cgroup", "v2 /again"]


def test_odd_names(machine: Machine) -> None:
    machine.group("", "/with space:and colon")
    machine.mount(r"/mnt/a\040b\134c")
    assert folders(machine, "cpu") == ["v2 /mnt/a b\\c/with space:and colon", "v2 /mnt/a b\\c"]


@settings(deadline=None)
@given(st.binary(max_size=80), st.binary(max_size=80))
@example(b"::\n:\n0\n0::\n0::relative\n", b" - cgroup2\n1 2 3 / /x - cgroup2 a b\n1 2 3 / x y - cgroup2 a b\n")
@example(b"\x00\xff\xfe", b"\n\n")
@example(b"0::/\x00\n", b"30 25 0:28 / /a\\000b rw - cgroup2 cgroup2 rw\n")
def test_garbage_is_survived(tmp_path_factory: pytest.TempPathFactory, groups: bytes, mounts: bytes) -> None:
    machine = Machine(tmp_path_factory.mktemp("machine"))
    machine.write("proc/self/cgroup", groups)
    machine.write("proc/self/mountinfo", mounts)
    for group in cgroups("cpu", machine.root):
        assert group.folder.is_relative_to(machine.root)
        assert read_text(group.folder / "cpu.max") is None


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="not Linux")
def test_this_machines_groups_hold_this_process() -> None:
    found = [group.folder / "cgroup.procs" for controller in ("cpu", "memory") for group in cgroups(controller)]
    holding = [path for path in found if str(os.getpid()) in (read_text(path) or "").split()]
    if not any(path.exists() for path in found):
        pytest.skip("no control group is mounted here")
    assert holding
