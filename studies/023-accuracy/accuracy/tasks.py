"""Three classification tasks of real text: Debian's package index, and the docstrings of packages that are installed.

A split never has two examples of one source package or one file on both sides, since those are often near copies.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import itertools
import json
import re
import subprocess
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

SECTIONS = ("admin", "games", "graphics", "math", "net", "science", "sound", "text", "utils", "web")
PACKAGES = ("matplotlib", "networkx", "numpy", "scipy", "sqlalchemy", "sympy", "torch", "transformers")
MOST_TRAIN, MOST_TEST = 4000, 2000
_PER_CLASS = 700
_PER_FILE = 4
_NAMES = re.compile(
    r"\b(matplotlib|mpl|pyplot|networkx|nx|numpy|np|ndarrays?|scipy|sqlalchemy|sympy|(py)?torch|transformers"
    r"|hugging ?face)\b",
    re.IGNORECASE,
)
_BASELINE_FEATURES = 1 << 13


class Example(NamedTuple):
    """A text, or two that belong together or not."""

    first: str
    second: str  # empty where there is one text
    label: int


@dataclass(frozen=True, slots=True)
class Task:
    """Examples in a fixed order, in two parts."""

    name: str
    labels: tuple[str, ...]
    train: tuple[Example, ...]
    test: tuple[Example, ...]

    @property
    def digest(self) -> str:
        """Tells one task from another: figures on different texts do not compare."""
        return hashlib.sha256(json.dumps([self.labels, self.train, self.test]).encode()).hexdigest()[:16]

    @property
    def majority(self) -> float:
        """The test accuracy of always saying what is most frequent in training."""
        most = Counter(example.label for example in self.train).most_common(1)[0][0]
        return sum(example.label == most for example in self.test) / len(self.test)


def place_of(key: str) -> int:
    """A number that looks random and is the same everywhere."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big")


def split(name: str, labels: Sequence[str], found: Sequence[tuple[str, Example]]) -> Task:
    """A third of the groups is the test.

    Args:
        name: of the task.
        labels: by number.
        found: examples, each with its group.
    """
    ordered = sorted(found, key=lambda one: (place_of(f"{one[0]}|{one[1].first}|{one[1].second}"), one))
    parts: dict[bool, list[Example]] = {True: [], False: []}
    for group, example in ordered:
        parts[place_of(group) % 3 == 0].append(example)
    return Task(name, tuple(labels), tuple(parts[False][:MOST_TRAIN]), tuple(parts[True][:MOST_TEST]))


# --- Debian's sections --------------------------------------------------------------------------------------------


def section_task() -> Task:
    """Which section of Debian a package is in, from its description of one line.

    Raises:
        RuntimeError: this machine has no package index.
    """
    index = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    counts: Counter[str] = Counter()
    seen: set[str] = set()
    found = []
    for stanza in sorted(index.split("\n\n"), key=place_of):
        fields = dict(re.findall(r"^(Package|Source|Section|Description(?:-en)?): (.*)$", stanza, re.MULTILINE))
        section = fields.get("Section", "").rpartition("/")[2]
        text = fields.get("Description-en") or fields.get("Description", "")
        if section in SECTIONS and len(text.split()) >= 3 and text not in seen and counts[section] < _PER_CLASS:
            counts[section] += 1
            seen.add(text)
            source = (fields.get("Source") or fields["Package"]).split()[0]
            found.append((source, Example(text, "", SECTIONS.index(section))))
    if not found:
        raise RuntimeError("this machine has no index of Debian packages: run apt-get update")
    return split("section", SECTIONS, found)


# --- docstrings ---------------------------------------------------------------------------------------------------


class Documented(NamedTuple):
    """A function or class that says what it is."""

    file: str
    heading: str  # its name and what it takes
    summary: str  # the docstring's first paragraph


def documented(source: str, file: str) -> Iterator[Documented]:
    """What a file documents, in 4 to 60 words."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a template, or of another Python
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("__"):
            text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if 4 <= len(text.split()) <= 60:
                takes = "" if isinstance(node, ast.ClassDef) else _arguments(node.args)
                yield Documented(file, f"{node.name}({takes})", text)


def _arguments(arguments: ast.arguments) -> str:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return ", ".join(argument.arg for argument in every if argument.arg not in ("self", "cls"))


def docstrings(package: str, most: int) -> list[Documented]:
    """Some of an installed package's docstrings: files in an order that looks random, few of each.

    Raises:
        RuntimeError: it is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{package} is not installed, and the tasks are made of its docstrings")
    root = Path(spec.origin).parent
    names = [str(file.relative_to(root.parent)) for file in root.rglob("*.py")]
    found: list[Documented] = []
    for name in sorted(names, key=place_of):
        if len(found) >= most:
            break
        if "test" not in name:
            every = list(documented((root.parent / name).read_text(encoding="utf-8", errors="replace"), name))
            found += sorted(every, key=lambda one: place_of("|".join(one)))[:_PER_FILE]
    return found[:most]


