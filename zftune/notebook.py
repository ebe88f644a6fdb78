"""What zftune finds out, where Python runs: a profile of a function, and documents that a notebook displays."""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from zftune.errors import BadInputError, ProfileError

_SCREENS = {
    "zftune.profile/1": "zftune.profile.screen",
    "zftune.plan/1": "zftune.planner.screen",
    "zftune.explain/1": "zftune.explain.screen",
    "zftune.tune/1": "zftune.explain.screen",
}
_IN_PYTHON = {"zftune.profile/1": {"shows_all": 'its item ["missing"] has which, and why'}}
_WIDTH = 100


class Shown(dict[str, Any]):
    """A document of zftune that displays itself if it is printed, or if a notebook's cell ends with it.

    Raises:
        BadInputError: the document has another schema.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        if document.get("schema") not in _SCREENS:
            raise BadInputError(
                f"the document's schema is {document.get('schema')!r}; it must be one of {', '.join(_SCREENS)}"
            )
        super().__init__(document)

    def __str__(self) -> str:
        return str(self._printed().export_text()).rstrip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        code = '<pre style="line-height:1.2;overflow-x:auto">{code}</pre>'
        return str(self._printed().export_html(inline_styles=True, code_format=code))

    def _repr_markdown_(self) -> str:
        return f"```\n{self}\n```"

    def _printed(self) -> Any:
        from rich.console import Console

        console = Console(record=True, file=io.StringIO(), width=_WIDTH, force_jupyter=False)
        name = self["schema"]
        console.print(import_module(_SCREENS[name]).render(self, **_IN_PYTHON.get(name, {})))
        return console


def shown(document: Mapping[str, Any] | str | Path) -> Shown:
    """A document that displays itself in a notebook.

    Args:
        document: of a profile, a plan or a search, as Python or `--json` gives it, or the path of its file.

    Raises:
        BadInputError: it cannot be read, or is none of these.
    """
    if isinstance(document, Mapping):
        return Shown(document)
    try:
        found = json.loads(Path(document).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"'{document}': cannot be read ({error}); give a file that --json wrote") from error
    if not isinstance(found, Mapping):
        raise BadInputError(f"'{document}': is no JSON object; give a file that --json wrote")
    return Shown(found)


def profile_steps(train: Callable[[], object], *, steps: int = 60, warmup: int = 5) -> Shown:
    """Profile a training in this process.

        zftune.profile_steps(lambda: train_step(next(batches)))

    Args:
        train: takes a training step, and is called until all of them are measured; or a whole training, which takes
            several steps and is called once.
        steps: to measure.
        warmup: to discard before; the first one never counts.

    Returns:
        The profile's document, which displays itself.

    Raises:
        BadInputError: a number is not allowed.
        ProfileError: no step was measured; the sentence says why.
    """
    from zftune.profile.command.document import Ended, Seen, build_document, nothing_recorded
    from zftune.profile.command.records import measured, read_records
    from zftune.profile.sampling import Sampling

    for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0)):
        if not hasattr(value, "__index__") or value < least:  # NumPy's integers too; a notebook is not type checked
            raise BadInputError(f"{name} is {value!r}; it must be an integer of {least} or more")
    with tempfile.TemporaryDirectory(prefix="zftune-") as folder:
        with Sampling(lambda: [os.getpid()]) as sampling:
            _record(train, Path(folder), steps, warmup)
        ranks = read_records(Path(folder))
        chosen = measured(ranks)
        if not chosen:
            raise ProfileError(nothing_recorded([sys.executable], ranks, 0, warmup, Seen()))
        return Shown(build_document(chosen, Ended(None, stopped=False), sampling))


def _record(train: Callable[[], object], folder: Path, steps: int, warmup: int) -> None:
    from zftune.agent.arming import hook, make_session
    from zftune.agent.records import Settings

    session = make_session(Settings(folder, warmup, steps))
    hook(session, lambda name, call: call(sys.modules[name]) if name in sys.modules else None)
    try:
        while not session.off:
            before = session.steps
            train()
            if session.steps != before + 1:  # none: it is no training; several: it was all of it
                break
    finally:
        session.close()
        session.release()
