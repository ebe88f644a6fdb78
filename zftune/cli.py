"""The command line. Exit codes: 0 done, 1 failed, 2 bad input (one sentence), 130 interrupted.

Heavy packages are imported inside the commands, so that `zftune --help` answers at once.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zftune import __version__
from zftune.errors import BadInputError, ZftuneError

if TYPE_CHECKING:
    from rich.console import Console

    from zftune.profile.measure import OnStep

app = typer.Typer(
    name="zftune",
    help="Profile and tune offloaded training: where the GPU's time goes, and the knobs that win it back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_KNOBS = "Knobs (over those of --config)"
_WORKLOAD = "Workload"


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"zftune {__version__}")
        raise typer.Exit


@app.command()
def profile(
    config: Annotated[str | None, typer.Option(help="A ds_config.json whose knobs to use.")] = None,
    steps: Annotated[int, typer.Option(help="Steps to measure, rounded up to whole update windows.")] = 24,
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="PATH", help="Write the profile as JSON; '-' is standard output.")
    ] = None,
    rig: Annotated[
        str | None,
        typer.Option(
            help="Emulated accelerator: a name, a TOML file, or 'none'. Default: the GPU, else llama2-7b-4xa100."
        ),
    ] = None,
    baselines: Annotated[bool, typer.Option(help="Measure no offloading and ZeRO-Offload too.")] = True,
    model: Annotated[
        str | None,
        typer.Option(help="tiny, small, medium, or a model directory. Default: tiny (medium on a GPU).", rich_help_panel=_WORKLOAD),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="File or folder to train on. Default: Python's standard library.", rich_help_panel=_WORKLOAD),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp32.", rich_help_panel=_WORKLOAD)] = "bf16",
    micro_batch: Annotated[int | None, typer.Option(help="Sequences a step.", rich_help_panel=_WORKLOAD)] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens a sequence.", rich_help_panel=_WORKLOAD)] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and the batches.", rich_help_panel=_WORKLOAD)] = 0,
    topk_ratio: Annotated[float | None, typer.Option(help="Share of columns updated every step.", rich_help_panel=_KNOBS)] = None,
    update_interval: Annotated[str | None, typer.Option(help="Steps in an update window.", rich_help_panel=_KNOBS)] = None,
    select_interval: Annotated[str | None, typer.Option(help="Steps between selections.", rich_help_panel=_KNOBS)] = None,
    offload_ratio: Annotated[float | None, typer.Option(help="Share of the state on the host.", rich_help_panel=_KNOBS)] = None,
    apply_lag: Annotated[int | None, typer.Option(help="Steps over which a window shows.", rich_help_panel=_KNOBS)] = None,
    deferred_update: Annotated[str | None, typer.Option(help="replay or mean.", rich_help_panel=_KNOBS)] = None,
    full_warm_up_rounds: Annotated[int | None, typer.Option(help="Synchronous first steps.", rich_help_panel=_KNOBS)] = None,
    overlap_step: Annotated[bool | None, typer.Option(help="Let the host work beside the GPU.", rich_help_panel=_KNOBS)] = None,
    pipeline: Annotated[str | None, typer.Option(help="bucket or none (DeepSpeed's order).", rich_help_panel=_KNOBS)] = None,
    max_grad_norm: Annotated[float | None, typer.Option(help="Clip the gradient norm.", rich_help_panel=_KNOBS)] = None,
) -> None:
    """Show where the time of an offloaded training run goes, beside no offloading and ZeRO-Offload."""
    knobs = {
        "topk_ratio": topk_ratio,
        "update_interval": _interval(update_interval),
        "select_interval": _interval(select_interval),
        "offload_ratio": offload_ratio,
        "apply_lag": apply_lag,
        "deferred_update": deferred_update,
        "full_warm_up_rounds": full_warm_up_rounds,
        "overlap_step": overlap_step,
        "pipeline": pipeline,
        "max_grad_norm": max_grad_norm,
    }
    _check_output(json_path)
    workload = {"model": model, "text": text, "dtype": dtype, "micro_batch": micro_batch, "sequence": sequence}
    knobs = {name: value for name, value in knobs.items() if value is not None}
    options = {"steps": steps, "rig": rig, "seed": seed, "baselines": baselines}
    _profile(config, knobs, {**workload, **options}, json_path)


def main() -> None:
    """Run the command line and turn what is raised on purpose into a sentence and an exit code."""
    try:
        app()
    except BadInputError as error:
        _fail(str(error), 2)
    except ZftuneError as error:
        _fail(str(error), 1)


def _profile(config: str | None, knobs: dict[str, Any], options: dict[str, Any], json_path: str | None) -> None:
    from rich.console import Console

    from zftune.profile.run import ProfileOptions, profile, read_config
    from zftune.profile.screen import render

    console = Console(stderr=json_path == "-")
    with _notes(console):
        chosen = ProfileOptions(config=read_config(config, knobs), **options)
    with _progress(console) as on_system:
        document = profile(chosen, on_system)
    console.print(render(document))
    if json_path is not None:
        _write(document, json_path)


@contextmanager
def _progress(console: Console) -> Iterator[Any]:
    """A bar for each system that is measured."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:

        def on_system(name: str) -> OnStep:
            bar = bars.add_task(f"measuring {name.replace('_', ' ')}", total=None)

            def on_step(done: int, total: int) -> None:
                bars.update(bar, completed=done, total=total)

            return on_step

        yield on_system


@contextmanager
def _notes(console: Console) -> Iterator[None]:
    """Show warnings about the knobs as notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        console.print(f"note: {warning.message}", style="yellow", markup=False)


def _interval(value: str | None) -> int | str | None:
    """An integer where it is one; the knob's own check says what is allowed."""
    return int(value) if value is not None and value.lstrip("-").isdecimal() else value


def _check_output(json_path: str | None) -> None:
    """Refuse a path that cannot be written before minutes are spent."""
    if json_path in (None, "-"):
        return
    path = Path(str(json_path))
    if path.is_dir() or not path.parent.is_dir():
        raise BadInputError(f"--json '{json_path}': allowed is a file in a folder that exists, or -")


def _write(document: dict[str, Any], json_path: str) -> None:
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if json_path == "-":
        sys.stdout.write(text)
        return
    path = Path(json_path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)  # a reader never sees half a file
    except OSError as error:
        raise ZftuneError(f"--json '{json_path}': cannot be written ({error.strerror})") from error


def _fail(message: str, code: int) -> None:
    typer.echo(f"zftune: {message}", err=True)
    raise SystemExit(code)
