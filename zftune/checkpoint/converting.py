"""`import_checkpoint` and `export_checkpoint`, the functions behind `zftune checkpoint`, and how their results
are written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zftune.checkpoint.ours import first_knobs, our_documents, our_state_dict, read_ours
from zftune.checkpoint.plain import plain_document, read_plain
from zftune.checkpoint.sources import LATEST, Source, load, open_source
from zftune.checkpoint.state import TrainingState
from zftune.checkpoint.zero import ds_config as ds_config_of
from zftune.checkpoint.zero import read_zero
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
            f"--output '{path}': it must be a path where nothing is yet, in a folder that exists and can be written"
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


def save_folder(documents: Mapping[str, Any], tag: str, target: Path) -> None:
    """Write a folder as DeepSpeed's engine does: a folder of that tag, and a file that says it is the latest.

    Raises:
        ZftuneError: it cannot be written; nothing is there then.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        inner = partial / tag
        inner.mkdir(parents=True)
        for name, document in documents.items():
            _save(document, inner / name)
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


_FILE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True, slots=True)
class Converted:
    """What was converted."""

    source_form: str
    target_form: str
    target: Path
    rule: str
    steps: int
    groups: int
    weights: int
    elements: int
    copied: tuple[str, ...]
    """What else a file holds, which is in the new file as it was."""
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        return {
            "schema": "zftune.checkpoint/1",
            "from": self.source_form,
            "to": self.target_form,
            "path": str(self.target),
            "rule": self.rule,
            "steps": self.steps,
            "groups": self.groups,
            "weights": self.weights,
            "elements": self.elements,
            "copied": list(self.copied),
            "notes": list(self.notes),
        }


def import_checkpoint(source: str, output: str, *, ds_config: str | None = None, trust: bool = False) -> Converted:
    """Make a checkpoint of ours from one of ZeRO-1 or ZeRO-2, or from a plain one.

    Args:
        source: DeepSpeed's folder, or a file with the fp32 masters and a torch AdamW's state.
        output: a file that ends in .pt or the like, {"model", "optimizer"}; or a folder as DeepSpeed's engine saves.
        ds_config: the DeepSpeed configuration that training goes on with, for its clipping; None: that of the source.
        trust: whether code in the source may run.

    Raises:
        BadInputError: the source cannot be converted, or something is at `output` already.
        ZftuneError: it cannot be written.
    """
    target = check_target(output)
    opened = open_source(source, trust=trust)
    if opened.form == "ours":
        raise BadInputError(f"{opened.what}: is a checkpoint of ours already; it must be ZeRO-1, ZeRO-2 or plain")
    with _reading(opened.what):
        training = read_zero(opened, trust=trust) if opened.form == "zero" else read_plain(opened.document, opened.what)
    optimizer = our_state_dict(training, first_knobs(ds_config or _own_config(opened.document)))
    if target.suffix in _FILE_SUFFIXES:
        if training.loss_scaler:
            training.notes.append(f"the loss scale, {training.loss_scaler['cur_scale']:g}, is not in a file")
        save_file({**opened.beside, "model": training.tensors(masters=False), "optimizer": optimizer}, target)
    else:
        save_folder(our_documents(training, optimizer), _tag(opened, training), target)
    return _converted(training, opened, "ours", target)


def export_checkpoint(source: str, output: str, *, model: str | None = None, trust: bool = False) -> Converted:
    """Make a plain checkpoint from one of ours; what is pending in it is applied.

    Args:
        source: a file {"model", "optimizer"}, an optimizer's own `state_dict`, or a folder of DeepSpeed's engine.
        output: a file.
        model: a file with the model's `state_dict`, where the source has none.
        trust: whether code in the source may run.

    Raises:
        BadInputError: the source cannot be converted, or something is at `output` already.
        ZftuneError: it cannot be written.
    """
    target = check_target(output)
    opened = open_source(source, trust=trust)
    if opened.form != "ours":
        raise BadInputError(f"{opened.what}: is not a checkpoint of ours: export what our optimizers saved")
    tensors = None if model is None else _model(model, trust=trust)
    with _reading(opened.what):
        training = read_ours(opened, tensors)
    save_file({**opened.beside, **plain_document(training)}, target)
    return _converted(training, opened, "plain", target)


def _converted(training: TrainingState, source: Source, target_form: str, target: Path) -> Converted:
    weights, beside = list(training.weights), tuple(map(str, source.beside))
    if beside and target.is_dir():
        training.notes.append(f"{', '.join(beside)}: left out, for which a folder of DeepSpeed's has no place")
    return Converted(
        source_form=source.form,
        target_form=target_form,
        target=target,
        rule=training.rule,
        steps=training.steps,
        groups=len(training.groups),
        weights=len(weights),
        elements=sum(weight.master.numel() for weight in weights),
        copied=() if target.is_dir() else beside,
        notes=tuple(training.notes),
    )


def _model(path: str, *, trust: bool) -> Mapping[str, torch.Tensor]:
    document = load(Path(path), trust=trust)
    if isinstance(document, Mapping):
        document = document.get("module", document.get("model", document))
    if not isinstance(document, Mapping) or not all(isinstance(value, torch.Tensor) for value in document.values()):
        raise BadInputError(f"--model '{path}': it must be a file with a model's state_dict")
    return document


def _own_config(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of the source's configuration what the first step needs; the rest may be what we refuse."""
    config = ds_config_of(document)
    wanted = {name: config[name] for name in ("gradient_clipping", "gradient_accumulation_steps") if name in config}
    return wanted if config else None


def _tag(source: Source, training: TrainingState) -> str:
    return source.tag or f"global_step{training.engine.get('global_steps', training.steps)}"


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Say of a source that something in it is not what it should be."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise BadInputError(f"{what}: is damaged or of another kind ({type(error).__name__}: {reason})") from error
