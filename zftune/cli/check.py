"""`zftune check`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zftune.errors import BadInputError, ZftuneError
from zftune.store.types import BACKENDS, Backend
from zftune.text import STANDARD_OUTPUT, check_output_path, one_of, write_json, write_text

if TYPE_CHECKING:
    from rich.console import Console

    from zftune.ds_config.reading import Source
    from zftune.integrations.deepspeed.asking import Ask
    from zftune.integrations.deepspeed.check.checking import Mended

_Config = Annotated[
    str, typer.Argument(metavar="DS_CONFIG", help="A ds_config.json, or an Accelerate YAML that has one or names one.")
]
_Fix = Annotated[bool, typer.Option("--fix", help="Write it with safe values in place; needs -o.")]
_Output = Annotated[
    str | None,
    typer.Option(
        "-o", "--output", metavar="PATH", help="Where --fix writes to: the same text where nothing is to be mended."
    ),
]
_Backend = Annotated[
    str | None,
    typer.Option(help="Judge for zenflow (zftune run's runtime) or deepspeed. Default: as the file says, else both."),
]
_Gpus = Annotated[int | None, typer.Option(help="Number of ranks, which batch sizes have to fit. Default: any.")]
_All = Annotated[bool, typer.Option("--all", help="Show notes too: they need no change.")]
_Json = Annotated[
    str | None, typer.Option("--json", metavar="PATH", help="Write the findings as JSON; '-': standard output.")
]


def check(
    ds_config: _Config,
    fix: _Fix = False,
    output: _Output = None,
    backend: _Backend = None,
    gpus: _Gpus = None,
    show_all: _All = False,
    json_path: _Json = None,
) -> None:
    """Name the settings of a ds_config that DeepSpeed ignores, gets wrong or crashes on, each with a safe value.

    Its last line says what zftune run does with the file. It ends with 1 where something is wrong or refused.
    """
    chosen = _backend(backend)
    if gpus is not None and gpus < 1:
        raise BadInputError.of("--gpus", gpus, "an integer >= 1")
    _check_paths(fix, output, json_path)
    from rich.console import Console

    import zftune
    from zftune.ds_config.reading import read
    from zftune.integrations.deepspeed.check import checking, findings

    source = read(ds_config)
    if fix and source.through is not None:
        other = f"names '{source.path}'" if source.path != ds_config else "is of Accelerate or a training"
        raise BadInputError(f"--fix of '{ds_config}': it {other}; it must be a ds_config itself")
    console = Console(stderr=json_path == STANDARD_OUTPUT)
    judge: dict[str, Any] = {
        "backend": chosen,
        "world_size": gpus,
        "fault_of_preset": functools.cache(_fault_of_preset),
    }
    with _deepspeed(console, quiet=json_path is not None) as (version, ask):
        report = checking.check(source, version=version, ask=ask, **judge)
        mended = checking.fix(source, version=version, ask=ask, **judge) if output is not None else None
    console.print(findings.render(report, notes=show_all))
    ok, fixed = report.ok, None
    if mended is not None:
        ok, fixed = mended[2].ok, checking.document(*mended[1:])
        _write(console, source, mended, ds_config, str(output))
    write_json(report.document(zftune.__version__, fixed), json_path)
    if not ok:
        raise typer.Exit(1)


@contextlib.contextmanager
def _deepspeed(console: Console, *, quiet: bool) -> Iterator[tuple[str | None, Ask | None]]:
    """The installed version and its judgement, None if there is none; a terminal shows that it is being asked."""
    from zftune.integrations.deepspeed.asking import Asker, AskingError
    from zftune.telemetry.fingerprint import installed

    version = installed("deepspeed")
    with contextlib.ExitStack() as stack:
        if version is not None and console.is_terminal and not quiet:
            stack.enter_context(console.status(f"asking DeepSpeed {version} ..."))
        ask = None if version is None else stack.enter_context(Asker())
        try:
            if ask is not None:
                ask({"train_batch_size": 1}, 1)
        except AskingError as error:
            ask = None
            console.print(f"DeepSpeed {version} could not be asked: {error}", style="bold red", markup=False)
        yield version, ask


def _backend(name: str | None) -> Backend | None:
    return None if name is None else one_of("--backend", name, BACKENDS)


def _check_paths(fix: bool, output: str | None, json_path: str | None) -> None:
    if fix and output is None:
        raise BadInputError("--fix writes a file: give -o PATH (the input's own path overwrites it)")
    if output is not None and not fix:
        raise BadInputError(f"-o '{output}' needs --fix")
    check_output_path(json_path)
    if output is not None:
        check_output_path(output, "-o", standard_output=False)
        if json_path == output:
            raise BadInputError(f"-o '{output}' is the file of --json too: give another one")


def _fault_of_preset(name: str) -> str | None:
    from zftune.integrations.deepspeed.section import Section, require_preset

    try:
        require_preset(Section(preset=name))
    except ZftuneError as error:
        return str(error)
    return None


def _write(console: Console, source: Source, mended: Mended, ds_config: str, output: str) -> None:
    from zftune.ds_config.reading import rewritten
    from zftune.integrations.deepspeed.check import findings

    config, done, left = mended
    path, text = findings.shown_path((output,)), rewritten(source, config)
    is_same = Path(output).exists() and Path(output).samefile(ds_config)
    if text == source.text:
        heading = f"nothing to change, {'the file stays as it is' if is_same else 'the same text is written'}: {path}"
    else:
        heading = f"changed in {path}" if done else f"written as plain JSON: {path}"
    if text != source.text or not is_same:
        write_text(text, output, option="-o")
    console.print(findings.render_changes(heading, [change for change, _ in done], left))
