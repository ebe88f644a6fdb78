"""Where the socket is, whose it is, and that there is one daemon."""

from __future__ import annotations

import os
import signal
import socket
import stat
from pathlib import Path

import pytest

from tests.support.zftune.daemon.daemons import (
    OTHER_UID,
    SOON_S,
    as_other_user,
    exchange,
    get,
    needs_root,
    serving,
    status_of,
    zftune,
)
from zftune.daemon.client.http import DaemonClient
from zftune.daemon.client.location import Location, locate, make_folder, settled
from zftune.daemon.server.serving import claim
from zftune.errors import BadInputError, DaemonError

pytestmark = pytest.mark.smoke

ASK = """
with socket.socket(socket.AF_UNIX) as connection:
    connection.settimeout(20)
    try:
        connection.connect(sys.argv[1])
        try:
            connection.sendall(b"GET /v1/health HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\n\\r\\n")
        except BrokenPipeError:  # refused before it was asked
            pass
        print(connection.recv(4096).decode())
    except PermissionError as error:
        print(type(error).__name__)
"""
LISTEN = """
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    os.chmod(sys.argv[1], 0o666)
    listener.listen()
    print("ready", flush=True)
    sys.stdin.read()
"""


def at(path: Path) -> Location:
    return Location(path, "$ZFTUNE_SOCKET", None)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_the_environment_says_where_it_is(folder: Path) -> None:
    named = locate({"ZFTUNE_SOCKET": "/a/b", "XDG_RUNTIME_DIR": str(folder)})
    assert (named.socket, named.own_folder) == (Path("/a/b"), None)
    runtime = locate({"XDG_RUNTIME_DIR": str(folder)})
    assert (runtime.socket, runtime.own_folder) == (folder / "zftune" / "zftune.sock", folder / "zftune")
    for unusable in ("", "relative", str(folder / "nonesuch")):
        last = locate({"XDG_RUNTIME_DIR": unusable}, temporary=folder)
        assert last.socket == folder / f"zftune-{os.getuid()}" / "zftune.sock"


def test_a_socket_in_a_folder_that_is_gone_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert settled({"ZFTUNE_SOCKET": "own"}) == {"ZFTUNE_SOCKET": str(folder / "own")}
    gone = folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(BadInputError, match="'own': the working directory is gone; give an absolute path"):
        locate({"ZFTUNE_SOCKET": "own"})


@needs_root
def test_a_runtime_folder_of_somebody_else_is_not_used(folder: Path) -> None:
    theirs = folder / "theirs"
    theirs.mkdir()
    os.chown(theirs, OTHER_UID, OTHER_UID)
    assert locate({"XDG_RUNTIME_DIR": str(theirs)}, temporary=folder).socket.parent.parent == folder


def test_a_path_may_have_107_bytes_and_no_more(folder: Path) -> None:
    path = str(folder / "x")
    longest = path + "y" * (107 - len(path))
    assert locate({"ZFTUNE_SOCKET": longest}).socket == Path(longest)
    with claim(at(Path(longest))):
        assert stat.S_ISSOCK(os.lstat(longest).st_mode)
    with pytest.raises(BadInputError, match="has 108 bytes, more than the 107"):
        locate({"ZFTUNE_SOCKET": longest + "y"})


def test_our_own_folder_is_ours_alone(folder: Path) -> None:
    location = locate({"XDG_RUNTIME_DIR": str(folder)})
    made = location.socket.parent
    for mask in (0o777, 0):
        previous = os.umask(mask)
        try:
            make_folder(location)
        finally:
            os.umask(previous)
        assert mode(made) == 0o700
        made.rmdir()
    make_folder(location)
    make_folder(location)
    made.chmod(0o755)
    with pytest.raises(BadInputError, match="has mode 0755; it must be a real folder of your own with mode 0700"):
        make_folder(location)
    made.rmdir()
    (folder / "real").mkdir(mode=0o700)
    made.symlink_to(folder / "real")
    with pytest.raises(BadInputError, match="is a symbolic link"):
        make_folder(location)
    made.unlink()
    made.write_text("")
    with pytest.raises(BadInputError, match="is no folder"):
        make_folder(location)


@needs_root
def test_a_folder_of_somebody_else_is_refused(folder: Path) -> None:
    location = locate({}, temporary=folder)
    location.socket.parent.mkdir(mode=0o700)
    os.chown(location.socket.parent, OTHER_UID, OTHER_UID)
    with pytest.raises(BadInputError, match=f"belongs to user {OTHER_UID}"):
        make_folder(location)


def test_the_socket_is_0600_from_its_first_moment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    chmod = Path.chmod

    def looked_at(path: Path, wanted: int) -> None:
        seen.append(mode(path))
        chmod(path, wanted)

    monkeypatch.setattr(Path, "chmod", looked_at)
    previous = os.umask(0)
    try:
        with claim(at(folder / "s")):
            assert mode(folder / "s") == 0o600
            assert mode(folder / "s.lock") == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(previous)
    assert seen == [0o600]


