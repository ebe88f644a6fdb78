"""`zftune presets`: what was found to be the fastest, for which model on which machine; lists and tables."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zftune.cli.outputs import wrote
from zftune.errors import BadInputError, ZftuneError
from zftune.store.preset_file import escaped
from zftune.store.types import Preset, PresetState
from zftune.text import STANDARD_OUTPUT, check_output_path, number, percent, write_json, write_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from zftune.store.store import Store
    from zftune.store.types import Preset


_WIDE = 140
_BASELINES = {
    "start": "the starting point",
    "planner": "the setting that the quality or GPU memory asked for",
    "zero_offload": "ZeRO-Offload",
    "no_offload": "no offloading",
    "deepspeed": "DeepSpeed's ZenFlow",
}


def listed(presets: Iterable[Preset], hw_id: str | None, width: int) -> RenderableType:
    """A table of presets; those of this machine are marked. No name is cut or wrapped: it is there to be copied."""
    wide = width >= _WIDE
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("preset", no_wrap=True)
    for title in ("model", "hardware", "quality") if wide else ():
        table.add_column(title)
    for title in ("step", "gain"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state")
    for preset in presets:
        here = " (here)" if preset.key.hw_id == hw_id else ""
        subject = (preset.model.name or preset.key.model_id, machine(preset) + here, preset.key.quality)
        cells = (
            preset.name,
            *(subject if wide else ()),
            f"{number(preset.evidence.step_ms)} ms",
            gain(preset),
            state(preset) + ("" if wide else here),
        )
        table.add_row(*(Text(escaped(cell)) for cell in cells))
    return table if table.row_count else Text("There are no presets yet.")


def shown(preset: Preset) -> RenderableType:
    """Everything about a preset."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts(preset).items():
        table.add_row(Text(escaped(name)), Text(escaped(value)))
    return Group(Text(escaped(preset.name), style="bold"), table)


def differences(a: Preset, b: Preset) -> list[dict[str, str | None]]:
    """What two presets do not have in common: {"name", "a", "b"}."""
    of_a, of_b = facts(a), facts(b)
    names = list(dict.fromkeys([*of_a, *of_b]))
    rows = [{"name": name, "a": of_a.get(name), "b": of_b.get(name)} for name in names]
    return [row for row in rows if row["a"] != row["b"]]


def compared(rows: list[dict[str, str | None]], titles: tuple[str, str]) -> RenderableType:
    """Differences as a table."""
    if not rows:
        return Text("They do not differ.")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for title in titles:
        table.add_column(Text(escaped(title)), overflow="fold")
    for row in rows:
        table.add_row(*(Text(escaped(row[name] or "–")) for name in ("name", "a", "b")))
    return table


def facts(preset: Preset) -> dict[str, str]:
    """Everything about a preset but its name, in words."""
    key, evidence = preset.key, preset.evidence
    found = {
        "state": state(preset),
        "model": f"{preset.model.name or 'unnamed'} ({key.model_id})",
        "hardware": f"{machine(preset)} ({key.hw_id})",
        "backend": key.backend,
        "ZeRO stage": str(key.stage),
        "dtype": key.dtype,
        "ranks": key.ranks,
        "micro-batch": str(key.micro_batch or "not known"),
        "sequence": f"up to {key.sequence} tokens" if key.sequence else "not known",
        "checkpointing": "yes" if key.checkpointing else "no",
        "quality": key.quality,
    }
    found |= {f"{name}": _value(value) for name, value in preset.knobs.items()}
    found |= {
        "step": f"{number(evidence.step_ms)} ms",
        "against": f"{number(evidence.baseline_step_ms)} ms, {_BASELINES[evidence.baseline]}",
        "gain": gain(preset),
        "measured": f"{_day(evidence.measured_unix_s)}, {evidence.steps} steps, in a search of {evidence.measurements} "
        "measurements",
    }
    if preset.usable_cores is not None:
        found["usable cores"] = f"{preset.usable_cores:g}"
    if preset.ratios is not None:
        found["host over compute"] = f"{preset.ratios.host_over_compute:.3g}"
        found["link over compute"] = f"{preset.ratios.link_over_compute:.3g}"
    return found | {f"version {name}": value for name, value in sorted(preset.versions.items())}


def gain(preset: Preset) -> str:
    """The saved share of the baseline's step, with its error."""
    share, error = preset.evidence.gain, preset.evidence.gain_error
    sign = "−" if share < 0 else ""
    return f"{sign}{percent(abs(share))}" + ("" if error is None else f" ± {percent(error)}")


def state(preset: Preset) -> str:
    """In words."""
    if preset.state is PresetState.WITHDRAWN:
        return f"withdrawn: {preset.withdrawn_because}"
    return "provisional (imported)" if preset.imported else "measured"


def machine(preset: Preset) -> str:
    """The rig, the GPU or the CPU."""
    found = preset.hardware
    return f"emulated {found.rig}" if found.rig else found.gpu or found.cpu_model or found.hw_id


