"""The command line. Exit codes: 0 done, 1 failed, 2 bad input (one sentence), 130 interrupted.

Heavy packages are imported inside the commands, so that `zftune --help` answers at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from zftune import __version__
from zftune.errors import BadInputError, ZftuneError
from zftune.json_output import STANDARD_OUTPUT, check_json_path, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from zftune.profile.measure import OnStep


class _Commands(TyperGroup):
    """The commands; what they raise on purpose, or by Ctrl-C, ends in a sentence and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BadInputError as error:
            _fail(str(error), 2)
        except ZftuneError as error:
            _fail(str(error), 1)
        except ImportError as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            _fail(f"a package cannot be imported ({reason}), install zftune[demo] for everything that is needed", 1)
        except KeyboardInterrupt:
            _fail("interrupted", 130)


app = typer.Typer(
    name="zftune",
    cls=_Commands,
    help="Profile and tune offloaded training: where the GPU's time goes, and the knobs that win it back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _workload(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Workload")


def _knob(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Knobs (over those of --config)")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"zftune {__version__}")
        raise typer.Exit


_NO_KNOBS = {"config", "json_path", "steps", "rig", "baselines"}
_NO_KNOBS |= {"model", "text", "dtype", "micro_batch", "sequence", "seed"}


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
        str | None, _workload("tiny, small, medium, or a model directory. Default: tiny (medium on a GPU).")
    ] = None,
    text: Annotated[str | None, _workload("File or folder to train on. Default: Python's standard library.")] = None,
    dtype: Annotated[str, _workload("bf16 or fp32.")] = "bf16",
    micro_batch: Annotated[int | None, _workload("Sequences a step. Default: 1 (4 on a GPU).")] = None,
    sequence: Annotated[int | None, _workload("Tokens a sequence. Default: 64 (1024 on a GPU).")] = None,
    seed: Annotated[int, _workload("Of the weights and the batches.")] = 0,
    topk_ratio: Annotated[float | None, _knob("Share of columns updated every step.")] = None,
    update_interval: Annotated[str | None, _knob("Steps in an update window, or 'auto'.")] = None,
    select_interval: Annotated[str | None, _knob("Steps between selections, or 'auto'.")] = None,
    offload_ratio: Annotated[float | None, _knob("Share of the state on the host.")] = None,
    apply_lag: Annotated[int | None, _knob("Steps over which a window shows.")] = None,
    deferred_update: Annotated[str | None, _knob("replay or mean.")] = None,
    full_warm_up_rounds: Annotated[int | None, _knob("Synchronous first steps.")] = None,
    overlap_step: Annotated[bool | None, _knob("Let the host work beside the GPU.")] = None,
    pipeline: Annotated[str | None, _knob("bucket or none (DeepSpeed's order).")] = None,
    bucket_bytes: Annotated[int | None, _knob("Largest part of a gradient that moves as a unit.")] = None,
    max_update_interval: Annotated[int | None, _knob("Longest window where it is 'auto'.")] = None,
    auto_ratio: Annotated[float | None, _knob("Share of the weights that closes an 'auto' window.")] = None,
    stream: Annotated[bool | None, _knob("Send gradients during backward.")] = None,
    staging_bytes: Annotated[int | None, _knob("Device memory for weights on their way.")] = None,
    host_threads: Annotated[int | None, _knob("Threads of the host engine.")] = None,
    max_grad_norm: Annotated[float | None, _knob("Clip the gradient norm.")] = None,
) -> None:
    """Show where the time of an offloaded training run goes, beside no offloading and ZeRO-Offload."""
    given = dict(locals())  # before anything else is local
    knobs = {name: value for name, value in given.items() if name not in _NO_KNOBS and value is not None}
    knobs |= {name: _interval(knobs[name]) for name in ("update_interval", "select_interval") if name in knobs}
    if json_path is not None:
        check_json_path(json_path)
    options = {name: given[name] for name in _NO_KNOBS - {"config", "json_path"}}
    _profile(config, knobs, options, json_path)


def main() -> None:
    """Run the command line."""
    app()


def _profile(config: str | None, knobs: dict[str, Any], options: dict[str, Any], json_path: str | None) -> None:
    from rich.console import Console

    from zftune.profile.run import ProfileOptions, profile, read_config
    from zftune.profile.screen import render

    console = Console(stderr=json_path == STANDARD_OUTPUT)
    with _notes(console):
        chosen = ProfileOptions(config=read_config(config, knobs), **options)
    with _progress(console) as on_system:
        document = profile(chosen, on_system)
    console.print(render(document))
    if json_path is not None:
        write_json(document, json_path)


@contextmanager
def _progress(console: Console) -> Iterator[Any]:
    """A bar for each system that is measured."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    hidden = not console.is_terminal  # a log has no use for bars
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=hidden) as bars:

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
    try:
        return None if value is None else int(value)
    except ValueError:
        return value


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"zftune: {message}", err=True)
    raise SystemExit(code)
