"""Cases of tests/unit/zenflow that start processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support import forked
from tests.support.zenflow.cases import Session, Trace, assert_same
from tests.support.zenflow.checkpoint_cases import process_case, save_session
from zenflow import ZenFlowAdamW, ZenFlowConfig
from zftune.emulation.clock import SimulatedClock


@pytest.mark.smoke
def test_the_end_of_the_process_leaves_nothing_pending(tmp_path: Path) -> None:
    """For what an earlier exit handler saves, which is called later."""
    saved = tmp_path / "saved.pt"
    done = forked.run(f"""
import atexit
import torch
from tests.support.zenflow.script_cases import SETTINGS, Run, ours
from tests.support.zenflow.small import Stack, seeded

setting = next(one for one in SETTINGS if one.name == "windows")
atexit.register(lambda: torch.save([run.model.state_dict(), alone.model.state_dict()], {str(saved)!r}))
run, alone = (Run(seeded(Stack, depth=1), ours(setting, with_module=True)) for _ in range(2))
run.train(6)
alone.train(6)
alone.optimizer.close()
""")
    assert (done.returncode, done.stderr) == (0, "")
    run, alone = torch.load(saved, weights_only=True)
    assert all(torch.equal(run[name], alone[name]) for name in alone)


def test_a_process_that_ends_says_it_once() -> None:
    done = forked.run(
        """
import torch, zenflow
model = torch.nn.Linear(16, 16)
config = zenflow.ZenFlowConfig(update_interval=4, topk_ratio=0.25)
optimizer = zenflow.ZenFlowAdamW(model.parameters(), config=config, module=model)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
model.state_dict()
"""
    )
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("what model.state_dict() gave after step 2, the last one, lacks updates")


@pytest.mark.smoke
def test_an_optimizer_that_outlives_the_modules_ends_silently() -> None:
    done = forked.run(
        """
import torch, zenflow
model = torch.nn.Linear(8, 8)
optimizer = torch.kept = zenflow.ZenFlowAdamW(model.parameters(), module=model)
model(torch.randn(2, 8)).sum().backward()
optimizer.step()
"""
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.smoke
def test_i3_in_a_fresh_process(tmp_path: Path) -> None:
    seed, step = 6, 7
    case = process_case(seed)
    assert {kind for _, kind, _ in case.between} == {"knobs", "join"}
    session = Session(case, ZenFlowAdamW)
    session.do_what_is_due()
    for _ in range(step):
        if session.step:
            session.do_what_is_due()
        session.make_step()
    save_session(session, tmp_path / "saved.pt")
    before = len(session.trace)
    session.do_what_is_due()
    while session.step < case.steps:
        session.make_step()
        session.do_what_is_due()
    arguments = (seed, str(tmp_path / "saved.pt"), str(tmp_path / "trace.pt"))
    done = forked.run(f"from tests.support.zenflow.checkpoint_cases import go_on_into; go_on_into(*{arguments!r})")
    assert done.returncode == 0, done.stderr
    trace: Trace = torch.load(tmp_path / "trace.pt", weights_only=True)
    assert_same(case, trace, session.end()[before:])


def test_threads_that_cannot_be_started() -> None:
    # Room for some of the stacks, not for all: those that did start must be let go, and nothing may hang.
    script = """
import resource
from zenflow import _native, errors
from zftune.telemetry import bandwidth
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30,) * 2)
try:
    bandwidth.host_bandwidth(elements=10_000, threads=4096, repeats=1)
except errors.HostEngineError as error:
    raise SystemExit(f"refused: {error}")
"""
    done = forked.run(script)
    assert done.returncode == 1
    assert "refused: host_bandwidth could not run 4096 threads: " in done.stderr


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_child_can_end_its_copy() -> None:
    clock = SimulatedClock()
    items = clock.queue("items")
    thread = clock.thread(items.get, "worker")
    thread.start()
    clock.sleep(1)
    child = os.fork()
    if not child:
        items.put(None)
        thread.join()
        clock.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    items.put(None)
    thread.join()
    clock.close()


def test_gradient_clipping_without_a_word_is_deepspeeds_default() -> None:
    """DeepSpeed 0.19 clips to 1.0 then; older releases did not. Its import asks gcc."""
    constants = pytest.importorskip("deepspeed.runtime.constants", reason="DeepSpeed is not installed")
    assert ZenFlowConfig.from_ds_config({}).max_grad_norm == constants.GRADIENT_CLIPPING_DEFAULT
