"""The studies' command lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.governance.documents import ROOT
from tests.support.tiers import fast

RUNS = sorted((ROOT / "studies").glob("[0-9]*/run.py"))


@pytest.mark.parametrize("script", fast(RUNS[:1], all_of=RUNS), ids=lambda path: str(path.parent.name))
def test_a_study_has_the_common_options(script: Path) -> None:
    done = fork_server.run([script, "--help"])
    assert done.returncode == 0, done.stderr
    assert all(option in done.stdout for option in ("--quick", "--json PATH", "--again"))
