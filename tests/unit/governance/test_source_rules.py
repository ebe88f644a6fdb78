"""`make lint`'s own rules find each kind of fault, and nothing in what is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import source_rules

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


def found(root: Path, name: str, text: str) -> list[str]:
    """Places of the findings in a checkout with one file of this text."""
    path = root / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return [finding.place for finding in source_rules.findings(root)]


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("runtime/zenflow/a.py", NAMES, (2, 3)),
        ("runtime/zenflow/device.py", NAMES, ()),
        ("zftune/a.py", NAMES, ()),
        ("runtime/zenflow/device.py", TENSORS, (1, 4, 5)),
        ("tests/a.py", TENSORS, ()),
        ("zftune/a.py", PARSES, (1, 2, 3, 4)),
        ("zftune/cli/main.py", PARSES, ()),
        ("tests/a.py", PARSES, ()),
    ],
)
def test_planted_fault_is_found(tmp_path: Path, name: str, text: str, lines: tuple[int, ...]) -> None:
    assert found(tmp_path, name, text) == [f"{name}:{line}" for line in lines]


def test_a_finding_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert source_rules.main(tmp_path) == 0
    assert found(tmp_path, "zftune/a.py", PARSES)
    assert source_rules.main(tmp_path) == 1
    assert "zftune/a.py:1: a sentence is parsed" in capsys.readouterr().out
