"""`zftune profile` of the built-in workload or of a command, and `zftune compare` of two profiles."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from zftune.cli.outputs import Outputs, wrote
from zftune.errors import BadInputError, ZftuneError
from zftune.text import STANDARD_OUTPUT, byte_count, check_output_path, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from zftune.profile.measure import OnStep


def compare(
    a: Annotated[str, typer.Argument(metavar="A.json", help="A profile.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B.json", help="The profile to see beside it.", show_default=False)],
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="PATH", help="Write the comparison as JSON; '-': standard output.")
    ] = None,
) -> None:
    """Show what changed from one profile to another, and what of it is more than noise."""
    from rich.console import Console

    from zftune.report.compare import compare as compared
    from zftune.report.compare import read_profile, render

    check_output_path(json_path)
    comparison = compared(read_profile(a), read_profile(b))
    Console(stderr=json_path == STANDARD_OUTPUT).print(render(comparison))
    if json_path is not None:
        write_json(comparison.document(), json_path)
        wrote("--json", json_path)


class ProfileCommand(TyperCommand):
    """Tells `zftune profile --`, in which a command was lost, from `zftune profile`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments.

        Raises:
            BadInputError: they end with the -- behind which a command should stand.
        """
        announced = args[-1:] == ["--"]
        rest = super().parse_args(ctx, args)
        if announced and not ctx.params.get("command"):
            raise BadInputError(
                "command '': nothing stands behind --; give a program with its arguments (or no --, for the "
                "built-in workload)"
            )
        return rest


def _workload(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Built-in workload (without CMD)")


def _workload_flag(option: str, text: str) -> Any:
    return typer.Option(option, help=text, rich_help_panel="Built-in workload (without CMD)")


def _knob(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Its settings (over those of --config)")


def _bytes(text: str) -> Any:
    return typer.Option(metavar="SIZE", help=text, rich_help_panel="Its settings (over those of --config)")


def _command(text: str, *flags: str) -> Any:
    return typer.Option(*flags, help=text, rich_help_panel="Your own training (with CMD)")


def _file(option: str, text: str) -> Any:
    return typer.Option(option, metavar="PATH", help=text)


_LAUNCHERS = ("torchrun", "torch.distributed.run", "accelerate", "deepspeed")
_OUTPUTS = ("json_path", "html_path", "trace_path")
_COMMAND_ONLY = ("warmup", "stop")
_BOTH = ("command", "steps", "with_baselines", "verbose", *_OUTPUTS)
_NO_KNOBS = {
    "config",
    "rig",
    "ranks",
    "real_time",
    "model",
    "text",
    "dtype",
    "micro_batch",
    "sequence",
    "seed",
    *_COMMAND_ONLY,
    *_BOTH,
}


_Command = Annotated[
    list[str] | None, typer.Argument(metavar="-- CMD", help="Your training command; none: a built-in one.")
]
_Steps = Annotated[
    int | None, typer.Option(help="Steps to measure. Default: 60 of CMD; else 24, rounded up to whole windows.")
]
_Json = Annotated[str | None, _file("--json", "Write the profile as JSON; '-': standard output.")]
_Html = Annotated[str | None, _file("--html", "Write a page with timeline and plots.")]
_Trace = Annotated[str | None, _file("--trace", "Write a trace for Perfetto or chrome://tracing.")]
_Baselines = Annotated[
    bool | None,
    typer.Option("--with-baselines/--no-baselines", help="Measure no offloading and ZeRO-Offload too."),
]
_Rig = Annotated[
    str | None,
    _workload("Emulated accelerator: a name, a TOML file, or 'none'. Default: the GPU, else llama2-7b-4xa100."),
]
_Ranks = Annotated[
    int, _workload("Ranks on this machine, each on a rig of its own with its rows of the model (FSDP2). Default: 1.")
]
_RealTime = Annotated[
    bool, _workload_flag("--real-time", "Pad the real work to the rig's times, instead of simulating time.")
]
_Model = Annotated[str | None, _workload("tiny, small, medium, or a model directory. Default: tiny (medium on a GPU).")]


def profile(
    ctx: typer.Context,
    command: _Command = None,
    steps: _Steps = None,
    json_path: _Json = None,
    html_path: _Html = None,
    trace_path: _Trace = None,
    warmup: Annotated[int | None, _command("Steps to discard first. Default: 5.")] = None,
    stop: Annotated[
        bool,
        _command(
            "End it when all steps are measured: as sys.exit() does (finally, atexit), with ten seconds for that; one "
            "of several ranks by SIGTERM.",
            "--stop",
        ),
    ] = False,
    with_baselines: _Baselines = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Name every missing figure, and all lines that held the training thread."),
    ] = False,
    config: Annotated[str | None, _workload("A ds_config.json whose settings to use.")] = None,
    rig: _Rig = None,
    ranks: _Ranks = 1,
    real_time: _RealTime = False,
    model: _Model = None,
    text: Annotated[str | None, _workload("File or folder to train on. Default: Python's standard library.")] = None,
    dtype: Annotated[str, _workload("bf16 or fp32.")] = "bf16",
    micro_batch: Annotated[int | None, _workload("Sequences a step. Default: 1 (4 on a GPU).")] = None,
    sequence: Annotated[int | None, _workload("Tokens a sequence. Default: 64 (GPU: 1024; rig: 16).")] = None,
    seed: Annotated[int, _workload("Of the weights and the batches.")] = 0,
    topk_ratio: Annotated[float | None, _knob("Share of columns updated every step.")] = None,
    update_interval: Annotated[str | None, _knob("Steps in an update window, or 'auto'.")] = None,
    select_interval: Annotated[str | None, _knob("Steps between selections, or 'auto'.")] = None,
    offload_ratio: Annotated[float | None, _knob("Share of the state on the host.")] = None,
    apply_lag: Annotated[int | None, _knob("Steps over which a window shows.")] = None,
    deferred_update: Annotated[str | None, _knob("replay or mean.")] = None,
    look_ahead: Annotated[str | None, _knob("none, coast or guess: show late updates before they come.")] = None,
    window_phase: Annotated[str | None, _knob("together or staggered: a share of the buckets each step.")] = None,
    full_warm_up_rounds: Annotated[int | None, _knob("Synchronous first steps.")] = None,
    overlap_step: Annotated[bool | None, _knob("Let the host work beside the GPU.")] = None,
    pipeline: Annotated[str | None, _knob("bucket or none (DeepSpeed's order).")] = None,
    bucket_bytes: Annotated[
        str | None, _bytes("Largest part of a gradient that moves as a unit, such as 4MiB.")
    ] = None,
    max_update_interval: Annotated[int | None, _knob("Longest window where it is 'auto'.")] = None,
    auto_ratio: Annotated[float | None, _knob("Share of the weights that closes an 'auto' window.")] = None,
    stream: Annotated[bool | None, _knob("Send gradients during backward.")] = None,
    staging_bytes: Annotated[str | None, _bytes("Device memory for weights on their way, such as 1GiB.")] = None,
    host_threads: Annotated[int | None, _knob("Threads of the host engine.")] = None,
    max_grad_norm: Annotated[float | None, _knob("Clip the gradient norm.")] = None,
) -> None:
    """Show where the time of a training run goes: of your command, or of a built-in workload with given settings."""
    given = {name: value for name, value in locals().items() if name != "ctx"}  # before anything else is local
    outputs = Outputs(*(given[name] for name in _OUTPUTS))
    if command:
        _refuse_options_of_the_workload(ctx)
        outputs.check(standard_output=False)
        _profile_command(given, outputs)
    else:
        _refuse_options_of_a_command(given)
        outputs.check()
        _profile_workload(given, outputs)


def _refuse_options_of_the_workload(ctx: typer.Context) -> None:
    """A command has no use for them: better said than ignored."""
    for parameter in ctx.command.params:
        name = str(parameter.name)
        source = ctx.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name in (*_COMMAND_ONLY, *_BOTH):
            continue
        raise BadInputError(
            f"{parameter.opts[0]} '{ctx.params[name]}': allowed only without a command, it is of the built-in workload"
        )
    if ctx.params["with_baselines"]:
        raise BadInputError(
            "--with-baselines: allowed only without a command, which cannot be switched to other systems"
        )


def _refuse_options_of_a_command(given: Mapping[str, Any]) -> None:
    for name in _COMMAND_ONLY:
        if given[name] not in (None, False):
            raise BadInputError(f"--{name}: allowed only with a command (zftune profile [options] -- CMD ...)")


def _profile_command(given: Mapping[str, Any], outputs: Outputs) -> None:
    """Run it, then show its profile on standard error; standard output is the command's. Ends with its exit code."""
    from zftune.profile.command.run import CommandOptions, profile_command

    named = {name: given[name] for name in ("steps", "warmup") if given[name] is not None}
    told: dict[str, Any] = {"on_stop": partial(_say_it_ends, given["command"]), "on_silence": _say}
    options = CommandOptions(command=given["command"], stop=given["stop"], **told, **named)
    outcome = profile_command(options)
    for note in outcome.notes:
        _say(note)
    if outcome.document is not None:
        _show(outcome.document, verbose=given["verbose"])
        for failure in outputs.write(outcome.document):
            _say(failure)
    raise SystemExit(outcome.exit_code)


