"""Odd surroundings: streams, folders, names, environments, a full disk, records that are none."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.process.fixtures import PYTHON, ZFTUNE, Run, environment
from tests.support.tiers import fast

STEPS = "import steps; steps.train(); "


@pytest.mark.parametrize(
    "data", fast([bytes(range(256))], all_of=[bytes(range(256)), b"\xff" * 5000, b"\x1b[2J\x1b]0;title\x07", b""])
)
def test_output_is_the_commands_own_to_the_byte(python: Run, data: bytes) -> None:
    ended = python(f"{STEPS}import sys; sys.stdout.buffer.write({data!r})").is_clean()
    assert (ended.code, ended.out) == (0, data)
    assert ended.document is not None


@pytest.mark.smoke
def test_input_reaches_the_command(python: Run, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"a\0b")
    with (tmp_path / "in").open("rb") as file:
        ended = python(f"{STEPS}import sys; sys.stdout.write(repr(sys.stdin.buffer.read()))", stdin=file).is_clean()
    assert ended.out == b"b'a\\x00b'"


CLOSED = ["<&- >&- 2>&-", "2>/dev/full", ">/dev/full", "<&-", ">&-", "2>&-"]


@pytest.mark.parametrize("streams", fast(CLOSED[:2], all_of=CLOSED))
def test_streams_that_are_closed_or_full(tmp_path: Path, streams: str) -> None:
    path = tmp_path / "profile.json"
    code = "import os, steps; steps.train(); os._exit(7)"  # without flushing what cannot be flushed
    words = map(str, (ZFTUNE, "profile", "--steps", 5, "--json", path, "--", PYTHON, "-c", code))
    done = subprocess.run(
        ["sh", "-c", f"{shlex.join(words)} {streams}"],
        env=environment({}),
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    assert b"zftune/" not in done.stderr
    assert json.loads(path.read_text())["steps"]["measured"] == 5


def test_nobody_reads_the_screen(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    words = map(str, (ZFTUNE, "profile", "--steps", 5, "--json", path, "--", PYTHON, "-c", STEPS))
    done = subprocess.run(
        ["bash", "-c", f"{shlex.join(words)} 2> >(exec true); echo $?"],
        env=environment({}), cwd=tmp_path, capture_output=True, check=False,
    )  # fmt: skip
    assert done.stdout == b"0\n"
    assert path.exists()


NAMES = ["ünï cödé\n'{}", "-dash", "日本", "a" * 200]


@pytest.mark.parametrize("name", fast(NAMES[:1], all_of=NAMES))
def test_names_of_folders_and_scripts(profile: Run, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "script.py").write_text("import os, steps; steps.train(); os.chdir('/')")
    ended = profile(PYTHON, "script.py", cwd=folder).is_clean()
    assert ended.code == 0
    assert ended.document is not None
    assert name not in json.dumps(ended.document, ensure_ascii=False)
    assert "script.py" not in ended.err  # the agent names it; nobody else may


ODD: list[dict[str, str | None]] = [
    {"PYTHONPATH": None}, {"PYTHONPATH": ""}, {"PYTHONPATH": "/nonesuch::"}, {"TMPDIR": "/nonesuch"},
    {"HOME": None}, {"PYTHONHASHSEED": "0"}, {"PYTHONINSPECT": ""},
    {"TERM": "dumb"}, {"COLUMNS": "1"}, {"COLUMNS": "x"}, {"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"},
    {"LANG": "nonesuch"}, {"PYTHONWARNINGS": "error"}, {"PYTHONDONTWRITEBYTECODE": "1"}, {"PYTHONUTF8": "0"},
    {"ZFTUNE_AGENT_DIR": "/nonesuch"}, {"ZFTUNE_AGENT_STEPS": "x"}, {"CUDA_VISIBLE_DEVICES": ""},
    {"CUDA_VISIBLE_DEVICES": "7,GPU-nonesuch,-1"}, {"NO_COLOR": "1"},
]  # fmt: skip


@pytest.mark.parametrize(
    "env",
    fast(ODD[::7], all_of=ODD),
    ids=lambda env: "=".join(map(str, *env.items())),
)  # fmt: skip
def test_odd_environments(profile: Run, tmp_path: Path, env: dict[str, str | None]) -> None:
    lib = Path(__file__).parents[2] / "support" / "process" / "lib"
    code = f"import sys; sys.path.insert(0, {str(lib)!r}); {STEPS}print('fine')"
    ended = profile(PYTHON, "-c", code, env=env).is_clean()
    assert (ended.code, ended.out) == (0, b"fine\n")
    assert ended.document is not None


@pytest.mark.smoke
def test_disabled_means_untouched(python: Run) -> None:
    code = "import os, sys; print(any('bootstrap' in part for part in sys.path))"
    ended = python(code, env={"ZFTUNE_DISABLE": "1"}).is_clean()
    assert ended.code == 0
    assert ended.document is None
    ended.says("ZFTUNE_DISABLE")


def test_a_folder_that_cannot_be_written(python: Run, tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    ended = python(f"{STEPS}print('fine')", cwd=folder).is_clean()
    assert (ended.code, ended.document is not None) == (0, True)


def test_a_folder_that_is_gone(python: Run, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    ended = python(f"{STEPS}import os; os.rmdir(os.getcwd())", cwd=folder).is_clean()
    assert (ended.code, ended.document is not None) == (0, True)


LIMITED = "import resource, signal, steps; steps.train(4, end=None); "


@pytest.mark.parametrize("more", ["steps.write('x' * 100_000)", "steps.train(500)"], ids=["garbage", "steps"])
def test_a_disk_that_is_full_after_some_steps(python: Run, more: str) -> None:
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (steps.record_file().stat().st_size + 100,) * 2); "
    ended = python(f"{LIMITED}{limit}{more}").is_clean()
    assert ended.code == 1  # the command's own error
    assert ended.document is not None
    assert ended.document["steps"]["measured"] == 3


def test_a_disk_that_is_full_from_the_start(python: Run) -> None:
    ended = python(
        "import resource, steps; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); steps.train()"
    ).is_clean()
    assert (ended.code, ended.document) == (1, None)


def test_a_report_that_cannot_be_written_any_more(profile: Run, tmp_path: Path) -> None:
    folder = tmp_path / "goes"
    folder.mkdir()
    ended = profile(PYTHON, "-c", f"{STEPS}import os; os.rmdir('goes')", options=["--json", folder / "x.json"])
    assert ended.code == 0
    assert "zftune profile" in ended.err
    ended.says("cannot be written (No such file or directory)")


GARBAGE = {
    "nested": "'[' * 100_000 + '\\n'",
    "text": "'not json\\n'",
    "empty-step": '\'{"kind": "step"}\\n\'',
    "nan": '\'{"kind": "step", "step_ms": NaN}\\n\'',
    "field": '\'{"kind": "missing", "field": "../x", "reason": 1}\\n\'',
    "model": '\'{"kind": "model", "parameters": "many", "systems": 7, "knobs": {"topk_ratio": "x"}}\\n\'',
    "nulls": "'\\x00' * 1000 + '\\n'",
}


@pytest.mark.parametrize("name", fast(["nested"], all_of=list(GARBAGE)))
def test_records_that_are_none(python: Run, name: str) -> None:
    ended = python(
        f"import steps; steps.train(4, end=None); steps.write({GARBAGE[name]}); steps.write('torn')"
    ).is_clean()
    assert ended.code == 0
    assert ended.document is not None
    assert ended.document["steps"]["measured"] == 3


MEDDLES = [
    "shutil.rmtree(steps.record_file().parent)",
    "os.mkfifo(steps.record_file().with_name('agent-2.jsonl'))",
    "os.remove(steps.record_file())",
    "steps.record_file().with_name('agent-1.jsonl').symlink_to('/dev/zero')",
    "steps.record_file().with_name('agent-3.jsonl').mkdir()",
    "os.chmod(steps.record_file().parent, 0)",
]


@pytest.mark.parametrize("code", fast(MEDDLES[:2], all_of=MEDDLES))
def test_a_command_that_meddles_with_the_records(python: Run, code: str) -> None:
    ended = python(f"import os, shutil, steps; steps.train(); {code}").is_clean()
    assert ended.code == 0


def test_the_document_names_no_path_argument_user_or_host(profile: Run, tmp_path: Path) -> None:
    (tmp_path / "secret-script.py").write_text("import steps; steps.train()")
    ended = profile(PYTHON, tmp_path / "secret-script.py", "--token", "hunter2", env={"SECRET": "hunter3"}).is_clean()
    text = json.dumps(ended.document)
    for secret in (str(tmp_path), "hunter2", "hunter3", "--token", "/dev/shm", "secret-script"):
        assert secret not in text
    assert not re.search(rf"\b{re.escape(os.uname().nodename)}\b", text)
