"""A profile of a function in this process, and documents that display themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import zftune
from tests.support.zftune.profile.fixtures import EXAMPLE
from zftune.errors import BadInputError, ProfileError
from zftune.profile.schema import validate


class Training:
    def __init__(self) -> None:
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.steps = 0

    def step(self) -> None:
        self.model(torch.ones(2, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1


def test_a_step_is_taken_until_all_are_measured() -> None:
    training, hooks = Training(), torch.autograd.backward
    found = zftune.profile_steps(training.step, steps=6, warmup=2)
    assert training.steps == 2 + 6 + 2  # a step is known two steps later
    assert found["steps"] == {"measured": 6, "discarded": 2}
    assert found["loss"]["count"] == 6
    validate(dict(found))
    assert torch.autograd.backward is hooks  # nothing stays installed
    assert "zftune profile" in str(found)


def test_a_whole_training_is_run_once() -> None:
    training, calls = Training(), []

    def train() -> None:
        calls.append(1)
        for _ in range(9):
            training.step()

    found = zftune.profile_steps(train, steps=20, warmup=1)
    assert calls == [1]
    assert found["steps"]["measured"] == 8


def test_what_trains_nothing_and_what_raises() -> None:
    with pytest.raises(ProfileError, match="nothing was recorded"):
        zftune.profile_steps(lambda: None)
    with pytest.raises(BadInputError, match="steps is 0"):
        zftune.profile_steps(lambda: None, steps=0)
    with pytest.raises(BadInputError, match="warmup is 'five'; it must be an integer of 0 or more"):
        zftune.profile_steps(lambda: None, warmup="five")  # type: ignore[arg-type]
    hooks = torch.autograd.backward

    def fails() -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        zftune.profile_steps(fails)
    assert torch.autograd.backward is hooks


def test_a_document_displays_itself(tmp_path: Path) -> None:
    document = json.loads(EXAMPLE.read_text())
    document["workload"]["model"] = "<script>alert(1)</script>"
    document["missing"] |= {name: f"a reason for {name}" for name in ("seed", "idle", "stall", "nvml")}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    for found in (zftune.shown(document), zftune.shown(path), zftune.shown(str(path))):
        html, text = found._repr_html_(), str(found)
        assert html.startswith("<pre")
        assert "Offloading hardly stalls the device" in html
        assert "<script>" not in html
        assert 'more figures are missing: its item ["missing"] has which, and why' in text
        assert "zftune profile -v" not in text
        assert "Offloading hardly stalls the device" in text
        assert found._repr_markdown_() == f"```\n{text}\n```"
        assert dict(found) == document


@pytest.mark.parametrize("content", ["[]", '{"schema": "other/1"}', "no json"])
def test_what_is_no_document_is_a_sentence(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(BadInputError, match=r"give a file|must be one of"):
        zftune.shown(path)
