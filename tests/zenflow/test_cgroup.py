"""Where the control groups of this process are found: versions, mounts, containers, damaged files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.zenflow.machine import Machine
from zenflow.host.limits import as_int, cgroups, read_int, read_text


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def folders(machine: Machine, controller: str) -> list[str]:
    """Version and folder of each group found."""
    return [
        f"v{group.version} /{group.folder.relative_to(machine.root)}" for group in cgroups(controller, machine.root)
    ]


def test_version_2_from_the_group_to_the_top(machine: Machine) -> None:
    machine.group("", "/user.slice/user-0.slice/run.scope")
    machine.mount("/sys/fs/cgroup")
    top = "v2 /sys/fs/cgroup"
    assert folders(machine, "cpu") == [
        f"{top}/user.slice/user-0.slice/run.scope",
        f"{top}/user.slice/user-0.slice",
        f"{top}/user.slice",
        top,
    ]


def test_version_1_by_controller(machine: Machine) -> None:
    machine.group("name=cpu", "/named")  # a hierarchy may be called like a controller
    machine.group("cpu,cpuacct", "/a/b")
    machine.group("memory", "/c")
    machine.mount("/sys/fs/cgroup/named", controllers="xattr,name=cpu")
    machine.mount("/sys/fs/cgroup/cpu,cpuacct", controllers="cpu,cpuacct", tags="")
    machine.mount("/mnt/odd", controllers="memory", tags="shared:3 master:4 ")
    cpu = "v1 /sys/fs/cgroup/cpu,cpuacct"
    assert folders(machine, "cpu") == [f"{cpu}/a/b", f"{cpu}/a", cpu]
    assert folders(machine, "memory") == ["v1 /mnt/odd/c", "v1 /mnt/odd"]
    assert folders(machine, "pids") == ["v2 /sys/fs/cgroup", "v1 /sys/fs/cgroup/pids"]  # where they usually are


def test_hybrid_has_both(machine: Machine) -> None:
    machine.group("memory", "/job")
    machine.group("", "/unit")
    machine.mount("/sys/fs/cgroup/unified")
    machine.mount("/sys/fs/cgroup/memory", controllers="memory")
    assert folders(machine, "memory") == [
        "v2 /sys/fs/cgroup/unified/unit",
        "v2 /sys/fs/cgroup/unified",
        "v1 /sys/fs/cgroup/memory/job",
        "v1 /sys/fs/cgroup/memory",
    ]


def test_a_container_that_sees_its_hosts_path_and_mounts_its_own_group(machine: Machine) -> None:
    machine.group("memory", "/docker/0123/inner")
    machine.mount("/sys/fs/cgroup/memory", controllers="memory", root="/docker/0123")
    assert folders(machine, "memory") == ["v1 /sys/fs/cgroup/memory/inner", "v1 /sys/fs/cgroup/memory"]


@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("/docker/0123", "/docker/01"),  # not below it, although the names begin alike
        ("/", "/docker/0123"),
        ("/", "/../.."),  # the mount lies outside of the cgroup namespace
        ("/../sibling", "/"),  # the process does
        ("//", "/else"),
    ],
)
def test_a_path_outside_of_the_mount_leaves_the_mount(machine: Machine, path: str, root: str) -> None:
    machine.group("", path)
    machine.mount("/sys/fs/cgroup", root=root)
    assert folders(machine, "cpu") == ["v2 /sys/fs/cgroup"]


def test_a_mount_of_some_other_group_counts_only_where_there_is_no_better(machine: Machine) -> None:
    machine.group("", "/mine")
    machine.mount("/watched", root="/other")
    machine.mount("/sys/fs/cgroup")
    assert folders(machine, "cpu") == ["v2 /sys/fs/cgroup/mine", "v2 /sys/fs/cgroup"]


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


def test_nothing_readable_means_the_usual_places(machine: Machine) -> None:
    assert folders(machine, "cpu") == ["v2 /sys/fs/cgroup", "v1 /sys/fs/cgroup/cpu"]


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


def test_readers_of_one_number(machine: Machine) -> None:
    for text, value in {
        "-1\n": -1,
        "0": 0,
        f"{2**63}\n": 2**63,
        "max\n": None,
        "": None,
        "1 2": None,
        "1_0": None,
    }.items():
        machine.write("number", text)
        assert read_int(machine.root / "number") == value
    assert as_int("9" * 5000) is None
    assert read_int(machine.root) is None  # a folder
    assert read_text(machine.root / "number" / "below") is None


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="not Linux")
def test_this_machines_groups_hold_this_process() -> None:
    found = [group.folder / "cgroup.procs" for controller in ("cpu", "memory") for group in cgroups(controller)]
    holding = [path for path in found if str(os.getpid()) in (read_text(path) or "").split()]
    if not any(path.exists() for path in found):
        pytest.skip("no control group is mounted here")
    assert holding
