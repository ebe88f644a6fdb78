"""`zftune tune`: the knobs that are fastest for a built-in model here, found while it trains."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zftune.cli.outputs import Outputs, search_page, write_files
from zftune.errors import BadInputError
from zftune.text import STANDARD_OUTPUT, one_of

if TYPE_CHECKING:
    from rich.console import Console

    from zftune.builtin import OnStep
    from zftune.tuner.search import Search
    from zftune.tuner.space import Setting
    from zftune.tuner.states import Request
    from zftune.tuner.tuner import Tuner

_INTERRUPTED = 130
_REDRAWN_S = 0.2
_PRINTED_S = 10.0
_LONGEST_THOUGHT_S = 3600.0
_SAMPLERS = ("belief", "gp", "tpe", "random")


def _workload(text: str, *flags: str) -> Any:
    return typer.Option(*flags, help=text, rich_help_panel="Built-in workload")


def _file(option: str, text: str) -> Any:
    return typer.Option(option, metavar="PATH", help=text)


_Quality = Annotated[
    str | None,
    typer.Option(
        help="exact (the plain optimizer's trajectory), published (as stale as the config's zenflow section) "
        "or loose (twice that). Default: exact for a config without a zenflow section, else published."
    ),
]
_Fresh = Annotated[
    bool,
    typer.Option("--fresh", help="Start a new search; ignore presets and unfinished runs."),
]
_Measurements = Annotated[
    int | None,
    typer.Option(help="Measurements at most, from 5; a comparison takes two. Default: as many as are worth it."),
]
_Sampler = Annotated[str, typer.Option(help="belief (of the planner and what was measured), gp, tpe or random.")]
_Rig = Annotated[str | None, _workload("Emulated accelerator: a name or a TOML file. Default: the GPU, else a rig.")]
_Ranks = Annotated[
    int, _workload("Ranks on this machine, each on a rig of its own with its rows of the model (FSDP2). Default: 1.")
]
_RealTime = Annotated[
    bool, _workload("Pad the real work to the rig's times, instead of simulating time.", "--real-time")
]
_Thinking = Annotated[
    float | None, _workload("On a rig, simulated seconds that choosing a setting takes. Default: what it really took.")
]
_Model = Annotated[str | None, _workload("tiny, small, medium, or a model directory. Default: tiny (medium on a GPU).")]
_Text = Annotated[str | None, _workload("File or folder to train on. Default: Python's standard library.")]
_Memory = Annotated[
    bool,
    typer.Option(
        "--tune-memory", help="Lower offload_ratio too, which takes GPU memory.", rich_help_panel="Built-in workload"
    ),
]
_Json = Annotated[str | None, _file("--json", "Write the result as JSON; '-': standard output.")]
_Html = Annotated[str | None, _file("--html", "Write a page with the search's plots.")]


def tune(
    quality: _Quality = None,
    seed: Annotated[int, typer.Option(help="Of the weights, the batches and the search.")] = 0,
    sampler: _Sampler = "belief",
    measurements: _Measurements = None,
    fresh: _Fresh = False,
    json_path: _Json = None,
    html_path: _Html = None,
    config: Annotated[str | None, _workload("A ds_config.json whose settings to begin with.")] = None,
    rig: _Rig = None,
    ranks: _Ranks = 1,
    real_time: _RealTime = False,
    thinking_s: _Thinking = None,
    model: _Model = None,
    text: _Text = None,
    steps: Annotated[int, _workload("Training steps at most.")] = 2000,
    tune_memory: _Memory = False,
) -> None:
    """Find the fastest settings for the built-in workload while it trains.

    For your own training: zftune run, or zftune.attach(optimizer) in its loop.
    """
    given = dict(locals())  # before anything else is local
    _check(given)
    document = _live(given)
    write_files(document, json_path, html_path, search_page)
    if document["interrupted"]:
        raise SystemExit(_INTERRUPTED)


def _check(given: Mapping[str, Any]) -> None:
    from zftune.tuner.search import LEAST_MEASUREMENTS

    Outputs(given["json_path"], given["html_path"], None).check()
    one_of("--sampler", given["sampler"], _SAMPLERS)
    if given["thinking_s"] is not None and not 0 <= given["thinking_s"] <= _LONGEST_THOUGHT_S:
        raise BadInputError(f"--thinking-s is {given['thinking_s']}; it must be from 0 to {_LONGEST_THOUGHT_S:g}")
    if given["measurements"] is not None and given["measurements"] < LEAST_MEASUREMENTS:
        raise BadInputError(f"--measurements is {given['measurements']}; it must be an integer >= {LEAST_MEASUREMENTS}")


def _live(given: Mapping[str, Any]) -> dict[str, Any]:
    from rich.console import Console

    from zftune.builtin import TuneOptions, tune
    from zftune.explain.screen import render
    from zftune.store import open_store
    from zftune.tuner.search import SearchOptions

    search = SearchOptions(
        seed=given["seed"], sampler=given["sampler"], most_measurements=given["measurements"],
        thinking_s=given["thinking_s"],
    )  # fmt: skip
    names = ("config", "quality", "rig", "ranks", "real_time", "model", "text", "steps", "seed", "tune_memory", "fresh")
    options = TuneOptions(search=search, **{name: given[name] for name in names})
    console = Console(stderr=given["json_path"] == STANDARD_OUTPUT)
    with open_store() as store, _log_lines(console), _progress(console) as on_step:
        document = tune(options, on_step, store)
    console.print(render(document))
    return document


@contextmanager
def _log_lines(console: Console) -> Iterator[None]:
    """Print what the tuner logs, but for its last words, which the screen has."""
    from zftune.tuner.tuner import CONCLUDES

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not hasattr(record, CONCLUDES):
                console.print(self.format(record), markup=False, soft_wrap=True)

    logger, handler = logging.getLogger("zftune"), Lines()
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagates
        logger.setLevel(level)
        logger.removeHandler(handler)


@contextmanager
def _progress(console: Console) -> Iterator[OnStep]:
    from rich.live import Live
    from rich.text import Text

    line, shown_s = ProgressLine(), 0.0
    with Live(console=console, transient=True, auto_refresh=False, screen=False) as live:

        def on_step(done: int, tuner: Tuner) -> None:
            nonlocal shown_s
            now_s = time.monotonic()
            every_s = _REDRAWN_S if console.is_terminal else _PRINTED_S
            if now_s - shown_s < every_s:
                return
            shown_s, text = now_s, line.text(done, tuner)
            if console.is_terminal:
                live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
            else:
                console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield on_step


class ProgressLine:
    """How far a search is, in a line."""

    def __init__(self) -> None:
        self._best = ""
        """The newest that is known: while the next setting is chosen, the search belongs to another thread."""

    def text(self, done: int, tuner: Tuner) -> str:
        live, search = tuner.live, tuner.search
        if live is None or search is None:
            return f"step {done}: warming up"
        request = live.request
        if request is not None:
            self._best = _best_so_far(tuner, search)
        doing = "choosing what to try" if request is None else _doing(request, tuner.incumbent)
        most = search.options.most_measurements
        limit = "" if most is None else f" of at most {most}"
        return f"step {done}, {search.measurements}{limit} measurements; {doing}{self._best}"


def _best_so_far(tuner: Tuner, search: Search) -> str:
    step_ms = search.book.incumbent_step_ms
    gain = search.book.gain
    less = f" ({gain} less)" if gain is not None and gain.share > 0 else ""
    return f"; best so far {step_ms:.1f} ms{less}: {tuner.incumbent}" if step_ms else ""


def _doing(request: Request, incumbent: Setting) -> str:
    if request.role == "hold":
        return "resting"
    if request.setting == incumbent:
        return "measuring the best so far"
    return f"trying {request.setting.differences(incumbent)}"
