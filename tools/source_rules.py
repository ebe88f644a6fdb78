"""Rules that no linter has, for the sources of this checkout: `python tools/source_rules.py`, a part of `make lint`.

Each of these is an error: a string that names a CUDA device outside `zenflow.device`; a tensor that the runtime makes
on the default device or in the default dtype; a parsed sentence (a method of strings on `str(error)`, a reason or a
message: give the error or the decision a field).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Of torch, what makes tensors where `torch.set_default_device` says.
FACTORIES = re.compile(
    r"arange|as_tensor|asarray|empty|empty_strided|eye|full|linspace|logspace|normal|ones|rand|randint|randn|randperm|range|"
    r"scalar_tensor|tensor|tril_indices|triu_indices|zeros"
)
# Of these, what makes them in the dtype that `torch.set_default_dtype` says.
FLOATING_FACTORIES = re.compile(r"empty|empty_strided|eye|linspace|logspace|normal|ones|rand|randn|scalar_tensor|zeros")
# What looks into a text. A sentence may be cut to its first line, which needs no knowledge of its words.
_LOOKS = re.compile(
    r"startswith|endswith|replace|r?partition|r?split|remove(prefix|suffix)|r?find|r?index|count|(full)?match|search|sub"
)
_SENTENCES = re.compile(r"reason|message|sentence|allowed|stopped|advice|verdict|finding|fix|notice|error|end|why")
_FOREIGN = ("zftune/checkpoint/sources.py", "zftune/cli/main.py")
"""Files in which the words of another library are read, which gives its errors no fields: torch's, Click's."""
_RUNTIME = Path("runtime") / "zenflow"
_LIBRARIES = (_RUNTIME, Path("zftune"))


@dataclass(frozen=True)
class Finding:
    """A broken rule.

    Args:
        place: file and line, relative to the checkout.
        text: what is wrong.
    """

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def findings(root: Path) -> Iterator[Finding]:
    """In the libraries of a checkout."""
    for folder in _LIBRARIES:
        for path in sorted((root / folder).rglob("*.py")):
            yield from _of_python(path.relative_to(root), path.read_text(encoding="utf-8"))


def _of_python(path: Path, text: str) -> Iterator[Finding]:
    tree = ast.parse(text, str(path))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    in_runtime = path.is_relative_to(_RUNTIME)
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr):
            continue
        if in_runtime and _names_cuda(node) and id(node) not in prose:
            if path.name != "device.py":
                yield Finding(f"{path}:{node.lineno}", "only zenflow.device names CUDA devices")
        elif path.as_posix() not in _FOREIGN and _parses_a_sentence(node):
            yield Finding(f"{path}:{node.lineno}", "a sentence is parsed: give it fields")
        elif in_runtime and isinstance(node, ast.Call):
            for what in _left_to_the_user(node):
                yield Finding(f"{path}:{node.lineno}", what)


def _parses_a_sentence(node: ast.expr) -> bool:
    """Whether it looks at the words of an error or a decision."""
    if isinstance(node, ast.Compare):
        looked_at = [right for how, right in zip(node.ops, node.comparators, strict=True) if isinstance(how, ast.In)]
        return any(_is_words_of_error(one) for one in looked_at)
    if (
        not isinstance(node, ast.Call)
        or not isinstance(node.func, ast.Attribute)
        or not _LOOKS.fullmatch(node.func.attr)
    ):
        return False
    if not node.args or (isinstance(node.args[0], ast.Constant) and node.args[0].value == "\n"):
        return False
    return any(_is_sentence(one) for one in (node.func.value, *node.args))


def _is_sentence(node: ast.expr) -> bool:
    while isinstance(node, ast.BoolOp):
        node = node.values[0]
    return _is_words_of_error(node) or (isinstance(node, ast.Attribute) and _SENTENCES.fullmatch(node.attr) is not None)


def _is_words_of_error(node: ast.expr) -> bool:
    """Whether it is `str(error)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "str" or not node.args:
        return False
    return isinstance(node.args[0], ast.Name) and node.args[0].id == "error"


def _names_cuda(node: ast.AST) -> bool:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    return node.value == "cuda" or node.value.startswith("cuda:")


def _left_to_the_user(node: ast.Call) -> Iterator[str]:
    """What a call of torch that makes a tensor leaves to the user's defaults."""
    made = node.func
    if not isinstance(made, ast.Attribute) or not isinstance(made.value, ast.Name) or made.value.id != "torch":
        return
    named = {keyword.arg for keyword in node.keywords}  # None: **options
    for factories, argument in ((FACTORIES, "device"), (FLOATING_FACTORIES, "dtype")):
        if factories.fullmatch(made.attr) and not named & {None, argument}:
            yield f"torch.{made.attr} names no {argument}: the user's default one may be another"


def main(root: Path = ROOT) -> int:
    """Print the findings; the exit code."""
    found = list(findings(root))
    sys.stdout.writelines(f"{finding}\n" for finding in found)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
