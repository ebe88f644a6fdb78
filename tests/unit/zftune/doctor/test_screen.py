"""What `zftune doctor` shows, and its document."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from zftune.cli.doctor import render
from zftune.doctor.check import Area, Check, Examination, document

AREAS = [
    Area(
        "software",
        (
            Check(name="Python", status="ok", finding="It is there.", required=True),
            Check(name="[bold]x", status="broken", finding="A [red]sentence[/red].", fix="pip install 'x[y]'"),
        ),
    ),
    Area("GPU", (Check(name="CUDA", status="absent", finding="Not here."),)),
]


def show(areas: list[Area], width: int, encoding: str = "utf-8") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    Console(file=stream, width=width, legacy_windows=False).print(render(areas))
    stream.seek(0)
    return stream.read()


def test_an_area_that_fails_does_not_hide_the_others() -> None:
    examination = Examination()

    def fails() -> list[Check]:
        raise RuntimeError("no such thing.\nmore")

    examination.areas = {"first": fails, "second": lambda: [Check(name="x", status="ok", finding="Fine.")]}
    first, second = examination.run()
    assert first.checks[0].status == "broken"
    assert first.checks[0].finding == "It could not be examined: RuntimeError: no such thing."
    assert second.checks[0].status == "ok"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_screen_fits_and_shows_words_as_they_are(width: int) -> None:
    shown = show(AREAS, width)
    assert max(len(line) for line in shown.splitlines()) <= width
    for text in ("[bold]x", "A [red]sentence[/red].", "fix: pip install 'x[y]'", "broken", "absent"):
        assert text in shown
    assert shown.rstrip().endswith("zftune works here; 1 thing that it can do without is broken.")


def test_the_screen_without_unicode() -> None:
    assert show(AREAS, 80, encoding="ascii").isascii()


def test_what_stops_trainings_is_exit_code_1_although_zftune_works() -> None:
    lock = Check(name="op lock", status="broken", finding="Left over.", fix="rm it", stops_training=True)
    areas = [*AREAS, Area("DeepSpeed", (lock, lock))]
    assert document(areas, "1.2")["ok"] is False
    assert show(areas, 80).rstrip().endswith("zftune works here, but trainings would hang: op lock.")


def test_the_document_says_what_is_at_fault() -> None:
    found = document(AREAS, "1.2")
    assert found["ok"] is True
    fault = Check(name="y", status="absent", finding="Gone.", required=True)
    areas = [*AREAS, Area("more", (fault,))]
    assert document(areas, "1.2")["ok"] is False
    assert "zftune cannot work here: y." in show(areas, 80)
    json.dumps(found, allow_nan=False)
