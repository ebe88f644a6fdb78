"""The command line. Exit codes: 0 done, 1 failed, 2 bad input (one sentence), 130 interrupted.

`zftune profile -- CMD` ends with the exit code of the command. Heavy packages are imported inside the commands, so that
`zftune --help` answers at once.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from zftune import __version__
from zftune.check.command import check
from zftune.checkpoint.command import checkpoint
from zftune.commands.profile import ProfileCommand, profile
from zftune.commands.run import run
from zftune.daemon.command import daemon
from zftune.daemon.top.command import top
from zftune.doctor.command import doctor
from zftune.errors import BadInputError, ZftuneError
from zftune.explain.command import explain
from zftune.planner.command import plan
from zftune.report.command import compare
from zftune.store.command import presets
from zftune.tuner.command import tune

UsageError: Any = typer.BadParameter.__base__  # of the click that typer brings with it, or of the installed one


class _Commands(TyperGroup):
    """The commands; what they raise on purpose, or by Ctrl-C, ends in a sentence and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args:  # the help that is shown then is an error of usage, too
            return super().parse_args(ctx, args)
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            _fail(_usage(error), 2)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            _fail(_usage(error), 2)
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


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"zftune {__version__}")
        raise typer.Exit


# Options end where CMD begins, with or without the --: what follows is the command's.
app.command(cls=ProfileCommand, context_settings={"allow_interspersed_args": False})(profile)
app.command()(check)
app.command()(compare)
app.command()(doctor)
app.command()(explain)
app.command()(plan)
app.command(cls=ProfileCommand, context_settings={"allow_interspersed_args": False})(tune)
app.command(cls=ProfileCommand, context_settings={"allow_interspersed_args": False})(run)
app.add_typer(presets)
app.add_typer(checkpoint)
app.add_typer(daemon)
app.command()(top)


def main() -> None:
    """Run the command line."""
    app()


def _usage(error: Any) -> str:
    """A sentence about a command line that cannot be read: field, value and what is allowed."""
    kind = re.search(r"valid (integer|number|float|int)\b", error.message)
    option = getattr(getattr(error, "param", None), "opts", None)
    if kind is not None and option:
        allowed = "an integer" if kind[1].startswith("int") else "a number"
        return f"{option[0]}{_value(error)}: allowed is {allowed}"
    message, _, hint = error.format_message().rstrip(".").partition(". ")
    message += f" ({hint})" if hint else ""
    if error.ctx is None:
        return f"{message}, see --help"
    usage = " ".join(error.ctx.get_usage().removeprefix("Usage: ").replace("{", "").replace("}", "").split())
    return f"{message}, allowed is {usage} (see {error.ctx.command_path} --help)"


def _value(error: Any) -> str:
    """What was given, where the error behind it tells."""
    errors = getattr(error.__cause__ or error.__context__, "errors", None)
    given = [one.get("input") for one in errors()] if callable(errors) else []
    return f" '{given[0]}'" if given else ""


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"zftune: {message}", err=True)
    raise SystemExit(code)
