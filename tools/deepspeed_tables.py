"""Write down what a version of DeepSpeed takes in a ds_config, by looking at its models and by asking it.

    python tools/deepspeed_tables.py FOLDER...    each with a DeepSpeed, unpacked from its source distribution

Run it for new versions: it adds them to zftune/ds_config/tables.json. Each has a process of its own.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import inspect
import json
import logging
import os
import subprocess
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zftune.ds_config.tables import ASKED, KINDS, PATH, RELATIONS, WORDS
from zftune.integrations.deepspeed import asking
from zftune.integrations.deepspeed.verdict import BATCH, CHECKS

_SAFE: dict[str, Any] = {"train_batch_size": 8}
_UNHEARD = "unheard_of"
_BOUNDS = ("ge", "gt", "le", "lt", "multiple_of")
_SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_NEEDED = {"total_num_steps": 100, "cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}


def main() -> None:
    """Read each folder's version, and add it to the tables."""
    tables: dict[str, Any] = {"parts": {}, "versions": {}}
    if PATH.exists():
        tables = json.loads(PATH.read_text())
    for folder in sys.argv[1:]:
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": folder}
        words = [sys.executable, __file__, "--here"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{folder}: {done.stderr[-3000:]}")
        version, table = json.loads(done.stdout.splitlines()[-1])
        tables["versions"][version] = {name: _keep(tables["parts"], part) for name, part in table.items()}
        sys.stderr.write(f"{version}\n")
    used = {digest for version in tables["versions"].values() for digest in version.values()}
    tables["parts"] = {digest: part for digest, part in sorted(tables["parts"].items()) if digest in used}
    order = sorted(tables["versions"].items(), key=lambda item: [int(part) for part in item[0].split(".")])
    tables["versions"] = dict(order)
    PATH.write_text(json.dumps(tables, separators=(",", ":"), sort_keys=False) + "\n")


def _keep(parts: dict[str, Any], part: Any) -> str:
    """Versions have most of it in common."""
    text = json.dumps(part, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    parts[digest] = json.loads(text)
    return digest


def here() -> None:
    """Tell of the version that is imported."""
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed

        table = _table()
    sys.stdout.write(json.dumps([deepspeed.__version__.partition("+")[0].strip(), table]) + "\n")


def _table() -> dict[str, Any]:
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    names = _names_read({}, ())
    models: dict[str, Any] = {}
    sections: dict[str, str] = {}
    plain: dict[str, Any] = {}
    for name in sorted(names - {*ASKED, *BATCH, "sequence_parallel_size", "optimizer", "scheduler"}):
        _look((name,), models, sections, plain)
    for name in _SCHEDULERS:
        plain |= {f"scheduler.{name}.{key}": value for key, value in _scheduler(name).items()}
    found: dict[str, Any] = {f"model {name}": model for name, model in models.items()}
    unheard = {check for model in models.values() for check in model["checks"]} - set(CHECKS)
    if unheard:
        sys.exit(f"zftune/integrations/deepspeed/verdict.py knows nothing of {', '.join(sorted(unheard))}")
    for name in ("optimizer", "scheduler"):
        plain[name] = _taken((name,))
    return {
        **found,
        "sections": sections,
        "plain": plain,
        "names": sorted(names),
        "optimizers": _optimizers(),
        "own_optimizers": sorted(DEEPSPEED_OPTIMIZERS),
        "removed": _removed(sections),
        "relations": [name for name, config in RELATIONS.items() if asking.first_error(config, 1) is not None],
    }


def _look(path: tuple[str, ...], models: dict[str, Any], sections: dict[str, str], plain: dict[str, Any]) -> None:
    """A setting: a section that a model reads, one that is read by plain code, or a value."""
    kind, taken = _model_of(path), _taken(path)
    if len(taken["kinds"]) < len(KINDS) or taken.get("needs"):
        plain[".".join(path)] = taken
    if kind is not None:
        sections[".".join(path)] = kind.__name__
        _describe(kind, models)
    elif len(path) < 3 and ("object" in taken["kinds"] or "needs" in taken):
        for child in sorted(_names_read(taken.get("needs", {}), path)):
            _look((*path, child), models, sections, plain)


def _model_of(path: tuple[str, ...]) -> Any:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel
    from pydantic import ValidationError

    error = asking.first_error(_with(path, {_UNHEARD: 1}), 1)
    if not isinstance(error, ValidationError) or error.errors()[0]["type"] != "extra_forbidden":
        return None
    kind = next(kind for kind in _below(DeepSpeedConfigModel) if kind.__name__ == error.title)
    for name in error.errors()[0]["loc"][:-1]:  # a section of the model's
        inner = kind.model_fields[name].annotation
        kind = next(one for one in (inner, *typing.get_args(inner)) if hasattr(one, "model_fields"))
    return kind


def _below(kind: Any) -> Iterator[Any]:
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)


def _taken(path: tuple[str, ...]) -> dict[str, Any]:
    """Which kinds of value are taken, and which words."""
    found: dict[str, Any] = {"kinds": [kind for kind, value in KINDS.items() if _takes(path, value)]}
    if "word" not in found["kinds"]:
        words = [word for word in WORDS if _takes(path, word)]
        if words:
            found["words"] = words
            found["folds"] = all(_takes(path, word.upper()) and _takes(path, word.title()) for word in words)
    if "object" not in found["kinds"] and _takes(path, {"enabled": False}):
        found["needs"] = {"enabled": False}
    return found


def _takes(path: tuple[str, ...], value: Any) -> bool:
    return asking.first_error(_with(path, value), 1) is None


def _with(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(_SAFE))
    section = config
    for name in path[:-1]:
        section = section.setdefault(name, {"enabled": False} if name in ("amp", "progressive_layer_drop") else {})
    section[path[-1]] = value
    return config


class _Recording(dict[str, Any]):
    """A section that notes the names which are asked for."""

    def __init__(self, values: Mapping[str, Any], seen: set[str]) -> None:
        super().__init__(values)
        self.seen = seen

    def get(self, key: Any, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> _Recording:
        return _Recording(self, self.seen)

    def __deepcopy__(self, memo: Any) -> _Recording:
        return self


def _names_read(values: Mapping[str, Any], path: tuple[str, ...]) -> set[str]:
    seen: set[str] = set()
    section = _Recording(values if path else _SAFE, seen)
    config = section if not path else {**_with(path, section)}
    with contextlib.suppress(Exception):
        asking._read(config, 1)
    return seen - set(ASKED if not path else ())


def _describe(kind: Any, models: dict[str, Any]) -> None:
    if kind.__name__ in models:
        return
    models[kind.__name__] = {}
    fields = {}
    for name, field in kind.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        one = {
            "type": _type(field.annotation, models),
            "bounds": {
                word: getattr(bound, word) for bound in field.metadata for word in _BOUNDS if hasattr(bound, word)
            },
            "alias": field.alias,
            "required": field.is_required() or None,
            "default": _default(field),
            "replaced_by": extra.get("new_param")
            if extra.get("deprecated") and extra.get("set_new_param", True)
            else None,
        }
        fields[name] = {key: value for key, value in one.items() if value is not None and value != {}}
    decorators = kind.__pydantic_decorators__
    checks = [*decorators.field_validators, *decorators.model_validators]
    models[kind.__name__] = {"fields": fields, "checks": sorted(checks)}


def _default(field: Any) -> Any:
    if field.is_required() or field.default_factory is not None:
        return None
    value = field.default.value if isinstance(field.default, enum.Enum) else field.default
    return value if isinstance(value, (bool, int, float, str)) else None


def _type(annotation: Any, models: dict[str, Any]) -> Any:
    """As `zftune.ds_config.tables` builds it again."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Union or type(annotation).__name__ == "UnionType":
        return {"any_of": [_type(one, models) for one in inner]}
    if origin is typing.Literal:
        return {"literal": list(inner)}
    if origin in (list, dict):
        return {origin.__name__: [_type(one, models) for one in inner]}
    if inspect.isclass(annotation) and issubclass(annotation, DeepSpeedConfigModel):
        _describe(annotation, models)
        return {"model": annotation.__name__}
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        base = next((one.__name__ for one in (int, str) if one in annotation.__mro__), None)
        return {"enum": [member.value for member in annotation], "base": base}
    known = {type(None): "none", bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "dict",
             tuple: "tuple", object: "object", typing.Any: "object", Path: "path"}  # fmt: skip
    return known.get(annotation, "other")


def _removed(sections: Mapping[str, str]) -> list[str]:
    """Settings that other versions had in a section, and that this one refuses whatever they say, were it "auto"."""
    tables: dict[str, Any] = json.loads(PATH.read_text()) if PATH.exists() else {"versions": {}}
    found = set()
    for digests in tables["versions"].values():
        parts = {name: tables["parts"][digest] for name, digest in digests.items()}
        for dotted, model in parts["sections"].items():
            if dotted in sections:
                found |= {f"{dotted}.{name}" for name in parts[f"model {model}"]["fields"]}
    return sorted(dotted for dotted in found if not _takes(tuple(dotted.split(".")), "auto"))


def _scheduler(name: str) -> dict[str, Any]:
    """Its settings, and what each takes."""
    from deepspeed.runtime import lr_schedules

    if not hasattr(lr_schedules, name):
        return {}
    parameters = list(inspect.signature(getattr(lr_schedules, name)).parameters.values())[1:]
    needed = {one.name: _NEEDED[one.name] for one in parameters if one.default is inspect.Parameter.empty}
    found: dict[str, Any] = {}
    for one in parameters:
        taken = [
            kind
            for kind, value in KINDS.items()
            if asking.first_error(
                {**_SAFE, "scheduler": {"type": name, "params": {**needed, one.name: value}}}, 1
            ) is None
        ]  # fmt: skip
        found[one.name] = {"kinds": taken, **({"required": True} if one.name in needed else {})}
    return found


def _optimizers() -> dict[str, Any]:
    """The settings of each of its own, and of torch's that its names stand for."""
    import deepspeed
    import torch

    kinds = {
        "cpu adam": deepspeed.ops.adam.DeepSpeedCPUAdam,
        "fused adam": deepspeed.ops.adam.FusedAdam,
        "cpu adagrad": deepspeed.ops.adagrad.DeepSpeedCPUAdagrad,
        "cpu lion": deepspeed.ops.lion.DeepSpeedCPULion,
        "fused lion": deepspeed.ops.lion.FusedLion,
        "lamb": deepspeed.ops.lamb.FusedLamb,
    }
    found = {name: list(inspect.signature(kind).parameters)[1:] for name, kind in kinds.items()}
    for name, kind in vars(torch.optim).items():
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            found[f"torch {name}"] = list(inspect.signature(kind).parameters)[1:]
    return found


if __name__ == "__main__":
    here() if sys.argv[1:] == ["--here"] else main()
