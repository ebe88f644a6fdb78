"""What is known of DeepSpeed agrees with what was read from its releases, with the runtime, and with the searches."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zenflow
import zftune
from tests.support import fork_server
from zenflow import ZenFlowConfig
from zftune.ds_config import facts
from zftune.planner.choosing import budget_of
from zftune.quality import assumed_coverage
from zftune.store.types import QUALITIES
from zftune.tuner.space import PUBLISHED, space_for


def test_the_defaults_of_zenflow_are_those_of_the_installed_release() -> None:
    """In a process of its own: DeepSpeed's import leaves warnings."""
    code = (
        "import json\n"
        "from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig as C\n"
        "known = {name: one.default for name, one in C.model_fields.items() if not one.is_required()}\n"
        "print('defaults', json.dumps(known))"
    )
    done = fork_server.run(["-c", code], check=True)
    (line,) = (one for one in done.stdout.splitlines() if one.startswith("defaults "))
    defaults = json.loads(line.removeprefix("defaults "))
    assert {name: defaults[name] for name in facts.ZENFLOW_DEFAULTS} == facts.ZENFLOW_DEFAULTS


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
    found = [
        (file.name, line)
        for file in files
        if file != Path(facts.__file__)
        for line, text in strings(ast.parse(file.read_text(encoding="utf-8")))
        if re.search(r"\b0\.1[6-9]\.\d", text)
    ]
    assert found == []


def test_there_is_one_published_setting() -> None:
    for quality in QUALITIES:
        space = space_for(PUBLISHED, quality, coverage=assumed_coverage, zenflow_section=False)
        assert space.budget == pytest.approx(budget_of(quality))
