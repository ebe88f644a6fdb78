"""The files that a profile is written to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from zftune.errors import BadInputError, ZftuneError
from zftune.text import STANDARD_OUTPUT, check_output_path, write_json, write_text

_Write = Callable[[Mapping[str, Any], str], None]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Paths as the user gave them; None: not wanted."""

    json_path: str | None
    html_path: str | None
    trace_path: str | None

    def check(self, *, standard_output: bool = True) -> None:
        """Refuse paths that cannot be written.

        Args:
            standard_output: whether the JSON may go there; else it is a command's.

        Raises:
            BadInputError: a path cannot be written, or is that of two files.
        """
        if self.json_path == STANDARD_OUTPUT and not standard_output:
            raise BadInputError("--json '-': standard output is the command's; give a file")
        seen: dict[Path, str] = {}
        for option, path in (("--json", self.json_path), ("--html", self.html_path), ("--trace", self.trace_path)):
            if path is None:
                continue
            check_output_path(path, option, standard_output=option == "--json")
            other = seen.setdefault(Path(path).resolve(), option)
            if other != option and (Path(path).is_file() or not Path(path).exists()):  # /dev/null takes everything
                raise BadInputError(f"{option} '{path}': is the file of {other} too; give another one")

    def write(self, document: Mapping[str, Any]) -> list[str]:
        """Write all that is wanted of a profile, and name it; what failed, in sentences."""
        failures = []
        wanted: tuple[tuple[str, str | None, _Write], ...] = (
            ("--json", self.json_path, write_json),
            ("--html", self.html_path, _write_html),
            ("--trace", self.trace_path, _write_trace),
        )
        for option, path, write in wanted:
            if path is None:
                continue
            try:
                write(document, path)
                wrote(option, path, "; zftune compare reads it" if option == "--json" else "")
            except ZftuneError as error:
                failures.append(str(error))
            except OSError as error:
                failures.append(f"{option} '{path}': cannot be written ({error.strerror})")
        return failures


_OPENED = {
    "--json": "for scripts",
    "--html": "to be opened in a browser",
    "--output": "for zftune presets import",
    "--trace": "to be opened at https://ui.perfetto.dev or in chrome://tracing",
}


def wrote(option: str, path: str | None, more: str = "") -> None:
    """Name a file that was written, and how it is opened, on standard error."""
    if path is not None and path != STANDARD_OUTPUT:
        with suppress(OSError):  # a terminal that is gone
            typer.echo(f"zftune: wrote '{path}', {_OPENED[option]}{more}", err=True)


def write_files(
    document: Mapping[str, Any], json_path: str | None, html_path: str | None, page: Callable[[Mapping[str, Any]], str]
) -> None:
    """Write the JSON and the page that are wanted, and name them.

    Raises:
        ZftuneError: a file cannot be written.
    """
    write_json(document, json_path)
    if html_path is not None:
        write_text(page(document), html_path, option="--html")
    wrote("--json", json_path)
    wrote("--html", html_path)


def search_page(document: Mapping[str, Any]) -> str:
    """The page of a search; loads Plotly."""
    from zftune.report.tune import tune_page

    return tune_page(document)


def _write_html(document: Mapping[str, Any], path: str) -> None:
    from zftune.report.html import write_html

    write_html(document, Path(path))


def _write_trace(document: Mapping[str, Any], path: str) -> None:
    from zftune.report.trace import write_trace

    write_trace(document, Path(path))
