"""What README and docs/ promise works: their Python runs, their commands exist and run, their links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tests.support.governance.documents import PAGES, ROOT, Block, blocks, commands, links, prose
from tools.reference_pages import json_schemas, makers
from zenflow import ZenFlowConfig
from zenflow.names import VARIABLES
from zftune import variables
from zftune.cli.main import app
from zftune.emulation.machines import DEFAULT_RIG

MARKS = {
    "python": ("", "hidden", "not run"),
    "sh": ("", "not run"),
    "sql": ("not run",),
    "json": ("",),
    "text": ("output", "example"),
}
"""Of a block, by its language: what may stand above it."""
OTHERS = ("cp", "export", "kubectl", "pip", "sbatch", "systemctl")
"""Programs that are not ours."""
LAUNCHERS = ("accelerate", "deepspeed", "python", "torchrun")
PROGRAMS = ("zftune", "make", *LAUNCHERS, *OTHERS)
ALL = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in ALL if block.language == "sh"]


def place(block: Block) -> str:
    return block.place


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_block_is_run_or_gives_a_reason(page: Path) -> None:
    for block in blocks(page):
        assert block.mark in MARKS.get(block.language, ()), (
            f"{block.place}: `{block.language}` is marked '{block.mark}'"
        )
        assert block.mark in ("", "hidden") or len(block.reason.split()) >= 3, (
            f"{block.place}: a reason of one or two words"
        )
    fences = re.findall(r"^```", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) == 2 * sum(block.mark != "hidden" for block in blocks(page)), "a fence that is not seen here"
    indented = re.findall(rf"^ {{4,}}(?:{'|'.join(PROGRAMS)}) .*", prose(page), re.MULTILINE)
    assert not indented, "code that is indented is not seen here: put it between fences"


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "json"], ids=place)
def test_json_can_be_read(block: Block) -> None:
    json.loads(block.text)


def inline() -> Iterator[tuple[str, list[str]]]:
    """Commands of ours that stand in a sentence."""
    for page in PAGES:
        for text in re.findall(r"`(zftune [^`]+)`", prose(page)):
            yield str(page.relative_to(ROOT)), text.replace("[", "").replace("]", "").split()


@pytest.mark.parametrize("block", SHELL, ids=place)
def test_commands_and_their_options_exist(block: Block) -> None:
    for words in commands(block):
        check_command(words, block.place)


def test_commands_in_sentences_exist() -> None:
    found = list(inline())
    assert len(found) > 20
    for where, words in found:
        check_command(words, where)


def check_command(words: list[str], where: str) -> None:
    program, *rest = words
    if program == "zftune":
        check_ours(rest, where)
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), (where, rest)
    elif program in LAUNCHERS:
        script = next(word for word in rest if word.endswith(".py"))
        assert script == "train.py" or (ROOT / script).is_file(), (where, script)
    else:
        assert program in OTHERS, f"{where}: {program} is a program that no test knows"


def test_what_pip_installs_is_the_clone_in_which_one_stands() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    lines = [words[2:] for block in SHELL for words in commands(block) if words[:2] == ["pip", "install"]]
    assert len(lines) > 5
    for requirement in (word for words in lines for word in words):
        found = re.fullmatch(r"(?:\.|zftune(?=\[))(?:\[(\w+(?:,\w+)*)\])?|\w+==[\d.]+", requirement)
        assert found is not None, requirement
        assert found[1] is None or set(found[1].split(",")) <= {*extras}, requirement


COMMANDS: Any = typer.main.get_command(app)


def check_ours(words: list[str], where: str) -> None:
    command = COMMANDS
    own = words[: words.index("--")] if "--" in words else words
    while own and own[0] in getattr(command, "commands", {}):
        command, own = command.commands[own[0]], own[1:]
    options = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)} | {"--help"}
    wrong = [word for word in own if re.fullmatch(r"--?[a-z][a-z-]*", word) and word not in options]
    assert not wrong, f"{where}: zftune {' '.join(words)} has no {wrong}"
    unknown = own[:1] if getattr(command, "commands", {}) and own[:1] not in ([], ["COMMAND"]) else []
    assert not unknown or unknown[0].startswith("-"), f"{where}: there is no zftune {' '.join(words)}"


_OF_THE_MACHINE = (
    r"╰─+ cpu \(emulated accelerator\)( · .*)? ─╯",  # the longer the processor's name, the shorter the line before it
    r"done for real, in\s+[\d,.]+\s+m?s,",
    r"waits\s+2,0\d\d ms",  # one run in some 25 hides a wait up to the optimizer's begin instead of its end
)
"""What of the demo's screen another machine, or another run, has otherwise."""


