"""Rules that no linter has: lengths, and where a device may be named."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARIES = (ROOT / "runtime" / "zenflow", ROOT / "zftune")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

SOURCES = sorted(path for folder in (*LIBRARIES, ROOT / "tests") for path in folder.rglob("*.py"))
NATIVE = sorted(path for path in (ROOT / "csrc").iterdir() if path.suffix in {".cpp", ".hpp"})


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def function_lengths(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Name and lines of every function, its docstring left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            first = node.body[0]
            if ast.get_docstring(node, clean=False) is not None:
                lines -= (first.end_lineno or first.lineno) - first.lineno + 1
            yield node.name, lines


def docstrings(tree: ast.AST) -> set[int]:
    """Identities of the string constants that stand alone as a statement."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def names_cuda(tree: ast.AST) -> list[int]:
    """Lines with a string that names a CUDA device, prose in docstrings left out."""
    prose = docstrings(tree)
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in prose
        and (node.value == "cuda" or node.value.startswith("cuda:"))
    ]


def prints(tree: ast.AST) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


@pytest.mark.parametrize("path", [*SOURCES, *NATIVE], ids=name_of)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_are_short(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert [(name, lines) for name, lines in function_lengths(tree) if lines > MAX_FUNCTION_LINES] == []


@pytest.mark.parametrize("path", [path for path in SOURCES if path.is_relative_to(LIBRARIES[0])], ids=name_of)
def test_only_the_device_module_names_cuda(path: Path) -> None:
    if path.name != "device.py":
        assert names_cuda(ast.parse(path.read_text())) == []


@pytest.mark.parametrize("path", [p for p in SOURCES if not p.is_relative_to(ROOT / "tests")], ids=name_of)
def test_libraries_do_not_print(path: Path) -> None:
    assert prints(ast.parse(path.read_text())) == []


def test_the_rules_can_fail() -> None:
    long = "def f():\n    '''Text.'''\n" + "    x = 1\n" * 61
    assert list(function_lengths(ast.parse(long))) == [("f", 62)]
    assert names_cuda(ast.parse("'''cuda'''\nx = 'cuda'\ny = 'cuda:0'\nz = 'no cuda here'")) == [2, 3]
    assert prints(ast.parse("print(1)\ndevice.print(2)")) == [1]
