"""`zftune check`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

import typer

from zftune.errors import BadInputError, ZftuneError
from zftune.json_output import STANDARD_OUTPUT, check_output_path, write_json, write_text
from zftune.store.types import Backend

if TYPE_CHECKING:
    from rich.console import Console

    from zftune.check.subject import FaultOfPreset
    from zftune.integrations.deepspeed.ds_config import Source

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
_All = Annotated[bool, typer.Option("--all", help="Show notes too: what nobody needs to mend.")]
_Json = Annotated[str | None, typer.Option("--json", metavar="PATH", help="Write the findings as JSON; '-': stdout.")]


class _Judge(NamedTuple):
    """For whom it is judged, and by what."""

    backend: Backend | None
    version: str | None
    world_size: int | None
    fault_of_preset: FaultOfPreset


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
        raise BadInputError(f"--gpus {gpus}: allowed is an integer >= 1")
    _check_paths(fix, output, json_path)
    from rich.console import Console

    import zftune
    from zftune.check import checking, screen
    from zftune.doctor.versions import installed
    from zftune.integrations.deepspeed.ds_config import read

    source, version = read(ds_config), installed("deepspeed")
    judge = _Judge(chosen, version, gpus, functools.cache(_fault_of_preset))
    if fix and source.through is not None:
        other = f"names '{source.path}'" if source.path != ds_config else "is of Accelerate or a training"
        raise BadInputError(f"--fix of '{ds_config}': it {other}, allowed is a ds_config")
    report = checking.check(source, **judge._asdict())
    console = Console(stderr=json_path == STANDARD_OUTPUT)
    console.print(screen.render(report, notes=show_all))
    ok, fixed = report.ok, None
    if output is not None:
        ok, fixed = _fix_it(console, source, judge, ds_config, output)
    if json_path is not None:
        write_json(report.document(zftune.__version__, fixed), json_path)
    if not ok:
        raise typer.Exit(1)


def _backend(name: str | None) -> Backend | None:
    for backend in get_args(Backend):
        if name == backend:
            known: Backend = backend
            return known
    if name is None:
        return None
    raise BadInputError(f"--backend '{name}': allowed are {', '.join(get_args(Backend))}")


def _check_paths(fix: bool, output: str | None, json_path: str | None) -> None:
    if fix and output is None:
        raise BadInputError("--fix: writes a file, allowed with -o PATH (the input's own path overwrites it)")
    if output is not None and not fix:
        raise BadInputError(f"-o '{output}': allowed with --fix only")
    if json_path is not None:
        check_output_path(json_path)
    if output is not None:
        check_output_path(output, "-o", standard_output=False)
        if json_path == output:
            raise BadInputError(f"-o '{output}': is the file of --json too, allowed is another one")


def _fault_of_preset(name: str) -> str | None:
    """Why `zftune run` would refuse a preset; None: it would not."""
    from zftune.integrations.deepspeed.section import Section, require_preset

    try:
        require_preset(Section(preset=name))
    except ZftuneError as error:
        return str(error)
    return None


def _fix_it(
    console: Console, source: Source, judge: _Judge, ds_config: str, output: str
) -> tuple[bool, dict[str, Any]]:
    """Write the mended file and show what was changed; whether it has no fault, and the same as JSON."""
    from zftune.check import fixing, screen
    from zftune.check.findings import shown_path

    config, done, left = fixing.fix(source, **judge._asdict())
    path = shown_path((output,))
    if not done and source.flaw is None and not source.duplicates:
        heading = f"nothing to change, {_copy(source.text, ds_config, output)}: {path}"
    else:
        heading = f"changed in {path}" if done else f"written as plain JSON: {path}"
        write_text(json.dumps(config, indent=2) + "\n", output, option="-o")
    console.print(screen.render_changes(heading, [change for change, _ in done], left))
    return left.ok, fixing.document(done, left)


def _copy(text: str, source: str, target: str) -> str:
    """Write the same text to another file; says in words what was done."""
    if Path(target).exists() and Path(target).samefile(source):
        return "the file stays as it is"
    write_text(text, target, option="-o")
    return "the same text is written"