def test_nothing_is_left_and_what_came_in_between_stays(folder: Path) -> None:
    with claim(at(folder / "s")) as claimed:
        pass
    assert list(folder.iterdir()) == []
    claimed.release()
    with claim(at(folder / "s")):
        (folder / "s").unlink()
        (folder / "s").write_text("not ours")
    assert [path.name for path in folder.iterdir()] == ["s"]


def test_one_claim_at_a_time(folder: Path) -> None:
    refusal = pytest.raises(DaemonError, match=rf"another daemon \(pid {os.getpid()}\) serves")
    with claim(at(folder / "s")), refusal, claim(at(folder / "s")):
        pass
    with claim(at(folder / "s")):
        assert (folder / "s").exists()


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(folder / "s"))
        theirs.listen()
        with pytest.raises(DaemonError, match="something else listens"), claim(at(folder / "s")):
            pass
    assert (folder / "s").exists()
    with claim(at(folder / "s")) as claimed, socket.socket(socket.AF_UNIX) as client:
        with pytest.raises(ConnectionRefusedError):
            client.connect(str(folder / "s"))
        claimed.listener.setblocking(True)
        claimed.listener.listen()
        client.connect(str(folder / "s"))
        claimed.listener.accept()[0].close()


@pytest.mark.parametrize("kind", ["file", "folder", "symlink to a socket", "symlink to nowhere", "pipe"])
def test_what_is_no_socket_is_refused(folder: Path, kind: str) -> None:
    path = folder / "z.sock"
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(folder / "elsewhere")
        if kind == "symlink to a socket":
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(str(folder / "elsewhere"))
    before = {one: one.lstat().st_ino for one in folder.iterdir()}
    with pytest.raises(BadInputError, match="is not a socket; remove it"), claim(at(path)):
        pass
    assert {one: one.lstat().st_ino for one in folder.iterdir()} == before


@pytest.mark.parametrize("kind", ["symlink", "folder", "pipe"])
def test_a_planted_lock_is_refused(folder: Path, kind: str) -> None:
    lock = folder / "s.lock"
    if kind == "symlink":
        (folder / "victim").write_text("precious")
        lock.symlink_to(folder / "victim")
    elif kind == "folder":
        lock.mkdir()
    else:
        os.mkfifo(lock)
    with pytest.raises(BadInputError, match="the lock"), claim(at(folder / "s")):
        pass
    assert kind != "symlink" or (folder / "victim").read_text() == "precious"


@needs_root
def test_a_socket_or_lock_of_somebody_else_is_refused(folder: Path) -> None:
    (folder / "s.lock").write_text("")
    os.chown(folder / "s.lock", OTHER_UID, OTHER_UID)
    with pytest.raises(BadInputError, match="is not a file of yours"), claim(at(folder / "s")):
        pass
    (folder / "s.lock").unlink()
    folder.chmod(0o777)
    with as_other_user(LISTEN, str(folder / "s")) as planter:
        assert planter.stdout is not None
        assert planter.stdout.readline() == "ready\n"
        with pytest.raises(BadInputError, match=f"belongs to user {OTHER_UID}"), claim(at(folder / "s")):
            pass
        with DaemonClient(folder / "s") as client, pytest.raises(DaemonError) as error:
            client.post("/v1/x", {"secret": 1})
        planter.communicate()
    assert str(error.value) == f"the socket '{folder}/s' is served by user {OTHER_UID}, not by you"
    assert (folder / "s").lstat().st_uid == OTHER_UID


@needs_root
def test_another_user_gets_no_answer(folder: Path) -> None:
    with serving(folder) as daemon:
        assert as_other_user(ASK, str(daemon.path)).communicate(timeout=SOON_S)[0] == "PermissionError\n"
        daemon.path.chmod(0o666)  # the mode is one wall, the peer's uid another
        answer = as_other_user(ASK, str(daemon.path)).communicate(timeout=SOON_S)[0]
        assert answer.startswith("HTTP/1.1 403 ")
        assert f"user {OTHER_UID} may not connect; only the daemon's own user may" in answer
        assert "uptime_s" not in answer
        assert status_of(exchange(daemon.path, get("/v1/health"))) == 200


def test_a_second_daemon_is_refused_and_a_killed_one_replaced(folder: Path) -> None:
    with serving(folder) as daemon:
        assert mode(daemon.path) == 0o600
        ended = zftune(folder, "daemon", "start")
        assert (ended.returncode, ended.stdout) == (1, "")
        held = f"zftune: another daemon (pid {daemon.process.pid}) serves '{daemon.path}' already"
        assert ended.stderr == f"{held} (no run); end it with: zftune daemon stop\n"
        daemon.signal(signal.SIGKILL)
        assert daemon.ends() == -signal.SIGKILL
        assert daemon.path.exists()
    with serving(folder) as daemon:
        assert status_of(exchange(daemon.path, get("/v1/health"))) == 200
        daemon.signal()
        assert daemon.ends() == 0
    assert not daemon.path.exists()
    assert not daemon.path.with_name("z.sock.lock").exists()
