"""`zftune tune --restartable -- CMD`: what it is told, and the document that it writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zftune.errors import BadInputError
from zftune.integrations.deepspeed.named import own_loop
from zftune.tuner.space import Setting

if TYPE_CHECKING:
    from zftune.restarts.search import Restarts
    from zftune.store.store import Store
    from zftune.tuner.search import Search
    from zftune.tuner.states import Sampler

OnProgress = Callable[[str, "Search | None"], None]
"""Told what goes on, in words (or ""), and the search once it has begun."""
STEPS = 30
"""Of a trial, that count."""
WARM_UP = 5
ATTACH_TRAINER = (
    "a Trainer without DeepSpeed is tuned while it trains, by zenflow_optimizer and ZFTuneCallback of "
    "zftune.integrations.huggingface"
)
ATTACH = "a loop of your own is tuned while it trains, by zenflow's optimizer and zftune.attach(optimizer)"


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartOptions:
    """What the command line asks for.

    Exploring costs nothing but time here, and all of the time is exploring: the rule that limits it to a share of the
    elapsed time does not hold. `most_measurements` is the limit.
    """

    quality: str | None = None
    """None: "published" where the ds_config has a `zenflow` section, else "exact"."""
    steps: int = STEPS
    """Of a trial, that count, at least; whole windows."""
    warm_up: int = WARM_UP
    """First steps that do not count, at least; nor does the first window."""
    seed: int = 0
    sampler: Sampler = "gp"
    most_measurements: int = 24
    patience: int = 8
    """Settings in a row that are measured and not adopted, before it stops."""
    timeout_s: float = 1800.0
    """Most time of a run of the command."""
    """That other processes share; "": none."""
    fresh: bool = False
    """Begin anew, where a run that was interrupted could be taken up."""

    def check(self) -> None:
        """Look at the figures.

        Raises:
            BadInputError: one is not allowed.
        """
        from zftune.tuner.search import LEAST_MEASUREMENTS

        for name, value, least in (
            ("trial-steps", self.steps, 4),
            ("warm-up", self.warm_up, 0),
            ("measurements", self.most_measurements, LEAST_MEASUREMENTS),
            ("patience", self.patience, 1),
            ("timeout", self.timeout_s, 1),
        ):
            if value < least:
                raise BadInputError(f"--{name} is {value:g}; it must be a number >= {least}")


def announcement(options: RestartOptions) -> str:
    """What will happen, before it does."""
    return (
        f"Runs the command up to {options.most_measurements} times, {options.steps + options.warm_up} steps each or "
        "more, in scratch copies of the working directory; checkpoints are not saved, trackers and hubs are offline."
    )


def run_restarting(
    argv: Sequence[str],
    options: RestartOptions,
    store: Store,
    on_progress: OnProgress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Run the command again and again with other knobs of upstream's DeepSpeed, and return the document.

    Ctrl-C, or a signal that ends processes, ends it early: the document then holds what was found so far, and says so.
    Call it in the main thread.

    Args:
        argv: the command and its arguments.
        options: what was asked for.
        store: where it is written down.
        on_progress: told what goes on; first of all what will happen.
        clock: seconds; the search takes what passes on it.

    Raises:
        BadInputError: an option or the command is not allowed, nothing is tunable, or the command's training is too
            short to be measured. Where it was long enough for a part of the search, the document says so instead.
        ProfileError: the command cannot be tuned; says why.
    """
    from zftune.restarts.process import Interrupts
    from zftune.restarts.search import Restarts
    from zftune.restarts.upstream import refuse_before_a_run

    options.check()
    if not argv:
        raise BadInputError("the command is missing: give one after --")
    if "\0" in "".join(argv):
        raise BadInputError("command: has a null character, which no argument may have")
    if (script := own_loop(argv)) is not None:
        raise BadInputError(
            f"--restartable: '{script}' trains by torch alone, and restarts try settings of DeepSpeed's own runtime; "
            f"{ATTACH}"
        )
    refuse_before_a_run(argv, options.quality)
    tell = on_progress or (lambda _text, _search: None)
    tell(announcement(options), None)
    with Interrupts() as interrupts:
        restarts = Restarts(argv, options, store, tell, interrupts, clock)
        restarts.run()
    return build_document(restarts)


def build_document(restarts: Restarts) -> dict[str, Any]:
    """The document of `zftune tune --json`, with what is known of the command."""
    from zftune.explain.document import tune_document
    from zftune.telemetry import hardware, software

    ranks, search, upstream = restarts.ranks, restarts.search, restarts.upstream
    model: Mapping[str, Any] = ranks[0].model if ranks else {}
    names = ("model", "parameters", "trainable", "dtype", "micro_batch", "sequence")
    versions = {} if upstream is None else {"deepspeed": upstream.version}
    quality = restarts.options.quality or "published" if search is None else search.book.space.quality
    about = {
        "device": (ranks[0].header.get("device") if ranks else None) or "cpu",
        "rig": None,
        "workload": {**{name: model.get(name) for name in names}, "text": None},
        "hardware": hardware(),
        "software": {**software(), **versions},
        "quality": quality,
        "seed": restarts.options.seed,
        "steps": restarts.steps,
        "interrupted": restarts.interrupted,
        "command": {
            "script": ranks[0].header.get("script") if ranks else None,
            "ranks": ranks[0].header["world_size"] if ranks else None,
            "stage": None if upstream is None else upstream.stage,
            "runs": restarts.runs,
            "too_short": restarts.too_short,
            "crashed": restarts.crashed,
        },
        "ds_config": None if search is None else _ds_config(restarts, search.book.incumbent.setting),
    }
    return tune_document(restarts.rows, restarts.run_id, about, restarts.notices, "The search had not begun.")


def _ds_config(restarts: Restarts, setting: Setting) -> dict[str, Any] | None:
    """The sections of the ds_config that the best setting changes, and what is to be known about them."""
    upstream = restarts.upstream
    if upstream is None or setting == upstream.start():
        return None
    config, notes = upstream.applied(setting)
    changed = {name: value for name, value in config.items() if value != upstream.config.get(name)}
    return {**changed, "notes": notes}
