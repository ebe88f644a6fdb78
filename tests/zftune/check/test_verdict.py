"""Verdicts of the tables are DeepSpeed's own: over the corpus that was put to it, and over random ds_configs."""

from __future__ import annotations

import copy
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.tiers import by_day, everything
from tests.zftune.check.corpus import VERSION, WORLDS, base, corpus, recorded
from tests.zftune.check.test_agreement import BAD, VALUES
from zftune.ds_config.reading import Source, at, is_hugging_face, path_of, put
from zftune.ds_config.tables import KINDS, table, versions
from zftune.integrations.deepspeed import asking
from zftune.integrations.deepspeed.asking import ask
from zftune.integrations.deepspeed.check.checking import check, fix
from zftune.integrations.deepspeed.check.findings import Finding
from zftune.integrations.deepspeed.verdict import BATCH, faults, ranks_that_fit, undecided

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
CONFIGS = corpus()


def test_the_corpus_has_every_section_and_more_than_150_configs() -> None:
    known = table(VERSION)
    assert known is not None
    assert len(CONFIGS) > 2000
    varied = {name.split(".")[0].split(":")[0] for name in CONFIGS}
    assert {dotted.split(".")[0] for dotted in known.sections} <= varied
    assert known.names - {"train_batch_size", "bf16"} <= varied | {"zero_optimization"}


@pytest.mark.parametrize("version", by_day(("0.16.0", "0.17.6", "0.19.6", versions()[-1]), all_of=versions()))
def test_verdicts_are_those_that_were_recorded(version: str) -> None:
    known = table(version)
    assert known is not None
    record = recorded(version)
    wrong = [
        (name, world)
        for name, config in CONFIGS.items()
        for world, refused in zip(WORLDS, record[name], strict=True)
        if bool(faults(config, known, world)) != refused
    ]
    assert wrong == []
    assert 0 < sum(refused[0] for refused in record.values()) < len(record)


def test_versions_are_there_from_0_16_on() -> None:
    assert versions()[0] == "0.16.0"
    assert metadata.version("deepspeed") in versions()


def test_what_was_recorded_is_what_the_installed_one_says() -> None:
    version = metadata.version("deepspeed")
    record = recorded(version)
    for number, (name, config) in enumerate(CONFIGS.items()):
        if number % by_day(30, all_of=1) == 0:
            refused = tuple(asking.first_error(config, world) is not None for world in WORLDS)
            assert refused == record[name], name


# What is found where the engine is made, or in the first steps, and not where the file is read.
LATER = {"amp", "offload-stage-0", "zenflow-stage-0", "not-a-number"}


def by_deepspeed(config: dict[str, Any], world_size: int | None = None) -> list[Finding]:
    """What `check` says of a file for DeepSpeed's own runtime that ends it where the file is read."""
    report = check(config, backend="deepspeed", version=VERSION, world_size=world_size)
    general = (
        "refused-by-deepspeed",
        "unknown-setting",
        "misplaced-section",
        "ratio-stage",
        "topk-limit",
        "zenflow-sum",
    )
    return [one for one in report.findings if one.severity == "crashes" and one.rule in general]


def test_check_says_so_of_the_corpus() -> None:
    record = recorded(VERSION)
    for name, config in CONFIGS.items():
        if is_hugging_face(config):
            continue  # it is judged as its Trainer hands it on
        for world, refused in zip(WORLDS, record[name], strict=True):
            findings = by_deepspeed(config, world)
            assert bool(findings) == refused, (name, world, findings)


def test_a_finding_names_the_setting() -> None:
    """Of ds_configs with one setting that is refused: without it, or in its section, DeepSpeed takes it."""
    record = recorded(VERSION)
    known = table(VERSION)
    assert known is not None
    for name, config in CONFIGS.items():
        if record[name] != (True, True, True) or name.startswith(("shape", "scheduler")):
            continue
        dotted = name.partition(": ")[0]
        for fault in faults(config, known):
            where = ".".join(fault.path)
            assert where.startswith(dotted) or dotted.startswith(where) or fault.path[0] in name, (name, where)


