"""`zftune run -- CMD`: a training as it is, with zftune's backends for DeepSpeed; `--dry-run` tells what would
train.
"""

from __future__ import annotations

import base64
import difflib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from zftune.errors import BadInputError, ZftuneError
from zftune.output import check_output_path

if TYPE_CHECKING:
    from zftune.ds_config.reading import Source
    from zftune.integrations.deepspeed.outcome import Outcome
    from zftune.integrations.deepspeed.section import Section


Found = tuple["Source", "Outcome", "Section"]
"""A ds_config that the command names, what becomes of it, and what is asked for with it."""


def sentences(
    command: Sequence[str], found: Sequence[Found], environment: Mapping[str, str], *, online: bool, replayed: bool
) -> Iterator[str]:
    """What `zftune run` would do.

    Args:
        command: a program and its arguments.
        found: each ds_config that it names.
        environment: in which it would run.
        online: whether it would be tuned while it trains.
        replayed: whether a schedule would set its knobs.

    Raises:
        BadInputError: it names what is not there, and would end before it trains.
    """
    _require_all_there(command, environment)
    from zftune.daemon.client.location import locate
    from zftune.store.location import meant_by
    from zftune.variables import ONLINE

    yield f"Would run: {shlex.join(command)}"
    if not found:
        yield (
            "It names no ds_config: what its script makes an optimizer with, or gives to deepspeed.initialize, is seen "
            "only when it runs."
        )
    store = meant_by(environment).shown
    for source, done, section in found:
        yield f"{source.path or source.through}: {replace(done, quality=None) if replayed else done}."
        if done.kind == "trains":
            if replayed:
                yield "  settings, late updates included: those of the schedule, from its first change on; before that:"
            yield from _knobs(source.config, done, section, store, is_tuned=online or replayed or section.online)
            yield from _batch_sizes(source, _ranks(command, environment))
    yield from _launched_by_nobody(command, environment)
    if online or any(section.online for _, _, section in found):
        by_daemon = online or environment.get(ONLINE) == "daemon"
        where = f"by the daemon at {locate(environment).socket}" if by_daemon else "in its own process"
        yield f"Tuned while it trains, {where}; results go to {store}."
    yield "Nothing was started."


def _require_all_there(command: Sequence[str], environment: Mapping[str, str]) -> None:
    from zftune.integrations.deepspeed.named import missing, script_of

    if shutil.which(command[0], path=environment.get("PATH")) is None:
        raise BadInputError(f"CMD '{command[0]}': there is no such program")
    for option, value in missing(command):
        raise BadInputError(f"{option} '{value}': there is no such file")
    # What a shell or Python is told behind -c names no file; -c of other programs, such as taskset, may be a number.
    at = next((at for at, word in enumerate(command) if re.fullmatch(_TELLS, os.path.basename(word))), len(command))  # noqa: PTH119
    words = itertools.takewhile(lambda word: not re.fullmatch(r"-[a-zA-Z]*c", word), command[at:])
    script = next((word for word in (*command[:at], *words) if word.endswith(".py")), None)
    if script is not None and script_of(command) is None:
        raise BadInputError(f"CMD '{command[0]}': there is no script '{script}'")


