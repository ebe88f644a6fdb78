"""`zftune run -- CMD`: a training as it is, with zftune's backends for DeepSpeed."""

from __future__ import annotations

import base64
import difflib
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from zftune.errors import BadInputError, ZftuneError
from zftune.text import check_output_path

if TYPE_CHECKING:
    from zftune.integrations.deepspeed.outcome import Outcome
    from zftune.integrations.deepspeed.section import Section

Found = tuple[str, "Outcome", "Section"]
"""Where the command has a ds_config, what becomes of it, and what is asked for with it."""

_SIGNS = (".json", ".hjson", ".yaml", ".yml", "deepspeed", "ds_config", "ds-config", "accelerate")
"""One of these is in a word of every command that names a ds_config: to read one loads torch, which takes a second."""
_ALIKE = 0.8
"""From 0 to 1, of difflib: variables that are less alike than this are somebody else's."""


def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- CMD]", help="The training, as you would start it.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="zenflow (this package's runtime) or deepspeed (upstream's own ZenFlow).")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help='Settings to train with: a name, a file, "best", or "none".', show_default=False)
    ] = None,
    quality: Annotated[
        str | None, typer.Option(help="exact, published or loose: which updates may come late.", show_default=False)
    ] = None,
    online: Annotated[
        bool, typer.Option("--online", help="Tune while it trains, by the daemon; where there is none, one is started.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="With --online: begin from no earlier run, and no preset but one asked for.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what would train, with which settings, from where; start nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print warnings alone while it trains.")] = False,
    schedule: Annotated[
        str | None, typer.Option(metavar="FILE", help="Replay the settings of a run, step by step.", show_default=False)
    ] = None,
    export_schedule: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the settings of this run and their steps.", show_default=False),
    ] = None,
) -> None:
    """Run a training as you would start it: one of DeepSpeed's on zftune's runtime, without a change of its script.

    zftune run -- deepspeed train.py --deepspeed ds_config.json

    Any training with an optimizer of zenflow, in a loop of its own too, can be tuned (--online), and its settings be
    recorded and replayed. Others train as they do without zftune run.
    """
    from zftune import __version__, agent, variables

    if not command:
        raise BadInputError("CMD is missing: give a program with its arguments, such as: -- python train.py")
    asked = {"backend": backend, "preset": preset, "quality": quality, "online": online or None}
    asked = {name: value for name, value in asked.items() if value is not None}
    environment = _settled(os.environ) if online else dict(os.environ)
    disabled = environment.get(variables.DISABLE) == "1"
    found = _check(asked, () if disabled else command, environment, fresh=fresh)
    steering = _steering(asked, found, schedule, export_schedule)
    _tell_unread(environment)
    if dry_run:
        for sentence in _would(command, found, environment, online=online, replayed=schedule is not None):
            typer.echo(sentence)
        return
    if not disabled:
        if online:
            _require_daemon(environment)
        environment = agent.armed(
            {**environment, **_searched(online=online, fresh=fresh, replayed=schedule is not None)}
        )
        told = {"quiet": True} if quiet else {}
        environment[variables.RUN] = _encoded({"version": __version__, **asked, **steering, **told})
    _become(command, environment)


def _check(
    asked: dict[str, Any], command: Sequence[str], environment: Mapping[str, str], *, fresh: bool
) -> list[Found]:
    """What can be known before anything starts: options, ds_configs that the command names, presets.

    What DeepSpeed refuses itself is known by `zftune check`.
    """
    from zftune.integrations.deepspeed.section import NAME, NO_PRESET, Section, require_preset

    section, found = Section.of({NAME: asked}, given_as="--"), []
    if any(sign in word for word in command for sign in _SIGNS):
        from zftune.ds_config.reading import given
        from zftune.integrations.deepspeed.command_line import named_by
        from zftune.integrations.deepspeed.outcome import outcome

        for source in named_by(command, environment):
            shown, done = source.path or str(source.through), outcome(given(source), section)
            if done.kind == "refused":
                raise BadInputError(f"'{shown}': {done.placed(source.places or {}).refusals[0]}")
            section = section.over(Section.of(source.config))
            found.append((shown, done, section))
    if fresh and not section.online:
        raise BadInputError("--fresh needs --online, whose search begins anew then")
    require_preset(section)
    if fresh and section.preset is None:
        found = [(shown, done, replace(one, preset=NO_PRESET)) for shown, done, one in found]
    return found