@st.composite
def ds_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Up to six settings of the corpus together, and odd ones."""
    config = base()
    for name in draw(st.lists(st.sampled_from(sorted(CONFIGS)), max_size=6)):
        dotted = name.partition(": ")[0]
        value = at(CONFIGS[name], path_of(dotted))
        if not name.startswith(("shape", "scheduler")):
            put(config, path_of(dotted), copy.deepcopy(value))
    for dotted in draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=3)):
        values = [*BAD, *KINDS.values()] if draw(st.booleans()) else VALUES[dotted]
        put(config, path_of(dotted), copy.deepcopy(draw(st.sampled_from(values))))
    return config


@settings(max_examples=by_day(150, all_of=3000), deadline=None, suppress_health_check=list(HealthCheck))
@given(config=ds_configs(), world_size=st.sampled_from([1, 2, 3, 8]))
def test_random_ds_configs_are_judged_as_deepspeed_does(config: dict[str, Any], world_size: int) -> None:
    known = table(metadata.version("deepspeed"))
    assert known is not None
    if undecided(config):
        event("asked")
        return
    error = asking.first_error(config, world_size)
    found = faults(config, known, world_size)
    event("refused" if error is not None else "taken")
    assert bool(found) == (error is not None), (found, error)


@pytest.mark.parametrize("name", sorted(name for name in CONFIGS if name.startswith("shape")))
def test_what_fix_writes_is_taken_or_said_not_to_be_mendable(name: str) -> None:
    require_mended(CONFIGS[name], name)


def test_what_fix_writes_of_the_rest() -> None:
    for number, (name, config) in enumerate(CONFIGS.items()):
        if not name.startswith("shape") and number % by_day(7, all_of=1) == 0:
            require_mended(config, name)


def require_mended(config: dict[str, Any], name: str) -> None:
    mended, done, left = fix(Source(config), backend="deepspeed", version=VERSION, world_size=1)
    if asking.first_error(as_handed_on(mended), 1) is not None:
        assert not left.ok, (name, done, mended)


def as_handed_on(config: dict[str, Any]) -> dict[str, Any]:
    from zftune.ds_config.reading import given as values

    return values(Source(config))


def test_the_installed_one_is_asked_in_a_process_of_its_own(every_fault: None) -> None:
    """As it is for versions and sections that no table is about; by day one of the two tests will do."""
    names = ["shape: offloading is a word", "shape: the smallest", "compile: unknown"]
    answers = ask([CONFIGS[name] for name in names], 1)
    assert [[one["path"] for one in answer] for answer in answers] == [
        [["zero_optimization", "offload_optimizer"]],
        [],
        [["compile", "unheard_of"]],
    ]


@pytest.mark.skipif(not everything(), reason="before a release: it asks DeepSpeed")
def test_a_section_that_no_table_is_about_is_put_to_it() -> None:
    elastic = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4], "version": 0.1}
    both = check(
        {"elasticity": elastic, "train_batch_size": 64}, backend="deepspeed", version=metadata.version("deepspeed")
    )
    assert [finding.severity for finding in both.findings] == ["crashes"]
    (unasked,) = check({"elasticity": elastic}, backend="deepspeed", version="9.9.9").findings[:1]
    assert unasked.severity == "note"


def test_where_no_number_of_ranks_is_given_it_is_asked_for_one_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def record(configs: list[Any], world_size: int) -> list[list[dict[str, Any]]]:
        asked.append(world_size)
        return [[] for _ in configs]

    monkeypatch.setattr("zftune.integrations.deepspeed.check.subject.ask", record)
    config = {**dict(zip(BATCH, (8, 1, 2), strict=True)), "curriculum_learning": {"enabled": True}}
    for world_size in (None, 2):
        found = check(config, backend="deepspeed", version=metadata.version("deepspeed"), world_size=world_size)
        assert found.ok
    assert asked == [4, 2]


_SIZES = st.none() | st.integers(1, 8)


@given(whole=st.none() | st.integers(1, 64), micro=_SIZES, passes=_SIZES, parallel=_SIZES)
def test_ranks_that_fit_do(whole: int | None, micro: int | None, passes: int | None, parallel: int | None) -> None:
    known = table(VERSION)
    assert known is not None
    given = {**dict(zip(BATCH, (whole, micro, passes), strict=True)), "sequence_parallel_size": parallel}
    config = {name: value for name, value in given.items() if value is not None}
    if not faults(config, known):
        assert faults(config, known, ranks_that_fit(config)) == []


def test_nothing_of_the_folder_that_it_is_asked_in_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in, whose import costs nothing, for the one that is installed."""
    installed, here = tmp_path / "installed", tmp_path / "here"
    runtime = installed / "deepspeed" / "runtime"
    for folder in (runtime, here):
        folder.mkdir(parents=True)
    for package in (runtime.parent, runtime):
        (package / "__init__.py").touch()
    (runtime / "config.py").write_text("class DeepSpeedConfig:\n    def __init__(self, config): raise ValueError('no')")
    (here / "deepspeed.py").write_text("open('taken', 'w')")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(installed), os.environ.get("PYTHONPATH")))))
    assert ask([{}], 1) == [[{"path": None, "error": "ValueError: no"}]]
    assert not (here / "taken").exists()


def test_a_section_that_lacks_what_was_left_out_of_it_is_not_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed reads the section first: without "enabled" its words are others than those about the batch."""

    def first_error(config: dict[str, Any], _: int) -> Exception | None:
        if "curriculum_learning" in config and "enabled" not in config["curriculum_learning"]:
            return KeyError("enabled")
        if config.get("stage") == 9:
            return ValueError("stage")
        return AssertionError("batch") if config.get("train_batch_size") == 7 else None

    monkeypatch.setattr(asking, "first_error", first_error)
    config = {"curriculum_learning": {"enabled": True}, "stage": 9, "train_batch_size": 7}
    assert [one["path"] for one in asking.refusals(config, 2)] == [["stage"], ["train_batch_size"]]
