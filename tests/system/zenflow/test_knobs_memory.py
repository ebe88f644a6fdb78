"""Changes for which the host has no memory: refused before they begin, and training goes on as if nobody had asked."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.support import forked

# In a process of its own, whose address space is limited. Both runs are over the same gradients.
SCRIPT = """
import json, re, resource
from pathlib import Path
import torch
from torch import nn
from zenflow import HostMemoryError, ZenFlowAdamW, ZenFlowConfig

torch.set_num_threads(1)
MIB = 1 << 20

def limit(more):
    used = int(re.search(r"VmSize:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))

def refusal(call):
    try:
        call()
    except HostMemoryError as refused:
        return str(refused)

def asked(optimizer):
    big = nn.Parameter(torch.zeros(5_000_000, dtype=torch.bfloat16).view(5000, 1000))
    limit(3 * MIB)
    found = [
        refusal(lambda: optimizer.set_knobs(topk_ratio=0.0)),
        refusal(lambda: optimizer.set_knobs(offload_ratio=1.0, overlap_step=False)),
        refusal(lambda: optimizer.set_knobs(update_interval=100)),
        refusal(lambda: optimizer.add_param_group({"params": [big]})),
    ]
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return found, len(optimizer.param_groups)

def train(asks):
    generator = torch.Generator().manual_seed(1)
    weight = nn.Parameter(torch.randn(500, 2000, generator=generator).bfloat16())
    knobs = {"update_interval": 3, "topk_ratio": 0.6, "offload_ratio": 0.3, "bucket_bytes": MIB, "host_threads": 1}
    optimizer = ZenFlowAdamW([weight], lr=0.1, config=ZenFlowConfig(**knobs))
    found = None
    for step in range(8):
        weight.grad = torch.randn(weight.shape, generator=generator).bfloat16()
        optimizer.step()
        if step == 3 and asks:
            found = asked(optimizer)
    closed = [stats.step for stats in optimizer.history(wait=True) if stats.closed]
    optimizer.close()
    return weight.detach().view(torch.int16).clone(), closed, found

plain, closed, _ = train(False)
weight, closed_too, (found, groups) = train(True)
same = bool((plain == weight).all())
print(json.dumps({"same": same, "closed": [closed, closed_too], "found": found, "groups": groups}))
"""


@pytest.fixture(scope="module")
def outcome() -> Any:
    done = forked.run(SCRIPT, environment={**os.environ, "ZENFLOW_NATIVE": "require"})
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.smoke
@pytest.mark.parametrize("number", range(4), ids=["k", "ratio", "interval", "group"])
def test_a_change_that_does_not_fit_is_refused_with_both_figures(outcome: Any, number: int) -> None:
    assert "needs" in (outcome["found"][number] or "")
    assert "available" in outcome["found"][number]


def test_a_refused_change_leaves_no_trace(outcome: Any) -> None:
    assert outcome["same"]
    assert outcome["closed"] == [[3, 6], [3, 6]]
    assert outcome["groups"] == 1
