"""Names that nobody knows: the near ones are named, wherever knobs and variables come from."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from zenflow import ConfigError, ZenFlowConfig
from zenflow.host.backend import choose_backend
from zenflow.names import did_you_mean, near_names, unread_variables

KNOBS = ("topk_ratio", "update_interval", "select_interval", "auto_ratio")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("topk_ration", "; did you mean topk_ratio"),
        ("Topk-Ratio", "; did you mean topk_ratio"),
        ("update_intervall", "; did you mean update_interval"),
        ("topk", "; did you mean topk_ratio"),
        ("lr", ""),
        ("", ""),
    ],
)
def test_the_near_name_is_named(name: str, meant: str) -> None:
    assert did_you_mean(name, KNOBS) == meant


def test_what_is_about_as_near_is_named_too() -> None:
    assert did_you_mean("intervals", ("interval_a", "interval_b")) == "; did you mean interval_b or interval_a"
    assert len(near_names("knob", [f"knob{number}" for number in range(9)])) == 3


@pytest.mark.parametrize(
    "ask",
    [
        lambda: ZenFlowConfig(topk_ration=0.3),  # type: ignore[call-arg]
        lambda: dataclasses.replace(ZenFlowConfig(), topk_ration=0.3),  # type: ignore[call-arg]
        lambda: ZenFlowConfig().changed({"topk_ration": 0.3}),
        lambda: ZenFlowConfig.zero_offload(topk_ration=0.3),
        lambda: ZenFlowConfig.from_ds_config(
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "zenflow": {"topk_ration": 0.3}}}
        ),
    ],
)
def test_an_unknown_knob_names_the_near_one(ask: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"topk_ration.*; did you mean topk_ratio$"):
        ask()


def test_known_fields_are_taken_as_before() -> None:
    config = ZenFlowConfig(topk_ratio=0.2, update_interval=2)
    assert config == pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == dataclasses.replace(config)
    with pytest.warns(UserWarning, match="offload is ignored"):
        ZenFlowConfig(offload=True)


def test_a_variable_that_nobody_reads_names_the_near_one(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ("ZENFLOW_NATIVE", "ZENFLOW_KERNELS")
    environment = {"ZENFLOW_NATVE": "off", "ZENFLOW_NATIVE": "off", "ZENFLOW_OWN_THING": "1", "PATH": ""}
    assert list(unread_variables(environment, "ZENFLOW_", known)) == [
        "ZENFLOW_NATVE is set, but there is no such variable; did you mean ZENFLOW_NATIVE"
    ]
    monkeypatch.setenv("ZENFLOW_NATVE", "off")
    with pytest.warns(UserWarning, match="ZENFLOW_NATVE is set, .* did you mean ZENFLOW_NATIVE"):
        choose_backend([-1]).close()
