"""What the installed DeepSpeed does on two ranks."""

from __future__ import annotations

import contextlib
import json
import os
from importlib import metadata
from pathlib import Path

import pytest

from tests.support import fork_server, upstream_ops
from tests.support.zftune.check.cases import safe
from zftune.integrations.deepspeed.check.checking import check

ROOT = Path(__file__).parents[4]


def test_zenflow_ends_where_the_border_lies_within_a_weight_of_one_dimension(tmp_path: Path) -> None:
    upstream_ops.need()
    config = safe("zenflow-sequential")
    config["zero_optimization"] |= {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
    config["zero_optimization"]["offload_optimizer"]["pin_memory"] = False
    jobs = [{"proof": "border", "config": {**config, "has_bias": has_bias}} for has_bias in (True, False)]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    worker = (
        "-m",
        "tests.support.zftune.check.upstream_worker",
        str(tmp_path / "jobs.json"),
        str(tmp_path / "results.json"),
    )
    environment = {**os.environ, **upstream_ops.environment(), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        for rank in [stack.enter_context(one) for one in fork_server.ranks(2, worker, env=environment, cwd=ROOT)]:
            assert rank.wait(400) == 0, rank.stderr[-2000:]
    between, within = json.loads((tmp_path / "results.json").read_text())
    assert between["raised"] is None, between["message"]
    ends = within["raised"] == "TypeError" and "must be tuple of ints, not float" in within["message"]
    version = metadata.version("deepspeed")
    rules = [
        finding.rule for finding in check(safe("zenflow-sequential"), backend="deepspeed", version=version).findings
    ]
    assert ends == ("zenflow-ranks" in rules)


@pytest.mark.parametrize(("version", "told"), [("0.18.2", True), ("0.19.6", True), ("0.19.8", False)])
def test_it_is_told_of_versions_that_do_so(version: str, told: bool) -> None:
    report = check(safe("zenflow-sequential"), backend="deepspeed", version=version)
    assert ("zenflow-ranks" in {finding.rule for finding in report.findings}) == told
