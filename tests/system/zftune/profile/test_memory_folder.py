"""Where the records of a profiled command are, in a mount namespace with an /dev/shm of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiers import fast

SMALL_ONE = ("small", "TMP", "TMP")
SMALL = """
import os, sys
from zftune.profile.command.run import _folder
with _folder() as first:
    with open("/dev/shm/big", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 512 << 20 if sys.argv[1] == "large" else 60 << 20)
    with _folder() as second:
        print(first.parent, second.parent)
"""


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("size", "first", "second"), fast([SMALL_ONE], all_of=[("large", "/dev/shm", "TMP"), SMALL_ONE])
)
def test_memory_that_is_small_or_full_is_left_to_the_training(
    tmp_path: Path, size: str, first: str, second: str
) -> None:
    """A container has 64 MB of it."""
    mount = f"mount -t tmpfs -o size={'600m' if size == 'large' else '64m'} tmpfs /dev/shm"
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*words, mount], capture_output=True, check=False).returncode:
        pytest.skip("no mounts of one's own here")
    command = [*words, f'{mount} && exec "$@"', "sh", sys.executable, "-c", SMALL, size]
    done = subprocess.run(
        command, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [part.replace("TMP", str(tmp_path)) for part in (first, second)]
