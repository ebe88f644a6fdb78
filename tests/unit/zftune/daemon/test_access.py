"""Secrets that end, and the token in a file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.support.zftune.daemon.daemons import OTHER_UID
from zftune.daemon.client.location import loopback_uid
from zftune.daemon.server.guard import Secrets, kept_token
from zftune.errors import BadInputError


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_secret_ends_by_itself() -> None:
    clock = Clock()
    kept = Secrets(60, clock)
    secret = kept.issue()
    clock.now_s = 59
    assert kept.is_good(secret)
    clock.now_s = 60
    assert not kept.is_good(secret)
    assert not kept.spend(secret)


def test_a_secret_is_spent_once() -> None:
    kept = Secrets(60)
    first, second = kept.issue(), kept.issue()
    assert kept.spend(first)
    assert not kept.spend(first)
    assert not kept.is_good(first)
    assert kept.is_good(second)
    assert not kept.is_good("")
    assert not kept.is_good("\udcff")


def test_the_token_is_made_once_and_is_ours_alone(folder: Path) -> None:
    previous = os.umask(0)
    try:
        token = kept_token(folder / "t")
    finally:
        os.umask(previous)
    assert len(token) >= 43
    assert stat.S_IMODE((folder / "t").stat().st_mode) == 0o600
    assert kept_token(folder / "t") == token
    assert kept_token(folder / "u") != token


@pytest.mark.parametrize("wrong", ["readable by others", "short", "symlink", "folder", "pipe", "not ours", "no folder"])
def test_a_token_that_cannot_be_trusted_is_refused(folder: Path, wrong: str) -> None:
    path = folder / "t"
    token = kept_token(path)
    if wrong == "readable by others":
        path.chmod(0o640)
    elif wrong == "short":
        path.write_text("x\n")
    elif wrong == "not ours":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(path, OTHER_UID, -1)
    elif wrong == "no folder":
        path = folder / "nonesuch" / "t"
    else:
        path.rename(folder / "moved")
        if wrong == "symlink":
            path.symlink_to(folder / "moved")
        elif wrong == "folder":
            path.mkdir()
        else:
            os.mkfifo(path, 0o600)
    with pytest.raises(BadInputError, match=r"the token '.*t'") as error:
        kept_token(path)
    assert token not in str(error.value)


def test_the_kernels_list_tells_whose_a_connection_is(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    table.write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:1F90 0100007F:D431 01 00000000:00000000 00:00000000 00000000     7        0 1 1\n"
        "   1: 0100007F:D431 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1000        0 2 1\n"
    )
    ours, theirs = ("127.0.0.1", 0x1F90), ("127.0.0.1", 0xD431)
    assert loopback_uid(ours, theirs, table) == 1000
    assert loopback_uid(theirs, ours, table) == 7
    assert loopback_uid(ours, ("127.0.0.1", 1), table) is None
    closed = table.read_text().replace("D431 0100007F:1F90 01", "D431 0100007F:1F90 06")
    for gone in (closed, table.read_text().replace("1000        0 2 1", "   0        0 0 1")):
        table.write_text(gone)
        assert loopback_uid(ours, theirs, table) is None  # the kernel says user 0
    with pytest.raises(OSError, match="No such file"):
        loopback_uid(ours, theirs, tmp_path / "nonesuch")
