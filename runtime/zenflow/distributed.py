"""Checkpoints of training on several ranks: each writes and reads its own rows, by `torch.distributed.checkpoint`.

A folder holds the model and its optimizer, by the parameters' names, in the middle of a window too. It can be loaded on
any number of ranks, and by a single process whose model is not sharded.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from zenflow.checkpoint import OPEN
from zenflow.checkpoint_format import BY_COLUMN, HEADER, Header, read
from zenflow.errors import CheckpointError, ConfigError, RankError, ZenFlowError
from zenflow.full_state import MASTER
from zenflow.optimizer import ZenFlowOptimizer
from zenflow.sharded import Rows, local_rows

_Done = TypeVar("_Done")
_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")
"""What torch.compile and activation checkpointing put into names."""
_METADATA = ".metadata"
_ALONE = "torch.distributed is disabled"  # how torch warns that a single process is one


def save(model: nn.Module, optimizer: ZenFlowOptimizer, folder: str | os.PathLike[str]) -> None:
    """Write a model and its optimizer; to be called on all ranks, between two steps.

    Changes nothing, as `optimizer.state_dict()`. The folder appears when all ranks have written: where one fails or is
    killed, it is absent, or what it was before. Hidden folders that are left beside it then go with the next save.

    Args:
        folder: a new one on a file system that all ranks share, or an earlier checkpoint, which is replaced.

    Raises:
        CheckpointError: it could not be written, on one rank at least; the folder holds something else.
        ConfigError: the optimizer has a parameter that the model has not.
        HostEngineError: host work failed.
    """
    said, folder = f"the checkpoint {folder} was not saved", Path(folder).absolute()
    new = _beside(folder, "new")
    document = _on_all(said, lambda: _document(model, optimizer))
    document["optimizer"]["ledgers"] = tuple(_everybodys(document["optimizer"]["ledgers"]))
    try:
        _on_all(said, lambda: _make_room(folder, new), first_only=True)
        _on_all(said, lambda: _write(document, new))
        _on_all(said, lambda: _replace(folder, new), first_only=True)
    finally:
        if _rank() == 0:
            shutil.rmtree(new, ignore_errors=True)


def load(model: nn.Module, optimizer: ZenFlowOptimizer, folder: str | os.PathLike[str]) -> None:
    """Go on from what `save` wrote; to be called on all ranks.

    On as many ranks as it was saved on, bit for bit; on others the open window, what is in flight and the selection go
    on, and what follows is the same within rounding. Only the ledger begins anew there, with what is pending. Knobs in
    which this optimizer was constructed otherwise are taken up as by `ZenFlowOptimizer.load_state_dict`.

    Args:
        optimizer: of this model, with the same parameters in its groups.
        folder: that `save` wrote.

    Raises:
        CheckpointError: it cannot be read, on one rank at least, or is of another model. Nothing has changed then.
        ConfigError: a hyperparameter or a combination of knobs is not allowed, or the optimizer has a parameter that
            the model has not.
        HostMemoryError: the host has less memory.
        RankError: another rank could not load it.
    """
    said, folder = f"the checkpoint {folder} was not loaded", Path(folder).absolute()
    document = _on_all(said, lambda: _room(model, optimizer, folder))
    _on_all(said, lambda: _read(document, _whole_one(folder)))
    state = _on_all(said, lambda: _state_dict(model, optimizer, document["optimizer"]))
    _on_all(said, lambda: _check(optimizer, state))
    _on_all(said, lambda: _load_model(model, document["model"]))
    _on_all(said, lambda: optimizer.load_state_dict(state))
    optimizer.gather()  # rows that were saved as a flush leaves them are again as training had them


def read_whole(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `save` wrote, in a single process that has neither the model nor its optimizer.

    Returns the model's `state_dict`, and the optimizer's as one process has it, by the parameters' names. Raises
    CheckpointError if it cannot be read.
    """
    path = _whole_one(Path(folder).absolute())

    def everything() -> dict[str, Any]:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        room = {
            key: torch.empty(meta.size, dtype=meta.properties.dtype, device="cpu")
            if isinstance(meta, TensorStorageMetadata)
            else None
            for key, meta in _saved(path).items()
        }
        _read(room, path)
        return room

    found = _on_all(f"the checkpoint {folder} was not read", everything)
    groups = [{**group, "param_names": group["params"]} for group in found["optimizer.groups"]]
    state: dict[str, Any] = {}
    for name in _flat([group["params"] for group in groups]):
        begin = f"optimizer.state.{name}."
        own = {key.removeprefix(begin): value for key, value in found.items() if key.startswith(begin)}
        logs = {name: _numbered(own, name) for name in ("log", "shown")}
        state[name] = {key: value for key, value in own.items() if "." not in key} | logs
    model = {key.removeprefix("model."): value for key, value in found.items() if key.startswith("model.")}
    return model, {"state": state, "param_groups": groups}


def _numbered(tensors: Mapping[str, Any], name: str) -> tuple[torch.Tensor, ...]:
    numbers = sorted(int(key.rpartition(".")[2]) for key in tensors if key.startswith(f"{name}."))
    return tuple(tensors[f"{name}.{number}"].flatten(1) for number in numbers)


