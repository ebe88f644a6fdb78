"""`zftune presets`: what was found to be the fastest, for which model on which machine."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from zftune.errors import BadInputError, ZftuneError
from zftune.json_output import STANDARD_OUTPUT, check_output_path, write_json, write_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from zftune.store.store import Store
    from zftune.store.types import Preset

presets = typer.Typer(
    name="presets",
    help="Knobs that were proven for a model on a machine: keep, exchange and apply them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_Name = Annotated[str, typer.Argument(metavar="NAME", help="Of a preset.", show_default=False)]
_Json = Annotated[str | None, typer.Option("--json", metavar="PATH", help="Write JSON; '-' is standard output.")]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
_Output = Annotated[str, typer.Option("--output", "-o", metavar="PATH", help="Where to; '-' is standard output.")]


@presets.command("list")
def list_presets(json_path: _Json = None) -> None:
    """List all presets; those of this machine are marked."""
    _check_json(json_path)
    from zftune.store.document import document_of
    from zftune.store.screen import as_json, listed

    with _store() as store:
        found = store.presets()
        _console(json_path).print(listed(found, _hw_id()))
        if json_path is not None:
            documents = [as_json(one, document_of(one)) for one in found]
            write_json({"schema": "zftune.presets/1", "presets": documents}, json_path)


@presets.command()
def show(name: _Name, json_path: _Json = None) -> None:
    """Show a preset: what it is for, its knobs, and what they were proven by."""
    _check_json(json_path)
    from zftune.store.document import document_of
    from zftune.store.screen import as_json, shown

    with _store() as store:
        preset = _named(store, name)
        _console(json_path).print(shown(preset))
        if json_path is not None:
            write_json(as_json(preset, document_of(preset)), json_path)


@presets.command()
def export(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Of a preset.", show_default=False)] = None,
    output: _Output = STANDARD_OUTPUT,
    optuna_path: Annotated[
        str | None, typer.Option("--optuna", metavar="FILE", help="Write the searches as Optuna studies instead.")
    ] = None,
) -> None:
    """Write a preset as a file for others; or the searches (of NAME's model and machine) for optuna-dashboard."""
    if optuna_path is None and name is None:
        raise BadInputError("NAME is missing, allowed is the name of a preset, or --optuna FILE")
    check_output_path(output if optuna_path is None else optuna_path, "--output" if optuna_path is None else "--optuna")
    from zftune.store.document import document_of

    with _store() as store:
        preset = None if name is None else _named(store, name)
        if optuna_path is None and preset is not None:
            write_json(document_of(preset), output)
            return
        from zftune.tuner.optuna_export import export_studies

        count = export_studies(store, str(optuna_path), key=None if preset is None else preset.key)
        typer.echo(
            f"{count} stud{'y' if count == 1 else 'ies'} written, to be opened with: optuna-dashboard "
            f"sqlite:///{optuna_path}",
            err=True,
        )


@presets.command("import")
def import_preset(
    path: Annotated[str, typer.Argument(metavar="FILE", help="That `export` wrote.", show_default=False)],
) -> None:
    """Keep a preset from a file. It stays provisional: it is compared before it is trusted."""
    from zftune.store.document import document_of, read_preset

    preset = read_preset(path)
    with _store(writing=True) as store:
        wanted = document_of(preset) | {"name": ""}
        same = next((one for one in store.presets() if document_of(one) | {"name": ""} == wanted), None)
        if same is not None:
            typer.echo(f"It is there already, as {same.name}.")
            return
        typer.echo(f"Kept as {store.save_preset(preset).name}, provisional.")


@presets.command()
def apply(
    ds_config: Annotated[str, typer.Argument(metavar="ds_config.json", help="Your own.", show_default=False)],
    preset: Annotated[str, typer.Option("--preset", metavar="NAME|FILE|best", help="Whose knobs.")],
    output: _Output,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Your model, by name or model_id.")] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="Tokens a sequence.")] = None,
    provisional: Annotated[
        bool, typer.Option("--provisional", help="Take one that was proven for something else.")
    ] = False,
    json_path: _Json = None,
) -> None:
    """Write a ds_config with a preset's knobs, for DeepSpeed without zftune; says what DeepSpeed does differently."""
    check_output_path(output, "--output")
    _check_json(json_path)
    if json_path == output == STANDARD_OUTPUT:
        raise BadInputError("--json '-': allowed is a file, since --output takes standard output")
    from zftune.store.applying import Wish, apply_preset

    with _store() as store:
        wish = Wish(preset=preset, model=model, sequence=sequence, provisional=provisional)
        applied = apply_preset(store, ds_config, wish)
    write_text(applied.text, output, option="--output") if output != STANDARD_OUTPUT else sys.stdout.write(applied.text)
    for note in applied.notes:
        typer.echo(f"note: {note}", err=True)
    if json_path is not None:
        write_json(applied.document(), json_path)


@presets.command()
def rm(name: _Name, yes: _Yes = False) -> None:
    """Forget a preset. A backup is made first."""
    from zftune.store.files import back_up

    with _store(writing=True) as store:
        preset = _named(store, name)
        _confirm(f"Forget preset {preset.name}?", yes=yes)
        if store.path is not None:
            try:
                back_up(store.path)
            except OSError as error:
                raise ZftuneError(f"no backup could be made ({error.strerror}), and nothing was removed") from error
        store.remove_preset(preset.name)
        typer.echo(f"Removed {preset.name}.")


@presets.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A preset's name, or a file.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="The preset to see beside it.", show_default=False)],
    json_path: _Json = None,
) -> None:
    """Show in what two presets differ."""
    _check_json(json_path)
    from zftune.store.screen import compared, differences

    with _store() as store:
        one, other = _named_or_file(store, a), _named_or_file(store, b)
    rows = differences(one, other)
    _console(json_path).print(compared(rows, (one.name, other.name)))
    if json_path is not None:
        document = {"schema": "zftune.preset-diff/1", "a": one.name, "b": other.name, "differences": rows}
        write_json(document, json_path)


