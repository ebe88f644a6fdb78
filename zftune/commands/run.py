"""`zftune run -- CMD`: a training as it is, with zftune's backends for DeepSpeed."""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from zftune.commands.profile import ProfileCommand
from zftune.errors import BadInputError, ZftuneError
from zftune.json_output import check_output_path

if TYPE_CHECKING:
    from zftune.integrations.deepspeed.ds_config import Source
    from zftune.integrations.deepspeed.section import Section

__all__ = ["ProfileCommand", "run"]
_SIGNS = (".json", ".hjson", ".yaml", ".yml", "deepspeed", "ds_config", "ds-config", "accelerate")
"""One of these is in a word of every command that names a ds_config."""


def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- CMD]", help="The training, as you would start it.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="zenflow (this package's runtime) or deepspeed (upstream's own ZenFlow).")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help='Knobs to train with: a name, a file, or "best".', show_default=False)
    ] = None,
    quality: Annotated[
        str | None, typer.Option(help="exact, published or loose: which updates may come late.", show_default=False)
    ] = None,
    online: Annotated[
        bool, typer.Option("--online", help="Tune while it trains, by the daemon; where there is none, one is started.")
    ] = False,
    schedule: Annotated[
        str | None, typer.Option(metavar="FILE", help="Replay the knobs of a run, step by step.", show_default=False)
    ] = None,
    export_schedule: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the knobs of this run and their steps.", show_default=False),
    ] = None,
) -> None:
    """Run a training with DeepSpeed on zftune's runtime, without a change of the script or its ds_config.

    zftune run -- deepspeed train.py --deepspeed ds_config.json

    A training with an optimizer of zenflow can be tuned (--online), and its knobs be recorded and replayed.
    """
    from zftune import __version__, agent

    if not command:
        raise BadInputError("CMD '': is missing, allowed is a program with its arguments, such as: -- python train.py")
    asked = {"backend": backend, "preset": preset, "quality": quality, "online": online or None}
    asked = {name: value for name, value in asked.items() if value is not None}
    environment = dict(os.environ)
    disabled = environment.get(agent.DISABLE) == "1"
    _check(asked, () if disabled else command, environment)
    steering = _steering(asked, schedule, export_schedule)
    if not disabled:
        if online:
            _require_daemon()
            environment[agent.ONLINE] = "daemon"
        if schedule is not None:
            environment[agent.ONLINE] = agent.NOBODY
        environment = agent.armed(environment)
        environment[agent.RUN] = _encoded({"version": __version__, **asked, **steering})
        environment[agent.RUN_TOP] = str(os.getpid())  # CMD's process, which this one becomes
    _become(command, environment)


def _encoded(wanted: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(wanted).encode()).decode()  # some launchers quote nothing


def _become(command: list[str], environment: dict[str, str]) -> NoReturn:
    """Give this process to a program.

    Raises:
        BadInputError: it cannot be run.
    """
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these; a program that it becomes would, too
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise BadInputError(
            f"CMD '{command[0]}': cannot be run ({error.strerror}), allowed is a program that can"
        ) from error


def _require_daemon() -> None:
    """See that a daemon is there; the training does not fail for want of one, nor of a place where it could be."""
    from zftune.daemon.ensuring import ensure_daemon

    try:
        ensure_daemon()
    except (ZftuneError, OSError) as error:
        typer.echo(f"zftune: nothing is tuned until there is a daemon: {error}", err=True)


def _steering(asked: dict[str, Any], schedule: str | None, export_schedule: str | None) -> dict[str, str]:
    """Files of knobs, as a process in another folder finds them.

    Raises:
        BadInputError: one is not allowed.
    """
    given = {"schedule": schedule, "export_schedule": export_schedule}
    if schedule is not None:
        if asked.get("online"):
            raise BadInputError("--online with --schedule: allowed is one of them, knobs come from one place")
        from zftune.schedule import read_schedule

        read_schedule(schedule)
    if export_schedule is not None:
        check_output_path(export_schedule, "--export-schedule", standard_output=False)
        if os.path.lexists(export_schedule) and not os.path.isfile(export_schedule):  # noqa: PTH113
            # A pipe that nobody reads would stop the training.
            raise BadInputError(f"--export-schedule '{export_schedule}': allowed is a regular file")
    for name, path in given.items():
        if path is not None and asked.get("backend") == "deepspeed":
            option = "--" + name.replace("_", "-")
            raise BadInputError(f"{option} '{path}' with --backend deepspeed: allowed is zenflow, whose knobs they are")
    return {name: os.path.abspath(path) for name, path in given.items() if path is not None}  # noqa: PTH100


def _check(asked: dict[str, Any], command: Sequence[str], environment: Mapping[str, str]) -> None:
    """What can be known before anything starts: each section's fields, whether its preset is there, what is refused.

    Raises:
        BadInputError: one is not allowed.
    """
    from zftune.integrations.deepspeed.section import NAME, Section, require_preset

    section = Section.of({NAME: asked})
    for source in _named(command, environment):
        _require_not_refused(source, section)
        section = section.over(Section.of(source.config))
    require_preset(section)


def _named(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Source]:
    if not any(sign in word for word in command for sign in _SIGNS):
        return  # what reads ds_configs loads torch, which takes a second
    from zftune.integrations.deepspeed.named import named_by

    yield from named_by(command, environment)


def _require_not_refused(source: Source, section: Section) -> None:
    from zftune.doctor.versions import installed
    from zftune.integrations.deepspeed.ds_config import given
    from zftune.integrations.deepspeed.outcome import outcome
    from zftune.integrations.deepspeed.tables import table
    from zftune.integrations.deepspeed.verdict import faults, undecided

    config = given(source)
    known = table(installed("deepspeed") or "")
    decided = known is not None and not undecided(config)
    done = outcome(config, section, faults(config, known) if known is not None and decided else ())
    if done.kind == "refused":
        raise BadInputError(f"'{source.path or source.through}': {done.placed(source.places or {}).refusals[0]}")
