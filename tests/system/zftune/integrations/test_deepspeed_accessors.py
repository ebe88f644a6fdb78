"""DeepSpeed's accessors and `zero_to_fp32` with the backend zenflow, against DeepSpeed alone: see `ds_accessors`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.support import fork_server, upstream_ops
from tests.support.once import once
from tests.support.zftune.integrations.ds_accessors import SETTINGS, checks, name_of

Found = dict[str, str | None]


def made(folder: Path, ranks: int) -> tuple[Path, list[Found]]:
    environment = {**os.environ, **upstream_ops.environment(), "ZFTUNE_DB": str(folder / "db"), "OMP_NUM_THREADS": "1"}
    begun = fork_server.ranks(
        ranks, ["-m", "tests.support.zftune.integrations.ds_accessors", str(folder)], env=environment
    )
    for one in begun:
        with one:
            assert one.wait(800) == 0, one.stdout[-3000:] + one.stderr[-6000:]
    return folder, [json.loads((folder / f"checks.{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Found]]:
    return once(tmp_path_factory, "accessors", lambda folder: made(folder, 1))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Found]]:
    return once(tmp_path_factory, "accessors-of-two", lambda folder: made(folder, 2))


@pytest.mark.smoke
@pytest.mark.parametrize("check", checks(Path(), 1))
def test_on_one_rank(alone: tuple[Path, list[Found]], check: str) -> None:
    failure = alone[1][0][check]
    assert failure is None, failure


@pytest.mark.parametrize("check", checks(Path(), 2))
def test_on_two_ranks(two: tuple[Path, list[Found]], check: str) -> None:
    failures = [of_rank[check] for of_rank in two[1]]
    assert failures == [None, None], "\n".join(failure or "well" for failure in failures)


@pytest.mark.smoke
def test_the_script_that_deepspeed_drops_into_the_folder(alone: tuple[Path, list[Found]], tmp_path: Path) -> None:
    folder = alone[0] / name_of(SETTINGS[0]) / "ours"
    script = folder / "zero_to_fp32.py"
    assert os.access(script, os.X_OK)
    fork_server.run([script, folder, tmp_path / "out"], check=True)
    found, other = (
        torch.load(place / "pytorch_model.bin", weights_only=True)
        for place in (tmp_path / "out", folder.parent / "converted")
    )
    assert set(found) == set(other)
    for name, value in other.items():
        assert torch.equal(found[name], value), name
