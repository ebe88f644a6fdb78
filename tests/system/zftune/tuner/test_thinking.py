"""A process that thinks: the same answers as at home, and no way to hang or to fail the training."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.support.tiers import fast
from zenflow import ZenFlowConfig
from zftune.planner.model import Job, Machine, ModelFacts
from zftune.planner.rates import Rates
from zftune.tuner import sampler_process as module
from zftune.tuner.forecast import MeasuredCoverage, PlannerForecast
from zftune.tuner.sampler_process import SamplerError, SamplerProcess
from zftune.tuner.search import Search, SearchOptions
from zftune.tuner.space import Setting, space_for
from zftune.tuner.states import Outcome, Sampler
from zftune.tuner.worker import Answer, ThreadWorker

START = Setting(topk_ratio=0.1, update_interval=4, apply_lag=4)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets processes that think be what they are for users: interpreters of low priority."""
    monkeypatch.setattr(module, "subprocess", subprocess)


@pytest.fixture
def thinker() -> Iterator[SamplerProcess]:
    thinker = SamplerProcess()
    yield thinker
    thinker.close()


def search(sampler: Sampler = "gp") -> Search:
    """A search for a real model on a real machine's figures, with two settings measured."""
    model, machine, job = ModelFacts.from_text("100M,4,1024"), Machine.load("rtx4090"), Job(seq=512)
    config = START.config(ZenFlowConfig())
    forecast = PlannerForecast(model, machine, job, Rates.of(model, machine, job), config)
    coverage = MeasuredCoverage((0.0, 0.01, 0.1, 1.0), (0.0, 0.4, 0.7, 1.0))
    space = space_for(START, "published", coverage=coverage, offload_ratios=(1.0,))
    planned = [Setting(topk_ratio=0.2, update_interval=4, apply_lag=2)]
    return Search(space, START, forecast, planned, SearchOptions(sampler=sampler, seed=3))


def outcome(search: Search, step_ms: float) -> Outcome:
    request = search.next()
    assert request is not None
    return Outcome("measured", (step_ms,) * request.steps, (step_ms,) * request.discard, 512, device_bytes=1 << 30)


@pytest.mark.parametrize("sampler", ["gp", "tpe"])
def test_the_same_trials_and_the_same_seed_give_the_same_answer_there(
    thinker: SamplerProcess, sampler: Sampler
) -> None:
    here, there = search(sampler), search(sampler)
    there.agenda.propose = thinker.propose
    for step_ms in (100.0, 110.0, 104.0, 103.0):
        assert here.next() == there.next()
        here.tell(outcome(here, step_ms))
        there.tell(outcome(there, step_ms))
    assert here.next() == there.next()
    assert here.book.trials == there.book.trials
    assert sum(trial.source == "search" for trial in there.book.trials) >= 3


@pytest.mark.smoke
def test_it_is_of_low_priority_single_threaded_and_sees_no_gpu(started: None, thinker: SamplerProcess) -> None:
    assert thinker.ask(os.nice, 0) == min(19, os.nice(0) + 10)
    assert thinker.ask(os.sched_getscheduler, 0) == os.SCHED_BATCH  # it has its share of a core that others want
    assert thinker.ask(os.getenv, "OMP_NUM_THREADS") == "1"
    assert thinker.ask(os.getenv, "CUDA_VISIBLE_DEVICES") == ""
    assert thinker.ask(print, "what is printed there is no answer") is None
    assert thinker.ask(sum, [1, 2]) == 3


@pytest.mark.smoke
def test_why_there_is_no_answer(thinker: SamplerProcess) -> None:
    with pytest.raises(SamplerError, match="the search process failed: ValueError: invalid literal"):
        thinker.ask(int, "x")
    with pytest.raises(SamplerError, match="the question cannot be sent"):
        thinker.ask(lambda: 0)
    with pytest.raises(SamplerError, match="the search process ended with exit code 7"):
        thinker.ask(os._exit, 7)
    late = SamplerProcess(answer_s=0.5)
    with pytest.raises(SamplerError, match=r"took longer than 0\.5 s"):
        late.ask(time.sleep, 60)
    late.close()
    with pytest.raises(SamplerError, match="was ended"):
        late.ask(sum, [1])


