"""A checkpoint's file or folder: which form lies there, and how it is loaded."""

from __future__ import annotations

import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeGuard

import torch

from zenflow import CheckpointError
from zenflow.distributed import read_whole
from zftune.errors import BadInputError

LATEST = "latest"


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
        trust: whether code in it may run.

    Raises:
        BadInputError: it cannot be read, is truncated, or holds objects that it takes trust to read.
    """
    try:
        with path.open("rb"):
            mapped = zipfile.is_zipfile(path)
    except OSError as error:
        raise BadInputError(f"FROM '{path}': cannot be read ({error.strerror})") from error
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
            f"FROM '{path}': holds an object of {found[1]}, not tensors and plain data alone; "
            "give --trust if you know who wrote it, for reading it may run code"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise _damaged(path) from error


def _damaged(path: Path) -> BadInputError:
    return BadInputError(f"FROM '{path}': is truncated or damaged; it must be a whole file that torch.save wrote")


HEADER = "zenflow"
"""In `param_groups[0]` of what our optimizers save."""
IN_FOLDER, STEPS, FOLDER = "in_folder", "steps", "zenflow"
"""What an engine's file says of an optimizer whose state lies in a folder beside it, by rows; and that folder."""
MODEL_STATES = "mp_rank_00_model_states.pt"

_FORMS = "it must be a folder that DeepSpeed's engine saved, or a file with a model and its optimizer"
_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_?optim_states\.pt")


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that is known by its form."""

    form: Literal["zero", "ours", "plain"]
    what: str
    document: Mapping[str, Any]
    """`mp_rank_00_model_states.pt`, or the file."""
    parts: tuple[Path, ...] = ()
    tag: str | None = None
    """The inner folder's name; None of a file, and where the inner folder was given."""
    beside: Mapping[str, Any] = field(default_factory=dict)
    """What else a file holds, such as a scheduler's state."""


def open_source(path: str, *, trust: bool) -> Source:
    """Find out what lies at a path.

    Args:
        path: a checkpoint's file or folder; of a folder the latest, or one tag's folder in it.
        trust: whether code in the files may run.

    Raises:
        BadInputError: nothing that can be converted.
    """
    place, what = Path(path), f"FROM '{path}'"
    if place.is_dir():
        tag = _latest(place, what)
        if tag is None:
            return _open_folder(place, what, trust=trust)
        return replace(_open_folder(place / tag, what, trust=trust), tag=tag)
    if not place.is_file():
        raise BadInputError(f"{what}: is not there; {_FORMS}")
    document = load(place, trust=trust)
    if isinstance(document, Mapping) and {"state", "param_groups"} <= document.keys():
        document = {"optimizer": document}
    optimizer = document.get("optimizer") if isinstance(document, Mapping) else None
    if not _is_optimizer(optimizer):
        raise BadInputError(f'{what}: holds no optimizer\'s state_dict under "optimizer"; {_FORMS}')
    beside = {name: value for name, value in document.items() if name not in ("model", "module", "optimizer")}
    if HEADER in optimizer["param_groups"][0]:
        return Source("ours", what, document, beside=beside)
    if not isinstance(document.get("model"), Mapping):
        raise BadInputError(f'{what}: holds no "model": it must be the state_dict with the fp32 masters')
    return Source("plain", what, document, beside=beside)


def model_of(document: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """The model's state_dict in a document, under DeepSpeed's name for it or ours.

    Raises:
        BadInputError: there is none.
    """
    model = document.get("module", document.get("model"))
    if not isinstance(model, Mapping):
        raise BadInputError(f"{what}: holds no model beside the optimizer: give --model FILE")
    return model


def _latest(folder: Path, what: str) -> str | None:
    """The name of the inner folder that is to be converted; None: it is this one."""
    latest = folder / LATEST
    if not latest.is_file():
        return None
    tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    if tag != Path(tag).name or tag == os.pardir:  # a folder of that name will be written
        raise BadInputError(f"{what}: its latest is '{tag}'; it must be the name of a folder in it")
    if not tag or not (folder / tag).is_dir():
        raise BadInputError(f"{what}: its latest is '{tag}', which is not there")
    return tag


def _open_folder(folder: Path, what: str, *, trust: bool) -> Source:
    names = sorted(path.name for path in folder.iterdir())
    if any(name.startswith("zero_pp_rank_") and name.endswith("model_states.pt") for name in names):
        raise BadInputError(f"{what}: is of ZeRO stage 3; it must be of stage 1 or 2")
    if "mp_rank_01_model_states.pt" in names or any(name.startswith(("layer_", "expert_")) for name in names):
        raise BadInputError(f"{what}: is of tensor, pipeline or expert parallel training, not data parallel")
    if MODEL_STATES not in names:
        raise BadInputError(f"{what}: holds no {MODEL_STATES}; {_FORMS}")
    document = load(folder / MODEL_STATES, trust=trust)
    if not isinstance(document, Mapping) or not isinstance(document.get("module"), Mapping):
        raise BadInputError(f'{what}: {MODEL_STATES} holds no "module"; {_FORMS}')
    optimizer = document.get("optimizer")
    if isinstance(optimizer, Mapping) and IN_FOLDER in optimizer:
        return Source("ours", what, {**document, "optimizer": _by_rows(folder / FOLDER, what, trust=trust)})
    if _is_optimizer(optimizer) and HEADER in optimizer["param_groups"][0]:
        return Source("ours", what, document)
    if optimizer is not None:
        raise BadInputError(f"{what}: is of ZeRO stage 0 with another optimizer; it must be of stage 1 or 2, or ours")
    ranks = {int(found[1]): folder / name for name in names if (found := _RANK.fullmatch(name))}
    if sorted(ranks) != list(range(len(ranks))) or not ranks:
        have = ", ".join(map(str, sorted(ranks))) or "none"
        raise BadInputError(f"{what}: has the optim_states of ranks {have}; it must have those of all ranks")
    return Source("zero", what, document, tuple(ranks[rank] for rank in sorted(ranks)))


def _by_rows(folder: Path, what: str, *, trust: bool) -> dict[str, Any]:
    if not trust:  # torch.distributed.checkpoint reads its index by pickle
        raise BadInputError(
            f"{what}: its optimizer lies by rows in the folder {FOLDER}: give --trust if you know who wrote "
            "it, for reading it may run code"
        )
    try:
        return read_whole(folder)[1]
    except CheckpointError as error:
        raise BadInputError(f"{what}: {error}") from error


def _is_optimizer(found: object) -> TypeGuard[Mapping[str, Any]]:
    if not isinstance(found, Mapping) or not {"state", "param_groups"} <= found.keys():
        return False
    groups = found["param_groups"]
    return isinstance(groups, list) and bool(groups) and all(isinstance(g, Mapping) and "params" in g for g in groups)
