"""The command line. Exit codes: 0 done, 1 failed, 2 bad input (one sentence), 130 interrupted.

`zftune profile -- CMD` ends with the exit code of the command. Heavy packages are imported inside the commands, so that
`zftune --help` answers at once.
"""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from zftune import __version__
from zftune.commands.profile import profile
from zftune.doctor.command import doctor
from zftune.errors import BadInputError, ZftuneError
from zftune.report.command import compare


class _Commands(TyperGroup):
    """The commands; what they raise on purpose, or by Ctrl-C, ends in a sentence and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
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
app.command(context_settings={"allow_interspersed_args": False})(profile)
app.command()(compare)
app.command()(doctor)


def main() -> None:
    """Run the command line."""
    app()


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"zftune: {message}", err=True)
    raise SystemExit(code)
