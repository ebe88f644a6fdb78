"""`make lint`'s own rules find each kind of fault, and nothing in what is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import source_rules
from tools.source_rules import MAX_FILE_LINES, MAX_FUNCTION_LINES

LONG_FUNCTION = "def f():\n    '''Text.'''\n" + "    x = 1\n" * MAX_FUNCTION_LINES
LONG_FILE = "x = 1\n" * (MAX_FILE_LINES + 1)
NAMES = "'''cuda'''\nx = 'cuda'\ny = 'cuda:0'\nz = 'no cuda here'\n"
TENSORS = (
    "a = torch.zeros(3, dtype=y)\nb = torch.arange(4, device=x)\nc = torch.ones_like(a)\nd = torch.tensor(1, dtype=y)\n"
    "e = torch.empty(3, device=x)\nf = torch.ones(3, **z)\n"
)
PARSES = (
    "a = str(error).startswith('x')\nb = 'x' in str(error)\nc = (row.reason or '').removeprefix('x')\n"
    "d = WORDS.search(refusal.message)\ne = str(error).partition('\\n')[0]\nf = name.startswith('x')\n"
    "g = row.reason == 'exit'\nh = ', '.join(str(error) for error in found)\n"
)
PRINTS = "print(1)\ndevice.print(2)\n"


def found(root: Path, name: str, text: str) -> list[tuple[str, bool]]:
    """Places and whether they are errors, with a file of this text in a checkout that has no other."""
    path = root / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return [(one.place, one.is_error) for one in source_rules.findings(root)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("zftune/a.py", LONG_FUNCTION, [("zftune/a.py:1", False)]),
        ("tests/a.py", LONG_FILE, [("tests/a.py:1", False)]),
        ("csrc/a.cpp", LONG_FILE, [("csrc/a.cpp:1", False)]),
        ("runtime/zenflow/a.py", NAMES, [("runtime/zenflow/a.py:2", True), ("runtime/zenflow/a.py:3", True)]),
        ("runtime/zenflow/device.py", NAMES, []),
        ("zftune/a.py", NAMES, []),
        (
            "runtime/zenflow/device.py",
            TENSORS,
            [(f"runtime/zenflow/device.py:{line}", True) for line in (1, 4, 5)],
        ),
        ("tests/a.py", TENSORS, []),
        ("zftune/a.py", PARSES, [(f"zftune/a.py:{line}", True) for line in (1, 2, 3, 4)]),
        ("zftune/cli/main.py", PARSES, []),
        ("tests/a.py", PARSES, []),
        ("zftune/a/b.py", PRINTS, [("zftune/a/b.py:1", True)]),
        ("tests/a.py", PRINTS, []),
    ],
)
def test_a_planted_fault_is_found(tmp_path: Path, name: str, text: str, expected: list[tuple[str, bool]]) -> None:
    assert found(tmp_path, name, text) == expected


def test_only_errors_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert found(tmp_path, "tests/a.py", LONG_FILE)
    assert source_rules.main(tmp_path) == 0
    assert "tests/a.py:1: warning: 601 lines" in capsys.readouterr().out
    assert found(tmp_path, "zftune/a.py", PRINTS)
    assert source_rules.main(tmp_path) == 1
    assert "zftune/a.py:1: error: a library does not print" in capsys.readouterr().out