_TELLS = r"(python[0-9.]*|(ba|da|z)?sh)"
"""Programs that take commands behind -c."""
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _launched_by_nobody(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """What a plain Python lacks, where its script is one of DeepSpeed's and would end for want of it."""
    from zftune.integrations.deepspeed.named import script_of

    script = script_of(command)
    is_plain = os.path.basename(command[0]).startswith("python") and "-m" not in command  # noqa: PTH119
    if script is None or not is_plain or find_spec("mpi4py") is not None:
        return
    try:
        text = script.read_text(errors="replace")
    except OSError:  # somebody else's: the training's own matter
        return
    lacking = [name for name in _OF_A_RANK if name not in environment and not re.search(rf"\b{name}\b", text)]
    starts = re.search(r"^\s*(import|from)\s+deepspeed\b", text, re.MULTILINE) and "init_process_group" not in text
    if lacking and starts:
        are = "that is" if len(lacking) == 1 else "they are"
        yield (
            f"It ends without mpi4py, unless what {script} imports sets {', '.join(lacking)}: it starts DeepSpeed, and "
            f"{are} set neither here nor in it. Set what is missing, install mpi4py, or start it by `deepspeed` or "
            "`torchrun` in place of `python`."
        )


_LAUNCHERS = ("torchrun", "deepspeed", "torch.distributed.run", "torch.distributed.launch")
_SEVERAL_NODES = ("--nnodes", "--num-nodes", "--hostfile", "-H")


def _ranks(command: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """Of the training, where the command or a launcher before it tells; None: it does not."""
    own = itertools.takewhile(lambda word: not word.endswith(".py"), command)  # the script's own options come later
    words = [part for word in own for part in word.split("=")]
    names = [word.replace("_", "-") if word.startswith("-") else os.path.basename(word) for word in words]  # noqa: PTH119
    if not any(name in _LAUNCHERS for name in names):
        size = environment.get("WORLD_SIZE", "")
        return int(size) or None if size.isdecimal() else None
    if any(name in _SEVERAL_NODES for name in names) or os.path.exists("/job/hostfile"):  # noqa: PTH110
        return None
    told = [after for name, after in itertools.pairwise(names) if name in ("--nproc-per-node", "--num-gpus")]
    return int(told[0]) or None if told and told[0].isdecimal() else None


def _batch_sizes(source: Source, ranks: int | None) -> Iterator[str]:
    """What DeepSpeed refuses of them; a script may set them before it does."""
    from zftune.ds_config.reading import given, shown
    from zftune.ds_config.tables import table
    from zftune.integrations.deepspeed.verdict import BATCH, faults
    from zftune.telemetry.fingerprint import installed

    config, known = given(source), table(installed("deepspeed") or "")
    for fault in () if known is None else faults(config, known, ranks):
        if fault.path[0] in BATCH and fault.path[0] in config:
            size = f"{fault.path[0]} {shown(config[fault.path[0]])}"
            yield f"  DeepSpeed refuses {size}, unless the script changes it: it must be {fault.allowed}"


def _knobs(config: Mapping[str, Any], done: Outcome, section: Section, store: str, *, is_tuned: bool) -> Iterator[str]:
    from zenflow import ConfigError, ZenFlowConfig
    from zftune.integrations.deepspeed.choosing import is_planned, waited
    from zftune.integrations.deepspeed.outcome import has_zenflow
    from zftune.integrations.deepspeed.section import BEST, NO_PRESET

    asked = section.named_preset is not None
    try:
        own = ZenFlowConfig.from_ds_config({name: value for name, value in config.items() if name != "zftune"})
        knobs = waited(own, done.quality) if done.backend == "zenflow" and done.quality else own
    except ConfigError as error:  # such as "auto", which Hugging Face fills in
        unknown = f", not all of which are known before it runs ({error})" if error.value == "auto" else ""
        yield f"  settings: those of the ds_config{unknown}"
    else:
        late = done.quality if done.backend == "zenflow" else None
        has_section = has_zenflow(config)
        if late is not None and is_planned(late, has_section=has_section, has_preset=asked, is_tuned=is_tuned):
            from zftune.hiding import FIRST_STEPS, late_defaults, named

            defaults = named(late_defaults(late, own))
            yield f"  settings: the planner's, after {FIRST_STEPS} steps on a GPU; on a plain CPU {defaults}"
        else:
            but = "" if knobs == own else f", with what quality {done.quality} needs"
            shown = {name: value for name in _SHOWN if (value := getattr(knobs, name)) is not None}
            yield f"  settings of the ds_config{but}: {_words(shown)}"
    ours = _presets(done, here=True) if section.preset in (None, BEST) else []
    if section.preset == BEST and not ours:
        yield f"  no preset for this hardware is in {store} yet (run --online makes one): it would train with these"
    elif section.named_preset is not None:
        yield _of_preset(section.named_preset, config, done)
    elif section.preset != NO_PRESET:
        names = f" (for this hardware there are {', '.join(ours)}; --preset none takes none)" if ours else ""
        yield f"  a preset for exactly this model and hardware in {store} would come before them{names}"


_SHOWN = ("topk_ratio", "update_interval", "apply_lag", "select_interval", "offload_ratio", "overlap_step")


def _of_preset(name: str, config: Mapping[str, Any], done: Outcome) -> str:
    """What a preset would set, and whether it is proven for what is known of the training: not its model."""
    from zftune.ds_config.reading import stage_of
    from zftune.integrations.deepspeed.choosing import provisional
    from zftune.telemetry.fingerprint import hardware, hw_id

    preset = _preset(name)
    known = {"backend": done.backend, "quality": done.quality, "stage": stage_of(config)}
    but = provisional(preset, replace(preset.key, hw_id=hw_id(hardware()), **known))
    return f"  settings of preset {preset.name}, which come before them{but}: {_words(preset.knobs)}"


def _words(knobs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_word(value)}" for name, value in knobs.items())


def _presets(done: Outcome, *, here: bool) -> list[str]:
    """Names of those that a training may find: of its backend and quality, and of this hardware where that is asked."""
    from zftune.store import open_store
    from zftune.store.location import meant_by
    from zftune.store.types import PresetState
    from zftune.telemetry.fingerprint import hardware, hw_id

    path = meant_by(os.environ).path
    if path is not None and not path.exists():
        return []  # and none is made
    with open_store() as store:
        active = [one for one in store.presets() if one.state is PresetState.ACTIVE]
    machine, quality = hw_id(hardware()) if here else None, done.quality
    return sorted(
        one.name
        for one in active
        if one.key.backend == done.backend and machine in (None, one.key.hw_id) and quality in (None, one.key.quality)
    )


def _preset(name: str) -> Any:
    from zftune.integrations.deepspeed.presets import is_file, named
    from zftune.store import open_store
    from zftune.store.preset_file import read_preset

    if is_file(name):
        return read_preset(name)
    with open_store() as store:
        return named(store, name)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


_FILES = (".json", ".hjson", ".yaml", ".yml")
_SIGNS = (*_FILES, "deepspeed", "ds_config", "ds-config", "accelerate")
"""One of these is in a word of every command that names a ds_config."""
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
    _tell_of_no_use(command, {} if online or disabled else asked)
    if found or _may_hand_one(command):
        _tell_left_locks(environment)
    if dry_run:
        for sentence in sentences(command, found, environment, online=online, replayed=schedule is not None):
            typer.echo(sentence)
        return
    if not disabled:
        tell_missing(command)
        if online:
            _require_daemon(environment)
        environment = agent.armed(
            {**environment, **_searched(online=online, fresh=fresh, replayed=schedule is not None)}
        )
        told = {"quiet": True} if quiet else {}
        environment[variables.RUN] = _encoded({"version": __version__, **asked, **steering, **told})
        _follow(command, environment, {**asked, **steering})
    _become(command, environment)


def _searched(*, online: bool, fresh: bool, replayed: bool) -> dict[str, str]:
    """Variables that say who searches, and from where."""
    from zftune.variables import FRESH, NOBODY, ONLINE

    who = NOBODY if replayed else "daemon" if online else ""
    return {**({ONLINE: who} if who else {}), **({FRESH: "1"} if fresh else {})}


def _encoded(wanted: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(wanted).encode()).decode()  # some launchers quote nothing


def _follow(command: list[str], environment: dict[str, str], asked: Mapping[str, Any]) -> None:
    """See that somebody says at the end what came of it: CMD's own process, which this one becomes, or this one."""
    from zftune import variables
    from zftune.cli.staying import is_python, stay

    if is_python(command, environment):
        environment[variables.RUN_TOP] = str(os.getpid())
    elif environment.get("RANK", "0") == "0":  # one of several says it
        sys.stdout.flush()
        with _told(command):
            stay(command, environment, asked)


@contextmanager
def _told(command: Sequence[str]) -> Iterator[None]:
    """What keeps a command from being run is said.

    Raises:
        BadInputError: it cannot be run.
    """
    try:
        yield
    except OSError as error:
        raise BadInputError(f"CMD '{command[0]}' cannot be run ({error.strerror})") from error


def _become(command: list[str], environment: dict[str, str]) -> NoReturn:
    """Give this process to a program.

    Raises:
        BadInputError: it cannot be run.
    """
    numbers = (signal.SIGPIPE, signal.SIGXFSZ)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]  # Python ignores them; its heir would, too
    sys.stdout.flush()
    try:
        with _told(command):
            os.execvpe(command[0], command, environment)
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
    """See that a daemon is there; the training does not fail for want of one, nor of a place where it could be."""
    from zftune.daemon.client.autostart import ensure_daemon

    try:
        ensure_daemon(environment)
    except (ZftuneError, OSError) as error:
        typer.echo(f"zftune: nothing is tuned until there is a daemon: {error}", err=True)


def _steering(
    asked: dict[str, Any], found: Sequence[Found], schedule: str | None, export_schedule: str | None
) -> dict[str, str]:
    """Files of knobs, as a process in another folder finds them.

    Raises:
        BadInputError: one is not allowed.
    """
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


def _check(
    asked: dict[str, Any], command: Sequence[str], environment: Mapping[str, str], *, fresh: bool
) -> list[Found]:
    """What can be known before anything starts: each section's fields, whether its preset is there, what is refused.

    Returns:
        Each ds_config that the command names, with what becomes of it.

    Raises:
        BadInputError: one is not allowed.
    """
    from zftune.integrations.deepspeed.section import NAME, NO_PRESET, Section, require_preset

    section, found = Section.of({NAME: asked}, given_as="--"), []
    for source in _named(command, environment):
        done = _require_not_refused(source, section, command)
        section = section.over(Section.of(source.config))
        if fresh and section.preset is None:
            section = replace(section, preset=NO_PRESET)
        found.append((source, done, section))
    if fresh and not section.online:
        raise BadInputError("--fresh needs --online, whose search begins anew then")
    require_preset(section)
    for source, done, _ in found:
        _require_kept(source, done, section)
        _require_works(source, done, section)
    return found


def _require_kept(source: Source, done: Outcome, section: Section) -> None:
    """Refuse a preset by name that breaks the promise of a training, as that itself would once its model is loaded.

    Raises:
        BadInputError: it does.
    """
    preset = section.named_preset
    if preset is None or done.kind != "trains" or done.backend != "zenflow" or done.quality is None:
        return
    from zenflow import ZenFlowConfig
    from zenflow.ds_config import modernized
    from zftune.ds_config.reading import given
    from zftune.integrations.deepspeed.choosing import Chosen, waited, with_knobs

    own = ZenFlowConfig.from_ds_config(modernized(given(source)))
    with_knobs(waited(own, done.quality), Chosen(_preset(preset).knobs, ""), done.quality)


def _require_works(source: Source, done: Outcome, section: Section) -> None:
    """Refuse what DeepSpeed's own runtime cannot train, as the training itself would once it has its settings.

    Raises:
        BadInputError: it cannot, whatever preset may come before the ds_config's settings.
    """
    if done.kind != "trains" or done.backend != "deepspeed":
        return
    from zftune.ds_config.reading import stage_of
    from zftune.integrations.deepspeed.presets import apply
    from zftune.integrations.deepspeed.section import BEST
    from zftune.integrations.deepspeed.upstream import require_works
    from zftune.telemetry.fingerprint import installed

    if section.named_preset is not None:
        knobs, stage = _preset(section.named_preset).knobs, stage_of(source.config)
        source = replace(source, config=apply(source.config, knobs, stage=stage, backend="deepspeed").config)
    try:
        require_works(source, (installed("deepspeed") or "").partition("+")[0])
    except BadInputError as error:
        if section.preset in (None, BEST) and _presets(done, here=False):
            return  # with its settings it may work
        raise BadInputError(f"'{source.path or source.through}': {error}") from error


def tell_missing(command: Sequence[str]) -> None:
    """Name a ds_config that is not there: DeepSpeed ends with a traceback about base64.

    Args:
        command: a program and its arguments, which goes on: the file may lie where another machine runs it.
    """
    words = [word.rpartition("=")[2] for word in command]
    if not _may_name_one(command) or all(os.path.isfile(word) for word in words if word.endswith(_FILES)):  # noqa: PTH113
        return
    from zftune.integrations.deepspeed.named import missing

    for option, value in missing(command):
        typer.echo(f"zftune: {option} '{value}': there is no such file here", err=True)


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


def _tell_of_no_use(command: Sequence[str], asked: Mapping[str, Any]) -> None:
    """Name options that nothing in a training would follow, before it has run for hours as it would without them."""
    if not asked or not any(word.endswith(".py") for word in command):
        return  # what reads a script loads torch
    from zftune.integrations.deepspeed.named import own_loop

    script = own_loop(command)
    if script is not None:
        options = " and ".join(f"--{name}" for name in asked)
        typer.echo(
            f"zftune: {script} trains without DeepSpeed: there {options} {'do' if len(asked) > 1 else 'does'} nothing "
            "without --online",
            err=True,
        )


def _tell_left_locks(environment: Mapping[str, str]) -> None:
    """Name what makes DeepSpeed wait for an op without a word and without end."""
    from zftune.doctor.software import extension_locks

    for lock in extension_locks(environment) if environment.get("RANK", "0") == "0" else ():
        if lock.is_left_over:
            typer.echo(f"zftune: {lock.sentence}: a training that needs it hangs; remove it: {lock.removal}", err=True)


def _may_name_one(command: Sequence[str]) -> bool:
    """Whether a command may name a ds_config: what reads one loads torch, which takes a second."""
    return any(sign in word for word in command for sign in _SIGNS)


def _may_hand_one(command: Sequence[str]) -> bool:
    """Whether a script of a command may give one to DeepSpeed itself."""
    return any(_speaks_of_deepspeed(word) for word in command if word.endswith(".py"))


def _speaks_of_deepspeed(word: str) -> bool:
    try:
        return b"deepspeed" in Path(word).read_bytes()
    except (OSError, ValueError):  # no file's name, or somebody else's: the training's own matter
        return False


def _named(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Source]:
    if not (_may_name_one(command) or _may_hand_one(command)):
        return
    from zftune.integrations.deepspeed.named import named_by

    yield from named_by(command, environment)


def _require_not_refused(source: Source, section: Section, command: Sequence[str]) -> Outcome:
    from zftune.ds_config.reading import given, require_unique
    from zftune.ds_config.tables import table
    from zftune.integrations.deepspeed import named
    from zftune.integrations.deepspeed.outcome import outcome
    from zftune.integrations.deepspeed.verdict import faults, misspelt, undecided
    from zftune.telemetry.fingerprint import installed

    require_unique(source)
    shown, config, script = source.path or source.through, given(source), named.script_of(command)
    known = table(installed("deepspeed") or "")
    decided = known is not None and not undecided(config)
    done = outcome(config, section, faults(config, known) if known is not None and decided else ())
    if done.kind == "refused":
        raise BadInputError(f"'{shown}': {done.placed(source.places or {}).refusals[0]}")
    if (left := None if source.hugging_face else named.unfilled(source.config, script)) is not None and left.crashing:
        raise BadInputError(f"'{shown}': {left.refusal}")
    for name, near in misspelt(config):
        typer.echo(f"zftune: '{shown}': nobody reads {name}; {near}", err=True)
    if done.backend == "deepspeed":
        named.require_guard(config, script)
    return done
