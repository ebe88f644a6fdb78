"""Sharded training that is saved and taken up again: on as many ranks to the bit, on others within rounding."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.support import forked
from tests.support.tiers import fast
from tests.support.zenflow.fsdp_cases import STEPS
from tests.support.zenflow.fsdp_checkpoint_cases import (
    CASES,
    FOLDER,
    GONE_ON,
    ON_FOUR,
    STOPS,
    alone,
    folder_of,
    resumed,
    save_at_stops,
    state_alone,
)
from tests.support.zenflow.rank_runs import Results, results_of_ranks

MODULE = "tests.support.zenflow.fsdp_checkpoint_cases"
SAVED = [f"saved {name}" for name in CASES]
OTHER = fast(["failures"], all_of=["sharded later", "failures", "exchanged", "read and set"])
BY_ONE = "overlapped"
"""Saved by one process that has no process group, too."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        yield folder


def ran(folder: Path, names: list[str], ranks: int) -> Results:
    folder.mkdir()
    results = results_of_ranks(folder, MODULE, names, ranks)
    for one in results:
        for name, found in one.items():
            assert "error" not in found, f"{name}: {found['trace']}"
    return results


@pytest.fixture(scope="module")
def by_one(checkpoints: Path) -> dict[str, dict[str, Any]]:
    """What one process comes to with the whole batch."""
    found = {}
    for name in CASES:
        run = alone(name)
        if name == BY_ONE:
            assert [*save_at_stops(name, run, 1)] == [*STOPS]
        found[name] = run.found() if name == BY_ONE else run.steps(1, STEPS).found()
    return found


@pytest.fixture(scope="module")
def on_two(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return ran(tmp_path_factory.mktemp("two") / "ranks", [*SAVED, *OTHER], 2)


@pytest.fixture(scope="module")
def on_four(on_two: Results, tmp_path_factory: pytest.TempPathFactory) -> Results:
    more = [*(f"saved {name}" for name in ON_FOUR), "exchanged by files", "in torch's words"]
    names = [*(f"{name} from 2" for name in CASES), *fast([], all_of=more)]
    return ran(tmp_path_factory.mktemp("four") / "ranks", names, 4)


@pytest.fixture(scope="module")
def on_two_again(on_four: Results, by_one: Any, tmp_path_factory: pytest.TempPathFactory) -> Results:
    names = [f"{name} from 4" for name in ON_FOUR] + [f"{BY_ONE} from 1"]
    return ran(tmp_path_factory.mktemp("two again") / "ranks", names, 2)


def assert_close(found: dict[str, Any], expected: dict[str, Any], stop: int, *, rank: int = 0) -> None:
    for ours, theirs in zip(found["selected"], expected["selected"][stop:], strict=True):
        assert ours.keys() == theirs.keys() or (rank and ours)  # not the first rank: without rows of some
        assert ours.items() <= theirs.items()
    torch.testing.assert_close(found["norms"], expected["norms"][stop:] if expected["norms"] else [], rtol=1e-6, atol=0)
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=0.0, atol=1e-4)
    assert found["unbalanced"] == []


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_i3_on_as_many_ranks(on_two: Results, name: str) -> None:
    assert [results[f"saved {name}"]["differing"] for results in on_two] == [[]] * 2


@pytest.mark.parametrize("name", ON_FOUR)
def test_i3_where_a_rank_has_no_row_of_some_weights(on_four: Results, name: str) -> None:
    assert [results[f"saved {name}"]["differing"] for results in on_four] == [[]] * 4


def test_what_is_alike_on_all_ranks_is_written_by_the_first_which_has_rows_of_all(on_four: Results) -> None:
    metadata = FileSystemReader(folder_of("overlapped", 4, STOPS[0])).read_metadata()
    assert metadata.storage_data is not None
    found: dict[str, set[str]] = {}
    for index, where in metadata.storage_data.items():
        found.setdefault(index.fqn, set()).add(where.relative_path)
    alike = [name for name in found if name.endswith((".count", ".slots", ".importance", ".proposed", ".groups"))]
    assert len(alike) > 40
    assert {writer for name in alike for writer in found[name]} == {"__0_0.distcp"}
    assert len(found["optimizer.state.blocks.0.up.weight.log.0"]) == 4
    assert len(found["optimizer.state.blocks.0.down.weight.log.0"]) == 3


