"""`zftune tune`: the knobs that are fastest for a model here, found while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zftune.errors import BadInputError
from zftune.json_output import STANDARD_OUTPUT, check_output_path, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from zftune.tuner.run import OnStep
    from zftune.tuner.search import Search

_INTERRUPTED = 130


_Quality = Annotated[
    str | None,
    typer.Option(
        help="exact (the plain optimizer's trajectory), published (as stale as the config's zenflow section) "
        "or loose (twice that). Default: exact for a config without a zenflow section, else published."
    ),
]
_Rig = Annotated[
    str | None,
    typer.Option(help="Emulated accelerator: a name or a TOML file. Default: the GPU, else llama2-7b-4xa100."),
]
_Model = Annotated[
    str | None, typer.Option(help="tiny, small, medium, or a model directory. Default: tiny (medium on a GPU).")
]
_Json = Annotated[
    str | None, typer.Option("--json", metavar="PATH", help="Write the result as JSON; '-': standard output.")
]
_Memory = Annotated[bool, typer.Option("--tune-memory", help="Lower offload_ratio too, which takes GPU memory.")]
_Text = Annotated[str | None, typer.Option(help="File or folder to train on. Default: Python's standard library.")]


def tune(
    config: Annotated[str | None, typer.Option(help="A ds_config.json whose knobs to begin with.")] = None,
    quality: _Quality = None,
    rig: _Rig = None,
    model: _Model = None,
    text: _Text = None,
    steps: Annotated[int, typer.Option(help="Training steps at most.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the weights, the batches and the search.")] = 0,
    sampler: Annotated[str, typer.Option(help="gp, tpe or random.")] = "gp",
    tune_memory: _Memory = False,
    json_path: _Json = None,
) -> None:
    """Find the fastest knobs for the built-in workload while it trains."""
    if json_path is not None:
        check_output_path(json_path)
    if sampler not in ("gp", "tpe", "random"):
        raise BadInputError(f"--sampler '{sampler}': allowed are gp, tpe, random")
    document = _tune(
        json_path, sampler, config=config, quality=quality, rig=rig, model=model, text=text, steps=steps, seed=seed,
        tune_memory=tune_memory,
    )  # fmt: skip
    if json_path is not None:
        write_json(document, json_path)
    if document["interrupted"]:
        raise SystemExit(_INTERRUPTED)


def _tune(json_path: str | None, sampler: str, **given: Any) -> dict[str, Any]:
    """Tune, and show what came of it."""
    from rich.console import Console

    from zftune.store import open_store
    from zftune.tuner.run import TuneOptions, tune
    from zftune.tuner.screen import render
    from zftune.tuner.search import SearchOptions

    search = SearchOptions(seed=given["seed"], sampler=sampler)  # type: ignore[arg-type]
    console = Console(stderr=json_path == STANDARD_OUTPUT)
    with open_store() as store, _progress(console, given["steps"]) as on_step:
        document = tune(TuneOptions(search=search, **given), on_step, store)
    console.print(render(document))
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
