"""What is trained: the module behind the parameters, the shape of the batches."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import nn

from zftune.agent.facts import Facts, device_of, find_module, learning_rates, unwrapped
from zftune.agent.recorder import WallClock
from zftune.telemetry import model_id

IDS = torch.zeros(3, 7, dtype=torch.long)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 3)
        self.two = nn.Linear(3, 2)
        self.two.weight = nn.Parameter(self.one.weight.t().detach().clone())


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.loss = nn.CrossEntropyLoss()


def test_the_outermost_module_is_found() -> None:
    outer, other = Outer(), Outer()
    assert find_module(list(outer.parameters())) is outer
    assert find_module([outer.inner.two.bias]) is outer
    assert find_module(list(other.inner.parameters())) is other


def test_of_two_that_hold_them_the_one_with_more() -> None:
    outer = Outer()
    part = nn.Sequential(outer.inner.one)
    assert find_module(list(outer.parameters())) is outer
    del part


def test_parameters_of_no_module() -> None:
    assert find_module([nn.Parameter(torch.zeros(2))]) is None
    assert find_module([]) is None


def test_wrappers_are_taken_off() -> None:
    inner = Inner()
    assert unwrapped(torch.compile(inner, backend="eager")) is inner  # type: ignore[arg-type]
    assert unwrapped(nn.DataParallel(inner)) is inner
    own = nn.Module()
    own.module = inner  # a user's own class, not a wrapper of torch
    outside = type("Own", (nn.Module,), {})()
    outside.module = inner
    assert unwrapped(outside) is outside


@pytest.mark.parametrize(
    ("batch", "micro_batch", "sequence"),
    [
        (IDS, 3, 7),
        ([IDS.float(), IDS], 3, 7),
        ({"attention_mask": torch.zeros(1, 1, dtype=torch.int32), "input_ids": IDS}, 3, 7),
        (collections.UserDict({"x": {"y": (IDS,)}}), 3, 7),
        ({"pixels": torch.zeros(5, 3, 8, 8), "labels": torch.zeros(5, dtype=torch.long)}, 5, None),
        (IDS.bool(), 3, None),
        ("text", None, None),
        (torch.tensor(1), None, None),
    ],
)
def test_the_shape_of_a_batch(batch: Any, micro_batch: int | None, sequence: int | None) -> None:
    facts = Facts()
    facts.batch(batch)
    model = facts.model()
    assert (model["micro_batch"], model["sequence"]) == (micro_batch, sequence)
    assert model["tokens_per_step"] == (None if sequence is None else micro_batch * sequence)  # type: ignore[operator]
    assert ("throughput.tokens_per_s" in facts.missing) == (sequence is None)
    assert ("workload.micro_batch" in facts.missing) == (micro_batch is None)


def test_the_first_batch_counts_and_later_ones_are_counted() -> None:
    facts = Facts()
    facts.batch(IDS)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    facts.look(optimizer, WallClock())
    for _ in range(6):
        facts.batch(IDS[:1])
    facts.step_ended()
    facts.step_ended()
    assert facts.model()["tokens_per_step"] == 3 * 3 * 7


def test_tokens_are_counted_by_the_step() -> None:
    facts = Facts()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    facts.batch(IDS)  # of the process's first step, which has no known beginning
    facts.look(optimizer, WallClock())
    for _ in range(4):
        facts.batch(IDS)
    assert facts.step_ended() == 4 * 3 * 7
    facts.batch(IDS[:1])
    assert facts.step_ended() == 7
    assert facts.step_ended() == 0
    facts.batch(IDS)
    facts.forget_batches()
    assert facts.step_ended() == 0


def test_an_evaluations_batches_are_none_of_a_steps() -> None:
    facts = Facts()
    facts.look(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), WallClock())
    for evaluated in (0, 5):
        for _ in range(evaluated):
            facts.batch(IDS[:1])
        for _ in range(2):
            facts.batch(IDS)
        for _ in range(2):
            facts.backward_begins()
        assert facts.step_ended() == 2 * 3 * 7
    facts.batch(IDS)
    for _ in range(3):  # several losses of one batch
        facts.backward_begins()
    assert facts.step_ended() == 3 * 7
    assert facts.model()["tokens_per_step"] == 2 * 3 * 7  # in the mean of three steps, rounded to whole batches


def test_batches_that_come_while_gradients_are_off_are_an_evaluations() -> None:
    facts = Facts()
    facts.look(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), WallClock())
    for evaluated in (10, 1, 1):  # before each step, the first one too
        with torch.no_grad():
            for _ in range(evaluated):
                facts.batch(IDS)
        facts.batch(IDS)
        facts.backward_begins()
        assert facts.step_ended() == 3 * 7
    assert facts.model()["tokens_per_step"] == 3 * 7
    with torch.no_grad():  # a loop that fetches like this trains on what it fetches
        facts.batch(IDS)
    facts.backward_begins()
    assert facts.step_ended() == 3 * 7


def test_a_step_without_a_batch_makes_no_evaluation_count() -> None:
    facts = Facts()
    facts.look(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), WallClock())
    for batches, told in ((1, 21), (0, 0), (6, 21), (0, 0)):  # a batch for two steps, an evaluation in between
        for _ in range(batches):
            facts.batch(IDS)
        facts.backward_begins()
        assert facts.step_ended() == told


def test_several_batches_of_one_backward_all_count() -> None:
    facts = Facts()
    facts.look(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), WallClock())
    for evaluated in (0, 3, 0):  # a loss of two loaders' batches, or summed over four
        for _ in range(evaluated):
            facts.batch(IDS[:1])
        for _ in range(4):
            facts.batch(IDS)
        facts.backward_begins()
        assert facts.step_ended() == 4 * 3 * 7
    facts.look(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), WallClock())
    facts.batch(IDS)
    facts.backward_begins()
    assert facts.step_ended() == 3 * 7


@pytest.mark.parametrize("batch", [None, torch.zeros(5, 3, 8, 8)])
def test_batches_without_tokens_count_none(batch: torch.Tensor | None) -> None:
    facts = Facts()
    facts.look(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), WallClock())
    if batch is not None:
        facts.batch(batch)
    assert facts.step_ended() is None


def test_an_optimizer_of_the_same_class_and_parameters_trains_the_same() -> None:
    facts, model = Facts(), nn.Linear(2, 2)
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not facts.are_of(first)
    facts.look(first, WallClock())
    assert facts.are_of(torch.optim.SGD(model.parameters(), lr=0.2))
    assert not facts.are_of(torch.optim.Adam(model.parameters()))
    assert not facts.are_of(torch.optim.SGD([model.weight], lr=0.1))
    assert not facts.are_of(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


class Stream(WallClock):
    has_stream = True


def test_comm_beside_a_stream_is_counted_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under names that a reader keeps beside the part that was counted."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for size, names in (("1", set()), ("2", {"waits_ms", "stall.by_cause"})):
        monkeypatch.setenv("WORLD_SIZE", size)
        facts = Facts()
        facts.look(optimizer, Stream())
        assert {name for name, reason in facts.missing.items() if "comm" in reason} == names


def test_what_is_written_of_a_model() -> None:
    outer = Outer().to(torch.bfloat16)
    outer.inner.one.bias.requires_grad_(False)
    facts = Facts()
    facts.look(torch.optim.Adam([p for p in outer.parameters() if p.requires_grad]), WallClock())
    model = facts.model()
    assert (model["model"], model["parameters"], model["trainable"]) == ("Outer", 17, 14)
    assert (model["dtype"], model["model_bytes"], model["optimizer"]) == ("bfloat16", 28, "Adam")
    assert model["model_id"] == model_id(outer)
    assert model["knobs"] is None
    assert "knobs" in facts.missing


def test_the_learning_rates_are_those_of_the_groups() -> None:
    one, other, third = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    groups: list[dict[str, Any]] = [
        {"params": [one], "lr": torch.tensor(0.5)},
        {"params": [other]},
        {"params": [third], "lr": 0.25},
    ]
    optimizer, facts = torch.optim.SGD(groups, lr=0.25), Facts()
    assert learning_rates(optimizer) == [0.25, 0.5]
    optimizer.param_groups[1]["lr"], optimizer.param_groups[2]["lr"] = None, torch.ones(1, device="meta")
    assert learning_rates(optimizer) == [0.5]
    assert facts.model([0.5])["learning_rates"] == [0.5]
    assert facts.model()["learning_rates"] == []


def test_parameters_without_a_module_have_reasons() -> None:
    facts = Facts()
    facts.look(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0), WallClock())
    assert facts.model()["parameters"] is None
    assert {"workload.model", "workload.parameters", "workload.dtype", "fingerprint.model_id"} <= set(facts.missing)


def test_parameters_in_parts_have_no_model_id() -> None:
    outer = Outer()
    for parameter in outer.parameters():
        parameter.ds_numel = 100  # type: ignore[attr-defined]  # as ZeRO stage 3 marks them
    facts = Facts()
    facts.look(torch.optim.SGD(outer.parameters(), lr=1.0), WallClock())
    assert facts.model()["parameters"] == 400
    assert facts.model()["model_id"] is None
    assert "parts" in facts.missing["fingerprint.model_id"]


def test_the_device_is_the_modules() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)
    assert device_of(optimizer, None).type == "cpu"
    assert device_of(optimizer, nn.Linear(2, 2, device="meta")).type == "meta"
