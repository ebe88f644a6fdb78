"""`zftune tune` in a forked process, in a world where something is wrong with the database."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zftune.store
from tests.support.zftune.tuner import killable
from zftune.cli import main as cli
from zftune.store import opening

_CAPABILITIES = 0x20080522  # the version of what `capset` takes


def tune(arguments: Sequence[str], output: str, environment: Mapping[str, str], wrong: Mapping[str, Any]) -> None:
    """Run the command; its output, and its exit code as the last line, go to a file.

    `wrong`: "powerless": permissions hold for the superuser, too; "most_bytes": of a file; "root": stands for "/" where
    mounts are read; "local": the file on a disk of this node.
    """
    os.environ.update(environment)
    with open(output, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):  # noqa: PTH123
        if wrong.get("powerless"):
            _give_up_capabilities()
        if "most_bytes" in wrong:
            resource.setrlimit(resource.RLIMIT_FSIZE, (wrong["most_bytes"], resource.RLIM_INFINITY))
        if "root" in wrong:
            vars(opening)["node_local"] = lambda uid, root: [Path(wrong["local"])]
            vars(zftune.store)["open_store"] = functools.partial(zftune.store.open_store, root=Path(wrong["root"]))
        killable.undisturbed()
        sys.argv = ["zftune", "tune", *arguments]
        try:
            cli.main()
        except SystemExit as ended:
            print(ended.code or 0)


def _give_up_capabilities() -> None:
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")
