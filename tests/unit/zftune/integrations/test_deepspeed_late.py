"""Which knobs a ds_config begins with on an accelerator, and whether its first steps are to show what late ones win."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.zftune.integrations.ds_running import ADAMW, ZENFLOW, ds_config
from tests.support.zftune.integrations.ds_worker import make_model
from zenflow import ZenFlowConfig
from zftune.hiding import waits_for_all
from zftune.integrations.deepspeed import backend
from zftune.integrations.deepspeed.choosing import Chosen
from zftune.integrations.deepspeed.section import Section

PLAIN, SECTION = ds_config("bf16", optimizer=ADAMW), ds_config("bf16", optimizer=ADAMW, zenflow=ZENFLOW)


@pytest.fixture(autouse=True)
def _on_an_accelerator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(backend.Making, "_torch_device", torch.device("meta"))
    monkeypatch.setenv("ZFTUNE_DB", str(tmp_path / "zftune.db"))
    caplog.set_level(logging.INFO, logger="zftune")


def chosen(config: Any, **asked: Any) -> tuple[backend.Making, ZenFlowConfig]:
    plan = backend.plan(config, Section(**asked))
    making = backend.Making(plan, backend.recipe_of(config, None), None, make_model("plain"), None)
    return making, making._chosen()


def test_what_published_would_have_is_known_from_the_section_or_a_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    making, config = chosen(PLAIN)
    assert (making.follows, making.late, waits_for_all(config)) == (True, None, True)
    making, config = chosen(SECTION, quality="exact")
    assert making.follows
    assert waits_for_all(config)
    assert making.late is not None
    assert (making.late.update_interval, making.late.overlap_step) == (4, True)

    def choose(training: Any, _: Any) -> Chosen:
        return Chosen({"update_interval": 3, "overlap_step": True} if training.quality == "published" else {}, "")

    monkeypatch.setattr(backend, "choose", choose)
    making, config = chosen(PLAIN)
    assert waits_for_all(config)
    assert making.late is not None
    assert (making.late.update_interval, making.late.overlap_step) == (3, True)


@pytest.mark.parametrize("quality", ["published", "loose"])
def test_the_planner_finds_late_knobs_where_nobody_has_any(quality: Any, caplog: pytest.LogCaptureFixture) -> None:
    making, config = chosen(PLAIN, quality=quality)
    assert making.follows
    assert waits_for_all(config)
    assert caplog.messages[-1].endswith(
        "; the planner finds the settings in 15 steps, each of which waits for every update"
    )
    making, _ = chosen(PLAIN, quality=quality, preset="best")
    assert making.follows
    assert "no preset is for this model on this hardware yet" in caplog.messages[-1]
    assert caplog.messages[-1].endswith(
        "so the planner finds the settings in 15 steps, each of which waits for every update"
    )


def test_who_has_late_knobs_or_a_tuner_keeps_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    making, config = chosen(SECTION, quality="published")
    assert (making.follows, config.update_interval) == (False, 4)
    making, _ = chosen(PLAIN, quality="published", online=True)
    assert not making.follows
    monkeypatch.setenv("ZFTUNE_ONLINE", "nobody")
    making, _ = chosen(PLAIN, quality="published")
    assert not making.follows
    assert "backend zenflow, late updates as the schedule has them; before its first change" in caplog.messages[-1]
    assert all(message.endswith("the settings are the ds_config's") for message in caplog.messages)
