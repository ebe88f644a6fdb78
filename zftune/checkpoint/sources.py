"""What lies at a path: which of the forms, by what is in it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeGuard

from zenflow import CheckpointError
from zenflow.distributed import read_whole
from zftune.checkpoint.loading import load
from zftune.checkpoint.rest import LATEST
from zftune.errors import BadInputError

HEADER = "zenflow"
"""In `param_groups[0]` of what our optimizers save."""
IN_FOLDER, STEPS, FOLDER = "in_folder", "steps", "zenflow"
"""What an engine's file says of an optimizer whose state lies in a folder beside it, by rows; and that folder."""
MODEL_STATES = "mp_rank_00_model_states.pt"

_FORMS = "allowed are a folder that DeepSpeed's engine saved, and a file with a model and its optimizer"
_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_?optim_states\.pt")


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that is known by its form."""

    form: Literal["zero", "ours", "plain"]
    what: str
    """What the user calls it."""
    document: Mapping[str, Any]
    """`mp_rank_00_model_states.pt`, or the file."""
    parts: tuple[Path, ...] = ()
    """Each rank's file, of ZeRO."""
    folder: Path | None = None
    """Where more may lie; None of a file, and where the inner folder was given."""
    tag: str | None = None
    """The inner folder's name then."""


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
        return replace(_open_folder(place / tag, what, trust=trust), folder=place, tag=tag)
    if not place.is_file():
        raise BadInputError(f"{what}: is not there, {_FORMS}")
    document = load(place, trust=trust)
    if isinstance(document, Mapping) and {"state", "param_groups"} <= document.keys():
        document = {"optimizer": document}
    optimizer = document.get("optimizer") if isinstance(document, Mapping) else None
    if not _is_optimizer(optimizer):
        raise BadInputError(f'{what}: holds no optimizer\'s state_dict under "optimizer", {_FORMS}')
    if HEADER in optimizer["param_groups"][0]:
        return Source("ours", what, document)
    if not isinstance(document.get("model"), Mapping):
        raise BadInputError(f'{what}: holds no "model", allowed is its state_dict with the fp32 masters')
    return Source("plain", what, document)


def model_of(document: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """The model's state_dict in a document, under DeepSpeed's name for it or ours.

    Raises:
        BadInputError: there is none.
    """
    model = document.get("module", document.get("model"))
    if not isinstance(model, Mapping):
        raise BadInputError(f"{what}: holds no model, allowed is one beside the optimizer, or --model FILE")
    return model


def _latest(folder: Path, what: str) -> str | None:
    """The name of the inner folder that is to be converted; None: it is this one."""
    latest = folder / LATEST
    if not latest.is_file():
        return None
    tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    if tag != Path(tag).name or tag == os.pardir:  # a folder of that name will be written
        raise BadInputError(f"{what}: its latest is '{tag}', allowed is the name of a folder in it")
    if not tag or not (folder / tag).is_dir():
        raise BadInputError(f"{what}: its latest is '{tag}', which is not there, allowed is a whole checkpoint")
    return tag


def _open_folder(folder: Path, what: str, *, trust: bool) -> Source:
    names = sorted(path.name for path in folder.iterdir())
    if any(name.startswith("zero_pp_rank_") and name.endswith("model_states.pt") for name in names):
        raise BadInputError(f"{what}: is of ZeRO stage 3, allowed are stages 1 and 2")
    if "mp_rank_01_model_states.pt" in names or any(name.startswith(("layer_", "expert_")) for name in names):
        raise BadInputError(f"{what}: is of tensor, pipeline or expert parallel training, allowed is data parallel")
    if MODEL_STATES not in names:
        raise BadInputError(f"{what}: holds no {MODEL_STATES}, {_FORMS}")
    document = load(folder / MODEL_STATES, trust=trust)
    if not isinstance(document, Mapping) or not isinstance(document.get("module"), Mapping):
        raise BadInputError(f'{what}: {MODEL_STATES} holds no "module", {_FORMS}')
    optimizer = document.get("optimizer")
    if isinstance(optimizer, Mapping) and IN_FOLDER in optimizer:
        return Source("ours", what, {**document, "optimizer": _by_rows(folder / FOLDER, what, trust=trust)})
    if _is_optimizer(optimizer) and HEADER in optimizer["param_groups"][0]:
        return Source("ours", what, document)
    if optimizer is not None:
        raise BadInputError(f"{what}: is of ZeRO stage 0 with another optimizer, allowed are stages 1 and 2, and ours")
    ranks = {int(found[1]): folder / name for name in names if (found := _RANK.fullmatch(name))}
    if sorted(ranks) != list(range(len(ranks))) or not ranks:
        have = ", ".join(map(str, sorted(ranks))) or "none"
        raise BadInputError(f"{what}: has the optim_states of ranks {have}, allowed are those of all ranks")
    return Source("zero", what, document, tuple(ranks[rank] for rank in sorted(ranks)))


def _by_rows(folder: Path, what: str, *, trust: bool) -> dict[str, Any]:
    if not trust:  # torch.distributed.checkpoint reads its index by pickle
        raise BadInputError(
            f"{what}: its optimizer lies by rows in the folder {FOLDER}, allowed with --trust, if you know who wrote "
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
