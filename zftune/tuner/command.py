"""`zftune tune`: the knobs that are fastest for a model here, found while it trains or by running it repeatedly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zftune.commands.output import Outputs
from zftune.errors import BadInputError
from zftune.json_output import STANDARD_OUTPUT, write_json, write_text

if TYPE_CHECKING:
    from rich.console import Console

    from zftune.store.store import Store
    from zftune.tuner.run import OnStep
    from zftune.tuner.search import Search

_INTERRUPTED = 130
_LONGEST_THOUGHT_S = 3600.0
_SAMPLERS = ("gp", "tpe", "random")
_WORKLOAD = ("config", "rig", "ranks", "real_time", "thinking_s", "model", "text", "steps", "tune_memory")
_COMMAND = {"trial_steps": "steps", "timeout": "timeout_s"}  # and what the options of restarting call them
_NOT_LIVE = (
    "command '{}': allowed with --restartable, which runs it again with other knobs, since those of a running command "
    "cannot be changed from outside (its own loop can: zftune.attach(optimizer))"
)


def _workload(text: str, *flags: str) -> Any:
    return typer.Option(*flags, help=text, rich_help_panel="Built-in workload (without CMD)")


def _trials(*flags: str, text: str) -> Any:
    return typer.Option(*flags, help=text, rich_help_panel="Your own training (--restartable -- CMD)")


def _file(option: str, text: str) -> Any:
    return typer.Option(option, metavar="PATH", help=text)


_Command = Annotated[
    list[str] | None, typer.Argument(metavar="-- CMD", help="Your training command; none: a built-in one.")
]
_Quality = Annotated[
    str | None,
    typer.Option(
        help="exact (the plain optimizer's trajectory), published (as stale as the config's zenflow section) "
        "or loose (twice that). Default: exact for a config without a zenflow section, else published."
    ),
]
_Fresh = Annotated[
    bool, typer.Option("--fresh", help="Begin anew: neither from a preset nor from a run that was not finished.")
]
_Measurements = Annotated[int, typer.Option(help="Measurements at most.")]
_Rig = Annotated[str | None, _workload("Emulated accelerator: a name or a TOML file. Default: the GPU, else a rig.")]
_Ranks = Annotated[
    int, _workload("Ranks on this machine, each on a rig of its own with its rows of the model (FSDP2). Default: 1.")
]
_RealTime = Annotated[
    bool, _workload("Pad the real work to the rig's times, instead of simulating time.", "--real-time")
]
_Thinking = Annotated[
    float | None, _workload("On a rig, simulated seconds that a thought takes. Default: what it really took.")
]
_Model = Annotated[str | None, _workload("tiny, small, medium, or a model directory. Default: tiny (medium on a GPU).")]
_Text = Annotated[str | None, _workload("File or folder to train on. Default: Python's standard library.")]
_Memory = Annotated[
    bool,
    typer.Option(
        "--tune-memory",
        help="Lower offload_ratio too, which takes GPU memory.",
        rich_help_panel="Built-in workload (without CMD)",
    ),
]
_Json = Annotated[str | None, _file("--json", "Write the result as JSON; '-': standard output.")]
_Html = Annotated[str | None, _file("--html", "Write a page with the search's plots.")]
_Restartable = Annotated[
    bool, _trials("--restartable", text="CMD may be run again and again, in scratch copies of its folder.")
]


def tune(
    ctx: typer.Context,
    command: _Command = None,
    quality: _Quality = None,
    seed: Annotated[int, typer.Option(help="Of the weights, the batches and the search.")] = 0,
    sampler: Annotated[str, typer.Option(help="gp, tpe or random.")] = "gp",
    measurements: _Measurements = 24,
    fresh: _Fresh = False,
    json_path: _Json = None,
    html_path: _Html = None,
    restartable: _Restartable = False,
    trial_steps: Annotated[int | None, _trials(text="Steps of a run that count. Default: 30.")] = None,
    timeout: Annotated[float | None, _trials(text="Most seconds of a run. Default: 1800.")] = None,
    config: Annotated[str | None, _workload("A ds_config.json whose knobs to begin with.")] = None,
    rig: _Rig = None,
    ranks: _Ranks = 1,
    real_time: _RealTime = False,
    thinking_s: _Thinking = None,
    model: _Model = None,
    text: _Text = None,
    steps: Annotated[int, _workload("Training steps at most.")] = 2000,
    tune_memory: _Memory = False,
) -> None:
    """Find the fastest knobs: for the built-in workload while it trains, or for your command by running it again."""
    given = {name: value for name, value in locals().items() if name != "ctx"}  # before anything else is local
    _check(given)
    if restartable:
        _refuse(ctx, _WORKLOAD, "only without a command, it is of the built-in workload")
        document = _restarting(given)
    else:
        _refuse(ctx, tuple(_COMMAND), "only with --restartable")
        document = _live(given)
    if json_path is not None:
        write_json(document, json_path)
    if html_path is not None:
        from zftune.report.tune import tune_page

        write_text(tune_page(document), html_path, option="--html")
    if document["interrupted"]:
        raise SystemExit(_INTERRUPTED)
    too_short = (document.get("command") or {}).get("too_short")
    if too_short is not None:  # after what was measured before it
        raise BadInputError(too_short)


def _check(given: Mapping[str, Any]) -> None:
    """Refuse at once what is wrong: searching takes minutes."""
    command = " ".join(given["command"] or ())
    if command and not given["restartable"]:
        raise BadInputError(_NOT_LIVE.format(command if len(command) <= 60 else f"{command[:59]}…"))
    if given["restartable"] and not command:
        raise BadInputError("--restartable: allowed with a command (zftune tune --restartable -- CMD ...)")
    Outputs(given["json_path"], given["html_path"], None).check()
    if given["sampler"] not in _SAMPLERS:
        raise BadInputError(f"--sampler '{given['sampler']}': allowed are {', '.join(_SAMPLERS)}")
    if given["thinking_s"] is not None and not 0 <= given["thinking_s"] <= _LONGEST_THOUGHT_S:
        raise BadInputError(f"--thinking-s {given['thinking_s']}: allowed is a number from 0 to {_LONGEST_THOUGHT_S:g}")
    if given["measurements"] < 1:
        raise BadInputError(f"--measurements {given['measurements']}: allowed is an integer >= 1")


def _refuse(ctx: typer.Context, names: tuple[str, ...], allowed: str) -> None:
    """Options that would be ignored: better said."""
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(str(parameter.name))
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            raise BadInputError(f"{parameter.opts[0]} '{ctx.params[parameter.name]}': allowed {allowed}")


def _live(given: Mapping[str, Any]) -> dict[str, Any]:
    """Tune the built-in workload, and show what came of it."""
    from rich.console import Console

    from zftune.store import open_store
    from zftune.tuner.run import TuneOptions, tune
    from zftune.tuner.screen import render
    from zftune.tuner.search import SearchOptions

    search = SearchOptions(
        seed=given["seed"], sampler=given["sampler"], most_measurements=given["measurements"],
        thinking_s=given["thinking_s"],
    )  # fmt: skip
    names = ("config", "quality", "rig", "ranks", "real_time", "model", "text", "steps", "seed", "tune_memory", "fresh")
    options = TuneOptions(search=search, **{name: given[name] for name in names})
    console = Console(stderr=given["json_path"] == STANDARD_OUTPUT)
    with open_store() as store, _progress(console, given["steps"]) as on_step:
        document = tune(options, on_step, store, lambda sentence: console.print(sentence, markup=False, soft_wrap=True))
        document = _with_rows(document, store)
    console.print(render(document))
    return document


def _restarting(given: Mapping[str, Any]) -> dict[str, Any]:
    """Tune a command, and show what came of it."""
    from rich.console import Console

    from zftune.store import open_store
    from zftune.tuner.restarting.command import RestartOptions, run_restarting
    from zftune.tuner.screen import render

    own = {theirs: given[ours] for ours, theirs in _COMMAND.items() if given[ours] is not None}
    options = RestartOptions(
        quality=given["quality"], seed=given["seed"], sampler=given["sampler"], fresh=given["fresh"],
        most_measurements=given["measurements"], **own,
    )  # fmt: skip
    console = Console(stderr=given["json_path"] == STANDARD_OUTPUT)

    def on_progress(sentence: str, _: Search | None) -> None:
        if sentence:
            console.print(sentence, markup=False, soft_wrap=True)

    with open_store() as store:
        document = run_restarting(given["command"], options, on_progress, store)
        document = _with_rows(document, store)
    console.print(render(document))
    return document


def _with_rows(document: dict[str, Any], store: Store) -> dict[str, Any]:
    """With every measurement, and when it broke even, where the run is in the store."""
    from zftune.explain.document import with_rows
    from zftune.store import StoreError

    if document.get("run_id") is None or document["cost"] is None:
        return document
    try:
        return with_rows(document, store, document["run_id"])
    except StoreError as error:
        document["notices"].append(f"{error}.")
        return document


@contextmanager
def _progress(console: Console, steps: int) -> Iterator[OnStep]:
    """A bar over the measurements that there may be, with what is measured now."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("measurements"), TextColumn("{task.description}"))
    hidden = not console.is_terminal  # a log has no use for bars
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=hidden) as bars:
        bar = bars.add_task("warming up", total=None)

        def on_step(done: int, search: Search | None) -> None:
            if search is None:
                return
            now = f"step {done} of at most {steps}: {search.book.incumbent.setting}"
            bars.update(bar, total=search.options.most_measurements, completed=search.measurements, description=now)

        yield on_step
