"""Files that others saved with torch: read without running what is in them, unless they are trusted."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from zftune.errors import BadInputError


class Opaque:
    """Stands for an object of DeepSpeed's whose class is not needed; its attributes are there."""


_ALLOWED: tuple[tuple[Any, str], ...] = (
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (Opaque, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Opaque, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Opaque, "deepspeed.utils.tensor_fragment.fragment_address"),
)
"""What DeepSpeed's files hold besides tensors and plain data, and what it is read as."""
_REFUSED = re.compile(r"GLOBAL ([\w.]+)")


def load(path: Path, *, trust: bool) -> Any:
    """Read a file that `torch.save` wrote, to the CPU; large tensors are read when they are looked at.

    Args:
        path: the file.
        trust: whether code in it may run.

    Raises:
        BadInputError: it cannot be read, is truncated, or holds objects that it takes trust to read.
    """
    try:
        with path.open("rb"):
            mapped = zipfile.is_zipfile(path)
    except OSError as error:
        raise BadInputError(f"FROM '{path}': cannot be read ({error.strerror}), allowed is a checkpoint") from error
    try:
        with torch.serialization.safe_globals(list(_ALLOWED)), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of pickle protocols
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=not trust)
    except ImportError:
        raise
    except pickle.UnpicklingError as error:
        found = _REFUSED.search(str(error))
        if found is None:
            raise _damaged(path) from error
        raise BadInputError(
            f"FROM '{path}': holds an object of {found[1]}, allowed are tensors and plain data; "
            "give --trust if you know who wrote it, for reading it may run code"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise _damaged(path) from error


def _damaged(path: Path) -> BadInputError:
    return BadInputError(f"FROM '{path}': is truncated or damaged, allowed is a whole file that torch.save wrote")
