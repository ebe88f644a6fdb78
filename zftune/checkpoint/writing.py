"""Checkpoints that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zftune.checkpoint.rest import LATEST, Rest
from zftune.errors import BadInputError, ZftuneError


def check_target(path: str) -> Path:
    """Where a checkpoint is to be written.

    Raises:
        BadInputError: something is there already, or its folder is missing or cannot be written.
    """
    target = Path(path)
    try:
        ok = not target.exists() and target.parent.is_dir() and os.access(target.parent, os.W_OK)
    except OSError:  # a name that is too long
        ok = False
    if not ok:
        raise BadInputError(
            f"--output '{path}': allowed is a path where nothing is yet, in a folder that exists and can be written"
        )
    return target


def save_file(document: Any, target: Path) -> None:
    """Write a file.

    Raises:
        ZftuneError: it cannot be written; nothing is there then.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        _save(document, partial)
        partial.replace(target)
    except (OSError, RuntimeError) as error:
        raise _unwritten(target, error) from error
    finally:
        partial.unlink(missing_ok=True)


def save_folder(documents: Mapping[str, Any], tag: str, target: Path, rest: Rest) -> None:
    """Write a folder as DeepSpeed's engine does: a folder of that tag, and a file that says it is the latest.

    Args:
        documents: by file name.
        tag: the inner folder's name.
        target: the outer folder.
        rest: what else belongs into it.

    Raises:
        ZftuneError: it cannot be written; nothing is there then.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        inner = partial / tag
        inner.mkdir(parents=True)
        for name, document in documents.items():
            _save(document, inner / name)
        rest.copy_to(partial)
        (partial / LATEST).write_text(tag, encoding="utf-8")
        partial.replace(target)
    except (OSError, RuntimeError) as error:
        raise _unwritten(target, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _save(document: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(document, file)
        file.flush()
        os.fsync(file.fileno())


def _unwritten(target: Path, error: Exception) -> ZftuneError:
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    return ZftuneError(f"--output '{target}': cannot be written ({reason})")
