"""Study 001: sizes from caches, contenders that are checked before they are timed, ratios of neighbours, verdicts."""

from __future__ import annotations

import importlib
import os
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

STUDY = Path(__file__).parents[2] / "studies" / "001-host-update"


@pytest.fixture(scope="module")
def study() -> Any:
    """The study's modules."""
    before = list(sys.path)
    sys.path[:0] = [str(STUDY), str(STUDY.parent)]
    try:
        names = ("contenders", "deepspeed_adam", "engine", "machine", "main_thread", "oracle", "report", "timing")
        return SimpleNamespace(**{name: importlib.import_module(f"hostupdate.{name}") for name in names})
    finally:
        sys.path[:] = before


def machine(study: Any, *, llc_bytes: int) -> Any:
    return study.machine.Machine((0,), 1 << 20, llc_bytes, "test")


def test_a_size_is_master_moments_and_one_gradient_in_whole_columns(study: Any) -> None:
    found = machine(study, llc_bytes=32 << 20)
    assert found.elements(10) == 10 * (32 << 20) // 14 // 4096 * 4096
    assert found.elements(1 / 16) * 14 <= 2 << 20


def test_this_machine_has_caches(study: Any) -> None:
    here = study.machine.Machine.here()
    assert here.threads >= 1
    assert 0 < here.l2_bytes <= here.llc_bytes


def test_streams_are_zero_and_begin_at_different_offsets(study: Any) -> None:
    streams = [study.machine.tensor(1000, torch.float32) for _ in range(4)]
    assert all(not stream.any() for stream in streams)
    assert len({stream.data_ptr() % 4096 for stream in streams}) == 4
    assert all(stream.data_ptr() % 64 == 0 for stream in streams)


def contenders(study: Any) -> list[Any]:
    kind = study.contenders.fused_adamw()
    found = [study.contenders.OptimizerContender(kind), study.contenders.BlockedContender(kind, 5000)]
    try:
        return [*found, study.engine.engine([-1, -1])]
    except study.contenders.UnavailableError:
        return found


def test_contenders_are_adamw(study: Any) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    inputs = study.oracle.random_inputs(5 * 4096, 8, seed)
    for contender in contenders(study):
        contender.prepare(inputs)
        found = study.oracle.check(contender, inputs, (1, 4, 8))
        contender.close()
        assert found.agrees, (contender.name, found)
        assert found.updates == 3 + 1 + 4 + 8
        assert 0 < found.sampled <= 5 * 4096


@pytest.mark.parametrize("fault", ["skips one gradient", "never writes the result", "one master is NaN"])
def test_a_wrong_contender_is_found(study: Any, fault: str) -> None:
    class Wrong(study.contenders.OptimizerContender):  # type: ignore[misc]
        def apply(self, interval: int, *, replay: bool, times: int = 1) -> None:
            super().apply(interval - (fault.startswith("skips") and interval > 1), replay=replay, times=times)
            if fault.startswith("never"):
                self._result.zero_()
            if fault.startswith("one"):
                self._parameter.data[3] = torch.nan

    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    inputs = study.oracle.random_inputs(4096, 4, seed)
    wrong = Wrong(study.contenders.fused_adamw())
    wrong.prepare(inputs)
    assert not study.oracle.check(wrong, inputs, (1, 4)).agrees


def test_ratios_are_those_of_neighbouring_samples(study: Any) -> None:
    setting = study.timing.Setting(4, True)
    clock = iter(range(1, 1000))  # every sample is slower than the one before: only neighbours compare

    def sampler(factor: float) -> Any:
        return lambda: factor * (100 + next(clock))

    samplers = {setting: {"engine": sampler(1), "a": sampler(2), "b": sampler(4)}}
    times = study.timing.interleave(samplers, "engine", 20, random.Random(1), lambda: None)[setting]
    assert len(times.ns["engine"]) == 40
    assert len(times.ns["a"]) == len(times.ratios["a"]) == 20
    assert all(ratio == pytest.approx(1 / 2, rel=0.02) for ratio in times.ratios["a"])
    assert all(ratio == pytest.approx(1 / 4, rel=0.02) for ratio in times.ratios["b"])
    assert {ratio > 0.5 for ratio in times.ratios["a"]} == {True, False}  # either goes first


def test_without_an_engine_there_are_times_and_no_ratios(study: Any) -> None:
    setting = study.timing.Setting(1, False)
    times = study.timing.interleave({setting: {"a": lambda: 2.0}}, None, 3, random.Random(1), lambda: None)
    (row,) = study.timing.rows_of(times)
    assert row["ns"]["median"] == 2.0
    assert row["engine_over_it"] is None
    lines = study.report.lines(study.report.Rows([row]), {}, (1, 4, 8))
    assert len(lines) == 11
    assert all(line.verdict == "not measured" for line in lines)


def rows(ratios: dict[tuple[bool, int, str], float]) -> list[dict[str, Any]]:
    return [
        {"replay": replay, "interval": s, "contender": name, "engine_over_it": {"median": ratio}}
        for (replay, s, name), ratio in ratios.items()
    ]


def verdicts(study: Any, ratios: dict[tuple[bool, int, str], float], loop: float = 1.0) -> list[str]:
    spread = {"median": loop}
    main_thread = {"rows": {study.engine.NAME: {"kept": spread, "work_kept": None}}}
    return [line.verdict for line in study.report.lines(study.report.Rows(rows(ratios)), main_thread, (1, 4, 8))]


def test_the_faster_rival_counts_and_blocks_do_not(study: Any) -> None:
    ratios = {(False, 4, "a"): 0.20, (False, 4, "b"): 0.36, (False, 1, "a"): 0.75, (False, 1, "a, in blocks"): 2.0}
    assert verdicts(study, ratios)[:3] == ["FAILS", "holds", "not measured"]


def test_replay_reaches_one_of_its_two_bounds(study: Any) -> None:
    timing = study.timing
    ratios = {
        (True, 1, timing.PASS): 1 / 0.91,
        (True, 1, timing.IN_CACHE): 1 / 0.2,
        (True, 4, timing.PASS): 1 / 0.5,
        (True, 4, timing.IN_CACHE): 1 / 0.81,
        (True, 8, timing.PASS): 1 / 0.89,
        (True, 8, timing.IN_CACHE): 1 / 0.79,
    }
    assert verdicts(study, ratios, loop=0.89)[-4:] == ["holds", "holds", "FAILS", "FAILS"]


def test_a_thread_that_is_busy_is_counted(study: Any) -> None:
    core = study.machine.Machine.here().cores[0]
    with study.main_thread.Busy(lambda: time.sleep(0.01), core) as busy:
        begin = time.perf_counter()
        time.sleep(0.3)
        rate = busy.pieces_per_s(begin, time.perf_counter())
    assert 0 < rate <= 101
    assert busy.pieces_per_s(0.0, 0.0) == 0


def test_what_the_other_thread_raises_is_raised_here(study: Any) -> None:
    def fail() -> None:
        raise ValueError("the work failed")

    core = study.machine.Machine.here().cores[0]
    with pytest.raises(ValueError, match="the work failed"), study.main_thread.Busy(fail, core):
        pass


def test_deepspeed_is_left_out_with_a_sentence(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(study.contenders.UnavailableError, match="there is no no-such-compiler"):
        study.deepspeed_adam.cpu_adam(tmp_path, compile_it=True, say=print)
    monkeypatch.setenv("CXX", sys.executable)
    with pytest.raises(study.contenders.UnavailableError, match="not compiled yet"):
        study.deepspeed_adam.cpu_adam(tmp_path, compile_it=False, say=print)