# --- what is written and read ----------------------------------------------------------------------------------------


def _document(model: nn.Module, optimizer: ZenFlowOptimizer) -> dict[str, Any]:
    """What this rank writes; tensors that are no DTensors, and all other things, are written by the first rank."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    names = _flat(_names(model, optimizer))
    with _without(OPEN):
        state_dict = optimizer.state_dict()
    groups = [{**group, "params": [names[key] for key in group["params"]]} for group in state_dict["param_groups"]]
    header = Header.from_json(groups[0][HEADER])
    ledgers = {name: weight.ledger for name, weight in zip(names, header.weights, strict=True)}
    state = {
        name: _by_number(tensors, parameter)
        for name, tensors, parameter in zip(names, state_dict["state"].values(), optimizer.rows, strict=True)
    }
    own = {"state": state, "groups": tuple(groups), "mesh": _mesh(optimizer), "ledgers": ledgers}
    return {"model": get_model_state_dict(model), "optimizer": own}


def _by_number(tensors: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """A whole parameter's log as a sharded one has it."""
    found = dict(tensors)
    for name in ("log", "shown"):
        if isinstance(found.get(name), tuple):
            shape = parameter.shape[:-1]
            found[name] = {
                str(number): part.reshape(-1, *shape) if shape.numel() == part.shape[1] else part
                for number, part in enumerate(found[name])
            }
    return found


