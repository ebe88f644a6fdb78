"""`zftune run -- CMD`: a training as it is, with zftune's backends for DeepSpeed."""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from zftune.commands.profile import ProfileCommand
from zftune.errors import BadInputError

_CONFIG_OPTIONS = ("--deepspeed", "--deepspeed_config", "--deepspeed-config", "--ds_config", "--ds-config")

__all__ = ["ProfileCommand", "run"]


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
    online: Annotated[bool, typer.Option("--online", help="Tune while it trains.")] = False,
) -> None:
    """Run a training with DeepSpeed on zftune's runtime, without a change of the script or its ds_config.

    zftune run -- deepspeed train.py --deepspeed ds_config.json
    """
    from zftune import __version__, agent

    if not command:
        raise BadInputError("CMD '': is missing, allowed is a program with its arguments, such as: -- python train.py")
    asked = {"backend": backend, "preset": preset, "quality": quality, "online": online or None}
    asked = {name: value for name, value in asked.items() if value is not None}
    _check(asked, command)
    environment = dict(os.environ)
    if environment.get(agent.DISABLE) != "1":
        environment = agent.armed(environment)
        wanted = json.dumps({"version": __version__, **asked})
        environment[agent.RUN] = base64.urlsafe_b64encode(wanted.encode()).decode()  # some launchers quote nothing
        environment[agent.RUN_TOP] = str(os.getpid())  # CMD's process, which this one becomes
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these; a program that it becomes would, too
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise BadInputError(
            f"CMD '{command[0]}': cannot be run ({error.strerror}), allowed is a program that can"
        ) from error


def _check(asked: dict[str, Any], command: Sequence[str]) -> None:
    """What can be known before anything starts: each section's fields, and whether its preset is there.

    Raises:
        BadInputError: one is not allowed.
    """
    from zftune.integrations.deepspeed.reading import read_config
    from zftune.integrations.deepspeed.section import NAME, Section, require_preset

    section = Section.of({NAME: asked})
    for path in _ds_configs(command):
        config = read_config(path)
        if config is not None:
            section = section.over(Section.of(config))
    require_preset(section)


def _ds_configs(command: Sequence[str]) -> list[str]:
    """Files that follow the options by which scripts are given a ds_config."""
    found = []
    for option, value in zip(command, [*command[1:], ""], strict=True):
        name, _, joined = option.partition("=")
        if name in _CONFIG_OPTIONS and (joined or value).endswith(".json"):
            found.append(joined or value)
    return [path for path in found if os.path.isfile(path)]  # noqa: PTH113 - a string, as it was typed