def _would(
    command: Sequence[str], found: Sequence[Found], environment: Mapping[str, str], *, online: bool, replayed: bool
) -> Iterator[str]:
    from zftune.daemon.client.location import locate
    from zftune.integrations.deepspeed.section import BEST, NO_PRESET
    from zftune.store.location import meant_by
    from zftune.variables import ONLINE

    if shutil.which(command[0], path=environment.get("PATH")) is None:
        raise BadInputError(f"CMD '{command[0]}': there is no such program")
    yield f"Would run: {shlex.join(command)}"
    if not found:
        yield "It names no ds_config: what its script gives to deepspeed.initialize is seen only when it runs."
    store = meant_by(environment).shown
    for shown, done, section in found:
        yield f"{shown}: {replace(done, quality=None) if replayed else done}."
        if done.kind != "trains":
            continue
        if replayed:
            yield "  settings: those of the schedule"
        elif section.preset == NO_PRESET:
            yield "  settings: those of the ds_config"
        elif section.preset in (None, BEST):
            yield f"  settings: those of a preset in {store} for this model and hardware, else of the ds_config"
        else:
            yield f"  settings: those of preset {section.preset}"
    if online or any(section.online for _, _, section in found):
        by_daemon = online or environment.get(ONLINE) == "daemon"
        where = f"by the daemon at {locate(environment).socket}" if by_daemon else "in its own process"
        yield f"Tuned while it trains, {where}; results go to {store}."
    yield "Nothing was started."


def _searched(*, online: bool, fresh: bool, replayed: bool) -> dict[str, str]:
    from zftune.variables import FRESH, NOBODY, ONLINE

    who = NOBODY if replayed else "daemon" if online else ""
    return {**({ONLINE: who} if who else {}), **({FRESH: "1"} if fresh else {})}


def _encoded(wanted: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(wanted).encode()).decode()  # some launchers quote nothing


def _become(command: list[str], environment: dict[str, str]) -> NoReturn:
    numbers = (signal.SIGPIPE, signal.SIGXFSZ)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]  # Python ignores them; its heir would, too
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise BadInputError(f"CMD '{command[0]}' cannot be run ({error.strerror})") from error
    finally:  # it is still this process
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    raise AssertionError("unreachable")


def _settled(environment: Mapping[str, str]) -> dict[str, str]:
    """With absolute paths of store and socket, which are the training's too: a script may change its folder."""
    from zftune.daemon.client import location as sockets
    from zftune.store import location as stores

    try:
        return stores.settled(sockets.settled(environment))
    except BadInputError:  # said where a daemon is looked for
        return stores.settled(environment)


def _require_daemon(environment: Mapping[str, str]) -> None:
    """Start a daemon while the training loads its model. Where none can be, the training itself reports that, once."""
    from zftune.daemon.client.autostart import ensure_daemon

    with suppress(ZftuneError, OSError):
        ensure_daemon(environment)


def _steering(
    asked: dict[str, Any], found: Sequence[Found], schedule: str | None, export_schedule: str | None
) -> dict[str, str]:
    given = {"schedule": schedule, "export_schedule": export_schedule}
    if schedule is not None:
        if asked.get("online"):
            raise BadInputError("--online and --schedule exclude each other: settings come from one place")
        from zftune.agent.schedule import read_schedule

        read_schedule(schedule)
    if export_schedule is not None:
        check_output_path(export_schedule, "--export-schedule", standard_output=False)
        if os.path.lexists(export_schedule) and not os.path.isfile(export_schedule):  # noqa: PTH113
            # A pipe that nobody reads would stop the training.
            raise BadInputError(f"--export-schedule '{export_schedule}' is not a regular file")
    backends = {asked.get("backend"), *(done.backend for _, done, _ in found if done.kind == "trains")}
    for name, path in given.items():
        if path is not None and "deepspeed" in backends:
            option = "--" + name.replace("_", "-")
            raise BadInputError(f"{option} '{path}' needs --backend zenflow, whose settings it holds")
    return {name: os.path.abspath(path) for name, path in given.items() if path is not None}  # noqa: PTH100


def _tell_unread(environment: Mapping[str, str]) -> None:
    """Name variables that nobody reads, and that may have been meant for this package."""
    from zftune import variables

    unread = [name for name in environment if name.startswith(("ZFTUNE_", "ZENFLOW_")) and name not in variables.READ]
    if not any(difflib.get_close_matches(name, variables.READ, n=1, cutoff=_ALIKE) for name in unread):
        return  # what finds near names loads torch, which takes a second
    from zenflow.names import unread_variables

    for prefix in ("ZFTUNE_", "ZENFLOW_"):
        for sentence in unread_variables(environment, prefix, variables.READ):
            typer.echo(f"zftune: {sentence}", err=True)