def _say_it_ends(command: Sequence[str]) -> None:
    """A launcher whose workers are ended takes that for a failure and says so at length."""
    names = [word.rpartition("/")[2] for word in command]
    launcher = next((name for name in names if name in _LAUNCHERS), None)
    whose = "" if launcher is None else f"; what {launcher} prints of a signal from here on is its own, and no failure"
    _say(f"all steps are measured, ending the command{whose}")


def _say(sentence: str) -> None:
    try:
        typer.echo(f"zftune: {sentence}", err=True)
    except OSError:  # a full disk, a terminal that is gone: the files are still to be written
        return


def _show(document: Mapping[str, Any], *, verbose: bool) -> None:
    from rich.console import Console

    from zftune.profile.screen import MIN_WIDTH, render

    class Quiet(Console):
        def on_broken_pipe(self) -> None:  # a Console ends the whole program
            self.quiet = True

    if sys.stderr is None:  # it was closed
        return
    console = Quiet(stderr=True)
    console.width = max(console.width, MIN_WIDTH)
    try:
        console.print(render(document, verbose=verbose))
    except OSError:  # a full disk, a terminal that is gone: the files are still to be written
        return


def _profile_workload(given: Mapping[str, Any], outputs: Outputs) -> None:
    from rich.console import Console

    from zftune.profile.run import ProfileOptions, profile, read_config
    from zftune.profile.screen import render

    knobs = {name: value for name, value in given.items() if name not in _NO_KNOBS and value is not None}
    knobs |= {name: _interval(knobs[name]) for name in ("update_interval", "select_interval") if name in knobs}
    for name in ("bucket_bytes", "staging_bytes"):
        if name in knobs:
            knobs[name] = byte_count(f"--{name.replace('_', '-')}", knobs[name])
    options = {name: given[name] for name in _NO_KNOBS - {"config", *_COMMAND_ONLY, *_BOTH}}
    options["baselines"] = given["with_baselines"] is not False
    if given["steps"] is not None:
        options["steps"] = given["steps"]
    console = Console(stderr=outputs.json_path == STANDARD_OUTPUT)
    with _notes(console):
        chosen = ProfileOptions(config=read_config(given["config"], knobs), **options)
    with _progress(console) as on_system:
        document = profile(chosen, on_system)
    console.print(render(document, verbose=given["verbose"]))
    failures = outputs.write(document)
    if failures:
        raise ZftuneError("; ".join(failures))


@contextmanager
def _progress(console: Console) -> Iterator[Any]:
    """A bar for each system that is measured; a log gets a line instead, on standard error."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    hidden = not console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=hidden) as bars:

        def on_system(name: str) -> OnStep:
            what = f"measuring {name.replace('_', ' ')}"
            bar = bars.add_task(what, total=None)

            def on_step(done: int, total: int) -> None:
                bars.update(bar, completed=done, total=total)
                if hidden and done == 1:
                    typer.echo(f"{what}: {total} steps", err=True)

            return on_step

        yield on_system


@contextmanager
def _notes(console: Console) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        console.print(f"note: {warning.message}", style="yellow", markup=False)


def _interval(value: str | None) -> int | str | None:
    try:
        return None if value is None else int(value)
    except ValueError:
        return value
