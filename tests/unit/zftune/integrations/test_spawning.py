"""DeepSpeed's overlapped update in a process that reads the script again."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from zftune.errors import BadInputError
from zftune.integrations.deepspeed.initializing import wrap
from zftune.integrations.deepspeed.outcome import outcome
from zftune.integrations.deepspeed.section import Section
from zftune.integrations.deepspeed.spawning import ASKS

ZENFLOW = {"topk_ratio": 0.1, "update_interval": 4, "overlap_step": True}
ZERO: dict[str, Any] = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": ZENFLOW}


@pytest.mark.parametrize(
    ("changes", "asks"),
    [({}, True), ({"zenflow": {**ZENFLOW, "overlap_step": False}}, False), ({"zenflow": None}, False)],
)
def test_a_guard_is_asked_for_where_a_process_reads_the_script(changes: dict[str, Any], asks: bool) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {**ZERO, **changes}}
    assert (ASKS in str(outcome(config, Section(backend="deepspeed")))) == asks
    assert ASKS not in str(outcome(config, Section()))


def test_a_second_reading_does_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawned without a guard it would come to `initialize` again, and wait for ten minutes."""

    class DeepSpeed:
        @staticmethod
        def initialize(model: Any = None, config: Any = None) -> str:
            return "trains"

    wrap(DeepSpeed, Section())
    assert DeepSpeed.initialize(object(), {}) == "trains"
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(BadInputError, match="must stand under `if __name__"):
        DeepSpeed.initialize(object(), {})
