"""What is known of DeepSpeed agrees with what was read from its releases, with the runtime, and with the searches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zenflow
import zftune
from zenflow import ZenFlowConfig
from zftune.ds_config import facts
from zftune.planner.choosing import budget_of
from zftune.quality import assumed_coverage
from zftune.store.types import QUALITIES
from zftune.tuner.space import PUBLISHED, space_for


def test_the_runtime_takes_the_same_defaults_for_an_empty_section() -> None:
    zero: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}, "zenflow": {}}
    config = ZenFlowConfig.from_ds_config({"zero_optimization": zero})
    wanted = {name: value for name, value in facts.ZENFLOW_DEFAULTS.items() if name != "offload"}
    assert {name: getattr(config, name) for name in wanted} == wanted


def test_what_was_tested() -> None:
    assert {facts.GOOD, *facts.TESTED_UPSTREAM, *facts.SCRAMBLING} <= set(facts.TESTED)
    assert not facts.scrambles(facts.GOOD)
    assert facts.scrambles(f"{facts.SCRAMBLING[0]}+cu128")


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """What is text in the code, but for docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def test_no_other_file_names_a_release_of_deepspeed() -> None:
    files = [file for package in (zftune, zenflow) for file in Path(str(package.__file__)).parent.rglob("*.py")]
    assert len(files) > 250
    release = re.compile(r"\b0\.1[6-9]\.\d")
    found = [
        (file.name, line)
        for file in files
        if file != Path(facts.__file__) and release.search(source := file.read_text(encoding="utf-8"))
        for line, text in strings(ast.parse(source))
        if release.search(text)
    ]
    assert found == []


def test_there_is_one_published_setting() -> None:
    for quality in QUALITIES:
        space = space_for(PUBLISHED, quality, coverage=assumed_coverage, zenflow_section=False)
        assert space.budget == pytest.approx(budget_of(quality))