def test_i3_where_the_model_is_sharded_after_the_optimizer_was_made(on_two: Results) -> None:
    for results in on_two:
        found, expected = results["sharded later"]["weights"], results["saved overlapped"]["weights"]
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def test_what_was_open_when_it_was_saved(on_two: Results) -> None:
    found = {name: on_two[0][f"saved {name}"]["open"] for name in CASES}
    assert all(steps and flying for steps, flying, _ in found["overlapped"].values())
    for stop in STOPS:
        assert sum(flying > 0 for flying in (found[name][stop][1] for name in CASES)) >= 4
    assert all(any(selection for _, _, selection in found[name].values()) for name in ("overlapped", "knobs"))


@pytest.mark.parametrize(("name", "stop"), GONE_ON)
def test_on_more_ranks(on_four: Results, by_one: dict[str, Any], name: str, stop: int) -> None:
    for rank, results in enumerate(on_four):
        assert_close(results[f"{name} from 2"][stop], by_one[name], stop, rank=rank)


@pytest.mark.parametrize("source", [*(f"{name} from 4" for name in ON_FOUR), f"{BY_ONE} from 1"])
def test_on_fewer_ranks_and_from_one_process(on_two_again: Results, by_one: dict[str, Any], source: str) -> None:
    for results in on_two_again:
        assert STOPS[-1] in results[source]
        for stop, found in results[source].items():
            assert_close(found, by_one[source.partition(" from ")[0]], stop)


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", CASES)
def test_in_one_process_without_shards(on_two: Results, by_one: dict[str, Any], name: str, stop: int) -> None:
    assert_close(resumed(alone(name), name, 2, stop), by_one[name], stop)


def test_from_ranks_without_rows_into_one_process(on_four: Results, by_one: dict[str, Any]) -> None:
    for name in ON_FOUR:
        assert_close(resumed(alone(name), name, 4, STOPS[-1]), by_one[name], STOPS[-1])


def test_i3_of_one_process(by_one: dict[str, Any]) -> None:
    for stop in STOPS:
        found, expected = resumed(alone(BY_ONE), BY_ONE, 1, stop), by_one[BY_ONE]
        assert all(torch.equal(value, found["weights"][key]) for key, value in expected["weights"].items())


# --- refused and failed ----------------------------------------------------------------------------------------------

ALLOWED = "zenflow.distributed.save() wrote"
SAID = {
    "foreign": "ConfigError: a parameter of shape (10, 10) is in the optimizer and not in the model",
    "disk": "CheckpointError: the checkpoint {checkpoint} was not saved: OSError: [Errno 27] File too large",
    "missing": f"CheckpointError: the checkpoint {{nowhere}} was not loaded: it is no checkpoint that {ALLOWED}",
    "other folder": "CheckpointError: the checkpoint {notes} was not saved: the folder holds something else than a "
    "checkpoint: choose a new folder",
    "only a model": "CheckpointError: the checkpoint {plain} was not loaded: it holds no optimizer of zenflow: "
    f"load a folder that {ALLOWED}",
    "__1_0.distcp": "CheckpointError: the checkpoint {checkpoint} was not loaded: EOFError",
    ".metadata": "CheckpointError: the checkpoint {checkpoint} was not loaded: UnpicklingError: pickle data was "
    "truncated",
    "another rule": "CheckpointError: the checkpoint {checkpoint} was not loaded: the state_dict is of the rule adamw, "
    "the optimizer of sgd",
    "another model": "CheckpointError: the checkpoint {checkpoint} was not loaded: "
    "optimizer.state.blocks.1.up.weight.master is [7, 10], the parameter [6, 10]: it is of another model",
}


@pytest.mark.smoke
@pytest.mark.parametrize("failure", SAID)
def test_a_failure_on_one_rank_is_one_sentence_on_all(on_two: Results, checkpoints: Path, failure: str) -> None:
    top = checkpoints / "failures"
    expected = SAID[failure].format(**{name: top / name for name in ("checkpoint", "nowhere", "notes", "plain")})
    assert [results["failures"][failure] for results in on_two] == [expected] * 2