def test_the_demo_prints_what_the_tutorial_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zftune.cli import main as cli

    if sys.version_info[:2] != (3, 11):
        pytest.skip("the tutorial shows a training on the standard library of Python 3.11, others have other sources")
    (block,) = (block for block in ALL if block.mark == "output")  # another one needs a test of its own
    assert block.reason == f"zftune profile --rig {DEFAULT_RIG}"
    monkeypatch.setattr("sys.argv", block.reason.split())
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit):
        cli.main()
    shown, told = (_of_any_machine(text) for text in (capsys.readouterr().out, block.text))
    words = [[word for word in text.split() if any(map(str.isalnum, word))] for text in (shown, told)]  # but for bars
    assert [_NUMBER.sub("#", word) for word in words[0]] == [_NUMBER.sub("#", word) for word in words[1]]
    figures = [[float(number.replace(",", "")) for word in part for number in _NUMBER.findall(word)] for part in words]
    assert figures[0] == pytest.approx(figures[1], rel=0.03)  # processors differ in the last bit of a gradient


_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def _of_any_machine(screen: str) -> str:
    for pattern in _OF_THE_MACHINE:
        screen, found = re.subn(pattern, "", screen)
        assert found == 1, pattern
    return screen


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_is_there(page: Path) -> None:
    for link in links(page):
        assert Path(os.path.normpath(page.parent / link)).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize("name", makers())
def test_a_page_that_is_made_has_a_line_in_its_place(name: str) -> None:
    """Who reads a checkout follows the same links as who reads the site."""
    title, *_, line = (ROOT / "docs" / name).read_text(encoding="utf-8").strip().split("\n")
    assert makers()[name]().startswith(f"{title}\n")
    assert line.startswith("`make docs` makes this page from ")
    assert f"`build/site/{name.removesuffix('.md')}.html`" in line


def test_each_document_that_commands_write_is_told_in_words() -> None:
    """Also to who reads a checkout: the site lists their fields as well."""
    page = (ROOT / "docs/reference/json.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(zftune\.[\w.-]+/\d+)` \| .+ \| (.+) \|$", page, re.MULTILINE))
    assert set(rows) == json_schemas()
    made = makers()["reference/json.md"]()
    assert all(row in made and f"\n## {name}\n" in made for name, row in rows.items())
    assert "`make docs`" not in made


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(
        r"\b((?:csrc|examples|runtime|studies|tests|tools|zftune)/[\w./-]*\w)", page.read_text(encoding="utf-8")
    )
    for path in named:
        if "*" not in path and not path.startswith(("zftune/zftune", "zftune/node")):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_the_tree_of_the_architecture_is_that_of_the_checkout() -> None:
    page = ROOT / "docs" / "architecture.md"
    (tree,) = (block.text for block in blocks(page) if block.text.startswith("csrc/"))
    folder = ROOT
    for line in tree.splitlines():
        if line and not line.startswith(" "):
            folder = ROOT / line.split()[0]
            assert folder.is_dir(), folder
        for name in re.findall(r"\b[a-z_]+\.py\b", line):
            assert (folder / name).is_file(), folder / name


def test_the_readme_fits_on_a_screen_and_a_half() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_every_setting_and_every_public_variable_has_a_sentence() -> None:
    from tools.reference_pages import field_docs

    assert set(field_docs(ZenFlowConfig)) == {*ZenFlowConfig.__dataclass_fields__} | {"offload"}
    internal = {
        variables.DIR,
        variables.VERSION,
        variables.WARMUP,
        variables.STEPS,
        variables.STOP,
        variables.RUN,
        variables.FRESH,
    }
    assert set(variables.READ) - internal == {*variables.PUBLIC, *VARIABLES}