@presets.command()
def restore(
    which: Annotated[
        str, typer.Argument(metavar="[BACKUP]", help="1 is the newest; or a backup's file name.", show_default=False)
    ] = "1",
    list_only: Annotated[bool, typer.Option("--list", help="Only show which backups there are.")] = False,
    yes: _Yes = False,
    json_path: _Json = None,
) -> None:
    """Bring a backup of the whole store back. What is there now is backed up, or renamed if it cannot be used."""
    _check_json(json_path)
    from pathlib import Path

    from zftune.store import files
    from zftune.store import restore as restoring

    path = restoring.database_file(os.environ.get("ZFTUNE_DB", ""), Path.home(), dict(os.environ))
    if list_only:
        names = [backup.name for backup in files.backups(path)]
        for number, name in enumerate(names, 1):
            typer.echo(f"{number}  {name}", err=json_path == STANDARD_OUTPUT)
        if json_path is not None:
            write_json({"schema": "zftune.backups/1", "backups": names}, json_path)
        return
    backup = restoring.chosen(path, which)
    _confirm(f"Bring {backup.name} back?", yes=yes)
    before = restoring.restore(path, backup)
    typer.echo(f"{backup.name} is back" + ("." if before is None else f"; what was there is {before.name} now."))


@contextmanager
def _store(*, writing: bool = False) -> Iterator[Store]:
    """The store; its notices go to standard error, or are what is wrong if it is to be written to."""
    from zftune.store import open_store

    with open_store() as store:
        if writing and not store.is_kept:
            raise ZftuneError("; ".join(store.notices))
        for notice in store.notices:
            typer.echo(f"zftune: {notice}", err=True)
        yield store


def _named(store: Store, name: str) -> Preset:
    from zftune.store.applying import named

    return named(store, name)


def _named_or_file(store: Store, name: str) -> Preset:
    from zftune.store.applying import is_file
    from zftune.store.document import read_preset

    return read_preset(name) if is_file(name) else _named(store, name)


def _hw_id() -> str:
    from zftune.telemetry.fingerprint import hw_id
    from zftune.telemetry.hardware import hardware

    return hw_id(hardware())


def _confirm(question: str, *, yes: bool) -> None:
    if yes:
        return
    if not _is_asked():
        raise BadInputError("--yes is missing, it is needed where nobody can be asked")
    if not typer.confirm(question):
        raise typer.Exit(1)


def _is_asked() -> bool:
    """Whether somebody is there to answer."""
    return sys.stdin.isatty()


def _check_json(json_path: str | None) -> None:
    if json_path is not None:
        check_output_path(json_path)


def _console(json_path: str | None) -> Console:
    from rich.console import Console

    return Console(stderr=json_path == STANDARD_OUTPUT)