def test_a_failure_changes_nothing(on_two: Results) -> None:
    for results in on_two:
        found = results["failures"]
        assert (found["files kept"], found["changed nothing"], found["thesis"]) == (True, True, "chapter 1")
    told = [results["failures"]["one rank's"].split(":")[0] for results in on_two]
    assert told == ["CheckpointError", "RankError"]


KILLED = """
import os, signal, sys
import torch
from pathlib import Path
from tests.support.zenflow.small import Stack, seeded, tokens_of
import torch._dynamo, torch.distributed.checkpoint.state_dict, torch.distributed.checkpoint.state_dict_saver
from zenflow import ZenFlowAdamW, ZenFlowConfig, distributed

folder = Path({folder!r})
EVENTS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.listdir", "os.scandir")

def made(steps):
    model = seeded(Stack)
    optimizer = ZenFlowAdamW(model.parameters(), config=ZenFlowConfig(topk_ratio=0.3, host_threads=1), module=model)
    for step in range(steps):
        model(tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer

def in_child(work):
    process = os.fork()
    if not process:
        work()
        os._exit(0)
    return os.waitpid(process, 0)[1]

def save(steps, last):
    trained, seen = made(steps), 0
    def count(event, arguments):
        nonlocal seen
        if event in EVENTS and str(folder.parent) in str(arguments[0]):
            seen += 1
            if seen == last:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    distributed.save(*trained, folder)

def check_and_save_again():
    model, optimizer = made(0)
    distributed.load(model, optimizer, folder)
    expected, _ = made(optimizer.steps)
    assert optimizer.steps in (2, 3)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    print(optimizer.steps, end=" ", flush=True)
    distributed.save(*made(2), folder)

assert in_child(lambda: save(2, 0)) == 0
for last in range(1, 1000):
    killed = in_child(lambda: save(3, last))
    assert killed in (0, signal.SIGKILL)
    assert in_child(check_and_save_again) == 0, last
    if not killed:
        break
print(sorted(path.name for path in folder.parent.iterdir()))
"""


def test_a_process_that_is_killed_while_it_saves_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    done = forked.run(KILLED.format(folder=str(tmp_path / "checkpoint")), environment={**os.environ})
    assert done.returncode == 0, done.stderr
    *steps, names = done.stdout.partition("[")[0].split(), done.stdout.partition("[")[2]
    assert names == "'checkpoint']\n"
    first = steps[0].index("3")
    assert first > 8  # as often as files and folders are touched before the new one is in its place
    assert steps[0] == ["2"] * first + ["3"] * (len(steps[0]) - first)


# --- exchange with torch ---------------------------------------------------------------------------------------------


def test_state_goes_to_torchs_adamw_and_comes_back(on_two: Results, on_four: Results) -> None:
    found = [results["exchanged"] for results in on_two] + [results["exchanged by files"] for results in on_four]
    assert [len(one) for one in found] == [6] * 2 + [3] * 4
    assert all(distance < 1e-6 for one in found for distance in one.values()), found


def test_an_open_window_is_not_lost_without_a_word(on_four: Results) -> None:
    for results in on_four:
        found = results["in torch's words"]
        assert found["pending"].startswith("ConfigError: torch_state() was called while updates are pending")
        assert len(found["warned"]) == 1
        assert 'CheckpointError: state[1]["log"] has not the 2 parts of the open window' in found["open"]
        assert found["of one's own"].startswith("CheckpointError: the state_dict is of a ZenFlow optimizer")
        assert found["distance"] == 0.0


def test_one_parameters_state_is_a_dtensor(on_two: Results) -> None:
    expected = state_alone()
    for results in on_two:
        found = results["read and set"]
        assert found["kinds"] == {"DTensor"}
        assert (found["set"], found["setting it changes nothing"]) == (True, True)
        for name, state in expected.items():
            for key, value in state.items():
                torch.testing.assert_close(found["state"][name][key], value, rtol=0.0, atol=1e-5)