def as_json(preset: Preset, document: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's document with what only this store knows of it."""
    return {
        **document,
        "state": preset.state.value,
        "provisional": preset.imported,
        "lost_comparisons": preset.lost_comparisons,
        "withdrawn": None if preset.withdrawn is None else asdict(preset.withdrawn),
        "created_unix_s": preset.created_unix_s,
        "gain": preset.evidence.gain,
    }


def _day(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(unix_s))


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


presets = typer.Typer(
    name="presets",
    help="Settings that were proven for a model on a machine: keep, exchange and apply them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_Name = Annotated[str, typer.Argument(metavar="NAME", help="Of a preset.", show_default=False)]
_Json = Annotated[str | None, typer.Option("--json", metavar="PATH", help="Write JSON; '-': standard output.")]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
_Output = Annotated[str, typer.Option("--output", "-o", metavar="PATH", help="Where to; '-': standard output.")]


@presets.command("list")
def list_presets(json_path: _Json = None) -> None:
    """List all presets; those of this machine are marked."""
    check_output_path(json_path)
    from zftune.store.preset_file import document_of

    with _store() as store:
        found = store.presets()
        console = _console(json_path)
        console.print(listed(found, _hw_id(), console.width))
        if json_path is not None:
            documents = [as_json(one, document_of(one)) for one in found]
            write_json({"schema": "zftune.presets/1", "presets": documents}, json_path)


@presets.command()
def show(name: _Name, json_path: _Json = None) -> None:
    """Show a preset: what it is for, its settings, and what they were proven by."""
    check_output_path(json_path)
    from zftune.store.preset_file import document_of

    with _store() as store:
        preset = _named(store, name)
        _console(json_path).print(shown(preset))
        write_json(as_json(preset, document_of(preset)), json_path)


@presets.command()
def export(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Of a preset.", show_default=False)] = None,
    output: _Output = STANDARD_OUTPUT,
    optuna_path: Annotated[
        str | None, typer.Option("--optuna", metavar="FILE", help="Write the searches as Optuna studies instead.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --output.")] = False,
) -> None:
    """Write a preset as a file for others; or the searches (of NAME's model and machine) for optuna-dashboard."""
    if optuna_path is None and name is None:
        raise BadInputError("NAME is missing: give the name of a preset, or --optuna FILE")
    check_output_path(output if optuna_path is None else optuna_path, "--output" if optuna_path is None else "--optuna")
    if not force and optuna_path is None and Path(output).is_file():
        raise BadInputError(f"--output '{output}' exists already: give a new file, or --force to replace it")
    from zftune.store.preset_file import document_of

    with _store() as store:
        preset = None if name is None else _named(store, name)
        if optuna_path is None and preset is not None:
            write_json(document_of(preset), output)
            wrote("--output", output)
            return
        from zftune.report.optuna_export import export_studies

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
    from zftune.store.preset_file import document_of, read_preset

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
    preset: Annotated[str, typer.Option("--preset", metavar="NAME|FILE|best", help="Whose settings.")],
    output: _Output,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Your model, by name or model_id.")] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens a sequence.")] = None,
    provisional: Annotated[
        bool, typer.Option("--provisional", help="Take one that was proven for something else.")
    ] = False,
    json_path: _Json = None,
) -> None:
    """Write a ds_config with a preset's settings, for DeepSpeed without zftune, and list the differences."""
    check_output_path(output, "--output")
    check_output_path(json_path)
    if json_path == output == STANDARD_OUTPUT:
        raise BadInputError("--json is '-'; it must be a file, since --output takes standard output")
    if sequence is not None and sequence < 1:
        raise BadInputError.of("--sequence", sequence, "an integer >= 1")
    from zftune.integrations.deepspeed.presets import Wish, apply_preset

    with _store() as store:
        wish = Wish(preset=preset, model=model, sequence=sequence, provisional=provisional)
        applied = apply_preset(store, ds_config, wish)
    write_text(applied.text, output, option="--output") if output != STANDARD_OUTPUT else sys.stdout.write(applied.text)
    for note in applied.notes:
        typer.echo(f"note: {note}", err=True)
    write_json(applied.document(), json_path)


@presets.command()
def rm(name: _Name, yes: _Yes = False) -> None:
    """Forget a preset. A backup is made first."""
    from zftune.store.opening import back_up

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
    check_output_path(json_path)

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
    check_output_path(json_path)
    if json_path is not None and not list_only:
        raise BadInputError("--json needs --list: nothing else is written as JSON")
    from zftune.store import opening

    path = opening.database_file(os.environ.get("ZFTUNE_DB", ""), Path.home(), dict(os.environ))
    if list_only:
        names = [backup.name for backup in opening.backups(path)]
        for number, name in enumerate(names, 1):
            typer.echo(f"{number}  {name}", err=json_path == STANDARD_OUTPUT)
        write_json({"schema": "zftune.backups/1", "backups": names}, json_path)
        return
    backup = opening.chosen(path, which)
    _confirm(f"Bring {backup.name} back?", yes=yes)
    before = opening.restore(path, backup)
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
    from zftune.integrations.deepspeed.presets import named

    return named(store, name)


def _named_or_file(store: Store, name: str) -> Preset:
    from zftune.integrations.deepspeed.presets import is_file
    from zftune.store.preset_file import read_preset

    return read_preset(name) if is_file(name) else _named(store, name)


def _hw_id() -> str:
    from zftune.telemetry.fingerprint import hardware, hw_id

    return hw_id(hardware())


def _confirm(question: str, *, yes: bool) -> None:
    if yes:
        return
    if not _is_asked():
        raise BadInputError("--yes is needed where no question can be asked")
    if not typer.confirm(question):
        raise typer.Exit(1)


def _is_asked() -> bool:
    return sys.stdin.isatty()


def _console(json_path: str | None) -> Console:
    from rich.console import Console

    return Console(stderr=json_path == STANDARD_OUTPUT)
