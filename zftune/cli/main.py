"""The command line.

Heavy packages are imported inside the commands, so that
`zftune --help` answers at once.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from zftune import __version__
from zftune.cli.check import check
from zftune.cli.checkpoint import checkpoint
from zftune.cli.daemon import daemon
from zftune.cli.doctor import doctor
from zftune.cli.explain import explain
from zftune.cli.plan import plan
from zftune.cli.presets import presets
from zftune.cli.profile import ProfileCommand, compare, profile
from zftune.cli.run import run
from zftune.cli.runs import runs
from zftune.cli.top import top
from zftune.cli.tune import tune
from zftune.errors import BadInputError, MissingPackageError, ZftuneError

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
            if not error.format_message():  # a group without a command, whose help has been printed
                raise SystemExit(2) from None
            _fail(_usage(error), 2)
        except BadInputError as error:
            _fail(str(error), 2)
        except ZftuneError as error:
            _fail(str(error), 1)
        except ModuleNotFoundError as error:
            package = (error.name or str(error)).partition(".")[0]
            _fail(str(MissingPackageError(package, f"zftune {ctx.invoked_subcommand}")), 1)
        except ImportError as error:
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            _fail(f"a package is installed and cannot be imported ({reason})", 1)
        except KeyboardInterrupt:
            _fail("interrupted", 130)


EXIT_CODES = {
    0: "Done. `zftune check`: nothing is wrong or refused.",
    1: "Failed, with one sentence. `zftune check`: something is wrong or refused; `zftune daemon status`: no daemon; "
    "`zftune doctor`: something that zftune needs does not work, or a training would hang.",
    2: "Bad input, with one sentence; nothing was started or written.",
    130: "Interrupted by Ctrl-C.",
}

app = typer.Typer(
    name="zftune",
    cls=_Commands,
    help="Profile and tune offloaded training: where the GPU's time goes, and the settings that win it back.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
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
app.command()(tune)
app.command(context_settings={"allow_interspersed_args": False})(run)
app.add_typer(presets)
app.add_typer(checkpoint)
app.add_typer(runs)
app.add_typer(daemon)
app.command()(top)


def main() -> None:
    """Run the command line."""
    try:
        os.getcwd()  # noqa: PTH109
    except OSError:
        _fail("the working directory is gone or cannot be read: cd to one that is there", 2)
    app()


def _usage(error: Any) -> str:
    kind = re.search(r"valid (integer|number|float|int)\b", error.message)
    option = getattr(getattr(error, "param", None), "opts", None)
    if kind is not None and option:
        allowed = "an integer" if kind[1].startswith("int") else "a number"
        return f"{option[0]}{_value(error)}; it must be {allowed}"
    if getattr(error, "option_name", None) == "--json" and not hasattr(error, "possibilities"):  # it exists
        return "--json needs a file; for standard output, type: --json -"
    message, _, hint = error.format_message().rstrip(".").partition(". ")
    message += f" ({hint})" if hint else ""
    if error.ctx is None:
        return f"{message}, see --help"
    usage = " ".join(error.ctx.get_usage().removeprefix("Usage: ").replace("{", "").replace("}", "").split())
    return f"{message}; usage: {usage} (see {error.ctx.command_path} --help)"


def _value(error: Any) -> str:
    errors = getattr(error.__cause__ or error.__context__, "errors", None)
    given = [one.get("input") for one in errors()] if callable(errors) else []
    return f" is '{given[0]}'" if given else ""


def _fail(message: str, code: int) -> NoReturn:
    line = "".join(
        one if one.isprintable() else ascii(one)[1:-1] for one in message
    )  # a file's name may have a newline
    typer.echo(f"zftune: {line}", err=True)
    raise SystemExit(code)