def package_task() -> Task:
    """Which package a docstring is from; its names are masked, and what several packages say is left out."""
    by_package = {package: docstrings(package, _PER_CLASS + 100) for package in PACKAGES}
    said = Counter(one.summary for every in by_package.values() for one in every)
    found = []
    for label, every in enumerate(by_package.values()):
        unique = [one for one in every if said[one.summary] == 1][:_PER_CLASS]
        found += [(one.file, Example(_NAMES.sub("it", one.summary), "", label)) for one in unique]
    return split("package", PACKAGES, found)


def signature_task() -> Task:
    """Whether a docstring belongs to a function: half of them have that of another function of the same file."""
    found = []
    for package in PACKAGES:
        by_file = defaultdict(list)
        for one in docstrings(package, 2 * _PER_CLASS):
            by_file[one.file].append(one)
        for file, every in by_file.items():
            found += [(file, example) for example in paired(every)]
    return split("signature", ("another's", "its own"), found)


def paired(every: Sequence[Documented]) -> Iterator[Example]:
    """A file's functions, some with their own docstring and the others with another's."""
    for one in every:
        others = sorted({other.summary for other in every} - {one.summary}, key=place_of)
        if not others:
            continue  # every function of this file says the same
        own = place_of(f"{one.file} {one.heading}") % 2
        yield Example(one.heading, one.summary if own else others[place_of(one.heading) % len(others)], own)


TASKS: Mapping[str, Callable[[], Task]] = {
    "section": section_task,
    "package": package_task,
    "signature": signature_task,
}


def small_task() -> Task:
    """For a short run: which of two folders of Python's standard library a docstring is from."""
    root, labels = Path(sysconfig.get_path("stdlib")), ("email", "asyncio")
    found = []
    for label, folder in enumerate(labels):
        for file in sorted((root / folder).glob("*.py")):
            every = documented(file.read_text(encoding="utf-8"), file.name)
            found += [(file.name, Example(one.summary, "", label)) for one in every]
    return split("small", labels, found)


# --- what needs no model ------------------------------------------------------------------------------------------


def bag_of_words(task: Task) -> float:
    """The test accuracy of logistic regression on words and pairs of neighbours; of two texts also what they share.

    The penalty is chosen on the last fifth of the training part.
    """
    train, test = (_bags(part) for part in (task.train, task.test))
    wanted, expected = (torch.tensor([one.label for one in part]) for part in (task.train, task.test))
    kept, classes = len(task.train) * 4 // 5, len(task.labels)
    judged = {
        penalty: _right(_regression(train[:kept], wanted[:kept], classes, penalty), train[kept:], wanted[kept:])
        for penalty in (1e-5, 1e-4, 1e-3)
    }
    penalty = max(judged, key=judged.__getitem__)
    return _right(_regression(train, wanted, classes, penalty), test, expected)


def _bags(examples: Sequence[Example]) -> Tensor:
    bags = torch.zeros(len(examples), _BASELINE_FEATURES)
    for row, example in enumerate(examples):
        parts = [re.findall(r"[a-z]+", text.lower().replace("_", " ")) for text in example[:2]]
        words = [f"{side}{word}" for side, part in enumerate(parts) for word in part]
        words += [f"{side}{a} {b}" for side, part in enumerate(parts) for a, b in itertools.pairwise(part)]
        words += ["shared"] * len(set(parts[0]) & set(parts[1]))
        for word in words:
            bags[row, place_of(word) % _BASELINE_FEATURES] += 1
    return functional.normalize(bags, dim=1)


def _regression(bags: Tensor, labels: Tensor, classes: int, penalty: float) -> Tensor:
    weight = torch.zeros(bags.shape[1], classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=40, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(bags @ weight, labels) + penalty * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weight.detach()


def _right(weight: Tensor, bags: Tensor, labels: Tensor) -> float:
    return float(((bags @ weight).argmax(1) == labels).float().mean())
