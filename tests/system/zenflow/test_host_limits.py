"""What this process may still allocate, on fake machines and on this one, and the refusal of what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import forked
from tests.support.zenflow.machine import NO_LIMIT_V1, Machine
from zenflow import HostMemoryError, ZenFlowError
from zenflow.host.limits import Bound, Claim, available_host_bytes, first_fitting

GIB = 1 << 30


# What follows takes two seconds; most of it is of files that a test writes.
pytestmark = pytest.mark.smoke


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def require_host_bytes(needed_bytes: int, what: str, advice: str, root: Path) -> None:
    assert first_fitting([Claim.of([needed_bytes], root)], what, advice) == 0


def meminfo(machine: Machine, available_bytes: int) -> None:
    machine.write(
        "proc/meminfo",
        f"MemTotal:       263776000 kB\nMemFree:        1 kB\nMemAvailable:   {available_bytes // 1024:8} kB\n"
        "SwapCached:            0 kB\n",
    )


def v2(machine: Machine, folder: str, limit: str, use: str, inactive_file: int = 0) -> None:
    stat = f"anon 123\nfile 99999\nworkingset_inactive_file 1\ninactive_file {inactive_file}\nactive_file 77777"
    machine.files(folder, {"memory.max": limit, "memory.current": use, "memory.stat": stat})


def v1(machine: Machine, folder: str, limit: str, use: str, inactive_file: int = 0) -> None:
    stat = f"cache 99999\ninactive_file 5\nhierarchical_memory_limit 1\ntotal_inactive_file {inactive_file}"
    machine.files(folder, {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": use, "memory.stat": stat})


def limits(machine: Machine, *, address_space: str = "unlimited", data: str = "unlimited") -> None:
    rows = {"cpu time": "unlimited", "data size": data, "resident set": "1", "address space": address_space}
    lines = "".join(f"{'Max ' + name:<26}{soft:<20} {'unlimited':<20} bytes     \n" for name, soft in rows.items())
    machine.write("proc/self/limits", f"{'Limit':<26}{'Soft Limit':<20} {'Hard Limit':<20} Units     \n{lines}")


def test_nothing_known_is_none_and_refuses_nothing(machine: Machine) -> None:
    assert available_host_bytes(machine.root) is None
    require_host_bytes(1 << 80, "everything", "lower it", root=machine.root)


def test_version_1_and_its_number_for_no_limit(machine: Machine) -> None:
    machine.group("memory", "/job")
    machine.mount("/sys/fs/cgroup/memory", controllers="memory")
    v1(machine, "sys/fs/cgroup/memory", NO_LIMIT_V1, str(90 * GIB))
    assert available_host_bytes(machine.root) is None
    v1(machine, "sys/fs/cgroup/memory/job", str(9223372036854710272), str(GIB))  # with pages of 64 KiB
    assert available_host_bytes(machine.root) is None
    v1(machine, "sys/fs/cgroup/memory/job", str(3 * GIB), str(2 * GIB), inactive_file=GIB // 2)
    assert available_host_bytes(machine.root) == 3 * GIB // 2


def test_resource_limits_less_what_is_in_use(machine: Machine) -> None:
    machine.write("proc/self/status", "Name:\tpython\nVmPeak:\t 9999 kB\nVmSize:\t 2048 kB\nVmData:\t  1024 kB\n")
    limits(machine)
    assert available_host_bytes(machine.root) is None
    limits(machine, address_space=str(GIB))
    assert available_host_bytes(machine.root) == GIB - 2048 * 1024
    limits(machine, address_space=str(GIB), data=str(GIB // 2))
    assert available_host_bytes(machine.root) == GIB // 2 - 1024 * 1024
    limits(machine, address_space="4096")
    assert available_host_bytes(machine.root) == 0


@pytest.mark.parametrize("limit", ["max", "-1", "", "garbage", "1e9", "18446744073709551615", "9" * 4999])
def test_unreadable_limits_are_unknown(machine: Machine, limit: str) -> None:
    machine.mount("/sys/fs/cgroup")
    v2(machine, "sys/fs/cgroup", limit, "0")
    machine.write("proc/meminfo", "MemTotal: 5 kB\nMemAvailable: lots\n")
    machine.write("proc/self/limits", limit)
    assert available_host_bytes(machine.root) is None


def test_the_refusal_is_one_sentence_with_both_figures(machine: Machine) -> None:
    meminfo(machine, 100 * GIB)
    machine.group("", "/job")
    machine.mount("/sys/fs/cgroup")
    v2(machine, "sys/fs/cgroup/job", str(2 * GIB), str(GIB))
    require_host_bytes(GIB, "the host state", "lower offload_ratio", root=machine.root)
    with pytest.raises(HostMemoryError) as caught:
        require_host_bytes(GIB + 1, "the host state", "lower offload_ratio", root=machine.root)
    assert str(caught.value) == (
        f"the host state needs {GIB + 1} bytes of host memory, available are {GIB} "
        f"(memory.max of the control group {machine.root}/sys/fs/cgroup/job); lower offload_ratio"
    )
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value, ZenFlowError)


# Several ranks.

MACHINE = "MemAvailable of the machine"


def claim(needs: list[int], *bounds: Bound, name: str = "a", boot: str = "1") -> Claim:
    return Claim(tuple(needs), (name, boot), bounds)


def machine_has(nbytes: int) -> Bound:
    return Bound(nbytes, MACHINE, shared=True)


def test_ranks_of_one_node_share_its_memory() -> None:
    ranks = [claim([GIB], machine_has(4 * GIB - rank)) for rank in range(4)]
    assert first_fitting([claim([GIB], machine_has(4 * GIB))] * 4, "the log", "lower it") == 0
    with pytest.raises(HostMemoryError) as caught:  # the least that one of them saw
        first_fitting(ranks, "the log", "lower it")
    assert str(caught.value) == (
        f"the log needs {4 * GIB} bytes of host memory on a, up to {GIB} for each of its 4 ranks, available are "
        f"{4 * GIB - 3} ({MACHINE}), {GIB - 1} for each; lower it"
    )


def test_a_limit_of_the_process_is_its_own() -> None:
    own = Bound(GIB, '"Max address space" of the process', shared=False)
    assert first_fitting([claim([GIB], own, machine_has(2 * GIB))] * 2, "it", "lower it") == 0
    with pytest.raises(
        HostMemoryError, match=rf"^it needs {GIB + 1} bytes of host memory, available are {GIB} \(\"Max"
    ):
        first_fitting([claim([GIB], own), claim([GIB + 1], own)], "it", "lower it")


def test_the_first_of_several_needs_that_fits_everywhere_is_taken() -> None:
    roomy = claim([3, 2, 1], machine_has(100), name="b")
    assert first_fitting([roomy, *[claim([3, 2, 1], machine_has(5))] * 2], "it", "lower it") == 1
    with pytest.raises(HostMemoryError, match="needs 2 bytes of host memory on a, up to 1 for each of its 2 ranks"):
        first_fitting([roomy, *[claim([3, 2, 1], machine_has(1))] * 2], "it", "lower it")


SIZES = st.integers(0, 1 << 50)


@settings(deadline=None)
@given(st.lists(st.tuples(st.none() | SIZES, SIZES, SIZES), min_size=1, max_size=5), st.none() | SIZES, SIZES)
def test_the_least_over_all_levels(
    tmp_path_factory: pytest.TempPathFactory,
    levels: list[tuple[int | None, int, int]],
    free: int | None,
    needed: int,
) -> None:
    machine = Machine(tmp_path_factory.mktemp("machine"))
    machine.group("", "/" + "/".join("abcd"[: len(levels) - 1]))
    machine.mount("/sys/fs/cgroup")
    expected = []
    for depth, (limit, use, cache) in enumerate(levels):
        v2(
            machine,
            "/".join(("sys/fs/cgroup", *"abcd"[:depth])),
            "max" if limit is None else str(limit),
            str(use),
            cache,
        )
        if limit is not None:
            expected.append(max(0, limit - max(0, use - cache)))
    if free is not None:
        meminfo(machine, free)
        expected.append(free // 1024 * 1024)
    assert available_host_bytes(machine.root) == min(expected, default=None)
    if expected and needed > min(expected):
        with pytest.raises(HostMemoryError, match=f"needs {needed} bytes .* available are {min(expected)} "):
            require_host_bytes(needed, "it", "lower it", root=machine.root)
    else:
        require_host_bytes(needed, "it", "lower it", root=machine.root)


needs_proc = pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="no /proc here")


@needs_proc
def test_this_machine_has_some_memory_and_not_more_than_it_has() -> None:
    available = available_host_bytes()
    lines = Path("/proc/meminfo").read_text().splitlines()
    total_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal"))
    assert available is not None
    assert 0 < available <= total_kib * 1024


@needs_proc
@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_what_fits_can_be_allocated_under_a_real_limit_and_no_more(limit: str) -> None:
    script = f"""
import mmap, resource, sys
from zenflow.host.limits import available_host_bytes  # with torch: it takes its own memory first
margin = 64 << 20
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
used = int(status["VmSize" if "{limit}" == "RLIMIT_AS" else "VmData"].split()[0]) * 1024
resource.setrlimit(resource.{limit}, (used + (256 << 20),) * 2)
available = available_host_bytes()
assert (256 << 20) - margin < available <= 256 << 20, available
private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
try:
    mmap.mmap(-1, available + margin, flags=private)
    raise SystemExit("more than was available")
except OSError:
    pass
mmap.mmap(-1, available - margin, flags=private)
"""
    done = forked.run(script)
    assert done.returncode == 0, done.stderr