def test_what_questions_wait_for_a_core_is_counted_and_told_once() -> None:
    """What it waits while nobody asks, such as for its start, keeps no search waiting."""
    readings = iter((100.0, 103.0, 104.0, 110.0, 111.5, 113.0))
    thinker = SamplerProcess(core_wait_s=lambda _: next(readings))
    assert thinker.waited_s == 0.0
    thinker.ask(abs, -1)  # from 100 to 103
    assert (thinker.waited_s, thinker.notices) == (3.0, [])
    thinker.ask(abs, -1)  # from 104 to 110
    assert thinker.waited_s == 9.0
    told = "Choosing settings has waited 9 s for a core so far: the training and other programs take them."
    assert thinker.notices == [told]
    thinker.ask(abs, -1)
    assert (thinker.waited_s, thinker.notices) == (10.5, [told])
    thinker.close()


def test_closing_it_ends_a_wait(thinker: SamplerProcess) -> None:
    found: list[str] = []

    def wait() -> None:
        try:
            thinker.ask(time.sleep, 60)
        except SamplerError as error:
            found.append(str(error))

    thinker.ask(sum, [1])
    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_for(lambda: thinker._waited_before_s is not None)
    thinker.close()
    waiting.join(60)
    assert found == ["the search process was ended"]


@pytest.mark.smoke
@pytest.mark.parametrize(
    "then", fast(["thinker.ask(time.sleep, 600)"], all_of=["time.sleep(600)", "thinker.ask(time.sleep, 600)"])
)
def test_it_ends_with_its_parent(then: str) -> None:
    code = f"""
import os, time
from zftune.tuner.sampler_process import SamplerProcess
thinker = SamplerProcess()
print(thinker.ask(os.getpid), flush=True)
{then}
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        time.sleep(0.3)  # until it thinks
        parent.kill()
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_thrown_away_it_ends_but_not_by_a_forks_child() -> None:
    code = """
import gc, os, signal, time
from zftune.tuner.sampler_process import SamplerProcess
sampler = SamplerProcess()
sampler.start()
process = sampler._process
if os.fork() == 0:
    del sampler
    gc.collect()
    os._exit(0)
os.wait()
time.sleep(0.2)
print(process.poll(), sampler.ask(abs, -3))
del sampler
gc.collect()
for _ in range(6000):  # the timer of what was asked may hold it a little longer
    if process.poll() is None:
        time.sleep(0.01)
print(process.poll() == -signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "None 3\nTrue\n"


@pytest.mark.smoke
def test_where_it_fails_the_planner_goes_on_alone(thinker: SamplerProcess) -> None:
    there = search()
    worker = ThreadWorker(there, None, thinker)
    worker.hand(None)
    assert answer(worker).request is not None
    worker.hand(outcome(there, 100.0))
    assert answer(worker).request is not None
    with pytest.raises(SamplerError):
        thinker.ask(os._exit, 1)
    worker.hand(outcome(there, 110.0))
    request = answer(worker).request
    assert request is not None
    assert request.role == "explore"
    remark = next(note for note in there.notes if note.kind == "remark")
    assert remark.reason.startswith("The planner alone proposes settings from here on: the search process ended")
    assert there.book.trials[request.trial].source == "planner"
    best = min(
        (there.book.judge(setting) for setting in there.book.space.settings()), key=lambda judged: judged.told.value
    )
    assert there.book.judge(request.setting).told.value < best.told.value + 0.5
    worker.close()


def answer(worker: ThreadWorker) -> Answer:
    found: list[Answer] = []

    def there() -> bool:
        one = worker.poll()
        found.extend([one] if one is not None else [])
        return bool(found)

    wait_for(there)
    return found[0]


def wait_for(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.01)


def _work(seconds: float) -> tuple[float, float]:
    """Time by the clock and of the processor while it works."""
    wall, used = time.monotonic(), time.process_time()
    while time.monotonic() - wall < seconds:
        sum(range(1000))
    return time.monotonic() - wall, time.process_time() - used


def test_it_rests_where_it_may_use_only_a_share_of_a_core() -> None:
    thinker = SamplerProcess(share=0.2)
    try:
        thinker.ready()
        wall_s, used_s = thinker.ask(_work, 2.0)
    finally:
        thinker.close()
    assert used_s < 0.3 * wall_s
    assert used_s > 0