def _room(model: nn.Module, optimizer: ZenFlowOptimizer, folder: Path) -> dict[str, Any]:
    """A document of what this rank reads, whose tensors are to be filled."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    found = _saved(_whole_one(folder))
    weights = {name: _empty_like(value) for name, value in get_model_state_dict(model).items()}
    names = _flat(_names(model, optimizer))
    state = {
        name: _room_of(f"optimizer.state.{name}", found, parameter, (MASTER, *optimizer.rule.moment_names))
        for name, parameter in zip(names, optimizer.rows, strict=True)
    }
    return {"model": weights, "optimizer": {"state": state, "groups": (), "mesh": (), "ledgers": ()}}


def _saved(path: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if not (path / _METADATA).is_file():
        raise CheckpointError("it is no checkpoint that zenflow.distributed.save() wrote")
    found: dict[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
    if "optimizer.groups" not in found:
        raise CheckpointError("it holds no optimizer of zenflow: load a folder that zenflow.distributed.save() wrote")
    return found


def _room_of(where: str, found: Mapping[str, Any], parameter: nn.Parameter, streams: Sequence[str]) -> dict[str, Any]:
    room: dict[str, Any] = {}
    for name in (*streams, *BY_COLUMN, "shape"):
        if (meta := found.get(f"{where}.{name}")) is None:
            continue
        if isinstance(parameter, Rows) and name in streams:
            _require_shape(f"{where}.{name}", meta, parameter.whole.shape)
            room[name] = parameter.wrapped(torch.empty(parameter.shape, dtype=meta.properties.dtype, device="cpu"))
        else:
            room[name] = torch.empty(meta.size, dtype=meta.properties.dtype, device="cpu")
    for name in ("log", "shown"):
        room[name] = {}
        while (meta := found.get(f"{where}.{name}.{len(room[name])}")) is not None:
            key = str(len(room[name]))
            if isinstance(parameter, Rows):
                _require_shape(f"{where}.{name}.{key}", meta, (meta.size[0], *parameter.whole.shape[:-1]))
                shape = (meta.size[0], *parameter.shape[:-1])
                columns = torch.empty(shape, dtype=meta.properties.dtype, device="cpu")
                room[name][key] = parameter.wrapped_columns(columns)
            else:
                room[name][key] = torch.empty(meta.size, dtype=meta.properties.dtype, device="cpu")
    return room


def _require_shape(where: str, meta: Any, shape: tuple[int, ...]) -> None:
    if tuple(meta.size) != tuple(shape):
        raise CheckpointError(f"{where} is {list(meta.size)}, the parameter {list(shape)}: it is of another model")


def _empty_like(value: Any) -> Any:
    """Room beside the model, which stays as it is until everything has been read."""
    if not isinstance(value, torch.Tensor):
        return value
    empty = torch.empty_like(local_rows(value), device="cpu")
    if not hasattr(value, "to_local"):
        return empty
    from torch.distributed.tensor import DTensor

    return DTensor(empty, cast(DTensor, value)._spec, requires_grad=False)


def _state_dict(model: nn.Module, optimizer: ZenFlowOptimizer, found: Mapping[str, Any]) -> dict[str, Any]:
    names, saved = _names(model, optimizer), found["groups"]
    theirs: list[list[str]] = [group["params"] for group in saved]
    all_names, all_theirs = _flat(names), _flat(theirs)
    if [sorted(of_group) for of_group in theirs] != [sorted(of_group) for of_group in names]:
        differing = sorted({*all_names} ^ {*all_theirs}) or ["the same parameters in other groups"]
        raise CheckpointError(f"its groups differ from the optimizer's by {differing[0]}; they must be the same")
    header = Header.from_json(saved[0].get(HEADER))
    by_name = dict(zip(all_theirs, header.weights, strict=True))
    mesh = _mesh(optimizer)
    ledgers = found["ledgers"][_rank() if mesh else 0] if found["mesh"] == mesh else {}
    weights = [replace(by_name[name], ledger=ledgers.get(name, [])) for name in all_names]
    groups = [{**group, "params": own} for group, own in zip(saved, names, strict=True)]
    groups[0][HEADER] = replace(header, weights=weights).to_json()
    state = {
        name: _as_here(found["state"][name], parameter)
        for name, parameter in zip(all_names, optimizer.rows, strict=True)
    }
    return {"state": state, "param_groups": groups}


def _as_here(tensors: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """The log of a whole parameter as its `state_dict` has it."""
    found = dict(tensors)
    for name in ("log", "shown") if not isinstance(parameter, Rows) else ():
        found[name] = tuple(found[name][str(number)].flatten(1) for number in range(len(found[name])))
    return found


def _check(optimizer: ZenFlowOptimizer, state: Mapping[str, Any]) -> None:
    """Refuse what `load_state_dict` would, while the model is what it was."""
    rows = iter(optimizer.rows)
    read(
        state,
        [{**group, "params": [next(rows) for _ in group["params"]]} for group in optimizer.param_groups],
        optimizer.rule,
    )


def _load_model(model: nn.Module, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(model, state)


# --- names and ranks -------------------------------------------------------------------------------------------------


def _parameters(optimizer: ZenFlowOptimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _mesh(optimizer: ZenFlowOptimizer) -> tuple[int, ...]:
    """How many ranks have rows, and replicas of them; none of whole parameters."""
    sharded = [rows.whole for rows in optimizer.rows if isinstance(rows, Rows)]
    return tuple(sharded[0].device_mesh.shape) if sharded else ()


def _names(model: nn.Module, optimizer: ZenFlowOptimizer) -> list[list[str]]:
    """The model's name of each parameter, by group; raises ConfigError where it has none."""
    inside = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    known: dict[int, str] = {}
    for name, parameter in inside.named_parameters():
        known[id(parameter)] = _WRAPPERS.sub("", name)
    for parameter in _parameters(optimizer):
        if id(parameter) not in known:
            raise ConfigError(f"a parameter of shape {tuple(parameter.shape)} is in the optimizer and not in the model")
    return [[known[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _flat(names: list[list[str]]) -> list[str]:
    return [name for of_group in names for name in of_group]


def _rank() -> int:
    return torch.distributed.get_rank() if _together() else 0


def _together() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _everybodys(mine: Any) -> list[Any]:
    if not _together():
        return [mine]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    return found


def _on_all(said: str, do: Callable[[], _Done], *, first_only: bool = False) -> _Done:
    """Do something on all ranks, or fail on all; `said` is how a sentence about a failure begins.

    Raises CheckpointError if a rank has failed; where it was this one and by an error of zenflow's, that one.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    done: Any = None
    error: BaseException | None = None
    try:
        if not first_only or _rank() == 0:
            done = do()
    except CheckpointException as failed:  # which all ranks get
        error = failed.failures[_rank()][0] if _rank() in failed.failures else None
    except Exception as failed:  # noqa: BLE001 - is told to all
        error = failed
    told = _everybodys(None if error is None or isinstance(error, RankError) else _sentence(error))
    failures = {rank: text for rank, text in enumerate(told) if text is not None}
    if isinstance(error, ZenFlowError) and not isinstance(error, CheckpointError):
        raise error
    if failures:
        sentences = {*failures.values()}
        each = (f"on rank {rank} {text}" for rank, text in failures.items())
        raise CheckpointError(f"{said}: {sentences.pop() if len(sentences) == 1 else ', '.join(each)}") from error
    return cast(_Done, done)


def _sentence(error: BaseException) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, ZenFlowError):
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


# --- files -----------------------------------------------------------------------------------------------------------


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{what}")


def _whole_one(folder: Path) -> Path:
    """The folder; where a process was killed while it replaced it, what it was before."""
    old = _beside(folder, "old")
    return old if old.exists() and not folder.exists() else folder


def _make_room(folder: Path, new: Path) -> None:
    if folder.exists() and any(one.name != _METADATA and one.suffix != ".distcp" for one in folder.iterdir()):
        raise CheckpointError("the folder holds something else than a checkpoint: choose a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(new, ignore_errors=True)
    if (before := _whole_one(folder)) != folder:
        before.rename(folder)
    new.mkdir()


def _replace(folder: Path, new: Path) -> None:
    old = _beside(folder, "old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    opened = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
    shutil.rmtree(old, ignore_errors=True)


def _write(document: dict[str, Any], folder: Path) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with _without(_ALONE):
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # which has rows of all parameters
        save(document, storage_writer=FileSystemWriter(folder), planner=planner)


def _read(document: dict[str, Any], folder: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with _without(_ALONE):
        load(document, storage_reader=FileSystemReader(folder))


@contextmanager
def _without(warning: str) -> Iterator[None]:
    """Without a warning that begins like that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=re.escape(warning))
        yield
