"""A model that does not fit into the memory of the host, in a process whose address space is limited."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

from tests.support import forked

NO_ROOM = """
import json, re, resource
import torch
from pathlib import Path
from torch import nn
from zenflow import HostEngineError, HostMemoryError, ZenFlowAdamW, ZenFlowConfig

torch.set_num_threads(1)
MIB = 1 << 20

def in_use():
    return int(re.search(r"VmSize:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def limit(more):
    resource.setrlimit(resource.RLIMIT_AS, (in_use() + more, resource.RLIM_INFINITY))

def refusal(call, error):
    try:
        call()
    except error as refused:
        return str(refused)

def optimizer_of(rows, **knobs):
    weight = nn.Parameter(torch.zeros(rows, 3000, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    knobs = {"update_interval": 4, "topk_ratio": 0.0, "bucket_bytes": 4 * MIB, "host_threads": 2, **knobs}
    return ZenFlowAdamW([weight], config=ZenFlowConfig(**knobs))

warm = optimizer_of(10)
warm.step()
warm.close()

found = {}
optimizer = optimizer_of(2000)
limit(100 * MIB)
before = in_use()
found["refused"] = [refusal(optimizer.step, HostMemoryError) for _ in range(2)]
found["allocated"] = in_use() - before
found["host_bytes"] = optimizer.host_bytes()
optimizer.close()

optimizer = optimizer_of(500)
for _ in range(9):
    optimizer.step()
optimizer.close()
found["fits"] = optimizer.host_bytes()["peak"]
del optimizer

found["threads"] = refusal(lambda: optimizer_of(10, host_threads=4096), HostEngineError)

optimizer = optimizer_of(500)
optimizer.step()
limit(MIB)
found["lost"] = refusal(lambda: optimizer._training.runtime.memory.empty((9 * MIB,), torch.uint8, "log"), MemoryError)
optimizer.abandon()
limit(100 * MIB)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def no_room() -> Any:
    done = forked.run(NO_ROOM, environment={**os.environ, "ZENFLOW_NATIVE": "require"})
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.smoke
def test_what_does_not_fit_is_refused_before_anything_is_allocated(no_room: Any) -> None:
    # 2000 x 3000 elements, S = 4; a bucket of 1 MiB is 262 columns, so an entry is 1,048,000 bytes.
    needed = 14 * 6_000_000 + 4 * 3000 + 4 * (2 * 6_000_000 + 1_048_000)
    first, again = no_room["refused"]
    found = re.fullmatch(
        rf"the state of the deferred columns needs {needed} bytes of host memory, available are (\d+) "
        r'\("Max address space" of the process\); lower offload_ratio or update_interval, or raise topk_ratio',
        first,
    )
    assert found is not None, first
    assert 90 << 20 < int(found[1]) <= 100 << 20
    assert again is not None  # the first was no step
    assert no_room["allocated"] < 1 << 20
    assert set(no_room["host_bytes"].values()) == {0}


def test_what_fits_is_not_refused(no_room: Any) -> None:
    assert no_room["fits"] >= 22 * 1_500_000


def test_memory_that_is_gone_later_is_a_sentence(no_room: Any) -> None:
    assert re.fullmatch(r"the host engine could not get \d+ bytes of host memory", no_room["lost"] or "")


def test_threads_that_cannot_be_had_are_a_sentence(no_room: Any) -> None:
    assert re.fullmatch(r"the host engine could not start 4096 threads: .+", no_room["threads"] or "")
