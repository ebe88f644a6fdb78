"""On which cores the host engine's threads run: on machines written down by hand, on random ones, and on this one."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Collection
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, note, settings
from hypothesis import strategies as st

from tests.support.tiers import repeated
from tests.support.zenflow.machine import Machine
from zenflow import ConfigError
from zenflow.host.cores import (
    CpuClaim,
    HostCores,
    cpu_quota,
    dealt_cpus,
    format_cpulist,
    gpu_numa_node,
    host_cores,
    parse_cpulist,
)

# Two sockets of four cores with two siblings each, in the two usual numberings.
APART = [(core, core + 8) for core in range(8)]  # the second siblings after all the first


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def cores_of(machine: Machine, affinity: Collection[int], reserved_share: float = 0.0, **arguments: Any) -> HostCores:
    return host_cores(reserved_share=reserved_share, affinity=affinity, root=machine.root, **arguments)


def cpus_of(machine: Machine, affinity: Collection[int], reserved_share: float = 0.0, **arguments: Any) -> list[int]:
    return list(cores_of(machine, affinity, reserved_share, **arguments).cpus)


def quota_v2(machine: Machine, text: str) -> None:
    machine.mount("/sys/fs/cgroup")
    machine.files("sys/fs/cgroup", {"cpu.max": text})


def quota_v1(machine: Machine, folder: str, quota: str, period: str = "100000") -> None:
    machine.files(folder, {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": period})


# One step at a time.


def test_a_machine_of_one_core_without_any_files(machine: Machine) -> None:
    for share in (0, 0.5, 1):
        cores = cores_of(machine, {0}, share)
        assert cores.cpus == (0,)
        assert (cores.quota, cores.numa_node, cores.online_cpus, cores.reserved_cores) == (None, None, None, 0)
    assert cpus_of(machine, {0}, threads=3) == [-1, -1, -1]


def test_only_the_cpus_of_the_node(machine: Machine) -> None:
    machine.cores(APART)
    machine.nodes("0-3,8-11", "4-7,12-15", "")
    assert cpus_of(machine, range(16), numa_node=0) == [0, 1, 2, 3]
    assert cpus_of(machine, range(16), numa_node=1) == [4, 5, 6, 7]
    assert cpus_of(machine, {2, 5, 13, 14}, numa_node=1) == [5, 14]
    assert cores_of(machine, {4, 5}, numa_node=1).numa_node == 1  # holds, although nothing was left out
    for node, affinity in ((None, range(16)), (-1, range(16)), (2, range(16)), (7, range(16))):
        cores = cores_of(machine, affinity, numa_node=node)
        assert (cores.cpus, cores.numa_node) == (tuple(range(8)), None)
    assert cpus_of(machine, {1, 2}, numa_node=1) == [1, 2]  # none of its CPUs is allowed


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ((0, 0, 1, 1), [(0, 2), (1, 3), (4, 6), (5, 7)]),  # two GPUs at each socket: all cores are used, at home
        ((0, 1, 1, 1), [None, (4, 7), (5,), (6,)]),  # the first has its socket for itself, as far as its GPU says
        ((0, 1, None, 1), [(0, 4), (1, 5), (2, 6), (3, 7)]),  # who does not know its node takes from both
        ((None,) * 3, [(0, 3, 6), (1, 4, 7), (2, 5)]),
        ((0,) * 5, [None] * 5),  # more than the socket has cores
    ],
)
def test_cores_are_dealt_among_the_ranks_at_their_node(
    machine: Machine, nodes: tuple[int | None, ...], expected: list[tuple[int, ...] | None]
) -> None:
    machine.cores(APART)
    machine.nodes("0-3,8-11", "4-7,12-15")
    claims = [CpuClaim("here", tuple(range(16)), node) for node in nodes]
    assert [dealt_cpus(claims, number, machine.root) for number in range(len(claims))] == expected
    elsewhere = CpuClaim("elsewhere", tuple(range(16)), 0)
    bound = CpuClaim("here", (0, 8), 0)  # by its launcher, which has dealt the cores itself
    others = [elsewhere, *claims, bound]
    assert [dealt_cpus(others, number, machine.root) for number in range(len(others))] == [None, *expected, None]


def test_quota_version_1(machine: Machine) -> None:
    machine.group("cpu,cpuacct", "/job/step")
    machine.mount("/sys/fs/cgroup/cpu,cpuacct", controllers="cpu,cpuacct")
    top = "sys/fs/cgroup/cpu,cpuacct"
    quota_v1(machine, top, "-1")
    quota_v1(machine, f"{top}/job/step", "-1")
    assert cpu_quota(machine.root) is None
    quota_v1(machine, f"{top}/job", "150000")
    assert cpu_quota(machine.root) == 1.5
    quota_v1(machine, f"{top}/job/step", "25000", "50000")
    assert cpu_quota(machine.root) == 0.5


def test_the_least_quota_of_nested_groups_counts(machine: Machine) -> None:
    machine.group("", "/pod/container")
    machine.mount("/sys/fs/cgroup")
    machine.files("sys/fs/cgroup/pod/container", {"cpu.max": "800000 100000"})
    machine.files("sys/fs/cgroup/pod", {"cpu.max": "350000 100000"})
    assert cpu_quota(machine.root) == 3.5
    assert len(cpus_of(machine, range(16))) == 3
    machine.files("sys/fs/cgroup/pod/container", {"cpu.max": "max 100000"})
    assert cpu_quota(machine.root) == 3.5


@pytest.mark.parametrize(
    "text", ["", "max", "0 100000", "100000 0", "-5 7", "-1 100000", "a b", "1 2 3", "9" * 400 + " 1", "١ ٢"]
)
def test_damaged_quota_files_are_unknown(machine: Machine, text: str) -> None:
    quota_v2(machine, text)
    machine.mount("/sys/fs/cgroup/cpu", controllers="cpu")
    quota_v1(machine, "sys/fs/cgroup/cpu", text)
    assert cpu_quota(machine.root) is None
    assert cpus_of(machine, range(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("text", ["", "\n", "x", "0-", "3-1", "0-99999999999999", "0,,1", "-1", "7", "\x00"])
def test_damaged_topology_files_are_unknown(machine: Machine, text: str) -> None:
    machine.nodes(text)
    for cpu in (0, 1):
        machine.files(f"sys/devices/system/cpu/cpu{cpu}/topology", {"thread_siblings_list": text})
    machine.files("sys/devices/system/cpu", {"online": text})
    assert cpus_of(machine, {0, 1}, numa_node=0) == [0, 1]


# A given number of threads.


def test_threads_are_spread_over_the_first_pool_that_has_enough(machine: Machine) -> None:
    machine.cores(APART)
    machine.nodes("0-3,8-11", "4-7,12-15")

    def given_threads(count: int) -> list[int]:
        return cpus_of(machine, range(16), 0.5, numa_node=1, threads=count)

    assert given_threads(1) == [6]
    assert given_threads(2) == [6, 7]  # the engine's
    assert given_threads(3) == [4, 5, 6]  # the node's
    assert given_threads(4) == [4, 5, 6, 7]
    assert given_threads(5) == [0, 1, 3, 4, 6]  # the machine's, still no two on one core
    assert given_threads(8) == list(range(8))
    assert given_threads(9) == [0, 1, 3, 5, 7, 8, 10, 12, 14]  # siblings too
    assert given_threads(16) == list(range(16))
    assert given_threads(17) == [-1] * 17


# Systems without affinity.


def test_without_affinity_the_scheduler_places_the_threads(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    machine.nodes("0-1")
    cores = host_cores(reserved_share=0.5, numa_node=0, root=machine.root)
    assert cores.cpus == (-1, -1, -1)
    assert cores.summary == "3 threads, not pinned (6 CPUs allowed, 3 left to PyTorch)"
    assert host_cores(reserved_share=0.5, threads=2, root=machine.root).cpus == (-1, -1)
    quota_v2(machine, "200000 100000")
    assert host_cores(reserved_share=0.0, root=machine.root).cpus == (-1, -1)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert host_cores(reserved_share=0.5, root=machine.root).cpus == (-1,)


# What a report says.


def test_the_summary_names_each_step_that_lowered_the_number(machine: Machine) -> None:
    machine.cores([(core, core + 16) for core in range(16)])
    machine.nodes("0-7,16-23", "8-15,24-31")
    quota_v2(machine, "650000 100000")
    cores = cores_of(machine, range(4, 32), 0.5, numa_node=1)
    assert cores.summary == (
        "3 threads, not pinned (28 of 32 CPUs allowed, 16 on NUMA node 1, 8 without SMT siblings, "
        "6 by the CPU quota of 6.5, 3 left to PyTorch)"
    )
    assert (cores.near_cpus, cores.physical_cores, cores.usable_cores, cores.reserved_cores) == (16, 8, 6, 3)
    assert (
        cores_of(machine, range(32), threads=7).summary == "7 threads as set, on CPU 0,2,4,6,9,11,13 (32 CPUs allowed)"
    )
    assert cores_of(machine, {5}).summary == "1 thread, on CPU 5 (1 of 32 CPUs allowed)"
    assert cores_of(machine, {5}, threads=2).summary == "2 threads as set, not pinned (1 of 32 CPUs allowed)"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"reserved_share": 1.5}, "reserved_share is 1.5; it must be a number from 0 to 1"),
        ({"reserved_share": math.nan}, "reserved_share is nan; it must be"),
        ({"reserved_share": True}, "reserved_share is True; it must be"),
        ({"reserved_share": "half"}, "reserved_share is 'half'; it must be"),
        ({"threads": 0}, "threads is 0; it must be an integer from 1 to 4096"),
        ({"threads": 4097}, "threads is 4097; it must be"),
        ({"threads": True}, "threads is True; it must be"),
        ({"threads": 2.0}, "threads is 2.0; it must be"),
        ({"affinity": ()}, "affinity is (); it must hold at least one CPU number"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        host_cores(**{"reserved_share": 0.5, **arguments})
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


# Any machine.


@settings(max_examples=repeated(100), deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_machine(tmp_path_factory: pytest.TempPathFactory, rng: random.Random) -> None:
    machine = Machine(tmp_path_factory.mktemp("machine"))
    sockets, per_socket, smt = rng.randint(1, 3), rng.randint(1, 5), rng.choice([1, 1, 2, 2, 4])
    numbers = list(range(sockets * per_socket * smt))
    rng.shuffle(numbers)  # more than any firmware does
    cores = [numbers[first : first + smt] for first in range(0, len(numbers), smt)]
    machine.cores(cores)
    nodes = [list(chain(*cores[first : first + per_socket])) for first in range(0, len(cores), per_socket)]
    machine.nodes(*map(format_cpulist, nodes))
    affinity = rng.sample(numbers, rng.randint(1, len(numbers)))
    node = rng.choice([None, -1, *range(sockets), sockets])
    share = rng.choice([0.0, 0.25, 0.5, 1.0, rng.randrange(1000) / 1000])
    quota_us = rng.choice([None, rng.randint(1, 100_000 * (len(cores) + 1))])
    quota_v2(machine, f"{'max' if quota_us is None else quota_us} 100000")
    threads = rng.choice([None, rng.randint(1, len(numbers) + 2)])
    note(f"{cores=} {affinity=} {node=} {share=} {quota_us=} {threads=}")

    near = set(affinity)
    if node is not None and 0 <= node < sockets and near & set(nodes[node]):
        near &= set(nodes[node])
    stands_for_core = {min(near.intersection(core)) for core in cores if near.intersection(core)}
    usable = len(stands_for_core)
    if quota_us is not None:
        usable = min(usable, max(1, quota_us // 100_000))
    reserved = -(-round(share * 1000) * usable // 1000)

    engine = cpus_of(machine, affinity, share, numa_node=node)
    assert len(engine) == max(1, usable - reserved)
    if usable < len(stands_for_core):
        assert set(engine) == {-1}
    else:
        assert set(engine) <= stands_for_core
        assert engine == sorted(set(engine))
    # The last of them: with all or all but one reserved, one and the same core.
    assert engine[-1:] == cpus_of(machine, affinity, 1.0, numa_node=node)
    assert cpus_of(machine, affinity, 0.0, numa_node=node)[usable - len(engine) :] == engine
    if threads is not None:
        cpus = cpus_of(machine, affinity, share, numa_node=node, threads=threads)
        assert len(cpus) == threads
        if threads > len(affinity):
            assert set(cpus) == {-1}
            return
        assert len(set(cpus)) == threads
        assert set(cpus) <= set(affinity)
        if threads <= len(engine) and -1 not in engine:
            assert set(cpus) <= set(engine)
        if threads <= len(stands_for_core):
            assert set(cpus) <= near
        if threads <= sum(1 for core in cores if set(core) & set(affinity)):
            assert all(len(set(cpus).intersection(core)) <= 1 for core in cores)


@given(st.frozensets(st.integers(0, 300)))
@example(frozenset())
@example(frozenset({0, 1, 3, 7, 8, 9, 65536}))
def test_cpulists_round_trip(cpus: frozenset[int]) -> None:
    text = format_cpulist(cpus)
    assert parse_cpulist(text) == cpus
    assert parse_cpulist(text + "\n") == cpus
    # As short as the kernel's: no two parts touch.
    parts = [[int(end) for end in part.split("-")] for part in text.split(",") if part]
    assert all(later[0] > earlier[-1] + 1 for earlier, later in pairwise(parts))


@given(st.text(alphabet="0123456789-, \n\x00x٣", max_size=12))
def test_any_text_is_a_list_or_not(text: str) -> None:
    cpus = parse_cpulist(text)
    assert cpus is None or all(0 <= cpu <= 65536 for cpu in cpus)


# The GPU's node.


@pytest.mark.parametrize(
    "address", ["0000:3b:00.0", "00000000:3B:00.0", "3b:00.0", "0000:3B:0.0", " 0000:3b:00.0\n", "0:3b:0.0"]
)
def test_the_gpus_node(machine: Machine, address: str) -> None:
    machine.files("sys/bus/pci/devices/0000:3b:00.0", {"numa_node": "1"})
    assert gpu_numa_node(address, machine.root) == 1


# This machine.


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
def test_this_machine() -> None:
    allowed = os.sched_getaffinity(0)
    cores = host_cores(reserved_share=0.0)
    assert set(cores.cpus) <= allowed
    assert len(set(cores.cpus)) == len(cores.cpus) == cores.usable_cores
    assert cores.allowed_cpus == len(allowed)
    assert cores.online_cpus is None or cores.online_cpus >= len(allowed)
    assert host_cores(reserved_share=0.0, threads=len(allowed)).cpus == tuple(sorted(allowed))
    assert host_cores(reserved_share=1.0).cpus == cores.cpus[-1:]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_a_real_affinity_is_kept_to() -> None:
    before = os.sched_getaffinity(0)
    try:
        for cpu in sorted(before)[:4]:
            os.sched_setaffinity(0, {cpu})
            assert host_cores(reserved_share=0.5).cpus == (cpu,)
    finally:
        os.sched_setaffinity(0, before)
